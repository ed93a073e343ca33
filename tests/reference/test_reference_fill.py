"""Filling the cache: how the budget is found, kept and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.reference_pairs import NAMESPACE, SETTINGS, SmallMemory, load_scorer, make_table, random_pairs

import dpo_pack.reference.fill as reference_fill
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.model.shape import model_shape
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import Amount
from dpo_pack.reference.fill import BudgetSearch, fill_cache, pass_progress, remembered_budget
from dpo_pack.reference.work import find_work


def fill(
    directory: Path,
    scorer: CompletionLogps,
    console: Console,
    *,
    is_exact: Callable[[int], bool] = lambda token_budget: True,
) -> None:
    cache, tables = ReferenceCache(directory, NAMESPACE), [make_table(random_pairs(30))]
    search = BudgetSearch(memo_path=directory / "memo.json", key="model on device", is_exact=is_exact)
    settings = replace(SETTINGS, token_budget=50)
    fill_cache(
        cache,
        find_work(cache, tables),
        scorer,
        model_shape(scorer.model),
        settings,
        search=search,
        console=console,
    )
    assert find_work(cache, tables).num_missing == 0


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_largest_budget_that_fits_is_found_used_and_remembered(
    model_path: Path, tmp_path: Path, console: Console
) -> None:
    scorer = SmallMemory(load_scorer(model_path), most_tokens=210)
    fill(tmp_path, scorer, console)
    assert remembered_budget(tmp_path / "memo.json", "model on device") == 200
    assert "rows of up to 200 tokens" in text_of(console)
    assert [tokens > 210 for tokens in scorer.rows].count(True) == 1  # tried once, and never again
    again = SmallMemory(load_scorer(model_path), most_tokens=210)
    (tmp_path / "second").mkdir()
    (tmp_path / "memo.json").rename(tmp_path / "second" / "memo.json")
    fill(tmp_path / "second", again, console)
    assert max(again.rows) <= 200 and len(again.rows) < len(scorer.rows)  # nothing was measured


def test_a_budget_that_memory_set_no_bound_to_is_not_remembered(
    model_path: Path, tmp_path: Path, console: Console
) -> None:
    fill(tmp_path, load_scorer(model_path), console)
    assert remembered_budget(tmp_path / "memo.json", "model on device") is None


def test_the_search_stays_within_what_the_model_is_exact_for(
    model_path: Path, tmp_path: Path, console: Console
) -> None:
    scorer = SmallMemory(load_scorer(model_path), most_tokens=10_000)
    fill(tmp_path, scorer, console, is_exact=lambda token_budget: token_budget <= 110)
    assert 50 < max(scorer.rows) <= 100


def test_rows_grow_no_further_than_the_largest_that_attention_takes(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_fill, "LARGEST_TOKEN_BUDGET", 120)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=10_000)
    fill(tmp_path, scorer, console)
    assert 100 < max(scorer.rows) <= 120
    assert remembered_budget(tmp_path / "memo.json", "model on device") == 120


def test_memory_that_runs_out_later_is_told_and_remembered(
    model_path: Path, tmp_path: Path, console: Console
) -> None:
    scorer = SmallMemory(load_scorer(model_path), most_tokens=210, fails_at=(7,))
    fill(tmp_path, scorer, console)
    remembered = remembered_budget(tmp_path / "memo.json", "model on device")
    assert remembered is not None and 50 <= remembered <= 100
    assert f"reference.token_budget={remembered}" in text_of(console)


# ---- What is told


def test_the_remaining_time_follows_estimated_flops(console: Console) -> None:
    now = 0.0
    total = Amount(num_sequences=40, num_pairs=20, num_tokens=4000, flops=100.0)
    with pass_progress(console, total, clock=lambda: now) as progress:
        now = 12.0
        # The longest pairs come first: a tenth of the pairs, but three tenths of the work.
        progress(Amount(num_sequences=4, num_pairs=2, num_tokens=1000, flops=30.0))
    assert text_of(console).splitlines() == [
        "  the rest will take about 28 s",
        "Reference pass: 28 s left, 2 of 20 pairs, 0.2 pairs/s, 1.0K of 4.0K tokens, 83 tokens/s",
    ]


def test_the_time_the_rest_takes_is_told_once_after_the_first_rows(
    console: Console,
) -> None:
    now = 0.0
    total = Amount(num_sequences=40, num_pairs=20, num_tokens=4000, flops=100.0)
    row = Amount(num_sequences=4, num_pairs=2, num_tokens=400, flops=10.0)
    with pass_progress(console, total, clock=lambda: now) as progress:
        for _ in range(10):
            now += 2.0
            progress(row)
    lines = text_of(console).splitlines()
    assert lines[0] == "  the rest will take about 16 s"
    assert lines[1].startswith("Reference pass: 10 s left, 10 of 20 pairs")
    assert len(lines) == 2


@pytest.mark.gpu
def test_on_a_gpu_rows_grow_until_its_memory_is_full(
    model_path: Path, tmp_path: Path, console: Console
) -> None:
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
    assert (remembered_budget(tmp_path / "memo.json", "k") or 0) > 1024
