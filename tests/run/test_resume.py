"""Going on and stopping early: best checkpoints, exports in them, damage, and what a run says has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.marks import slow
from support.tiny_run import tiny_run
from support.whole_runs import (
    assert_same_run,
    checkpoint_steps,
    kill_after,
    lines,
    pair_lines,
    saved_weights,
    stop_after,
    text,
    whole_run,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpo_pack.recipe.load import Recipe
from dpo_pack.run.checkpoint_files import checkpoints, damage_of, read_counters, with_checksum
from dpo_pack.run.setup import prepare
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import read_json, write_json_atomically
from dpo_pack.trainer import train

# Steps this long overshoot: the loss of the held-out pairs rises and falls.
OVERSHOOTS = ("optim.lr=0.05", "optim.schedule=constant", "train.eval_every_steps=1", "loss.beta=1")


@pytest.fixture(scope="module")
def overshooting(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in steps that overshoot, which nothing interrupted. Nobody may write there."""
    run = tmp_path_factory.mktemp("overshooting") / "run"
    train(whole_run(assets, run, *OVERSHOOTS), Console(quiet=True))
    return run


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in lines(run, "eval") if record["step"] > 0}


def start_loss(run: Path) -> float:
    (value,) = (record["loss"] for record in lines(run, "eval") if record["step"] == 0)
    assert isinstance(value, float)
    return value


# ---------------------------------------------------------------------------------------- the best of a run


def test_the_best_checkpoints_are_kept_and_the_best_weights_are_left(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    best = ("checkpoint.keep_best=2", "checkpoint.load_best=true", "checkpoint.export=true")
    run = tmp_path / "run"
    train(whole_run(assets, run, *OVERSHOOTS, *best, "checkpoint.keep=1"), console)
    ranking = sorted(losses(run), key=lambda step: losses(run)[step])
    assert ranking[0] not in (1, 8)  # or the test shows nothing
    assert checkpoint_steps(run) == sorted({*ranking[:2], 8})  # 8: saved before its weights go
    told = read_json(run / "run.json")["best"]
    path = run / "checkpoints" / f"step-{ranking[0]:06d}"
    assert told == {
        "step": ranking[0], "metric": "loss", "eval_set": "heldout", "value": losses(run)[ranking[0]],
        "start": start_loss(run), "checkpoint": str(path),
    }  # fmt: skip
    assert saved_weights(run / "model") == saved_weights(path / "model")
    assert f"{losses(run)[ranking[0]]:.4f} |" in (run / "model" / "README.md").read_text()


def test_a_run_whose_best_evaluation_is_worse_than_its_start_says_so_and_stops_early(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    run, wrong = tmp_path / "run", "data.eval.0.columns={chosen: rejected, rejected: chosen}"
    best = ("checkpoint.keep_best=1", "checkpoint.load_best=true", "train.early_stopping={patience: 3}")
    train(whole_run(assets, run, *OVERSHOOTS, wrong, *best), console)
    told = read_json(run / "run.json")["best"]
    assert told["start"] == start_loss(run) < told["value"] == min(losses(run).values())
    assert (
        "Warning: no evaluation is better than the one before the first step: loss of heldout was "
        f"{told['start']:.4g} then, and at best {told['value']:.4g} later, after step {told['step']}. "
        in text(console)
    )
    assert "Stopped early after step 3" in text(console) and max(losses(run)) == 3
    assert "are not swapped, and lower optim.lr" in text(console)


@pytest.mark.parametrize("stop_at", [2, *slow(None, 1, 3)])
def test_a_run_stops_early_where_it_would_have_stopped(
    stop_at: int | None, overshooting: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    stopping = ("train.early_stopping={patience: 2}", "checkpoint.keep_best=1", "checkpoint.load_best=true")
    long, run = overshooting, tmp_path / "run"
    best = min(losses(long), key=lambda step: losses(long)[step])
    first_low = next(s for s in range(1, 9) if min(losses(long)[t] for t in (s + 1, s + 2)) > losses(long)[s])
    recipe = whole_run(assets, run, *OVERSHOOTS, *stopping)
    if stop_at is not None:
        stop_after(stop_at, recipe)
    train(recipe, console)
    assert first_low + 2 < 8 and best >= first_low
    assert max(losses(run)) == first_low + 2 and lines(run) == [
        line for line in lines(long) if line["step"] <= first_low + 2
    ]
    info = read_json(run / "run.json")
    assert info["stopped_early"] and info["status"] == "finished" and info["best"]["step"] == first_low
    assert f"Stopped early after step {first_low + 2}: loss of heldout has not improved in 2" in text(console)


@pytest.mark.slow
def test_the_best_checkpoint_is_there_whatever_interrupts_its_evaluation(
    overshooting: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    """The state is saved before the evaluation, which then has to be made, and its checkpoint with it."""
    best = ("checkpoint.keep_best=1", "checkpoint.keep=1")
    step = read_json(overshooting / "run.json")["best"]["step"]
    recipe = whole_run(assets, tmp_path / "run", *OVERSHOOTS, *best)
    stop_after(step, recipe)
    owing = read_counters(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    assert owing is not None and owing["owes_evaluation"]
    train(recipe, console)
    assert_same_run(overshooting, tmp_path / "run")
    whole = read_counters(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    assert whole is not None and not whole["owes_evaluation"] and whole["standing"]["best"][0][0] == step


@pytest.mark.slow
def test_a_run_without_a_best_evaluation_has_its_last_step_saved(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else was, and the remedy must not cost the training."""
    run, best = tmp_path / "run", ("checkpoint.keep_best=1", "checkpoint.load_best=true")
    with monkeypatch.context() as patch:
        patch.setattr("dpo_pack.run.evaluate.judge", lambda standing, *rest, **options: standing)
        with pytest.raises(RunError, match="no evaluation gave a finite metric; with checkpoint.load_best=f"):
            train(whole_run(assets, run, *best), console)
    assert checkpoint_steps(run) == [8]
    train(whole_run(assets, run, best[0]), console)
    assert len(lines(run, "train")) == 8 and read_json(run / "run.json")["status"] == "finished"


@pytest.mark.slow
def test_bests_that_were_left_in_another_directory_are_not_asked_for(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    best = ("checkpoint.keep_best=1", "checkpoint.load_best=true", "checkpoint.keep=9")
    stop_after(5, whole_run(assets, tmp_path / "run", *OVERSHOOTS, *best))
    (last,) = (path for path in checkpoints(tmp_path / "run" / "checkpoints") if path.name.endswith("5"))
    there = whole_run(assets, tmp_path / "there", *OVERSHOOTS, *best, f"checkpoint.resume={last}")
    train(there, console)
    told = read_json(tmp_path / "there" / "run.json")["best"]
    of_those = {step: loss for step, loss in losses(tmp_path / "there").items() if step >= 5}
    assert told["step"] == min(of_those, key=lambda step: of_those[step])
    assert Path(told["checkpoint"]).is_dir()
    assert "lacks checkpoints of the best evaluations" in text(console)


# ------------------------------------------------------------------------------------------ what is in them


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="full"),
        pytest.param(("model.lora={r: 4, alpha: 8}",), id="lora", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_has_the_model_in_it_for_from_pretrained(
    overrides: tuple[str, ...], assets: Path, tmp_path: Path, console: Console
) -> None:
    run = tmp_path / "run"
    train(whole_run(assets, run, "checkpoint.export=true", "checkpoint.every_steps=4", *overrides), console)
    early, late = (path / "model" for path in checkpoints(run / "checkpoints"))
    assert saved_weights(late) == saved_weights(run / "model") != saved_weights(early)
    model = AutoModelForCausalLM.from_pretrained(early)
    tokenizer = AutoTokenizer.from_pretrained(early)
    assert torch.isfinite(model(**tokenizer("ask red", return_tensors="pt")).logits).all()
    assert "4 steps" in (early / "README.md").read_text()
    (early / "README.md").unlink()
    assert damage_of(early.parent) == "model/README.md is missing"


@pytest.mark.slow
def test_checkpoints_written_in_the_background_are_gone_on_from_bitwise(
    straight: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    overrides = ("checkpoint.asynchronous=true", "checkpoint.every_steps=1", "checkpoint.keep=9")
    recipe = whole_run(assets, tmp_path / "run", *overrides)
    stop_after(5, recipe)
    assert checkpoint_steps(tmp_path / "run") == [1, 2, 3, 4, 5]
    train(recipe, console)
    assert_same_run(straight, tmp_path / "run")
    assert checkpoint_steps(tmp_path / "run") == list(range(1, 9))
    earlier = tmp_path / "run" / "checkpoints" / "step-000006"
    train(whole_run(assets, tmp_path / "from-6", f"checkpoint.resume={earlier}"), console)
    assert saved_weights(tmp_path / "from-6" / "model") == saved_weights(straight / "model")


LORA, MOVING = "model.lora={r: 4, alpha: 8}", "reference.sync={every_steps: 2, mixup: 0.5}"
# What a run keeps beside weights, moments and its place, as overrides of the recipe.
STATES = {
    "an adapter with dropout": ("model.lora={r: 4, alpha: 8, dropout: 0.3}", "optim.lr=1e-2"),
    "a moving reference": (MOVING,),
    "a moving reference and an adapter": (MOVING, LORA),
    "a second epoch": ("train.epochs=3",),
}


@pytest.mark.parametrize("state", [*list(STATES)[:1], *slow(*list(STATES)[1:])])
def test_a_killed_run_goes_on_bitwise_whatever_it_keeps(
    state: str, assets: Path, tmp_path: Path, console: Console
) -> None:
    straight, killed = (
        whole_run(assets, tmp_path / name, *STATES[state], "checkpoint.every_steps=3")
        for name in ("straight", "killed")
    )
    train(straight, Console(quiet=True))
    kill_after(4, killed)
    train(killed, console)
    assert "Going on after step 3" in text(console)
    assert_same_run(straight.output_dir, killed.output_dir)


# --------------------------------------------------------------------------------------------------- damage


SAVING = ("checkpoint.every_steps=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def stopped(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after step 5, with checkpoints after 2, 4 and 5. Nobody may write there."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    stop_after(5, whole_run(assets, run, *SAVING))
    return run


def damaged_run(stopped: Path, assets: Path, run: Path, *steps: int) -> Recipe:
    """A copy of the stopped run; tensors of `steps` are damaged."""
    shutil.copytree(stopped, run)
    for step in steps:
        (file,) = (run / "checkpoints" / f"step-{step:06d}" / "tensors").glob("__0_*")
        file.write_bytes(bytes(reversed(file.read_bytes())))
    return whole_run(assets, run, *SAVING)


def test_of_damaged_checkpoints_the_next_older_whole_one_is_taken_and_that_is_said(
    straight: Path, stopped: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    recipe = damaged_run(stopped, assets, tmp_path / "run", 4, 5)
    train(recipe, console)
    (five, four) = (line for line in text(console).splitlines() if "is damaged" in line)
    assert "step-000005 is damaged: tensors/__0_0.distcp has other content than was written" in five
    assert "going on from" in five and "step-000004" in five
    assert "step-000004 is damaged" in four and "step-000002" in four
    assert "Going on after step 2" in text(console)
    assert_same_run(straight, tmp_path / "run")
    assert all(damage_of(path) is None for path in checkpoints(tmp_path / "run" / "checkpoints"))


def test_a_run_that_goes_on_from_an_earlier_checkpoint_has_no_later_ones(
    stopped: Path, assets: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    earlier = run / "checkpoints" / "step-000002"
    stop_after(3, whole_run(assets, run, *SAVING, f"checkpoint.resume={earlier}"))
    assert checkpoint_steps(run) == [2, 3]


def test_a_damaged_checkpoint_that_the_recipe_names_is_refused(
    stopped: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    damaged_run(stopped, assets, tmp_path / "run", 4)
    path = tmp_path / "run" / "checkpoints" / "step-000004"
    with pytest.raises(RunError, match=rf"checkpoint\.resume: {path} is damaged: tensors/.*; give another"):
        train(whole_run(assets, tmp_path / "other", f"checkpoint.resume={path}"), console)


def test_metrics_that_have_lost_or_changed_lines_are_refused_and_nothing_is_changed(
    straight: Path, stopped: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    recipe = damaged_run(stopped, assets, tmp_path / "run")
    metrics = recipe.output_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        metrics.write_bytes(damaged)
        with pytest.raises(RunError, match="metrics.jsonl"):
            train(recipe, console)
        assert checkpoint_steps(recipe.output_dir) == [2, 4, 5] and metrics.read_bytes() == damaged
    metrics.write_bytes(whole + b'{"written": "after the checkpoint"}\n')
    train(recipe, console)
    assert_same_run(straight, recipe.output_dir)


# ----------------------------------------------------------------------------------------- what has changed


@pytest.mark.slow
def test_what_is_held_out_may_change(straight: Path, assets: Path, tmp_path: Path, console: Console) -> None:
    """Also where the cache is gone: only what is new is computed, by the reference and not by the policy."""
    recipe = whole_run(assets, tmp_path / "run", f"reference.cache_dir={tmp_path}/cache")
    stop_after(3, recipe)
    rows = (assets / "heldout.jsonl").read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([rows[0], *(row.replace("ask", "ask ask") for row in rows[1:4])]) + "\n")
    changes = (f"data.eval=[{{path: {other}, name: mine}}]", f"reference.cache_dir={tmp_path}/elsewhere")
    train(whole_run(assets, tmp_path / "run", *changes), console)
    assert "0 of 6 different sequences cached, 6 to compute" in text(console)
    assert lines(tmp_path / "run", "train") == lines(straight, "train")
    assert saved_weights(tmp_path / "run" / "model") == saved_weights(straight / "model")
    after = [line for line in lines(tmp_path / "run", "eval") if line["step"] >= 4]
    assert {line["source"] for line in after} == {"mine"} and len(after) == 3

    whole = whole_run(assets, tmp_path / "whole", *changes)
    train(whole, Console(quiet=True))
    for ours, theirs in zip(after, lines(tmp_path / "whole", "eval")[2:], strict=True):
        assert ours["step"] == theirs["step"] and ours["pairs"] == theirs["pairs"] == 4
        assert ours["rewards/margins"] == pytest.approx(theirs["rewards/margins"], rel=1e-4)


def test_what_is_held_out_may_not_change_where_it_says_when_to_stop(tmp_path: Path, console: Console) -> None:
    own = tiny_run(tmp_path / "own").parent
    recipe = whole_run(own, tmp_path / "run", "train.early_stopping={patience: 9}")
    stop_after(3, recipe)
    rows = (own / "heldout.jsonl").read_text().splitlines()
    (own / "heldout.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(RunError, match="another held-out data"):
        train(recipe, console)


def test_changed_data_is_refused_and_other_versions_are_told(tmp_path: Path, console: Console) -> None:
    own = tiny_run(tmp_path / "own").parent
    train(whole_run(own, tmp_path / "straight"), Console(quiet=True))
    recipe = whole_run(own, tmp_path / "run")
    stop_after(3, recipe)
    (path,) = checkpoints(tmp_path / "run" / "checkpoints")
    counters: dict[str, Any] = read_counters(path) or {}
    counters["versions"]["torch"] = "1.0"
    write_json_atomically(path / "checkpoint.json", with_checksum(counters))
    rows = (own / "pairs.jsonl").read_text().splitlines()
    (own / "pairs.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(RunError, match="another data and another plan"):
        train(recipe, console)
    (own / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    train(recipe, console)
    warned = "Warning: changes that may change the last bits of results: torch 1.0 then"
    assert any(line.strip().startswith(warned) for line in text(console).splitlines())
    assert_same_run(tmp_path / "straight", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_pairs_whatever_names_them(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    names = prepare(whole_run(assets, tmp_path / "run"), Console(quiet=True)).data.train.pair_names

    def keeping(name: str, some: list[str], **columns: Any) -> Recipe:
        pq.write_table(pa.table({"pair": some, **columns}), tmp_path / name)
        return whole_run(assets, tmp_path / "run", f"data.train.0.keep={{from: {tmp_path / name}}}")

    stop_after(3, keeping("first.parquet", names[:12]))
    with pytest.raises(RunError, match="another data and another plan"):
        train(keeping("first.parquet", names[:11]), console)
    with pytest.raises(CacheError, match="of other pairs than data.train"):
        train(keeping("other.parquet", names[1:13]), console)
    with pytest.raises(RunError, match=r"another data\.train\.0\.keep[; ]"):
        train(whole_run(assets, tmp_path / "run"), console)
    same = keeping("renamed.parquet", names[11::-1], p=[1.0] * 12)
    train(same, console)
    assert {line["row"] for line in pair_lines(tmp_path / "run")} == {*range(1, 13)}
    train(same, console)
    assert "is finished" in text(console)
    with pytest.raises(RunError, match=r"another data\.train\.0\.keep\.from[; ]"):
        train(keeping("other.parquet", names[4:]), console)


def test_a_changed_model_config_is_refused_because_a_checkpoint_holds_only_weights(
    tmp_path: Path, console: Console
) -> None:
    own = tiny_run(tmp_path / "own").parent
    recipe = whole_run(own, tmp_path / "run", "train.max_steps=2")
    stop_after(1, recipe)
    config = own / "model" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
    with pytest.raises(RunError, match="another model config"):
        train(recipe, console)
