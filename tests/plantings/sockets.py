"""Sockets."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import subprocess

from tests.plantings.base import Planting, call, kept, planting, same


@planting
def ping_socket() -> Planting:
    with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:  # of the session's own network
        file.write("0 10")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    yield
    sock.sendto(b"\x08\0\0\0\0\0\0\1hello", ("127.0.0.1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[8:], b"hello")


@planting
def raw_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    yield
    sock.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("127.0.0.1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[20:21], b"\x08")


@planting
def packet_socket() -> Planting:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind(("lo", 0))
    yield
    sock.settimeout(5)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
    same(len(sock.recv(999)) > 0, True)


@planting
def packet_socket_ring() -> Planting:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.setsockopt(263, 5, struct.pack("IIII", 4096, 4, 2048, 8))  # PACKET_RX_RING
    view = mmap.mmap(sock.fileno(), 4 * 4096)
    yield
    same(len(view[:4]), 4)


@planting
def netlink_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    sock.bind((0, 1))
    yield
    same(sock.getsockname()[1], 1)


@planting
def netlink_socket_with_news() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    sock.bind((0, 1))
    subprocess.run(["ip", "link", "set", "lo", "mtu", "60000"], check=True)
    yield
    same(len(sock.recv(9999, socket.MSG_DONTWAIT)) > 0, True)


@planting
def netlink_uevent_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)
    sock.bind((0, 1))
    yield
    same(sock.getsockname()[1], 1)


@planting
def netlink_netfilter_socket() -> Planting:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    sock.bind((0, 0))
    yield
    same(sock.getsockname()[0] > 0, True)


@planting
def vsock_socket() -> Planting:
    sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM, 0)
    yield
    sock.fileno()


@planting
def mptcp_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    yield
    sock.fileno()


@planting
def udplite_socket() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136)
    sock.bind(("127.0.0.1", 7777))
    yield
    same(sock.getsockname()[1], 7777)


@planting
def corked_udp() -> Planting:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", 9))
    sock.setsockopt(socket.IPPROTO_UDP, 1, 1)
    sock.send(b"held back")
    yield
    sock.setsockopt(socket.IPPROTO_UDP, 1, 0)


@planting
def corked_udp_empty() -> Planting:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_UDP, 1, 1)
    yield
    same(sock.getsockopt(socket.IPPROTO_UDP, 1), 1)


@planting
def udp_more() -> Planting:
    """MSG_MORE corks for one datagram, without the option."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", 9))
    sock.send(b"held back", socket.MSG_MORE)
    yield
    sock.send(b"more")


@planting
def tcp_corked() -> Planting:
    server = socket.create_server(("127.0.0.1", 7201))
    sock = socket.create_connection(("127.0.0.1", 7201))
    peer, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    sock.send(b"held")
    yield
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
    peer.settimeout(5)
    same(peer.recv(9), b"held")


@planting
def unix_unaccepted() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    yield
    peer, _ = listener.accept()
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def unix_unaccepted_with_data() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    sock.send(b"hello")
    yield
    peer, _ = listener.accept()
    same(peer.recv(9), b"hello")


@planting
def unix_unaccepted_closed() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/sock")
    sock.close()
    yield
    peer, _ = listener.accept()
    same(peer.recv(9), b"")


@planting
def unix_unaccepted_seqpacket() -> Planting:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0seq")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0seq")
    yield
    peer, _ = listener.accept()
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def unix_descriptor_in_flight() -> Planting:
    one, two = socket.socketpair()
    with open("/root/sent", "w+") as file:
        file.write("sent")
        file.flush()
        socket.send_fds(one, [b"x"], [file.fileno()])
    yield
    _, fds, _, _ = socket.recv_fds(two, 9, 9)
    same(os.pread(fds[0], 9, 0), b"sent")


@planting
def unix_peer_gone() -> Planting:
    one, two = socket.socketpair()
    two.send(b"last")
    two.close()
    yield
    same((one.recv(9), one.recv(9)), (b"last", b""))


@planting
def unix_datagram_peer_gone() -> Planting:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    two.close()
    yield
    try:
        one.send(b"x")
    except OSError:
        return
    raise AssertionError("sent")


@planting
def unix_deleted_name() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/gone")
    listener.listen()
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("/root/gone")
    peer, _ = listener.accept()
    os.unlink("/root/gone")
    yield
    sock.send(b"hello")
    same(peer.recv(9), b"hello")


@planting
def tcp_unaccepted() -> Planting:
    server = socket.create_server(("127.0.0.1", 7200))
    sock = socket.create_connection(("127.0.0.1", 7200))
    yield
    fresh = socket.create_connection(("127.0.0.1", 7200))
    server.settimeout(5)
    peer, _ = server.accept()
    fresh.send(b"hello")
    same(peer.recv(9), b"hello")
    sock.close()


@planting
def path_descriptor_of_socket() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/psock")
    fd = os.open("/root/psock", os.O_PATH)
    yield
    os.fstat(fd)


@planting
def sockets_with_options() -> Planting:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, 26, _socket_filter())  # SO_ATTACH_FILTER
    yield
    sock.fileno()


def _socket_filter() -> bytes:
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFF))
    kept.append(code)
    return struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))


@planting
def socket_with_bpf() -> Planting:
    code = ctypes.create_string_buffer(struct.pack("BBhi", 0xB7, 0, 0, 9) + struct.pack("BBhi", 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    data = struct.pack("IIQQ", 1, 2, ctypes.addressof(code), ctypes.addressof(licence))
    fd = call(321, 5, data + bytes(96), 120)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, 50, fd)
    os.close(fd)
    yield
    sock.fileno()


@planting
def unix_three_unaccepted() -> Planting:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/root/sock")
    listener.listen()
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for one in clients:
        one.connect("/root/sock")
    yield
    for one in clients:
        one.send(b"hello")
    for _ in clients:
        same(listener.accept()[0].recv(9), b"hello")


@planting
def ping_socket_v6() -> Planting:
    with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:
        file.write("0 10")
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6)
    yield
    sock.sendto(b"\x80\0\0\0\0\0\0\1hello", ("::1", 0))
    sock.settimeout(5)
    same(sock.recv(99)[8:], b"hello")
