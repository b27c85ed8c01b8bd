"""Hold sockets: unix and internet, with data on the way, listening, half closed, bound to names."""

from __future__ import annotations

import array
import os
import socket
import struct

from base import Holding, digest, make, same

STREAM, DGRAM, SEQPACKET = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET
PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


def peek(one: socket.socket) -> str:
    try:
        return digest(one.recv(1 << 20, PEEK))
    except BlockingIOError:
        return "nothing"


def receive(one: socket.socket, size: int) -> bytes:
    one.settimeout(10)
    found = b""
    while len(found) < size and (part := one.recv(size - len(found))):
        found += part
    return found


class _Connected(Holding):
    """Two connected ends, `left` and `right`, with data queued both ways."""

    left: socket.socket
    right: socket.socket
    largest = 50_000

    def connect(self) -> None:
        raise NotImplementedError

    def build(self) -> None:
        self.connect()
        sizes = [0, 1, self.largest]
        self.to_right, self.to_left = self.data(self.rng.choice(sizes)), self.data(self.rng.choice(sizes))
        for end, text in ((self.left, self.to_right), (self.right, self.to_left)):
            if text:
                end.sendall(text)

    def report(self) -> object:
        # A peek returns what lies in one buffer of the kernel's: how much differs after a restore.
        return [[one.fileno(), one.type, bool(one.getblocking()), self.seen(one)] for one in (self.left, self.right)]

    def seen(self, one: socket.socket) -> object:
        return peek(one) != "nothing"

    def use(self) -> None:
        same(digest(receive(self.right, len(self.to_right))), digest(self.to_right), "what was on its way")
        same(digest(receive(self.left, len(self.to_left))), digest(self.to_left), "what was on its way back")
        self.left.sendall(b"new")
        self.right.sendall(b"back")

    def check(self) -> None:
        if os.getpid() == self.owner:
            same((receive(self.right, 3), receive(self.left, 4)), (b"new", b"back"), "new data")


class UnixStream(_Connected):
    def connect(self) -> None:
        self.left, self.right = socket.socketpair(socket.AF_UNIX, STREAM)


class UnixListener(_Connected):
    """A listening unix socket, and a connection accepted from it."""

    def connect(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        name = os.path.basename(self.place)
        self.address = self.rng.choice([self.path("sock"), "\0" + name, f"/dev/shm/{name}.s"])
        self.listener.bind(self.address)
        self.listener.listen()
        self.left = socket.socket(socket.AF_UNIX)
        self.left.connect(self.address)
        self.right, _ = self.listener.accept()

    def check(self) -> None:
        super().check()
        if os.getpid() == self.owner:
            fresh = socket.socket(socket.AF_UNIX)
            fresh.connect(self.address)
            peer, _ = self.listener.accept()
            fresh.sendall(b"hello")
            same(receive(peer, 5), b"hello", "a new connection to the listener")


class UnixListenerDeleted(UnixListener):
    """A listening unix socket whose name was removed."""

    def connect(self) -> None:
        super().connect()
        if os.path.exists(self.address.replace("\0", "/nowhere/")):
            os.unlink(self.address)

    def check(self) -> None:
        _Connected.check(self)


class UnixHalfClosed(Holding):
    def build(self) -> None:
        self.left, self.right = socket.socketpair()
        self.text = self.data(100)
        self.left.sendall(self.text)
        self.left.shutdown(socket.SHUT_WR)

    def use(self) -> None:
        same(receive(self.right, 200), self.text, "what was on its way before the end")
        self.right.sendall(b"answer")
        same(receive(self.left, 6), b"answer", "the direction that is open")


class UnixPeerClosed(Holding):
    """One end of a pair whose other end is closed, with its last data."""

    def build(self) -> None:
        self.left, right = socket.socketpair()
        self.text = self.data(100)
        right.sendall(self.text)
        right.close()

    def use(self) -> None:
        same(receive(self.left, 200), self.text, "what the closed end had sent")


class _Packets(Holding):
    """A pair that keeps the borders between packets."""

    kind = DGRAM

    def build(self) -> None:
        self.left, self.right = socket.socketpair(socket.AF_UNIX, self.kind)
        self.texts = [self.data(n) for n in self.rng.sample(range(1, 2000), self.rng.randrange(4))]
        for text in self.texts:
            self.left.send(text)

    def report(self) -> object:
        return peek(self.right)

    def use(self) -> None:
        self.right.settimeout(10)
        for text in self.texts:
            same(self.right.recv(4000), text, "a packet")
        self.left.send(b"new")
        same(self.right.recv(9), b"new", "a new packet")


class UnixDgram(_Packets):
    pass


class UnixSeqpacket(_Packets):
    kind = SEQPACKET


class UnixDgramNamed(Holding):
    """A bound datagram socket with packets of a sender that is not connected to it."""

    def build(self) -> None:
        self.bound, self.sender = (socket.socket(socket.AF_UNIX, DGRAM) for _ in range(2))
        self.bound.bind(self.path("dgram"))
        self.sender.sendto(b"one", self.path("dgram"))
        self.sender.sendto(b"two", self.path("dgram"))

    def report(self) -> object:
        return peek(self.bound)

    def use(self) -> None:
        same((self.bound.recv(9), self.bound.recv(9)), (b"one", b"two"), "the packets")
        self.sender.sendto(b"new", self.path("dgram"))
        same(self.bound.recv(9), b"new", "a new packet")


class DescriptorsInFlight(Holding):
    """A descriptor that was sent and not received yet."""

    def build(self) -> None:
        self.left, self.right = socket.socketpair()
        self.out, into = os.pipe()
        os.write(into, b"from afar")
        socket.send_fds(self.left, [b"x"], [into])
        os.close(into)

    def use(self) -> None:
        data, control, _, _ = self.right.recvmsg(9, socket.CMSG_SPACE(4))
        same(data, b"x", "the message")
        fds = array.array("i")
        fds.frombytes(control[0][2][:4])
        os.write(fds[0], b"!")
        same(os.read(self.out, 99), b"from afar!", "the pipe whose end was on its way")


class _Internet(_Connected):
    family, address = socket.AF_INET, "127.0.0.1"

    def connect(self) -> None:
        self.listener = socket.socket(self.family)
        self.listener.bind((self.address, 0))
        self.listener.listen(self.rng.choice([1, 50]))
        self.left = socket.create_connection(self.listener.getsockname()[:2])
        self.right, _ = self.listener.accept()
        self.left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.right.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def report(self) -> object:
        names = [[one.getsockname(), one.getpeername()] for one in (self.left, self.right)]
        options = [self.left.getsockopt(6, socket.TCP_NODELAY), self.right.getsockopt(1, socket.SO_KEEPALIVE)]
        return [super().report(), names, self.listener.getsockname(), options]

    def check(self) -> None:
        super().check()
        if os.getpid() == self.owner:
            fresh = socket.create_connection(self.listener.getsockname()[:2])
            peer, _ = self.listener.accept()
            fresh.sendall(b"hello")
            same(receive(peer, 5), b"hello", "a new connection to the listener")


class Tcp(_Internet):
    pass


class Tcp6(_Internet):
    family, address = socket.AF_INET6, "::1"


class TcpHalfClosed(Holding):
    def build(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.left = socket.create_connection(listener.getsockname())
            self.right, _ = listener.accept()
        self.text = self.data(100)
        self.left.sendall(self.text)
        self.left.shutdown(socket.SHUT_WR)

    def use(self) -> None:
        same(receive(self.right, 200), self.text, "what was on its way before the end")
        self.right.sendall(b"answer")
        same(receive(self.left, 6), b"answer", "the direction that is open")


class TcpPeerClosed(Holding):
    """A connection whose other end is closed: CLOSE_WAIT, with its last data."""

    def build(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.left = socket.create_connection(listener.getsockname())
            right, _ = listener.accept()
        self.text = self.data(100)
        right.sendall(self.text)
        right.close()

    def use(self) -> None:
        same(receive(self.left, 200), self.text, "what the closed end had sent")


class TcpUnbound(Holding):
    """A socket that is only made, and one that is only bound."""

    def build(self) -> None:
        self.fresh, self.bound = socket.socket(), socket.socket()
        self.bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bound.bind(("127.0.0.1", 0))

    def report(self) -> object:
        return [self.bound.getsockname(), self.bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)]

    def use(self) -> None:
        self.bound.listen()
        self.fresh.connect(self.bound.getsockname())
        peer, _ = self.bound.accept()
        self.fresh.sendall(b"hello")
        same(receive(peer, 5), b"hello", "a connection between the two")


class Udp(Holding):
    family, address = socket.AF_INET, "127.0.0.1"

    def build(self) -> None:
        self.server, self.client = (socket.socket(self.family, DGRAM) for _ in range(2))
        self.server.bind((self.address, 0))
        self.client.connect(self.server.getsockname()[:2])

    def report(self) -> object:
        return [self.server.getsockname(), self.client.getsockname(), self.client.getpeername()]

    def use(self) -> None:
        self.client.send(b"new")
        self.server.settimeout(10)
        same(self.server.recv(9), b"new", "a datagram")


class Udp6(Udp):
    family, address = socket.AF_INET6, "::1"


class Netlink(Holding):
    def build(self) -> None:
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, self.rng.choice([0, 4]))
        self.socket.bind((0, 0))  # of no group: it is sent nothing

    def report(self) -> object:
        return self.socket.getsockname()


class PacketSocket(Holding):
    def build(self) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.bind(("lo", 0x0800))

    def report(self) -> object:
        return self.socket.getsockname()[:3]


class Ping(Holding):
    """An ICMP datagram socket, as `ping` uses. No group may have one in a new network namespace until it is allowed."""

    def build(self) -> None:
        make("/proc/sys/net/ipv4/ping_group_range", b"0 2147483647")
        self.socket = socket.socket(socket.AF_INET, DGRAM, socket.IPPROTO_ICMP)

    def use(self) -> None:
        self.socket.settimeout(10)
        self.socket.sendto(struct.pack("!BBHHH", 8, 0, 0xF7FE, 0, 1), ("127.0.0.1", 0))
        self.socket.recv(99)


class RawSocket(Holding):
    def build(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)

    def report(self) -> object:
        return [self.socket.type, self.socket.proto]


class UnixUnaccepted(Holding):
    """A unix connection that its listener has not accepted yet."""

    def build(self) -> None:
        self.listener, self.client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path("unaccepted"))
        self.listener.listen()
        self.client.connect(self.path("unaccepted"))

    def use(self) -> None:
        peer, _ = self.listener.accept()
        self.client.sendall(b"hello")
        same(receive(peer, 5), b"hello", "a connection accepted after the restore")


class UnixUnacceptedData(UnixUnaccepted):
    """The same, and its client has sent something."""

    def build(self) -> None:
        super().build()
        self.client.sendall(b"early")

    def use(self) -> None:
        pass


class UdpCorked(Udp):
    def build(self) -> None:
        super().build()
        self.client.setsockopt(socket.IPPROTO_UDP, 1, 1)
        self.client.send(b"held back")

    def use(self) -> None:
        pass
