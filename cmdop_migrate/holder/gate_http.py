"""Asks a gate that has an address: POST of the question, answered with {"allow": true|false, "why": …}.

A process of its own, so that the holder never waits for a network. Its exit
status is the answer, as an executable's is.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request

LIMIT = 64 << 10
FAILED = 2


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What was typed goes to the address that was set, and to no other."""

    def redirect_request(self, *_: object) -> None:
        return None


def call(address: str, question: bytes, timeout: float) -> tuple[int, str]:
    """-> (exit status, words)."""
    # No proxy either: nothing of this process's surroundings decides who reads what was typed.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        request = urllib.request.Request(address, question, {"Content-Type": "application/json"})
        with opener.open(request, timeout=timeout) as response:
            body = response.read(LIMIT)
    except urllib.error.HTTPError as error:
        return FAILED, f"it answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return FAILED, f"cannot be reached: {getattr(error, 'reason', error)}"
    try:
        answer = json.loads(body)
        allowed = answer["allow"]
    except (ValueError, KeyError, TypeError):
        return FAILED, 'it does not answer with {"allow": …}'
    if not isinstance(allowed, bool):
        return FAILED, '"allow" is neither true nor false'
    return (0 if allowed else 1), str(answer.get("why") or "")


def main() -> None:
    status, words = call(sys.argv[2], sys.stdin.buffer.read(), float(sys.argv[3]))
    os.write(1, words[:1000].encode("utf-8", "replace"))
    sys.exit(status)
