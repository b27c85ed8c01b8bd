"""The generated pages: complete, and refused when they cannot be trusted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import click
import pytest

from cmdop_migrate import config, errors
from cmdop_migrate.cli.main import COMMANDS, cli
from cmdop_migrate.preflight import plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gen_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts/py/gen_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_there_with_an_example(gen_docs: ModuleType) -> None:
    found = dict(gen_docs.commands(cli, "cmdop-migrate"))
    assert {path.split()[1] for path in found} == {name for name in COMMANDS if not _is_hidden(name)}
    page = gen_docs.cli_page(cli)
    for path, command in found.items():
        section = page.split(f"\n## {path}\n")[1].split("\n## ")[0]
        assert f"Examples:\n\n    {path}" in section, path
        for option in command.params:
            unlisted = option.param_type_name == "argument" or getattr(option, "hidden", False)
            assert option.opts[-1] in section or unlisted


def _is_hidden(name: str) -> bool:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command.hidden


def test_every_check_of_a_plan_is_there(gen_docs: ModuleType) -> None:
    page = gen_docs.plan_page(plan.checks())
    for one in plan.checks():
        assert f"| `{one.name}` | {', '.join(one.levels)} |" in page and one.fix in page


def test_every_option_says_what_it_does(gen_docs: ModuleType) -> None:
    silent = [
        f"{path} {option.opts[-1]}"
        for path, command in [*gen_docs.commands(cli, "cmdop-migrate"), ("cmdop-migrate", cli)]
        for option in command.params
        if option.param_type_name == "option" and not option.help and not option.hidden
    ]
    assert silent == []


def test_every_error_and_setting_is_there(gen_docs: ModuleType) -> None:
    page = gen_docs.errors_page(errors.all_errors())
    for kind in errors.all_errors()[1:]:
        assert f"| {kind.exit} | `{kind.code}` |" in page
    page = gen_docs.settings_page(config.KEYS)
    assert all(f"| `{key}` | `CMDOP_MIGRATE_{key.upper()}` |" in page for key in config.KEYS)


def test_two_errors_of_one_code_are_refused(gen_docs: ModuleType) -> None:
    own = type("One", (errors.CmdopError,), {"code": "same", "__doc__": "One."})
    inherited = type("Two", (own,), {"__doc__": "Two."})
    assert gen_docs.shared_codes([errors.CmdopError, own]) == []
    assert gen_docs.shared_codes([errors.CmdopError, own, inherited]) == ["errors One and Two share the code 'same'"]


def test_a_link_or_test_that_is_not_there_is_found(gen_docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text("def test_one() -> None: ...\n")
    (tmp_path / "docs/good.md").write_text("[a](../README.md#part) [b](https://host/x) `tests/test_x.py::test_one`\n")
    (tmp_path / "README.md").write_text("[a](docs/good.md) [b](gone.md) `tests/gone.py` `tests/test_x.py::test_two`\n")
    assert gen_docs.dead_links(tmp_path) == [
        "README.md: link to gone.md, which does not exist",
        "README.md: names tests/gone.py, which does not exist",
        "README.md: names tests/test_x.py::test_two, which does not exist",
    ]
