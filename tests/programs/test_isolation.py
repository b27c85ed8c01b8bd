"""Sessions of this suite reach nothing: agents and package managers would use any way out."""

from __future__ import annotations

import socket

from tests.support.host import Host
from tests.support.program_session import Program


def test_sessions_of_this_suite_cannot_reach_a_service_of_this_machine(host: Host) -> None:
    with socket.create_server(("0.0.0.0", 0)) as service:
        port = service.getsockname()[1]
        script = (
            "gateway=$(ip route show default | cut -d ' ' -f 3);"
            f' timeout 3 bash -c ": < /dev/tcp/$gateway/{port}"; echo "status=$? of=$gateway"; sleep 1000'
        )
        with Program(host, "bash", "-c", script) as session:
            session.see(r"status=124 of=[\d.]+")  # the time ran out: packets are dropped
