"""Damaged, replayed, forged images through the command line: exit 7, CRIU never started, the session still parked."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cmdop_migrate import config
from cmdop_migrate.host import resources
from cmdop_migrate.images.files.file_table import CHAR, DIRECTORY, FILE, SYMLINK, Entry, FileTable
from cmdop_migrate.images.format import keys, layout, manifest
from cmdop_migrate.images.format.seal import Sealer
from cmdop_migrate.images.read import reader
from cmdop_migrate.images.read.load_table import load_table
from cmdop_migrate.images.store import catalog
from cmdop_migrate.images.write.writer import ImageWriter
from cmdop_migrate.storage.local import LocalStore
from tests.crash.witness import Witness
from tests.support.host import Host, a_host
from tests.support.sampling import sampled

WRAPPER = """#!/bin/sh
case "$1" in swrk|lazy-pages) echo "$@" >> {log};; esac
exec {criu} "$@"
"""


class Parked:
    """A session with two checkpoints, the second of which is the session; and a CRIU that tells when it is asked."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls = host.dir / "criu-calls"
        found = resources.find_criu(config.load(environ=host.env()))
        wrapper = host.dir / "criu"
        wrapper.write_text(WRAPPER.format(log=self.calls, criu=" ".join(found.argv)))
        wrapper.chmod(0o700)
        host.extra["CMDOP_MIGRATE_CRIU"] = str(wrapper)
        self.witness = Witness.start(host)
        self.first: str = host.cm_json("checkpoint", "w", "--leave-running")["checkpoint"]
        self.second: str = host.cm_json("checkpoint", "w")["checkpoint"]
        self.calls.unlink()
        self.place = host.state / "store"
        self.copy = host.dir / "copy"
        shutil.copytree(self.place, self.copy)
        self.store = LocalStore(self.place)
        self.ring = keys.load(host.state / "keys")
        self.manifest = catalog.load(self.store, self.ring, self.second)

    def path(self, name: str) -> Path:
        return self.place / name

    def mend(self) -> None:
        shutil.rmtree(self.place)
        shutil.copytree(self.copy, self.place)

    def refused(self, words: str = "", reference: str = "w", *options: str) -> str:
        error = self.host.fails("restore", reference, *options, status=7, code="image_refused")
        assert words in error["message"], error
        assert not self.calls.exists(), f"CRIU was started: {self.calls.read_text()}"
        self.witness.assert_parked()
        self.host.assert_clean(ended=True)
        return str(error["message"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parked]:
    if os.geteuid() != 0:
        pytest.skip("sessions need root")
    with a_host(tmp_path_factory.mktemp("damage")) as host:
        made = Parked(host)
        yield made
        made.witness.restore()  # from the intact copy it comes back, after all that


@pytest.fixture
def parked(shared: Parked) -> Iterator[Parked]:
    yield shared
    shared.mend()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def test_flipped_bit_anywhere_is_refused(parked: Parked) -> None:
    """In the manifest, in the chunk table, in chunks: sampled here, every position in the unit tests."""
    found = parked.manifest
    table = load_table(parked.store, found, Sealer(parked.ring.get(found.key)))
    draw = random.Random(4)
    places = [(found.packs[d.pack], d.offset + draw.randrange(d.length)) for d in found.table[:1]]
    for number in [0, *draw.sample(range(len(table)), 4)]:
        place = table.place(number)
        places.append(
            (found.packs[place.pack], place.offset + draw.choice([0, 5, place.length // 2, place.length - 1]))
        )
    size = parked.path(found.name).stat().st_size
    spots = [(found.name, at) for at in (0, 12, size // 3, size - 3)]
    for name, at in [*spots, *((layout.pack_name(pack), at) for pack, at in places)]:
        flip(parked.path(name), at)
        parked.refused()
        parked.mend()


def test_truncated_missing_and_swapped_packs_are_refused(parked: Parked) -> None:
    one, *others = [parked.path(layout.pack_name(pack)) for pack in parked.manifest.packs]
    assert others, "the image must have two packs to swap"
    for size in (0, 100, one.stat().st_size // 2):
        os.truncate(one, size)
        parked.refused()
        parked.mend()
    one.unlink()
    parked.refused("missing")
    parked.mend()
    first, second = one.read_bytes(), others[0].read_bytes()
    one.write_bytes(second)
    others[0].write_bytes(first)
    parked.refused()


def test_older_manifest_under_a_newer_name_is_refused(parked: Parked) -> None:
    older = parked.path(layout.manifest_name(parked.witness.session, parked.first))
    shutil.copy(older, parked.path(parked.manifest.name))
    parked.refused()


def test_missing_manifest_is_not_replaced_by_an_older_one(parked: Parked) -> None:
    parked.path(parked.manifest.name).unlink()
    parked.host.fails("restore", "w", status=3, code="checkpoint_not_found")
    assert not parked.calls.exists()
    parked.witness.assert_parked()


def test_wrong_signature_or_format_is_refused(parked: Parked) -> None:
    path = parked.path(parked.manifest.name)
    envelope = json.loads(path.read_bytes())
    other = keys.new_key().signer.sign(b"").hex()
    for change, words in (
        ({"signature": other}, "signature"),
        ({"signature": ""}, "signature"),
        ({"format": 2}, "format 2"),
        ({"key": "00" * 16}, "does not have"),
    ):
        path.write_text(json.dumps(envelope | change, sort_keys=True, separators=(",", ":")))
        parked.refused(words)


def test_checkpoint_sealed_with_another_hosts_key(parked: Parked, make_host: Callable[[str], Host]) -> None:
    other = make_host("host-b")
    other.extra["CMDOP_MIGRATE_STORE"] = f"file://{parked.place}"
    error = other.fails("restore", parked.second, status=7, code="image_refused")
    assert "key import" in error["hint"]
    other.fails("restore", status=7, code="image_refused")
    (row, row_2) = other.cm_json("checkpoints", "ls")["checkpoints"]
    assert "does not have" in row["problem"] and "does not have" in row_2["problem"]
    other.assert_clean(ended=True)
    assert other.session_dirs() == []


Change = Callable[[dict[str, bytes], dict[str, Any]], None]


def forge(parked: Parked, change: Change) -> str:
    """A checkpoint of the same session, sealed and signed with the right key, that says what `change` makes it say."""
    local = parked.host.dir / "forge"
    image = reader.fetch(parked.store, parked.ring, parked.second, local)
    blobs = {name: image.blob(name) for name in image.manifest.blobs if not name.startswith(layout.PAGE_TABLES)}
    facts = json.loads(json.dumps(dict(image.manifest.facts)))
    image.close()
    shutil.rmtree(local)
    change(blobs, facts)
    writer = ImageWriter(parked.store, parked.ring, parked.witness.session, local)
    writer.begin()
    for name, data in blobs.items():
        writer.add_blob(name, data)
    made = writer.commit(parked.manifest.token, facts)
    shutil.rmtree(local, ignore_errors=True)
    return made.checkpoint


def _files(*entries: Entry) -> Change:
    table = FileTable((Entry(DIRECTORY, 0, b"", 0o755), *entries), ())

    def change(blobs: dict[str, bytes], _: dict[str, Any]) -> None:
        blobs["files/0"] = table.serialise()

    return change


def _record(**fields: Any) -> Change:
    return lambda _, facts: facts["record"].update(fields)


FORGED: dict[str, tuple[Change, str]] = {
    "a parent directory": (_files(Entry(FILE, 1, b"..", 0o644)), ""),
    "a path in a name": (_files(Entry(FILE, 1, b"../../etc/cron.d/x", 0o644)), ""),
    "a child of a symlink": (_files(Entry(SYMLINK, 1, b"a", target=b"/etc"), Entry(FILE, 2, b"b", 0o644)), ""),
    "a device node": (_files(Entry(CHAR, 1, b"mem", 0o666, rdev=(1, 1))), "device nodes"),
    "a huge file": (_files(Entry(FILE, 1, b"huge", 0o644, size=1 << 60)), ""),
    "no file table": (lambda blobs, _: blobs.pop("files/0") and None, "no part"),
    "noise for a file table": (lambda blobs, _: blobs.update({"files/0": b"\0" * 99}), ""),
    "another session's name": (_record(session="../../../../tmp/x"), "session"),
    "a layer outside of the root": (_record(layers=["/", "/../../etc"]), "mount point"),
    "a relative layer": (_record(layers=["/", "etc"]), "mount point"),
    "no layer": (_record(layers=[]), "root"),
    "a bad name": (_record(name="../x"), ""),
    "a record of a later version": (_record(version=99), "version"),
    "no record": (lambda _, facts: facts.pop("record") and None, ""),
    "a dump in folders": (lambda blobs, _: blobs.update({"criu/a/b.img": b"x"}), "dump"),
    "no terminal": (lambda blobs, _: blobs.pop("terminal") and None, "terminal"),
    "noise for a terminal": (lambda blobs, _: blobs.update({"terminal": b"[]"}), "terminal"),
    "host files above the root": (
        lambda blobs, _: blobs.update({"hostfiles": json.dumps([[["/../x", 1, 1, None, None], None]]).encode()}),
        "host files",
    ),
    "noise for host files": (lambda blobs, _: blobs.update({"hostfiles": b"{}"}), ""),
}


@pytest.mark.parametrize("what", sampled(FORGED, 8, "forged manifests"))
def test_invalid_content_signed_with_the_right_key_is_refused(parked: Parked, what: str) -> None:
    change, words = FORGED[what]
    # As a copy: the session's own lease names another checkpoint, and would refuse this one before it is looked at.
    message = parked.refused(words, forge(parked, change), "--fork", "copy")
    assert not os.path.lexists("/etc/cron.d/x"), message


def test_impossible_sizes_are_refused(parked: Parked) -> None:
    parked.refused("size", forge(parked, lambda _, facts: facts.update(files_bytes=-1)), "--fork", "copy")
    found = parked.manifest
    sizes = dict(found.sizes) | {"stored": 1 << 62}
    changed = manifest.Manifest(**{**found.__dict__, "sizes": sizes})
    parked.path(found.name).write_bytes(manifest.encode(changed, parked.ring.current))
    parked.refused("size")


def test_lazy_restore_ends_the_session_at_a_damaged_page(parked: Parked) -> None:
    """What is needed to begin is checked before; memory is checked as it comes."""
    parked.path(layout.pack_name(parked.manifest.packs[0])).unlink()
    done = parked.host.cm("--json", "restore", "w", "--lazy")
    assert done.returncode == 7, done
    parked.witness.assert_parked()
    parked.host.assert_clean(ended=True)


def test_checkpoints_verify_ls_and_drop_a_damaged_one(parked: Parked) -> None:
    host, found = parked.host, parked.manifest
    assert {one["problem"] for one in host.cm_json("checkpoints", "verify")["verified"]} == {None}
    mine = set(found.packs) - set(catalog.load(parked.store, parked.ring, parked.first).packs)
    flip(parked.path(layout.pack_name(mine.pop())), 40)
    done = host.cm("checkpoints", "verify")
    assert done.returncode == 7 and b"--drop" in done.stderr and b"key import" in done.stderr, done
    assert parked.second[:12].encode() + b"  a sealed part" in done.stdout, done
    assert parked.first[:12].encode() + b"  whole" in done.stdout, done
    host.ok("checkpoints", "verify", parked.first)
    flip(parked.path(found.name), 50)
    rows = {one["checkpoint"]: one for one in host.cm_json("checkpoints", "ls")["checkpoints"]}
    assert rows[parked.second]["problem"] and rows[parked.first]["problem"] is None
    assert parked.second[:12] in host.ok("checkpoints", "ls")
    kept = host.cm_json("checkpoints", "prune", "--keep-last", "1")
    assert kept["checkpoints"] == [parked.first] and kept["unreadable"], "an unreadable manifest keeps every pack"
    parked.mend()
    flip(parked.path(found.name), 50)
    gone = host.cm_json("checkpoints", "prune", "--drop", parked.second)
    assert gone["checkpoints"] == [parked.second] and gone["bytes"] > 0
    host.ok("checkpoints", "verify")
    assert [one["checkpoint"] for one in host.cm_json("checkpoints", "ls")["checkpoints"]] == [parked.first]
