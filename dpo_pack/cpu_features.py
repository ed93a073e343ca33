"""Which CPU this is, as far as speed depends on it: its name, its maker, its instructions for bfloat16.

Linux says so in /proc/cpuinfo; elsewhere little is known.
"""

from __future__ import annotations

import platform
from pathlib import Path

# By the name Linux gives them: x86 vectors and tiles, Arm vectors.
_BFLOAT16_FLAGS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}


_CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """What people call it: on Linux platform.processor() is empty or an architecture."""
    return _field("model name") or platform.processor() or platform.machine()


def is_intel(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether Intel made it, for which MKL is written; False where nobody says."""
    return _field("vendor_id", cpuinfo=cpuinfo) == "GenuineIntel"


def bfloat16_instructions(cpuinfo: Path = _CPUINFO) -> tuple[str, ...] | None:
    """The instructions by which this CPU multiplies bfloat16; None where its flags are not known.

    Without any, torch converts to float32 and back, which takes longer than float32 throughout.
    """
    flags = _field("flags", "Features", cpuinfo=cpuinfo)
    if flags is None:
        return None
    return tuple(name for flag, name in _BFLOAT16_FLAGS.items() if flag in flags.split())


def _field(*names: str, cpuinfo: Path = _CPUINFO) -> str | None:
    """The first CPU's value of the first line of these names; None without such a line."""
    if not cpuinfo.is_file():
        return None
    lines = (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() in names), None)
