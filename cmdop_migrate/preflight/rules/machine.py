"""Whether the other machine can run what was dumped on this one: processor, kernel, CRIU, room. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cmdop_migrate.preflight.facts import cpu
from cmdop_migrate.preflight.findings import Rule, Said, several
from cmdop_migrate.preflight.move import Move
from cmdop_migrate.units import show_size

SPARE = 64 << 20
RATIO = 4  # about what compression makes of memory
# What `doctor` says of these is said here in proportion to the session.
_SAID_HERE = ("disk", "memory")


def _ready(move: Move) -> Iterable[Said]:
    for need in move.target.needs:
        if need.name in _SAID_HERE:
            continue
        if need.fatal or (need.name == "veth" and move.session.private_net):
            yield Said("block", f"{move.target.host} is not ready: {need.name}: {need.message}", need.fix)
        elif need.name == "nat" and move.session.private_net:
            yield Said("warn", f"{move.target.host}: {need.message}", need.fix)


def _limits(move: Move) -> Iterable[Said]:
    if move.stays or not any(move.session.uids):
        return
    for need in move.target.needs:
        if need.name == "capabilities" and not need.fatal:
            yield Said(
                "warn",
                f"{move.target.host} may not be able to set the limits of other users' processes: {need.message}",
            )


def _machine(move: Move) -> Iterable[Said]:
    here, there = move.source.cpu, move.target.cpu
    if here.machine != there.machine:
        yield Said("block", f"{move.target.host} is {there.machine}, {move.source.host} is {here.machine}")
    elif here.page_size != there.page_size:
        yield Said("block", f"memory pages are {there.page_size} bytes on {move.target.host}, {here.page_size} here")


def _cpu(move: Move) -> Iterable[Said]:
    here, there = move.source.cpu, move.target.cpu
    lacking = cpu.for_programs(here) - there.flags
    if here.machine == there.machine and lacking:
        yield Said(
            "block",
            f"the processor of {move.target.host} lacks {several(sorted(lacking), 8)}: programs that chose to use it"
            " when they started would end with an illegal instruction",
        )


def _xsave(move: Move) -> Iterable[Said]:
    here, there = move.source.cpu, move.target.cpu
    if here.machine != there.machine or move.stays:
        return
    if here.xfeatures is not None and there.xfeatures is not None and here.xfeatures & ~there.xfeatures:
        lacking = here.xfeatures & ~there.xfeatures
        yield Said(
            "block", f"{move.target.host} cannot restore register sets that are in use here (xsave mask {lacking:#x})"
        )
    elif here.frame is None or there.frame is None:
        yield Said("info", "a kernel does not tell the size of its xsave area: it was not compared")
    elif here.frame > there.frame:
        yield Said("block", f"registers take {here.frame} bytes here and {there.frame} on {move.target.host}")
    elif here.frame < there.frame:
        yield Said(
            "warn",
            f"registers take {there.frame} bytes on {move.target.host}, {here.frame} here: a program with small signal"
            " stacks of its own may overrun them",
        )


def _kernel(move: Move) -> Iterable[Said]:
    here, there = _version(move.source.kernel), _version(move.target.kernel)
    if there[:2] < here[:2]:
        yield Said(
            "block",
            f"{move.target.host} runs an older kernel, {move.target.kernel} (here {move.source.kernel}): programs have"
            " asked this kernel what it can do, and do not ask again",
        )


def _criu(move: Move) -> Iterable[Said]:
    source, target = move.source, move.target
    if source.criu is None:
        yield Said("block", f"{source.host} has no CRIU that works", "Run there: cmdop-migrate doctor --fix")
    if target.criu is None or source.criu is None:
        return  # `host_ready` says it of the target
    if _version(target.criu) < _version(source.criu):
        yield Said(
            "warn", f"{target.host} has CRIU {target.criu}, older than {source.criu} here, whose images it may not read"
        )
    if "uffd-noncoop" in source.criu_features and "uffd-noncoop" not in target.criu_features:
        yield Said(
            "warn", f"{target.host} has no userfaultfd: the session waits there until all of its memory has come"
        )


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    return tuple(int(one or 0) for one in match.groups()) if match else (0, 0, 0)


def _memory(move: Move) -> Iterable[Said]:
    free, needed = move.target.memory_available, move.session.memory
    if not move.stays and free < needed + SPARE:
        said = f"{show_size(free)} of memory available on {move.target.host}, {show_size(needed + SPARE)} needed"
        yield Said("block", said)
    elif not move.stays and free < 2 * needed:
        yield Said(
            "warn",
            f"{show_size(free)} of memory available on {move.target.host}; the session takes {show_size(needed)}",
        )


def _disk(move: Move) -> Iterable[Said]:
    session = move.session
    for host in [move.source] if move.stays else [move.source, move.target]:
        most = session.memory + session.files + SPARE
        # Before a dump `checkpoint` wants room for all of it; a restore fetches it compressed.
        least = most if host is move.source else session.memory // RATIO + session.files + SPARE
        where = f"at {host.state_dir} on {host.host}"
        if host.disk_free < least:
            yield Said("block", f"{show_size(host.disk_free)} free {where}, {show_size(least)} needed")
        elif host.disk_free < most:
            yield Said("warn", f"{show_size(host.disk_free)} free {where}, up to {show_size(most)} may be needed")


_ANOTHER_HOST = "Choose a host that has it."
RULES: tuple[Rule[Move], ...] = (
    Rule(
        "host_ready",
        ("block", "warn"),
        "what the other host's `doctor` says",
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
        "instructions a program may have chosen by",
        "Choose a host with a processor as new, or mask these in the virtual machine on every host.",
        _cpu,
    ),
    Rule("xsave", ("block", "warn", "info"), "size and sets of the registers the kernel saves", _ANOTHER_HOST, _xsave),
    Rule(
        "kernel",
        ("block",),
        "the kernel's version: not older there",
        "Boot that host with a kernel as new as here.",
        _kernel,
    ),
    Rule("criu", ("block", "warn"), "CRIU's version and features", "Run there: cmdop-migrate doctor --fix", _criu),
    Rule("memory", ("block", "warn"), "memory available there", "Free some there, or choose another host.", _memory),
    Rule(
        "disk", ("block", "warn"), "room at state_dir, here and there", "Free some, or set state_dir elsewhere.", _disk
    ),
)
