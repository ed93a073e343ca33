"""Whole runs on two processes: what they leave, and what goes on from their checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.limits import no_file_beyond
from support.marks import slow
from support.run_files import Run, assert_same_metrics, records, timeless, weights
from support.tiny_run import tiny_run
from support.two_ranks import run_on_ranks
from support.whole_runs import assert_same_run, checkpoint_steps, lines, pair_lines, whole_run
from transformers import AutoModelForCausalLM

import dpo_pack.system.interrupts as interrupts
import dpo_pack.trainer as train_module
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run import memory_estimate as memory_report
from dpo_pack.run.checkpoint_files import checkpoints, damage_of
from dpo_pack.run.memory_estimate import GIB
from dpo_pack.run.samples import read_samples
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RecipeError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.machine import AvailableMemory
from dpo_pack.trainer import train

# 13 pairs in steps of 4: ranks have unequal rows, and in the last step there is a pair for one of them.
COMMON = (
    "data.train.0.max_pairs=13",
    "packing.pairs_per_step=4",
    "packing.token_budget=64",
    "train.epochs=2",
)
LORA = "model.lora={r: 3, alpha: 6}"
MOVING = "reference.sync={every_steps: 2, mixup: 0.6}"
VARIANTS: dict[str, tuple[str, ...]] = {
    "full": (),
    "wpo": ("loss.weighting=wpo",),
    "lora": (LORA, "optim.lr=1e-2"),
    "lora, moving": (LORA, MOVING, "optim.lr=1e-2"),
}
UNSHARDED = "distributed.accumulate_unsharded=true"
# tests/run/test_combinations.py has the steps of every kind of run on two processes.
QUICK: list[Run] = [("ddp", "wpo", ()), ("fsdp2", "lora, moving", ())]
SLOW: list[Run] = [("fsdp2", "full", (UNSHARDED,)), ("fsdp2", "wpo", (UNSHARDED,))]


def recipe_of(directory: Path, run: str, *overrides: str) -> Recipe:
    places = (f"output_dir={directory / run}", f"reference.cache_dir={directory / run}-cache")
    return load_recipe(directory / "recipe.yaml", (*COMMON, *overrides, *places))


def _train(directory: Path, runs: list[Run]) -> None:
    """Run number i leaves run-i."""
    for number, (strategy, variant, overrides) in enumerate(runs):
        options = (*VARIANTS[variant], *overrides, f"distributed.strategy={strategy}")
        train(recipe_of(directory, f"run-{number}", *options), Console(quiet=True))
        ranks.wait_for_all()


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distributed")
    tiny_run(directory)
    return directory


def check_runs(assets: Path, tmp_path: Path, runs: list[Run]) -> None:
    directory = tmp_path / "assets"
    shutil.copytree(assets, directory)
    run_on_ranks(_train, directory, runs)
    for number, run in enumerate(runs):
        alone = directory / f"alone-{run[1]}"
        if not alone.exists():
            train(recipe_of(directory, alone.name, *VARIANTS[run[1]]), Console(quiet=True))
        ours = directory / f"run-{number}"
        assert_same_metrics(records(ours), records(alone), run)
        for mine, theirs in zip(pair_lines(ours), pair_lines(alone), strict=True):
            assert mine.pop("source") == theirs.pop("source")
            assert mine.pop("score_margin") == theirs.pop("score_margin")  # null: no scores
            assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-5), f"{run}: pairs.parquet"
        trained, expected = weights(ours), weights(alone)
        assert trained.keys() == expected.keys()
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-5, msg=f"{run}: {name}")
        names = [sorted(path.name for path in (place / "model").iterdir()) for place in (ours, alone)]
        assert names[0] == names[1]
        info = json.loads((ours / "run.json").read_text())
        assert info["status"] == "finished" and info["totals"]["pairs"] == 26
        if "lora" not in run[1]:
            AutoModelForCausalLM.from_pretrained(ours / "model")


@pytest.mark.multiprocess
@pytest.mark.parametrize("runs", [QUICK, *slow(SLOW)])
def test_two_processes_leave_what_one_leaves(runs: list[Run], assets: Path, tmp_path: Path) -> None:
    check_runs(assets, tmp_path, runs)


def _train_with_memory(directory: Path, gib: dict[str, int]) -> list[str]:
    """The line about shards of a run for each amount of free memory."""
    lines = []
    for run, free in gib.items():
        memory = AvailableMemory(free=free * GIB, total=free * GIB)
        console = Console(file=StringIO(), width=200)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_report, "available_memory", lambda device: memory)  # noqa: B023
            train(recipe_of(directory, run, LORA, "distributed.strategy=fsdp2"), console)
        ranks.wait_for_all()
        lines += [line for line in console.file.getvalue().splitlines() if line.startswith("Shards")]  # type: ignore[attr-defined]
    return lines


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_takes_the_same_steps_where_memory_allows_to_gather_once_a_step(
    assets: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "assets"
    shutil.copytree(assets, directory)
    layerwise, once = run_on_ranks(_train_with_memory, directory, {"little": 0, "enough": 9})[0]
    assert "gathered layer by layer" in layerwise and "gathered all for the whole step" in once
    assert timeless(directory / "enough", "train") == timeless(directory / "little", "train")
    expected = weights(directory / "little")
    for name, tensor in weights(directory / "enough").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_shards_gathered_in_bfloat16_learn_the_same_within_rounding(assets: Path, tmp_path: Path) -> None:
    directory = tmp_path / "assets"
    shutil.copytree(assets, directory)
    gathered: Run = ("fsdp2", "full", ("distributed.gather_dtype=bfloat16",))
    run_on_ranks(_train, directory, [gathered, ("fsdp2", "full", ())])
    low, full = records(directory / "run-0"), records(directory / "run-1")
    assert full[0] != low[0] and low[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-2)
    assert [line["loss"] for line in low] == pytest.approx([line["loss"] for line in full], abs=5e-2)
    # Another computation, and so other cached log-probs.
    caches = [directory / f"run-{number}-cache" / "reference" for number in (0, 1)]
    assert len({namespace.name for cache in caches for namespace in cache.iterdir()}) == 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_write_the_samples_of_one_whole_or_in_shards(assets: Path, tmp_path: Path) -> None:
    directory = tmp_path / "assets"
    shutil.copytree(assets, directory)
    some = ("logging.samples={num: 2, max_new_tokens: 3}", "train.max_steps=2")
    none = ("logging.samples=null", "train.max_steps=2")
    runs: list[Run] = [("ddp", "full", some), ("fsdp2", "full", some), ("fsdp2", "full", none)]
    run_on_ranks(_train, directory, [*runs, ("fsdp2", "lora", some)])
    train(recipe_of(directory, "alone", *VARIANTS["full"], *some), Console(quiet=True))
    alone = read_samples(directory / "alone" / "samples.jsonl")
    assert [sample["step"] for sample in alone] == [0, 0, 2, 2]
    for run in ("run-0", "run-1", "run-3"):
        ours = read_samples(directory / run / "samples.jsonl")
        assert [(s["step"], s["prompt"]) for s in ours] == [(s["step"], s["prompt"]) for s in alone], run
        assert ours[:2] == alone[:2], run
    sharded, plain = (directory / run for run in ("run-1", "run-2"))
    assert_same_run(sharded, plain)  # samples change no step


# ------------------------------------------------------------------------------------------------ Checkpoints


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
    accumulate, poll = train_module.Trainer.accumulate_gradients, interrupts.Interruption.poll
    polled: list[int] = []  # for each row of the present step that began with a poll: the step

    def noting(trainer: Any, batch: Any) -> Any:
        polled[:] = [trainer.state.step]
        return accumulate(trainer, batch)

    def with_signal(interruption: Any, *, at_once: bool = True) -> None:
        polled.extend([] if at_once else polled[:1])
        if ranks.rank() == ranks.num_ranks() - 1 and not at_once and polled == [3, 3, 3]:
            signal.raise_signal(signal.SIGUSR1)
        poll(interruption, at_once=at_once)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module.Trainer, "accumulate_gradients", noting)
        patch.setattr(interrupts.Interruption, "poll", with_signal)
        patch.setattr(interrupts, "POLL_SECONDS", 0.0)  # the rows of such a run take milliseconds
        return _run(directory, name, *overrides)


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
        assert damage_of(path) is None and (path / "model" / "config.json").exists()
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
