"""Build the inside of a session, in its own first process before that becomes init.

This runs in a fork of the holder that is already pid 1 of its pid namespace. All
mounts are made in the session's own mount namespace: when the session ends, or
this process is killed half-way, the kernel removes every one of them.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import signal
import socket
import stat
import struct
import termios
from collections.abc import Iterable

from cmdop_migrate.holder import cgroup, protocol, syscalls
from cmdop_migrate.holder.syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, mount
from cmdop_migrate.util.paths import RESOLV, SPECIAL, is_under

TIOCGPTN, TIOCSPTLCK = 0x80045430, 0x40045431
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
# redirect_dir: without it a directory of the host cannot be renamed (EXDEV). Sessions of older versions were mounted
# with "off"; their upper layers have no redirects, and are the same with either.
OVERLAY_OPTIONS = "redirect_dir=on,metacopy=off,index=off"
# One device number for all files of a view, on any layer: otherwise CRIU never finds what is watched. Where the kernel
# lacks it, watches on files are refused at a checkpoint.
ONE_DEVICE = ",xino=on"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


class Refused(Exception):
    """Report that the session cannot start as asked; code, message and hint travel to the user."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def become(order: dict[str, object], control: socket.socket, master_to: socket.socket) -> None:
    """Build the sandbox and exec init in it; never return. Raise Refused or OSError if that fails. `control` is the
    starter's end, `master_to` the holder's."""
    record = order["record"]
    assert isinstance(record, dict)
    spec = record["spec"]
    syscalls.die_with_parent()
    _reset_signals()
    os.setsid()
    cgroup.join(str(order["cgroup"]))
    private_net = spec["net"] == "private"
    syscalls.unshare(syscalls.NEWNS | syscalls.NEWUTS | syscalls.NEWIPC | (syscalls.NEWNET if private_net else 0))
    # The starter lays the network cable while the file systems are mounted here.
    control.send(b'{"stage":"network"}')
    build_root(order)
    enter_root(str(order["root"]))
    if control.recv(64) != b"go":
        raise Refused("unexpected", "the command that started this session went away", "Run it again.")
    slave = _open_terminal(master_to)
    _become_user(spec["user"], slave)
    environment = dict(spec["env"])
    _change_dir(spec["cwd"], bool(order["cwd_given"]), environment.get("HOME", "/"))
    command = list(spec["command"])
    _check_command(command[0], environment.get("PATH", os.defpath))
    for fd in range(3):
        os.dup2(slave, fd)
    init = str(order["init"])
    # -p: when the holder dies, the session dies with it: nothing may run without its lease watchdog.
    arguments = [init, "-p", "SIGKILL", "--", *command]
    try:
        os.execve(init, arguments, environment)
    except FileNotFoundError as error:
        raise Refused("blocked", f"no init at {init}", "Install it with: cmdop-migrate doctor --fix") from error


def work(order: dict[str, object]) -> None:
    """Exec CRIU's worker with the session's files in place, to restore a session; never return. CRIU itself mounts the
    kernel's file systems, as they were."""
    _reset_signals()
    cgroup.join(str(order["cgroup"]))
    syscalls.unshare(syscalls.NEWNS)
    if order.get("own_network"):
        _leave_network()
    mount_files(order)
    worker = order["worker"]
    assert isinstance(worker, list)
    fd = protocol.Fields(order).integer("worker_fd")
    os.set_inheritable(fd, True)
    os.execve(worker[0], [*worker, "swrk", str(fd)], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})


def _leave_network() -> None:
    """Enter an empty network namespace in which any address can be bound: for the trial of a session that uses the
    host's network, whose ports and addresses the frozen original still has."""
    syscalls.unshare(syscalls.NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP) + b"\0" * 16)
    for family in ("ipv4", "ipv6"):
        try:
            with open(f"/proc/sys/net/{family}/ip_nonlocal_bind", "w", encoding="ascii") as switch:
                switch.write("1")  # of the new namespace only
        except FileNotFoundError:
            continue  # a kernel without IPv6


def mount_files(order: dict[str, object]) -> None:
    """Mount the copy-on-write views of the host's file systems under order['root']."""
    root, base = str(order["root"]), str(order["dir"])
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    overlays, hidden, resolv = order["overlays"], order["hidden"], order["resolv"]
    assert isinstance(overlays, list) and isinstance(hidden, list)
    # On a tmpfs of this namespace: a lower layer may not lie inside another, and nothing of it should remain.
    mount("tmpfs", f"{base}/host", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    points = [layer["point"] for layer in overlays]
    above = make_host_layer(f"{base}/host", points, hidden, None if resolv is None else str(resolv))
    for layer in overlays:
        _overlay(base, root, layer, above.get(layer["point"]))


def make_host_layer(top: str, points: Iterable[str], hidden: Iterable[str], resolv: str | None) -> dict[str, str]:
    """Fill `top` with a layer between the host's files and the session's: whiteouts over what is private to this
    toolkit (keys, other sessions), and a resolv.conf that works from a private network. Return the directory under
    `top` of each mount point that needs one."""
    order = sorted(points, key=len, reverse=True)
    made: dict[str, str] = {}

    def place(path: str) -> str:
        point = next(mount for mount in order if is_under(path, mount))
        if point not in made:
            made[point] = f"{top}/{len(made)}"
            _make_like(point, made[point])
        here, there = made[point], point
        for part in os.path.relpath(os.path.dirname(path), point).split("/"):
            here, there = f"{here}/{part}", f"{there}/{part}"
            if not os.path.lexists(here):
                _make_like(there, here)
        return f"{here}/{os.path.basename(path)}"

    for path in hidden:
        # Also what does not exist yet: it must not appear in a running session when it is created.
        if os.path.isdir(os.path.dirname(path)) and not any(is_under(path, special) for special in SPECIAL):
            os.mknod(place(path), stat.S_IFCHR, os.makedev(0, 0))
    if resolv is not None:
        target = place(RESOLV)
        with open(target, "w", encoding="utf-8") as file:
            file.write(resolv)
        os.chmod(target, 0o644)
    return made


def _make_like(there: str, here: str) -> None:
    """Make a directory `here` with the owner, mode and times of `there`, because those of the top layer are seen."""
    info = os.stat(there)
    os.mkdir(here)
    os.chown(here, info.st_uid, info.st_gid)
    os.chmod(here, info.st_mode & 0o7777)
    os.utime(here, ns=(info.st_atime_ns, info.st_mtime_ns))


def build_root(order: dict[str, object]) -> None:
    """Mount all that a new session finds under its root."""
    root, binds = str(order["root"]), order["binds"]
    assert isinstance(binds, list)
    mount_files(order)
    for point in ("proc", "sys", "dev", "run"):
        os.makedirs(f"{root}/{point}", exist_ok=True)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("sysfs", f"{root}/sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", f"{root}/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    _populate_dev(f"{root}/dev")
    for source, read_only in binds:
        _bind(source, f"{root}{source}", bool(read_only))


def _overlay(base: str, root: str, layer: dict[str, str], above: str | None) -> None:
    """Mount one copy-on-write view: of the host's root first, then of its other file systems inside it."""
    point, store = layer["point"], f"{base}/{layer['store']}"
    target = root if point == "/" else f"{root}{point}"
    if not os.path.isdir(point):
        point = f"{base}/host/nothing"  # the host that the session came from had a file system here; this one has none
        os.makedirs(point, exist_ok=True)
        os.makedirs(target, exist_ok=True)
    lower = ":".join(_escaped(path) for path in (above, point) if path)
    data = f"lowerdir={lower},upperdir={_escaped(store)}/upper,workdir={_escaped(store)}/work,{OVERLAY_OPTIONS}"
    if point == "/":
        try:
            _mount_overlay(target, data)
        except OSError as error:
            hint = "Set state_dir to a directory on ext4, xfs, btrfs or tmpfs; the kernel's log (dmesg) says more."
            raise Refused("blocked", f"no copy-on-write view with {base}: {error.strerror}", hint) from error
        return
    try:
        _mount_overlay(target, data)
    except OSError:
        # Some file systems (vfat, most FUSE ones) cannot be under an overlay: make them visible, but not writable.
        _bind(point, target, read_only=True)


def _mount_overlay(target: str, data: str) -> None:
    try:
        mount("overlay", target, "overlay", 0, data + ONE_DEVICE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mount("overlay", target, "overlay", 0, data)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _bind(source: str, target: str, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    mount(source, target, None, MS_BIND)
    if read_only:
        mount(None, target, None, MS_BIND | syscalls.MS_REMOUNT | MS_RDONLY)


def _populate_dev(dev: str) -> None:
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755,size=65536k")
    for name in DEVICES:
        os.mknod(f"{dev}/{name}", stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
        os.chmod(f"{dev}/{name}", 0o666)
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(f"{dev}/{name}")
    # A devpts instance of its own: CRIU creates it again, and the terminal keeps its number.
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5")
    mount("shm", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    mount("mqueue", f"{dev}/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def enter_root(root: str) -> None:
    """Make `root` the root directory, and remove the old one."""
    os.chdir(root)
    # The new root is stacked on itself, so that no directory for the old one remains in the session's files.
    syscalls.pivot_root(".", ".")
    syscalls.umount(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _open_terminal(master_to: socket.socket) -> int:
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))
    index = struct.unpack("i", fcntl.ioctl(master, TIOCGPTN, b"\0" * 4))[0]
    slave = os.open(f"/dev/pts/{index}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    # The master leaves the process tree: the holder keeps it, so CRIU sees a slave without a master.
    socket.send_fds(master_to, [b"M"], [master])
    os.close(master)
    return slave


def _become_user(name: str, slave: int) -> None:
    try:
        user = pwd.getpwnam(name)
    except KeyError as error:
        raise Refused("usage", f"no such user: {name}", "See: getent passwd") from error
    if user.pw_uid == os.getuid():
        return
    try:
        tty = grp.getgrnam("tty").gr_gid
    except KeyError:
        tty = user.pw_gid
    os.fchown(slave, user.pw_uid, tty)
    os.setgroups(os.getgrouplist(name, user.pw_gid))
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def _change_dir(directory: str, given: bool, home: str) -> None:
    for path in [directory] if given else [directory, home, "/"]:
        try:
            os.chdir(path)
            return
        except OSError as error:
            last = error
    raise Refused("usage", f"cannot work in {directory}: {last.strerror}", "Name a directory that exists, with --cwd.")


def _check_command(name: str, path: str) -> None:
    """Raise Refused if exec of the command would fail: exec could only tell a terminal that is not attached yet."""
    places = [name] if "/" in name else [f"{part or '.'}/{name}" for part in path.split(":")]
    found = [place for place in places if name and os.path.exists(place)]
    if not found:
        where = "" if "/" in name else f" in PATH ({path})"
        raise Refused("usage", f"command not found: {name}{where}", "Give a full path, or set PATH with --env.")
    usable = [place for place in found if os.path.isfile(place) and os.access(place, os.X_OK)]
    if not usable:
        if os.path.isdir(found[0]):
            raise Refused("usage", f"cannot run {found[0]}: it is a directory", "Name a program.")
        raise Refused("usage", f"cannot run {found[0]}: it is not executable", f"Try: chmod +x {found[0]}")
    try:
        with open(usable[0], "rb") as file:
            first = file.readline(256)
    except PermissionError:
        return  # executable but not readable: a program, not a script
    if first.startswith(b"#!") and first.strip() != b"#!":
        interpreter = os.fsdecode(first[2:].split()[0])
        if not os.path.exists(interpreter):
            raise Refused("usage", f"cannot run {usable[0]}: no interpreter {interpreter}", "Correct its first line.")


def _reset_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except OSError:
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)
