"""Whole online runs on a tiny model: what they leave, how they resume, that they equal offline ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.rows import write_rows
from support.run_files import assert_same_run, timeless, weights
from support.tiny_online import online_recipe, rollouts
from support.tiny_run import NUM_PAIRS
from support.whole_runs import kill_after, pair_lines, stop_after

from dpo_pack.online import phases
from dpo_pack.online.interface import Draw
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.run.evaluate import evaluate_models
from dpo_pack.run.inputs import prove_and_measure
from dpo_pack.system.errors import RecipeError, RunError
from dpo_pack.trainer import train

QUEUED = {"pairing": {"type": "all_pairs"}, "rollouts_per_update": 5, "completions_per_prompt": 3}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assets")


def lines(run: Path, split: str = "train") -> list[dict[str, Any]]:
    return timeless(run, split)


def assert_same_online_run(one: Path, other: Path) -> None:
    assert_same_run(one, other)
    assert rollouts(one) == rollouts(other)


@pytest.fixture(scope="module")
def straight(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    recipe = online_recipe(assets, run, f"data.eval={assets}/heldout.jsonl", **QUEUED)
    train(recipe, Console(quiet=True))
    return run


def test_every_rollout_is_kept_and_counted_once(straight: Path) -> None:
    rows, last = rollouts(straight), lines(straight)[-1]
    assert len(rows) == last["online/total_prompts"] and len(rows) % 5 == 0
    assert [row["draw"] for row in rows] == list(range(len(rows)))
    assert len(rows) <= NUM_PAIRS and len({row["row_number"] for row in rows}) == len(rows)  # one epoch
    assert all(len(row["completions"]) == len(row["scores"]) == 3 for row in rows)
    paired = [row for row in rows if row["chosen_ids"] is not None]
    assert len(paired) == last["online/total_paired"] > 0
    for row in paired:
        places = [row["completion_ids"].index(row[side]) for side in ("chosen_ids", "rejected_ids")]
        assert row["scores"][places[0]] > row["scores"][places[1]]
    made = last["online/total_pairs"]
    assert made == last["pairs"] * len(lines(straight)) + last["online/pending_pairs"]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] < 6


def test_a_step_has_its_pairs_and_says_what_the_judge_said(straight: Path) -> None:
    records = lines(straight)
    assert [record["pairs"] for record in records] == [4] * 6
    first = records[0]
    assert first["kl/chosen"] == 0.0 and first["online/staleness"] == 0.0
    in_phase = [row for row in rollouts(straight) if row["step"] == 0]
    scores = [score for row in in_phase for score in row["scores"]]
    assert first["online/scores"] == pytest.approx(sum(scores) / len(scores))
    assert first["online/scores_best"] == pytest.approx(sum(max(r["scores"]) for r in in_phase) / 5)
    # Steps without a phase of their own take pairs that have waited.
    waited = [record for record in records if "online/scores" not in record]
    assert waited and all(record["online/staleness"] > 0 for record in waited)
    assert first["epoch"] == pytest.approx(5 / NUM_PAIRS)
    for record in records:
        margins = [line["score_margin"] for line in pair_lines(straight) if line["step"] == record["step"]]
        assert sum(margins) / 4 == pytest.approx(record["online/win_margin"])


def test_the_policy_plays_against_itself_as_it_started(straight: Path) -> None:
    before, after = lines(straight, "eval")
    assert before["online/win_rate"] == 0.5 and before["online/score_gain"] == 0.0
    assert after["online/scores_start"] == before["online/scores"] and after["prompts"] == 6
    assert after["online/score_gain"] == pytest.approx(after["online/scores"] - after["online/scores_start"])
    assert "wins against the starting policy" in (straight / "model" / "README.md").read_text()


@pytest.mark.parametrize("stop_at", [5, *slow(1)])
def test_an_interrupted_run_goes_on_bitwise_as_if_nothing_had_happened(
    stop_at: int, straight: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    recipe = online_recipe(assets, tmp_path / "run", f"data.eval={assets}/heldout.jsonl", **QUEUED)
    stop_after(stop_at, recipe, console)
    train(recipe, console)
    assert_same_online_run(straight, tmp_path / "run")


@pytest.mark.slow
def test_a_judge_that_is_gone_costs_no_step_that_was_taken(
    straight: Path, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `checkpoint.every_steps`: the run is saved when it ends, and goes on when the key is right."""
    recipe = online_recipe(assets, tmp_path / "run", f"data.eval={assets}/heldout.jsonl", **QUEUED)
    run_phase = phases.run_phase

    def gone(draws: Sequence[Draw], *arguments: Any, **named: Any) -> Any:
        outcomes = run_phase(draws, *arguments, **named)
        if draws[0].number >= 5:
            raise RunError("online.judges.0.endpoint: the server says 401")
        return outcomes

    with monkeypatch.context() as patch:
        patch.setattr("dpo_pack.online.source.run_phase", gone)
        with pytest.raises(RunError, match="401"):
            train(recipe, console)
    (taken,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    train(recipe, console)
    step = int(taken.name.removeprefix("step-"))
    assert 0 < step < 6 and f"Going on after step {step}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert_same_online_run(straight, tmp_path / "run")


@pytest.mark.slow
def test_a_killed_run_makes_the_phases_after_its_checkpoint_anew(
    straight: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    held_out = f"data.eval={assets}/heldout.jsonl"
    recipe = online_recipe(assets, tmp_path / "run", held_out, "checkpoint.every_steps=2", **QUEUED)
    kill_after(5, recipe)
    half_written = tmp_path / "run" / "rollouts.parquet" / ".part-000009.parquet.0123abcd.tmp"
    half_written.touch()
    train(recipe, console)
    assert not half_written.exists()
    assert "Going on after step 4" in console.file.getvalue()  # type: ignore[attr-defined]
    assert_same_online_run(straight, tmp_path / "run")


def test_online_steps_equal_offline_steps_on_the_same_pairs(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    """The rollouts of one phase, read back as offline data: same losses, gradients and weights."""
    settings = {"rollouts_per_update": 12, "completions_per_prompt": 2}
    common = ("train.max_steps=3", "data.shuffle=false")
    recipe = online_recipe(assets, tmp_path / "online", *common, **settings)
    train(recipe, console)
    rows = rollouts(tmp_path / "online")
    assert len(rows) == 12 and all(row["chosen_ids"] is not None for row in rows)
    tree = recipe.model_dump(mode="json")
    tree |= {"output_dir": str(tmp_path / "offline"), "online": None}
    source = f"data.train={tmp_path / 'online' / 'rollouts.parquet'}"
    train(parse_recipe(tree, [source, "data.on_bad_row=skip"]), console)
    for ours, theirs in zip(lines(tmp_path / "online"), lines(tmp_path / "offline"), strict=True):
        for name in ("loss", "grad_norm", "logps/chosen", "logps/rejected", "rewards/margins", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5, rel=2e-5), name
    online, offline = weights(tmp_path / "online"), weights(tmp_path / "offline")
    assert max(float((online[name] - offline[name]).abs().max()) for name in online) < 2e-5


def test_pairs_that_waited_too_long_are_dropped_and_counted(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    recipe = online_recipe(assets, tmp_path / "run", "online.max_staleness_steps=0", **QUEUED)
    train(recipe, console)
    records = lines(tmp_path / "run")
    assert all(record["online/staleness_max"] == 0.0 for record in records)
    last = records[-1]
    assert last["online/total_stale_pairs"] > 0
    trained = last["pairs"] * len(records)
    made = trained + last["online/pending_pairs"] + last["online/total_stale_pairs"]
    assert made == last["online/total_pairs"]


def test_a_judge_that_prefers_nothing_stops_the_run_in_one_line(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    judges = [{"type": "function", "function": "support.online_judges:always_equal"}]
    with pytest.raises(RunError, match=r"step 1: 6 prompts gave no pair, 10 times .*min_margin") as caught:
        train(online_recipe(assets, tmp_path / "run", judges=judges), console)
    assert "\n" not in str(caught.value)
    assert len(rollouts(tmp_path / "run")) == 60


@pytest.mark.slow
def test_a_reference_that_follows_the_policy_and_one_in_host_memory(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    for name, overrides in {
        "plain": (),
        "offloaded": ("online.offload_reference=true",),
        "moving": ("reference.sync={every_steps: 2, mixup: 1.0}",),
        "free": ("loss.type=simpo",),
    }.items():
        train(online_recipe(assets, tmp_path / name, "train.max_steps=4", *overrides), console)
    plain, offloaded = lines(tmp_path / "plain"), lines(tmp_path / "offloaded")
    assert plain == offloaded and plain[2]["kl/chosen"] != 0.0
    moving = lines(tmp_path / "moving")
    assert moving[:2] == plain[:2] and moving[2]["kl/chosen"] == 0.0 and moving[3]["kl/chosen"] != 0.0
    assert "kl/chosen" not in lines(tmp_path / "free")[0]


def test_prompts_alone_are_enough_and_what_does_not_fit_is_counted(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    long = {"prompt": "red green blue " * 40}
    rows = [{"prompt": f"ask {number}"} for number in range(6)] + [long]
    write_rows(tmp_path / "prompts.jsonl", rows)
    recipe = online_recipe(assets, tmp_path / "run", f"data.train={tmp_path}/prompts.jsonl")
    train(recipe, console)
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    assert report["train"]["prompts"] == 6
    assert report["train"]["sources"][0]["dropped"] == {"too_long": {"rows": 1, "line_numbers": [7]}}


def test_doctor_generates_nothing_leaves_nothing_and_other_commands_refuse(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersGenerator, "generate", lambda *_: pytest.fail("a prompt was answered"))
    recipe = online_recipe(assets, tmp_path / "run", f"data.eval={assets}/heldout.jsonl")
    prove_and_measure(recipe, console)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="online: this command needs pairs"):
        evaluate_models(recipe, [str(assets / "model")], console)
