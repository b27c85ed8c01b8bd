"""The entry point: finds the command, and is the one place where errors become words and exit codes."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import select
import sys
from typing import Any

import click

from cmdop_migrate import __version__, log
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App
from cmdop_migrate.cli.forkserver.compat import INTERRUPTED
from cmdop_migrate.errors import Blocked, CmdopError, Unexpected, Usage

# command -> (module, function). Modules load only when their command is used: starting a session is quick.
COMMANDS = {
    "run": ("run", "run"),
    "ls": ("run", "ls"),
    "show": ("run", "show"),
    "attach": ("attach", "attach"),
    "send": ("attach", "send"),
    "output": ("attach", "output"),
    "wait": ("attach", "wait"),
    "kill": ("run", "kill"),
    "plan": ("plan", "plan"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "restore": ("checkpoint", "restore"),
    "fork": ("checkpoint", "fork"),
    "reap": ("reap", "reap"),
    "migrate": ("migrate", "migrate"),
    "resume": ("migrate", "resume"),
    "drain": ("drain", "drain"),
    "undrain": ("drain", "undrain"),
    "checkpoints": ("checkpoint", "checkpoints"),
    "key": ("key", "key"),
    "lease": ("lease", "lease"),
    "agent": ("lease", "agent"),
    "relay": ("relay", "relay"),
    "turn": ("turn", "turn"),
    "inputs": ("turn", "inputs"),
    "events": ("attach", "events"),
    "hosts": ("hosts", "hosts"),
    "doctor": ("doctor", "doctor"),
    "version": ("doctor", "version"),
    "facts": ("plan", "facts"),
    "link": ("relay", "link"),
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(f"cmdop_migrate.cli.commands.{module}"), function)
        assert isinstance(found, click.Command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            status = super().invoke(ctx)
        except BrokenPipeError as error:  # click would end us with 1 before we have seen it
            raise _Broken from error
        if not status and (unsaid := render.unsaid(ctx)) is not None:
            raise unsaid
        return status


class _Broken(Exception):
    """Whoever read what we wrote is gone."""


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cmdop-migrate")
@click.option("--config", "config_path", metavar="PATH", help="Settings file [/etc/cmdop-migrate/config.toml].")
@click.option("--state-dir", metavar="DIR", help="Where sessions are kept [/var/lib/cmdop-migrate].")
@click.option("--run-dir", metavar="DIR", help="Where sockets are kept [/run/cmdop-migrate].")
@click.option("--host", metavar="NAME", help="This host's name [the machine's].")
@click.option("--store", metavar="URL", help="Where checkpoints go [file://STATE_DIR/store].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")
@click.option("-v", "--verbose", count=True, help="More of what is going on; twice for all of it.")
@click.pass_context
def cli(ctx: click.Context, /, config_path: str | None, as_json: bool, verbose: int, **flags: str | None) -> None:
    """Live sessions that outlive their clients.

    \b
    Examples:
      cmdop-migrate run --name work -- bash     start a session, and attach to it
      cmdop-migrate attach work                 come back to it; Ctrl-\\ d leaves
      cmdop-migrate ls                          what runs here
      cmdop-migrate COMMAND --help              more, with examples
    """
    app = ctx.ensure_object(App)
    app.config_path, app.json, app.verbosity = config_path, as_json, verbose
    app.flags = {key: value for key, value in flags.items() if value is not None}
    if ctx.invoked_subcommand is None:
        if as_json:
            raise Usage("no command given", "See: cmdop-migrate --help")
        render.line(ctx.get_help())


def main() -> None:
    gc.set_threshold(50_000)  # by default all that was imported is walked over and over while more is
    _open_streams()
    app = App()
    as_json = "--json" in sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    try:
        status = cli.main(prog_name="cmdop-migrate", obj=app, standalone_mode=False)
    except CmdopError as error:
        status = _fail(error, app.json or as_json)
    except click.exceptions.Abort:
        status = INTERRUPTED
    except click.ClickException as error:
        status = _fail(_usage(error), app.json or as_json)
    except _Broken:
        if _is_read(1):  # somebody else's pipe, which is no reason to call it done
            status = _fail(_unexpected(app), app.json or as_json)
        else:
            render.say_no_more(sys.stdout)  # nothing wrong
            status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        status = _fail(_from_system(error) or _unexpected(app), app.json or as_json)
    except Exception:  # noqa: BLE001 - the boundary: a bug becomes one line and a log file
        status = _fail(_unexpected(app), app.json or as_json)
    _close_streams()
    gc.freeze()  # the end of the process is its garbage collector
    sys.exit(status if isinstance(status, int) else 0)


def _is_read(number: int) -> bool:
    polled = select.poll()
    polled.register(number, 0)
    return not polled.poll(0)  # of what nobody asks for, only its end is told


def _open_streams() -> None:
    """Whoever starts us with stdin, stdout or stderr closed gets /dev/null there, not one of our own files."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and commands may be no text at all


def _close_streams() -> None:
    """What nobody can read any more, on a terminal that is gone or a pipe that was closed, is no failure."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            render.say_no_more(stream)


def _from_system(error: OSError) -> CmdopError | None:
    """What is wrong with the machine, not with us."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        where = f": {error.filename}" if error.filename else ""
        return Blocked(f"{error.strerror}{where}", "Free some space where state_dir is, or set it elsewhere.")
    return None


def _fail(error: CmdopError, as_json: bool) -> int:
    try:
        render.failure(error, as_json)
    except (OSError, CmdopError):  # who asked for JSON cannot have it; the exit status says it all the same
        render.failure(error, as_json=False)
    return error.exit


def _usage(error: click.ClickException) -> Usage:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "cmdop-migrate"
    without_words = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2; its message is the whole help
    if ctx and isinstance(error, without_words) and isinstance(ctx.command, click.Group):
        names = ", ".join(ctx.command.list_commands(ctx))
        return Usage(f"{path} needs one more word: {names}", f"See: {path} --help")
    return Usage(error.format_message(), f"See: {path} --help")


def _unexpected(app: App) -> Unexpected:
    kind, value, _ = sys.exc_info()
    words = f"{kind.__name__ if kind else 'error'}: {value}"
    try:
        file = app.config.log_file
    except CmdopError:
        import traceback

        return Unexpected(words, traceback.format_exc())
    log.get("cli").error("unexpected", exc_info=True)
    return Unexpected(words, f"This is a bug. The details are in {file}")
