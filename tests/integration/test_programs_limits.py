"""Files of the host that are missing or other on restore, and what cannot be dumped: said, and nothing breaks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host
from tests.support.program_session import Program


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Path]:
    """A program of the host's, not of the session's: a copy of sleep."""
    place = tmp_path / "opt"
    place.mkdir(mode=0o755)
    shutil.copy(shutil.which("sleep") or "/bin/sleep", place / "tool")
    yield place / "tool"


@pytest.mark.parametrize("change", ["removed", "another"])
def test_a_mapped_file_of_the_host_comes_along(host: Host, tool: Path, change: str) -> None:
    with Program(host, "bash", "--norc", "--noediting", "-c", f"{tool} 1000 & exec bash --norc --noediting") as bash:
        bash.type("echo up\n")
        bash.see("(\n|# )up")  # behind the prompt, if what was typed came before it
        before = bash.look()
        bash.park()
        old = tool.read_bytes()
        tool.unlink()
        if change == "another":
            shutil.copy(shutil.which("true") or "/bin/true", tool)
        facts = bash.back()
        assert facts["carried"] == [str(tool)]
        assert bash.look()[f"pid {inner(before, 'tool')} exe"] == str(tool)
        assert bash.path(str(tool)).read_bytes() == old
        bash.type("pkill -x tool && echo ended\n")
        bash.see("\nended")


def inner(facts: dict[str, str], name: str) -> str:
    return next(key.split()[1] for key, value in facts.items() if key.endswith(" Name") and value == name)


def test_without_carrying_a_missing_file_is_named(host: Host, tool: Path) -> None:
    with Program(host, str(tool), "1000") as session:
        session.park("--carry", "none")
        kept = tool.read_bytes()
        tool.unlink()
        error = host.fails("restore", "p", status=4, code="blocked")
        assert str(tool) in error["message"] and "--carry" in error["hint"]
        assert host.pids(session.session) == []
        left = [one for one in host.leftovers() if not one.startswith("directory")]
        assert left == []
        tool.write_bytes(kept)
        tool.chmod(0o755)
        session.back()
        assert len(host.pids(session.session)) == 2


def test_a_log_of_the_host_that_grew_meanwhile_is_read_on(host: Host, tmp_path: Path) -> None:
    """Others write to it while the session is parked: it comes back, and has missed nothing."""
    log = tmp_path / "log"
    log.write_text("one\n")
    with Program(host, "tail", "-n", "+1", "-f", str(log)) as tail:
        tail.see("one")
        for word in ("two", "three"):
            tail.park()
            with log.open("a") as file:
                file.write(f"{word}\n")
            assert tail.back()["grown"] == [str(log)]
            tail.see(f"\n{word}")
        with log.open("a") as file:
            file.write("last\n")
        tail.see("\nlast")


@pytest.mark.parametrize("change", ["rotated", "removed"])
def test_a_log_that_is_another_now_is_taken_by_somebodys_word(host: Host, tmp_path: Path, change: str) -> None:
    """A parked session that could never come back for it would be lost."""
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    with Program(host, "bash", "--norc", "--noediting", "-c", f"exec bash --norc --noediting 7< {log}") as bash:
        bash.type("read -r a <&7; echo got $a\n")
        bash.see("\ngot one")
        bash.park()
        log.unlink()
        if change == "rotated":
            log.write_text("new\nred\n")
            log.chmod(0o600)
        error = host.fails("restore", "p", status=4, code="blocked")
        assert str(log) in error["message"] and "--accept-files" in error["hint"]
        assert bash.back("--accept-files")["accepted"] == [str(log)]
        bash.type("read -r a <&7; echo got $a.\n")
        bash.see("\ngot red\\." if change == "rotated" else "\ngot \\.")


@pytest.mark.parametrize(
    ("script", "exit_code", "says"),
    [
        ("unshare --pid --fork sleep 1000", 4, "pid namespace"),
        (
            "python3 -c 'import ctypes, time; b = ctypes.create_string_buffer(120);"
            " fd = ctypes.CDLL(None).syscall(425, 8, b); print(fd); time.sleep(1000)'",
            4,
            "io_uring",
        ),
        ("mkdir -p /mnt/x && mount -t ramfs none /mnt/x; echo", 4, "file system"),
        ("python3 -c 'import socket, time; s = socket.socket(socket.AF_VSOCK, 1, 0); time.sleep(1000)'", 4, "socket"),
        ("mknod /root/dev c 10 229; sleep 1000 < /root/dev", 4, "device"),
    ],
    ids=["nested pid namespace", "io_uring", "unknown file system", "odd socket", "device"],
)
def test_state_that_cannot_be_dumped_is_reported_and_the_session_keeps_running(
    host: Host, script: str, exit_code: int, says: str
) -> None:
    with Program(host, "bash", "--norc", "--noediting") as bash:
        bash.type(f"{script} &\n".replace("python3", sys.executable))
        bash.see(r"\[1\] \d+")
        bash.type("sleep .5; echo on\n")
        bash.see(r"(?:\n|# )on\r?\n")  # what was typed ahead is echoed before the prompt
        done = host.cm("checkpoint", "p")
        said = done.stderr.decode()
        assert done.returncode == exit_code and says in said, said
        bash.type("echo still=$((1+1))\n")
        bash.see("still=2")
