"""Evaluations in the terminal: titles that tell a model from a difference, and tables on narrow screens."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console
from support.whole_runs import text

from dpo_pack.reports.evaluation_tables import BREAKDOWNS, render_comparisons, render_results
from dpo_pack.reports.tables import Cells, terminal_table
from dpo_pack.training.held_out import Comparison, HeldOutResult, PairTraits, compare_results, means_by_group


def result(*margins: float) -> HeldOutResult:
    numbers = np.array(margins)
    metrics = {"rewards/accuracies": (numbers > 0).astype(np.float64), "rewards/margins": numbers}
    sources = np.arange(len(numbers)) % 2
    traits = PairTraits(
        chosen_tokens=numbers + 10, rejected_tokens=numbers * 0 + 10,
        source_indices=sources, source_names=("books", "web"), prompts=np.arange(len(numbers)),
    )  # fmt: skip
    record = means_by_group(metrics, traits, seed=0)
    return HeldOutResult(
        name="held",
        pair_keys=[],
        row_numbers=np.arange(len(numbers)),
        metrics=metrics,
        traits=traits,
        record=record,
    )


def lines(shown: str) -> set[str]:
    return {line.strip() for line in shown.splitlines()}


def test_the_tables_of_parts_say_whether_they_are_of_a_model_or_of_a_difference(console: Console) -> None:
    one, other = result(1.0, -2.0, 3.0), result(2.0, 1.0, -3.0)
    render_results({"held": one}, console)
    of_model = text(console)
    assert lines(of_model) >= {"held: 3 pairs", *BREAKDOWNS.values()} and "B - A" not in of_model
    compared = Comparison(first=one, second=other, difference=compare_results(one, other, seed=0))
    render_comparisons({"held": compared}, ("a", "b"), console)
    of_difference = lines(text(console).removeprefix(of_model))
    assert of_difference >= {"held: 3 pairs", *(f"B - A, {words}" for words in BREAKDOWNS.values())}


@pytest.mark.parametrize("no_wrap", [True, False])
def test_a_narrow_screen_wraps_every_column_or_only_the_first_one_and_cuts_nothing(no_wrap: bool) -> None:
    cells = Cells(("", "mean", "interval"), [("a source of long names", "0.125", "0.100 to 0.200")])
    stream = io.StringIO()
    table = terminal_table("held", cells, no_wrap=True) if no_wrap else terminal_table("held", cells)
    Console(file=stream, width=36).print(table)
    shown = stream.getvalue()
    assert all(word in shown for row in cells.rows for cell in row for word in cell.split())
    assert "a source of long names" not in shown and ("0.100 to 0.200" in shown) == no_wrap
