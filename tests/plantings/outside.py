"""Unix sockets that lead out of the session, through a directory it shares with its host ($SHARED).

The test has listeners there: `keeps` accepts connections and keeps them, `closes` closes them at once, `ignores` never
accepts, `letters` receives datagrams. To a listener of the session, `inside`, the test connects.
"""

from __future__ import annotations

import os
import socket

from tests.plantings.base import Planting, planting, same


def _connect(name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.connect(f"{os.environ['SHARED']}/{name}")
    return sock


@planting
def unix_to_outside() -> Planting:
    sock = _connect("keeps")
    same(sock.recv(9), b"hello")
    yield
    sock.send(b"x")


@planting
def unix_to_outside_closed() -> Planting:
    sock = _connect("closes")
    same(sock.recv(9), b"")
    yield
    same(sock.recv(9), b"")


@planting
def unix_to_outside_unaccepted() -> Planting:
    sock = _connect("ignores")
    yield
    sock.send(b"x")


@planting
def unix_datagram_to_outside() -> Planting:
    sock = _connect("letters", socket.SOCK_DGRAM)
    yield
    sock.send(b"x")


@planting
def unix_from_outside() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{os.environ['SHARED']}/inside")
    listener.listen()
    peer, _ = listener.accept()
    same(peer.recv(9), b"hello")
    yield
    peer.send(b"x")


@planting
def unix_from_outside_closed() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{os.environ['SHARED']}/inside")
    listener.listen()
    peer, _ = listener.accept()
    same(peer.recv(9), b"hello")
    same(peer.recv(9), b"")
    yield
    same(peer.recv(9), b"")


@planting
def unix_from_outside_unaccepted() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{os.environ['SHARED']}/inside")
    listener.listen()
    while not os.path.exists(f"{os.environ['SHARED']}/connected"):
        os.sched_yield()
    yield
    listener.fileno()
