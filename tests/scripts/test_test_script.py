"""scripts/test.sh: which tests run on which devices."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test.sh"
# In place of the environment's python, ruff and mypy; $NO_DEVICE is the status of who asks for a CUDA device.
STAND_IN = """#!/bin/sh
case "$*" in
    *is_available*) exit "$NO_DEVICE" ;;
    "-m pytest "*) echo "${CUDA_VISIBLE_DEVICES-all devices}: $*" >>"$RUNS"; exit 5 ;;
    *) echo stamp ;;
esac
"""


def runs(directory: Path, *arguments: str, has_device: bool) -> list[str]:
    """The devices and arguments of each pytest that the script starts."""
    (directory / "bin").mkdir()
    for name in ("python", "ruff", "mypy"):
        (directory / "bin" / name).write_text(STAND_IN)
        (directory / "bin" / name).chmod(0o755)
    (directory / "dpo_pack[dev,benchmark].installed").write_text("stamp\n")
    environment = {**os.environ, "DPO_PACK_VENV": str(directory), "RUNS": str(directory / "runs")}
    environment["NO_DEVICE"] = str(int(not has_device))
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, check=True, capture_output=True)
    return (directory / "runs").read_text().splitlines()


@pytest.mark.parametrize("has_device", [False, True])
def test_a_device_is_seen_by_the_tests_that_need_one_and_by_no_other(
    has_device: bool, tmp_path: Path
) -> None:
    assert runs(tmp_path, "-x", has_device=has_device) == [
        ": -m pytest -n auto --dist loadfile -m not slow and not gpu -x",
        ": -m pytest -n auto --dist worksteal -m slow and not alone and not gpu -x",
        ": -m pytest -m slow and alone and not gpu -x",
        *(["all devices: -m pytest -m gpu -x"] if has_device else []),
    ]


def test_quick_leaves_out_the_slow_tests_alone(tmp_path: Path) -> None:
    told = runs(tmp_path, "--quick", has_device=True)
    assert len(told) == 2 and not any("-m slow" in line for line in told)
