"""What an image says about the session in it, believed only as far as it makes sense.

A signature says who made an image, not that it is harmless: whoever has the
key may have been careless, or another. Anything odd is ImageRefused, before
CRIU or the file system of this host hear of it.
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
JOURNAL = {"inputs": "inputs.jsonl", "inputs-old": "inputs.jsonl" + OLD}  # part of the image: file beside the record


def record(manifest: Manifest) -> Record:
    """The session's record as it was when it was captured."""
    try:
        found = Record.from_json(manifest.facts["record"])
        session_name(found.name)
        _checked(found, manifest)
    except (KeyError, TypeError, ValueError, AttributeError, CmdopError) as error:
        raise ImageRefused(f"the image does not say what session it is of: {error}", _HINT) from error
    return found


def _checked(found: Record, manifest: Manifest) -> None:
    if found.session != manifest.session:
        raise ValueError("it names another session")
    if not found.layers or found.layers[0] != "/":
        raise ValueError("it has no root")
    for path in (*found.layers, *found.binds):
        if not isinstance(path, str) or not _is_plain(path):
            raise ValueError(f"not a mount point: {path!r:.80}")
    for name in manifest.blobs:
        if name.startswith("criu/") and name.count("/") != 1:
            raise ValueError(f"not a part of a dump: {name!r:.80}")


def _is_plain(path: str) -> bool:
    return os.path.isabs(path) and not path.startswith("//") and os.path.normpath(path) == path and "\0" not in path


def blob(image: Image, name: str) -> bytes:
    try:
        return image.blob(name)
    except KeyError:
        raise ImageRefused(f"the image has no part {name!r}", _HINT) from None


def journal(directory: Path) -> Iterator[tuple[str, bytes]]:
    for name, path in JOURNAL.items():
        if (directory / path).exists():
            yield name, (directory / path).read_bytes()


def lay_journal(image: Image, directory: Path) -> None:
    """The journal of inputs; what a former incarnation left here is replaced."""
    for name, path in JOURNAL.items():
        if name == "inputs" or name in image.manifest.blobs:
            (directory / path).write_bytes(blob(image, name))
        else:
            (directory / path).unlink(missing_ok=True)


def terminal(image: Image) -> dict[str, Any]:
    try:
        found = json.loads(blob(image, "terminal"))
        for key in ("unread", "unwritten"):
            found[key].encode("latin-1")
        found["staged"] = _staged(found.get("staged"))
        found["streams"] = _streams(found.get("streams"))
        found["carried"] = _carried(found | ({"turn": None} if image.manifest.is_fork else {}))
    except (Refused, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageRefused(f"the image does not describe its terminal: {error!r:.80}", _HINT) from error
    return dict(found)


def _staged(found: Any) -> dict[str, Any]:
    """What was typed and not committed; older images do not say."""
    if found is None:
        return {"data": "", "authors": [], "secret": False}
    if len(found["data"].encode("latin-1")) > LINE_LIMIT or not all(isinstance(one, str) for one in found["authors"]):
        raise ValueError("not what somebody typed")
    return {"data": found["data"], "authors": list(found["authors"]), "secret": bool(found["secret"])}


def _streams(found: Any) -> input_streams.Saved:
    """How much of each numbered input it had got; older images do not say."""
    table = input_streams.Streams()
    if found is not None:
        table.load(found)
    return table.save()


def _carried(found: dict[str, Any]) -> dict[str, Any]:
    """Who may write, what waits to be written, and where the journal stood; older images do not say."""
    turn = Turn()
    if found.get("turn") is not None:
        turn.load(found["turn"], 0.0)
    queued = [(actor, str(data), bool(secret)) for actor, data, secret in found.get("queued", [])]
    if not all(actor is None or isinstance(actor, str) for actor, _, _ in queued):
        raise ValueError("not a name")
    if sum(len(data.encode("latin-1")) for _, data, _ in queued) > QUEUE_LIMIT + MAX_PAYLOAD:
        raise ValueError("more input than any session keeps")
    journal = found.get("journal")
    if journal is not None:
        journal = {"next": int(journal["next"]), "head": str(journal["head"])[:128]}
    return {"turn": turn.save(0.0), "queued": [list(one) for one in queued], "journal": journal}


def outside(image: Image) -> list[Connection]:
    """The connections to the outside that were open when it was captured."""
    try:
        return [Connection(**row) for row in json.loads(blob(image, "connections"))]
    except (ValueError, TypeError) as error:
        raise ImageRefused(f"the image does not list its connections: {error!r:.80}", _HINT) from error


def check_room(state_dir: Path, manifest: Manifest) -> None:
    """Blocked when this disk cannot hold the sealed image and the session's files: said before anything is made."""
    try:
        stored, files = manifest.sizes["stored"], manifest.facts["files_bytes"]
        if files < 0 or stored > len(manifest.packs) * PACK_SIZE:
            raise ValueError("it would be more than there is")
        needed = stored + files + SPARE
    except (KeyError, TypeError, ValueError) as error:
        raise ImageRefused(f"the image does not say its true size: {error!r:.80}", _HINT) from error
    free = trash.make_room(str(state_dir), needed)
    if free < needed:
        message = f"not enough disk at {state_dir}: {units.show_size(free)} free, {units.show_size(needed)} needed"
        raise Blocked(message, "Free some, then restore again: the checkpoint is intact.")
