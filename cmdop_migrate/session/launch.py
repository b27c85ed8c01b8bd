"""How a holder brings its session into being, and how it undoes a start that failed.

Stdlib only: the holder loads this.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import traceback

from cmdop_migrate.session import cgroup, syscalls


class StartFailed(Exception):
    """The child said why it could not become the session."""

    def __init__(self, why: dict[str, object]) -> None:
        super().__init__(str(why.get("message")))
        self.why = why


def start(order: dict[str, object], control: socket.socket) -> tuple[int, int]:
    """-> (pid of the session's init, as we count; its terminal's master)."""
    cgroup.create(str(order["cgroup"]))
    status, status_in = os.pipe()  # both close-on-exec: end of file means init was exec'ed
    ours, theirs = socket.socketpair()
    here = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.NEWPID)  # for children only
    pid = os.fork()
    if pid == 0:
        _child(order, control, theirs, status_in)
    syscalls.setns(here, syscalls.NEWPID)
    os.close(here)
    os.close(status_in)
    theirs.close()
    tell(control, {"stage": "forked", "pid": pid})
    with os.fdopen(status, "rb") as said:
        why = said.read()
    if why:
        os.waitpid(pid, 0)
        raise StartFailed(json.loads(why))
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    if not fds:
        os.waitpid(pid, 0)
        raise StartFailed({"code": "unexpected", "message": "the session's first process was killed", "hint": ""})
    return pid, fds[0]


def _child(order: dict[str, object], control: socket.socket, theirs: socket.socket, status: int) -> None:
    try:
        from cmdop_migrate.session import sandbox  # here, so that the holder itself never pays for it

        sandbox.become(order, control, theirs)
    except BaseException as error:  # noqa: BLE001 - a forked child must never run on into its parent's code
        why = {
            "code": getattr(error, "code", "unexpected"),
            "message": str(error),
            "hint": getattr(error, "hint", ""),
            "trace": traceback.format_exc(),
        }
        os.write(status, json.dumps(why).encode()[:4096])
    finally:
        os._exit(1)


def tell(control: socket.socket, message: dict[str, object]) -> None:
    """To the starter, who may be gone."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        return


def give_up(order: dict[str, object], control: socket.socket, error: Exception) -> None:
    """Leaves nothing of a session that never began, then says why."""
    cgroup.remove(str(order["cgroup"]))
    shutil.rmtree(str(order["dir"]), ignore_errors=True)
    why = error.why if isinstance(error, StartFailed) else {"message": str(error), "trace": traceback.format_exc()}
    tell(control, {"ok": False, "code": "unexpected", "hint": "", **why})
