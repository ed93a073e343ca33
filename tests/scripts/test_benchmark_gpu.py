"""scripts/benchmark_gpu.sh: what it keeps and repeats. Stand-ins for Python and for a GPU's memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from benchmarking.report import NOT_COMPARABLE, NOT_WHOLE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark_gpu.sh"
REPOSITORY = SCRIPT.parents[1]
# Notes its arguments, leaves a page where the benchmark would, and fails at what the file `fails` names.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "{directory}/calls"
echo "output of $1 $2"
[[ ! -e "{directory}/hangs" ]] || sleep 20
[[ ! -s "{directory}/fails" || "$*" != *$(<"{directory}/fails")* ]] || exit $(<"{directory}/status")
while (($#)); do
    [[ $1 != --output ]] || {{ touch "$2.json" && cp "{directory}/page" "$2.md"; }}
    shift
done
"""


class Gpu:
    """The script, run with a stand-in for Python in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.output = directory, directory / "out"
        (directory / "python").write_text(PYTHON.format(directory=directory))
        (directory / "python").chmod(0o755)
        (directory / "page").write_text("page")

    def start(self, *arguments: str, device: str = "cpu") -> subprocess.Popen[str]:
        """The paths that it is given are relative to the directory."""
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": "./python"}
        environment |= {"BENCHMARK_DEVICE": device, "TMPDIR": str(self.directory)}
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=self.directory,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *options: str, fails: str = "", status: int = 3, device: str = "cpu") -> tuple[int, str]:
        """(exit status, what it said); Python exits with `status` if its arguments have `fails` in them."""
        (self.directory / "fails").write_text(fails)
        (self.directory / "status").write_text(str(status))
        (self.directory / "calls").write_text("")
        with self.start(*options, "out", device=device) as script:
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
        return {path.name for path in self.output.iterdir()}


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def test_quick_leaves_few_files_and_repeats_only_the_part_that_failed(gpu: Gpu) -> None:
    status, said = gpu.run("--quick", fails="--workload tulu3")
    assert status == 1 and "not done: tiny at Tulu 3 lengths" in said
    status, said = gpu.run("--quick")
    assert status == 0, said
    (call,) = gpu.calls
    assert "scripts/benchmark.py" in call and "--quick" in call
    assert 8.4 < float(call.split("--minutes ")[1].split(" ")[0]) < 8.8  # 9 minutes - 15 s: ends by itself
    work = Path(call.split("--work ")[1].split(" ")[0])  # the models that were made are gone
    assert work.parent.is_dir() and not work.exists() and not work.is_relative_to(gpu.output)
    assert gpu.files == {*("tests.txt", "doctor.txt", "speed.txt", "speed-tiny.json", "speed-tiny.md")}
    gpu.run("--quick")
    assert gpu.calls == []


def test_only_files_with_tests_for_a_gpu_are_collected(gpu: Gpu) -> None:
    gpu.run("--quick")
    (call,) = (call for call in gpu.calls if "-m pytest" in call)
    assert "tests/model/test_on_cuda.py" in call and "test_benchmark" not in call
    mark = ".".join(("mark", "gpu"))  # the script looks for it, also in this file
    assert all(mark in Path(REPOSITORY, file).read_text() for file in call.split() if "tests/" in file)


@pytest.mark.parametrize("status", [1, 124], ids=["some failed", "they took too long"])
def test_tests_that_fail_are_kept_and_told_and_not_run_again(gpu: Gpu, status: int) -> None:
    told = f"failures, see {gpu.output}/tests.txt: tests/"
    found, said = gpu.run(fails="-m pytest", status=status, device="cuda")
    assert found == 1 and told in said and "not done" not in said
    assert "output of -m pytest" in gpu.said("tests.txt") and "long16k-0.5b.md" in gpu.files
    found, said = gpu.run(device="cuda")
    assert found == 1 and told in said and not any("-m pytest" in call for call in gpu.calls)


@pytest.mark.parametrize("mark", [NOT_COMPARABLE, NOT_WHOLE])
def test_a_page_that_is_not_whole_or_not_comparable_is_measured_again(gpu: Gpu, mark: str) -> None:
    (gpu.directory / "page").write_text(f"a page\n\n{mark}\n")
    gpu.run(device="cuda")
    benchmarks = [call for call in gpu.calls if "scripts/benchmark.py" in call]
    assert len(benchmarks) == 8
    gpu.run(device="cuda")
    assert [call for call in gpu.calls if "scripts/benchmark.py" in call] == benchmarks


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
