"""The curves of a run's page, as plain values that assets/run.js draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpo_pack.reports.run_files import RunFiles, warnings_of

_MOST_POINTS = 2_000  # a curve has at most so many points
_MOST_POINTS_OF_ALL_RUNS = 8_000  # of one metric in all runs, so that a page of many runs stays small
INTERVALS = ("loss", "rewards/accuracies", "rewards/margins")  # evaluations have curves of these
ONLINE_INTERVALS = ("online/win_rate", "online/scores", "online/score_gain")  # on held-out prompts


class Chart(NamedTuple):
    """Metrics that share a chart. `of_many`: those that a page of several runs shows (default: all)."""

    title: str
    metrics: tuple[str, ...]
    of_many: tuple[str, ...] = ()
    is_log: bool = False


LEARNING = (
    Chart("Loss", ("loss",)),
    Chart(
        "Reward margin",
        ("rewards/margins", "rewards/margins_p10", "rewards/margins_p90"),
        of_many=("rewards/margins",),
    ),
    Chart("Reward accuracy", ("rewards/accuracies",)),
    Chart("Rewards", ("rewards/chosen", "rewards/rejected")),
    Chart("Log-probs of a completion, in nats", ("logps/chosen", "logps/rejected")),
    Chart("Gradient norm before clipping", ("grad_norm",), is_log=True),
    Chart("Learning rate", ("learning_rate",)),
    Chart("Entropy, in nats a token", ("entropy",)),
)
ONLINE = (
    Chart("Scores of completions", ("online/scores", "online/scores_best", "online/scores_worst")),
    Chart("Tokens of a completion", ("online/completion_tokens",)),
    Chart("Share of completions that end, and that differ", ("online/eos_rate", "online/distinct_rate")),
    Chart("Age of the pairs, in steps", ("online/staleness", "online/staleness_max")),
    Chart(
        "Prompts so far",
        ("online/total_prompts", "online/total_paired", "online/total_unpaired"),
    ),
    Chart(
        "Left out so far",
        (
            "online/total_ties", "online/total_duplicates", "online/total_stale_pairs",
            "online/total_generator_failures", "online/total_judge_failures",
        ),
    ),
)  # fmt: skip
COST = (
    Chart("Tokens a step", ("tokens",)),
    Chart(
        "Seconds of a step, by phase",
        ("seconds/data", "seconds/forward", "seconds/backward", "seconds/optimizer"),
        of_many=("seconds",),
    ),
    Chart("Pairs a second", ("pairs_per_second",)),
    Chart("Tokens a second", ("tokens_per_second",)),
)


def chart_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns what assets/run.js draws: curves of training and of evaluations, and steps of warnings."""
    charts = (*LEARNING, *COST, *online_charts(runs))
    metrics = {name for chart in charts for name in shown_metrics(chart, runs)}
    most = min(_MOST_POINTS, max(_MOST_POINTS_OF_ALL_RUNS // len(runs), 100))
    return {
        "runs": [
            {
                "name": run.name,
                "x": (curve := thinned(run.train, ("step", *sorted(metrics)), most))["step"],
                "y": {name: values for name, values in curve.items() if name != "step"},
                "warnings": [step for step, _ in warnings_of(run)],
            }
            for run in runs
        ],
        "sets": [
            {
                "run": number,
                "name": name,
                "x": [line["step"] for line in lines],
                "y": {metric: _interval_curves(lines, metric) for metric in interval_metrics([run])},
            }
            for number, run in enumerate(runs)
            for name, lines in run.evals.items()
        ],
    }


def thinned(
    lines: Sequence[Mapping[str, Any]], metrics: Sequence[str], most: int
) -> dict[str, list[float | None]]:
    """Returns at most `most` values of each metric, with 5 digits. A value is the mean over a group of lines.

    All groups have the same number of successive lines; the last may have fewer. Values that are not finite
    are left out of the mean. A metric that no line has is left out.
    """
    group = lines_per_point(len(lines), most)
    starts = range(0, len(lines), group)
    curves = {}
    for metric in metrics:
        values = [_number(line.get(metric)) for line in lines]
        if all(value is None for value in values):
            continue
        parts = ([v for v in values[start : start + group] if v is not None] for start in starts)
        curves[metric] = [_rounded(sum(part) / len(part)) if part else None for part in parts]
    if "step" in curves:  # a point is drawn at the last step of its group
        curves["step"] = [lines[min(start + group, len(lines)) - 1]["step"] for start in starts]
    return {"step": [], **curves}


def lines_per_point(num_lines: int, most: int = _MOST_POINTS) -> int:
    return max(1, -(-num_lines // most))


def shown_metrics(chart: Chart, runs: Sequence[RunFiles]) -> tuple[str, ...]:
    return chart.of_many if len(runs) > 1 and chart.of_many else chart.metrics


def online_charts(runs: Sequence[RunFiles]) -> tuple[Chart, ...]:
    """Returns the charts of metrics that only online runs log; () if no run is online."""
    names = {name for run in runs for line in run.train[:1] for name in line}
    charts = (
        chart._replace(metrics=tuple(metric for metric in chart.metrics if metric in names))
        for chart in ONLINE
    )
    return tuple(chart for chart in charts if chart.metrics)


def interval_metrics(runs: Sequence[RunFiles]) -> tuple[str, ...]:
    """Returns the metrics that evaluations show as curves: those of held-out pairs or of prompts."""
    there = {name for run in runs for lines in run.evals.values() for line in lines for name in line}
    return tuple(metric for metric in (*INTERVALS, *ONLINE_INTERVALS) if metric in there)


def measured_on(metrics: Sequence[str]) -> str:
    """Returns what evaluations with these metrics, those of `interval_metrics`, are computed on."""
    return " and ".join(
        what
        for what, names in (("pairs", INTERVALS), ("prompts", ONLINE_INTERVALS))
        if set(names) & set(metrics)
    )


def _interval_curves(lines: Sequence[Mapping[str, Any]], metric: str) -> list[list[float | None]]:
    """Returns the metric, and the lower and upper bounds of its interval, each over the lines."""
    intervals = [line.get("intervals", {}).get(metric) or (None, None) for line in lines]
    columns = [[line.get(metric) for line in lines], *zip(*intervals, strict=True)]
    return [[_rounded(_number(value)) for value in column] for column in columns]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded
