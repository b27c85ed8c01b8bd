"""Show, export, import and rotate the key that seals checkpoints."""

from __future__ import annotations

import sys
import time

import click

from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import Usage
from cmdop_migrate.host import resources
from cmdop_migrate.images.format import keys

MAX_IMPORT = 1 << 20


@click.group(epilog="Example: cmdop-migrate key show")
def key() -> None:
    """Show, export, import or rotate the key that seals checkpoints.

    With the key, anyone can read them and make new ones.
    """


def _show(app: App, ring: keys.KeyRing) -> None:
    facts = {"fingerprint": ring.current.fingerprint, "created": ring.current.created, "keys": len(ring.keys)}
    if app.json:
        render.answer(facts)
    else:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(ring.current.created))
        render.line(f"{facts['fingerprint']}  made {made}, {facts['keys']} in all")


@key.command("show")
@command
def show_key(app: App) -> None:
    """Show the fingerprint of the key, never the key itself.

    \b
    Examples:
      cmdop-migrate key show
    """
    app.this_host()
    _show(app, resources.open_keys(app.config))


@key.command("export")
@command
def export_key(app: App) -> None:
    """Write the keys as text, for another host.

    They are secret: pipe them, do not print them.

    \b
    Examples:
      cmdop-migrate key export | ssh host-b cmdop-migrate key import
    """
    app.this_host()
    if app.json:
        raise Usage("keys do not go into JSON", "Pipe it: cmdop-migrate key export | ssh HOST cmdop-migrate key import")
    if sys.stdout.isatty():
        raise Usage("that would print the key on your screen", "Pipe it, or send it to a file: key export > FILE")
    render.raw(keys.export_text(resources.open_keys(app.config)).encode())


@key.command("import")
@click.option(
    "--keep-current", is_flag=True, help="Use the imported keys only to read; new checkpoints use this host's own key."
)
@command
def import_key(app: App, keep_current: bool) -> None:
    """Import exported keys from standard input.

    \b
    Examples:
      cmdop-migrate key import < FILE
    """
    app.this_host()
    if sys.stdin.isatty():
        render.note("Paste the output of `key export`, then press Ctrl-D.")
    text = sys.stdin.buffer.read(MAX_IMPORT).decode(errors="replace")  # bytes that are not text are refused as no key
    _show(app, keys.import_text(app.config.key_file, text, make_current=not keep_current))


@key.command("rotate")
@command
def rotate_key(app: App) -> None:
    """Make a new key for new checkpoints; old ones stay readable.

    \b
    Examples:
      cmdop-migrate key rotate
    """
    app.this_host()
    _show(app, keys.rotate(app.config.key_file))
