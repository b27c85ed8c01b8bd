"""The sessions of this host, as its state directory tells them.

    STATE_DIR/host-id                 names this host's cgroups
    STATE_DIR/lock                    taken while sessions are created or swept
    STATE_DIR/sessions/ID/session.json    the record; written by the starter, then by the holder alone
    STATE_DIR/sessions/ID/holder.lock     held as long as the starter or the holder lives
    STATE_DIR/sessions/ID/…               upper and work of each overlay, inputs.jsonl, output.ring

Whether a session lives is not written down anywhere: the kernel knows it, by
that lock. A record that says otherwise is stale and is put right by `sweep`,
which every command runs first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
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
from cmdop_migrate.host import draining, orphans
from cmdop_migrate.model import RECORD_VERSION, Exit, Record, is_session_id
from cmdop_migrate.util import atomic, trash

_log = log.get("session")
LOCK_TIMEOUT = 20.0


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Host:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.events = Events(config.state_dir, config.host)
        self._unsaved: dict[str, tuple[Record, Record]] = {}  # put right, but the disk is full: what it says, what is

    def prepare(self) -> None:
        """Makes this host's directories. BadConfig when they cannot be written."""
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
                os.link(own, named)  # whole from its first moment, and of two who try one wins
            except FileExistsError:
                pass
            os.unlink(own)
        except OSError as error:
            hint = "Set state_dir to a directory root can write to."
            raise BadConfig(f"cannot write in {self.config.state_dir}: {error.strerror}", hint) from error

    def host_id(self) -> str:
        return (self.config.state_dir / "host-id").read_text(encoding="ascii").strip()

    def instance(self) -> str:
        """This installation since its last boot: what holds a lease. What ran before the boot does not run now, and a
        copy of this machine's disk is not this machine."""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{self.host_id()}-{boot.read().strip().replace('-', '')}"

    def directory(self, session: str) -> Path:
        return self.config.sessions_dir / session

    def socket(self, session: str) -> Path:
        return self.config.run_dir / f"{session}.sock"

    def cgroup(self, session: str) -> str:
        mount = cgroup.mount_point()
        if mount is None:
            raise Blocked("cgroup v2 is not mounted", "Mount it: mount -t cgroup2 none /sys/fs/cgroup")
        return cgroup.path_of(mount, self.host_id(), session)

    def load(self, session: str) -> Record | None:
        """None for a directory without a readable record: a start that was cut off, or damage."""
        found = self._read(session)
        before, after = self._unsaved.get(session, (None, None))
        if found is not None and found == before:
            return after
        self._unsaved.pop(session, None)  # somebody has written it since, and knew better
        return found

    def _read(self, session: str) -> Record | None:
        try:
            return Record.from_json(json.loads((self.directory(session) / "session.json").read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("record of session %s cannot be read: %s", session, error)
            return None

    def note(self, event: str, session: str, **facts: object) -> None:
        """An event of what is done and cannot be undone: where it cannot be written, the log alone has it."""
        try:
            self.events.emit(event, session, **facts)
        except OSError as error:
            _log.warning("session %s: %s: %s: %s", session, event, facts, error)

    def save(self, record: Record) -> None:
        atomic.replace_json(str(self.directory(record.session) / "session.json"), record.to_json())

    def ids(self) -> list[str]:
        """What else lies there, a copy that somebody made or what fsck has found, is no session."""
        try:
            return list(filter(is_session_id, os.listdir(self.config.sessions_dir)))
        except FileNotFoundError:
            return []

    def all(self) -> list[Record]:
        """Every readable record, oldest first."""
        records = [record for record in map(self.load, self.ids()) if record is not None]
        return sorted(records, key=lambda record: (record.created, record.session))

    def find(self, reference: str) -> Record:
        """By name, id, or unique prefix of the id. A name means the session that has it now, not one that ended."""
        records = self.all()
        by_name = [record for record in records if record.name == reference]
        for group in ([one for one in by_name if one.phase != "exited"], by_name[-1:]):
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
        """One creator or sweeper at a time on this host."""
        path = self.config.state_dir / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + LOCK_TIMEOUT
        try:
            while not _try_lock(fd):
                if time.monotonic() > until:
                    hint = f"One of its processes may be stopped; see: fuser -v {path}"
                    raise TimedOut(f"another command has kept {path} for {LOCK_TIMEOUT:.0f} s", hint)
                time.sleep(0.005)
            yield
        finally:
            os.close(fd)

    def take(self, session: str) -> int | None:
        """The session's holder lock, or None when somebody lives who has it."""
        path = self.directory(session) / "holder.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None  # swept by someone else meanwhile
        if not _try_lock(fd):
            os.close(fd)
            return None
        return fd

    def is_held(self, session: str) -> bool:
        fd = self.take(session)
        if fd is None:
            return True
        os.close(fd)
        return False

    def name_is_free(self, name: str, but_for: str | None = None) -> None:
        for other in self.all():
            if other.name == name and other.phase != "exited" and other.session != but_for:
                hint = "Choose another name. See: cmdop-migrate ls"
                raise Blocked(f"a session named {name!r} exists already ({other.session[:12]})", hint)

    def claim(self, record: Record) -> int:
        """Makes the session's directory -> its holder lock, now ours. Blocked: name taken, or host drained."""
        with self.locked():
            draining.refuse(self.config.state_dir, self.config.host)
            self.name_is_free(record.name)
            self.directory(record.session).mkdir(mode=0o700)
            fd = None
            try:
                fd = self.take(record.session)
                if fd is None:
                    raise Unexpected(f"session {record.session} is held by someone else", "Try again.")
                self.save(record)
            except OSError:
                self.forget(record.session)
                if fd is not None:
                    os.close(fd)
                raise
            return fd

    def claim_parked(self, record: Record) -> int:
        """The lock of a session that is to be restored here, its directory made if need be."""
        with self.locked():
            draining.refuse(self.config.state_dir, self.config.host)
            self.name_is_free(record.name, but_for=record.session)
            fd = self._own(record.session, record.name)
            cgroup.remove(self.cgroup(record.session))
            start.remove_files(str(self.directory(record.session)), start.PASSING)
            if self.load(record.session) is None:  # new on this host: its name is taken from now on
                self.save(replace(record, phase="restoring"))
            return fd

    def claim_dead(self, session: str, name: str) -> int:
        """The lock of a session that does not run here, its directory made if need be. Fenced when somebody has it."""
        with self.locked():
            return self._own(session, name)

    def _own(self, session: str, name: str) -> int:
        self.directory(session).mkdir(mode=0o700, exist_ok=True)
        fd = self.take(session)
        if fd is None:
            raise Fenced(f"session {name!r} is being restored, or runs, already", "See: cmdop-migrate ls")
        return fd

    def sweep(self) -> None:
        """Puts stale records right: half-made sessions go, a lost holder is said, old ended ones are forgotten."""
        if not self.config.sessions_dir.exists():
            return
        with self.locked():
            orphans.end_stopped_holders(self)
            for session in self.ids():
                try:
                    self._sweep_one(session)
                except OSError as error:
                    # A full disk must not keep the commands that would free it from running.
                    _log.warning("session %s could not be put right: %s", session, error)
            orphans.end_trees(self)
        if not trash.is_empty(self._trash):  # a process that removed it was killed, or sessions were forgotten just now
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
            self._sweep_left(record, start.FILES)
        elif record.exit and clock.walltime() - record.exit.at > self.config.keep_exited:
            self.forget_ended(session)
        else:  # the files it changed are kept as long as it is listed
            self._sweep_left(record, start.PASSING)

    def _is_foreign(self, session: str) -> bool:
        """Written by another version of this program: not ours to judge, least of all to remove."""
        try:
            data = json.loads((self.directory(session) / "session.json").read_bytes())
            return bool(data["version"] != RECORD_VERSION)
        except (OSError, KeyError, TypeError, ValueError):
            return False

    def _sweep_unfinished(self, session: str) -> None:
        fd = self.take(session)
        if fd is None:
            return
        try:
            # Taken: starter and holder are dead. Read again: the holder may have ended it properly just now.
            record = self.load(session)
            if record is not None and record.phase in ("parked", "exited"):
                return
            cgroup.remove(self.cgroup(session))
            self.socket(session).unlink(missing_ok=True)
            if record is not None and record.phase == "handing":
                # Its checkpoint was whole before it was handed over, and is what is left of it here.
                start.remove_files(str(self.directory(session)))
                self._lost(record, replace(record, phase="parked", pid=None))
                return
            if record is None or record.phase != "live":
                self._remove(session)
                self.events.emit("start_undone", session)
                return
            ended = Exit(None, exit_reason("holder_died"), clock.walltime(), "holder_died")
            self._lost(record, replace(record, phase="exited", exit=ended, pid=None))
            _log.warning("session %s (%s): its holder died, and the session with it", record.name, session[:12])
        finally:
            os.close(fd)

    def _lost(self, record: Record, after: Record) -> None:
        """On a full disk this process knows it all the same."""
        self._unsaved[record.session] = (record, after)
        self.events.emit("holder_lost", record.session, name=record.name, token=record.token)
        self.save(after)
        self._unsaved.pop(record.session, None)

    def _sweep_left(self, record: Record, names: tuple[str, ...]) -> None:
        """What a restore, or a checkpoint, that was cut off has left beside the record of one that does not run."""
        directory = str(self.directory(record.session))
        if not start.has_files(directory, names):
            return
        fd = self.take(record.session)
        if fd is None:
            return  # it is just being restored, or its holder says goodbye
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Whoever captures it has the directory's lock: its holder is gone, but the last of it may get to the store.
            if self.load(record.session) == record and _try_lock(folder):
                cgroup.remove(self.cgroup(record.session))
                start.remove_files(directory, names)
        finally:
            os.close(folder)
            os.close(fd)

    def put_right(self, before: Record, after: Record) -> Record | None:
        """`after`, of a session that does not run here, for `before`. None when its holder is not gone yet, somebody
        restores it, or, parked, another has its name by now: then nothing is changed. OSError on a full disk: then
        this process knows it all the same."""
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
        """Removes every trace of one that has ended; with the host's lock held. False: its holder is not gone yet, or
        it is being restored here, and its record says so only when it runs."""
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
        """Removes every trace of a session that is not alive here."""
        self.socket(session).unlink(missing_ok=True)
        self._remove(session)

    def _remove(self, session: str) -> None:
        start.remove_files(str(self.directory(session)))
        shutil.rmtree(self.directory(session), ignore_errors=True)
