"""What a CPU can do that decides whether bfloat16 is worth choosing on it."""

from __future__ import annotations

from pathlib import Path

# By the name Linux gives them: x86 vectors and tiles, Arm vectors.
_BFLOAT16_FLAGS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}


def bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...] | None:
    """The instructions by which this CPU multiplies bfloat16; None where its flags are not known.

    Without any, torch converts to float32 and back, which takes longer than float32 throughout.
    """
    if not cpuinfo.is_file():
        return None
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    flags = next(
        (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None
    )
    return None if flags is None else tuple(name for flag, name in _BFLOAT16_FLAGS.items() if flag in flags)
