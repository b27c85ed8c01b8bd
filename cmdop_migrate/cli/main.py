"""Find and run the command. The only place where errors become messages and exit codes."""

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

# command -> the folder of cli/commands with its module. Both the module and its function are named after the command.
# A module is loaded only when its command is used, so that starting a session is quick.
COMMANDS = {
    "run": "sessions",
    "ls": "sessions",
    "show": "sessions",
    "attach": "sessions",
    "send": "sessions",
    "output": "sessions",
    "wait": "sessions",
    "kill": "sessions",
    "plan": "moves",
    "checkpoint": "checkpoints",
    "restore": "checkpoints",
    "fork": "checkpoints",
    "reap": "moves",
    "migrate": "moves",
    "resume": "moves",
    "drain": "moves",
    "undrain": "moves",
    "checkpoints": "checkpoints",
    "key": "checkpoints",
    "lease": "hosts",
    "agent": "hosts",
    "relay": "hosts",
    "turn": "sessions",
    "inputs": "sessions",
    "events": "sessions",
    "hosts": "hosts",
    "doctor": "hosts",
    "version": "hosts",
    "facts": "moves",
    "link": "hosts",
}


class Commands(click.Group):
    """Load a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"cmdop_migrate.cli.commands.{COMMANDS[cmd_name]}.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            status = super().invoke(ctx)
        except BrokenPipeError as error:  # click would exit with 1 before `main` sees it
            raise _BrokenPipe from error
        if not status and (write_error := render.write_error(ctx)) is not None:
            raise write_error
        return status


class _BrokenPipe(Exception):
    """Signal that the reader of a pipe this command writes to is gone."""


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cmdop-migrate")
@click.option("--config", "config_path", metavar="PATH", help="Settings file [/etc/cmdop-migrate/config.toml].")
@click.option("--state-dir", metavar="DIR", help="Directory for sessions, logs and keys [/var/lib/cmdop-migrate].")
@click.option("--run-dir", metavar="DIR", help="Directory for sockets [/run/cmdop-migrate].")
@click.option("--host", metavar="NAME", help="Name of this host [the machine's].")
@click.option("--store", metavar="URL", help="Store for checkpoints [file://STATE_DIR/store].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, for programs.")
@click.option("-v", "--verbose", count=True, help="Print more log messages; twice for all of them.")
@click.pass_context
def cli(ctx: click.Context, /, config_path: str | None, as_json: bool, verbose: int, **flags: str | None) -> None:
    """Run terminal sessions that outlive their clients, and move them between hosts.

    \b
    Examples:
      cmdop-migrate run --name work -- bash     start a session and attach to it
      cmdop-migrate attach work                 attach again; Ctrl-\\ d detaches
      cmdop-migrate ls                          list the sessions of this host
      cmdop-migrate COMMAND --help              show help with examples
    """
    app = ctx.ensure_object(App)
    app.config_path, app.json, app.verbosity = config_path, as_json, verbose
    app.flags = {key: value for key, value in flags.items() if value is not None}
    if ctx.invoked_subcommand is None:
        if as_json:
            raise Usage("no command given", "See: cmdop-migrate --help")
        render.line(ctx.get_help())


def main() -> None:
    """Run the command line and exit. Every error ends here as a message and an exit status."""
    gc.set_threshold(50_000)  # with the default, imports trigger collections that walk all loaded modules again
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
    except _BrokenPipe:
        if _has_reader(1):  # another pipe is broken: the work may not be done
            status = _fail(_unexpected(app), app.json or as_json)
        else:
            render.discard_output(sys.stdout)
            status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        status = _fail(_from_system(error) or _unexpected(app), app.json or as_json)
    except Exception:  # noqa: BLE001 - the boundary: a bug becomes one line and a log entry
        status = _fail(_unexpected(app), app.json or as_json)
    _close_streams()
    gc.freeze()  # skip the collection at exit: the process ends anyway
    sys.exit(status if isinstance(status, int) else 0)


def _has_reader(fd: int) -> bool:
    """Return False if `fd` is a pipe or socket whose other end is closed."""
    poll = select.poll()
    poll.register(fd, 0)
    return not poll.poll(0)  # without requested events, only errors and hang-ups are reported


def _open_streams() -> None:
    """Open /dev/null for each standard stream that is closed, so that no file of ours gets its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and commands may not be valid text


def _close_streams() -> None:
    """Flush the standard streams. Output to a closed terminal or pipe is dropped and is not a failure."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            render.discard_output(stream)


def _from_system(error: OSError) -> CmdopError | None:
    """Return Blocked for a full or read-only disk, else None."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        where = f": {error.filename}" if error.filename else ""
        return Blocked(f"{error.strerror}{where}", "Free some space in state_dir, or set state_dir to another disk.")
    return None


def _fail(error: CmdopError, as_json: bool) -> int:
    """Print an error and return its exit status."""
    try:
        render.failure(error, as_json)
    except (OSError, CmdopError):  # stdout cannot be written: stderr and the exit status still tell
        render.failure(error, as_json=False)
    return error.exit


def _usage(error: click.ClickException) -> Usage:
    """Turn an error of click into ours, with the help command to read."""
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx else "cmdop-migrate"
    no_arguments = getattr(click.exceptions, "NoArgsIsHelpError", ())  # click 8.2; its message is the whole help
    if ctx and isinstance(error, no_arguments) and isinstance(ctx.command, click.Group):
        names = ", ".join(ctx.command.list_commands(ctx))
        return Usage(f"{path} needs a subcommand: {names}", f"See: {path} --help")
    return Usage(error.format_message(), f"See: {path} --help")


def _unexpected(app: App) -> Unexpected:
    """Return the error for the exception being handled, and log its traceback; without a log, the hint has it."""
    kind, value, _ = sys.exc_info()
    message = f"{kind.__name__ if kind else 'error'}: {value}"
    try:
        file = app.config.log_file
    except CmdopError:
        import traceback

        return Unexpected(message, traceback.format_exc())
    log.get("cli").error("unexpected", exc_info=True)
    return Unexpected(message, f"This is a bug. The details are in {file}")
