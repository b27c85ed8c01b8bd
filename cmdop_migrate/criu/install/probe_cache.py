"""Cache the results of probing CRIU binaries on this kernel, so that each command need not probe again.

A result is valid for one kernel release and one file (path, mtime, size): a new kernel or a new package is probed
again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProbeResult:
    """Describe the result of probing one CRIU. `problem` is empty when it works."""

    version: tuple[int, int, int]
    problem: str


class ProbeCache:
    """Keep PREFIX/verdicts.json. If it is unreadable or unwritable, everything works, a little slower."""

    def __init__(self, prefix: Path) -> None:
        self._file = prefix / "verdicts.json"

    def get(self, release: str, binary: Path) -> ProbeResult | None:
        """Return the cached result for this kernel and file, or None."""
        key = _key(release, binary)
        entry = self._read().get(key) if key else None
        if not isinstance(entry, dict):
            return None
        version, problem = entry.get("version"), entry.get("problem")
        if isinstance(version, list) and len(version) == 3 and isinstance(problem, str):
            return ProbeResult((int(version[0]), int(version[1]), int(version[2])), problem)
        return None

    def put(self, release: str, binary: Path, result: ProbeResult) -> None:
        """Store a result. Errors of the disk are ignored."""
        key = _key(release, binary)
        if key is None:
            return
        # Results for other kernels are dropped: a host runs one kernel, and the file stays small.
        kept = {name: entry for name, entry in self._read().items() if name.startswith(f"{release} ")}
        kept = {name: entry for name, entry in kept.items() if f" {binary} " not in name}
        kept[key] = {"version": list(result.version), "problem": result.problem}
        fresh = self._file.with_name(f"verdicts.{os.getpid()}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._file)
        except OSError:
            fresh.unlink(missing_ok=True)

    def _read(self) -> dict[str, object]:
        try:
            table = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}


def _key(release: str, binary: Path) -> str | None:
    try:
        stat = binary.stat()
    except OSError:
        return None
    return f"{release} {binary} {stat.st_mtime_ns} {stat.st_size}"
