"""Connections to a holder where the machine has run out of something."""

from __future__ import annotations

import errno
import select
import socket
from typing import Any

import pytest

from cmdop_migrate.holder.clients import Clients
from cmdop_migrate.holder.output_ring import Ring


class Short:
    """A listener, or an epoll, of a machine that has no more of it."""

    def __init__(self, code: int) -> None:
        self.code = code

    def accept(self) -> Any:
        raise OSError(self.code, "short")

    def register(self, *_: object) -> None:
        raise OSError(self.code, "short")


@pytest.mark.parametrize("code", [errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_failed_accept_does_not_end_the_holder(code: int) -> None:
    with select.epoll() as epoll:
        clients = Clients(epoll, Ring(4096))
        clients.accept(Short(code))  # type: ignore[arg-type]  # stands in for a listener
        assert clients.attached() == 0


def test_client_that_epoll_refuses_is_disconnected() -> None:
    clients = Clients(Short(errno.ENOSPC), Ring(4096))  # type: ignore[arg-type]  # … for an epoll
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("")  # a name of the kernel's choice
        listener.listen()
        client.connect(listener.getsockname())
        clients.accept(listener)
        client.settimeout(5)
        assert client.recv(1) == b""
    clients.pump_all()
