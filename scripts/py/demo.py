"""The story scripts/demo tells, as a list of steps; it checks what it claims and fails when that is not so.

demo_place      a host of the demo's own: directories, settings, and the cleaning up
demo_move       the second half: two hosts, and a session that moves between them
demo_terminal   a client in a real PTY, as a person would have one
demo_say        how it looks
STEPS           what happens; a step gets the Demo and leaves what it learnt there
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import demo_move
from demo_place import Place, Trouble
from demo_say import Say
from demo_terminal import Terminal

NAME = "counter"
COUNT = "while :; do echo $((++i)); sleep .1; done"
WATCH = 1.2
AWAY = 0.8


@dataclass
class Demo:
    """What the steps share."""

    place: Place
    say: Say
    pid: int = 0
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    timings: list[tuple[str, float]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of the byte that no client has seen yet."""
        return sum(len(data) for _, data in self.seen)

    def attach(self, *options: str) -> Terminal:
        self.say.command(f"cmdop-migrate attach {' '.join([NAME, *options])}")
        return Terminal(self.place.argv("attach", NAME, *options), self.place.environment)


def start(demo: Demo) -> None:
    """Start a session that counts"""
    demo.say.command(f"cmdop-migrate run -d --name {NAME} -- \\", f"    bash -c '{COUNT}'")
    started, seconds = demo.place.json("run", "-d", "--name", NAME, "--", "bash", "-c", COUNT)
    demo.pid = started["pid"]
    demo.timings.append(("session started", seconds))
    demo.say.result(f"session {started['session'][:12]}, process {demo.pid}, running after {seconds:.2f} s")


def watch_and_die(demo: Demo) -> None:
    """A client attaches, and is killed with -9 in mid-stream"""
    client = demo.attach()
    with demo.say.stream() as show:
        client.watch(WATCH, show)
    client.kill()
    # A killed client cannot say how far it came; its screen can. The last line break is its guard's, which
    # put the terminal right.
    shown = client.seen.removesuffix(b"\r\r\n")
    demo.seen.append(("first client, killed", shown))
    demo.timings.append(("first client's first byte", client.first_byte()))
    demo.say.result(f"killed: client {client.pid}. Its screen had bytes 0 to {demo.end}.")
    if not client.is_sane():
        raise Trouble("the killed client left its terminal in raw mode")
    demo.say.result("Its terminal is as it was before.")


def detached(demo: Demo) -> None:
    """No client is attached; the session keeps counting"""
    before = demo.end
    time.sleep(AWAY)
    facts, _ = demo.place.json("show", NAME)
    if facts["pid"] != demo.pid:
        raise Trouble(f"the session is another process now: {facts['pid']}")
    if facts["clients"] != 0:
        raise Trouble(f"{facts['clients']} clients are attached, where none should be")
    missed, _ = demo.place.json("output", NAME, "--from", str(before))
    numbers = missed["data"].split()
    if not numbers:
        raise Trouble("the session did not run while no client was attached")
    demo.say.result(f"{AWAY} s later it has printed {numbers[0]} to {numbers[-1]}, with no client there to read them;")
    demo.say.result(f"it is still process {demo.pid}.")


def come_back(demo: Demo) -> None:
    """Another client continues at the byte where the first one died"""
    client = demo.attach("--from", str(demo.end))
    with demo.say.stream() as show:
        client.watch(WATCH, show)
    _detach(demo, client, demo.end)
    demo.timings.append(("second client's first byte", client.first_byte()))
    demo.seen.append(("second client, detached", client.session_bytes(demo.end)))


def whole_screen(demo: Demo) -> None:
    """Without a number, a client gets the whole screen back"""
    client = demo.attach("--read-only")
    with demo.say.stream(brief=True) as show:
        client.watch(0.5, show)
    _detach(demo, client, 0)
    if not client.session_bytes(0).startswith(b"".join(data for _, data in demo.seen)):
        raise Trouble("the replayed screen is not what the clients before saw")


def park(demo: Demo) -> None:
    """Checkpoint it to the store: no process of it is left"""
    demo.say.command(f"cmdop-migrate checkpoint {NAME}")
    parked, seconds = demo.place.json("checkpoint", NAME)
    demo.timings.append(("checkpoint, in all", seconds))
    demo.timings.append(("  of it frozen", parked["frozen_s"]))
    facts, _ = demo.place.json("show", NAME)
    if facts["state"] != "parked" or facts["tree"] or os.path.exists(f"/proc/{demo.pid}"):
        raise Trouble(f"the session is {facts['state']}, where it should be parked, with no process left")
    size = parked["bytes"]["new"] / 1024
    demo.say.result(f"parked as {parked['checkpoint'][:12]}, {size:.0f} KiB sealed in the store; no process is left.")


def bring_back(demo: Demo) -> None:
    """Restore it, and continue where the second client left"""
    demo.say.command(f"cmdop-migrate restore {NAME}")
    restored, seconds = demo.place.json("restore", NAME)
    demo.timings.append(("restore", seconds))
    demo.say.result(f"running again: process {restored['pid']}, incarnation {restored['token']}")
    if restored["token"] != 2:
        raise Trouble(f"the restored session has token {restored['token']}, not 2")
    client = demo.attach("--from", str(demo.end))
    with demo.say.stream() as show:
        client.watch(WATCH, show)
    _detach(demo, client, demo.end)
    demo.seen.append(("third client, after restore", client.session_bytes(demo.end)))


def _detach(demo: Demo, client: Terminal, begin: int) -> None:
    client.type(b"\x1cd")
    client.finish()
    demo.say.result(f"Ctrl-\\ d: detached at byte {begin + len(client.session_bytes(begin))}.")


def check(demo: Demo) -> None:
    """Is any number missing, or doubled?"""
    record, _ = demo.place.json("output", NAME, "--from", "0")
    together = b"".join(data for _, data in demo.seen)
    at = 0
    for who, data in demo.seen:
        demo.say.row(who, f"bytes {at} to {at + len(data)}", f"numbers {_first_and_last(together, at, len(data))}")
        at += len(data)
    numbers = [int(line) for line in together.split(b"\r\n")[:-1]]
    if numbers != list(range(1, len(numbers) + 1)):
        raise Trouble("the numbers that the clients saw are not 1, 2, 3 …")
    if together != record["data"].encode()[: len(together)]:
        raise Trouble("what the clients saw is not what the session printed")
    demo.say.good(f"1 to {numbers[-1]}: none missing, none doubled, across kill -9, detach and restore.")


def _first_and_last(text: bytes, begin: int, length: int) -> str:
    """Which numbers began in this part of the text."""
    starts = [0, *(at + 2 for at in range(len(text)) if text.startswith(b"\r\n", at))]
    mine = [number for number, at in enumerate(starts, 1) if begin <= at < begin + length]
    return f"{mine[0]} to {mine[-1]}" if mine else "none"


def end(demo: Demo) -> None:
    """End it; and what took how long"""
    demo.say.command(f"cmdop-migrate kill {NAME}")
    _, seconds = demo.place.json("kill", NAME)
    demo.timings.append(("session ended", seconds))
    for what, took in demo.timings:
        demo.say.row(what, f"{took:.2f} s")


STEPS: list[Callable[[Demo], None]] = [
    start,
    watch_and_die,
    detached,
    come_back,
    whole_screen,
    park,
    bring_back,
    check,
    end,
]


def main() -> int:
    if os.geteuid() != 0:
        print("demo: sessions need root. Run: sudo scripts/demo", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda which, _: sys.exit(128 + which))
    say, began = Say(), time.monotonic()
    say.title("cmdop-migrate: a live session outlives its clients, processes and host")
    try:
        with Place() as place:
            demo = Demo(place, say)
            for index, step in enumerate(STEPS, 1):
                say.step(index, step.__doc__ or step.__name__)
                step(demo)
        demo_move.play(say, len(STEPS) + 1)
    except Trouble as trouble:
        say.bad(str(trouble))
        return 1
    except KeyboardInterrupt:
        say.bad("interrupted; what it had started is gone")
        return 130
    say.end(f"All of it held, in {time.monotonic() - began:.1f} s; its sessions, hosts and files are gone again.")
    say.next(
        "Now you:",
        ".venv/bin/cmdop-migrate run --name work -- bash",
        ".venv/bin/cmdop-migrate attach work",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
