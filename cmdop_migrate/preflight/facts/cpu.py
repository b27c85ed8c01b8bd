"""Read from the kernel which features the processors of this host offer to programs."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

_AT_MINSIGSTKSZ = 51
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP = 158, 0x1021
# Flags of instructions and registers that a program may have detected when it started. The other flags of x86 kernels
# (bugs, power, features that only a kernel uses) may differ.
_FAMILIES = ("avx", "sse", "amx", "sha", "bmi", "fma", "vaes", "vpclmul", "3dnow", "xsave")
_WORDS = (
    "fpu mmx mmxext fxsr cmov cx8 cx16 ssse3 pni pclmulqdq movbe popcnt aes f16c abm rdrand rdseed adx "
    "gfni rtm hle erms fsrm clflushopt clwb fsgsbase rdtscp rdpid serialize movdiri movdir64b waitpkg "
    "ospke xop tbm lahf_lm xgetbv1 misalignsse"
)
_NAMES = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Cpu:
    """Describe a processor. `xfeatures`: the register sets that the kernel saves, as a mask (cpuid leaf 0xD). `frame`:
    bytes of the largest signal frame, which is the xsave area and a fixed part. None: the kernel does not report it."""

    machine: str
    page_size: int
    flags: frozenset[str]
    xfeatures: int | None = None
    frame: int | None = None


def read() -> Cpu:
    """Return the facts of this host's processors."""
    machine = os.uname().machine
    return Cpu(
        machine=machine,
        page_size=os.sysconf("SC_PAGE_SIZE"),
        flags=parse_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
        xfeatures=_xfeatures() if machine == "x86_64" else None,
        frame=parse_auxv(Path("/proc/self/auxv").read_bytes()).get(_AT_MINSIGSTKSZ),
    )


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """Return the flags that every processor of the host has: a session runs on any of them."""
    each = [set(line.split()) for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)]
    return frozenset(set.intersection(*each)) if each else frozenset()


def parse_auxv(data: bytes) -> dict[int, int]:
    """Parse the auxiliary vector of a process; a truncated one ends at its last whole pair."""
    size = struct.calcsize("@LL")
    return dict(struct.iter_unpack("@LL", data[: len(data) // size * size]))


def for_programs(cpu: Cpu) -> frozenset[str]:
    """Return the flags that a program can depend on; on ARM these are all that the kernel lists."""
    if cpu.machine != "x86_64":
        return cpu.flags
    return frozenset(flag for flag in cpu.flags if flag in _NAMES or flag.startswith(_FAMILIES))


def _xfeatures() -> int | None:
    mask = ctypes.c_uint64()
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_ARCH_GET_XCOMP_SUPP), ctypes.byref(mask))
    return mask.value if done == 0 else None  # kernels before 5.16 do not have this request
