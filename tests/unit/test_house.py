"""The tree: modules that docs and docstrings name exist, folders stay small, module names are unique, and every outside
package has a home."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cmdop_migrate"
MOST_MODULES = 22
_PATH = re.compile(r"(?<![\w/.$~{}*-])((?:[a-z_][\w-]*/)*[a-z_]\w*\.py)\b")
_DOTTED = re.compile(r"\bcmdop_migrate(?:\.[a-z_]\w*)+(?![\w/])")
# Programs that examples run inside a session, and files of other projects.
EXAMPLES = {"train.py", "server.py", "app.py", "a.py", "x.py"}

# name -> why two modules may have it. Commands of the CLI are not counted: each is named after the engine's verb.
TWICE = {
    "__init__": "packages",
    "client": "the client of the fork server, and of the relay",
    "credentials": "the format in relay, making and revoking them in gateway",
    "doctor": "the rules in preflight, gathering and fixing in host",
    "dump": "the rules in preflight, the act in snapshot",
    "host": "the facts of a host in preflight, this host's state in host",
    "host_files": "the digests in images, carrying them in snapshot",
    "input_journal": "writing in the holder, reading in host",
    "machine": "facts and rules of one subject",
    "memory": "the in-memory backend of leases and of stores",
    "metrics": "of the agent and of the relay",
    "plan": "the rules in preflight, gathering facts in migration",
    "process": "the holder process, and the process of CRIU's guard",
    "prune": "the protocol in images, the command's engine in snapshot",
    "registry": "URL to backend, for leases and for stores",
    "requests": "answering in the holder, asking in session",
    "runner": "of CRIU, and of a drain's commands",
    "s3": "the S3 backend of leases and of stores",
    "server": "the fork server, and the relay's",
    "session": "facts and rules of one subject",
}


def modules() -> list[Path]:
    return sorted(file for file in PACKAGE.rglob("*.py"))


def texts() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every page, and of every docstring of the package."""
    for file in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        if file.exists():
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
    for file in modules():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield str(file.relative_to(ROOT)), docstring


def path_exists(name: str, place: str) -> bool:
    """Return True if `name` is a path from the root, the package, tests or scripts, or a file beside the one naming it."""
    folders = [ROOT, PACKAGE, ROOT / "tests", ROOT / "scripts", (ROOT / place).parent]
    if any((folder / name).is_file() for folder in folders):
        return True
    if "/" not in name:
        return name in EXAMPLES or any((ROOT / "tests").rglob(name))
    return False


def dotted_exists(name: str) -> bool:
    """Return True if `name` is a module, or a name defined in one."""
    parts = name.split(".")
    for cut in (len(parts), len(parts) - 1, len(parts) - 2):
        file = ROOT.joinpath(*parts[:cut])
        for source in (file.with_suffix(".py"), file / "__init__.py"):
            if source.is_file():
                text = source.read_text(encoding="utf-8")
                return all(re.search(rf"\b{re.escape(part)}\b", text) for part in parts[cut:])
    return False


def test_modules_named_in_docs_and_docstrings_exist() -> None:
    missing = set()
    for place, text in texts():
        missing |= {f"{place}: {name}" for name in _PATH.findall(text) if not path_exists(name, place)}
        missing |= {f"{place}: {name}" for name in _DOTTED.findall(text) if not dotted_exists(name)}
    assert not missing, "\n" + "\n".join(sorted(missing))


def test_no_folder_has_too_many_modules() -> None:
    folders = defaultdict(list)
    for file in modules():
        if file.name != "__init__.py":
            folders[file.parent].append(file.name)
    counts = {str(folder.relative_to(ROOT)): len(names) for folder, names in folders.items()}
    large = {folder: count for folder, count in counts.items() if count > MOST_MODULES}
    assert not large, f"more than {MOST_MODULES} modules: {large}"


def test_module_names_are_unique_in_the_package() -> None:
    places = defaultdict(list)
    for file in modules():
        path = file.relative_to(PACKAGE)
        if path.parts[:2] != ("cli", "commands"):
            places[file.stem].append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in TWICE}
    assert not twice, twice
    assert not [name for name in TWICE if len(places[name]) < 2], "remove the names that are unique now from TWICE"


def test_every_dependency_has_a_contract_for_its_home() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {re.split(r"[<>=\[]", text)[0] for text in settings["project"]["dependencies"]}
    contracts = settings["tool"]["importlinter"]["contracts"]
    homed = {
        module
        for contract in contracts
        if contract.get("source_modules") == ["cmdop_migrate"]
        for module in contract["forbidden_modules"]
    }
    assert {"nacl" if name == "pynacl" else name for name in names} <= homed


@pytest.mark.parametrize("name", ["storage/base.py", "cmdop_migrate/entry.py", "tests/unit/test_house.py"])
def test_paths_are_found_from_the_root_and_from_the_package(name: str) -> None:
    assert path_exists(name, "README.md") and not path_exists(name.replace(".py", "_gone.py"), "README.md")
