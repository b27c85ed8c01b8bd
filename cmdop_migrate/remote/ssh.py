"""Run commands on other hosts, over one kept SSH connection per host.

A command runs without a terminal there: when the connection breaks, sshd closes its pipes and sends it no signal, so it
runs to its end. The caller does not learn the outcome: that is PeerLost, unlike PeerFailed, where it was never started.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paramiko import Channel, ChannelException, SSHException, Transport

from cmdop_migrate.clock import boottime
from cmdop_migrate.errors import PeerFailed, PeerLost
from cmdop_migrate.remote.connect import Accept, SshLimits, connect, hang_up, refuse_unknown
from cmdop_migrate.remote.inventory import SshTarget
from cmdop_migrate.remote.knownhosts import KnownHosts, ShownKey, shown

_POLL_INTERVAL = 0.2
_OUTPUT_GRACE = 2.0  # seconds for output after the exit status: a child left behind may keep the pipe open
_STDERR_KEPT = 16 << 10
OnStart = Callable[[Callable[[bytes], None]], None]
_LOST_HINT = "It may have done all, some or nothing. See: cmdop-migrate resume"


@dataclass(frozen=True)
class Finished:
    """Report the exit status and stderr of a command that ended by itself."""

    status: int
    stderr: str


class SshPool:
    """Keep one connection per host, made on first use, and again after it broke. Thread-safe."""

    def __init__(self, known: KnownHosts, home: Path, limits: SshLimits | None = None) -> None:
        self.known = known
        self.limits = limits or SshLimits()
        self._home = home
        self._lock = threading.Lock()
        self._gates: dict[SshTarget, threading.Lock] = {}
        self._open: dict[SshTarget, Transport] = {}

    def transport(self, target: SshTarget, accept: Accept = refuse_unknown) -> Transport:
        with self._lock:
            gate = self._gates.setdefault(target, threading.Lock())
        with gate:  # one lock per host: a host that does not answer does not block the others
            kept = self._open.get(target)
            if kept is not None and kept.is_active():
                return kept
            made = self._connect(target, accept)
            with self._lock:
                self._open[target] = made
            return made

    def _connect(self, target: SshTarget, accept: Accept) -> Transport:
        """Connect to a target. A kept connection to the jump host may be dead without notice: reconnect to the jump
        host once."""
        try:
            return self._dial(target, accept)
        except PeerFailed:
            kept = self._open.get(target.via) if target.via else None
            if target.via is None or kept is None or self._answers(kept):
                raise
            self.drop(target.via)
            return self._dial(target, accept)

    def _dial(self, target: SshTarget, accept: Accept) -> Transport:
        via = self.transport(target.via, accept) if target.via else None
        return connect(target, self.known, self._home, self.limits, via, accept)

    def host_key(self, target: SshTarget) -> ShownKey:
        """Return the key that the host has shown and proven."""
        return shown(self.transport(target).get_remote_server_key())

    def drop(self, target: SshTarget) -> None:
        """Close the connection; the next use connects again."""
        with self._lock:
            kept = self._open.pop(target, None)
        if kept is not None:
            hang_up(kept)

    def close(self) -> None:
        with self._lock:
            kept = list(self._open.values())
            self._open.clear()
        for transport in reversed(kept):  # connections through a jump host before the one to it
            hang_up(transport)

    def run(
        self,
        target: SshTarget,
        command: bytes,
        on_output: Callable[[bytes], None],
        stdin: bytes | None = None,
        timeout: float | None = None,
        on_start: OnStart | None = None,
    ) -> Finished:
        """Run a command there to its end. Raise PeerFailed if it was never started, PeerLost if it was and its end is
        unknown. `on_start` gets a function that writes to its stdin, which then stays open; data that the command does
        not read is lost."""
        transport, channel = self._session(target)
        try:
            self._start(target, transport, channel, command, stdin, on_start)
            return self._follow(target, transport, channel, on_output, timeout)
        finally:
            hang_up(channel)

    def _session(self, target: SshTarget) -> tuple[Transport, Channel]:
        """Open a channel. Nothing is started yet, so reconnect once if the connection died since its last use."""
        tries = 2
        while True:
            transport, tries = self.transport(target), tries - 1
            try:
                return transport, transport.open_session(timeout=self.limits.connect)
            except ChannelException as error:
                hint = "There may be too many concurrent commands (MaxSessions in sshd_config). Try again."
                raise PeerFailed(f"{target.name}: no further command on this connection: {error.text}", hint) from error
            except (SSHException, EOFError, OSError) as error:
                self.drop(target)
                if not tries:
                    hint = "Nothing was started there. Check the host, then try again."
                    raise PeerFailed(f"{target.name}: the connection is lost: {error}", hint) from error

    def _start(
        self,
        target: SshTarget,
        transport: Transport,
        channel: Channel,
        command: bytes,
        stdin: bytes | None,
        on_start: OnStart | None,
    ) -> None:
        # paramiko waits for the answer without a limit: this timer closes the connection.
        limit = threading.Timer(self.limits.answer, hang_up, (transport,))
        limit.daemon = True
        limit.start()
        try:
            channel.exec_command(command)
        except (SSHException, EOFError, OSError) as error:
            if transport.is_active():
                hint = "Check that the account has a login shell and may run commands."
                raise PeerFailed(f"{target.name}: the host refused to run a command: {error}", hint) from error
            raise self._lost(target, "the connection broke while a command was being started") from error
        finally:
            limit.cancel()
        channel.settimeout(self.limits.answer)
        try:
            if stdin:
                channel.sendall(stdin)
            if on_start is None:
                channel.shutdown_write()
                return
        except TimeoutError as error:
            raise PeerLost(f"{target.name}: the command there does not read its input", _LOST_HINT) from error
        except (SSHException, EOFError, OSError):
            return  # the command or the connection ended before the input was read; `_follow` tells which

        def write(data: bytes) -> None:
            with contextlib.suppress(SSHException, EOFError, OSError):
                channel.sendall(data)

        on_start(write)

    def _follow(
        self,
        target: SshTarget,
        transport: Transport,
        channel: Channel,
        on_output: Callable[[bytes], None],
        timeout: float | None,
    ) -> Finished:
        stderr = bytearray()
        began = last_output = boottime()
        ended: float | None = None
        while True:
            over = channel.closed or channel.eof_received
            select.select([channel], [], [], 0 if over else _POLL_INTERVAL)
            got = False
            while channel.recv_ready():
                on_output(channel.recv(1 << 16))
                got = True
            while channel.recv_stderr_ready():
                stderr += channel.recv_stderr(1 << 16)
                del stderr[:-_STDERR_KEPT]
                got = True
            now = boottime()
            last_output = now if got else last_output
            if channel.exit_status >= 0:
                ended = ended or now
                if not got and (over or now > ended + _OUTPUT_GRACE):
                    return Finished(channel.exit_status, stderr.decode(errors="replace"))
            elif channel.closed and not got:
                if transport.is_active():
                    raise PeerLost(f"{target.name}: the command was killed there", _LOST_HINT)
                raise self._lost(target, "the connection broke while a command ran")
            if timeout is not None and now > began + timeout:
                raise PeerLost(f"{target.name}: no answer within {timeout:g} s", _LOST_HINT)
            if now > last_output + self.limits.silence:
                if not self._answers(transport):
                    raise self._lost(target, "the host stopped answering while a command ran")
                last_output = boottime()

    def _answers(self, transport: Transport) -> bool:
        """Tell whether a silent host is alive: its sshd answers, with any answer."""
        try:
            hang_up(transport.open_session(timeout=self.limits.answer))
        except ChannelException:
            return True
        except (SSHException, EOFError, OSError):
            return False
        return True

    def _lost(self, target: SshTarget, reason: str) -> PeerLost:
        self.drop(target)
        return PeerLost(f"{target.name}: {reason}", _LOST_HINT)
