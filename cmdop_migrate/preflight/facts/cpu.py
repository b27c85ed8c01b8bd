"""What a processor offers to programs. Read from the kernel; no instruction of our own is run for it."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

_AT_MINSIGSTKSZ = 51
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP = 158, 0x1021
# Flags of instructions and registers that a program may have chosen by, once, when it started. What else x86 kernels
# list (bugs, power, what only a kernel uses) may differ.
_FAMILIES = ("avx", "sse", "amx", "sha", "bmi", "fma", "vaes", "vpclmul", "3dnow", "xsave")
_WORDS = (
    "fpu mmx mmxext fxsr cmov cx8 cx16 ssse3 pni pclmulqdq movbe popcnt aes f16c abm rdrand rdseed adx "
    "gfni rtm hle erms fsrm clflushopt clwb fsgsbase rdtscp rdpid serialize movdiri movdir64b waitpkg "
    "ospke xop tbm lahf_lm xgetbv1 misalignsse"
)
_NAMES = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Cpu:
    """`xfeatures`: the register sets the kernel saves, as a mask (cpuid leaf 0xD). `frame`: bytes of the largest signal
    frame, which is the xsave area and a fixed part. None: this kernel does not tell."""

    machine: str
    page_size: int
    flags: frozenset[str]
    xfeatures: int | None = None
    frame: int | None = None


def read() -> Cpu:
    machine = os.uname().machine
    return Cpu(
        machine=machine,
        page_size=os.sysconf("SC_PAGE_SIZE"),
        flags=parse_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
        xfeatures=_xfeatures() if machine == "x86_64" else None,
        frame=parse_auxv(Path("/proc/self/auxv").read_bytes()).get(_AT_MINSIGSTKSZ),
    )


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """Those every processor of the machine has: a session runs on any of them."""
    each = [set(line.split()) for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)]
    return frozenset(set.intersection(*each)) if each else frozenset()


def parse_auxv(data: bytes) -> dict[int, int]:
    """Of this process; a cut one ends at its last whole pair."""
    size = struct.calcsize("@LL")
    return dict(struct.iter_unpack("@LL", data[: len(data) // size * size]))


def for_programs(one: Cpu) -> frozenset[str]:
    """The flags a program can depend on: of those an ARM kernel lists, all."""
    if one.machine != "x86_64":
        return one.flags
    return frozenset(flag for flag in one.flags if flag in _NAMES or flag.startswith(_FAMILIES))


def _xfeatures() -> int | None:
    mask = ctypes.c_uint64()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.byref(mask))
    return mask.value if done == 0 else None  # before 5.16 the kernel knows no such question
