"""Run as a program: starts argv as pid 1 of new namespaces on an overlay of the host's root, on a PTY of its own.

    python criu_launch.py SOCKET_FD BASE CGROUP COMMAND...

Sends the pid (ours) and then the PTY master down the socket. The small stand-in for the product's session code.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import termios

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = 0x20000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount uts ipc pid net
BIND, REC, PRIVATE = 0x1000, 0x4000, 1 << 18


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    check(LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def populate(root: str) -> None:
    mount(None, "/", None, REC | PRIVATE)
    mount(root, root, None, BIND | REC)
    mount("proc", f"{root}/proc", "proc")
    mount("tmpfs", f"{root}/dev", "tmpfs", 0, "mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        os.mknod(f"{root}/dev/{name}", 0o20666, os.stat(f"/dev/{name}").st_rdev)
    os.mkdir(f"{root}/dev/pts")
    mount("devpts", f"{root}/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    os.mkdir(f"{root}/dev/shm")
    mount("shm", f"{root}/dev/shm", "tmpfs", 0, "mode=1777")
    mount("tmpfs", f"{root}/run", "tmpfs", 0, "mode=755")
    os.makedirs(f"{root}/.old", exist_ok=True)
    check(LIBC.syscall(155, root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    check(LIBC.umount2(b"/.old", 2), "umount")
    os.rmdir("/.old")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main() -> None:
    sock, base, group, argv = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4:]
    check(LIBC.unshare(NAMESPACES), "unshare")
    pid = os.fork()
    if pid:
        sock.send(struct.pack("i", pid))
        os._exit(0)
    os.setsid()
    with open(f"{group}/cgroup.procs", "w") as procs:
        procs.write("0")
    populate(f"{base}/rootfs")
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, 0x40045431, struct.pack("i", 0))
    index = struct.unpack("i", fcntl.ioctl(master, 0x80045430, b"\0" * 4))[0]
    slave = os.open(f"/dev/pts/{index}", os.O_RDWR)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    sock.sendmsg([b"M"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [master]))])
    for fd in range(3):
        os.dup2(slave, fd)
    os.closerange(3, 256)
    os.execvpe(argv[0], argv, {"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": "/root"})


if __name__ == "__main__":
    main()
