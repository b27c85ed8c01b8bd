"""Check which CRIU works on which kernel, and the cache of probe results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cmdop_migrate.criu.install import fetch, find
from cmdop_migrate.criu.install.probe_cache import ProbeCache, ProbeResult
from cmdop_migrate.errors import Blocked

RELEASE = os.uname().release


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.2.1\nGitID: v4.2.1\n", (4, 2, 1)),
        ("Version: 4.2\n", (4, 2, 0)),
        ("Version: 3.17.1\n", (3, 17, 1)),
        ("4.2.1-1", (4, 2, 1)),
        ("1:4.1.1-1ubuntu2~24.04", (4, 1, 1)),
        ("v4.0", (4, 0, 0)),
        ("command not found", None),
        ("", None),
    ],
)
def test_versions_of_criu_and_of_packages_are_parsed(text: str, version: tuple[int, int, int] | None) -> None:
    assert find.parse_version(text) == version


@pytest.mark.parametrize(
    ("version", "release", "usable"),
    [
        ((3, 17, 1), "6.1.0-37-amd64", True),
        ((4, 1, 1), "6.15.9", True),
        ((4, 1, 1), "6.16.0", False),
        ((4, 1, 99), "7.0.0-rc1", False),
        ((4, 2, 0), "6.16.0", True),
        ((4, 2, 1), "6.18.44-cloud", True),
        ((5, 0, 0), "7.3", True),
        ((3, 17, 1), "unreadable", True),
    ],
)
def test_criu_before_4_2_is_too_old_for_kernel_6_16(version: tuple[int, int, int], release: str, usable: bool) -> None:
    assert (find.too_old(version, release) is None) is usable


def test_os_release_is_parsed_with_and_without_quotes() -> None:
    text = "# comment\nNAME=\"Debian GNU/Linux\"\nID=debian\nVERSION_CODENAME=bookworm\nID_LIKE='a b'\n\n"
    assert fetch.parse_os_release(text) == {
        "NAME": "Debian GNU/Linux",
        "ID": "debian",
        "VERSION_CODENAME": "bookworm",
        "ID_LIKE": "a b",
    }


def test_missing_os_release_is_no_error(tmp_path: Path) -> None:
    assert fetch.read_os_release(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ({"ID": "fedora"}, "dnf install criu"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "dnf install criu"),
        ({"ID": "manjaro", "ID_LIKE": "arch"}, "pacman -S criu"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "zypper install criu"),
        ({}, "package criu"),
    ],
)
def test_install_hint_names_the_package_of_the_distribution(release: dict[str, str], says: str) -> None:
    assert says in fetch.install_hint(release)


def fake(path: Path, version: str, check: int, counter: Path) -> Path:
    """Write a program that answers as CRIU does, and counts how often it is run."""
    path.write_text(
        f'#!/bin/sh\necho "$1" >> {counter}\n'
        f'case "$1" in --version) echo "Version: {version}";; check) echo "Error: no such luck"; exit {check};; esac\n'
    )
    path.chmod(0o755)
    return path


def test_working_configured_criu_is_used_and_probed_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    binary = fake(tmp_path / "criu", "4.9.1", 0, asked)
    first = find.find(str(binary), tmp_path / "prefix")
    assert first == find.Criu((str(binary),), (4, 9, 1), "configured")
    if os.geteuid() != 0:
        pytest.skip("verdicts are only kept for root")
    assert find.find(str(binary), tmp_path / "prefix") == first
    assert asked.read_text().split() == ["--version", "check"]


def test_failing_configured_criu_is_refused_with_its_error_and_probed_again(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    binary = fake(tmp_path / "criu", "4.9.1", 1, asked)
    for _ in range(2):
        with pytest.raises(Blocked, match="no such luck") as caught:
            find.find(str(binary), tmp_path / "prefix")
        assert "criu" in caught.value.hint
    # A new file at the same path is another CRIU.
    fake(binary, "4.9.2", 0, asked)
    found = find.find(str(binary), tmp_path / "prefix")
    assert found is not None and found.version == (4, 9, 2)


def test_missing_configured_criu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Blocked, match="No such file"):
        find.find(str(tmp_path / "none"), tmp_path / "prefix")


def test_probe_result_is_valid_for_one_kernel_and_one_file(tmp_path: Path) -> None:
    binary = tmp_path / "criu"
    binary.write_text("one")
    verdicts = ProbeCache(tmp_path)
    verdict = ProbeResult((4, 2, 1), "")
    verdicts.put("6.18.1", binary, verdict)
    assert verdicts.get("6.18.1", binary) == verdict
    assert verdicts.get("6.18.2", binary) is None
    os.utime(binary, ns=(1, 1))
    assert verdicts.get("6.18.1", binary) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', "\x00"])
def test_damaged_probe_cache_is_ignored_and_replaced(tmp_path: Path, text: str) -> None:
    binary = tmp_path / "criu"
    binary.write_text("one")
    (tmp_path / "verdicts.json").write_text(text)
    verdicts = ProbeCache(tmp_path)
    assert verdicts.get("6.18.1", binary) is None
    verdicts.put("6.18.1", binary, ProbeResult((4, 2, 1), "bad"))
    assert ProbeCache(tmp_path).get("6.18.1", binary) == ProbeResult((4, 2, 1), "bad")


def test_remains_of_a_killed_fetch_are_never_used(tmp_path: Path) -> None:
    half = tmp_path / "work-abc" / "sid" / "tree" / "usr" / "sbin"
    half.mkdir(parents=True)
    fake(half / "criu", "9.9.9", 0, tmp_path / "asked")
    found = find.find(None, tmp_path)
    assert found is None or found.source == "system"
    assert not (tmp_path / "asked").exists()


def test_private_criu_runs_with_its_own_loader(tmp_path: Path) -> None:
    tree = tmp_path / "criu-4.2.1-1"
    libraries = tree / "usr/lib/some-linux-gnu"
    libraries.mkdir(parents=True)
    (libraries / "ld-linux-some.so.2").touch()
    candidate = find.private_candidate(tree)
    assert candidate.argv[0] == str(libraries / "ld-linux-some.so.2")
    assert candidate.argv[1] == "--library-path"
    assert str(libraries) in candidate.argv[2].split(":")
    assert candidate.argv[3] == str(tree / "usr/sbin/criu")
