"""Whole runs on a tiny model: what they leave behind, how they resume, what a second one reuses."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.device_reads import no_reads
from support.marks import slow
from support.rows import write_rows
from support.run_files import records, timeless, weights
from support.tiny_run import NUM_PAIRS, tiny_checkpoint
from support.whole_runs import stop_after, whole_run
from transformers import AutoModelForCausalLM

import dpo_pack.model.scorer as scorer
import dpo_pack.run.models as recipe_models
import dpo_pack.trainer as train_module
from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.system.errors import RunError
from dpo_pack.trainer import train


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run_leaves_what_the_contract_says(straight: Path) -> None:
    lines = records(straight)
    steps = [r for r in lines if r["split"] == "train"]
    assert [r["step"] for r in steps] == list(range(1, 9))
    assert [r["pairs"] for r in steps] == [4] * 8
    assert [r["step"] for r in lines if r["split"] == "eval"] == [0, 2, 4, 6, 8]
    assert steps[0]["learning_rate"] == 0.0 and steps[-1]["epoch"] == 2.0
    needed = {
        "loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
        "logps/chosen", "logps/rejected", "entropy", "rows", "tokens", "tokens_per_second",
        "pairs_per_second", "seconds",
    }  # fmt: skip
    assert needed <= steps[0].keys()
    info = read_json(straight / "run.json")
    assert info["status"] == "finished" and info["totals"]["pairs"] == 2 * NUM_PAIRS
    assert info["totals"]["tokens"] == sum(r["tokens"] for r in steps)
    assert sum(info["totals"][f"reference_sequences_{how}"] for how in ("computed", "cached")) == 44
    for name in ("recipe.yaml", "data_report.json", "packing_report.json", "reference.parquet"):
        assert (straight / name).is_file()
    model = AutoModelForCausalLM.from_pretrained(straight / "model")
    trained = weights(straight)
    assert all(
        torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items() if name in trained
    )


def test_each_row_is_in_the_file_of_trained_pairs_or_in_that_of_held_out_pairs(
    assets: Path, tmp_path: Path
) -> None:
    train(whole_run(assets, tmp_path / "run", "data.eval={fraction: 0.2}"), Console(quiet=True))
    trained = pq.read_table(tmp_path / "run" / "pairs.parquet").to_pylist()
    held_out = pq.read_table(tmp_path / "run" / "held_out.parquet").to_pylist()
    trained_rows = {(line["source"], line["row"]) for line in trained}
    held_out_rows = {(line["row_source"], line["row"]) for line in held_out}
    assert not trained_rows & held_out_rows and held_out_rows
    assert trained_rows | held_out_rows == {("pairs", number + 1) for number in range(NUM_PAIRS)}


def test_training_learns_and_step_zero_prefers_nothing(straight: Path) -> None:
    before, *_, after = [r for r in timeless(straight) if r["split"] == "eval"]
    assert abs(before["rewards/margins"]) < 1e-5 and before["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert after["rewards/accuracies"] > 0.9 and after["loss"] < 0.6


def test_a_run_that_was_killed_before_its_page_was_whole_gets_it_from_the_same_command(
    straight: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    text = (run / "report.html").read_text(encoding="utf-8")
    (run / "report.html").rename(run / ".report.html.7ca8311c.tmp")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dpo_pack.trainer.Trainer", None)  # no step is taken
        train(whole_run(assets, run), console)
    assert not list(run.glob(".*.tmp"))
    assert len((run / "report.html").read_text(encoding="utf-8")) == pytest.approx(len(text), rel=0.05)


def test_a_run_that_failed_before_its_first_step_is_no_hindrance(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("before a step")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="before a step"):
        patched.setattr("dpo_pack.trainer.Trainer.take_steps", fail)
        train(whole_run(assets, tmp_path / "run", "train.max_steps=1"), console)
    assert read_json(tmp_path / "run" / "run.json")["status"] == "failed"
    train(whole_run(assets, tmp_path / "run", "train.max_steps=1", "optim.lr=2e-3"), console)
    assert read_json(tmp_path / "run" / "run.json")["status"] == "finished"


def test_a_reference_of_its_own_is_used_and_gone_before_training(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "reference", seed=5)
    loaded: list[str] = []

    def spy(facts: ModelFacts, **settings: Any) -> Any:
        loaded.append(Path(facts.settings.path).name)
        return load_model(facts, **settings)

    monkeypatch.setattr(recipe_models, "load_model", spy)
    recipe = whole_run(
        assets, tmp_path / "run", f"reference.path={tmp_path / 'reference'}", "train.max_steps=1"
    )
    train(recipe, console)
    assert loaded == ["reference", "model"]
    first = timeless(tmp_path / "run")[0]
    assert first["split"] == "eval" and abs(first["rewards/margins"]) > 1e-3


@pytest.mark.parametrize("name", ["simpo", "sft", *slow("orpo", "cpo")])
def test_a_loss_without_a_reference_computes_and_keeps_none(
    name: str, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.run.inputs.prepare_reference", lambda *_: pytest.fail("a reference pass"))
    loaded: list[str] = []

    def spy(facts: ModelFacts, **settings: Any) -> Any:
        loaded.append(facts.settings.path)
        return load_model(facts, **settings)

    monkeypatch.setattr(recipe_models, "load_model", spy)
    own_cache = f"reference.cache_dir={tmp_path / 'cache'}"
    train(whole_run(assets, tmp_path / "run", f"loss.type={name}", "optim.lr=3e-3", own_cache), console)
    before, *_, after = records(tmp_path / "run", "eval")
    assert after["loss"] < before["loss"] and len(loaded) == 1
    assert not (tmp_path / "run" / "reference.parquet").exists()
    assert not (tmp_path / "cache" / "reference").exists()


def test_pair_weights_scale_each_pair_s_part_of_the_loss(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    rows = [json.loads(line) for line in (assets / "pairs.jsonl").read_text().splitlines()]
    losses = []
    for name, factors in (("plain", [1, 1, 1, 1]), ("weighted", [3, 0, 0.5, 1])):
        source = write_rows(
            tmp_path / f"{name}.jsonl", [row | {"weight": w} for row, w in zip(rows, factors, strict=False)]
        )
        keys = (f"data.train={source}", "data.eval=[]", "train.eval_every_steps=null", "train.max_steps=1")
        train(whole_run(assets, tmp_path / name, *keys), console)
        losses.append(timeless(tmp_path / name)[0]["loss"])
    # At the first step every pair's loss is log 2.
    assert losses == pytest.approx([np.log(2), np.log(2) * 4.5 / 4], abs=1e-5)


def test_the_statistics_of_metrics_are_computed_on_logged_steps_alone_and_change_no_step(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bool] = []
    compute = vars(scorer)["token_logps"]

    def spied(*arguments: Any, wanted: Any, **options: Any) -> Any:
        measured.append(wanted.metrics)
        return compute(*arguments, wanted=wanted, **options)

    monkeypatch.setattr(scorer, "token_logps", spied)
    quiet = ("data.eval=[]", "train.eval_every_steps=null", "packing.token_budget=512", "train.max_steps=6")
    runs = {every: tmp_path / f"every-{every}" for every in (1, 3)}
    for every, directory in runs.items():
        steps: list[bool] = []
        recipe = whole_run(assets, directory, *quiet, f"logging.every_steps={every}")
        train(recipe, console, after_step=lambda _: steps.append(measured[-1]))  # noqa: B023
        assert steps == [step == 1 or step % every == 0 for step in range(1, 7)]  # a row each
    all_lines, some_lines = (timeless(directory, "train") for directory in runs.values())
    assert some_lines == [line for line in all_lines if line["step"] in (1, 3, 6)]
    assert all(torch.equal(weights(runs[1])[name], found) for name, found in weights(runs[3]).items())


@pytest.mark.parametrize("every_steps", [1, 5])
def test_a_stop_names_the_step_and_leaves_the_parameters_before_it(
    every_steps: int, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host learns of it when it logs; meanwhile no step changes anything."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    step = train_module.Trainer.accumulate_gradients

    def poisoned(session: Any, batch: Any) -> Any:
        values = step(session, batch)
        parameter = next(session.state.scorer.parameters())
        (before if session.state.step < 3 else after).append(parameter.detach().clone())
        if session.state.step == 2:
            parameter.grad.view(-1)[0] = torch.inf
        return values

    monkeypatch.setattr(train_module.Trainer, "accumulate_gradients", poisoned)
    log = (f"logging.every_steps={every_steps}", "data.eval=[]", "train.eval_every_steps=null")
    with pytest.raises(
        RunError, match=r"step 3: .*rows of data\.train \(.*listed in .*nonfinite-step-000003\.json"
    ):
        train(whole_run(assets, tmp_path / "run", *log), console)
    assert read_json(tmp_path / "run" / "run.json")["status"] == "failed"
    assert len(before) == 3 and len(after) == (0 if every_steps == 1 else 2)
    assert all(torch.equal(parameter, before[-1]) for parameter in after)
    dumped = read_json(tmp_path / "run" / "nonfinite-step-000003.json")
    assert dumped["step"] == 3 and dumped["grad_norm"] == "inf" and len(dumped["pairs"]) == 4


def test_a_run_that_skips_goes_on_and_leaves_the_step_s_pairs(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train_module.Trainer.accumulate_gradients

    def poisoned(session: Any, batch: Any) -> Any:
        values = step(session, batch)
        if session.state.step == 2:
            next(session.state.scorer.parameters()).grad.fill_(torch.nan)
        return values

    monkeypatch.setattr(train_module.Trainer, "accumulate_gradients", poisoned)
    run = tmp_path / "run"
    train(whole_run(assets, run, "train.stop_on_nonfinite=false", "train.max_steps=6"), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert told.count("step 3: loss or gradient is not finite, and no update was made") == 1
    assert [path.name for path in run.glob("nonfinite-*")] == ["nonfinite-step-000003.json"]
    steps = [r for r in timeless(run) if r["split"] == "train"]
    assert [r["step"] for r in steps if r["grad_norm"] is None] == [3]  # NaN is not JSON
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    train(whole_run(assets, run, "train.max_steps=1"), console, overwrite=True)
    assert not list(run.glob("nonfinite-*"))  # of another run


def test_a_step_that_is_not_logged_reads_nothing_from_the_device(
    assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the gradients on; what the model's own forward does is its own affair."""
    step, records = train_module.Trainer.accumulate_gradients, train_module.Trainer.step_record
    logged = []

    def then_watch(session: Any, batch: Any) -> Any:
        values = step(session, batch)
        watching.enter_context(no_reads())
        return values

    def one_step(session: Any, batch: Any) -> Any:
        outcome = whole_step(session, batch)
        watching.close()
        return outcome

    def record(session: Any, batch: Any, outcome: Any) -> Any:
        logged.append(session.state.step)
        return records(session, batch, outcome)

    watching, whole_step = contextlib.ExitStack(), train_module.Trainer.train_step
    monkeypatch.setattr(train_module.Trainer, "accumulate_gradients", then_watch)
    monkeypatch.setattr(train_module.Trainer, "train_step", one_step)
    monkeypatch.setattr(train_module.Trainer, "step_record", record)
    train(whole_run(assets, tmp_path / "run", "logging.every_steps=3"), console)
    assert logged == [1, 3, 6]
    assert [r["step"] for r in timeless(tmp_path / "run") if r["split"] == "train"] == [1, 3, 6]


def test_a_line_has_seconds_by_phase_that_add_up_and_the_part_of_the_peak(straight: Path) -> None:
    steps = [r for r in records(straight) if r["split"] == "train"]
    for line in steps:
        phases = sum(line[f"seconds/{phase}"] for phase in ("data", "forward", "backward", "optimizer"))
        assert 0.5 * line["seconds"] < phases <= line["seconds"]
        assert 0 < line["mfu"] < 1
        assert line["rewards/margins_p10"] <= line["rewards/margins_p50"] <= line["rewards/margins_p90"]
    totals = read_json(straight / "run.json")["totals"]
    part = sum(line["mfu"] * line["seconds"] for line in steps) / totals["train_seconds"]
    assert 0 < totals["mfu"] < 1 and totals["mfu"] == pytest.approx(part, rel=1e-10, abs=0)
    # Each second is counted once: a step's time has no evaluation in it, and no other step.
    parts = totals["startup_seconds"] + totals["train_seconds"] + totals["eval_seconds"]
    assert min(totals["startup_seconds"], totals["train_seconds"], totals["eval_seconds"]) > 0
    assert parts <= totals["seconds"]


def test_docs_define_every_number_of_metrics_jsonl(straight: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").read_text()
    first_columns = " ".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))
    defined = set(re.findall(r"`(.+?)`", first_columns))
    for line in records(straight):
        undefined = line.keys() - defined - {"split", "source", "step"}
        assert not undefined, f"add a row for {undefined} to the tables of docs/metrics.md"


def test_warnings_are_told_once_and_are_in_run_json_and_not_repeated_after_resuming(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    # A reference that is another model: the first loss is far from log 2.
    tiny_checkpoint(tmp_path / "reference", seed=5)
    overrides = (f"reference.path={tmp_path / 'reference'}", "loss.beta=1", "train.max_steps=4")
    recipe = whole_run(assets, tmp_path / "run", *overrides)
    stop_after(2, recipe, console)
    train(recipe, console)
    assert console.file.getvalue().count("Warning: the first loss is") == 1  # type: ignore[attr-defined]
    assert read_json(tmp_path / "run" / "run.json")["warnings"] == ["high_initial_loss"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "warnings" in line] == [1]


@pytest.fixture(autouse=True)
def _signals_are_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
