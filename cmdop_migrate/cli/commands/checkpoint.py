"""checkpoint, restore, fork, checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from cmdop_migrate import clock, units
from cmdop_migrate.cli import render
from cmdop_migrate.cli.app import App, command
from cmdop_migrate.cli.options import CARRY, WAIT_QUIET
from cmdop_migrate.errors import CmdopError, Partial, Usage
from cmdop_migrate.host import reconcile, references
from cmdop_migrate.host.host import Host
from cmdop_migrate.migration import remote_restore
from cmdop_migrate.migration import standby as standby_flow
from cmdop_migrate.migration.target import RemoteHost
from cmdop_migrate.snapshot import checkpoint as checkpoint_flow
from cmdop_migrate.snapshot import checkpoints as snapshot_checkpoints
from cmdop_migrate.snapshot import fork as snapshot_fork
from cmdop_migrate.snapshot import prune as snapshot_prune
from cmdop_migrate.snapshot import restore as restore_flow
from cmdop_migrate.snapshot.checkpoint_options import CheckpointOptions
from cmdop_migrate.snapshot.restore_options import RestoreOptions, RestoreResult


@click.command()
@click.argument("session")
@click.option("--leave-running", is_flag=True, help="Let it go on here; the checkpoint is a copy.")
@click.option("--tag", metavar="TEXT", help="A word to find it by.")
@CARRY
@WAIT_QUIET
@click.option("--no-prove", is_flag=True, help="Park it without restoring the checkpoint on trial first.")
@click.option(
    "--deadline",
    type=units.duration,
    metavar="TIME",
    help="When it must be parked, from now: the trial is skipped if it would take longer.",
)
@command
def checkpoint(
    app: App,
    session: str,
    leave_running: bool,
    no_prove: bool,
    deadline: float | None,
    **options: Any,
) -> None:
    """Save a session to the store; it is then parked.

    The session is frozen, dumped and shipped. Before it is ended, the checkpoint is restored on trial, up to its first
    instruction. If that or anything else fails, the session resumes here. With --leave-running it resumes in any case.

    \b
    Examples:
      cmdop-migrate checkpoint work
      cmdop-migrate checkpoint work --leave-running --tag before-upgrade
      cmdop-migrate checkpoint work --wait-quiet 30s
    """
    until = None if deadline is None else clock.boottime() + deadline
    wanted = CheckpointOptions(leave_running, prove=not no_prove, deadline=until, **options)
    with render.progress(app.json) as show:
        result = checkpoint_flow.checkpoint(app.this_host(), session, wanted, show)
    facts = result.to_json()
    if app.json:
        render.answer(facts)
        return
    render.hooks(False, facts["hooks"])
    size = facts["bytes"]
    render.line(f"{session}: {'saved' if leave_running else 'parked'} as {facts['checkpoint']}")
    render.line(
        f"  frozen {facts['frozen_s']:.2f} s; memory {units.show_size(size['memory'])}, files"
        f" {units.show_size(size['files'])}, sent {units.show_size(size['new'])}"
    )
    for one in facts["closed_connections"]:
        verb = "will be closed on restore" if leave_running else "closed"
        render.line(f"  {verb}: {one['command']} {one['local']} -> {one['remote']}")
    if not leave_running:
        seconds = facts["phases"].get("prove", 0.0)
        proof = f"restored on trial in {seconds:.2f} s" if facts["proved"] else f"not proven: {facts['skipped']}"
        render.line(f"  {proof}")
        render.line(f"  bring it back with: cmdop-migrate restore {session}")


@click.command()
@click.argument("reference", required=False, metavar="[SESSION|CHECKPOINT]")
@click.option("--to", "host", metavar="HOST", help="Restore it on another host; see `hosts`.")
@click.option("--fork", "name", metavar="NAME", help="As a new session of this name, beside the old one.")
@click.option("--lazy", is_flag=True, help="Start while memory is still in the store; a lost store stalls it.")
@click.option(
    "--wait",
    type=units.duration,
    default="0s",
    metavar="TIME",
    help="Wait so long for a dead host's lease to run out.",
)
@click.option("--all", "everything", is_flag=True, help="Every session parked by this host.")
@click.option("--allow-devices", is_flag=True, help="Also make device nodes that the session had made.")
@click.option("--accept-files", is_flag=True, help="Host files that changed: opened as they are now, or empty.")
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
    """Bring a parked session back.

    Without a name: the one that is parked. The name of a checkpoint goes back to it.

    \b
    Examples:
      cmdop-migrate restore work
      cmdop-migrate restore work --to host-b
      cmdop-migrate restore 3f9c --fork experiment
    """
    this_host = app.this_host()
    wanted = RestoreOptions(name, lazy, allow_devices, wait, accept_files)
    if standby is not None and reference is not None:
        render.answer(_stand_by(this_host, reference, standby, wanted).to_json())
        return None
    if reference is None:
        reconcile.settle(this_host)
    with _place(app, this_host, host) as target, render.progress(app.json) as show:

        def bring(one: str | None) -> RestoreResult:
            if target is None:
                return restore_flow.restore(this_host, one, wanted, show)
            show(f"restoring on {target.name}")
            return remote_restore.restore(this_host, one, wanted, target)

        if everything:
            return _restore_all(app, this_host, wanted, reference, bring)
        result = bring(reference)
    if app.json:
        render.answer(result.to_json())
        return None
    render.hooks(False, result.hooks)
    render.line(f"{result.name}: running on {result.host} (token {result.token}), after {result.took_s:.2f} s")
    if result.carried:
        render.line(f"  {len(result.carried)} files of its old host came along")
    if result.accepted:
        render.line(f"  {len(result.accepted)} files are not what they were: {', '.join(result.accepted[:5])}")
    render.line(f"  attach with: cmdop-migrate attach {result.name}")
    return None


def _stand_by(this_host: Host, session: str, migration: str, wanted: RestoreOptions) -> RestoreResult:
    one = standby_flow.Standby(this_host, session, migration, render.beat)
    try:
        known = one.wait()
        with standby_flow.Heartbeat(render.progress_line) as pulse:
            return restore_flow.restore(this_host, session, wanted, pulse.say, known)
    finally:
        one.close()


@contextlib.contextmanager
def _place(app: App, this_host: Host, host: str | None) -> Iterator[RemoteHost | None]:
    """Another host, connected and checked; None: here."""
    if host is None or host == app.config.host:
        yield None
        return
    from cmdop_migrate.migration import peers  # brings SSH along: not for those who stay here

    with peers.pool(app.config) as pool:
        yield peers.checked_peer(this_host, pool, host)


def _restore_all(
    app: App,
    this_host: Host,
    wanted: RestoreOptions,
    reference: str | None,
    bring: Callable[[str], RestoreResult],
) -> int | None:
    if reference is not None or wanted.fork is not None:
        raise Usage("--all goes with neither a session nor --fork", "See: cmdop-migrate restore --help")
    done, failed = [], []
    for record in references.parked(this_host):
        try:
            done.append(bring(record.session))
        except CmdopError as error:
            failed.append({"session": record.session, "name": record.name, "error": error.message})
    partial = None
    if failed:
        names = ", ".join(f"{one['name']} ({one['error']})" for one in failed)
        words = f"{len(done)} restored, {len(failed)} not: {names}"
        partial = Partial(words, "They are still parked; restore them one by one.")
    if app.json:
        trouble = {"error": render.error_facts(partial)} if partial else {}
        render.answer({"restored": [result.to_json() for result in done], "failed": failed, **trouble})
        return partial.exit if partial else None
    for result in done:
        render.hooks(False, result.hooks)
        render.line(f"{result.name}: running")
    if partial:
        raise partial
    return None


@click.command()
@click.argument("session")
@click.argument("name")
@click.option("--to", "host", metavar="HOST", help="Start the branch on another host; see `hosts`.")
@command
def fork(app: App, session: str, name: str, host: str | None) -> None:
    """Branch a running session into a second one.

    The new one goes on from the same point, under an identity of its own; both run.

    \b
    Examples:
      cmdop-migrate fork work experiment
    """
    this_host = app.this_host()
    with _place(app, this_host, host) as target, render.progress(app.json) as show:
        if target is None:
            result = snapshot_fork.fork(this_host, session, name, show)
        else:
            result = remote_restore.fork(this_host, session, name, target, show)
    if app.json:
        render.answer(result.to_json())
    else:
        render.hooks(False, result.hooks)
        render.line(f"{name}: a branch of {session}; attach with: cmdop-migrate attach {name}")


@click.group(epilog="Example: cmdop-migrate checkpoints ls work")
def checkpoints() -> None:
    """List, show, verify or prune what is in the store."""


@checkpoints.command("ls")
@click.argument("session", required=False)
@command
def list_checkpoints(app: App, session: str | None) -> None:
    """List the checkpoints this host's keys can read.

    \b
    Examples:
      cmdop-migrate checkpoints ls
    """
    found = snapshot_checkpoints.listing(app.this_host(), session)
    if app.json:
        render.answer({"checkpoints": [row.to_json() for row in found]})
        return
    if not found:
        render.note("No checkpoints.")
        return
    render.table(
        ("CHECKPOINT", "SESSION", "NAME", "HOST", "TOKEN", "AGE", "MEMORY", "STORED", "TAG"),
        (
            (
                row.checkpoint[:12],
                row.session[:12],
                row.name,
                row.host,
                str(row.token),
                units.show_duration(max(0.0, time.time() - row.created)),
                units.show_size(row.bytes["memory"]) if row.bytes else "-",
                units.show_size(row.bytes["stored"]) if row.bytes else "-",
                row.tag or row.problem or "",
            )
            for row in found
        ),
    )


@checkpoints.command("show")
@click.argument("checkpoint")
@command
def show_checkpoint(app: App, checkpoint: str) -> None:
    """Show one checkpoint: what it is of, what it needs.

    \b
    Examples:
      cmdop-migrate checkpoints show 3f9c
    """
    facts = snapshot_checkpoints.show(app.this_host(), checkpoint)
    if app.json:
        render.answer(facts)
        return
    for key, value in facts.items():
        render.line(render.printable(f"{key:<12} {value}"))


@checkpoints.command("verify")
@click.argument("checkpoint", required=False)
@command
def verify_checkpoint(app: App, checkpoint: str | None) -> None:
    """Read every byte again, and say whether all is whole.

    \b
    Examples:
      cmdop-migrate checkpoints verify
    """
    results = snapshot_checkpoints.verify(app.this_host(), checkpoint)
    bad = [result for result in results if result.problem]
    if app.json and not bad:
        render.answer({"verified": [result.to_json() for result in results]})
    for result in [] if app.json else results:
        render.line(f"{result.checkpoint[:12]}  {result.problem or 'whole: ' + units.show_size(result.bytes)}")
    if bad:
        raise snapshot_checkpoints.damaged(bad)


@checkpoints.command("prune")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="The newest N of each session stay.")
@click.option("--keep-within", type=units.duration, metavar="TIME", help="What is younger stays.")
@click.option("--drop", multiple=True, metavar="CHECKPOINT", help="This one goes, whatever the rules say.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@command
def prune(app: App, keep_last: int | None, keep_within: float | None, drop: tuple[str, ...], dry_run: bool) -> None:
    """Remove the checkpoints that no rule keeps.

    The newest of a parked session always stays.

    \b
    Examples:
      cmdop-migrate checkpoints prune --keep-last 3 --keep-within 7d
    """
    if keep_last is None and keep_within is None and not drop:
        raise Usage("nothing says what to keep", "For example: --keep-last 3 --keep-within 7d")
    result = snapshot_prune.prune(app.this_host(), keep_last, keep_within, drop, dry_run)
    if app.json:
        render.answer(result.to_json())
        return
    verb = "would go" if dry_run else "removed"
    render.line(f"{len(result.checkpoints)} checkpoints {verb}, {units.show_size(result.bytes)} freed")
    if result.unreadable:
        count = len(result.unreadable)
        render.note(f"{count} manifests cannot be read with this host's keys: nothing they may need was removed")
