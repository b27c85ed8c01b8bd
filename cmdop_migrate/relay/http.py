"""Serve plain HTTP on the relay's port: health, metrics, and the files of the web page. Every other path is 404."""

from __future__ import annotations

import gzip
import hashlib
import http
import mimetypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

# xterm.js writes style elements; libsodium is WebAssembly. Everything else is loaded from the relay itself.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
OWN = Path(__file__).with_name("web")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Page:
    """Represent one page. `packed`: the body as gzip; `tag`: the ETag. Files have both."""

    status: http.HTTPStatus
    type: str
    body: bytes
    packed: bytes = b""
    tag: str = ""


Maker = Callable[[], Page]


class Pages:
    """Represent a table from path to page. Files are read once, when the table is made: no request opens a file."""

    def __init__(self, makers: dict[str, Maker], assets: Path | None = None) -> None:
        self._makers = dict(makers)
        for path, page in _files(assets).items():
            self._makers.setdefault(path, page)

    def answer(self, request: Request) -> Response:
        """Return the response to a request that is not for a WebSocket."""
        maker = self._makers.get(request.path.partition("?")[0])
        page = maker() if maker else text("no such page\n", http.HTTPStatus.NOT_FOUND)
        if not page.tag:
            return response(page)
        more = {"ETag": page.tag, "Vary": "Accept-Encoding"}
        if request.headers.get("If-None-Match") == page.tag:
            return response(replace(page, status=http.HTTPStatus.NOT_MODIFIED, body=b""), **more)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return response(replace(page, body=page.packed), Content_Encoding="gzip", **more)
        return response(page, **more)


def text(content: str, status: http.HTTPStatus = http.HTTPStatus.OK) -> Page:
    """Return a page of plain text."""
    return Page(status, "text/plain; charset=utf-8", content.encode())


def response(page: Page, **more: str) -> Response:
    """Return the HTTP response for a page, with `more` headers."""
    headers = Headers(
        {
            "Content-Type": page.type,
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache" if page.tag or page.status == http.HTTPStatus.OK else "no-store",
            "Connection": "close",
        }
    )
    if page.status != http.HTTPStatus.NOT_MODIFIED:
        headers["Content-Length"] = str(len(page.body))
    for name, value in more.items():
        headers[name.replace("_", "-")] = value
    return Response(page.status, page.status.phrase, headers, page.body)


def _same(page: Page) -> Page:
    return page


def _files(directory: Path | None) -> dict[str, Maker]:
    pages: dict[str, Maker] = {}
    for file in sorted(directory.rglob("*")) if directory is not None else []:
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory or file).parts):
            kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            body = file.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            page = Page(http.HTTPStatus.OK, kind, body, gzip.compress(body, 6, mtime=0), tag)
            path = "/" + file.relative_to(directory or file).as_posix()
            pages[path] = partial(_same, page)
            if file.name == "index.html":
                pages[path.removesuffix("index.html")] = partial(_same, page)
    return pages
