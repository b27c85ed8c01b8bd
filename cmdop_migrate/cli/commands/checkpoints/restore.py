"""Restore one parked session or all of them, on this host or another one."""

from __future__ import annotations

from collections.abc import Callable

import click

from cmdop_migrate import units
from cmdop_migrate.cli import render, target_host
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.errors import CmdopError, Partial, Usage
from cmdop_migrate.host import reconcile, references
from cmdop_migrate.host.host import Host
from cmdop_migrate.snapshot import restore as snapshot_restore
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult


@click.command()
@click.argument("reference", required=False, metavar="[SESSION|CHECKPOINT]")
@click.option("--to", "host", metavar="HOST", help="Restore it on another host; see `hosts`.")
@click.option("--fork", "name", metavar="NAME", help="Restore it as a new session of this name; the old one stays.")
@click.option("--lazy", is_flag=True, help="Start while memory is still in the store; a lost store stalls it.")
@click.option(
    "--wait",
    type=units.duration,
    default="0s",
    metavar="TIME",
    help="Wait so long for the lease of a dead host to expire.",
)
@click.option("--all", "everything", is_flag=True, help="Restore every session parked by this host.")
@click.option("--allow-devices", is_flag=True, help="Also create the device nodes that the session had created.")
@click.option("--accept-files", is_flag=True, help="Open host files that changed as they are now, or empty.")
@click.option("--standby", metavar="MIGRATION", hidden=True)
@command
def restore(
    app: App,
    reference: str | None,
    host: str | None,
    name: str | None,
    lazy: bool,
    everything: bool,
    allow_devices: bool,
    accept_files: bool,
    wait: float,
    standby: str | None,
) -> int | None:
    """Restore a parked session.

    Without a name: the only one that is parked. The id of a checkpoint restores that checkpoint.

    \b
    Examples:
      cmdop-migrate restore work
      cmdop-migrate restore work --to host-b
      cmdop-migrate restore 3f9c --fork experiment
    """
    this_host = app.this_host()
    options = RestoreOptions(name, lazy, allow_devices, wait, accept_files)
    if standby is not None and reference is not None:
        render.answer(_restore_on_standby(this_host, reference, standby, options).to_json())
        return None
    if reference is None:
        reconcile.settle(this_host)
    with target_host.connected(app, this_host, host) as target, render.progress(app.json) as show:

        def restore_one(reference: str | None) -> RestoreResult:
            if target is None:
                return snapshot_restore.restore(this_host, reference, options, show)
            from cmdop_migrate.migration import remote_restore

            show(f"restoring on {target.name}")
            return remote_restore.restore(this_host, reference, options, target)

        if everything:
            return _restore_all(app, this_host, options, reference, restore_one)
        result = restore_one(reference)
    if app.json:
        render.answer(result.to_json())
        return None
    render.hooks(False, result.hooks)
    render.line(f"{result.name}: running on {result.host} (token {result.token}), after {result.took_s:.2f} s")
    if result.carried:
        render.line(f"  {len(result.carried)} files of its old host came along")
    if result.accepted:
        render.line(f"  {len(result.accepted)} files differ from the checkpoint: {', '.join(result.accepted[:5])}")
    render.line(f"  attach with: cmdop-migrate attach {result.name}")
    return None


def _restore_on_standby(this_host: Host, session: str, migration: str, options: RestoreOptions) -> RestoreResult:
    """Get ready as the target of a migration, then restore when the source says so over standard input."""
    from cmdop_migrate.migration import standby as migration_standby

    standby = migration_standby.Standby(this_host, session, migration, render.beat)
    try:
        known = standby.wait()
        with migration_standby.Heartbeat(render.progress_line) as pulse:
            return snapshot_restore.restore(this_host, session, options, pulse.say, known)
    finally:
        standby.close()


def _restore_all(
    app: App,
    this_host: Host,
    options: RestoreOptions,
    reference: str | None,
    restore_one: Callable[[str], RestoreResult],
) -> int | None:
    if reference is not None or options.fork is not None:
        raise Usage("--all goes with neither a session nor --fork", "See: cmdop-migrate restore --help")
    done, failed = [], []
    for record in references.parked(this_host):
        try:
            done.append(restore_one(record.session))
        except CmdopError as error:
            failed.append({"session": record.session, "name": record.name, "error": error.message})
    partial = None
    if failed:
        names = ", ".join(f"{failure['name']} ({failure['error']})" for failure in failed)
        words = f"{len(done)} restored, {len(failed)} not: {names}"
        partial = Partial(words, "They are still parked; restore them one by one.")
    if app.json:
        render.answer(
            {"restored": [result.to_json() for result in done], "failed": failed, **render.error_field(partial)}
        )
        return partial.exit if partial else None
    for result in done:
        render.hooks(False, result.hooks)
        render.line(f"{result.name}: running")
    if partial:
        raise partial
    return None
