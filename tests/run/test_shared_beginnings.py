"""Runs whose prompts have a system prompt in common: the same steps with fewer tokens, and what is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.rows import write_rows
from support.run_files import records
from support.tiny_run import tiny_run

from dpo_pack.recipe.data import PackingRecipe
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run import pairs
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.setup import prepare
from dpo_pack.system.machine import AvailableMemory
from dpo_pack.trainer import train

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
    assert f"computes {sum(step['tokens'] for step in shared):,} of " in line


def test_the_automatic_budget_of_rows_on_a_cpu_is_four_beginnings_if_these_fit(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (PackingRecipe().tokens("cuda"), PackingRecipe().tokens("cpu", 500)) == (8192, 2048)
    assert PackingRecipe(token_budget=100).tokens("cpu", 600) == 100
    recipe = load_recipe(recipe_path, ("data.max_length=256", "packing.token_budget=auto"))
    setup = prepare(recipe, Console(quiet=True))
    monkeypatch.setattr("dpo_pack.recipe.data.CPU_TOKEN_BUDGET", 256)
    longest = setup.data.longest_beginning
    assert longest > 64 and offline_source(setup).token_budget == 4 * longest
    nothing = AvailableMemory(free=2**20, total=2**30)
    monkeypatch.setattr(pairs, "available_memory", lambda device: nothing)
    assert offline_source(setup).token_budget == 256
