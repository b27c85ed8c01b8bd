"""The terminal across a checkpoint: input typed ahead, output numbers, the journal, window and modes, clients."""

from __future__ import annotations

import sys

import pytest

from cmdop_migrate.host import input_journal, talk
from tests.support.host import CM, Host, until
from tests.support.program_session import Program
from tests.support.pty_client import Pty

# Reads nothing until told; then all there is, and shows it.
READER = """
import os, select, sys, termios, time, tty
mode = sys.argv[1]
if mode == "raw":
    tty.setraw(0)
print("ready", flush=True)
while not os.path.exists("/root/go"):
    time.sleep(.02)
got = []
until = time.monotonic() + 1.5
while time.monotonic() < until:
    if select.select([0], [], [], .1)[0]:
        part = os.read(0, 1 << 16)
        got.append(part)
        if not part and len(got) > 20:
            break
data = b"".join(got)
print("got", got if len(data) < 99 else (len(data), len(set(data))), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("mode", "typed", "then", "got"),
    [
        ("lines", "one\rtwo\rhal", "f\r", r"\[b'one\\n', b'two\\n', b'half\\n'\]"),
        ("lines", "ab\x7fc\r\x16\x03lit\rend\x04", "\r", r"\[b'ac\\n', b'\\x03lit\\n', b'end', b'\\n'\]"),
        ("raw", "a\rb\nc\x00\x03\x04d", "e", r"\[b'a\\rb\\nc\\x00\\x03\\x04de?'(, b'e')?\]"),
        ("raw", "x" * 9000, "y", r"\(9001, 2\)"),
    ],
    ids=["half a line", "edited, escaped, end of file", "raw", "more than a terminal holds"],
)
def test_input_typed_ahead_arrives_once(host: Host, mode: str, typed: str, then: str, got: str) -> None:
    with Program(host, sys.executable, "-c", READER, mode) as reader:
        reader.see("ready")
        reader.type(typed)
        until(lambda: mode == "raw" or reader.output().count("\n") >= typed.count("\r"))
        before = reader.output()
        reader.through()
        assert reader.output() == before  # nothing is echoed a second time
        reader.type(then)
        reader.path("/root/go").touch()
        reader.see("got " + got)


def test_all_the_input_that_may_wait_moves_along(host: Host) -> None:
    """The input is of letters that take six bytes each on their way to the process that makes the checkpoint."""
    with Program(host, sys.executable, "-c", READER, "raw") as reader:
        reader.see("ready")
        for _ in range(5):
            reader.type("\u044f" * 25_000)
        reader.through()
        reader.path("/root/go").touch()
        reader.see(r"got \(250000, 2\)")


def test_typed_ahead_stays_when_the_session_runs_on(host: Host) -> None:
    with Program(host, sys.executable, "-c", READER, "lines") as reader:
        reader.see("ready")
        reader.type("one\rtwo\rhal")
        host.cm_json("checkpoint", "p", "--leave-running")
        reader.type("f\r")
        reader.path("/root/go").touch()
        reader.see(r"got \[b'one\\n', b'two\\n', b'half\\n'\]")


def test_output_numbers_and_journal_continue_after_a_restore(host: Host) -> None:
    script = "n=0; while :; do n=$((n+1)); printf '%07d\\n' $n; [ $((n % 50)) = 0 ] && sleep .01; done"
    with Program(host, "bash", "-c", script) as counter:
        counter.type("first\r")
        counter.see("0000500")
        counter.park()
        kept = talk.output(counter.records, "p", None)
        counter.back()
        first = counter.type("second\r")
        last = int(kept.data.replace(b"first\r\n", b"").split()[-1])
        counter.see(f"{last + 200:07d}")
        after = talk.output(counter.records, "p", None)
        assert after.data[: kept.end - after.start] == kept.data[after.start - kept.start :]  # each at its number
        numbers = [int(word) for word in after.data.split()[1:] if word.isdigit()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        lines = list(input_journal.journal(counter.records, counter.records.find("p")))
        assert [(one["seq"], one["text"], one["token"]) for one in lines] == [(1, "first\r", 1), (2, "second\r", 2)]
        assert first["seq"] == 2


def test_window_and_modes_stay_and_clients_are_told(host: Host) -> None:
    with Program(host, "bash", "--norc") as bash:
        with Pty([*CM, "attach", "p"], host.env(), rows=41, cols=133) as client:
            client.expect(b"bash-")
            client.type("stty -echo tostop intr ^B; stty size\r")
            client.expect(b"41 133")
            bash.park()
            client.expect(b"parked in the store")
            assert client.wait() in (0, 4)
            assert client.is_sane()
        host.cm_json("restore", "p")
        bash.type("stty size; stty -a | tr ';' '\\n' | grep -E 'intr|tostop'\n")
        bash.see(r"41 133\r\n ?intr = \^B\r\n.* tostop")
