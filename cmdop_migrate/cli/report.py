"""A migration as a page: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from typing import Any

from cmdop_migrate import units

# phase -> (what it does, whether the session stands still in it). In the order they happen.
_HERE = {
    "plan": ("findings about both hosts", False),
    "stand_by": ("the target gets ready", False),
    "prepare": ("checks, the upload marked", False),
    "hooks": ("whoever must know beforehand is told", False),
    "criu": ("CRIU looks at the kernel", False),
    "freeze": ("it stands still", True),
    "reset": ("outside connections closed", True),
    "dump": ("CRIU reads its memory", True),
    "capture": ("the rest of it is read", True),
    "upload": ("the store has all of it", True),
    "commit": ("its lease is parked", True),
}
_THERE = {
    "choose": "which checkpoint",
    "fetch": "what is not there yet is fetched",
    "lease": "the lease is taken",
    "files": "its files are made",
    "images": "CRIU's images are laid out",
    "holder": "its holder starts",
    "restore": "CRIU makes the tree",
    "memory": "its memory is put in place, behind it",
}
_COLOURS = {"here": "#7aa6c2", "still": "#d08770", "there": "#d0a770", "behind": "#a3be8c"}
_LEGEND = {
    "here": "on the source, running",
    "still": "on the source, standing still",
    "there": "on the target, standing still",
    "behind": "running on the target",
}
_ROW, _LEFT, _WIDTH = 22, 190, 620
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.15rem 1rem .15rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}
text{font:12px system-ui,sans-serif}
.key i{display:inline-block;width:.9em;height:.9em;margin:0 .4em 0 1em}"""


def bars(phases: Mapping[str, float]) -> list[tuple[str, str, str, float]]:
    """(phase, what it is, kind, seconds), in order."""
    found = [(name, *_here(name), seconds) for name, seconds in phases.items() if _is_here(name)]
    for name, seconds in phases.items():
        if name.startswith("there."):
            short = name.removeprefix("there.")
            found.append((name, _THERE.get(short, ""), "behind" if short == "memory" else "there", seconds))
    if "forget" in phases:
        found.append(("forget", "the copy on the source is removed", "behind", phases["forget"]))
    return found


def _is_here(name: str) -> bool:
    return name not in ("there", "forget") and not name.startswith("there.")


def _here(name: str) -> tuple[str, str]:
    if name.startswith("pre_ship_"):
        return "a copy goes ahead", "here"
    words, still = _HERE.get(name, ("", False))
    return words, "still" if still else "here"


def page(facts: Mapping[str, Any]) -> str:
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
        ("token", str(facts["token"])),
        ("checkpoint", facts["checkpoint"]),
        ("stood still", _seconds(facts["frozen_s"])),
        ("downtime", f"{_seconds(facts['downtime_s'])} (from {basis.get('from', '?')} to {basis.get('until', '?')})"),
        ("in all", _seconds(facts["took_s"])),
        ("memory", units.show_size(size["memory"])),
        ("files", units.show_size(size["files"])),
        ("sent while frozen", units.show_size(size["new"])),
        ("connections closed", str(len(facts["closed_connections"]))),
        ("made", time.strftime("%Y-%m-%d %H:%M:%S %z")),
    ]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} s"


def _chart(phases: Mapping[str, float]) -> str:
    """One bar a phase, each where the one before ended: the phases of one host follow each other."""
    found = bars(phases)
    total = sum(seconds for *_, seconds in found) or 1.0
    parts, at = [], 0.0
    for number, (name, _, kind, seconds) in enumerate(found):
        top = number * _ROW
        left, width = _LEFT + at / total * _WIDTH, max(1.0, seconds / total * _WIDTH)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{_COLOURS[kind]}">'
            f"<title>{html.escape(name)}: {seconds:.3f} s</title></rect>"
        )
        at += seconds
    size = f"0 0 {_LEFT + _WIDTH + 10} {len(found) * _ROW + 4}"
    return f'<svg viewBox="{size}" role="img" aria-label="phases">{"".join(parts)}</svg>'
