"""Read and validate what an image says about its session.

A signature proves that the maker of an image had the key, not that the image is
harmless: the key may have been stolen or used carelessly. Invalid content
raises ImageRefused before it reaches CRIU or the file system of this host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cmdop_migrate import units
from cmdop_migrate.errors import Blocked, CmdopError, ImageRefused
from cmdop_migrate.holder import input_streams
from cmdop_migrate.holder.input_journal import OLD
from cmdop_migrate.holder.input_queue import LINE_LIMIT, QUEUE_LIMIT
from cmdop_migrate.holder.protocol import MAX_PAYLOAD
from cmdop_migrate.holder.write_turn import Refused, Turn
from cmdop_migrate.images.format.layout import PACK_SIZE
from cmdop_migrate.images.format.manifest import Manifest
from cmdop_migrate.images.read.reader import Image
from cmdop_migrate.model import Record, session_name
from cmdop_migrate.session.tcp_connections import Connection
from cmdop_migrate.util import trash

_HINT = "cmdop-migrate makes no such image. Was it made by a newer version?"
SPARE = 32 << 20
# The parts of an image that hold the input journal, and the file of each in the session's directory.
JOURNAL = {"inputs": "inputs.jsonl", "inputs-old": "inputs.jsonl" + OLD}


def record(manifest: Manifest) -> Record:
    """Return the session's record as it was when it was captured."""
    try:
        captured = Record.from_json(manifest.facts["record"])
        session_name(captured.name)
        _check(captured, manifest)
    except (KeyError, TypeError, ValueError, AttributeError, CmdopError) as error:
        raise ImageRefused(f"the image has no valid record of its session: {error}", _HINT) from error
    return captured


def _check(captured: Record, manifest: Manifest) -> None:
    """Raise ValueError if the record does not fit its manifest or names an invalid path."""
    if captured.session != manifest.session:
        raise ValueError("it names another session")
    if not captured.layers or captured.layers[0] != "/":
        raise ValueError("it has no root")
    for path in (*captured.layers, *captured.binds):
        if not isinstance(path, str) or not _is_plain(path):
            raise ValueError(f"not a mount point: {path!r:.80}")
    for name in manifest.blobs:
        if name.startswith("criu/") and name.count("/") != 1:
            raise ValueError(f"not a part of a dump: {name!r:.80}")


def _is_plain(path: str) -> bool:
    return os.path.isabs(path) and not path.startswith("//") and os.path.normpath(path) == path and "\0" not in path


def blob(image: Image, name: str) -> bytes:
    """Return a part of the image. Raises ImageRefused if the image has no part of this name."""
    try:
        return image.blob(name)
    except KeyError:
        raise ImageRefused(f"the image has no part {name!r}", _HINT) from None


def read_input_journal(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of an image that hold the session's input journal, read from its directory."""
    for name, path in JOURNAL.items():
        if (directory / path).exists():
            yield name, (directory / path).read_bytes()


def write_input_journal(image: Image, directory: Path) -> None:
    """Write the image's input journal into the session's directory, in place of that of a former incarnation."""
    for name, path in JOURNAL.items():
        if name == "inputs" or name in image.manifest.blobs:
            (directory / path).write_bytes(blob(image, name))
        else:
            (directory / path).unlink(missing_ok=True)


def terminal(image: Image) -> dict[str, Any]:
    """Return the state of the session's terminal: window, pending input, write turn. Raises ImageRefused if it is
    invalid."""
    try:
        state = json.loads(blob(image, "terminal"))
        for key in ("unread", "unwritten"):
            state[key].encode("latin-1")
        state["staged"] = _staged(state.get("staged"))
        state["streams"] = _streams(state.get("streams"))
        state["carried"] = _carried(state | ({"turn": None} if image.manifest.is_fork else {}))
    except (Refused, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageRefused(f"the image does not describe its terminal: {error!r:.80}", _HINT) from error
    return dict(state)


def _staged(staged: Any) -> dict[str, Any]:
    """Check the input that was typed and not committed; older images have none."""
    if staged is None:
        return {"data": "", "authors": [], "secret": False}
    authors = staged["authors"]
    if len(staged["data"].encode("latin-1")) > LINE_LIMIT or not all(isinstance(author, str) for author in authors):
        raise ValueError("not a staged input")
    return {"data": staged["data"], "authors": list(authors), "secret": bool(staged["secret"])}


def _streams(streams: Any) -> input_streams.Saved:
    """Check how much of each numbered input stream the session had received; older images do not have it."""
    table = input_streams.Streams()
    if streams is not None:
        table.load(streams)
    return table.save()


def _carried(state: dict[str, Any]) -> dict[str, Any]:
    """Check the write turn, the queued input and the position of the input journal; older images do not have them."""
    turn = Turn()
    if state.get("turn") is not None:
        turn.load(state["turn"], 0.0)
    queued = [(actor, str(data), bool(secret)) for actor, data, secret in state.get("queued", [])]
    if not all(actor is None or isinstance(actor, str) for actor, _, _ in queued):
        raise ValueError("not a name")
    if sum(len(data.encode("latin-1")) for _, data, _ in queued) > QUEUE_LIMIT + MAX_PAYLOAD:
        raise ValueError("more input than any session keeps")
    journal = state.get("journal")
    if journal is not None:
        journal = {"next": int(journal["next"]), "head": str(journal["head"])[:128]}
    return {"turn": turn.save(0.0), "queued": [list(row) for row in queued], "journal": journal}


def outside_connections(image: Image) -> list[Connection]:
    """Return the connections to the outside that were open when the session was captured."""
    try:
        return [Connection(**row) for row in json.loads(blob(image, "connections"))]
    except (ValueError, TypeError) as error:
        raise ImageRefused(f"the image does not list its connections: {error!r:.80}", _HINT) from error


def check_room(state_dir: Path, manifest: Manifest) -> None:
    """Raise Blocked if this disk cannot hold the sealed image and the session's files, before anything is written."""
    try:
        stored, files = manifest.sizes["stored"], manifest.facts["files_bytes"]
        if files < 0 or stored > len(manifest.packs) * PACK_SIZE:
            raise ValueError("larger than its packs")
        needed = stored + files + SPARE
    except (KeyError, TypeError, ValueError) as error:
        raise ImageRefused(f"the image does not state its true size: {error!r:.80}", _HINT) from error
    free = trash.make_room(str(state_dir), needed)
    if free < needed:
        message = f"not enough disk at {state_dir}: {units.show_size(free)} free, {units.show_size(needed)} needed"
        raise Blocked(message, "Free some, then restore again: the checkpoint is intact.")
