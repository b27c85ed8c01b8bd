"""Keep the records and locks of this host's sessions, in its state directory.

    STATE_DIR/host-id                 names this host's cgroups
    STATE_DIR/lock                    held while sessions are created or swept
    STATE_DIR/sessions/ID/session.json    the record; written by the starter, then by the holder alone
    STATE_DIR/sessions/ID/holder.lock     held as long as the starter or the holder lives
    STATE_DIR/sessions/ID/…               upper and work of each overlay, inputs.jsonl, output.ring

No file says whether a session is alive: the kernel knows it, by holder.lock. A record that says otherwise is stale
and is corrected by `sweep`, which every command runs first.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cmdop_migrate import clock, log
from cmdop_migrate.config import Config
from cmdop_migrate.errors import BadConfig, Blocked, Fenced, SessionNotFound, TimedOut, Unexpected, Usage
from cmdop_migrate.events import Events
from cmdop_migrate.holder import cgroup, start
from cmdop_migrate.holder.protocol import exit_reason
from cmdop_migrate.host import drain_journal, orphans
from cmdop_migrate.model import RECORD_VERSION, Exit, Record, is_session_id
from cmdop_migrate.util import atomic, locks, trash

_log = log.get("session")
LOCK_TIMEOUT = 20.0  # seconds to wait for the host's lock


class Host:
    """Represent this host: its configuration, its events, and the records and locks of its sessions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.events = Events(config.state_dir, config.host)
        self._unsaved: dict[str, tuple[Record, Record]] = {}  # corrected, but the disk is full: (on disk, corrected)

    def prepare(self) -> None:
        """Make this host's directories and its id. Raise BadConfig if they cannot be written."""
        for directory in (self.config.state_dir, self.config.sessions_dir, self.config.run_dir):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not os.access(directory, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "not writable", str(directory))
            except OSError as error:
                hint = "Set state_dir and run_dir to directories root can write to."
                raise BadConfig(f"cannot use {directory}: {error.strerror}", hint) from error
        named = self.config.state_dir / "host-id"
        if named.exists():
            return
        own = str(named.with_name(f"host-id.{os.urandom(4).hex()}"))
        try:
            atomic.replace(own, os.urandom(4).hex().encode())
            try:
                os.link(own, named)  # complete from its first moment, and only one of two processes wins
            except FileExistsError:
                pass
            os.unlink(own)
        except OSError as error:
            hint = "Set state_dir to a directory root can write to."
            raise BadConfig(f"cannot write in {self.config.state_dir}: {error.strerror}", hint) from error

    def host_id(self) -> str:
        """Return the id of this installation, which stays the same across reboots."""
        return (self.config.state_dir / "host-id").read_text(encoding="ascii").strip()

    def instance(self) -> str:
        """Return the id of this installation since its last boot, which is what holds a lease. A session that ran
        before the boot does not run now, and a copy of this machine's disk is not this machine."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{self.host_id()}-{boot.read().strip().replace('-', '')}"

    def directory(self, session: str) -> Path:
        return self.config.sessions_dir / session

    def socket(self, session: str) -> Path:
        return self.config.run_dir / f"{session}.sock"

    def cgroup(self, session: str) -> str:
        """Return the path of a session's cgroup. Raise Blocked if cgroup v2 is not mounted."""
        mount = cgroup.mount_point()
        if mount is None:
            raise Blocked("cgroup v2 is not mounted", "Mount it: mount -t cgroup2 none /sys/fs/cgroup")
        return cgroup.path_of(mount, self.host_id(), session)

    def load(self, session: str) -> Record | None:
        """Return the record of a session, or None for a directory without a readable record: an interrupted start, or
        damage."""
        record = self._read(session)
        before, after = self._unsaved.get(session, (None, None))
        if record is not None and record == before:
            return after
        self._unsaved.pop(session, None)  # another process has written a newer record
        return record

    def _read(self, session: str) -> Record | None:
        try:
            return Record.from_json(json.loads((self.directory(session) / "session.json").read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("record of session %s cannot be read: %s", session, error)
            return None

    def note(self, event: str, session: str, **facts: object) -> None:
        """Emit an event for something that is done and cannot be undone. If the event cannot be written, log it."""
        try:
            self.events.emit(event, session, **facts)
        except OSError as error:
            _log.warning("session %s: %s: %s: %s", session, event, facts, error)

    def save(self, record: Record) -> None:
        atomic.replace_json(str(self.directory(record.session) / "session.json"), record.to_json())

    def ids(self) -> list[str]:
        """Return the ids of all session directories. Other files there, for example copies that a person made or files
        that fsck recovered, are ignored."""
        try:
            return list(filter(is_session_id, os.listdir(self.config.sessions_dir)))
        except FileNotFoundError:
            return []

    def all(self) -> list[Record]:
        """Return every readable record, oldest first."""
        records = [record for record in map(self.load, self.ids()) if record is not None]
        return sorted(records, key=lambda record: (record.created, record.session))

    def find(self, reference: str) -> Record:
        """Return a record by name, id, or unique prefix of the id. A name means the session that has it now, before one
        that ended. Raise SessionNotFound, or Usage if the prefix is ambiguous."""
        records = self.all()
        by_name = [record for record in records if record.name == reference]
        for group in ([record for record in by_name if record.phase != "exited"], by_name[-1:]):
            if group:
                return group[0]
        by_id = [record for record in records if reference and record.session.startswith(reference)]
        if len(by_id) == 1:
            return by_id[0]
        if by_id:
            some = ", ".join(f"{record.session[:12]} ({record.name})" for record in by_id[:5])
            raise Usage(
                f"{reference!r} is the start of several session ids: {some}", "Give more of the id, or the name."
            )
        known = ", ".join(record.name for record in records if record.phase != "exited") or "none"
        raise SessionNotFound(
            f"no session {reference!r} on {self.config.host}", f"Sessions here: {known}. See: cmdop-migrate ls"
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the host's lock, so that one process at a time creates or sweeps sessions. Raise TimedOut."""
        path = self.config.state_dir / "lock"
        fd = locks.try_take(path, LOCK_TIMEOUT)
        if fd is None:
            hint = f"One of its processes may be stopped; see: fuser -v {path}"
            raise TimedOut(f"another command has kept {path} for {LOCK_TIMEOUT:.0f} s", hint)
        try:
            yield
        finally:
            os.close(fd)

    def take(self, session: str) -> int | None:
        """Return the descriptor of the session's locked holder lock, or None if a live process has it."""
        try:
            return locks.try_take(self.directory(session) / "holder.lock")
        except FileNotFoundError:
            return None  # another command has removed the session's directory

    def is_held(self, session: str) -> bool:
        """Tell whether a live process has the session's holder lock."""
        fd = self.take(session)
        if fd is None:
            return True
        os.close(fd)
        return False

    def name_is_free(self, name: str, but_for: str | None = None) -> None:
        """Raise Blocked if a session that has not ended, other than `but_for`, has this name."""
        for other in self.all():
            if other.name == name and other.phase != "exited" and other.session != but_for:
                hint = "Choose another name. See: cmdop-migrate ls"
                raise Blocked(f"a session named {name!r} exists already ({other.session[:12]})", hint)

    def claim(self, record: Record) -> int:
        """Make the directory of a new session. Return its holder lock. Raise Blocked if the name is taken, or the host
        is being drained."""
        with self.locked():
            drain_journal.check_not_draining(self.config.state_dir, self.config.host)
            self.name_is_free(record.name)
            self.directory(record.session).mkdir(mode=0o700)
            fd = None
            try:
                fd = self.take(record.session)
                if fd is None:
                    raise Unexpected(f"session {record.session} is held by another process", "Try again.")
                self.save(record)
            except OSError:
                self.forget(record.session)
                if fd is not None:
                    os.close(fd)
                raise
            return fd

    def claim_parked(self, record: Record) -> int:
        """Return the holder lock of a session that is to be restored here. Make its directory if it is missing. Raise
        Fenced if a live process has the lock, Blocked as `claim` does."""
        with self.locked():
            drain_journal.check_not_draining(self.config.state_dir, self.config.host)
            self.name_is_free(record.name, but_for=record.session)
            fd = self._own(record.session, record.name)
            cgroup.remove(self.cgroup(record.session))
            start.remove_files(str(self.directory(record.session)), start.PASSING)
            if self.load(record.session) is None:  # new on this host: reserve its name
                self.save(replace(record, phase="restoring"))
            return fd

    def claim_dead(self, session: str, name: str) -> int:
        """Return the holder lock of a session that does not run here. Make its directory if it is missing. Raise Fenced
        if a live process has the lock."""
        with self.locked():
            return self._own(session, name)

    def _own(self, session: str, name: str) -> int:
        self.directory(session).mkdir(mode=0o700, exist_ok=True)
        fd = self.take(session)
        if fd is None:
            raise Fenced(f"session {name!r} is being restored, or runs, already", "See: cmdop-migrate ls")
        return fd

    def sweep(self) -> None:
        """Remove half-created sessions, mark sessions whose holder died, delete expired records, end orphaned
        processes."""
        if not self.config.sessions_dir.exists():
            return
        with self.locked():
            orphans.end_stopped_holders(self)
            for session in self.ids():
                try:
                    self._sweep_one(session)
                except OSError as error:
                    # A full disk must not stop the commands that would free it.
                    _log.warning("the record of session %s could not be corrected: %s", session, error)
            orphans.end_trees(self)
        if not trash.is_empty(self._trash):  # a remover was killed, or sessions were deleted just now
            trash.remove_later(self._trash)

    @property
    def _trash(self) -> str:
        return str(self.config.state_dir / trash.NAME)

    def _sweep_one(self, session: str) -> None:
        record = self.load(session)
        if record is None and self._is_foreign(session):
            return
        if record is None or record.phase in ("starting", "live", "handing", "restoring"):
            self._sweep_unfinished(session)
        elif record.phase == "parked":
            self._remove_leftovers(record, start.FILES)
        elif record.exit and clock.walltime() - record.exit.at > self.config.keep_exited:
            self.forget_ended(session)
        else:  # the files that it changed are kept as long as it is listed
            self._remove_leftovers(record, start.PASSING)

    def _is_foreign(self, session: str) -> bool:
        """Tell whether another version of this program wrote the record. Then this version neither judges nor removes
        it."""
        try:
            data = json.loads((self.directory(session) / "session.json").read_bytes())
            return bool(data["version"] != RECORD_VERSION)
        except (OSError, KeyError, TypeError, ValueError):
            return False

    def _sweep_unfinished(self, session: str) -> None:
        """Remove a session whose start or restore was interrupted, or record that its holder died, unless a live
        process has its lock."""
        fd = self.take(session)
        if fd is None:
            return
        try:
            # Starter and holder are dead: we have the lock. Read again: the holder may have ended it properly just now.
            record = self.load(session)
            if record is not None and record.phase in ("parked", "exited"):
                return
            cgroup.remove(self.cgroup(session))
            self.socket(session).unlink(missing_ok=True)
            if record is not None and record.phase == "handing":
                # Its checkpoint was complete before it was handed over, and is all that is left of it here.
                start.remove_files(str(self.directory(session)))
                self._save_loss(record, replace(record, phase="parked", pid=None))
                return
            if record is None or record.phase != "live":
                self._remove(session)
                self.events.emit("start_undone", session)
                return
            ended = Exit(None, exit_reason("holder_died"), clock.walltime(), "holder_died")
            self._save_loss(record, replace(record, phase="exited", exit=ended, pid=None))
            _log.warning("session %s (%s): its holder died, and the session with it", record.name, session[:12])
        finally:
            os.close(fd)

    def _save_loss(self, record: Record, after: Record) -> None:
        """Record that a holder died. If the disk is full, this process remembers it."""
        self._unsaved[record.session] = (record, after)
        self.events.emit("holder_lost", record.session, name=record.name, token=record.token)
        self.save(after)
        self._unsaved.pop(record.session, None)

    def _remove_leftovers(self, record: Record, names: tuple[str, ...]) -> None:
        """Remove what an interrupted restore or checkpoint left beside the record of a session that does not run."""
        directory = str(self.directory(record.session))
        if not start.has_files(directory, names):
            return
        fd = self.take(record.session)
        if fd is None:
            return  # it is being restored, or its holder is exiting
        folder = locks.open_directory(directory)
        try:
            # A checkpoint under way has the directory's lock: the holder is gone, but the upload may still finish.
            if self.load(record.session) == record and locks.try_lock(folder):
                cgroup.remove(self.cgroup(record.session))
                start.remove_files(directory, names)
        finally:
            os.close(folder)
            os.close(fd)

    def put_right(self, before: Record, after: Record) -> Record | None:
        """Replace the record `before` of a session that does not run here by `after`.

        Return None, and change nothing, if its holder has not exited yet, another command restores it, or another
        session has taken the name of one that is to be parked. Raise OSError on a full disk: then this process
        remembers it.
        """
        with self.locked():
            fd = self.take(before.session)
            if fd is None:
                return None
            try:
                if after.phase == "parked":
                    self.name_is_free(before.name, but_for=before.session)
                if self.load(before.session) != before:
                    return None
                self._unsaved[before.session] = (self._read(before.session) or before, after)
                self.save(after)
                self._unsaved.pop(before.session, None)
                if after.phase == "parked":
                    start.remove_files(str(self.directory(after.session)))
                    self.events.emit("parked", after.session, name=after.name, code=None, reason="by its lease")
                return after
            except Blocked:
                return None
            finally:
                os.close(fd)

    def forget_ended(self, session: str) -> bool:
        """Delete every trace of a session that has ended; call it with the host's lock held. Return False if its holder
        has not exited yet, or it is being restored here, which its record shows only once it runs."""
        fd = self.take(session)
        if fd is None:
            return False
        try:
            record = self.load(session)
            is_over = record is not None and record.phase == "exited"
            if is_over:
                self.forget(session)
            return is_over
        finally:
            os.close(fd)

    def forget(self, session: str) -> None:
        """Delete every trace of a session that is not alive here."""
        self.socket(session).unlink(missing_ok=True)
        self._remove(session)

    def _remove(self, session: str) -> None:
        start.remove_files(str(self.directory(session)))
        shutil.rmtree(self.directory(session), ignore_errors=True)
