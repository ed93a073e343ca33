"""The page of a run, or of several runs side by side, from the files that `dpopack train` has written.

Everything here goes from files to plain values; templates/run.html.jinja and assets/run.js show them. A file
that is not there or cannot be read leaves out its part of the page, and the page says so.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dpo_pack.data.store import PairTable, open_store
from dpo_pack.recipe.text import read_yaml
from dpo_pack.reports.evaluation_tables import METRIC_NAMES, RATIO_NAMES, estimate
from dpo_pack.reports.pages import render_page
from dpo_pack.reports.tables import Cells
from dpo_pack.system.console import format_seconds
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import parse_json, read_json, write_text_atomically

_MOST_POINTS = 2_000  # of a curve
_MOST_POINTS_OF_ALL_RUNS = 8_000  # of one metric: so that a page of many runs stays small
_MOST_PAIRS = 100  # with which the run disagrees most
_MOST_CHARACTERS = 800  # of a text of such a pair
_INTERVALS = ("loss", "rewards/accuracies", "rewards/margins")  # metrics with a curve of the evaluations


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What the files of one run say."""

    path: Path
    name: str
    info: Mapping[str, Any]  # run.json
    recipe: Mapping[str, Any]
    train: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    evals: Mapping[str, Sequence[Mapping[str, Any]]]  # the same, by held-out set
    samples: Sequence[Mapping[str, Any]]
    notes: Sequence[str]  # warnings of console.log that no line of metrics.jsonl has; what cannot be read
    data: Mapping[str, Any] | None
    packing: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A pair with a low margin. `texts`: prompt, chosen, rejected; None if their tokens are not at hand."""

    source: str
    row: int
    step: int
    margin: float
    texts: tuple[str, str, str] | None


def write_run_page(paths: Sequence[Path], target: Path) -> None:
    """Writes the page of the runs in `paths`. Raises RunError if one holds no run, CacheError from the disk."""
    write_text_atomically(target, run_page(paths))


def run_page(paths: Sequence[Path]) -> str:
    """Returns the page of the runs in `paths`. Raises RunError if a path holds no run."""
    runs = [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]
    assets = files("dpo_pack.reports") / "assets"
    return render_page(
        "run.html.jinja",
        runs=runs,
        comparison=comparison_notes(runs),
        data=chart_data(runs),
        learning=LEARNING + _online_charts(runs),
        cost=COST,
        eval_metrics=[(metric, METRIC_NAMES[metric]) for metric in _INTERVALS],
        disagreements=disagreements(runs[0]) if len(runs) == 1 else [],
        samples=sample_rows(runs),
        text={function.__name__: function for function in _FOR_TEMPLATE},
        asset=lambda name: (assets / name).read_text(encoding="utf-8"),
    )


# ---- Reading


def run_names(paths: Sequence[Path]) -> list[str]:
    """Returns the last part of each path; the whole paths, if two of the last parts are equal."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def read_run(path: Path, name: str) -> RunFiles:
    """Reads the files of a run, finished or not. Raises RunError if `path` holds none."""
    info = read_json(path / "run.json")
    if info is None or "status" not in info:
        raise RunError(f"{path}: no run (no readable run.json); give the output_dir of a 'dpopack train'")
    train: list[Mapping[str, Any]] = []
    evals: dict[str, list[Mapping[str, Any]]] = {}
    notes = []
    lines, num_unreadable = _json_lines(path / "metrics.jsonl")
    for line in lines:
        if line.get("split") == "train":
            train.append(line)
        else:
            evals.setdefault(str(line.get("source")), []).append(line)
    if num_unreadable:
        notes.append(f"metrics.jsonl has {num_unreadable:,} line(s) that cannot be read; they are left out.")
    given = {warning for line in train for warning in line.get("warnings", ())}
    printed = re.findall(r"^\s*(?:Warning|Note): (.*)$", _text(path / "console.log"), flags=re.MULTILINE)
    notes += [note for note in dict.fromkeys(printed) if note not in given]
    return RunFiles(
        path=path,
        name=name,
        info=info,
        recipe=read_yaml(_text(path / "recipe.yaml"), where=str(path / "recipe.yaml")) or {},
        train=train,
        evals=evals,
        samples=_json_lines(path / "samples.jsonl")[0],
        notes=notes,
        data=read_json(path / "data_report.json"),
        packing=read_json(path / "packing_report.json"),
    )


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file of JSON lines, and the number of lines that hold none."""
    lines = [parse_json(line) for line in _text(path).encode().splitlines()]
    return [line for line in lines if line is not None], lines.count(None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- Curves


def chart_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns what assets/run.js draws: curves of training and of evaluations, and steps of warnings."""
    charts = (*LEARNING, *COST, *_online_charts(runs))
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
                "y": {metric: _interval_curves(lines, metric) for metric in _INTERVALS},
            }
            for number, run in enumerate(runs)
            for name, lines in run.evals.items()
        ],
    }


def thinned(
    lines: Sequence[Mapping[str, Any]], metrics: Sequence[str], most: int
) -> dict[str, list[float | None]]:
    """Returns at most `most` values of each metric with 5 digits; each the mean of as many successive lines.

    Values that are not finite are no part of a mean. A metric that no line has is left out.
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
    if "step" in curves:  # a point stands at the last of its steps
        curves["step"] = [lines[min(start + group, len(lines)) - 1]["step"] for start in starts]
    return {"step": [], **curves}


def lines_per_point(num_lines: int, most: int = _MOST_POINTS) -> int:
    return max(1, -(-num_lines // most))


def shown_metrics(chart: Chart, runs: Sequence[RunFiles]) -> tuple[str, ...]:
    return chart.of_many if len(runs) > 1 and chart.of_many else chart.metrics


def _online_charts(runs: Sequence[RunFiles]) -> tuple[Chart, ...]:
    """Returns a chart for each number that an online run adds to its lines."""
    names = {name for run in runs for line in run.train[:1] for name in line if name.startswith("online/")}
    return tuple(Chart(name, (name,)) for name in sorted(names))


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


# ---- Sentences and tables


def warnings_of(run: RunFiles) -> list[tuple[int, str]]:
    """Returns the warnings about the run's health, each with the step after which it was given."""
    return [(line["step"], warning) for line in run.train for warning in line.get("warnings", ())]


def comparison_notes(runs: Sequence[RunFiles]) -> list[str]:
    """Returns what a reader must know before comparing curves of these runs."""
    notes = []
    losses = [_loss_of(run.recipe) for run in runs]
    if len(set(losses)) > 1:
        notes.append(
            f"These runs have different losses ({', '.join(dict.fromkeys(losses))}): their loss values are not "
            "comparable. Compare accuracies and margins."
        )
    betas = [str(run.recipe.get("loss", {}).get("beta")) for run in runs]
    if len(set(betas)) > 1:
        notes.append(
            f"These runs have different loss.beta ({', '.join(dict.fromkeys(betas))}): rewards and margins are "
            "multiples of beta. Compare accuracies."
        )
    for name in {name for run in runs for name in run.evals}:
        sizes = {run.evals[name][-1].get("pairs") for run in runs if name in run.evals}
        if len(sizes) > 1:
            notes.append(f"The held-out set {name} has not the same number of pairs in all runs.")
    return notes


def _loss_of(recipe: Mapping[str, Any]) -> str:
    types = recipe.get("loss", {}).get("type", "?")
    names = types if isinstance(types, list) else [types]
    return " + ".join(str(name.get("type") if isinstance(name, dict) else name) for name in names)


def differing_keys(runs: Sequence[RunFiles]) -> Cells:
    """Returns the keys of the recipes that differ, with each run's value. `output_dir` is left out."""
    flat = [dict(_flat(run.recipe)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key != "output_dir"]
    rows = [[key, *(str(one.get(key, "")) for one in flat)] for key in keys]
    return Cells(["key", *(run.name for run in runs)], [row for row in rows if len(set(row[1:])) > 1])


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        dotted = f"{key}.{name}" if key else str(name)
        nested = isinstance(item, Mapping) or (isinstance(item, list) and any(map(_is_mapping, item)))
        yield from _flat(item, dotted) if nested else [(dotted, item)]


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def runs_cells(runs: Sequence[RunFiles]) -> Cells:
    """Returns a row for each run: how far it came and how fast."""
    rows = []
    for run in runs:
        totals = run.info.get("totals", {})
        seconds = totals.get("train_seconds")
        rows.append(
            (
                run.name,
                str(run.info["status"]),
                f"{totals.get('steps', 0):,}",
                f"{totals.get('pairs', 0):,}",
                "" if seconds is None else format_seconds(seconds),
                f"{totals.get('pairs_per_second', 0):,.1f}",
            )
        )
    return Cells(("run", "status", "steps", "pairs", "time of steps", "pairs/s"), rows)


def key_figures(run: RunFiles) -> list[tuple[str, str]]:
    """Returns the most important numbers of one run, each with its meaning."""
    figures = []
    for name, lines in list(run.evals.items())[:1]:
        for metric, form in (("rewards/accuracies", ".1%"), ("rewards/margins", ".3g"), ("loss", ".4g")):
            first, last = (_number(line.get(metric)) for line in (lines[0], lines[-1]))
            if last is not None:
                before = "" if len(lines) == 1 or first is None else f", {first:{form}} at first"
                figures.append((f"{last:{form}}", f"{METRIC_NAMES[metric]} held out ({name}){before}"))
    (row,) = runs_cells([run]).rows
    _, status, steps, pairs, seconds, rate = row
    return [*figures, (steps, f"steps, {pairs} pairs, {status}"), (f"{rate}/s", f"pairs, {seconds} of steps")]


def evaluation_cells(lines: Sequence[Mapping[str, Any]]) -> Cells:
    """Returns the first and the last evaluation of a held-out set, with intervals."""
    first, last = lines[0], lines[-1]
    rows = [
        (words, *_estimate(first, metric), *_estimate(last, metric))
        for metric, words in METRIC_NAMES.items()
        if metric in last
    ]
    after = tuple(f"after step {line['step']}" for line in (first, last))
    return Cells(("", after[0], "interval", after[1], "interval"), rows)


def last_evaluations_cells(runs: Sequence[RunFiles], name: str) -> Cells:
    """Returns the last evaluation of a held-out set, a row for each run that has the set."""
    rows = [
        (run.name, str(last["step"]), *(text for metric in _INTERVALS for text in _estimate(last, metric)))
        for run in runs
        for last in run.evals.get(name, ())[-1:]
    ]
    titles = (title for metric in _INTERVALS for title in (METRIC_NAMES[metric], "interval"))
    return Cells(("run", "after step", *titles), rows)


def part_cells(line: Mapping[str, Any], breakdown: str) -> Cells:
    """Returns accuracy and margin of an evaluation `by_source` or `by_length`."""
    rows = [
        (
            RATIO_NAMES.get(part, part) if breakdown == "by_length" else part,
            f"{summary['pairs']:,}",
            *_estimate(summary, "rewards/accuracies"),
            *_estimate(summary, "rewards/margins"),
        )
        for part, summary in line.get(breakdown, {}).items()
    ]
    return Cells(("", "pairs", "accuracy", "interval", "margin", "interval"), rows)


def _estimate(summary: Mapping[str, Any], metric: str) -> tuple[str, str]:
    """Returns mean and interval as texts; empty texts for numbers that are not finite."""
    numbers = (summary.get(metric), *(summary.get("intervals", {}).get(metric) or (None, None)))
    return ("", "") if None in numbers else estimate(summary, metric, sign="")


def source_cells(run: RunFiles) -> Cells:
    """Returns the rows that were read, kept, dropped and cut, for each source of the training data."""
    sources = (run.data or {}).get("train", {}).get("sources", ())
    rows = []
    for source in sources:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in source.get("dropped", {}).items())
        cut = source.get("prompt_truncated", 0) + source.get("completions_truncated", 0)
        kept = source.get("pairs_kept", source.get("prompts_kept", 0))
        rows.append(
            (source["name"], f"{source.get('rows_read', 0):,}", f"{kept:,}", dropped or "0", f"{cut:,}")
        )
    return Cells(("source", "rows read", "kept", "dropped", "truncated"), rows)


def length_cells(run: RunFiles) -> Cells:
    """Returns the lengths of the training data's parts in tokens."""
    lengths = (run.data or {}).get("train", {}).get("lengths_tokens", {})
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [
        (name.replace("_", " "), *(f"{spread[column]:,.5g}" for column in columns))
        for name, spread in lengths.items()
    ]
    return Cells(("tokens", "mean", "median", "p90", "p99", "max"), rows)


def packing_sentence(run: RunFiles) -> str:
    """Returns what packing did in an epoch; empty if no plan was made before the run (online)."""
    if run.packing is None:
        return ""
    ours = run.packing["statistics"]
    shared = ours["saved_by_sharing_tokens"] / max(ours["unshared_tokens"], 1)
    return (
        f"{ours['num_pairs']:,} pairs an epoch in {ours['num_steps']:,} steps and {ours['num_rows']:,} rows of up "
        f"to {run.packing['token_budget']:,} tokens, {ours['budget_fill']:.0%} full; "
        f"{ours['computed_tokens']:,} tokens computed, {shared:.0%} saved by sharing prompts."
    )


def version_cells(runs: Sequence[RunFiles]) -> Cells:
    """Returns the versions of packages, the devices and the commit of each run."""
    columns = []
    for run in runs:
        commit = run.info.get("git_commit")
        columns.append(
            {
                "dpo-pack": str(run.info.get("dpo_pack", "")),
                **{name: str(version) for name, version in run.info.get("versions", {}).items()},
                "device": ", ".join(run.info.get("devices", ())),
                "commit": str(commit)[:12] if commit else "",
            }
        )
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return Cells(("", *(run.name for run in runs)), rows)


def recipe_text(run: RunFiles) -> str:
    return _text(run.path / "recipe.yaml")


_FOR_TEMPLATE = (
    differing_keys, evaluation_cells, key_figures, last_evaluations_cells, length_cells, lines_per_point,
    packing_sentence, part_cells, recipe_text, runs_cells, shown_metrics, source_cells, version_cells,
    warnings_of,
)  # fmt: skip


# ---- Pairs and samples


def sample_rows(runs: Sequence[RunFiles]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Returns source and prompt of each sample, and its completions, each with the name of its model.

    Of one run: before training, and the last of the policy. Of several: the last of each run's policy.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for run in runs:
        for sample in run.samples:
            source, prompt, completion, model = (
                str(sample.get(name, "")) for name in ("source", "prompt", "completion", "model")
            )
            name = run.name if len(runs) > 1 else "before training" if model == "start" else "after training"
            if len(runs) == 1 or model != "start":
                rows.setdefault((source, prompt), {})[name] = completion
    return [(source, prompt, list(completions.items())) for (source, prompt), completions in rows.items()]


def disagreements(run: RunFiles) -> list[Disagreement]:
    """Returns the pairs with the lowest margins of the last epoch, lowest first, from pairs.parquet."""
    directory = run.path / "pairs.parquet"
    if not directory.is_dir() or not any(directory.glob("part-*.parquet")):
        return []
    epochs = pq.read_table(directory, columns=["epoch"])["epoch"]
    if len(epochs) == 0:
        return []
    last = pc.max(epochs).as_py()
    lines = pq.read_table(
        directory, columns=["source", "row", "step", "margin"], filters=pc.field("epoch") > last - 1
    )
    lines = lines.filter(pc.is_finite(lines["margin"])).sort_by("margin").slice(0, 20 * _MOST_PAIRS)
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for line in lines.to_pylist():
        found.setdefault((line["source"], line["row"]), (line["step"], line["margin"]))
    worst = list(found.items())[:_MOST_PAIRS]
    texts = pair_texts(run, [key for key, _ in worst])
    return [
        Disagreement(source=source, row=row, step=step, margin=margin, texts=texts.get((source, row)))
        for (source, row), (step, margin) in worst
    ]


def pair_texts(run: RunFiles, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], tuple[str, str, str]]:
    """Returns prompt, chosen and rejected of pairs, which `keys` name by source and row.

    The texts are the tokens of the cache, decoded. A pair whose tokens are gone is left out.
    """
    texts: dict[tuple[str, int], tuple[str, str, str]] = {}
    tokenizer = _tokenizer(run)
    for source in (run.data or {}).get("train", {}).get("sources", ()):
        rows = [row for name, row in keys if name == source["name"]]
        with contextlib.suppress(CacheError):
            store = open_store(Path(source.get("token_store", "None")))  # "None": it was in memory only
            if tokenizer is None or store is None:
                continue
            table = PairTable.of([store])
            for pair in np.flatnonzero(np.isin(table.row_numbers, rows)).tolist():
                parts = (table.prompt(pair), table.chosen(pair), table.rejected(pair))
                prompt, chosen, rejected = (
                    _shortened(tokenizer.decode(part.tolist(), skip_special_tokens=False)) for part in parts
                )
                texts[source["name"], int(table.row_numbers[pair])] = (prompt, chosen, rejected)
    return texts


def _tokenizer(run: RunFiles) -> Tokenizer | None:
    """Returns the run's tokenizer if it is on this machine, without loading transformers."""
    named = (run.recipe.get(section, {}).get("path") for section in ("tokenizer", "model"))
    for directory in (run.path / "model", *(Path(path) for path in named if path)):
        with contextlib.suppress(Exception):  # tokenizers raises no other class
            return Tokenizer.from_file(str(directory / "tokenizer.json"))
    return None


def _shortened(text: str) -> str:
    """Returns a long text without its middle, and says so in its place."""
    left_out = len(text) - _MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"
