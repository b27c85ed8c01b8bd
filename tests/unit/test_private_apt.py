"""Check what the private apt takes from the host's settings, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmdop_migrate.criu.install import apt

KEYRING = "/usr/share/keyrings/some.gpg"
DEB822 = f"""# a comment
Types: deb
# another
URIs: http://mirror.example/debian/
Suites: bookworm bookworm-updates
Components: main
Signed-By: {KEYRING}

Types: deb
URIs: http://mirror.example/other
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
"""


def target(**changed: str) -> dict[str, str]:
    return {
        "created-by": "Packages",
        "target-of": "deb",
        "release": "bookworm",
        "repo-uri": "http://mirror.example/debian/",
        "component": "main",
        "origin": "Debian",
        "sourcesentry": "/sources/debian.sources:1",
    } | changed


def test_keyring_is_that_of_the_same_sources_entry() -> None:
    assert apt.signed_by(DEB822, True, "http://mirror.example/debian", "bookworm") == KEYRING
    assert apt.signed_by(DEB822, True, "http://mirror.example/debian", "trixie") is None


def test_inline_key_in_sources_is_kept_whole() -> None:
    key = apt.signed_by(DEB822, True, "http://mirror.example/other", "bookworm")
    assert key == "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc"
    source = apt.source_text(apt.Archive("debian", "http://m.example", "bookworm", ("main",), key), "sid", "amd64")
    assert apt.paragraphs(source)[0]["signed-by"] == key


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (f"deb [signed-by={KEYRING} arch=amd64] http://m.example/debian bookworm main", KEYRING),
        (f"deb [ arch=amd64 Signed-By={KEYRING} ] http://m.example/debian/ bookworm main", KEYRING),
        ("deb http://m.example/debian bookworm main", None),
        (f"# deb [signed-by={KEYRING}] http://m.example/debian bookworm main", None),
    ],
)
def test_keyring_of_one_line_sources(line: str, key: str | None) -> None:
    assert apt.signed_by(line, False, "http://m.example/debian", "bookworm") == key


def test_only_base_suites_of_the_distribution_are_used() -> None:
    targets = [
        target(release="bookworm-security", **{"repo-uri": "http://mirror.example/security/"}),
        target(origin="Some Vendor", **{"repo-uri": "http://vendor.example/"}),
        target(**{"created-by": "Translations"}),
        target(**{"target-of": "deb-src"}),
        target(),
        target(component="contrib"),
    ]
    found = apt.base_archives(targets)
    assert found == [
        (
            apt.Archive("debian", "http://mirror.example/debian", "bookworm", ("main", "contrib"), None),
            "/sources/debian.sources",
        )
    ]


def test_archive_without_origin_is_known_by_its_suite() -> None:
    (found,) = apt.base_archives([target(origin="", release="noble")])
    assert found[0].family == "ubuntu"


@pytest.mark.parametrize(
    ("release", "suites"),
    [
        ("bookworm", ("trixie", "forky", "sid")),
        ("oldstable", ("trixie", "forky", "sid")),
        ("trixie", ("trixie", "forky", "sid")),
        ("forky", ("forky", "sid")),
        ("sid", ("sid",)),
    ],
)
def test_suites_are_tried_from_old_to_new(release: str, suites: tuple[str, ...]) -> None:
    assert apt.Archive("debian", "http://m.example", release, ("main",), None).suites == suites


def test_apt_conf_keeps_proxy_and_credentials_and_demands_signatures() -> None:
    text = apt.conf_text(Path("/some/work"), sandboxed=True)
    assert "Proxy" not in text and "netrc" not in text and "Etc::parts" not in text and "trusted" not in text
    assert 'APT::Get::AllowUnauthenticated "false";' in text
    assert 'Acquire::AllowInsecureRepositories "false";' in text
    assert "Sandbox" not in text
    assert 'APT::Sandbox::User "root";' in apt.conf_text(Path("/some/work"), sandboxed=False)
