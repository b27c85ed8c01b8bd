"""Find the name that a renamed directory of the host has in the layer below.

With `redirect_dir=on` overlayfs renames a directory of a lower layer without
copying it: the directory in the upper layer has a new name and an extended
attribute with the old one. An absolute value is a path from the root of the
layer, any other replaces the last name only. What is not in the upper layer is
found below the old name.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

NAME = "trusted.overlay.redirect"
_NONE = (errno.ENODATA, errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP, errno.EPERM, errno.ENAMETOOLONG)


def read(directory: str | Path) -> str | None:
    """Return what a directory of an upper layer is redirected to, None if it is not."""
    try:
        return os.fsdecode(os.getxattr(directory, NAME, follow_symlinks=False))
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise


class LowerNames:
    """Translate paths of one upper layer to those of the layers below it. It caches directories: use it for one look at
    a tree that may be changing."""

    def __init__(self, upper: Path) -> None:
        self._upper = str(upper)
        self._directories = {"": ""}

    def find(self, path: str) -> str:
        """Return where the lower layers have what is at `path`, relative to the root of the layer."""
        parent, name = os.path.split(path)
        return os.path.join(self._directory(parent), name)

    def _directory(self, path: str) -> str:
        """Return the lower name of a directory. Start at the root: paths may be thousands of names deep."""
        unknown, above = [], path
        while above not in self._directories:
            unknown.append(above)
            above = os.path.dirname(above)
        for directory in reversed(unknown):
            redirect = read(os.path.join(self._upper, directory))
            if redirect is not None and redirect.startswith("/"):
                self._directories[directory] = redirect[1:]
            else:
                parent = self._directories[os.path.dirname(directory)]
                self._directories[directory] = os.path.join(parent, redirect or os.path.basename(directory))
        return self._directories[path]
