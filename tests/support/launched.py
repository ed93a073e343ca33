"""A command of its own beside dpopack's, started as they are, that does on its ranks what a test asks for."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dpo_pack.commands import main as cli
from dpo_pack.recipe.load import load_recipe
from dpo_pack.system import ranks
from dpo_pack.system.errors import DataError
from dpo_pack.system.launch import on_every_rank


def probe(recipe: Path, what: str, overrides: list[str]) -> None:
    """Leaves `rank-N.pid` beside the recipe."""
    if what == "disagree" and os.environ.get("RANK") == "1":
        overrides = [*overrides, "optim.lr=0.125"]
    loaded = load_recipe(recipe, overrides)
    settings = loaded.model_dump(mode="json")
    with on_every_rank(loaded.distributed.num_processes, cli._own_command(), lambda: settings) as console:
        (recipe.parent / f"rank-{ranks.rank()}.pid").write_text(str(os.getpid()))
        console.print(f"{ranks.num_ranks()} ranks, {os.environ.get('OMP_NUM_THREADS')} threads each")
        ranks.wait_for_all()
        _do(what)


def killed_train(recipe: Path, overrides: list[str]) -> None:
    """Trains; in torchrun's first attempt rank 1 is killed after step 3."""
    import dpo_pack.trainer as train_module  # and with it transformers, which no other command here needs

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        trainer_class: Any = train_module.Trainer
        one_step = trainer_class.train_step

        def step_and_die(trainer: Any, batch: Any) -> Any:
            outcome = one_step(trainer, batch)
            if trainer.state.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return outcome

        trainer_class.train_step = step_and_die
    cli.train(recipe, overrides)


def _do(what: str) -> None:
    is_second = ranks.rank() == 1
    match what:
        case "one-mistake" if is_second:
            raise DataError("pairs.jsonl, row 7: no chosen completion")
        case "same-mistake":
            raise DataError("pairs.jsonl: no such file")
        case "bug" if is_second:
            raise ValueError("a bug of ours")
        case "killed" if is_second:
            os.kill(os.getpid(), signal.SIGKILL)
    if what in ("one-mistake", "bug", "killed"):
        dist.barrier()  # what the rank that lives on is usually doing


def add_commands() -> None:
    cli.app.command()(probe)
    cli.app.command()(killed_train)


if __name__ == "__main__":
    add_commands()
    cli._own_command = lambda: [sys.executable, *sys.argv]
    cli.main()
