"""Render the result of a migration as one self-contained HTML page. Pure."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from typing import Any

from cmdop_migrate import units

# phase -> (what it does, whether the session is frozen in it). In the order they happen.
_HERE = {
    "plan": ("findings about both hosts", False),
    "stand_by": ("the target prepares", False),
    "prepare": ("checks, and a marker for the upload", False),
    "hooks": ("hooks run before the freeze", False),
    "criu": ("CRIU checks the kernel", False),
    "freeze": ("the session is frozen", True),
    "reset": ("outside connections closed", True),
    "dump": ("CRIU dumps memory", True),
    "capture": ("the rest of its state is read", True),
    "upload": ("the upload is completed", True),
    "commit": ("its lease is set to parked", True),
}
_THERE = {
    "choose": "the checkpoint is chosen",
    "fetch": "data not yet prefetched is fetched",
    "lease": "the lease is taken",
    "files": "its files are unpacked",
    "images": "CRIU's images are unpacked",
    "holder": "its holder starts",
    "restore": "CRIU creates the process tree",
    "memory": "its memory is loaded while it runs",
}
_COLOURS = {"here": "#7aa6c2", "frozen": "#d08770", "restoring": "#d0a770", "running": "#a3be8c"}
_LEGEND = {
    "here": "on the source, running",
    "frozen": "on the source, frozen",
    "restoring": "on the target, frozen",
    "running": "on the target, running",
}
_ROW, _LEFT, _WIDTH = 22, 190, 620
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}
text{font:12px system-ui,sans-serif}
.key i{display:inline-block;width:.9em;height:.9em;margin:0 .4em 0 1em}"""


def bars(phases: Mapping[str, float]) -> list[tuple[str, str, str, float]]:
    """Return (phase, what it does, kind, seconds) of each phase, in order."""
    result = [(name, *_here(name), seconds) for name, seconds in phases.items() if _is_here(name)]
    for name, seconds in phases.items():
        if name.startswith("there."):
            short = name.removeprefix("there.")
            result.append((name, _THERE.get(short, ""), "running" if short == "memory" else "restoring", seconds))
    if "forget" in phases:
        result.append(("forget", "the copy on the source is removed", "running", phases["forget"]))
    return result


def _is_here(name: str) -> bool:
    return name not in ("there", "forget") and not name.startswith("there.")


def _here(name: str) -> tuple[str, str]:
    if name.startswith("pre_ship_"):
        return "pre-copy of memory", "here"
    words, is_frozen = _HERE.get(name, ("", False))
    return words, "frozen" if is_frozen else "here"


def page(facts: Mapping[str, Any]) -> str:
    """Return the page for the JSON answer of `migrate`."""
    title = html.escape(f"{facts['name']}: {facts['from']} to {facts['to']}")
    figures = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in _figures(facts))
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(words)}</td><td class=n>{seconds:.3f}</td></tr>"
        for name, words, _, seconds in bars(facts["phases"])
    )
    key = "".join(f'<i style="background:{_COLOURS[kind]}"></i>{words}' for kind, words in _LEGEND.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1><table>{figures}</table><h2>Phases</h2>{_chart(facts['phases'])}"
        f'<p class="key">{key}</p><table><tr><th>phase</th><th></th><th>seconds</th></tr>{rows}</table></body></html>\n'
    )


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    basis = facts.get("downtime") or {}
    size = facts["bytes"]
    return [
        ("session", facts["session"]),
        ("fencing token", str(facts["token"])),
        ("checkpoint", facts["checkpoint"]),
        ("frozen", _seconds(facts["frozen_s"])),
        ("downtime", f"{_seconds(facts['downtime_s'])} (from {basis.get('from', '?')} to {basis.get('until', '?')})"),
        ("total", _seconds(facts["took_s"])),
        ("memory", units.show_size(size["memory"])),
        ("files", units.show_size(size["files"])),
        ("sent while frozen", units.show_size(size["new"])),
        ("connections closed", str(len(facts["closed_connections"]))),
        ("made", time.strftime("%Y-%m-%d %H:%M:%S %z")),
    ]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} s"


def _chart(phases: Mapping[str, float]) -> str:
    """Return an SVG with one bar per phase, each starting where the one before ended."""
    shown = bars(phases)
    total = sum(seconds for *_, seconds in shown) or 1.0
    parts, at = [], 0.0
    for number, (name, _, kind, seconds) in enumerate(shown):
        top = number * _ROW
        left, width = _LEFT + at / total * _WIDTH, max(1.0, seconds / total * _WIDTH)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{_COLOURS[kind]}">'
            f"<title>{html.escape(name)}: {seconds:.3f} s</title></rect>"
        )
        at += seconds
    size = f"0 0 {_LEFT + _WIDTH + 10} {len(shown) * _ROW + 4}"
    return f'<svg viewBox="{size}" role="img" aria-label="phases">{"".join(parts)}</svg>'
