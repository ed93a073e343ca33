"""Evaluations in the terminal: titles that tell a model from a difference, and a sentence for online runs."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from support.whole_runs import text

from dpo_pack.online.win_rate import win_rate_sentence
from dpo_pack.reports.evaluation_tables import BREAKDOWNS, render_comparisons, render_results
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


def test_a_record_of_an_online_evaluation_is_told_with_its_win_rate_or_says_that_there_is_no_score() -> None:
    record = {
        "prompts": 1200, "failures": 3, "online/win_rate": 0.625, "online/scores": 1.5,
        "online/score_gain": 0.25,
        "intervals": {"online/win_rate": (0.5, 0.75), "online/score_gain": (-0.125, 0.625)},
    }  # fmt: skip
    assert win_rate_sentence(record) == (
        "wins 0.625 (0.500 to 0.750) against the starting policy, score 1.500, gain +0.250 (-0.125 to "
        "+0.625), 3 prompts failed"
    )
    assert win_rate_sentence({"prompts": 1200}) == "no score for any of 1,200 prompts"
