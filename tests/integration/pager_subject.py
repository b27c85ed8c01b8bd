"""A process with a userfaultfd on its own memory, which does to it what programs do; told apart from CRIU by nothing.

argv: socket, first address in pages, pages, seed, and how many children it has instead of all that. Prints a line for
each thing that is not as it should be, then END."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import socket
import struct
import sys
import threading
import time

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)
for name, restype in (("mmap", ctypes.c_void_p), ("mremap", ctypes.c_void_p)):
    getattr(libc, name).restype = restype
FIXED, FIXED_MOVE = 0x10, 3
FEATURES = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6  # fork, remap, remove, unmap


def pattern(number: int) -> bytes:
    """Return the content of the page with this number in the image. Every fifth is zeros."""
    return bytes(PAGE) if number % 5 == 4 else struct.pack("<Q", number * 0x9E3779B97F4A7C15 % 2**64) * (PAGE // 8)


def place(at: int, size: int) -> None:
    got = libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(size), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED, -1, 0)
    assert got == at, hex(got or 0)


def mappings() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as lines:
        return [(int(low, 16), int(high, 16)) for low, high in (line.split()[0].split("-") for line in lines)]


class Subject:
    def __init__(self, base: int, pages: int, chance: random.Random) -> None:
        self.base, self.pages, self.chance = base, pages, chance
        self.expected: dict[int, bytes] = {base + n * PAGE: pattern(base // PAGE + n) for n in range(pages)}
        self.elsewhere = base + (pages + 1024) * PAGE
        self.wrong = 0

    def check(self, addresses: list[int], who: str) -> None:
        for at in addresses:
            if ctypes.string_at(at, PAGE) != self.expected[at]:
                self.wrong += 1
                print(f"WRONG {who} {at // PAGE:#x}: {ctypes.string_at(at, 16).hex()}", flush=True)

    def some(self, count: int) -> list[int]:
        return self.chance.sample(sorted(self.expected), min(count, len(self.expected)))

    def stretch(self, most: int) -> list[int]:
        """Return neighbouring pages that are mapped."""
        start = self.chance.choice(sorted(self.expected))
        found = []
        while start in self.expected and len(found) < most:
            found.append(start)
            start += PAGE
        return found

    def write(self) -> None:
        for at in self.some(3):
            data = os.urandom(PAGE)
            ctypes.memmove(at, data, PAGE)
            self.expected[at] = data

    def give_up(self) -> None:
        found = self.stretch(40)
        assert libc.madvise(ctypes.c_void_p(found[0]), ctypes.c_size_t(len(found) * PAGE), 4) == 0
        self.expected |= dict.fromkeys(found, bytes(PAGE))

    def unmap(self) -> None:
        found = self.stretch(9)
        assert libc.munmap(ctypes.c_void_p(found[0]), ctypes.c_size_t(len(found) * PAGE)) == 0
        for at in found:
            del self.expected[at]

    def replace(self) -> None:
        """Map something else over it."""
        found = self.stretch(5)
        place(found[0], len(found) * PAGE)
        self.expected |= dict.fromkeys(found, bytes(PAGE))

    def move(self) -> None:
        found = self.stretch(70)
        end = next(high for low, high in mappings() if low <= found[0] < high)
        found = [at for at in found if at < end]  # several at once may fail half-way
        to, size = self.elsewhere, len(found) * PAGE
        self.elsewhere += size + self.chance.choice((0, PAGE))
        got = libc.mremap(
            ctypes.c_void_p(found[0]), ctypes.c_size_t(size), ctypes.c_size_t(size), FIXED_MOVE, ctypes.c_void_p(to)
        )
        assert got == to
        for at in found:
            self.expected[at - found[0] + to] = self.expected.pop(at)

    def protect(self) -> None:
        """Cut the mapping in pieces, for which there is no event."""
        found = self.stretch(3)
        libc.mprotect(ctypes.c_void_p(found[0]), ctypes.c_size_t(len(found) * PAGE), 1)
        self.check(found, "protected")
        libc.mprotect(ctypes.c_void_p(found[0]), ctypes.c_size_t(len(found) * PAGE), 3)

    def fork(self) -> None:
        hidden = self.stretch(4) if self.chance.random() < 0.3 else []
        if hidden:
            libc.madvise(ctypes.c_void_p(hidden[0]), ctypes.c_size_t(len(hidden) * PAGE), 10)  # DONTFORK
        pid = os.fork()
        if pid == 0:
            for at in hidden:
                del self.expected[at]
            self.check(self.some(60), "child")
            time.sleep(self.chance.random() * 0.1)
            self.give_up()
            self.check(self.some(200), "child, later")
            os._exit(1 if self.wrong else 0)
        if hidden:
            libc.madvise(ctypes.c_void_p(hidden[0]), ctypes.c_size_t(len(hidden) * PAGE), 11)
        children.append(pid)

    def threads(self) -> None:
        """Let several threads wait for the same pages."""
        for thread in [threading.Thread(target=self.check, args=(self.some(20), "thread")) for _ in range(3)]:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
        started.clear()


children: list[int] = []
started: list[threading.Thread] = []


def main(path: str, base: int, pages: int, seed: int, forks: int = 0) -> None:
    at = base * PAGE
    place(at, pages * PAGE)
    fd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(fd, 0xC018AA3F, bytearray(struct.pack("<QQQ", 0xAA, FEATURES, 0)))
    fcntl.ioctl(fd, 0xC020AA00, bytearray(struct.pack("<QQQQ", at, pages * PAGE, 1, 0)))
    with socket.socket(socket.AF_UNIX) as pager:
        pager.connect(path)
        pager.sendall(struct.pack("<i", -7))  # a zombie
        pager.sendall(struct.pack("<i", 42))
        socket.send_fds(pager, [b"\0"], [fd])
        os.close(fd)
        pager.sendall(struct.pack("<i", 0x52535446))
    print("RUNS", flush=True)
    sys.stdin.readline()
    subject = Subject(at, pages, random.Random(seed))
    acts = [subject.write, subject.give_up, subject.unmap, subject.replace, subject.move, subject.protect, subject.fork]
    for _ in range(forks):
        pid = os.fork()
        if pid == 0:
            subject.check(subject.some(20) if seed else [], "child")
            os._exit(1 if subject.wrong else 0)
        if os.waitpid(pid, 0)[1]:
            print("WRONG: a child", flush=True)
    for _ in range(0 if forks else 60):
        subject.chance.choice([*acts, subject.threads])()
        subject.check(subject.some(4), "now")
    print("ACTED", flush=True)
    sys.stdin.readline()
    subject.check(sorted(subject.expected), "at the end")
    for pid in children:
        if os.waitpid(pid, 0)[1]:
            print("WRONG: a child", flush=True)
    print("END", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word, 0) for word in sys.argv[2:6]))
