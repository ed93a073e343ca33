"""Whole runs of `tiny_run`'s recipe in steps of 4 pairs: eight of them, an evaluation after every other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from safetensors.torch import load_file

from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.system.files import read_json
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.trainer import Trainer, train
from support import run_files

OVERRIDES = ("packing.pairs_per_step=4", "train.epochs=2", "train.eval_every_steps=2")


def whole_run(assets: Path, run: Path, *overrides: str) -> Recipe:
    """The recipe in `assets`, a `tiny_run`, with its run in `run`."""
    return load_recipe(assets / "recipe.yaml", [f"output_dir={run}", *OVERRIDES, *overrides])


def adapter_recipe(assets: Path, *overrides: str) -> Recipe:
    """The recipe in `assets`, a `tiny_run`, with steps in which an adapter learns."""
    steps = ("optim.lr=1e-2", "train.epochs=2", "packing.pairs_per_step=4")
    return load_recipe(assets / "recipe.yaml", [*steps, *overrides])


def num_computed(run: Path) -> int:
    """How many sequences the run's reference pass has computed."""
    return int(read_json(run / "run.json")["totals"]["reference_sequences_computed"])


lines = run_files.timeless


def saved_weights(model: Path) -> dict[str, bytes]:
    """Every tensor's bits by name, of a directory with a model or an adapter."""
    (file,) = model.glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def pair_lines(run: Path) -> list[dict[str, Any]]:
    """pairs.parquet, line by line."""
    found: list[dict[str, Any]] = pq.read_table(run / "pairs.parquet").to_pylist()
    return found


def assert_same_run(one: Path, other: Path) -> None:
    run_files.assert_same_run(one, other)
    assert pair_lines(one) == pair_lines(other)


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of a run's checkpoints; nothing else is among them."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def text(console: Console) -> str:
    """What a `console` fixture has printed so far."""
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def at_step(step: int, action: Callable[[], object]) -> Callable[[Trainer], None]:
    """For `train`'s `after_step`: does `action` when this step is taken."""

    def act(trainer: Trainer) -> None:
        if trainer.state.step == step:
            action()

    return act


def stop_after(step: int, recipe: Recipe, console: Console | None = None) -> None:
    """Trains until a signal comes after this step."""
    stop = at_step(step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        train(recipe, console or Console(quiet=True), after_step=stop)


def kill_after(step: int, recipe: Recipe, console: Console | None = None) -> None:
    """Trains until the process is as good as killed after this step: nothing is saved on the way out."""
    one_step: Any = Trainer.train_step

    def die(trainer: Trainer, batch: Any) -> Any:
        if trainer.state.step == step:
            raise KeyboardInterrupt
        return one_step(trainer, batch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", die)
        train(recipe, console or Console(quiet=True))
