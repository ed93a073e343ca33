"""What the machine is: its CPU, versions of packages, and the memory that a process may use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dpo_pack.system.machine import (
    AvailableMemory,
    bfloat16_instructions,
    host_memory,
)


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
NO_LIMIT = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB, 60 of which are free."""
    machine = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    return tmp_path


def test_a_container_s_limit_counts_and_its_file_cache_does_not(root: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 8 * GIB,
        "sys/fs/cgroup/memory.current": 7 * GIB,
        "sys/fs/cgroup/memory.stat": f"anon {3 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}",
    }
    assert host_memory(write(root, files)) == AvailableMemory(free=5 * GIB, total=8 * GIB)


def test_of_nested_limits_the_narrowest_counts(root: Path) -> None:
    job = "sys/fs/cgroup/system.slice/job_7"
    files: dict[str, object] = {"proc/self/cgroup": "0::/system.slice/job_7/step_0/task_1"}
    for group, limit, used in (("", 20, 6), ("/step_0", 16, 1), ("/step_0/task_1", "max", 1)):
        number = limit if isinstance(limit, str) else limit * GIB
        files |= {f"{job}{group}/memory.max": number, f"{job}{group}/memory.current": used * GIB}
    assert host_memory(write(root, files)) == AvailableMemory(free=14 * GIB, total=16 * GIB)


def test_limits_of_version_1_count(root: Path) -> None:
    own, mount = "sys/fs/cgroup/memory/slurm/job_7", "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "11:cpu,cpuacct:/\n4:memory:/slurm/job_7\n1:name=systemd:/x\n0::/",
        f"{own}/memory.limit_in_bytes": 32 * GIB,
        f"{own}/memory.usage_in_bytes": 12 * GIB,
        f"{own}/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\ntotal_active_file 0",
        f"{mount}/memory.limit_in_bytes": NO_LIMIT,
        f"{mount}/memory.usage_in_bytes": 40 * GIB,
    }
    assert host_memory(write(root, files)) == AvailableMemory(free=22 * GIB, total=32 * GIB)


def test_a_container_that_is_told_the_host_s_path_has_the_limit_at_the_mount_point(root: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 8 * GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 9 * GIB,
    }
    assert host_memory(write(root, files)) == AvailableMemory(free=0, total=8 * GIB)
