"""Checkpoints of several processes: gone on from there, on one, with another strategy; stopping together."""

from __future__ import annotations

import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.limits import no_file_beyond
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from support.whole_runs import assert_same_run, checkpoint_steps, lines, whole_run

import dpo_pack.system.interrupts as interrupts
import dpo_pack.trainer as train_module
from dpo_pack.run.checkpoint_files import checkpoints, find_damage
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RecipeError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.trainer import train

# Rows of one pair each, five in a step: one rank has three of them, the other two.
ROWS = ("packing.pairs_per_step=5", "packing.token_budget=1", "data.train.0.max_pairs=13")
SAVING = ("checkpoint.every_steps=2", "checkpoint.keep=9")
DDP, FSDP2 = "distributed.strategy=ddp", "distributed.strategy=fsdp2"
DROPOUT = "model.lora={r: 4, alpha: 8, dropout: 0.3}"
KINDS = {"full": (), "dropout": (DROPOUT,), "adafactor": ("optim.name=adafactor",)}
# Weights that differ by rounding alone: AdamW's first steps are equally long whatever the gradient.
TOLERANCE = 5e-5


def _kinds(strategy: str) -> dict[str, tuple[str, ...]]:
    return {kind: options for kind, options in KINDS.items() if (strategy, kind) != (FSDP2, "adafactor")}


def _run(directory: Path, name: str, *overrides: str) -> int:
    """To the end, or as far as it comes; the exit status."""
    try:
        train(whole_run(directory, directory / name, *ROWS, *overrides), Console(quiet=True))
    except Interrupted as interrupted:
        return interrupted.exit_status
    finally:
        ranks.wait_for_all()
    return 0


def _stopped(directory: Path, name: str, *overrides: str) -> int:
    """A run of which the last rank is asked to stop, before its second row of step 4."""
    trainer_class: Any = train_module.Trainer
    poll, seconds = trainer_class.poll_before_pass, interrupts.POLL_SECONDS

    def with_signal(trainer: Any, batch: Any, number: int) -> None:
        if ranks.rank() == ranks.num_ranks() - 1 and trainer.state.step == 3 and number == 2:
            signal.raise_signal(signal.SIGUSR1)
        poll(trainer, batch, number)

    trainer_class.poll_before_pass = with_signal
    interrupts.POLL_SECONDS = 0.0  # the rows of such a run take milliseconds
    try:
        return _run(directory, name, *overrides)
    finally:
        trainer_class.poll_before_pass, interrupts.POLL_SECONDS = poll, seconds


def _without_space(directory: Path, name: str, *overrides: str) -> str:
    """What a run says when the disk of one rank takes only small files."""
    try:
        with no_file_beyond(30_000) if ranks.rank() == 1 else nullcontext():
            _run(directory, name, *overrides)
    except CacheError as error:
        return str(error)
    return "nothing"


def _on_a_rank(directory: Path, strategy: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for kind, overrides in _kinds(strategy).items():
        _run(directory, f"{kind}-straight", strategy, *overrides)
        told[kind] = _stopped(directory, f"{kind}-stopped", strategy, *overrides)
        if ranks.is_first():
            shutil.copytree(directory / f"{kind}-stopped", directory / f"{kind}-moved")
        ranks.wait_for_all()
        _run(directory, f"{kind}-stopped", strategy, *overrides)
    _run(directory, "background", strategy, *SAVING, "checkpoint.asynchronous=true", "checkpoint.export=true")
    other = FSDP2 if strategy == DDP else DDP
    _run(
        directory,
        "other-strategy",
        other,
        f"checkpoint.resume={directory}/background/checkpoints/step-000002",
    )
    for asynchronous in ("false", "true"):
        settings = (strategy, *SAVING, f"checkpoint.asynchronous={asynchronous}")
        told[asynchronous] = _without_space(directory, f"full-disk-{asynchronous}", *settings)
    return told


def assert_close(one: Path, other: Path) -> None:
    """Models that took the same steps, summed up in another order."""
    (ours,), (theirs,) = ((run / "model").glob("*.safetensors") for run in (one, other))
    expected = load_file(theirs)
    for name, tensor in load_file(ours).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("strategy", [DDP, FSDP2])
def test_what_two_ranks_save_is_gone_on_from_by_any(strategy: str, tmp_path: Path) -> None:
    directory = tiny_run(tmp_path / "assets").parent
    told = run_on_ranks(_on_a_rank, directory, strategy)
    for kind, overrides in _kinds(strategy).items():
        straight, moved = directory / f"{kind}-straight", directory / f"{kind}-moved"
        assert [rank[kind] for rank in told] == [143, 143]  # one was asked, both stopped
        assert checkpoint_steps(moved) == [3]
        assert_same_run(straight, directory / f"{kind}-stopped")
        train(whole_run(directory, moved, *ROWS, *overrides), Console(quiet=True))
        if kind != "dropout":  # which each rank draws for itself
            assert_close(moved, straight)
        steps = [line["step"] for line in lines(moved, "train")]
        assert steps == [line["step"] for line in lines(straight, "train")]
    for run in ("background", "other-strategy"):
        assert_close(directory / run, directory / "full-straight")
    assert_same_run(directory / "background", directory / "full-straight")
    for path in checkpoints(directory / "background" / "checkpoints"):
        assert find_damage(path) is None and (path / "model" / "config.json").exists()
        assert {file.name for file in (path / "tensors").iterdir()} == {
            ".metadata", "__0_0.distcp", "__1_0.distcp",
        }  # fmt: skip
    for asynchronous in ("false", "true"):
        first, second = (rank[asynchronous] for rank in told)
        assert first == second and "step-000002: File too large; free space" in first
        assert list((directory / f"full-disk-{asynchronous}" / "checkpoints").iterdir()) == []


def _alone_then_together(directory: Path) -> None:
    _run(directory, "alone", DDP)
    _run(directory, "alone-fsdp2", FSDP2)
    with pytest.raises(RecipeError, match="optim.name: adafactor updates whole weights only"):
        _run(directory, "sharded-adafactor", FSDP2, *KINDS["adafactor"])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_one_process_saves_is_gone_on_from_by_two(tmp_path: Path) -> None:
    directory = tiny_run(tmp_path / "assets").parent
    train(whole_run(directory, directory / "straight", *ROWS), Console(quiet=True))
    assert _stopped(directory, "alone") == 143
    shutil.copytree(directory / "alone", directory / "alone-fsdp2")
    run_on_ranks(_alone_then_together, directory)
    for run in ("alone", "alone-fsdp2"):
        assert_close(directory / run, directory / "straight")
        steps = [line["step"] for line in lines(directory / run, "train")]
        assert steps == [line["step"] for line in lines(directory / "straight", "train")]
