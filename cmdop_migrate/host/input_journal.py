"""Read and verify the input journal of a session."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from cmdop_migrate.errors import ImageRefused
from cmdop_migrate.holder.input_journal import OLD
from cmdop_migrate.host.host import Host
from cmdop_migrate.model import Record
from cmdop_migrate.session import input_journal_check
from cmdop_migrate.session.holder_client import Channel, HolderGone

BROKEN = ImageRefused.exit  # the exit status for a damaged journal


def journal(this_host: Host, record: Record) -> Iterator[dict[str, Any]]:
    """Yield the inputs of a session, in order. Lines that are not JSON are skipped."""
    for line in journal_lines(this_host, record):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def journal_lines(this_host: Host, record: Record) -> Iterator[bytes]:
    """Yield the journal's lines as they are on disk, also damaged ones, except one that is just being written."""
    path = str(this_host.directory(record.session) / "inputs.jsonl")
    with ExitStack() as stack:
        files: list[BinaryIO] = []
        for name in (path, path + OLD):  # in this order: a file that is rotated in between is read twice, not lost
            with suppress(FileNotFoundError):
                files.append(stack.enter_context(open(name, "rb")))
        if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
            del files[1]
        for file in reversed(files):
            for line in file:
                if line.endswith(b"\n") or file is not files[0]:
                    yield line.rstrip(b"\n")


def verify(this_host: Host, record: Record) -> input_journal_check.JournalCheck:
    """Check that the journal is as it was written; of a live session also that its last line is the newest."""
    head = None
    if record.phase == "live":
        with suppress(HolderGone), Channel(this_host.socket(record.session)) as channel:
            head = channel.ask(op="status")["journal"]["head"]
    return input_journal_check.verify(journal_lines(this_host, record), head)


def verdict_json(verdict: input_journal_check.JournalCheck) -> dict[str, Any]:
    """Return a verdict as `inputs verify` prints it."""
    return {**asdict(verdict), "ok": verdict.ok}
