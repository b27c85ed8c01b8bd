"""Generate the reference pages from the code, so that they cannot differ from it. See scripts/gen-docs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

import cmdop_migrate
from cmdop_migrate import config, errors, host_entry
from cmdop_migrate.cli.main import cli
from cmdop_migrate.preflight import plan

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "cmdop-migrate"
NOTE = "<!-- Made by scripts/gen-docs from {source}. Change it there. -->\n\n"
PLAN = """# What `plan` looks at

`cmdop-migrate plan SESSION [--to HOST]` reports what blocks a move, before anything is frozen. It reads
the session from outside, this host's facts, and the other host's through its own command line (`cmdop-migrate
facts`, over SSH). The session keeps running; nothing is written but the cache of file digests, and the id of a store
that had none.

| level | means | exit |
|---|---|---|
| `block` | the move would fail, or would harm | 4 |
| `warn` | the move works; something will be different after it | 0 |
| `info` | good to know | 0 |

With `--json` the answer is one object, `{ok, findings: [{check, level, message, fix, passing}], …}`, also when it is
blocked: then `ok` is false and the exit status 4. `--accept CHECK` turns the blockers of one check into
warnings. Without `--to` it examines a checkpoint and a restore on this host. `checkpoint` refuses by the same
rules what cannot be dumped (the checks from `other_users` to `mounts`). A finding that is `passing` usually goes away
within seconds: `checkpoint --wait-quiet 30s` and `migrate --wait-quiet 30s` try again until then.

## Files of the host

What the session changed travels with it. What it only maps or has open is the host's, and has to be the same byte by
byte where it is restored. Mapped files (programs, libraries) are carried in the checkpoint by default: where they are
missing or different, also libc, the restore puts them into the session's own layer, and `plan` warns, because programs
that are started there later get them too. Files that are only open are not carried, and block, unless `--carry
opened` is given; with `--carry none` both block. A file that is as it was, with more after it (a log that others write
to), is the same file: it is opened as it is, and read on. One that was rotated or removed meanwhile blocks a restore,
too, unless you accept another file: `restore --accept-files`, or `migrate --accept files`, opens what is
there, or an empty file; never in place of a program or a library.

## Expected time and bytes

From the session's own last checkpoint on this host, grown with its size; without one, from another session's nearest
in size; without any, it says so.

## Checks

| check | levels | looks at | fix |
|---|---|---|---|
"""
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_TEST = re.compile(r"`(tests/[\w./-]+)(?:::(\w+))?`")


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("gen-docs: valid arguments: --check", file=sys.stderr)
        return 2
    import_all()
    problems = shared_codes(errors.all_errors())
    for path, text in pages().items():
        file = ROOT / path
        current = file.read_text(encoding="utf-8") if file.exists() else None
        if current == text:
            continue
        if arguments:
            problems.append(f"{path} is out of date: run scripts/gen-docs")
        else:
            file.write_text(text, encoding="utf-8")
            print(f"gen-docs: wrote {path}")
    if arguments:
        problems += dead_links(ROOT)
    for problem in problems:
        print(f"gen-docs: {problem}", file=sys.stderr)
    return 1 if problems else 0


def import_all() -> None:
    """An error class exists for us only when its module is loaded."""
    for module in pkgutil.walk_packages(cmdop_migrate.__path__, f"{cmdop_migrate.__name__}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)


def pages() -> dict[str, str]:
    import draw  # beside this script

    return {
        "docs/reference/cli.md": cli_page(cli),
        "docs/reference/errors.md": errors_page(errors.all_errors()),
        "docs/reference/settings.md": settings_page(config.KEYS),
        "docs/operations/plan.md": plan_page(plan.checks()),
        "docs/images/architecture.svg": draw.draw(ROOT / "docs/images/architecture.toml"),
    }


def shared_codes(kinds: list[type[errors.CmdopError]]) -> list[str]:
    """Programs tell errors apart by their code; a class without one of its own has its parent's."""
    owner: dict[str, str] = {}
    problems = []
    for kind in kinds:
        if kind.code in owner:
            problems.append(f"errors {owner[kind.code]} and {kind.__name__} share the code {kind.code!r}")
        owner.setdefault(kind.code, kind.__name__)
        if not kind.__doc__:
            problems.append(f"error {kind.__name__} does not say what it means")
    return problems


def dead_links(root: Path) -> list[str]:
    """Links to files, and names of tests, in every page of ours."""
    problems = []
    for page in [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("vagrant/*.md")]:
        text = page.read_text(encoding="utf-8")
        where = page.relative_to(root)
        for target in _LINK.findall(text):
            if "://" not in target and not (page.parent / target).exists():
                problems.append(f"{where}: link to {target}, which does not exist")
        for file, test in _TEST.findall(text):
            if not (root / file).exists():
                problems.append(f"{where}: names {file}, which does not exist")
            elif test and f"def {test}(" not in (root / file).read_text(encoding="utf-8"):
                problems.append(f"{where}: names {file}::{test}, which does not exist")
    return problems


def errors_page(kinds: list[type[errors.CmdopError]]) -> str:
    rows = sorted((kind for kind in kinds if kind is not errors.CmdopError), key=lambda kind: kind.exit)
    lines = [
        "# Errors\n",
        "A command that fails says what happened, and what to do next. Shells see the exit status, programs the code:",
        'with `--json` it answers `{"error": {"code": …, "exit": …, "message": …, "hint": …}}` on stdout.\n',
        "0 is done. A command ended by Ctrl-C exits 130.\n",
        "| exit | code | means |",
        "|---|---|---|",
        *(f"| {kind.exit} | `{kind.code}` | {_description(kind)} |" for kind in rows),
    ]
    return NOTE.format(source="cmdop_migrate/errors.py") + "\n".join(lines) + "\n"


def _description(kind: type[errors.CmdopError]) -> str:
    """Return the docstring of an error as a sentence of its own, without "Signal that"."""
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).removeprefix("Signal that ")
    return text[:1].upper() + text[1:]


def settings_page(keys: Mapping[str, config.Setting]) -> str:
    lines = [
        "# Settings\n",
        f"A TOML file, `{config.DEFAULT_FILE}`, or the one named by `--config` or `{config.CONFIG_ENV}`.",
        "The environment wins over the file, a flag over both. Values are strings, but for other hosts. An unknown key",
        "or a bad value stops every command, with its line and what is valid. Two pairs of `state_dir` and `run_dir`",
        "on one machine are two hosts.\n",
        '    host = "host-a"',
        '    ring_size = "4MiB"\n',
        "Durations are written `90s`, `5m`, `24h`; sizes `512KiB`, `64MiB`.\n",
        "| key | environment | default | is |",
        "|---|---|---|---|",
        *(_setting(key, one) for key, one in keys.items()),
        "\n## Other hosts\n",
        "A table `[hosts.NAME]` for each; it wins over `hosts add` and `~/.ssh/config`. "
        "See [hosts](../operations/hosts.md).\n",
        "    [hosts.host-b]",
        '    address = "10.0.0.2"',
        "    sudo = true\n",
        "| key | is |",
        "|---|---|",
        *(f"| `{key}` | {about} |" for key, (_, about) in host_entry.FIELDS.items()),
    ]
    return NOTE.format(source="cmdop_migrate/config.py") + "\n".join(lines) + "\n"


def _setting(key: str, one: config.Setting) -> str:
    default = f"`{one.default}`" if one.default else "–"
    return f"| `{key}` | `{config.ENV_PREFIX}{key.upper()}` | {default} | {one.about} |"


def cli_page(group: click.Group) -> str:
    found = list(commands(group, PROGRAM))
    lines = [
        "# Commands\n",
        "What fails, and how: [errors](errors.md). Defaults and files: [settings](settings.md).\n",
        "| command | does |",
        "|---|---|",
        *(f"| [`{path}`](#{_anchor(path)}) | {_summary(one)} |" for path, one in found),
        f"\n## {PROGRAM}\n",
        *describe(group, PROGRAM),
    ]
    for path, one in found:
        lines += [f"## {path}\n", *describe(one, path)]
    return NOTE.format(source="the help texts in cmdop_migrate/cli") + "\n".join(lines).rstrip() + "\n"


def plan_page(checks: list[plan.CheckDescription]) -> str:
    rows = [f"| `{one.name}` | {', '.join(one.levels)} | {_cell(one.about)} | {_cell(one.fix)} |" for one in checks]
    return NOTE.format(source="cmdop_migrate/preflight/") + PLAN + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, in the order of --help."""
    context = click.Context(group)
    for name in group.list_commands(context):
        one = group.get_command(context, name)
        if one is None or one.hidden:
            continue
        if isinstance(one, click.Group):
            yield from commands(one, f"{path} {name}")
        else:
            yield f"{path} {name}", one


def describe(command: click.Command, path: str) -> Iterator[str]:
    arguments = [_argument(one) for one in command.params if isinstance(one, click.Argument)]
    rest = ["COMMAND"] if isinstance(command, click.Group) else arguments
    yield f"    {' '.join([path, '[OPTIONS]', *rest])}\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            _, title, *examples = paragraph.split("\n")
            yield f"{title}\n"
            yield "\n".join(f"    {line.removeprefix('  ')}" for line in examples) + "\n"
        else:
            yield paragraph.replace("\n", " ") + "\n"
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    yield "| option | does |"
    yield "|---|---|"
    for option in options:
        yield f"| `{_spelling(option)}` | {option.help or ''}{_default(option)} |"
    yield ""


def _summary(command: click.Command) -> str:
    return " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _spelling(option: click.Option) -> str:
    names = ", ".join(option.opts)
    if option.is_flag or option.count:
        return names
    if option.metavar:
        return f"{names} {option.metavar}"
    if isinstance(option.type, click.Choice):
        return names + " " + r"\|".join(map(str, option.type.choices))
    return f"{names} {option.type.name.upper()}"


def _default(option: click.Option) -> str:
    return f" Default: `{option.default}`." if option.show_default and option.default is not None else ""


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
