"""Check whether the target can run a session of the source: processor, kernel, CRIU, memory, disk. No side effects."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.preflight.facts.session import Move
from cmdop_migrate.preflight.findings import Hit, Rule, several
from cmdop_migrate.units import show_size

SPARE = 64 << 20
RATIO = 4  # by which compression reduces memory, approximately
# `doctor` checks of which the rules below report more, in proportion to the session.
_OWN_RULES = ("disk", "memory")


def _ready(move: Move) -> Iterable[Hit]:
    for need in move.target.needs:
        if need.name in _OWN_RULES:
            continue
        if need.fatal or (need.name == "veth" and move.session.private_net):
            yield Hit("block", f"{move.target.host} is not ready: {need.name}: {need.message}", need.fix)
        elif need.name == "nat" and move.session.private_net:
            yield Hit("warn", f"{move.target.host}: {need.message}", need.fix)


def _limits(move: Move) -> Iterable[Hit]:
    if move.stays or not any(move.session.uids):
        return
    for need in move.target.needs:
        if need.name == "capabilities" and not need.fatal:
            yield Hit(
                "warn",
                f"{move.target.host} may not be able to set the limits of other users' processes: {need.message}",
            )


def _machine(move: Move) -> Iterable[Hit]:
    here, there = move.source.cpu, move.target.cpu
    if here.machine != there.machine:
        yield Hit("block", f"{move.target.host} is {there.machine}, {move.source.host} is {here.machine}")
    elif here.page_size != there.page_size:
        yield Hit("block", f"memory pages are {there.page_size} bytes on {move.target.host}, {here.page_size} here")


def _cpu(move: Move) -> Iterable[Hit]:
    here, there = move.source.cpu, move.target.cpu
    lacking = cpu.for_programs(here) - there.flags
    if here.machine == there.machine and lacking:
        yield Hit(
            "block",
            f"the processor of {move.target.host} lacks {several(sorted(lacking), 8)}: programs that chose to use it"
            " when they started would end with an illegal instruction",
        )


def _xsave(move: Move) -> Iterable[Hit]:
    here, there = move.source.cpu, move.target.cpu
    if here.machine != there.machine or move.stays:
        return
    if here.xfeatures is not None and there.xfeatures is not None and here.xfeatures & ~there.xfeatures:
        lacking = here.xfeatures & ~there.xfeatures
        yield Hit(
            "block", f"{move.target.host} cannot restore register sets that are in use here (xsave mask {lacking:#x})"
        )
    elif here.frame is None or there.frame is None:
        yield Hit("info", "a kernel does not report the size of its xsave area: it was not compared")
    elif here.frame > there.frame:
        yield Hit("block", f"registers take {here.frame} bytes here and {there.frame} on {move.target.host}")
    elif here.frame < there.frame:
        yield Hit(
            "warn",
            f"registers take {there.frame} bytes on {move.target.host}, {here.frame} here: a program with small signal"
            " stacks of its own may overrun them",
        )


def _kernel(move: Move) -> Iterable[Hit]:
    here, there = _version(move.source.kernel), _version(move.target.kernel)
    if there[:2] < here[:2]:
        yield Hit(
            "block",
            f"{move.target.host} runs an older kernel, {move.target.kernel} (here {move.source.kernel}): programs have"
            " probed the features of this kernel, and do not probe again",
        )


def _criu(move: Move) -> Iterable[Hit]:
    source, target = move.source, move.target
    if source.criu is None:
        yield Hit("block", f"{source.host} has no CRIU that works", "Run there: cmdop-migrate doctor --fix")
    if target.criu is None or source.criu is None:
        return  # `host_ready` reports it for the target
    if _version(target.criu) < _version(source.criu):
        yield Hit(
            "warn", f"{target.host} has CRIU {target.criu}, older than {source.criu} here, whose images it may not read"
        )
    if "uffd-noncoop" in source.criu_features and "uffd-noncoop" not in target.criu_features:
        yield Hit(
            "warn", f"{target.host} has no userfaultfd: the session starts there only when all its memory has arrived"
        )


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    return tuple(int(number or 0) for number in match.groups()) if match else (0, 0, 0)


def _memory(move: Move) -> Iterable[Hit]:
    free, needed = move.target.memory_available, move.session.memory
    if not move.stays and free < needed + SPARE:
        message = f"{show_size(free)} of memory available on {move.target.host}, {show_size(needed + SPARE)} needed"
        yield Hit("block", message)
    elif not move.stays and free < 2 * needed:
        yield Hit(
            "warn",
            f"{show_size(free)} of memory available on {move.target.host}; the session takes {show_size(needed)}",
        )


def _disk(move: Move) -> Iterable[Hit]:
    session = move.session
    for host in [move.source] if move.stays else [move.source, move.target]:
        most = session.memory + session.files + SPARE
        # `checkpoint` needs space for all of it before a dump; a restore fetches it compressed.
        least = most if host is move.source else session.memory // RATIO + session.files + SPARE
        where = f"at {host.state_dir} on {host.host}"
        if host.disk_free < least:
            yield Hit("block", f"{show_size(host.disk_free)} free {where}, {show_size(least)} needed")
        elif host.disk_free < most:
            yield Hit("warn", f"{show_size(host.disk_free)} free {where}, up to {show_size(most)} may be needed")


_ANOTHER_HOST = "Choose a host that has it."
RULES: tuple[Rule[Move], ...] = (
    Rule(
        "host_ready",
        ("block", "warn"),
        "the problems that the other host's `doctor` reports",
        "Run there: cmdop-migrate doctor --fix",
        _ready,
    ),
    Rule(
        "limits_there",
        ("warn",),
        "CAP_SYS_RESOURCE on the other host, for sessions with other users' processes",
        "Give that machine CAP_SYS_RESOURCE.",
        _limits,
    ),
    Rule("machine", ("block",), "architecture and page size", _ANOTHER_HOST, _machine),
    Rule(
        "cpu",
        ("block",),
        "CPU features that a program may have detected when it started",
        "Choose a host with a processor as new, or mask these in the virtual machine on every host.",
        _cpu,
    ),
    Rule(
        "xsave",
        ("block", "warn", "info"),
        "size and sets of the registers that the kernel saves",
        _ANOTHER_HOST,
        _xsave,
    ),
    Rule(
        "kernel",
        ("block",),
        "the version of the kernel: it must not be older there",
        "Boot that host with a kernel as new as here.",
        _kernel,
    ),
    Rule("criu", ("block", "warn"), "CRIU's version and features", "Run there: cmdop-migrate doctor --fix", _criu),
    Rule("memory", ("block", "warn"), "memory available there", "Free some there, or choose another host.", _memory),
    Rule(
        "disk",
        ("block", "warn"),
        "free space at state_dir, here and there",
        "Free some, or set state_dir elsewhere.",
        _disk,
    ),
)
