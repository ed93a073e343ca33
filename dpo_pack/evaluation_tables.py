"""Evaluations as a person reads them, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dpo_pack.evaluate import Comparison
from dpo_pack.held_out import HeldOutResult

_METRICS = {
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "loss": "loss",
    "kl/chosen": "log-ratio of chosen",
    "kl/rejected": "log-ratio of rejected",
}
# Of LENGTH_BUCKETS, short enough for 80 columns.
_RATIOS = {
    "chosen_under_half": "below 1/2",
    "chosen_shorter": "to 1/1.1",
    "similar_length": "to 1.1",
    "chosen_longer": "to 2",
    "chosen_over_twice": "2 and up",
}
_BREAKDOWNS = {"by_source": "by source", "by_length": "by chosen tokens / rejected tokens"}
_INTERVALS = "Intervals: 95 %, bootstrap over pairs"


def render_results(results: Mapping[str, HeldOutResult], console: Console) -> None:
    """Means with intervals of each held-out set, by source and by which completion is longer."""
    for name, result in results.items():
        record = result.record
        table = _table(f"{name}: {record['pairs']:,} pairs", "mean", "interval")
        for metric, words in _METRICS.items():
            if metric in record:
                table.add_row(words, f"{record[metric]:.3f}", _interval(record, metric))
        console.print(table)
        _print_parts(record, console, sign="")
        if "length/prefers_longer" in record:
            console.print(
                f"Rewards prefer the longer completion in {record['length/prefers_longer']:.1%} of pairs, "
                f"the data does in {record['length/chosen_longer']:.1%}"
            )
    console.print(_INTERVALS)


def render_comparisons(
    comparisons: Mapping[str, Comparison], models: tuple[str, str], console: Console
) -> None:
    """Both models, and the paired difference: the second minus the first."""
    for name, comparison in comparisons.items():
        one, other, difference = comparison.first.record, comparison.second.record, comparison.difference
        table = _table(f"{name}: {one['pairs']:,} pairs", "A", "B", "B - A", "interval")
        for metric, words in _METRICS.items():
            if metric in one:
                means = (f"{one[metric]:.3f}", f"{other[metric]:.3f}", f"{difference[metric]:+.3f}")
                table.add_row(words, *means, _interval(difference, metric, sign="+"))
        console.print(table)
        _print_parts(difference, console, sign="+")
    console.print(f"A: {models[0]}\nB: {models[1]}")
    console.print(f"{_INTERVALS}; those of B - A over each pair's own difference")


def _print_parts(record: Mapping[str, Any], console: Console, *, sign: str) -> None:
    """Accuracy and margin by source and by length."""
    for breakdown, words in _BREAKDOWNS.items():
        parts = record.get(breakdown, {})
        if not parts:
            continue
        title = f"B - A, {words}" if sign else words
        table = _table(title, "pairs", "accuracy", "interval", "margin", "interval")
        for part, summary in parts.items():
            cells = [
                cell
                for metric in ("rewards/accuracies", "rewards/margins")
                for cell in (f"{summary[metric]:{sign}.3f}", _interval(summary, metric, sign=sign))
            ]
            label = _RATIOS[part] if breakdown == "by_length" else part
            table.add_row(label, f"{summary['pairs']:,}", *cells)
        console.print(table)


def _interval(summary: Mapping[str, Any], metric: str, *, sign: str = "") -> str:
    low, high = summary["intervals"][metric]
    return f"{low:{sign}.3f} to {high:{sign}.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.min_width = len(title)  # or a title wider than its table is broken
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def results_json(results: Mapping[str, HeldOutResult]) -> dict[str, Any]:
    """The record of each held-out set by name."""
    return {name: result.record for name, result in results.items()}


def comparisons_json(comparisons: Mapping[str, Comparison], models: tuple[str, str]) -> dict[str, Any]:
    """`a`, `b` and `difference` (b - a) of each held-out set by name."""
    return {
        name: {
            "a": {"model": models[0], **comparison.first.record},
            "b": {"model": models[1], **comparison.second.record},
            "difference": comparison.difference,
        }
        for name, comparison in comparisons.items()
    }
