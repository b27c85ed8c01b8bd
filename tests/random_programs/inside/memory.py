"""Hold memory of every kind: private, shared, of files, reserved, protected, advised."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from base import LIBC, Holding, call, digest, in_child, make, same

PAGE = mmap.PAGESIZE
NONE, READ, WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
SHARED, PRIVATE, ANON = mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
FIXED, NORESERVE, GROWSDOWN = 0x10, 0x4000, 0x100
DONTNEED, DONTFORK, MERGEABLE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, WIPEONFORK = 4, 10, 12, 14, 15, 16, 18


def map_pages(pages: int, prot: int = WRITE, flags: int = PRIVATE | ANON, fd: int = -1) -> int:
    return call("mmap", None, pages * PAGE, prot, flags, fd, 0)


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


class _Area(Holding):
    """Hold `pages` at `address`, of which some have been written."""

    address, pages = 0, 0
    mark = b""

    def fill(self) -> None:
        for page in self.rng.sample(range(self.pages), self.rng.randint(1, self.pages)):
            write(self.address + page * PAGE + self.rng.randrange(PAGE - 64), self.data(64))

    def content(self) -> bytes:
        return read(self.address, self.pages * PAGE)

    def report(self) -> object:
        return digest(self.content())

    def use(self) -> None:
        self.mark = os.urandom(8)
        write(self.address, self.mark)

    def check(self) -> None:
        if os.getpid() == self.owner:
            same(read(self.address, 8), self.mark, "memory written after the restore")


class AnonPrivate(_Area):
    """Private anonymous memory, sparsely written; children have copies of it."""

    def build(self) -> None:
        self.pages = self.rng.choice([1, 3, 16, 200])
        self.address = map_pages(self.pages)
        self.fill()


class AnonUntouched(_Area):
    def build(self) -> None:
        self.pages = self.rng.choice([1, 1000])
        self.address = map_pages(self.pages)

    def report(self) -> object:
        return None  # reading would touch it


class Reservation(_Area):
    """A large PROT_NONE reservation with a few pages in use, as browsers and garbage collectors make."""

    def build(self) -> None:
        self.pages = 8
        self.size = self.rng.choice([1, 40, 300]) << 30
        self.base = map_pages(self.size // PAGE, NONE, PRIVATE | ANON | NORESERVE)
        self.address = self.base + self.rng.randrange(self.size // PAGE - 16) * PAGE
        call("mprotect", self.address, self.pages * PAGE, WRITE)
        self.fill()

    def use(self) -> None:
        super().use()
        more = self.address + self.pages * PAGE
        call("mprotect", more, PAGE, WRITE)
        same(read(more, PAGE), bytes(PAGE), "a page of the reservation taken after the restore")
        write(more, b"in use")


class Untouchable(_Area):
    """Written pages that were then made PROT_NONE, or read-only."""

    def build(self) -> None:
        self.pages = 6
        self.address = map_pages(self.pages)
        self.fill()
        self.written = self.content()
        call("mprotect", self.address, 2 * PAGE, NONE)
        call("mprotect", self.address + 2 * PAGE, 2 * PAGE, READ)

    def report(self) -> object:
        return digest(read(self.address + 2 * PAGE, 4 * PAGE))

    def use(self) -> None:
        call("mprotect", self.address, self.pages * PAGE, WRITE)
        same(digest(self.content()), digest(self.written), "pages that were PROT_NONE")
        super().use()


class AnonShared(_Area):
    """Shared anonymous memory: what the owner writes, each child sees."""

    def build(self) -> None:
        self.pages = self.rng.choice([1, 20])
        self.address = map_pages(self.pages, flags=SHARED | ANON)
        self.fill()

    def use(self) -> None:
        write(self.address, b"written!")

    def check(self) -> None:
        same(read(self.address, 8), b"written!", "shared memory")


class Memfd(_Area):
    """A memfd: mapped, sealed, with an offset."""

    def build(self) -> None:
        self.pages = self.rng.choice([1, 30])
        self.fd = os.memfd_create("rand", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.pages * PAGE)
        self.address = map_pages(self.pages, flags=self.rng.choice([SHARED, PRIVATE]), fd=self.fd)
        os.pwrite(self.fd, self.data(PAGE), 0)
        self.fill()
        self.seals = self.rng.choice([0, 2, 6])
        fcntl.fcntl(self.fd, 1033, self.seals)
        os.lseek(self.fd, 77, os.SEEK_SET)

    def report(self) -> object:
        return [digest(self.content()), fcntl.fcntl(self.fd, 1034), os.lseek(self.fd, 0, os.SEEK_CUR)]

    def check(self) -> None:
        same(os.pread(self.fd, 5, 0) != b"", True, "the memfd's content")


class FilePrivate(_Area):
    """A file mapped private, with some pages copied by writing."""

    def build(self) -> None:
        self.pages = self.rng.choice([2, 30])
        with open(make(self.path("private"), self.data(self.pages * PAGE)), "r+b") as file:
            self.address = map_pages(self.pages, WRITE, PRIVATE, file.fileno())
        self.fill()


class FileShared(_Area):
    """A file mapped shared, dirty, never synced."""

    def build(self) -> None:
        self.pages = self.rng.choice([2, 30])
        where = self.rng.choice([self.path("shared"), f"/dev/shm/{os.path.basename(self.place)}"])
        self.where = make(where, self.data(self.pages * PAGE))
        with open(self.where, "r+b") as file:
            self.address = map_pages(self.pages, WRITE, SHARED, file.fileno())
        self.fill()

    def use(self) -> None:
        write(self.address, b"written!")

    def check(self) -> None:
        with open(self.where, "rb") as file:
            same(file.read(8), b"written!", "the mapped file")


class FileDeleted(_Area):
    """A file mapped, then deleted."""

    def build(self) -> None:
        self.pages = 4
        where = make(self.path("gone"), self.data(self.pages * PAGE))
        with open(where, "r+b") as file:
            self.address = map_pages(self.pages, WRITE, self.rng.choice([SHARED, PRIVATE]), file.fileno())
        os.unlink(where)
        self.fill()


class _Advised(_Area):
    advice, size = 0, 8

    def build(self) -> None:
        self.pages = self.size
        self.address = map_pages(self.pages)
        self.fill()
        call("madvise", self.address, self.pages * PAGE, self.advice)


class WipeOnFork(_Advised):
    advice = WIPEONFORK

    def inherited(self) -> None:
        self.owner = -1

    def check(self) -> None:
        super().check()
        if self.owner == os.getpid():
            wiped = in_child(lambda: read(self.address, PAGE) != bytes(PAGE))
            same(wiped, 0, "a child born after the restore reads what MADV_WIPEONFORK wipes")


class DontFork(_Advised):
    advice = DONTFORK

    def inherited(self) -> None:
        self.owner = -1

    def report(self) -> object:
        return super().report() if self.owner == os.getpid() else "not mapped"


class HugePages(_Advised):
    advice, size = HUGEPAGE, 1024


class NoHugePages(_Advised):
    advice, size = NOHUGEPAGE, 1024


class DontDump(_Advised):
    advice = DONTDUMP


class Mergeable(_Advised):
    advice = MERGEABLE


class Holes(_Area):
    """Written memory, parts of which were given back."""

    def build(self) -> None:
        self.pages = 40
        self.address = map_pages(self.pages)
        write(self.address, self.data(self.pages * PAGE))
        for page in self.rng.sample(range(self.pages), 15):
            call("madvise", self.address + page * PAGE, PAGE, DONTNEED)


class Locked(_Area):
    def build(self) -> None:
        self.pages = 4
        self.address = map_pages(self.pages)
        self.fill()
        call("mlock", self.address, self.pages * PAGE)


class GrowsDown(_Area):
    """A stack-like mapping that has grown."""

    def build(self) -> None:
        room = map_pages(600, NONE)
        call("munmap", room, 600 * PAGE)
        top = room + 590 * PAGE
        got = call("mmap", top, PAGE, WRITE, FIXED | PRIVATE | ANON | GROWSDOWN, -1, 0)
        same(got, top, "address")
        self.pages = 3
        for page in range(3):
            write(top - page * PAGE, self.data(64))
        self.address = top - 2 * PAGE


class SystemVMemory(_Area):
    def build(self) -> None:
        self.pages = self.rng.choice([1, 10])
        LIBC.shmat.restype = ctypes.c_void_p
        LIBC.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        self.memory = call("shmget", self.rng.randrange(1 << 30), self.pages * PAGE, 0o1600)
        self.address = call("shmat", self.memory, None, 0)
        self.fill()
