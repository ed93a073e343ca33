"""scripts/benchmark_gpu.sh: what it keeps and repeats. Stand-ins for Python and for a GPU's memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from benchmarking import search, shapes

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark_gpu.sh"
# Notes its arguments, leaves a page where the benchmark would, and fails at what the file `fails` names.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "{directory}/calls"
echo "output of $1 $2"
[[ ! -e "{directory}/hangs" ]] || sleep 20
[[ ! -s "{directory}/fails" || "$*" != *$(<"{directory}/fails")* ]] || exit 3
while (($#)); do
    [[ $1 != --output ]] || {{ touch "$2.json" && echo page > "$2.md"; }}
    shift
done
"""


class Gpu:
    """The script, run with a stand-in for Python in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.output = directory, directory / "out"
        (directory / "python").write_text(PYTHON.format(directory=directory))
        (directory / "python").chmod(0o755)

    def start(self, *arguments: str, device: str = "cpu") -> subprocess.Popen[str]:
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(self.directory / "python")}
        environment["BENCHMARK_DEVICE"] = device
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments, str(self.output)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, fails: str = "", device: str = "cpu") -> tuple[int, str]:
        """(exit status, what it said); Python fails at what is given arguments with `fails` in them."""
        (self.directory / "fails").write_text(fails)
        (self.directory / "calls").write_text("")
        with self.start(*arguments, device=device) as script:
            said, _ = script.communicate(timeout=120)
        return script.returncode, said

    def said(self, name: str) -> str:
        path = self.output / name
        return path.read_text() if path.is_file() else ""

    @property
    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.output.iterdir() if path.name != "work"}


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def test_quick_leaves_six_files_and_repeats_only_the_part_that_failed(gpu: Gpu) -> None:
    status, said = gpu.run("--quick", fails="--workload tulu3")
    assert status == 1 and "not done: tiny at Tulu 3 lengths" in said
    assert any("benchmarking.search" in call for call in gpu.calls)  # what comes later is done all the same
    status, said = gpu.run("--quick")
    assert status == 0, said
    (call,) = gpu.calls
    assert "scripts/benchmark.py" in call
    assert gpu.files == {"tests.txt", "doctor.txt", "speed.txt", "speed.json", "speed.md", "reference.txt"}
    gpu.run("--quick")
    assert gpu.calls == []


def test_what_a_part_has_said_is_kept_when_the_script_is_killed(gpu: Gpu) -> None:
    (gpu.directory / "hangs").touch()
    with gpu.start("--quick") as script:
        try:
            until = time.monotonic() + 15
            while time.monotonic() < until and "output of" not in gpu.said("tests.txt"):
                time.sleep(0.05)
        finally:
            os.killpg(script.pid, signal.SIGKILL)
    assert "output of -m pytest" in gpu.said("tests.txt")


@pytest.mark.parametrize("quick", [True, False])
def test_with_no_minutes_left_nothing_is_run_and_the_same_command_goes_on(gpu: Gpu, quick: bool) -> None:
    options = ["--quick"] if quick else []
    device = "cpu" if quick else "cuda"
    status, said = gpu.run(*options, "--minutes", "0", device=device)
    assert status == 1 and "not done: " in said
    assert not any("benchmark.py" in call or "pytest" in call for call in gpu.calls)
    assert gpu.run(*options, device=device)[0] == 0
    assert any("benchmark.py" in call for call in gpu.calls) and any("pytest" in call for call in gpu.calls)
    assert gpu.run(*options, device=device)[0] == 0
    assert not any("benchmark.py" in call or "pytest" in call for call in gpu.calls)


def test_a_benchmark_that_fails_costs_the_later_ones_nothing(gpu: Gpu) -> None:
    status, said = gpu.run(fails="tulu3-0.5b", device="cuda")
    assert status == 1 and "not done: tulu3-0.5b;" in said
    assert "long16k-0.5b.md" in gpu.files and "tulu3-0.5b.md" not in gpu.files
    gpu.run(device="cuda")
    measured = [call for call in gpu.calls if "benchmark.py" in call]
    assert len(measured) == 1 and "tulu3-0.5b" in measured[0]


@pytest.mark.slow
def test_the_search_part_searches_and_computes_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "save_model", shapes.save_model)  # in this process
    tried: list[int] = []

    def fits(*arguments: int) -> bool:
        tried.append(arguments[-1])
        return arguments[-1] <= 20_000

    monkeypatch.setattr(search, "row_fits", fits)
    search.main(tmp_path, "cpu", "tiny")
    assert tried == [4096, 8192, 16384, 32768]
    told = capsys.readouterr().out
    assert "a row of 16,384 tokens fits\na row of 32,768 tokens ran out of memory" in told
    assert "rows of up to 16,384 tokens" in told and "128 sequences in" in told
    monkeypatch.setattr(search, "row_fits", lambda *_: True)
    with pytest.raises(SystemExit, match="no row ran out of memory"):
        search.main(tmp_path, "cpu", "tiny")
