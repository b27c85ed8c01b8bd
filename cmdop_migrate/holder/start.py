"""Start or restore the session in the holder, and undo a start that failed."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable

from cmdop_migrate.holder import cgroup, protocol, syscalls
from cmdop_migrate.util import trash

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

Message = dict[str, object]
KEPT = "images.before"  # CRIU's images of a migration's last round
PASSING = ("image", "images", "dump", KEPT)  # of a restore or a checkpoint: images, some of them unencrypted
OWN = ("layers", "root", "host")
FILES = (*OWN, *PASSING)  # of a session that is here, or was about to be


class Order:
    """Hold what the starter asked for, as far as the holder itself uses it. Only the holder writes `record` to disk."""

    def __init__(self, message: Message) -> None:
        fields = protocol.Fields(message)
        record, gate, carried = message["record"], message.get("gate"), message.get("carried")
        assert isinstance(record, dict)
        self.record: Final[Message] = record
        self.token: Final = protocol.Fields(record).integer("token")
        self.directory: Final = fields.text("dir")
        self.cgroup: Final = fields.text("cgroup")
        self.holders: Final = fields.text("holders")
        self.socket: Final = fields.text("socket")
        self.ring_size: Final = fields.integer("ring")
        self.fresh_until: Final = fields.optional_seconds("fresh_until")
        self.size: Final = protocol.Size(fields) if "rows" in message else None
        self.gate: Final[Message | None] = gate if isinstance(gate, dict) else None
        self.carried: Final[Message | None] = carried if isinstance(carried, dict) else None
        self.is_restore: Final = fields.text("mode") == "restore"


class StartFailed(Exception):
    """Report why the child could not become the session."""

    def __init__(self, why: dict[str, object]) -> None:
        super().__init__(str(why.get("message")))
        self.why = why


_LATE = "its lease ran out before its holder had taken charge of it"
_GIVEN_UP = StartFailed({"code": "unexpected", "message": "the restore was given up", "hint": ""})


class Pager:
    """Hold the restorer's connection while it still loads memory, and our copy of the socket it serves pages on.

    If the restorer is killed, that copy keeps page requests waiting instead of failing, and so
    the session's missing pages missing instead of zero, until the session is gone.
    """

    def __init__(self, control: socket.socket, pages: int) -> None:
        self._control, self._pages = control, pages

    def fileno(self) -> int:
        return self._control.fileno()

    def is_complete(self) -> bool:
        """Return whether the restorer said that all memory is in place."""
        try:
            return self._control.recv(64) == b"complete"
        except OSError:
            return False

    def close(self) -> None:
        self._control.close()
        os.close(self._pages)


class Restored:
    """Hold a session that CRIU has restored and that does not run yet."""

    def __init__(self, pid: int, master: int, typed: dict[str, object], pager: Pager | None) -> None:
        """Take what CRIU restored; `typed`: the input at the time of the checkpoint, and how far it had got."""
        self.pid, self.master, self.pager = pid, master, pager
        self.unwritten = str(typed["unwritten"]).encode("latin-1")
        self.staged, self.streams = typed["staged"], typed["streams"]


def start(order: Message, control: socket.socket) -> tuple[int, int]:
    """Start the session. Return the pid of its init, as this process counts, and the master of its terminal."""
    cgroup.create(str(order["cgroup"]))
    ours, theirs = socket.socketpair()
    here = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.NEWPID)  # for children only

    def become() -> None:
        from cmdop_migrate.holder import sandbox  # here, so that the holder itself never loads it

        sandbox.become(order, control, theirs)

    pid, status = _fork(become)
    syscalls.setns(here, syscalls.NEWPID)
    os.close(here)
    theirs.close()
    tell(control, {"stage": "forked", "pid": pid})
    _until_exec(pid, status)
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    if not fds:
        os.waitpid(pid, 0)
        raise StartFailed({"code": "unexpected", "message": "the session's first process was killed", "hint": ""})
    return pid, fds[0]


def restore(order: Message, control: socket.socket, begin: Callable[[float], None]) -> Restored:
    """Restore a session: run CRIU's worker as our child, in a mount namespace with the session's files.

    The starter talks to the worker. It passes the session when it is ready, and lets it run only after we agree.
    `begin` is called first, with the deadline until which it may run.
    """
    cgroup.create(str(order["cgroup"]))
    syscalls.adopt_orphans()  # the session's first process, when CRIU's worker has ended

    def work() -> None:
        from cmdop_migrate.holder import sandbox

        sandbox.work(order)

    worker, status = _fork(work)
    os.close(protocol.Fields(order).integer("worker_fd"))
    os.read(status, 1)  # end of file: CRIU runs; a failure shows by its not answering
    os.close(status)
    tell(control, {"stage": "worker", "pid": worker})
    data, fds, _, _ = socket.recv_fds(control, 1 << 20, 4, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise _GIVEN_UP
    passed = json.loads(data)
    pager = Pager(control, fds[1]) if len(fds) > 1 else None
    write_token(passed["pid"], passed["token"])
    give_back(passed["pid"], fds[0], passed["unread"].encode("latin-1"))
    begin(passed["fresh_until"])
    if time.clock_gettime(time.CLOCK_BOOTTIME) >= passed["fresh_until"]:
        raise StartFailed({"code": "timed_out", "message": _LATE, "hint": "It is parked as before: restore it again."})
    # From here on the processes may run. If the starter is killed now, we end them; if we are killed, the starter does.
    cgroup.join(str(order["holders"]), worker)
    tell(control, {"stage": "adopted"})
    if control.recv(64) != b"resumed":
        raise _GIVEN_UP
    return Restored(passed["pid"], fds[0], passed, pager)


INSIDE_DIR = "run/cmdop-migrate"


def write_token(pid: int, token: object) -> None:
    """Write the current fencing token where programs in the session, and through them the resources they use, find it.
    A file, not a variable: it changes with every restore."""
    folder = f"/proc/{pid}/root/{INSIDE_DIR}"
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        os.chmod(folder, 0o755)
        fd = os.open(f"{folder}/token.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write(f"{token}\n")
            os.fchmod(fd, 0o644)
        os.replace(f"{folder}/token.new", f"{folder}/token")
    except OSError as error:
        # The session may have put something else there, or has ended: that is not an error of ours.
        os.write(2, f"token file: {error}\n".encode())


def give_back(pid: int, master: int, unread: bytes) -> None:
    """Put unread input back into the terminal."""
    if unread:
        from cmdop_migrate.holder import typeahead  # rarely needed: not loaded by every holder

        typeahead.give(pid, master, unread)


def _fork(run: Callable[[], None]) -> tuple[int, int]:
    """Return a pid, and a pipe that is closed when the child has exec'ed and holds the reason if it could not."""
    status, status_in = os.pipe()  # both close-on-exec
    pid = os.fork()
    if pid:
        os.close(status_in)
        return pid, status
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - a forked child must never continue in its parent's code
        # Nothing may be imported here: as another user, in another root, the library may not be readable.
        os.write(status_in, json.dumps(_described(error)).encode())
    finally:
        os._exit(1)


def _until_exec(pid: int, status: int) -> None:
    with os.fdopen(status, "rb") as pipe:
        why = pipe.read()
    if why:
        os.waitpid(pid, 0)
        raise StartFailed(json.loads(why))


def tell(control: socket.socket, message: dict[str, object]) -> None:
    """Send a message to the starter, which may be gone."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        return


def give_up(order: Message, control: socket.socket, error: Exception) -> None:
    """Remove all of a session that never began, then tell the starter why."""
    import shutil
    import traceback

    cgroup.remove(str(order["cgroup"]))
    try:
        os.unlink(str(order["socket"]))
    except FileNotFoundError:
        pass
    directory = str(order["dir"])
    remove_files(directory)
    if order["mode"] != "restore" or not os.path.exists(f"{directory}/session.json"):
        shutil.rmtree(directory, ignore_errors=True)  # otherwise it is parked, as its record says, and stays so
    why = (
        error.why if isinstance(error, StartFailed) else {**_described(error), "trace": traceback.format_exc()[-1500:]}
    )
    tell(control, {"ok": False, "code": "unexpected", "hint": "", **why})


def _described(error: BaseException) -> dict[str, object]:
    """Return what the user learns about an error; a full disk is no bug."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return {"code": "blocked", "message": str(error), "hint": "Free some space where state_dir is."}
    code, hint = getattr(error, "code", "unexpected"), getattr(error, "hint", "")
    return {"code": code, "message": str(error), "hint": hint}


def cut_cable(link: object) -> None:
    """Delete the session's network interface. It goes with the processes, unless a connection still waits for an
    answer: that would keep the namespace, and so the host's end of the veth pair, for minutes."""
    if not isinstance(link, dict) or not os.path.exists(f"/sys/class/net/{link['veth']}"):
        return
    for ip in ("/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip", "/bin/ip"):
        if os.access(ip, os.X_OK):
            os.spawnv(os.P_WAIT, ip, ["ip", "link", "delete", str(link["veth"])])
            return


def remove_files(directory: str, names: tuple[str, ...] = FILES) -> None:
    """Remove the files of a session that runs elsewhere or is in the store."""
    import shutil  # imports much of the library: not for a holder's whole life

    for name in names:
        # What a session changed may be 100,000 files: removed later. Images are few, and may hold unencrypted memory.
        if name not in OWN or not trash.set_aside(trash.of_session(directory), f"{directory}/{name}"):
            shutil.rmtree(f"{directory}/{name}", ignore_errors=True)


def has_files(directory: str, names: tuple[str, ...] = FILES) -> bool:
    """Return whether one of these exists in a session's directory."""
    return any(os.path.exists(f"{directory}/{name}") for name in names)
