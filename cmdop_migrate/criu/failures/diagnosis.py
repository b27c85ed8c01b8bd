"""Translate CRIU's log into a cause and a fix, always with the end of the log.

CRIU reports a failure from the inside out: the first error that is not harmless is the cause, the errors after it are
consequences. Most of the known messages were provoked with a real CRIU (tests/golden/criu-logs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cmdop_migrate.errors import CriuFailed

TAIL_LINES = 12
_READ_LAST = 1 << 20


@dataclass(frozen=True)
class Diagnosis:
    """Describe what a log says. `rule` names the known failure, and is empty when no rule fits."""

    rule: str
    cause: str
    fix: str
    tail: str
    passing: bool = False


# Errors that CRIU prints in successful runs too.
_HARMLESS = re.compile(
    r"""RLIMIT_NOFILE\ for\ self            # no CAP_SYS_RESOURCE here; the present limit suffices
    | [Aa]ddress\ already\ assigned         # lo has its addresses before CRIU restores them
    | execvp\("ip6?tables | ip6?tables(-legacy)?-save | ip6?tables(-legacy)?-restore
    | TCP_CORK | TCP_NODELAY                # our page server is not a TCP socket
    | cgroupd:\ recv\ req\ error            # CRIU's own helper ends with this
    | criu/util\.c:\d+\):\ exited,\ status= # a helper's probe failed
    | Can't\ send\ response                 # we closed the connection first
    | (Dumping|Restoring)\ FAILED""",
    re.VERBOSE,
)
_ERROR = re.compile(r"Error( \([^)]*\))?: |^Error: |Unable to interrupt task")
_PLACE = re.compile(r"^\(?[\d.]*\)?\s*(?:pie: )?(?:\d+: )?(?:Error|Warn)\s*(?:\([^)]*\))?:\s*")


def explain(log_text: str) -> Diagnosis:
    """Return the diagnosis of the first error that is not harmless: those after it are its consequences."""
    lines = log_text.splitlines()
    errors = [line for line in lines if _ERROR.search(line) and not _HARMLESS.search(line)]
    from cmdop_migrate.criu.failures.table import RULES  # takes 6 ms to load, for what seldom happens

    for rule in RULES if errors else ():
        if match := rule.pattern.search(errors[0]):
            groups = [group or "" for group in match.groups()]
            cause = rule.cause.format(*groups).replace(" ()", "")
            return Diagnosis(rule.name, cause, rule.fix, _tail(lines, errors[0]), rule.passing)
    if errors:
        cause = "CRIU reports: " + _PLACE.sub("", errors[0]).strip()
        return Diagnosis("", cause, "See the end of its log.", _tail(lines, errors[0]))
    fix = "See the end of its log, and run `cmdop-migrate doctor`."
    return Diagnosis("", "CRIU's log names no error", fix, _tail(lines, None))


def _tail(lines: list[str], culprit: str | None) -> str:
    """Return the last lines, preceded by the line that names the cause if it is not among them."""
    last = lines[-TAIL_LINES:]
    return "\n".join(last if culprit is None or culprit in last else [culprit, "…", *last])


def failure(what: str, log_path: Path, errmsg: str = "") -> CriuFailed:
    """Return the error to raise, made from CRIU's log; `errmsg`, CRIU's answer, is used when there is no log."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _READ_LAST))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = errmsg
    diagnosis = explain(text)
    message = f"{what}: {diagnosis.cause}\n{diagnosis.tail}".rstrip()
    error = CriuFailed(message, f"{diagnosis.fix} The whole log: {log_path}")
    error.passing = diagnosis.passing
    return error
