"""Open an authenticated SSH transport to a target: connect, verify the host key, log in. Each failure says which step.

Nothing is sent to a host before its key is verified.
"""

from __future__ import annotations

import errno
import getpass
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paramiko import Agent, AuthenticationException, Channel, ChannelException, PKey, SSHException, Transport
from paramiko.pkey import UnknownKeyType

from cmdop_migrate import log
from cmdop_migrate.errors import HostKeyRefused, PeerFailed
from cmdop_migrate.remote.inventory import SshTarget
from cmdop_migrate.remote.knownhosts import KnownHosts, ShownKey, shown

Accept = Callable[[SshTarget, ShownKey], bool]
"""Asks a person to accept this key of an unknown host; returns True if accepted."""

_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class SshLimits:
    """Set timeouts in seconds. `connect`: for each of connecting, the SSH greeting and logging in. `silence`: after
    which the host of a running command is probed; `answer`: how long the probe may take."""

    connect: float = 10.0
    keepalive: int = 15
    silence: float = 15.0
    answer: float = 15.0


def refuse_unknown(target: SshTarget, key: ShownKey) -> bool:  # noqa: ARG001 - an Accept
    """Refuse every unknown key."""
    return False


def connect(
    target: SshTarget,
    known: KnownHosts,
    home: Path,
    limits: SshLimits,
    via: Transport | None,
    accept: Accept = refuse_unknown,
) -> Transport:
    """Return an authenticated transport to `target`, through `via` if given. Raise PeerFailed with the reason."""
    sock = _through(target, via, limits) if via else _reach(target, limits)
    transport: Transport | None = None
    try:
        transport = Transport(sock)
        transport.set_log_channel(_quiet())
        transport.banner_timeout = transport.auth_timeout = transport.channel_timeout = limits.connect
        _greet(transport, target, known, limits)
        _verify(transport.get_remote_server_key(), target, known, accept)
        _log_in(transport, target, home)
        transport.set_keepalive(limits.keepalive)
    except BaseException:
        if transport is not None:
            hang_up(transport)
        hang_up(sock)
        raise
    return transport


def hang_up(connection: Transport | Channel | socket.socket) -> None:
    """Close a connection. Ignore that the goodbye message cannot be sent to a peer that is gone."""
    with suppress(SSHException, EOFError, OSError):
        connection.close()


def _quiet() -> str:
    """Silence the logging of paramiko, which logs tracebacks of errors that we raise in better words."""
    logger = log.get("paramiko")
    logger.setLevel(logging.CRITICAL)
    return logger.name


def _reach(target: SshTarget, limits: SshLimits) -> socket.socket:
    try:
        sock = socket.create_connection((target.address, target.port), limits.connect)
    except OSError as error:
        raise _unreached(target, error, limits) from error
    sock.settimeout(None)
    return sock


def _unreached(target: SshTarget, error: OSError, limits: SshLimits) -> PeerFailed:
    where = f"{target.name} ({target.shown})"
    if isinstance(error, socket.gaierror):
        return PeerFailed(f"{where}: cannot resolve the address: {error.strerror}", "Check it: cmdop-migrate hosts ls")
    if isinstance(error, TimeoutError):
        hint = "Check that the host is up and reachable from here (firewall, VPN, --jump)."
        return PeerFailed(f"{where}: no answer within {limits.connect:g} s", hint)
    if error.errno == errno.ECONNREFUSED:
        return PeerFailed(f"{where}: connection refused", "Check that sshd runs there, on this port.")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return PeerFailed(f"{where}: no route to host", "Check this host's network, or use --jump.")
    return PeerFailed(f"{where}: cannot connect: {error.strerror or error}", "Check the address and the network.")


def _through(target: SshTarget, via: Transport, limits: SshLimits) -> socket.socket:
    assert target.via is not None
    where = f"{target.name} ({target.shown}) through {target.via.name}"
    try:
        channel = via.open_channel(
            "direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), 0, 0, limits.connect
        )
    except ChannelException as error:
        hint = "Check that the jump host can reach it, and that its sshd allows TCP forwarding."
        raise PeerFailed(f"{where}: {error.text or 'cannot connect'}", hint) from error
    except (SSHException, EOFError, OSError) as error:
        hint = "Check that the host is up and that the jump host can reach it."
        raise PeerFailed(f"{where}: no answer within {limits.connect:g} s", hint) from error
    return channel  # type: ignore[return-value]  # it serves as a socket for everything Transport does with one


def _greet(transport: Transport, target: SshTarget, known: KnownHosts, limits: SshLimits) -> None:
    """Exchange keys. Request the kinds of host key that are known first."""
    known_keys = known.find(target.known_as)
    options = transport.get_security_options()
    if known_keys is not None:
        kinds = {key.get_name() for key in known_keys[1]}
        kinds |= {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else set()
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in kinds)
    where = f"{target.name} ({target.shown})"
    hint = "Check that sshd listens there and responds."
    try:
        transport.start_client(timeout=limits.connect)
    except (SSHException, EOFError, OSError) as error:
        raise PeerFailed(f"{where}: no SSH greeting: {error or 'the host closed the connection'}", hint) from error
    if not transport.initial_kex_done:
        raise PeerFailed(f"{where}: no SSH greeting within {limits.connect:g} s", hint)


def _verify(key: PKey, target: SshTarget, known: KnownHosts, accept: Accept) -> None:
    where = f"{target.name} ({target.known_as})"
    if known.is_revoked(key):
        raise HostKeyRefused(
            f"{where} shows a REVOKED host key, {shown(key)}", "Do not use it. Ask its administrator for a new one."
        )
    known_keys = known.find(target.known_as)
    if known_keys is None:
        if accept(target, shown(key)):
            return known.accept(target.known_as, key)
        raise HostKeyRefused(
            f"the key of {where} is not known: {shown(key)}",
            f"Compare it with the key on the host, then: cmdop-migrate hosts add {target.name} {target.shown}",
        )
    file, keys = known_keys
    if key not in keys:
        expected = ", ".join(str(shown(known_key)) for known_key in keys)
        forget = f"cmdop-migrate hosts rm {target.name}" if file == known.own else f"ssh-keygen -R '{target.known_as}'"
        raise HostKeyRefused(
            f"THE HOST KEY OF {where} HAS CHANGED: expected {expected}, got {shown(key)} (known from {file}). "
            "A third party may intercept the connection; nothing was sent",
            f"Only if that host was reinstalled: {forget}, then: cmdop-migrate hosts add",
        )
    return None


def _log_in(transport: Transport, target: SshTarget, home: Path) -> None:
    user = target.user or getpass.getuser()
    tried: list[str] = []
    unusable: list[PeerFailed] = []
    agent = Agent()
    try:
        for label, key in _candidates(target, home, agent, unusable):
            tried.append(label)
            try:
                if not transport.auth_publickey(user, key):
                    return
                tried[-1] += " (the server asks for more: a password, or a second factor)"
            except AuthenticationException:
                continue
    except (SSHException, EOFError, OSError) as error:
        hint = "Name the right key with --key: a server closes the connection after too many wrong keys."
        raise PeerFailed(f"{target.name}: connection closed while logging in as {user}: {error}", hint) from error
    finally:
        agent.close()
    if unusable:
        raise unusable[0]
    attempts = f"tried {', '.join(tried)}" if tried else "there is no key to try"
    hint = f"Add this host's public key to ~{user}/.ssh/authorized_keys there; or name another --key or --user."
    raise PeerFailed(f"{target.name}: cannot log in as {user}@{target.address}: {attempts}", hint)


def _candidates(target: SshTarget, home: Path, agent: Agent, unusable: list[PeerFailed]) -> Iterator[tuple[str, PKey]]:
    """Yield the keys named for the host, those of ssh-agent, then the usual files. A named key that cannot be read (it
    may be locked, and open in the agent) is added to `unusable`."""
    for path in target.keys:
        try:
            yield path, _key(Path(path), target)
        except PeerFailed as error:
            unusable.append(error)
    for key in agent.get_keys():
        yield f"ssh-agent {shown(key).fingerprint}", key
    for name in () if target.keys else _IDENTITIES:
        path_of = home / ".ssh" / name
        if path_of.exists():
            with suppress(PeerFailed):  # not named for this host, so it may be unusable
                yield str(path_of), _key(path_of, target)


def _key(path: Path, target: SshTarget) -> PKey:
    try:
        return PKey.from_path(path)
    except OSError as error:
        raise PeerFailed(f"{target.name}: cannot read the key {path}: {error.strerror}", "Check --key.") from error
    except (TypeError, ValueError, SSHException, UnknownKeyType) as error:
        hint = "With a passphrase: load it into ssh-agent (ssh-add). Else name another with --key."
        raise PeerFailed(f"{target.name}: cannot use the key {path}: {error}", hint) from error
