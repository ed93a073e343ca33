"""What a run prints at its end: what was learned, samples before and after, warnings, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dpo_pack.reports.run_files import read_runs, sample_rows
from dpo_pack.reports.tables import (
    INTERVALS,
    evaluation_cells,
    pairs_and_prompts,
    render_completions,
    terminal_table,
)
from dpo_pack.training.health import what_can_be_told


def print_ending(
    root: Path, evaluation: Mapping[str, Mapping[str, Any]], warnings: Sequence[str], console: Console
) -> None:
    """Prints the ending of the finished run in `root`. `evaluation`: of its final model, by held-out set."""
    if console.quiet:
        return
    (run,) = read_runs([root])
    before = {name: lines[0] for name, lines in run["evals"].items() if lines[0]["step"] == 0}
    for held_out, metrics in evaluation.items():
        columns = {"before": before[held_out]} if held_out in before else {}
        title = f"What was learned, on {held_out}: {pairs_and_prompts(metrics)}"
        console.print()
        console.print(terminal_table(title, evaluation_cells({**columns, "after": metrics}), no_wrap=True))
        if told := what_can_be_told(metrics):
            console.print(f"{INTERVALS}; {told}.")
    if any(metrics.get("rewards/margins") == 0.0 for metrics in before.values()):
        console.print(
            "Before training, policy and reference are equal: each margin is 0, and a tie counts half."
        )
    both = [(prompt, texts) for prompt, texts in sample_rows([run]).items() if len(texts) == 2]
    changed = [(prompt, texts) for prompt, texts in both if len(set(texts.values())) == 2]
    if both and not changed:
        console.print("The samples are the same before and after training")
    for prompt, texts in changed[:1]:
        render_completions([prompt], {name: [text] for name, text in texts.items()}, console)
    if warnings:
        console.print()
        console.print("Warnings of this run:")
        for warning in warnings:
            console.print(f"  {warning}")


def print_next(
    root: Path, evaluation: Mapping[str, Mapping[str, Any]], console: Console, *, has_images: bool
) -> None:
    """Prints the commands to look at the finished run in `root`, whose model has this evaluation."""
    console.print()
    console.print("Next:")
    console.print(f"  dpopack sample {shlex.quote(str(root))}{' --prompt TEXT' if has_images else ''}")
    if any("rewards/margins" in metrics for metrics in evaluation.values()):  # an online run has no pairs
        console.print(f"  dpopack evaluate {shlex.quote(str(root / 'recipe.yaml'))}")
