"""What clients type, on its way to those who may write: at once, held back while the session stands still, or refused.

Input that is numbered (streams.py) may come twice and goes in once. While the
session stands still it is not acknowledged: should it go on elsewhere, it is
sent again to there. Stdlib only: the holder loads this.
"""

from __future__ import annotations

from cmdop_migrate.holder import protocol
from cmdop_migrate.holder.clients import Client
from cmdop_migrate.holder.input_streams import Streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cmdop_migrate.holder.keeper import Keeper

Message = dict[str, object]
UNDECIDED = 0  # the number of an input that the gate has not let in yet; real ones begin at 1


class Typed:
    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.streams = Streams()
        self._held: list[tuple[Client, bytes, int | None]] = []  # with its number in its stream, if it has one

    def take(self, client: Client, data: bytes) -> None:
        """Without numbers: delivered, held back, or refused and said."""
        keeper = self._keeper
        if client.read_only:
            return
        keeper.idle.touch()
        if keeper.is_left:
            keeper.clients.say(client, {"event": "refused", "bytes": len(data)})
        elif keeper.stands_still:
            self._hold_back(client, data, None)
        else:
            self._put(client, data)

    def take_numbered(self, client: Client, at: int, data: bytes) -> Message:
        """The bytes from number `at` on -> how much of the stream there is now. What is refused, for want of the turn,
        has come all the same: it was said, and is not to be sent again."""
        keeper = self._keeper
        if client.read_only or client.stream is None or at < 0:
            return {"event": "refused", "bytes": len(data), "why": "read-only" if client.read_only else "no stream"}
        keeper.idle.touch()
        applied = self.streams.open(client.stream)
        if keeper.stands_still:
            self._hold_back(client, data, at)
            return {"event": "applied", "at": applied}
        new = self.streams.new(client.stream, at, data)
        if new is None:
            return {"event": "refused", "bytes": len(data), "why": "gap", "at": applied}
        if new:
            self._put(client, new)
        return {"event": "applied", "at": self.streams.apply(client.stream, len(new))}

    def send(self, client: Client, message: Message) -> Message | None:
        """One whole input. None: its answer comes later."""
        keeper, data = self._keeper, str(message["data"]).encode("latin-1")
        if keeper.stands_still:
            return {"re": "send", "error": "checkpointing"}
        if not keeper.inputs.has_room(len(data)):
            return {"re": "send", "error": "full"}
        stream = message.get("stream")
        if stream is not None and self.streams.open(str(stream)):
            seq, at = self.streams.last(str(stream))  # it is in: only the answer was lost
            if seq == UNDECIDED:
                return {"re": "send", "error": "gate", "why": "the gate was asked; what it answered got lost"}
            return {"re": "send", "seq": seq, "at": at}
        keeper.idle.touch()
        at = keeper.ring.end
        answer = keeper.writers.send(client, str(message["actor"]), data)
        if stream is not None and (answer is None or "error" not in answer):
            seq = UNDECIDED if answer is None else int(str(answer["seq"]))
            self.streams.apply(str(stream), len(data), seq, at)
        keeper.feed_terminal()
        return answer

    def deliver_held(self) -> None:
        """It goes on here."""
        held, self._held = self._held, []
        for client, data, at in held:
            if at is None:
                self._keeper.writers.put(client, data)
            else:
                self._keeper.clients.say(client, self.take_numbered(client, at, data))

    def refuse_held(self) -> None:
        """It ends here. What is numbered is not refused: nobody was told that it arrived, and it is sent again."""
        for one in {one for one, _, at in self._held if at is None}:
            count = sum(len(data) for client, data, _ in self._held if client is one)
            self._keeper.clients.say(one, {"event": "refused", "bytes": count})

    def _put(self, client: Client, data: bytes) -> None:
        keeper = self._keeper
        keeper.writers.put(client, data)
        keeper.feed_terminal()
        if not keeper.inputs.has_room(protocol.MAX_PAYLOAD // 16):
            keeper.clients.block(client)

    def _hold_back(self, client: Client, data: bytes, at: int | None) -> None:
        self._held.append((client, data, at))
        if sum(len(one) for _, one, _ in self._held) > protocol.MAX_PAYLOAD // 4:
            self._keeper.clients.block(client)
