"""What the machine is: its CPU, versions of packages, and the memory that a process may use."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpo_pack.system.machine import AvailableMemory, bfloat16_instructions, host_memory


@pytest.mark.parametrize(
    ("line", "instructions"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", ("AVX512-BF16", "AMX")),
        ("flags\t\t: fpu avx2 avx512f", ()),
        ("Features\t: fp asimd bf16 i8mm", ("Arm BF16",)),
        ("vendor_id\t: unknown", None),
    ],
)
def test_the_flags_say_how_bfloat16_is_multiplied(
    line: str, instructions: tuple[str, ...] | None, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{line}\n")
    assert bfloat16_instructions(cpuinfo) == instructions


GIB = 2**30
V1, JOB = "memory", "system.slice/job_7"


@pytest.mark.parametrize(
    ("own", "files", "free", "total"),
    [
        (
            "0::/",
            {"memory.max": 8, "memory.current": 7, "memory.stat": "inactive_file 3\nactive_file 1"},
            5,
            8,
        ),
        (  # of nested limits, the narrowest
            f"0::/{JOB}/step_0/task_1",
            {
                **{f"{JOB}/memory.max": 20, f"{JOB}/memory.current": 6},
                **{f"{JOB}/step_0/memory.max": 16, f"{JOB}/step_0/memory.current": 1},
                **{f"{JOB}/step_0/task_1/memory.max": "max", f"{JOB}/step_0/task_1/memory.current": 1},
            },
            *(14, 16),
        ),
        (  # version 1, without a limit at the mount point
            "11:cpu,cpuacct:/\n4:memory:/slurm/job_7\n1:name=systemd:/x\n0::/",
            {
                **{f"{V1}/slurm/job_7/memory.limit_in_bytes": 32, f"{V1}/memory.limit_in_bytes": 2**33 - 1},
                **{f"{V1}/slurm/job_7/memory.usage_in_bytes": 12, f"{V1}/memory.usage_in_bytes": 40},
                f"{V1}/slurm/job_7/memory.stat": "inactive_file 5\ntotal_inactive_file 2",
            },
            *(22, 32),
        ),
        (  # a container that is told the host's path
            "4:memory:/docker/0123",
            {f"{V1}/memory.limit_in_bytes": 8, f"{V1}/memory.usage_in_bytes": 9},
            *(0, 8),
        ),
    ],
)
def test_the_narrowest_limit_of_the_control_groups_counts_and_cached_files_are_free(
    own: str, files: dict[str, Any], free: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 64 GiB, 60 of which are free. Numbers are GiB."""
    machine = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{own}\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"\b\d+$", lambda n: str(int(n[0]) * GIB), str(content), flags=re.M) + "\n")
    assert host_memory(tmp_path) == AvailableMemory(free=free * GIB, total=total * GIB)
