from __future__ import annotations

import os
import stat
import threading

import pytest

from cmdop_migrate.errors import BadConfig, ImageRefused, Usage
from cmdop_migrate.images.format import keys


def test_key_file_is_created_once_private_and_shared(tmp_path):
    path, rings = tmp_path / "state" / "keys", []
    threads = [threading.Thread(target=lambda: rings.append(keys.load_or_create(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ring.current.fingerprint for ring in rings}) == 1 and len(rings) == 8
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["keys"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_key_file_readable_by_others_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    keys.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(BadConfig, match="others"):
        keys.load(path)


def test_rotation_keeps_the_old_key(tmp_path):
    path = tmp_path / "keys"
    old = keys.load_or_create(path).current.fingerprint
    ring = keys.rotate(path)
    assert ring.current.fingerprint != old and ring.get(old).fingerprint == old
    assert [k.fingerprint for k in keys.load(path).keys] == [k.fingerprint for k in ring.keys]


def test_temporary_file_of_a_killed_rotation_is_removed(tmp_path):
    path = tmp_path / "keys"
    keys.load_or_create(path)
    old, young, other = (tmp_path / f".keys.{end}" for end in ("0123456789abcdef", "f" * 16, "mine"))
    for one in (old, young, other):
        one.write_bytes(path.read_bytes())
    os.utime(old, (1, 1))
    os.utime(other, (1, 1))
    keys.rotate(path)
    assert sorted(os.listdir(tmp_path)) == sorted([".keys.lock", other.name, young.name, "keys"])


def test_concurrent_rotations_lose_no_key(tmp_path):
    path = tmp_path / "keys"
    keys.load_or_create(path)
    threads = [threading.Thread(target=keys.rotate, args=(path,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys.load(path).keys) == 7


def test_export_and_import_share_the_key_in_both_directions(tmp_path):
    ours, theirs = tmp_path / "a", tmp_path / "b"
    keys.load_or_create(theirs)
    text = keys.export_text(keys.rotate(ours))
    merged = keys.import_text(theirs, text)
    assert len(merged.keys) == 3 and merged.current.fingerprint == keys.load(ours).current.fingerprint
    assert len(keys.import_text(theirs, text).keys) == 3
    own = keys.rotate(theirs).current.fingerprint
    assert keys.import_text(theirs, text, make_current=False).current.fingerprint == own
    fresh = keys.import_text(tmp_path / "c" / "keys", text)
    assert fresh.current.fingerprint == keys.load(ours).current.fingerprint


def test_damaged_key_block_or_file_is_refused_without_quoting_it(tmp_path):
    path = tmp_path / "keys"
    ring = keys.load_or_create(path)
    secret = ring.current.master.reveal().hex()
    lines = keys.export_text(ring).splitlines()
    for bad in ("", "x", "\n".join(lines[:-1]), "\n".join([lines[0], lines[1][:-4], *lines[2:]])):
        with pytest.raises(Usage):
            keys.import_text(path, bad)
    text = path.read_text()
    for bad in (text[:-5], text.replace('"format": 1', '"format": 9'), text.replace(secret, secret[:-2]), "[]", "{}"):
        path.write_text(bad)
        with pytest.raises(BadConfig) as caught:
            keys.load(path)
        assert secret not in str(caught.value) and secret not in repr(caught.value.__cause__)


def test_key_repr_shows_no_secret(tmp_path):
    ring = keys.load_or_create(tmp_path / "keys")
    key = ring.current
    shown = repr(ring) + str(key) + repr(key.id_key) + repr(key.seal_key)
    for secret in (key.master.reveal(), key.id_key.reveal(), key.seal_key.reveal()):
        assert secret.hex() not in shown and repr(secret) not in shown
    assert len({key.id_key.reveal(), key.seal_key.reveal(), key.master.reveal(), key.derive("signing seed")}) == 4


def test_unknown_key_is_named_in_the_error():
    ring = keys.KeyRing((keys.new_key(),))
    with pytest.raises(ImageRefused, match="abcdef"):
        ring.get("abcdef" * 5)
