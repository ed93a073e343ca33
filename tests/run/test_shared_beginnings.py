"""Runs whose prompts have a system prompt in common: the same steps with fewer tokens, and what is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.rows import write_rows
from support.run_files import records
from support.tiny_online import online_recipe
from support.tiny_run import tiny_run
from support.whole_runs import stop_after

import dpo_pack
from dpo_pack.online.source import OnlineSource
from dpo_pack.recipe import schema
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run import pairs
from dpo_pack.run import setup as run_setup
from dpo_pack.run.log import describe_training
from dpo_pack.run.models import CPU
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.rollouts import build_online
from dpo_pack.run.setup import load_proved, prepare
from dpo_pack.system.machine import AvailableMemory
from dpo_pack.trainer import train

AUTO = ("data.max_length=256", "packing.token_budget=auto")
LORA = ("model.lora={r: 2, dropout: 0.1}", "optim.lr=1e-4")
SYSTEM = "one two three sun moon bread water red green blue " * 6


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tiny_run(tmp_path)
    for name in ("pairs.jsonl", "heldout.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        write_rows(tmp_path / name, [{**row, "prompt": SYSTEM + row["prompt"]} for row in rows])
    return path


def run(path: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """Lines of the run's steps, and what it prints."""
    settings = ("data.max_length=256", "packing.token_budget=auto", f"output_dir=${{recipe_dir}}/{name}")
    console = Console(record=True, width=200, file=io.StringIO())
    recipe = load_recipe(path, (*settings, *overrides))
    train(recipe, console)
    return records(recipe.output_dir, "train"), console.export_text()


def test_a_system_prompt_is_computed_once_in_a_row_and_the_steps_stay_the_same(recipe_path: Path) -> None:
    shared, printed = run(recipe_path, "shared")
    alone, printed_alone = run(recipe_path, "alone", "packing.share_prompt=false")
    for ours, theirs in zip(shared, alone, strict=True):
        for name in ("loss", "grad_norm", "logps/chosen", "rewards/margins"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), name
        assert ours["tokens"] < theirs["tokens"] / 5
    assert " between pairs" in printed and " between pairs" not in printed_alone
    (line,) = (line for line in printed.splitlines() if "an epoch computes" in line)
    assert f"computes about {sum(step['tokens'] for step in shared):,} of " in line


def test_what_an_epoch_computes_is_said_to_be_an_estimate(recipe_path: Path, tmp_path: Path) -> None:
    for path, told in ((recipe_path, "computes about "), (tiny_run(tmp_path / "own"), "computes ")):
        setup = prepare(
            load_recipe(path, AUTO), console := Console(record=True, width=200, file=io.StringIO())
        )
        describe_training(setup, planned := offline_source(setup))
        assert f"{told}{planned.first_plan.count_tokens():,} of " in console.export_text()


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        (AUTO, (4000, 4096)),
        ((*AUTO, "packing.token_budget=100"), (100, 4096)),
        ((*AUTO, "reference.token_budget=100"), (4000, 100)),
        ((*AUTO, *LORA), (2048, 4096)),
        ((*AUTO, "packing.share_prompt=false"), (2048, 4096)),
        ((*AUTO, "packing.mode=padded"), (2048, 4096)),
    ],
)
def test_the_automatic_budgets_on_a_cpu_are_four_beginnings_where_rows_share_them(
    recipe_path: Path, settings: tuple[str, ...], budgets: tuple[int, int]
) -> None:
    recipe = load_recipe(recipe_path, settings)
    assert recipe.token_budgets("cpu", 1000) == budgets
    trained, others = ((16_400 if number in (4000, 4096) else number) for number in budgets)
    shares = recipe.packing.share_prompt and recipe.packing.mode == "packed"
    assert recipe.token_budgets("cpu", 4100) == (trained, others if shares else 4096)
    usual = recipe.token_budgets("cpu")
    assert recipe.token_budgets("cpu", 4100, lambda budget: budget < 16_400) == usual
    on_cuda = recipe.token_budgets("cuda", 4100)[0]
    assert on_cuda == (8192 if recipe.packing.token_budget == "auto" else 100)


def test_every_command_has_the_same_automatic_budget(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(schema.TRAINED_TOKENS, "cpu", 256)
    setup = prepare(load_recipe(recipe_path, AUTO), Console(quiet=True))
    four = 4 * int(setup.data.train.beginning_lengths.max())
    assert four > 256 and setup.token_budget == offline_source(setup).token_budget == four
    changed: dict[str, Any] = {"data.max_length": 256, "packing.token_budget": "auto"}
    assert dpo_pack.inspect_packing(recipe_path, **changed)["token_budget"] == four
    assert dpo_pack.inspect_packing(recipe_path, memory=10**9, **changed)["token_budget"] == 8192
    row = dpo_pack.show(recipe_path, quiet=False, **changed).report["packed_row"]
    assert row["token_budget"] == four
    short = "% full; where memory is short, a run has rows of up to 256)"
    assert short in " ".join(capsys.readouterr().out.split())
    gpus = {"optim.name": "adamw_8bit", **changed}  # which no run here can have
    assert dpo_pack.inspect_packing(recipe_path, **gpus)["token_budget"] == four
    online = prepare(
        online_recipe(tmp_path, tmp_path / "online", *AUTO), Console(quiet=True), takes_prompts=True
    )
    assert online.token_budget == 4 * int(online.data.train.beginning_lengths.max()) > 256
    source, _ = build_online(online, load_proved(online), directory=tmp_path / "rollouts")
    assert isinstance(source, OnlineSource) and source.token_budget == online.token_budget


def test_what_fits_on_a_gpu_is_remembered_for_pairs_that_share_as_much(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="a GPU", total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def key(path: Path, *overrides: str) -> str:
        setup = prepare(load_recipe(path, (*AUTO, *overrides)), Console(quiet=True))
        return pairs._budget_search(setup, setup.policy_facts).key

    own, parent = tiny_run(tmp_path / "own"), "${recipe_dir}/.."
    shared = (f"data.train.0.path={parent}/pairs.jsonl", f"data.eval.0.path={parent}/heldout.jsonl")
    assert key(own) != key(recipe_path) == key(own, *shared)


def test_the_memory_of_the_machine_decides_and_not_what_is_free(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schema.TRAINED_TOKENS, "cpu", 256)

    def budget(free: int, total: int, *overrides: str) -> int:
        memory = AvailableMemory(free=free, total=total)
        monkeypatch.setattr(run_setup, "available_memory", lambda device: memory)
        recipe = load_recipe(recipe_path, (*AUTO, *overrides))
        return prepare(recipe, Console(quiet=True), for_device=CPU).token_budget

    assert budget(free=2**20, total=2**34) == budget(free=2**34, total=2**34) > 256
    assert budget(free=2**26, total=2**26) == 256
    least = next(total for total in range(2**28, 2**34, 2**26) if budget(0, total) > 256)
    two = "distributed.num_processes=2"  # the rows of a run in which two processes divide this memory
    assert budget(0, 3 * least // 2, two) == 256 < budget(0, 2 * least, two)


def test_a_resumed_run_says_that_its_automatic_budget_is_another(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(1, load_recipe(recipe_path, (*AUTO, "output_dir=${recipe_dir}/run")))
    monkeypatch.setitem(schema.TRAINED_TOKENS, "cpu", 128)
    monkeypatch.setattr(run_setup, "_ROWS_SHARE", 0.0)
    _, printed = run(recipe_path, "run")
    assert "packing.token_budget 2,048 then, 128 now" in printed
