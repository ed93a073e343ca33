"""Runs that are killed at random moments and started again until they end; prints a JSON report.

    PYTHONPATH=tests python -m support.killed_runs DIRECTORY NUM_KILLS NUM_RANKS [online]

Everything is imported once; each process of a run is a fork, and says on a pipe when which phase begins. A
random time later it is killed with SIGKILL, all of its ranks or one, and then the others, as a launcher would
end them. Every other run writes its checkpoints in the background.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from rich.console import Console

import dpo_pack.online.source as online_source
import dpo_pack.run.checkpoint as checkpoint
import dpo_pack.run.checkpoint_files as checkpoint_writer
import dpo_pack.run.pairs as prepare_reference
import dpo_pack.trainer as train_module
from dpo_pack.recipe.load import Recipe
from dpo_pack.run.checkpoint_files import find_damage
from dpo_pack.run.evaluate import Evaluator
from dpo_pack.system import ranks
from support.tiny_online import online_recipe
from support.tiny_run import tiny_run
from support.whole_runs import lines, saved_weights, whole_run

PHASES: dict[str, tuple[Any, str]] = {
    "reference": (prepare_reference, "fill_cache"),
    "step": (train_module.Trainer, "accumulate_gradients"),
    "rollouts": (online_source, "run_phase"),
    "evaluation": (Evaluator, "evaluate"),
    "checkpoint": (checkpoint_writer, "_write"),
    "export": (checkpoint, "export_model"),
}
SAVING = ("checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.keep_best=1")
_TIMEOUT_SECONDS = 60.0


class Processes:
    """The forks of one run, and what rank 0 says of its phases."""

    def __init__(self, recipe: Recipe, num_ranks: int, meeting: Path) -> None:
        self.pipe, write_end = os.pipe()
        meeting.unlink(missing_ok=True)
        self.pids: list[int] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                os._exit(_run(recipe, rank, num_ranks, meeting, write_end))
            self.pids.append(pid)
        os.close(write_end)
        self._text = b""

    def phases(self) -> Iterator[str]:
        """ "+step" where one begins, "-step" where it ends, until the processes are gone."""
        while True:
            while b"\n" in self._text:
                line, _, self._text = self._text.partition(b"\n")
                yield line.decode()
            assert select.select([self.pipe], [], [], _TIMEOUT_SECONDS)[0], "the run hangs"
            read = os.read(self.pipe, 4096)
            if not read:
                return
            self._text += read

    def kill(self, number: int | None) -> None:
        """One rank or, with None, all at once; the others after it."""
        for pid in self.pids if number is None else [self.pids[number]]:
            os.kill(pid, signal.SIGKILL)
        if number is not None:
            time.sleep(0.2)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        """Exit statuses, negative for signals."""
        os.close(self.pipe)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def _run(recipe: Recipe, rank: int, num_ranks: int, meeting: Path, write_end: int) -> int:
    """One process of a run, from beginning to end; returns its exit status."""
    try:
        if rank == 0:
            for name, (module, function) in PHASES.items():
                setattr(module, function, _announcing(name, getattr(module, function), write_end))
        if num_ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "ACCELERATE_USE_CPU": "true"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
        train_module.train(recipe, Console(quiet=True))
        if num_ranks > 1:
            ranks.leave()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _announcing(name: str, function: Callable[..., Any], write_end: int) -> Callable[..., Any]:
    def announced(*arguments: Any, **settings: Any) -> Any:
        os.write(write_end, f"+{name}\n".encode())
        try:
            return function(*arguments, **settings)
        finally:
            os.write(write_end, f"-{name}\n".encode())

    return announced


def undisturbed(recipe: Recipe, num_ranks: int, meeting: Path) -> dict[str, float]:
    """Run to the end; returns the longest seconds of each phase."""
    seconds: dict[str, float] = {}
    begun: dict[str, float] = {}
    run = Processes(recipe, num_ranks, meeting)
    for line in run.phases():
        name = line[1:]
        if line[0] == "+":
            begun[name] = time.monotonic()
        else:
            seconds[name] = max(seconds.get(name, 0.0), time.monotonic() - begun[name])
    assert run.wait() == [0] * num_ranks
    return seconds


def killed_once(
    recipe: Recipe, num_ranks: int, meeting: Path, *, phase: str, seconds: float, draw: random.Random
) -> bool:
    """Run until some time after a beginning of the phase; whether it came to that before the end."""
    run = Processes(recipe, num_ranks, meeting)
    number_to_wait = draw.randint(1, 2) if phase in ("rollouts", "step", "checkpoint") else 1
    for line in run.phases():
        number_to_wait -= line == f"+{phase}"
        if number_to_wait == 0:
            time.sleep(draw.uniform(0.0, seconds))
            run.kill(draw.choice([None, *range(num_ranks)]) if num_ranks > 1 else None)
            break
    statuses = run.wait()
    assert all(status in (0, -signal.SIGKILL) for status in statuses) or num_ranks > 1, statuses
    return -signal.SIGKILL in statuses


def half_there(run: Path) -> list[str]:
    """What can be seen of the run and is not whole."""
    found = [
        f"{path.name}: {damage}"
        for path in run.glob("checkpoints/[!.]*")
        if (damage := find_damage(path)) is not None
    ]
    if (run / "model").exists() and not (run / "model" / "README.md").exists():
        found.append("model")
    return found


def _rollouts(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run / "rollouts.parquet").to_pylist()
    return rows


def main(directory: Path, num_kills: int, num_ranks: int, *, is_online: bool) -> None:
    torch.set_num_threads(1)
    assets = tiny_run(directory / "assets").parent

    def recipe_of(name: str, *overrides: str) -> Recipe:
        settings = (f"reference.cache_dir={directory / name / 'cache'}", *overrides)
        if is_online:
            held_out = (f"data.eval={assets}/heldout.jsonl", "train.eval_every_steps=2")
            return online_recipe(assets, directory / name / "run", *held_out, *settings)
        return whole_run(assets, directory / name / "run", *settings)

    straight = directory / "straight" / "run"
    seconds = undisturbed(recipe_of("straight", *SAVING), num_ranks, directory / "meeting")
    draw = random.Random(0)
    report: list[dict[str, Any]] = []
    names = iter(f"killed-{number}" for number in range(num_kills))
    while len(report) < num_kills:
        name = next(names)
        asynchronous = f"checkpoint.asynchronous={str(len(report) % 2 == 1).lower()}"
        recipe, run = recipe_of(name, *SAVING, asynchronous), directory / name / "run"
        steps = draw.sample(["step", "checkpoint", "evaluation", "step", "checkpoint"], 5)
        phases = ["reference", "rollouts", *steps, "export"]
        kills = []
        for phase in [name for name in phases if name in seconds][: num_kills - len(report)]:
            if killed_once(
                recipe, num_ranks, directory / "meeting", phase=phase, seconds=seconds[phase], draw=draw
            ):
                hidden = [path.name for path in run.rglob(".*.tmp")]
                kills.append({"phase": phase, "half_there": half_there(run), "hidden": hidden})
        undisturbed(recipe, num_ranks, directory / "meeting")
        ends_bitwise_equal = (
            lines(run) == lines(straight)
            and saved_weights(run / "model") == saved_weights(straight / "model")
            and (not is_online or _rollouts(run) == _rollouts(straight))
        )
        leftovers = [path.name for path in run.rglob(".*.tmp")]
        report += [
            {**kill, "ends_bitwise_equal": ends_bitwise_equal, "leftovers": leftovers} for kill in kills
        ]
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), is_online="online" in sys.argv[4:])
