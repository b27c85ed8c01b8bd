"""Draw a picture of boxes and arrows as SVG from its description in TOML (docs/images/*.toml)."""

from __future__ import annotations

import itertools
import tomllib
from html import escape
from pathlib import Path
from typing import Any

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2937 }
  .name { font-weight: 600 }
  .label { font-size: 11px; fill: #4b5563 }
  .box { fill: #ffffff; stroke: #334155; stroke-width: 1.2 }
  .frame { fill: #f1f5f9; stroke: #94a3b8; stroke-dasharray: 5 4 }
  .back { fill: #fbfdff }
  .line { fill: none; stroke: #334155; stroke-width: 1.2; marker-end: url(#tip) }
"""
_LINE = 17


def draw(source: Path) -> str:
    """Return the SVG of one description. Raise ValueError if a box or an arrow lies outside the picture."""
    given = tomllib.loads(source.read_text(encoding="utf-8"))
    width, height = given["width"], given["height"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(given["title"])}">',
        f"<!-- Drawn by scripts/gen-docs from {source.name}. Change it there. -->",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#334155"/></marker></defs>',
        f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
    ]
    for frame in given.get("frame", []):
        parts += [_rectangle(frame, "frame"), _text(frame["at"][0] + 12, frame["at"][1] + 21, frame["text"], "name")]
    for arrow in given.get("arrow", []):
        parts.append(_arrow(arrow, width, height))
    for box in given.get("box", []):
        (x, y), (w, h) = box["at"], box["size"]
        if x < 0 or y < 0 or x + w > width or y + h > height:
            raise ValueError(f"box {box['id']} lies outside of {source.name}")
        first = y + (h - _LINE * len(box["text"])) / 2 + 13
        parts.append(_rectangle(box, "box"))
        for number, line in enumerate(box["text"]):
            parts.append(_text(x + w / 2, first + number * _LINE, line, "name" if number == 0 else "", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _rectangle(shape: dict[str, Any], kind: str) -> str:
    (x, y), (w, h) = shape["at"], shape["size"]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>'


def _arrow(arrow: dict[str, Any], width: int, height: int) -> str:
    points = arrow["path"]
    if any(not (0 <= x <= width and 0 <= y <= height) for x, y in points):
        raise ValueError(f"arrow {arrow['path']} lies outside of the picture")
    line = f'<path class="line" d="M{" L".join(f"{x} {y}" for x, y in points)}"/>'
    if not arrow.get("text"):
        return line
    (x1, y1), (x2, y2) = max(itertools.pairwise(points), key=lambda pair: _length(*pair))
    if y1 == y2:
        return line + _text((x1 + x2) / 2, y1 - 5, arrow["text"], "label", "middle")
    return line + _text(x1 + 6, (y1 + y2) / 2 + 4, arrow["text"], "label")


def _length(start: list[int], end: list[int]) -> int:
    return abs(start[0] - end[0]) + abs(start[1] - end[1])


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
