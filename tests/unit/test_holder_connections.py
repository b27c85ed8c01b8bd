"""The agent's lines to holders: what they answer is heard, whatever they answer."""

from __future__ import annotations

import socket
from pathlib import Path

from cmdop_migrate.agent.holder_connections import Lines
from cmdop_migrate.holder import protocol


def test_how_long_it_has_been_idle_is_kept_and_nonsense_costs_only_the_connection(tmp_path: Path) -> None:
    listener = protocol.listen(str(tmp_path / "s"))
    with listener:
        lines = Lines(lambda session: tmp_path / session)
        assert lines.say("s", op="fresh") and lines.idle == {}
        holder, _ = listener.accept()
        answer = protocol.control({"re": "fresh", "idle": 12.5})
        holder.sendall(protocol.control({"re": "fresh"}) + answer[:7])
        assert lines.say("s", op="fresh") and lines.idle == {}, "half an answer is none yet"
        holder.sendall(answer[7:] + protocol.control({"re": "fresh", "idle": "long"}))
        assert lines.say("s", op="fresh") and lines.idle == {"s": 12.5}
        holder.sendall(b"\xff" * 64)
        assert lines.say("s", op="fresh") and lines.idle == {}, "said again over a new connection"
        again, _ = listener.accept()
        assert _kinds(again) == ["fresh"]
        holder.close()
        again.close()
        assert lines.say("s", op="fresh")  # it hung up: a third one
        lines.drop("s")
        assert not Lines(lambda _: tmp_path / "nobody").say("s", op="fresh")


def test_of_those_that_are_gone_nothing_is_kept(tmp_path: Path) -> None:
    with protocol.listen(str(tmp_path / "s")) as listener, protocol.listen(str(tmp_path / "t")) as other:
        lines = Lines(lambda session: tmp_path / session)
        for session, one, idle in (("s", listener, 12.5), ("t", other, 1.0)):
            lines.say(session, op="fresh")
            holder, _ = one.accept()
            with holder:
                holder.sendall(protocol.control({"re": "fresh", "idle": idle}))
                lines.say(session, op="fresh")
        assert lines.idle == {"s": 12.5, "t": 1.0}
        lines.keep({"t": None})
        assert lines.idle == {"t": 1.0}


def _kinds(sock: socket.socket) -> list[object]:
    sock.settimeout(5)
    return [protocol.parse_control(payload)["op"] for _, payload in protocol.Decoder().feed(sock.recv(1 << 16))]
