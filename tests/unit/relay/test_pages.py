"""Plain pages on the relay's port: from a table, packed for who can take it, not sent again to who has it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from cmdop_migrate.relay import http


@pytest.fixture
def made(tmp_path: Path) -> http.Pages:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "index.html").write_text("<p>hello")
    (tmp_path / "vendor" / "x.mjs").write_text("export const x = 1;\n" * 100)
    (tmp_path / "vendor" / ".stamp").write_text("not for others")
    return http.Pages({"/healthz": lambda: http.text("ok\n")}, tmp_path)


def ask(made: http.Pages, path: str, **headers: str) -> Response:
    return made.answer(Request(path, Headers({name.replace("_", "-"): value for name, value in headers.items()})))


def test_only_files_of_the_page_are_served(made: http.Pages, tmp_path: Path) -> None:
    assert ask(made, "/").body == ask(made, "/index.html?x=1").body == b"<p>hello"
    assert ask(made, "/vendor/x.mjs").headers["Content-Type"].startswith("text/javascript")
    for path in ("/vendor/.stamp", "/vendor", "/../index.html", "/nothing", f"{tmp_path}/index.html", ""):
        answer = ask(made, path)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (404, "no-store"), path
    assert all(
        "script-src 'self'" in ask(made, path).headers["Content-Security-Policy"] for path in ("/", "/x", "/healthz")
    )


def test_files_are_sent_as_gzip_if_accepted(made: http.Pages) -> None:
    plain, packed = ask(made, "/vendor/x.mjs"), ask(made, "/vendor/x.mjs", Accept_Encoding="gzip, br")
    assert packed.headers["Content-Encoding"] == "gzip" and "Content-Encoding" not in plain.headers
    assert len(packed.body) < len(plain.body) == int(plain.headers["Content-Length"])
    assert gzip.decompress(packed.body) == plain.body


def test_unchanged_files_are_answered_with_304(made: http.Pages) -> None:
    tag = ask(made, "/").headers["ETag"]
    same = ask(made, "/", If_None_Match=tag)
    assert (same.status_code, same.body, same.headers["Cache-Control"]) == (304, b"", "no-cache")
    assert ask(made, "/", If_None_Match='"other"').status_code == 200
    assert "ETag" not in ask(made, "/healthz").headers


def test_the_page_preloads_all_its_modules() -> None:
    index = (http.OWN / "index.html").read_text()
    listed = set(re.findall(r'modulepreload" href="([a-z-]+\.js)"', index))
    assert listed == {file.name for file in http.OWN.glob("*.js")} - {"boot.js"}
