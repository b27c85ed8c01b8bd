"""Files that a session watches, by inotify and fanotify: changes are heard after every restore, and in a fork."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cmdop_migrate.host import talk
from tests.support.host import Host
from tests.support.program_session import WITHIN, Program

# `watch WORD…` in the way named by its first argument; `edit PATH` appends to a file and says whether that was heard.
WATCHER = r"""
import ctypes, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
INODE, MOUNT, FILESYSTEM = 0, 0x10, 0x100
MODIFY, CREATE, ON_CHILD = 0x2, 0x100, 0x08000000
def done(result):
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result
if sys.argv[1] == "inotify":
    fd = done(libc.inotify_init1(os.O_NONBLOCK))
    add = lambda path: done(libc.inotify_add_watch(fd, os.fsencode(path), MODIFY | CREATE))
else:
    fd = done(libc.fanotify_init(0x2, os.O_RDONLY))
    kind = {"inode": INODE, "mount": MOUNT, "filesystem": FILESYSTEM}[sys.argv[1]]
    mark = libc.fanotify_mark
    mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
    add = lambda path: done(mark(fd, 1 | kind, MODIFY, -100, os.fsencode(path)))
held = []
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    try:
        if word == "watch":
            for path in rest.split():
                add(path)
            print("it", "watches", flush=True)
        elif word == "tree":       # as a development server does: every directory
            for a in range(20):
                for b in range(50):
                    os.makedirs(f"{rest}/{a}/{b}")
            for place, _, _ in os.walk(rest):
                add(place)
            print("it", "watches", flush=True)
        elif word == "unlink":
            held.append(open(rest))
            os.unlink(rest)
            print("it", "unlinked", flush=True)
        elif word == "edit":
            with open(rest, "a") as file:
                file.write("more\n")
            heard = bool(select.select([fd], [], [], 5)[0])
            try:
                while os.read(fd, 65536):
                    pass
            except BlockingIOError:
                pass
            print("heard", rest, heard, flush=True)
    except (AssertionError, OSError) as error:
        print("cannot:", error, flush=True)
"""


@pytest.fixture
def of_the_host(tmp_path: Path) -> Path:
    """A regular file of the host's, which the session finds in its lower layer."""
    place = tmp_path / "project" / "src"
    place.mkdir(parents=True)
    (place / "main.js").write_text("1\n")
    return place / "main.js"


@pytest.mark.parametrize("way", ["inotify", "inode", "mount"])
def test_edits_of_watched_files_are_heard_after_two_rounds_and_in_a_fork(
    host: Host, of_the_host: Path, way: str
) -> None:
    files = [str(of_the_host), "/etc/hostname", "/var/of-the-session", "/dev/shm/in-memory"]
    if way == "mount":
        files = files[:3]
    with Program(host, "bash", "-c", f'echo 1 | tee {" ".join(files[2:])}; exec "$@"', "bash",
                 sys.executable, "-c", WATCHER, way) as program:  # fmt: skip
        program.type(f"watch {' '.join(files)}\n" if way != "mount" else "watch /\n")
        program.see("it watches")
        for number in range(3):
            for path in files:
                program.type(f"edit {path}\n")
                program.see(f"heard {path} True")
            if number < 2:
                program.through(still=False)
        host.cm_json("fork", "p", "branch")
        host.cm_json("send", "branch", f"edit {files[0]}", "--enter")
        found = talk.wait(program.records, "branch", f"heard {files[0]} True", WITHIN, program.seq)
        assert "matched" in found, talk.output(program.records, "branch", None)
        program.type(f"edit {files[1]}\n")
        program.see(f"heard {files[1]} True")
        host.cm("kill", "--signal", "KILL", "branch")


def test_watches_on_the_root_and_on_linked_directories_are_carried(host: Host, of_the_host: Path) -> None:
    """As webpack has them: every directory up to the root, and modules that are linked from elsewhere."""
    elsewhere = of_the_host.parent.parent.parent / "elsewhere" / "1" / "2" / "3"
    elsewhere.mkdir(parents=True)
    (of_the_host.parent / "modules").symlink_to(elsewhere.parent.parent.parent)
    with Program(host, sys.executable, "-c", WATCHER, "inotify", options=("--cwd", str(of_the_host.parent))) as program:
        program.type(f"watch / /etc modules/1/2/3 {of_the_host.parent}\n")
        program.see("it watches")
        for number in range(2):
            for place in ("/", "/etc/", "modules/1/2/3/"):
                program.type(f"edit {place}new{number}\n")
                program.see(f"heard {place}new{number} True")
            if not number:
                program.through(still=False)


def test_a_thousand_watched_directories_are_carried(host: Host) -> None:
    with Program(host, sys.executable, "-c", WATCHER, "inotify", options=("--cwd", "/srv")) as program:
        program.type("tree /srv/app\n")
        program.see("it watches", 60)
        program.through(still=False)
        program.type("edit /srv/app/19/49/new\n")
        program.see("heard /srv/app/19/49/new True")


@pytest.mark.parametrize(
    ("way", "words", "why"),
    [
        ("inotify", ("watch /var/gone", "unlink /var/gone"), "deleted"),
        ("inode", ("watch /dev/shm/gone", "unlink /dev/shm/gone"), "deleted"),
        ("filesystem", ("watch /",), "FAN_MARK_FILESYSTEM"),
    ],
)
def test_watches_that_cannot_be_carried_are_refused_before_the_freeze(
    host: Host, way: str, words: tuple[str, ...], why: str
) -> None:
    with Program(host, "bash", "-c", 'echo 1 | tee /var/gone /dev/shm/gone; exec "$@"', "bash",
                 sys.executable, "-c", WATCHER, way) as program:  # fmt: skip
        for word in words:
            program.type(f"{word}\n")
            program.see("it (watches|unlinked)")
        frozen = [one for one in host.events(program.session) if one["event"] == "frozen"]
        error = host.fails("checkpoint", "p", status=4, code="blocked")
        pid = max(host.pids(program.session))
        assert why in error["message"] and f"(pid {pid})" in error["message"] and "python" in error["message"]
        assert [one for one in host.events(program.session) if one["event"] == "frozen"] == frozen
        found = host.cm("--json", "plan", "p")
        assert found.returncode == 4 and why.encode() in found.stdout
        program.type("watch /etc\n")
        program.see("it watches")
