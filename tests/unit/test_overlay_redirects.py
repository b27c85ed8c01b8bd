"""Names of renamed directories in the layer below."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cmdop_migrate.session.overlay_redirects import NAME, LowerNames, read


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    for path, redirect in (("a2", b"a"), ("new/b3", b"/a/b"), ("new/b3/c4", b"c"), ("new/b3/c4/plain", None)):
        (tmp_path / path).mkdir(parents=True)
        if redirect is not None:
            try:
                os.setxattr(tmp_path / path, NAME, redirect)
            except PermissionError:
                pytest.skip("needs root")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "lower"),
    [
        ("file", "file"),
        ("other/file", "other/file"),
        ("a2", "a2"),  # what is asked for is no directory: it is below one
        ("a2/file", "a/file"),
        ("a2/not/in/upper", "a/not/in/upper"),
        ("new/file", "new/file"),
        ("new/b3/file", "a/b/file"),
        ("new/b3/c4/file", "a/b/c/file"),
        ("new/b3/c4/plain/file", "a/b/c/plain/file"),
    ],
)
def test_names_below_renamed_directories_are_translated(upper: Path, path: str, lower: str) -> None:
    names = LowerNames(upper)
    assert names.find(path) == lower
    assert names.find(path) == lower


def test_a_very_deep_path_is_translated(upper: Path) -> None:
    deep = "/".join("d" * 3000)
    assert LowerNames(upper).find(f"a2/{deep}") == f"a/{deep}"


def test_what_is_not_there_is_not_redirected(upper: Path) -> None:
    (upper / "file").touch()
    (upper / "link").symlink_to("a2")
    assert read(upper / "gone") is read(upper / "file") is read(upper / "link") is read(upper / "file" / "x") is None
