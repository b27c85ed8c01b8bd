"""Nine modes, nine pages: each says what holds and what does not, and names the tests that show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.host import PROJECT

PAGES = PROJECT / "docs/modes"
HERE = Path(__file__).parent
SECTIONS = ["What holds", "What is handed back", "How to see it", "Test"]
MODES = range(1, 10)


def page(mode: int) -> Path:
    (found,) = PAGES.glob(f"{mode}-*.md")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_a_page_that_names_all_its_tests(mode: int) -> None:
    text = page(mode).read_text()
    assert text.startswith(f"# Mode {mode}: ") and "**Trigger.**" in text
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    for section in re.split(r"^## .+$", text, flags=re.M)[1:]:
        assert section.strip(), "a heading with nothing under it"
    (module,) = HERE.glob(f"test_{mode}_*.py")
    exist = {f"tests/modes/{module.name}::{name}" for name in re.findall(r"^def (test_\w+)", module.read_text(), re.M)}
    assert set(re.findall(r"`(tests/modes/[^`]+)`", text.split("## Test\n")[1])) == exist


def test_the_index_has_every_row_and_every_page_a_row() -> None:
    rows = re.findall(r"^\| \[(\d) [^\]]+\]\(([^)]+)\) \|(.+)\|$", (PAGES / "README.md").read_text(), re.M)
    assert [int(number) for number, _, _ in rows] == list(MODES)
    assert [name for _, name, _ in rows] == [page(mode).name for mode in MODES]
    assert all(len(cells.split("|")) == 3 and all(cell.strip() for cell in cells.split("|")) for _, _, cells in rows)
    assert {path.name for path in PAGES.iterdir()} == {"README.md", *(name for _, name, _ in rows)}
