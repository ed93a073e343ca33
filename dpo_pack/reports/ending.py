"""What a run prints at its end: what was learned, samples before and after, warnings, what to do next."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dpo_pack.reports.completions import render_completions
from dpo_pack.reports.evaluation_tables import METRIC_NAMES, estimate
from dpo_pack.reports.tables import Cells, terminal_table
from dpo_pack.run.run_dir import RECIPE_FILE, RunDir
from dpo_pack.run.samples import before_and_after

_MOST_SAMPLES = 2
_METRICS = ("rewards/accuracies", "rewards/margins", "online/win_rate", "online/scores")


def print_ending(
    run: RunDir, evaluation: Mapping[str, Mapping[str, Any]], warnings: Sequence[str], console: Console
) -> None:
    """Prints the ending of a finished run. `evaluation`: metrics of its final model, by held-out set."""
    if console.quiet:
        return
    _print_learned(_first_evaluation(run.metrics), evaluation, console)
    _print_samples(run, console)
    if warnings:
        console.print()
        console.print("Warnings of this run:")
        for warning in warnings:
            console.print(f"  {warning}")
    program, root = _program(), shlex.quote(str(run.root))
    console.print()
    console.print("Next:")
    console.print(f"  {program} sample {root}")
    if any("rewards/margins" in metrics for metrics in evaluation.values()):  # an online run has no pairs
        console.print(f"  {program} evaluate {shlex.quote(str(run.root / RECIPE_FILE))}")


def _print_learned(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], console: Console
) -> None:
    rows = []
    for held_out, metrics in after.items():
        for name in (name for name in _METRICS if name in metrics):
            first = before.get(held_out, {}).get(name)
            start = "" if first is None else f"{first:.3f}"
            rows.append((f"{held_out}: {METRIC_NAMES[name]}", start, *estimate(metrics, name)))
    if rows:
        cells = Cells(("", "before", "after", "95 % interval"), rows)
        console.print()
        console.print(terminal_table("What was learned, on held-out data", cells, no_wrap=True))
    if any(metrics.get("rewards/margins") == 0.0 for metrics in before.values()):
        console.print(
            "Before training, policy and reference are equal: each margin is 0, and a tie counts half."
        )


def _first_evaluation(metrics: Path) -> dict[str, dict[str, Any]]:
    """Returns the metrics before the first step, by held-out set; {} if metrics.jsonl has none."""
    found = {}
    with metrics.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["split"] != "eval" or record["step"] != 0:
                break
            found[record["source"]] = record
    return found


def _print_samples(run: RunDir, console: Console) -> None:
    both = before_and_after(run.samples)[:_MOST_SAMPLES]
    columns = {"before": [before for before, _ in both], "after": [after.completion for _, after in both]}
    render_completions([(after.source, after.prompt) for _, after in both], columns, console)


def _program() -> str:
    """Returns the word that starts dpopack in a shell: its path, if PATH does not have it."""
    called = sys.argv[0]
    if shutil.which("dpopack") is None and Path(called).name == "dpopack":
        return shlex.quote(called)
    return "dpopack"
