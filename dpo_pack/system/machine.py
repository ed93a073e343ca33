"""Facts of the machine and the software of a run: the CPU, versions of packages, the commit."""

import contextlib
import functools
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

from dpo_pack.system.files import text_of

_CPUINFO = Path("/proc/cpuinfo")
# CPU instructions that multiply bfloat16, on x86 and Arm: name in /proc/cpuinfo -> name for people.
_BFLOAT16_FLAGS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16"}
_PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "pyarrow", "numpy",
    "flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "liger-kernel", "peft",
)  # fmt: skip


def cpu_name() -> str:
    return _field("model name") or platform.processor() or platform.machine()


def is_intel(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether Intel made the CPU; MKL is written for CPUs of Intel. False if the maker is unknown."""
    return _field("vendor_id", cpuinfo=cpuinfo) == "GenuineIntel"


def bfloat16_instructions(cpuinfo: Path = _CPUINFO) -> tuple[str, ...] | None:
    """Returns the CPU's instructions that multiply bfloat16; None: unknown. Without, float32 is faster."""
    flags = _field("flags", "Features", cpuinfo=cpuinfo)
    if flags is None:
        return None
    return tuple(name for flag, name in _BFLOAT16_FLAGS.items() if flag in flags.split())


def _field(*names: str, cpuinfo: Path = _CPUINFO) -> str | None:
    """Returns the value of the first line with one of `names`. Other systems than Linux have no such file."""
    lines = (line.partition(":") for line in text_of(cpuinfo).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() in names), None)


@functools.cache
def package_versions() -> dict[str, str]:
    """Returns the installed versions of Python and of the packages whose versions may change results."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def install_command(extra: str) -> str:
    """Returns the pip command for the packages of an extra. (Not every index has dpo-pack itself.)"""
    needed = [
        requirement.partition(";")[0].strip()
        for requirement in importlib.metadata.requires("dpo-pack") or ()
        if re.search(f"extra == ['\"]{extra}['\"]", requirement)
    ]
    assert needed, f"dpo-pack has no extra {extra}"
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in needed)])


def git_commit() -> str | None:
    """Returns the commit that is checked out in the working directory, if any."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
