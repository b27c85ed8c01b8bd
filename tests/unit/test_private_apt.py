"""What a private apt takes from the machine's settings, and what it must not."""

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


def test_the_keyring_is_the_one_of_the_same_entry() -> None:
    assert apt.signed_by(DEB822, True, "http://mirror.example/debian", "bookworm") == KEYRING
    assert apt.signed_by(DEB822, True, "http://mirror.example/debian", "trixie") is None


def test_a_key_written_into_the_sources_is_taken_whole() -> None:
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
def test_one_line_sources_are_read_too(line: str, key: str | None) -> None:
    assert apt.signed_by(line, False, "http://m.example/debian", "bookworm") == key


def test_only_the_distributions_own_base_suite_counts() -> None:
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


def test_an_archive_never_updated_is_known_by_its_suite() -> None:
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
def test_suites_go_from_old_to_new_and_never_back(release: str, suites: tuple[str, ...]) -> None:
    assert apt.Archive("debian", "http://m.example", release, ("main",), None).suites == suites


def test_proxy_and_credentials_stay_the_systems_and_trust_is_never_loosened() -> None:
    text = apt.conf_text(Path("/some/work"), sandboxed=True)
    assert "Proxy" not in text and "netrc" not in text and "Etc::parts" not in text and "trusted" not in text
    assert 'APT::Get::AllowUnauthenticated "false";' in text
    assert 'Acquire::AllowInsecureRepositories "false";' in text
    assert "Sandbox" not in text
    assert 'APT::Sandbox::User "root";' in apt.conf_text(Path("/some/work"), sandboxed=False)
