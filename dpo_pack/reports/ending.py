"""What a run prints at its end: what was learned, samples before and after, warnings, what to do next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dpo_pack.reports.evaluation_tables import METRIC_NAMES, estimate
from dpo_pack.reports.run_files import read_runs
from dpo_pack.reports.run_views import sample_rows
from dpo_pack.reports.tables import Cells, render_completions, terminal_table
from dpo_pack.training.health import what_can_be_told

_METRICS = ("rewards/accuracies", "rewards/margins", "online/win_rate", "online/scores")


def print_ending(
    root: Path, evaluation: Mapping[str, Mapping[str, Any]], warnings: Sequence[str], console: Console
) -> None:
    """Prints the ending of the finished run in `root`. `evaluation`: of its final model, by held-out set."""
    if console.quiet:
        return
    (run,) = read_runs([root])
    before = {name: lines[0] for name, lines in run.evals.items() if lines[0]["step"] == 0}
    rows = [
        (
            f"{held_out}: {METRIC_NAMES[name]}",
            f"{before[held_out][name]:.3f}" if name in before.get(held_out, {}) else "",
            *estimate(metrics, name),
        )
        for held_out, metrics in evaluation.items()
        for name in _METRICS
        if name in metrics
    ]
    if rows:
        cells = Cells(("", "before", "after", "95 % interval"), rows)
        console.print()
        console.print(terminal_table("What was learned, on held-out data", cells, no_wrap=True))
    for held_out, metrics in evaluation.items():
        if told := what_can_be_told(metrics):
            console.print(f"{held_out}: {told}.")
    if any(metrics.get("rewards/margins") == 0.0 for metrics in before.values()):
        console.print(
            "Before training, policy and reference are equal: each margin is 0, and a tie counts half."
        )
    both = [(prompt, texts) for prompt, texts in sample_rows([run]).items() if len(texts) == 2]
    pairs = [(prompt, texts) for prompt, texts in both if len(set(texts.values())) == 2]
    if both and not pairs:
        console.print("The samples are the same before and after training")
    prompts = [prompt for prompt, _ in pairs[:1]]
    columns = {name: [texts[f"{name} training"] for _, texts in pairs] for name in ("before", "after")}
    render_completions(prompts, columns, console)
    if warnings:
        console.print()
        console.print("Warnings of this run:")
        for warning in warnings:
            console.print(f"  {warning}")


def print_next(
    root: Path, evaluation: Mapping[str, Mapping[str, Any]], console: Console, *, has_images: bool
) -> None:
    """Prints the commands to look at the finished run in `root`, whose model has this evaluation."""
    program = "dpopack"
    if shutil.which(program) is None and Path(sys.argv[0]).name == program:  # PATH does not have it
        program = shlex.quote(sys.argv[0])
    console.print()
    console.print("Next:")
    asked = " --prompt TEXT" if has_images else ""
    console.print(f"  {program} sample {shlex.quote(str(root))}{asked}")
    if any("rewards/margins" in metrics for metrics in evaluation.values()):  # an online run has no pairs
        console.print(f"  {program} evaluate {shlex.quote(str(root / 'recipe.yaml'))}")
