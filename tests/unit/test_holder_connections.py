"""The agent's connections to holders: answers are read, and malformed ones only cause a reconnect."""

from __future__ import annotations

import socket
from pathlib import Path

from cmdop_migrate.agent.holder_connections import HolderConnections
from cmdop_migrate.holder import protocol


def test_idle_time_is_kept_and_a_protocol_error_only_reconnects(tmp_path: Path) -> None:
    listener = protocol.listen(str(tmp_path / "s"))
    with listener:
        lines = HolderConnections(lambda session: tmp_path / session)
        assert lines.send("s", op="fresh") and lines.idle == {}
        holder, _ = listener.accept()
        answer = protocol.control({"re": "fresh", "idle": 12.5})
        holder.sendall(protocol.control({"re": "fresh"}) + answer[:7])
        assert lines.send("s", op="fresh") and lines.idle == {}, "half an answer is none yet"
        holder.sendall(answer[7:] + protocol.control({"re": "fresh", "idle": "long"}))
        assert lines.send("s", op="fresh") and lines.idle == {"s": 12.5}
        holder.sendall(b"\xff" * 64)
        assert lines.send("s", op="fresh") and lines.idle == {}, "said again over a new connection"
        again, _ = listener.accept()
        assert _kinds(again) == ["fresh"]
        holder.close()
        again.close()
        assert lines.send("s", op="fresh")  # it hung up: a third one
        lines.drop("s")
        assert not HolderConnections(lambda _: tmp_path / "nobody").send("s", op="fresh")


def test_keep_only_forgets_sessions_that_are_gone(tmp_path: Path) -> None:
    with protocol.listen(str(tmp_path / "s")) as listener, protocol.listen(str(tmp_path / "t")) as other:
        lines = HolderConnections(lambda session: tmp_path / session)
        for session, one, idle in (("s", listener, 12.5), ("t", other, 1.0)):
            lines.send(session, op="fresh")
            holder, _ = one.accept()
            with holder:
                holder.sendall(protocol.control({"re": "fresh", "idle": idle}))
                lines.send(session, op="fresh")
        assert lines.idle == {"s": 12.5, "t": 1.0}
        lines.keep_only({"t": None})
        assert lines.idle == {"t": 1.0}


def _kinds(sock: socket.socket) -> list[object]:
    sock.settimeout(5)
    return [protocol.parse_control(payload)["op"] for _, payload in protocol.Decoder().feed(sock.recv(1 << 16))]
