"""Shows evaluations as tables in the terminal, or returns them for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpo_pack.reports.tables import Cells, terminal_table
from dpo_pack.training.health import what_can_be_told

if TYPE_CHECKING:  # these modules import torch; run pages use this file without torch
    from dpo_pack.training.held_out import HeldOutResult

METRIC_NAMES = {
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "loss": "loss",
    "kl/chosen": "KL of chosen",
    "kl/rejected": "KL of rejected",
    "online/win_rate": "wins against the start",
    "online/scores": "score",
    "online/score_gain": "score above the start's",
}
BREAKDOWNS = {"by_source": "by source", "by_length": "by length of chosen, compared with rejected"}
_INTERVALS = "Intervals: 95 %, bootstrap over prompts"


def render_results(results: Mapping[str, HeldOutResult], console: Console) -> None:
    """Prints means and intervals of each held-out set, also by source and by length ratio."""
    for name, result in results.items():
        record = result.record
        rows = [
            (words, *estimate(record, metric)) for metric, words in METRIC_NAMES.items() if metric in record
        ]
        title = f"{name}: {pairs_and_prompts(record)}"
        console.print(terminal_table(title, Cells(("", "mean", "interval"), rows), no_wrap=True))
        _print_parts(record, console, sign="")
        if told := what_can_be_told(record):
            console.print(f"{told}.")
        if "length/prefers_longer" in record:
            console.print(
                f"Rewards prefer the longer completion in {record['length/prefers_longer']:.1%} of pairs, "
                f"the data does in {record['length/chosen_longer']:.1%}"
            )
    console.print(_INTERVALS)


def render_comparisons(sets: Mapping[str, Mapping[str, Any]], console: Console, *, beta: float) -> None:
    """Prints the metrics of models `a` and `b` and their paired `difference` on each held-out set."""
    for name, found in sets.items():
        one, other, difference = found["a"], found["b"], found["difference"]
        rows = [
            (words, f"{one[metric]:.3f}", f"{other[metric]:.3f}", *estimate(difference, metric, sign="+"))
            for metric, words in METRIC_NAMES.items()
            if metric in one
        ]
        title = f"{name}: {pairs_and_prompts(one)}"
        console.print(terminal_table(title, Cells(("", "A", "B", "B - A", "interval"), rows), no_wrap=True))
        _print_parts(difference, console, sign="+")
        console.print(f"B - A: {what_can_be_told(difference, without_effect=0.0)}.")
        console.print(f"Rewards: beta {beta:g} x log-ratio to the recipe's reference")
    console.print(f"A: {one['model']}")
    console.print(f"B: {other['model']}")
    console.print(f"{_INTERVALS}; those of B - A are of each pair's own difference")


def _print_parts(record: Mapping[str, Any], console: Console, *, sign: str) -> None:
    for breakdown, words in BREAKDOWNS.items():
        cells = part_cells(record, breakdown, sign=sign)
        if cells.rows:
            title = f"B - A, {words}" if sign else words
            console.print(terminal_table(title, cells, no_wrap=True))


def part_cells(record: Mapping[str, Any], breakdown: str, *, sign: str = "") -> Cells:
    """Returns accuracy and margin by source or by length ratio; `breakdown` is a key of BREAKDOWNS."""
    rows = [
        (
            _shortened(part) if breakdown == "by_length" else part,
            f"{summary['pairs']:,}",
            *estimate(summary, "rewards/accuracies", sign=sign),
            *estimate(summary, "rewards/margins", sign=sign),
        )
        for part, summary in record.get(breakdown, {}).items()
    ]
    return Cells(("", "pairs", "accuracy", "interval", "margin", "interval"), rows)


def _shortened(bucket: str) -> str:
    """Returns the name of one of LENGTH_BUCKETS so that tables fit 80 columns."""
    return bucket.removeprefix("chosen_").removesuffix("_length").replace("_", " ")


def estimate(summary: Mapping[str, Any], metric: str, *, sign: str = "") -> tuple[str, str]:
    """Returns mean and interval as texts. With `sign` "+", positive numbers have a sign too.

    The texts are empty if a number is null, which metrics.jsonl has for a number that is not finite.
    """
    low, high = summary.get("intervals", {}).get(metric) or (None, None)
    if None in (summary.get(metric), low, high):
        return "", ""
    return f"{summary[metric]:{sign}.3f}", f"{low:{sign}.3f} to {high:{sign}.3f}"


def pairs_and_prompts(record: Mapping[str, Any]) -> str:
    """Returns the number of pairs, and that of their prompts if pairs share prompts. Online: of prompts."""
    num_pairs = record.get("pairs", 0)
    num_prompts = record.get("prompts", num_pairs)  # earlier releases wrote no number of prompts
    pairs, prompts = f"{num_pairs:,} pairs", f"{num_prompts:,} prompts"
    return prompts if not num_pairs else pairs if num_pairs == num_prompts else f"{pairs} of {prompts}"
