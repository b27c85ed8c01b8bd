"""Ask a gate that has an HTTP address: POST the question, read {"allow": true|false, "why": …}.

This runs as a process of its own, so that the holder never waits for a network.
Its exit status is the answer, as with a gate that is an executable.
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
    """Refuse redirects: what was typed is sent to the configured address and to no other."""

    def redirect_request(self, *_: object) -> None:
        return None


def call(address: str, question: bytes, timeout: float) -> tuple[int, str]:
    """Return the exit status and the reason."""
    # No proxy either: the environment must not decide which server reads what was typed.
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
    """Ask the address in argv[2] the question on standard input; print the reason and exit with the answer."""
    status, words = call(sys.argv[2], sys.stdin.buffer.read(), float(sys.argv[3]))
    os.write(1, words[:1000].encode("utf-8", "replace"))
    sys.exit(status)
