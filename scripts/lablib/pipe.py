"""`ProxyCommand python pipe.py PIDFILE ADDRESS PORT`: SSH from the machine to a host of a lab, through its switch.

Stdlib only, and no package: it starts for every connection.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import sys

NEWNET = 0x40000000


def main(pidfile: str, address: str, port: int) -> None:
    with open(pidfile) as file:
        pid = int(file.read().split()[0])
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as there:
        if libc.setns(there.fileno(), NEWNET) != 0:
            sys.exit(f"cannot enter the lab's network: {os.strerror(ctypes.get_errno())}")
    with socket.create_connection((address, port), timeout=10) as far:
        far.settimeout(None)
        ways = selectors.DefaultSelector()
        ways.register(0, selectors.EVENT_READ)
        ways.register(far, selectors.EVENT_READ)
        while True:
            for key, _ in ways.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd != 0:
                    if not data:
                        return
                    while data:
                        data = data[os.write(1, data) :]
                elif data:
                    far.sendall(data)
                else:
                    far.shutdown(socket.SHUT_WR)
                    ways.unregister(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror or error}")
