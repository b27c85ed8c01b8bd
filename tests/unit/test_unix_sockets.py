"""Check the diagnosis of unix sockets: peers, backlogs and unread bytes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from cmdop_migrate.session import unix_sockets


def inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def test_unix_sockets_have_peers_backlogs_and_unread_bytes(tmp_path: Path) -> None:
    listener, client, late = (socket.socket(socket.AF_UNIX) for _ in range(3))
    one, two = socket.socketpair()
    with listener, client, late, one, two:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        late.connect(str(tmp_path / "s"))
        client.send(b"hello")
        found = unix_sockets.read(os.getpid())
        assert found[inode(one)].peer == inode(two) and found[inode(two)].peer == inode(one)
        assert not found[inode(one)].is_dangling and not found[inode(listener)].is_dangling
        there = found[inode(listener)]
        assert there.name == str(tmp_path / "s") and there.state == unix_sockets.LISTEN
        assert set(there.waiting) == {inode(client), inode(late)}
        assert found[inode(client)].unread > 0 and found[inode(client)].is_dangling
        assert found[inode(late)].unread == 0
        client.close()
        assert set(unix_sockets.read(os.getpid())[inode(listener)].waiting) == {0, inode(late)}


def test_unix_connection_with_closed_peer_is_not_dangling() -> None:
    one, two = socket.socketpair()
    with one:
        two.close()
        assert not unix_sockets.read(os.getpid())[inode(one)].is_dangling
