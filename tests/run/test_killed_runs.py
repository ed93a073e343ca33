"""Real processes that are killed or asked to stop; their runs end as if nothing had happened.

See test_crash_points.py for a run of one process that is killed at many more moments.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from support.tiny_run import tiny_run
from support.whole_runs import OVERRIDES, assert_same_run

from dpo_pack.run.checkpoint_files import checkpoints, damage_of


def start(assets: Path, run: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dpo_pack", "train", str(assets / "recipe.yaml"), f"output_dir={run}"]
    settings = ("checkpoint.every_steps=1", "checkpoint.export=true", *OVERRIDES, *overrides)
    return subprocess.Popen(
        [*command, *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or hangs"
        time.sleep(0.002)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what it said to the user."""
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def seconds_so_far(process: subprocess.Popen[str]) -> float:
    """CPU seconds of a command and of its ranks."""
    command = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (command, *command.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


def seconds_of_ended_commands() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def moments(run: Path) -> Sequence[Callable[[], object]]:
    """While a checkpoint is written, between two, and while the model is exported."""
    folder = run / "checkpoints"
    return (
        lambda: any(folder.glob(".step-*.tmp")),
        lambda: len(checkpoints(folder)) == 2,
        lambda: any(run.glob(".model.*.tmp")),
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_the_command_goes_on_after_kill_9_of_it_or_of_a_rank(num_processes: int, tmp_path: Path) -> None:
    assets, run = tiny_run(tmp_path / "assets").parent, tmp_path / "run"
    number = f"distributed.num_processes={num_processes}"
    assert ended(start(assets, tmp_path / "straight", number))[0] == 0
    in_background = f"checkpoint.asynchronous={str(num_processes > 1).lower()}"
    for is_now in moments(run):
        process = start(assets, run, number, in_background)
        wait_for(is_now, process)
        ranks = psutil.Process(process.pid).children()
        victim = ranks[-1].pid if num_processes > 1 else process.pid
        os.kill(victim, signal.SIGKILL)
        status, err = ended(process)
        assert status == (-signal.SIGKILL if num_processes == 1 else 1)
        assert num_processes == 1 or "was killed (SIGKILL)" in err
        assert not any(rank.is_running() for rank in ranks)
        assert all(damage_of(path) is None for path in (run / "checkpoints").glob("[!.]*"))
    assert ended(start(assets, run, number))[0] == 0
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "num_processes"),
    [("SIGUSR1", 143, 1), pytest.param("SIGINT", 130, 2, marks=pytest.mark.multiprocess)],
)
def test_the_command_saves_and_leaves_within_seconds_when_it_is_asked_to(
    name: str, status: int, num_processes: int, tmp_path: Path
) -> None:
    assets, run = tiny_run(tmp_path / "assets").parent, tmp_path / "run"
    settings = (
        f"distributed.num_processes={num_processes}",
        "train.epochs=200",
        "checkpoint.every_steps=null",
    )
    before = seconds_of_ended_commands()
    process = start(assets, run, *settings)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count('"train"') >= 3, process)
    until_signal = seconds_so_far(process)
    process.send_signal(signal.Signals[name])
    told, message = ended(process)
    assert told == status
    assert re.fullmatch(
        rf"stopped by {name}; run the same command again; it goes on after step \d+\n", message
    )
    assert seconds_of_ended_commands() - before - until_signal < 10
    assert len(checkpoints(run / "checkpoints")) == 1
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
