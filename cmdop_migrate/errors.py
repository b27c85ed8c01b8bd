"""Every way this toolkit fails on purpose.

Domain code raises one of these; only `cli.main` prints it and picks the exit
status. A class carries the stable `code` (for programs) and `exit` (for
shells); an instance carries the message and the hint, the next thing to do.

    CmdopError
    ├── Unexpected            1   a bug or a broken machine
    ├── Usage                 2   what was typed
    │   ├── BadConfig         2   what the settings say
    │   └── NotRoot           2   who typed it
    ├── NotFound              3   no such session, checkpoint, host
    │   ├── SessionNotFound
    │   ├── CheckpointNotFound
    │   └── HostNotFound
    ├── Blocked               4   the plan or the machine says no; nothing was touched
    │   ├── SessionExited     4   it ran once, and is over
    │   └── NotIdle           4   what was to be done to an idle session only
    ├── Fenced                5   someone else holds it, or it was restored already
    ├── Unreachable           6   a store or lease service does not answer
    │   ├── StoreUnreachable
    │   ├── StoreDenied
    │   ├── LeaseUnreachable
    │   └── LeaseUnreadable   6   the lease store answers with what is no lease record
    │       └── LeaseNewer
    ├── ImageRefused          7   damaged, unsigned, wrong key
    ├── CriuFailed            8   CRIU said no, with its reason
    ├── PeerFailed            9   the other host failed
    │   ├── HostKeyRefused    9   it may not be that host at all
    │   ├── PeerDiffers       9   other version, store, lease store or key: nothing could be handed over
    │   └── PeerLost          9   nobody knows how the command there ended
    ├── Partial              10   done in part
    ├── TimedOut             11   the time given was not enough
    └── NotAdmitted          12   no credential for this
"""

from __future__ import annotations


class CmdopError(Exception):
    """Base of all expected failures."""

    code = "error"
    exit = 1
    passing = False  # whether what is in the way usually goes away by itself, so that to try again may help

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Unexpected(CmdopError):
    """A bug, or a machine in a state nobody foresaw. The log file it names has the traceback."""

    code = "unexpected"
    exit = 1


class Usage(CmdopError):
    """The command line does not make sense as typed."""

    code = "usage"
    exit = 2


class BadConfig(Usage):
    """A setting is unknown or has a value that cannot be used."""

    code = "bad_config"


class NotRoot(Usage):
    """Sessions need root: namespaces, cgroups and CRIU do."""

    code = "not_root"


class NotFound(CmdopError):
    """The thing named does not exist."""

    code = "not_found"
    exit = 3


class SessionNotFound(NotFound):
    """No session has this name, id or prefix on this host."""

    code = "session_not_found"


class CheckpointNotFound(NotFound):
    """The store holds no such checkpoint."""

    code = "checkpoint_not_found"


class HostNotFound(NotFound):
    """The inventory has no such host."""

    code = "host_not_found"


class Blocked(CmdopError):
    """A check made beforehand says this cannot work. Nothing was touched."""

    code = "blocked"
    exit = 4
    check = ""  # which one, of those in docs/operations/plan.md


class SessionExited(Blocked):
    """The session has ended; what was asked needs a live one."""

    code = "session_exited"


class NotIdle(Blocked):
    """The session is in use again; what was asked was for an idle one only."""

    code = "not_idle"


class Fenced(CmdopError):
    """Another incarnation holds the session, or the checkpoint was restored already."""

    code = "fenced"
    exit = 5


class Unreachable(CmdopError):
    """A service this needs does not answer. Trying again later may work."""

    code = "unreachable"
    exit = 6


class StoreUnreachable(Unreachable):
    """The checkpoint store does not answer, or cut the connection."""

    code = "store_unreachable"


class StoreDenied(Unreachable):
    """The checkpoint store answers, and says no: credentials, or no such bucket."""

    code = "store_denied"


class LeaseUnreachable(Unreachable):
    """The lease store does not answer, or whether it did what was asked cannot be known."""

    code = "lease_unreachable"


class LeaseUnreadable(Unreachable):
    """The lease store holds something for this session that is not a lease record."""

    code = "lease_unreadable"


class LeaseNewer(LeaseUnreadable):
    """A newer version of cmdop-migrate wrote this session's lease; this version must not touch it."""

    code = "lease_newer"


class ImageRefused(CmdopError):
    """The image is damaged, unsigned, sealed with another key, or of an unknown format. CRIU never saw it."""

    code = "image_refused"
    exit = 7


class CriuFailed(CmdopError):
    """CRIU could not dump or restore. The message translates its log, the hint says what to change."""

    code = "criu_failed"
    exit = 8


class PeerFailed(CmdopError):
    """The other host could not do its part."""

    code = "peer_failed"
    exit = 9


class HostKeyRefused(PeerFailed):
    """The host's key is not the one that is known, or none is known yet. Nothing was sent to it."""

    code = "host_key_refused"


class PeerDiffers(PeerFailed):
    """The other host has another version, store, lease store or key: a session could not be handed to it."""

    code = "peer_differs"


class PeerLost(PeerFailed):
    """The connection broke after the command was started there: it may have done all, some or nothing."""

    code = "peer_lost"


class Partial(CmdopError):
    """Some of it is done; the message lists what is not."""

    code = "partial"
    exit = 10


class TimedOut(CmdopError):
    """The time allowed ran out. What was under way has been undone or goes on, as the message says."""

    code = "timed_out"
    exit = 11


class NotAdmitted(CmdopError):
    """No credential that allows this."""

    code = "not_admitted"
    exit = 12


def all_errors() -> list[type[CmdopError]]:
    """Every class of the tree, parents first."""
    found: list[type[CmdopError]] = []
    waiting: list[type[CmdopError]] = [CmdopError]
    while waiting:
        one = waiting.pop(0)
        found.append(one)
        waiting += one.__subclasses__()
    return found


def from_code(code: str, message: str, hint: str = "") -> CmdopError:
    """The error another process named by its code. One we do not know is Unexpected."""
    kind = next((one for one in all_errors() if one.code == code), Unexpected)
    return kind(message, hint)
