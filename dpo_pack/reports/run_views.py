"""What the page of a run shows, or of several runs over each other: tables, and curves for assets/run.js."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpo_pack.reports.evaluation_tables import METRIC_NAMES, estimate, pairs_and_prompts
from dpo_pack.reports.run_files import RunFiles
from dpo_pack.reports.tables import Cells
from dpo_pack.system.console import format_rate, format_seconds

_Values = list[float | None]

# The metrics of each chart, by its title. A metric of evaluations, which have intervals, begins with "eval ".
CHARTS = {
    "Loss, held out": ("eval loss",),
    "Reward accuracy, held out": ("eval rewards/accuracies",),
    "Reward margin, held out": ("eval rewards/margins",),
    "Wins against the start, held out": ("eval online/win_rate",),
    "Score, held out": ("eval online/scores",),
    "Score above the start's, held out": ("eval online/score_gain",),
    "Loss": ("loss",),
    "Reward accuracy": ("rewards/accuracies",),
    "Reward margin": ("rewards/margins",),
    "Reward margin, lowest and highest tenth": ("rewards/margins_p10", "rewards/margins_p90"),
    "Rewards": ("rewards/chosen", "rewards/rejected"),
    "Log-probs of a completion, in nats": ("logps/chosen", "logps/rejected"),
    "Gradient norm before clipping": ("grad_norm",),
    "Learning rate": ("learning_rate",),
    "Entropy, in nats a token": ("entropy",),
    "Scores of completions": ("online/scores", "online/scores_best", "online/scores_worst"),
    "Tokens of a completion": ("online/completion_tokens",),
    "Share of completions that end, and that differ": ("online/eos_rate", "online/distinct_rate"),
    "Age of the pairs, in steps": ("online/staleness", "online/staleness_max"),
    "Prompts so far": ("online/total_prompts", "online/total_paired", "online/total_unpaired"),
    "Pairs left out so far": ("online/total_ties", "online/total_duplicates", "online/total_stale_pairs"),
    "Failures so far": ("online/total_generator_failures", "online/total_judge_failures"),
    "Seconds by phase": ("seconds/data", "seconds/forward", "seconds/backward", "seconds/optimizer"),
    "Pairs a second": ("pairs_per_second",),
    "Tokens a second": ("tokens_per_second",),
}


def held_out_names(runs: Sequence[RunFiles]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.evals))


def runs_cells(runs: Sequence[RunFiles]) -> Cells:
    """Returns a row for each run: how far it came and how fast."""
    rows = []
    for run in runs:
        totals = run.info.get("totals", {})
        numbers = (f"{totals.get('steps', 0):,}", f"{totals.get('pairs', 0):,}")
        speed = (
            format_seconds(totals.get("train_seconds", 0)),
            format_rate(totals.get("pairs_per_second", 0)),
        )
        rows.append((run.name, str(run.info["status"]), *numbers, *speed))
    return Cells(("run", "status", "steps", "pairs", "time of steps", "pairs/s"), rows)


def differing_keys(runs: Sequence[RunFiles]) -> Cells:
    """Returns the keys of the recipes and of run.json's versions that differ, with each run's value."""
    also = ("dpo_pack", "versions", "devices", "git_commit")
    flat = [dict(_flat({**run.recipe, **{key: run.info.get(key) for key in also}})) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key != "output_dir"]
    rows = [[key, *(_as_in_yaml(one.get(key)) for one in flat)] for key in keys]
    return Cells(["key", *(run.name for run in runs)], [row for row in rows if len(set(row[1:])) > 1])


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        dotted = f"{key}.{name}" if key else str(name)
        listed = item if isinstance(item, list) else [item]
        nested = any(isinstance(each, Mapping) for each in listed)
        yield from _flat(item, dotted) if nested else [(dotted, item)]


def _as_in_yaml(value: Any) -> str:
    """Returns the text of a value. A key without a value, null, and a key that is not there look alike."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def evaluation_cells(runs: Sequence[RunFiles], name: str) -> Cells:
    """Returns the last evaluation of each run on a held-out set; of a single run the first one, too."""
    measured = [run for run in runs if name in run.evals]
    lines = {f"{run.name}, step {run.evals[name][-1]['step']}": run.evals[name][-1] for run in measured}
    if len(runs) == 1:
        lines = {f"after step {line['step']}": line for line in (runs[0].evals[name][0], *lines.values())}
    rows = [("measured on", *(pairs_and_prompts(line) for line in lines.values()))]
    for metric, words in METRIC_NAMES.items():
        if any(metric in line for line in lines.values()):
            estimates = (estimate(line, metric) for line in lines.values())
            rows.append((words, *(f"{mean} ({interval})" if mean else "" for mean, interval in estimates)))
    return Cells(("", *lines), rows)


def sample_rows(runs: Sequence[RunFiles]) -> dict[tuple[str, str], dict[str, str]]:
    """Returns for source and prompt of each sample its latest completions, by name: of a single run those
    before and after training, of several runs the latest one of each run."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for run in runs:
        for sample in run.samples:
            is_start = sample["model"] == "start"
            name = run.name if len(runs) > 1 else "before training" if is_start else "after training"
            if len(runs) == 1 or not is_start:
                rows.setdefault((sample["source"], sample["prompt"]), {})[name] = sample["completion"]
    return rows


def chart_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns what assets/run.js draws. A curve names its steps by their position in "steps".

    Its values are [values], or of an evaluation [values, lower bounds, upper bounds].
    """
    metrics = [metric for chart in CHARTS.values() for metric in chart]
    tracks: list[tuple[int, list[str], Sequence[Any], dict[str, Any]]] = []  # run, its names, steps, values
    for number, run in enumerate(runs):
        names = [run.name] if len(runs) > 1 else []
        curves = {metric: [_rounded(run.curves[metric])] for metric in metrics if metric in run.curves}
        tracks.append((number, names, run.curves["step"], curves))
        for held_out, lines in run.evals.items():
            there = {metric for line in lines for metric in line.get("intervals", {})}
            values = {f"eval {metric}": _with_interval(lines, metric) for metric in there}
            tracks.append((number, [*names, held_out], [line["step"] for line in lines], values))
    charts = []
    for title, of_chart in CHARTS.items():
        drawn = []
        for place, (number, names, _, values) in enumerate(tracks):
            for metric in (metric for metric in of_chart if metric in values):
                words = [*names, metric.rpartition("/")[2].replace("_", " ")] if len(of_chart) > 1 else names
                label = " ".join(words) or "training"
                drawn.append({"run": number, "label": label, "steps": place, "values": values[metric]})
        if drawn:
            charts.append({"title": title, "is_log": "grad_norm" in of_chart, "curves": drawn})
    return {
        "num_runs": len(runs),
        "steps": [steps for _, _, steps, _ in tracks],
        "charts": charts,
        "warnings": sorted({step for run in runs for step, _ in run.warnings}),
        "lines_per_point": max(run.lines_per_point for run in runs),
    }


def _with_interval(lines: Sequence[Mapping[str, Any]], metric: str) -> list[_Values]:
    intervals = [line.get("intervals", {}).get(metric) or (None, None) for line in lines]
    columns = [[line.get(metric) for line in lines], *zip(*intervals, strict=True)]
    return [_rounded(column) for column in columns]


def _rounded(values: Sequence[float | None]) -> _Values:
    return [None if value is None else float(f"{value:.5g}") for value in values]
