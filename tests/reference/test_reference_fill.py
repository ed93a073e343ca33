"""Filling the cache: how the token budget of its rows is found, kept and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.reference_pairs import NAMESPACE, SETTINGS, SmallMemory, load_scorer, make_table, random_pairs

import dpo_pack.reference.compute as reference_pass
from dpo_pack.model.facts import model_shape
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import BudgetSearch, fill_cache, find_work
from dpo_pack.system.files import read_json


def fill(
    directory: Path,
    scorer: CompletionLogps,
    console: Console,
    *,
    is_exact: Callable[[int], bool] = lambda token_budget: True,
    memo: str = "memo.json",
) -> int | None:
    """Fills a cache with a search for the longest rows; returns the token budget that is remembered."""
    cache, tables = ReferenceCache(directory, NAMESPACE), [make_table(random_pairs(30))]
    search = BudgetSearch(memo_path=directory / memo, key="model on device", is_exact=is_exact)
    work, shape = find_work(cache, tables), model_shape(scorer.model)
    settings = replace(SETTINGS, token_budget=50)
    fill_cache(cache, work, scorer, shape, settings, search=search, console=console)
    assert find_work(cache, tables).missing.sum() == 0
    return (read_json(directory / memo) or {}).get("model on device")


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_largest_budget_that_fits_is_found_used_and_remembered(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 400)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=210)
    assert fill(tmp_path, scorer, console) == 200
    assert "rows of up to 200 tokens" in text_of(console)
    assert [tokens > 210 for tokens in scorer.rows].count(True) == 1  # tried once, and never again
    again = SmallMemory(load_scorer(model_path), most_tokens=210)
    assert fill(tmp_path / "second", again, console, memo="../memo.json") == 200
    assert max(again.rows) <= 200 and len(again.rows) == len(scorer.rows) - 2  # nothing was measured


@pytest.mark.parametrize("content", ['{"model on device": "many"}', '{"model on device": 0}', "[1]", '{"m'])
def test_a_damaged_memo_is_forgotten(
    content: str, model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 120)  # fits
    (tmp_path / "memo.json").write_text(content)
    assert fill(tmp_path, load_scorer(model_path), console) == 120


def test_the_search_stays_within_what_the_model_is_exact_for(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 200)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=10_000)
    assert fill(tmp_path, scorer, console, is_exact=lambda token_budget: token_budget <= 110) == 100
    assert 50 < max(scorer.rows) <= 100


def test_memory_that_runs_out_later_is_told_and_remembered(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 200)
    remembered = fill(tmp_path, SmallMemory(load_scorer(model_path), most_tokens=210, fails_at=(3,)), console)
    assert remembered is not None and 50 <= remembered <= 100
    assert f"reference.token_budget={remembered}" in text_of(console)


@pytest.mark.gpu
def test_on_a_gpu_rows_shrink_until_they_fit(model_path: Path, tmp_path: Path, console: Console) -> None:
    device = torch.device("cuda")
    scorer = load_scorer(model_path).to(device)
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        cache = ReferenceCache(tmp_path, NAMESPACE)
        table = make_table(random_pairs(200_000))
        search = BudgetSearch(memo_path=tmp_path / "memo.json", key="k", is_exact=lambda budget: True)
        settings = replace(SETTINGS, token_budget=1024, device=device)
        fill_cache(
            cache,
            find_work(cache, [table]),
            scorer,
            model_shape(scorer.model),
            settings,
            search=search,
            console=console,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1024 < read_json(tmp_path / "memo.json")["k"] < reference_pass.LARGEST_TOKEN_BUDGET
