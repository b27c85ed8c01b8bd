"""Hold open files: offsets, flags, locks, deleted, linked, renamed, directories."""

from __future__ import annotations

import fcntl
import os
import struct

from base import Holding, Wrong, call, digest, in_child, make, read_all, same

OWNER_PID = 1
SET_OWN_EX, GET_OWN_EX, SET_SIG, GET_SIG = 15, 16, 10, 11
OFD_SETLK, OFD_GETLK = 37, 36
FLAGS = [os.O_RDWR, os.O_RDWR | os.O_APPEND, os.O_RDONLY, os.O_RDWR | os.O_SYNC, os.O_RDWR | os.O_NONBLOCK]


class _File(Holding):
    fd = -1
    before = b""

    def describe(self) -> list[object]:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_TMPFILE  # it mattered to open() alone, and is not carried
        return [os.lseek(self.fd, 0, os.SEEK_CUR), flags, os.fstat(self.fd).st_nlink]

    def report(self) -> object:
        return [*self.describe(), digest(read_all(self.fd))]

    def use(self) -> None:
        """Append a word, as its owner; children that share the description see the offset move."""
        self.before = read_all(self.fd)
        if fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            os.lseek(self.fd, 0, os.SEEK_END)
            os.write(self.fd, b"new")

    def check(self) -> None:
        if fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
            same(read_all(self.fd)[-3:], b"new", "what was appended")
            same(os.lseek(self.fd, 0, os.SEEK_CUR), os.fstat(self.fd).st_size, "the shared offset")


class Regular(_File):
    def build(self) -> None:
        where = self.rng.choice(
            [self.path("file"), f"/dev/shm/{os.path.basename(self.place)}.f", f"/tmp/{os.path.basename(self.place)}"]
        )
        self.where = make(where, self.data(self.rng.choice([0, 10, 100_000])))
        self.fd = os.open(self.where, self.rng.choice(FLAGS))
        os.lseek(self.fd, self.rng.randrange(200_000), os.SEEK_SET)
        self.copies = [os.dup(self.fd) for _ in range(self.rng.randrange(3))]

    def check(self) -> None:
        super().check()
        for one in self.copies:
            same(os.lseek(one, 0, os.SEEK_CUR), os.lseek(self.fd, 0, os.SEEK_CUR), "the offset of a duplicate")
        with open(self.where, "rb") as file:
            same(digest(file.read()), digest(read_all(self.fd)), "the file by its name")


class Deleted(_File):
    def build(self) -> None:
        where = make(self.path("deleted"), self.data(self.rng.choice([0, 5000])))
        self.fd = os.open(where, os.O_RDWR)
        os.unlink(where)
        os.lseek(self.fd, 33, os.SEEK_SET)


class DeletedSparse(_File):
    """Longer than may be carried, smaller than that on disk."""

    def build(self) -> None:
        where = make(self.path("sparse"), b"")
        self.fd = os.open(where, os.O_RDWR)
        os.unlink(where)
        os.ftruncate(self.fd, 3 << 30)
        os.pwrite(self.fd, self.data(4000), 2 << 30)

    def report(self) -> object:
        status = os.fstat(self.fd)
        return [*self.describe(), status.st_size, digest(os.pread(self.fd, 8192, (2 << 30) - 1000))]

    def use(self) -> None:
        os.pwrite(self.fd, b"new", 5)

    def check(self) -> None:
        same(os.pread(self.fd, 3, 5), b"new", "what was written")


class Replaced(_File):
    """A deleted file whose name another file has now."""

    def build(self) -> None:
        where = make(self.path("replaced"), self.data(500))
        self.fd = os.open(where, os.O_RDWR)
        os.unlink(where)
        make(where, b"another")
        self.where = where

    def check(self) -> None:
        super().check()
        with open(self.where, "rb") as file:
            same(file.read(), b"another", "the file that has the name now")


class LinkedUnlinked(_File):
    """A file opened by a name that is gone, with another name that is not."""

    def build(self) -> None:
        first, self.second = make(self.path("one"), self.data(500)), self.path("two")
        self.fd = os.open(first, os.O_RDWR)
        os.link(first, self.second)
        os.unlink(first)
        self.gone = first

    def check(self) -> None:
        super().check()
        same(os.path.exists(self.gone), False, "the removed name exists again")
        with open(self.second, "rb") as file:
            same(digest(file.read()), digest(read_all(self.fd)), "the file by its other name")


class Linked(_File):
    def build(self) -> None:
        first, self.second = make(self.path("one"), self.data(500)), self.path("two")
        os.link(first, self.second)
        self.fd = os.open(first, os.O_RDWR)

    def check(self) -> None:
        super().check()
        with open(self.second, "rb") as file:
            same(digest(file.read()), digest(read_all(self.fd)), "the file by its other name")


class Renamed(_File):
    def build(self) -> None:
        where = make(self.path("old"), self.data(500))
        self.fd = os.open(where, os.O_RDWR)
        os.rename(where, self.path("new"))


class Unnamed(_File):
    """O_TMPFILE: never had a name."""

    def build(self) -> None:
        self.fd = os.open(os.path.dirname(self.place), os.O_RDWR | os.O_TMPFILE, 0o600)
        os.write(self.fd, self.data(700))


class HostFile(_File):
    """A file of the host's, which the session did not change."""

    def build(self) -> None:
        self.fd = os.open(self.rng.choice(["/etc/passwd", "/bin/ls"]), os.O_RDONLY)
        os.lseek(self.fd, 20, os.SEEK_SET)


class PathOnly(Holding):
    """O_PATH of a file and of a directory."""

    def build(self) -> None:
        where = make(self.path("opath"), b"x")
        self.fds = [os.open(where, os.O_PATH), os.open(os.path.dirname(where), os.O_PATH)]

    def report(self) -> object:
        return [[fcntl.fcntl(fd, fcntl.F_GETFL), os.readlink(f"/proc/self/fd/{fd}")] for fd in self.fds]

    def check(self) -> None:
        with open(f"/proc/self/fd/{self.fds[0]}") as file:
            same(file.read(), "x", "the file, opened through O_PATH")


class Directory(Holding):
    def build(self) -> None:
        self.where = self.path("dir")
        os.mkdir(self.where)
        for n in range(5):
            make(f"{self.where}/{n}", b"")
        self.fd = os.open(self.where, os.O_RDONLY | os.O_DIRECTORY)

    def report(self) -> object:
        return sorted(os.listdir(f"/proc/self/fd/{self.fd}"))

    def use(self) -> None:
        os.close(os.open("more", os.O_CREAT | os.O_WRONLY, dir_fd=self.fd))

    def check(self) -> None:
        same(os.path.exists(f"{self.where}/more"), True, "a file made through the directory's descriptor")


class DirectoryDeleted(Holding):
    def build(self) -> None:
        os.mkdir(self.path("dir"))
        self.fd = os.open(self.path("dir"), os.O_RDONLY | os.O_DIRECTORY)
        os.rmdir(self.path("dir"))

    def report(self) -> object:
        return [os.fstat(self.fd).st_nlink, os.listdir(self.fd)]


class UsualDevices(Holding):
    def build(self) -> None:
        names = ["null", "zero", "full", "random", "urandom"]
        self.fds = [os.open(f"/dev/{one}", os.O_RDWR) for one in self.rng.sample(names, 3)]

    def report(self) -> object:
        return [[os.fstat(fd).st_rdev, fcntl.fcntl(fd, fcntl.F_GETFL)] for fd in self.fds]


class ProcFiles(Holding):
    def build(self) -> None:
        names = [
            "/proc/self/status",
            "/proc/meminfo",
            "/proc/self/fd",
            "/proc/self",
            "/proc/1/comm",
            "/proc/sys/kernel/osrelease",
        ]
        self.fds = [os.open(one, os.O_RDONLY) for one in self.rng.sample(names, 3)]

    def report(self) -> object:
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in self.fds]


class NamespaceFiles(Holding):
    def build(self) -> None:
        self.fds = [
            os.open(f"/proc/self/ns/{one}", os.O_RDONLY) for one in self.rng.sample(["net", "mnt", "uts", "ipc"], 2)
        ]

    def report(self) -> object:
        return [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in self.fds]


class SignalOwner(Holding):
    """F_SETOWN and F_SETSIG."""

    def build(self) -> None:
        self.fd, self.other = os.pipe()
        fcntl.fcntl(self.fd, SET_OWN_EX, struct.pack("ii", OWNER_PID, os.getpid()))
        fcntl.fcntl(self.fd, SET_SIG, 40)

    def report(self) -> object:
        kind, pid = struct.unpack("ii", fcntl.fcntl(self.fd, GET_OWN_EX, b"\0" * 8))
        return [kind, pid, fcntl.fcntl(self.fd, GET_SIG)]


def _taken(path: str, take: object) -> int:
    try:
        with open(path, "r+b") as file:
            take(file)  # type: ignore[operator]
    except BlockingIOError:
        return 11
    return 0


class PosixLock(Holding):
    def build(self) -> None:
        self.where = make(self.path("ranged"), b"x" * 100)
        self.fd = os.open(self.where, os.O_RDWR)
        self.exclusive = self.rng.choice([fcntl.LOCK_EX, fcntl.LOCK_SH])
        fcntl.lockf(self.fd, self.exclusive, 10, 5)

    def check(self) -> None:
        if os.getpid() == self.owner:
            found = in_child(lambda: _taken(self.where, lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7)))
            same(found, 11, "a POSIX lock is held")
            free = in_child(lambda: _taken(self.where, lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 50)))
            same(free, 0, "what a POSIX lock leaves free")


class Flock(Holding):
    def build(self) -> None:
        self.where = make(self.path("flocked"), b"")
        self.fd = os.open(self.where, os.O_RDWR)
        fcntl.flock(self.fd, self.rng.choice([fcntl.LOCK_EX, fcntl.LOCK_SH]))

    def check(self) -> None:
        found = in_child(lambda: _taken(self.where, lambda f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)))
        same(found, 11, "a flock is held")


class OfdLock(Holding):
    def build(self) -> None:
        self.where = make(self.path("ofd"), b"x" * 100)
        self.fd = os.open(self.where, os.O_RDWR)
        fcntl.fcntl(self.fd, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 3, 4, 0))

    def check(self) -> None:
        other = os.open(self.where, os.O_RDWR)
        try:
            fcntl.fcntl(other, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 5, 1, 0))
        except BlockingIOError:
            return
        finally:
            os.close(other)
        raise Wrong("an open file description lock is not held any more")


class FileLease(Holding):
    """F_SETLEASE: its holder is notified by a signal when another process opens the file to write to it."""

    kind = fcntl.F_RDLCK

    def build(self) -> None:
        self.fd = os.open(make(self.path("leased"), b"x"), os.O_RDONLY)
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, self.kind)

    def report(self) -> object:
        return fcntl.fcntl(self.fd, fcntl.F_GETLEASE), fcntl.fcntl(self.fd, fcntl.F_GETOWN)  # who gets the signal


class WriteLease(FileLease):
    """A lease whose holder gets the signal when another process opens the file at all; unhandled, it is fatal."""

    kind = fcntl.F_WRLCK


class Inotify(Holding):
    """Watches on directories, with files beside them that are not watched."""

    on_files = False

    def build(self) -> None:
        self.fd = call("inotify_init1", os.O_NONBLOCK)
        self.paths = []
        for n in range(self.rng.randint(1, 3)):
            where = self.path(f"watched{n}")
            if self.on_files:
                make(where, b"x")
            else:
                os.makedirs(where)
            self.paths.append(where)
            call("inotify_add_watch", self.fd, where.encode(), 0x2 | 0x100)

    def report(self) -> object:
        return self.paths

    def use(self) -> None:
        for where in self.paths:
            make(where if self.on_files else f"{where}/new", b"changed")

    def check(self) -> None:
        if os.getpid() != self.owner:
            return
        found, events = os.read(self.fd, 1 << 16), set()
        while found:
            number, _, _, length = struct.unpack("iIII", found[:16])
            events.add(number)
            found = found[16 + length :]
        same(events, set(range(1, len(self.paths) + 1)), "watches that told of a change")


class InotifyFiles(Inotify):
    on_files = True
