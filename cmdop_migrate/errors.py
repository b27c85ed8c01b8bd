"""Define every expected failure of this toolkit.

Domain code raises one of these; only `cli.main` prints it and exits with its status. A class carries the stable `code`
(for programs) and `exit` (for shells); an instance carries the message and the hint, which names the next command. The
docstring of a class is its description in docs/reference/errors.md, without "Signal that".

    CmdopError
    ├── Unexpected            1   a bug or a broken machine
    ├── Usage                 2   the command line is wrong
    │   ├── BadConfig         2   a setting is wrong
    │   └── NotRoot           2   the user is not root
    ├── NotFound              3   no such session, checkpoint, host
    │   ├── SessionNotFound
    │   ├── CheckpointNotFound
    │   └── HostNotFound
    ├── Blocked               4   a check of the plan or of the machine failed; nothing was changed
    │   ├── SessionExited     4   the session has ended
    │   └── NotIdle           4   the session is in use again
    ├── Fenced                5   another incarnation holds the session, or it was restored already
    ├── Unreachable           6   a store or lease service does not answer
    │   ├── StoreUnreachable
    │   ├── StoreDenied
    │   ├── LeaseUnreachable
    │   └── LeaseUnreadable   6   the lease store has something that is not a lease record
    │       └── LeaseNewer
    ├── ImageRefused          7   damaged, unsigned, wrong key
    ├── CriuFailed            8   CRIU failed, with its reason
    ├── PeerFailed            9   the other host failed
    │   ├── HostKeyRefused    9   it may be another host
    │   ├── PeerDiffers       9   another version, store, lease store or key
    │   └── PeerLost          9   it is not known how the command there ended
    ├── Partial              10   done in part
    ├── TimedOut             11   the time allowed was not enough
    └── NotAdmitted          12   no credential allows this
"""

from __future__ import annotations


class CmdopError(Exception):
    """Be the base of all expected failures."""

    code = "error"
    exit = 1
    passing = False  # whether the cause usually goes away by itself, so that a retry may succeed

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Unexpected(CmdopError):
    """Signal that a bug, or an unforeseen state of the machine, stopped the command. The log file in the hint has the
    traceback."""

    code = "unexpected"
    exit = 1


class Usage(CmdopError):
    """Signal that the command line is not valid."""

    code = "usage"
    exit = 2


class BadConfig(Usage):
    """Signal that a setting is unknown or has an invalid value."""

    code = "bad_config"


class NotRoot(Usage):
    """Signal that the command needs root: namespaces, cgroups and CRIU do."""

    code = "not_root"


class NotFound(CmdopError):
    """Signal that the named object does not exist."""

    code = "not_found"
    exit = 3


class SessionNotFound(NotFound):
    """Signal that no session has this name, id or prefix on this host."""

    code = "session_not_found"


class CheckpointNotFound(NotFound):
    """Signal that the store has no such checkpoint."""

    code = "checkpoint_not_found"


class HostNotFound(NotFound):
    """Signal that the inventory has no such host."""

    code = "host_not_found"


class Blocked(CmdopError):
    """Signal that a check found a reason why the command cannot work. Nothing was changed."""

    code = "blocked"
    exit = 4
    check = ""  # which check, of those in docs/operations/plan.md


class SessionExited(Blocked):
    """Signal that the session has ended, and the command needs a live one."""

    code = "session_exited"


class NotIdle(Blocked):
    """Signal that the session is in use again, and the command was for an idle one only."""

    code = "not_idle"


class Fenced(CmdopError):
    """Signal that another incarnation holds the session, or the checkpoint was restored already."""

    code = "fenced"
    exit = 5


class Unreachable(CmdopError):
    """Signal that a service does not answer. Trying again later may work."""

    code = "unreachable"
    exit = 6


class StoreUnreachable(Unreachable):
    """Signal that the checkpoint store does not answer, or cut the connection."""

    code = "store_unreachable"


class StoreDenied(Unreachable):
    """Signal that the checkpoint store refuses access: wrong credentials, or no such bucket."""

    code = "store_denied"


class LeaseUnreachable(Unreachable):
    """Signal that the lease store does not answer, or it is not known whether it did what was requested."""

    code = "lease_unreachable"


class LeaseUnreadable(Unreachable):
    """Signal that the lease store has something for this session that is not a lease record."""

    code = "lease_unreadable"


class LeaseNewer(LeaseUnreadable):
    """Signal that a newer version of cmdop-migrate wrote this session's lease; this version must not change it."""

    code = "lease_newer"


class ImageRefused(CmdopError):
    """Signal that the image is damaged, unsigned, sealed with another key, or of an unknown format. CRIU never read
    it."""

    code = "image_refused"
    exit = 7


class CriuFailed(CmdopError):
    """Signal that CRIU could not dump or restore. The message translates its log, the hint says what to change."""

    code = "criu_failed"
    exit = 8


class PeerFailed(CmdopError):
    """Signal that the other host could not do its part."""

    code = "peer_failed"
    exit = 9


class HostKeyRefused(PeerFailed):
    """Signal that the host's key is not the known one, or no key is known yet. Nothing was sent to it."""

    code = "host_key_refused"


class PeerDiffers(PeerFailed):
    """Signal that the other host has another version, store, lease store or key: no session can move to it."""

    code = "peer_differs"


class PeerLost(PeerFailed):
    """Signal that the connection broke after the command was started there: it may have done all, some or nothing."""

    code = "peer_lost"


class Partial(CmdopError):
    """Signal that only a part was done; the message lists what was not."""

    code = "partial"
    exit = 10


class TimedOut(CmdopError):
    """Signal that the time allowed ran out. The work in progress was undone or continues, as the message says."""

    code = "timed_out"
    exit = 11


class NotAdmitted(CmdopError):
    """Signal that no credential allows this."""

    code = "not_admitted"
    exit = 12


def all_errors() -> list[type[CmdopError]]:
    """Return every class of the tree, parents first."""
    kinds: list[type[CmdopError]] = [CmdopError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


def from_code(code: str, message: str, hint: str = "") -> CmdopError:
    """Return the error that another process named by its code, or Unexpected for an unknown code."""
    found = next((kind for kind in all_errors() if kind.code == code), Unexpected)
    return found(message, hint)
