"""Replace small files atomically. Stdlib only: the holder loads this."""

from __future__ import annotations

import json
import os


def replace(path: str, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replace a file: after a crash at any point it is the old one or the new one, whole. Raise OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)


def replace_json(path: str, value: object) -> None:
    """Replace a file with `value` as JSON, as `replace` does."""
    replace(path, json.dumps(value, indent=1).encode())
