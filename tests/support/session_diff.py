"""Compare what is visible of a session from outside before and after: what is lost, what appeared.

    before = compare.settled(host.pids(session))
    ...                                              # checkpoint, restore
    compare.same(before, compare.settled(host.pids(session)))

Everything is reported in the session's own numbers (its pids), one fact a line. Inode
and device numbers are another host's by nature: descriptors that share a pipe, a
socket or a description are identified by a label instead, given in order of appearance.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.patience import bound

# Not the session's: a file handle and an inode number name a file of one host; a count-down counts.
# "settime flags": a timerfd set to a point in time is set again to what was left of it (criu/image/timerfds.py).
_FDINFO_SKIP = ("mnt_id", "ino", "it_value", "ticks", "eventfd-id", "Pid", "NSpid", "settime flags")
_STATUS = (
    *("Name", "Umask", "Uid", "Gid", "Groups", "NSpgid", "NSsid", "Threads", "SigPnd", "ShdPnd", "SigIgn", "SigCgt"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed_list"),
)
_TTY = "/proc/{pid}/root/dev/pts/{name}"
Facts = dict[str, str]


@dataclass
class _Reader:
    """Read one process tree. `pids` maps the pids of the host to those of the session."""

    pids: dict[int, int]
    labels: dict[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    sockets: dict[str, str] = field(default_factory=dict)

    def label(self, kind: str, number: str) -> str:
        known = sum(1 for key in self.labels if key.startswith(f"{kind}:"))
        return self.labels.setdefault(f"{kind}:{number}", f"{kind}#{known}")

    def inner(self, pid: int) -> int:
        return self.pids.get(pid, pid if pid <= 0 else -1)


def look(pids: Iterable[int]) -> Facts:
    """Return the facts of all these processes, numbered as in their pid namespace, as keys and values."""
    reader = _Reader({pid: int(_status(pid)["NSpid"].split()[-1]) for pid in pids})
    for pid, inner in sorted(reader.pids.items(), key=lambda pair: pair[1]):
        if inner == 1:
            _namespaces(reader, pid)
        try:
            _process(reader, pid, f"pid {inner}")
        except ProcessLookupError:
            continue  # a zombie, or ended meanwhile
    return reader.facts


def settled(read_pids: Callable[[], Iterable[int]], within: float = 10.0) -> Facts:
    """Return the facts once two successive reads are equal: nothing is being started, opened or read any more."""
    end = time.monotonic() + bound(within)
    before: Facts | None = None
    while True:
        try:
            now = look(read_pids())
        except (FileNotFoundError, ProcessLookupError):
            now = None
        if now is not None and now == before:
            return now
        assert time.monotonic() < end, f"never still: {differences(before or {}, now or {})}"
        before = now
        time.sleep(0.05)


def differences(before: Facts, after: Facts, allowed: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return what was lost and what appeared, without facts whose text matches one of the `allowed` expressions."""
    patterns = [re.compile(one) for one in allowed]

    def lines(of: Facts, other: Facts) -> list[str]:
        found = [f"{key}: {value}" for key, value in of.items() if other.get(key) != value]
        return [one for one in found if not any(pattern.search(one) for pattern in patterns)]

    return lines(before, after), lines(after, before)


def same(before: Facts, after: Facts, allowed: Iterable[str] = ()) -> None:
    lost, appeared = differences(before, after, allowed)
    assert not lost and not appeared, "\n".join(
        ["", *(f"lost      {one}" for one in lost), *(f"appeared  {one}" for one in appeared)]
    )


def _process(reader: _Reader, pid: int, name: str) -> None:
    facts, base = reader.facts, f"/proc/{pid}"
    status = _status(pid)
    inner = {"NSpgid", "NSsid"}  # of their numbers in each namespace, the innermost
    for key in _STATUS:
        facts[f"{name} {key}"] = status[key].split()[-1] if key in inner else status[key]
    stat = Path(f"{base}/stat").read_text().rpartition(")")[2].split()
    facts[f"{name} parent"] = str(reader.inner(int(stat[1])))
    facts[f"{name} foreground"] = str(reader.inner(int(stat[5])))
    facts[f"{name} stopped"] = str(stat[0] == "T")
    facts[f"{name} nice"] = f"{stat[16]}, policy {stat[38]}, rt priority {stat[37]}"
    if stat[0] in "ZX":
        facts[f"{name} zombie"] = "yes"
        return
    for one in ("cwd", "root", "exe"):
        facts[f"{name} {one}"] = os.readlink(f"{base}/{one}")
    facts[f"{name} cmdline"] = _bytes(f"{base}/cmdline")
    facts[f"{name} env"] = _bytes(f"{base}/environ")
    facts[f"{name} limits"] = _bytes(f"{base}/limits")
    facts[f"{name} oom"] = _bytes(f"{base}/oom_score_adj")
    facts[f"{name} timers"] = _timers(Path(f"{base}/timers").read_text(), reader)
    _threads(reader, pid, name)
    _maps(reader, pid, name)
    for fd in sorted(os.listdir(f"{base}/fd"), key=int):
        facts[f"{name} fd {fd}"] = _fd(reader, pid, fd)


def _threads(reader: _Reader, pid: int, name: str) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        status = _status(pid, f"task/{task}/")
        inner = status["NSpid"].split()[-1]
        reader.facts[f"{name} thread {inner}"] = f"{status['Name']} blocks {status['SigBlk']}"


@dataclass
class _Range:
    start: int
    end: int
    mode: str
    what: str
    offset: int  # -1: of no file

    def goes_on(self, mode: str, what: str, offset: int) -> bool:
        right = offset < 0 if self.offset < 0 else offset == self.offset + self.end - self.start
        return (mode, what) == (self.mode, self.what) and right


def _maps(reader: _Reader, pid: int, name: str) -> None:
    """Read mappings, with equal neighbours joined: the kernel merges and splits those as it likes."""
    joined: list[_Range] = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        where, mode, offset, _, inode, *rest = line.split(maxsplit=5)
        start, end = where.split("-")
        what = rest[0] if rest else ""
        what = what.removeprefix("/memfd:") if what == "/memfd:/dev/zero (deleted)" else what  # how CRIU makes them
        at = int(offset, 16) if int(inode) else -1
        last = joined[-1] if joined else None
        if last and last.end == int(start, 16) and last.goes_on(mode, what, at):
            last.end = int(end, 16)
        else:
            joined.append(_Range(int(start, 16), int(end, 16), mode, what, at))
    for one in joined:
        where = "" if one.offset < 0 else f"{one.offset:x} "
        reader.facts[f"{name} map {one.start:x}-{one.end:x}"] = f"{one.mode} {where}{one.what}".rstrip()


def _fd(reader: _Reader, pid: int, fd: str) -> str:
    target = os.readlink(f"/proc/{pid}/fd/{fd}")
    kind, _, number = target.partition(":[")
    if kind in ("pipe", "socket") and number:
        described = reader.sockets.get(number.rstrip("]"), "")
        target = f"{reader.label(kind, number)} {described}".rstrip()
    lines = []
    for line in Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key not in _FDINFO_SKIP:
            lines.append(_fdinfo(reader, key, value.strip()))
    return f"{target} ({', '.join(sorted(lines))})"


def _fdinfo(reader: _Reader, key: str, value: str) -> str:
    if key == "lock":  # number: kind mandatory mode pid device:inode start end
        words = value.split()
        # These belong to the open file. The number beside them is of the process that took them, which CRIU lets any of
        # the processes that share the file do; the signal of a lease goes to the file's owner (F_GETOWN).
        of_file = words[1] in ("FLOCK", "LEASE", "OFDLCK")
        taker = "" if of_file else f" by {reader.inner(int(words[4]))}"
        return f"lock {' '.join(words[1:4])}{taker} {' '.join(words[6:])}"
    if key == "tfd":
        return f"watches {value.split()[0]} " + " ".join(re.findall(r"(?:events|data):\s*\S+", value))
    if key.startswith("inotify") or value.startswith("wd:") or key == "inotify wd":
        return "inotify " + " ".join(re.findall(r"(?:wd|mask):\s*\S+", f"{key}:{value}"))
    if key == "flags":
        return f"flags {int(value, 8) & ~0o100000:o}"  # O_LARGEFILE is the kernel's own
    return f"{key} {value}"


def _timers(text: str, reader: _Reader) -> str:
    """Read what does not change while a timer runs: id, signal, target, clock."""
    kept = [line for line in text.splitlines() if line.startswith(("ID", "signal", "ClockID"))]
    notify = re.findall(r"notify: (\S+)/(\S+)\.(\d+)", text)
    return "; ".join(
        [*(line.split("/")[0] for line in kept), *(f"{a}/{b}.{reader.inner(int(c))}" for a, b, c in notify)]
    )


def _namespaces(reader: _Reader, pid: int) -> None:
    """Read what the whole session has once: mounts, sockets, terminals."""
    facts = reader.facts
    for number, line in enumerate(Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape").splitlines()):
        left, _, right = line.partition(" - ")
        words, (kind, _, options) = left.split(), right.split(maxsplit=2)
        options = re.sub(r"(?:lower|upper|work)dir[+]?=[^,]*,?", "", options)
        options = options.replace(",xino=on", "")  # shown only where the layers are on several file systems
        facts[f"mount {words[4]} {number if words[4] == '/' else ''}".rstrip()] = f"{kind} {words[5]} {options}"
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for line in _table(pid, family):
            reader.sockets[line[9]] = f"{family} {line[1]} {line[2]} state {line[3]} queued {line[4]}"
    for line in _table(pid, "unix"):
        path = line[7] if len(line) > 7 else ""
        reader.sockets[line[6]] = f"unix type {line[4]} state {line[5]} {path}".rstrip()
    facts["hostname"] = _hostname(pid)
    for name in sorted(os.listdir(_TTY.format(pid=pid, name=""))):
        if name.isdecimal():
            facts[f"tty {name}"] = _terminal(_TTY.format(pid=pid, name=name))


def _terminal(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        size = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
        return f"{size} {termios.tcgetattr(fd)}"
    finally:
        os.close(fd)


def _hostname(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/uts").partition(":")[0]


def _table(pid: int, name: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    except FileNotFoundError:
        return []


def _status(pid: int, task: str = "") -> dict[str, str]:
    found = {}
    for line in Path(f"/proc/{pid}/{task}status").read_text().splitlines():
        key, _, value = line.partition(":")
        found[key] = " ".join(value.split())
    return found


def _bytes(path: str) -> str:
    return Path(path).read_bytes().decode("utf-8", "backslashreplace").strip()
