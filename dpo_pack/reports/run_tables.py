"""The tables and sentences of the page of a run, or of several runs: a run is then a row or a column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpo_pack.reports.evaluation_tables import METRIC_NAMES, estimate, pairs_and_prompts
from dpo_pack.reports.run_curves import interval_metrics
from dpo_pack.reports.run_files import RunFiles, held_out_pairs
from dpo_pack.reports.tables import Cells
from dpo_pack.system.console import format_seconds
from dpo_pack.training.intervals import mean_intervals

_KEY_METRICS = {
    "rewards/accuracies": ".1%",
    "rewards/margins": ".3g",
    "loss": ".4g",
    "online/win_rate": ".1%",
    "online/scores": ".3g",
}


def held_out_size(line: Mapping[str, Any]) -> str:
    """Returns the size of a held-out set from a line of metrics: pairs or, in an online run, prompts."""
    return pairs_and_prompts(line) if "pairs" in line else f"{line.get('prompts', 0):,} prompts"


def comparison_notes(runs: Sequence[RunFiles]) -> list[str]:
    """Returns notes on differences between the runs that make their curves or metrics not comparable."""
    notes = []
    losses = [_loss_of(run.recipe) for run in runs]
    if len(set(losses)) > 1:
        notes.append(
            f"These runs have different losses ({', '.join(dict.fromkeys(losses))}): their loss values are "
            "not comparable. Compare accuracies and margins."
        )
    betas = [str(run.recipe.get("loss", {}).get("beta")) for run in runs]
    if len(set(betas)) > 1:
        notes.append(
            f"These runs have different loss.beta ({', '.join(dict.fromkeys(betas))}): rewards and margins "
            "are multiples of beta. Compare accuracies."
        )
    for name in {name for run in runs for name in run.evals}:
        sizes = {run.evals[name][-1].get("pairs") for run in runs if name in run.evals}
        if len(sizes - {None}) > 1:  # None: an online run, measured on prompts
            notes.append(f"The held-out set {name} does not have the same number of pairs in all runs.")
    return notes


def _loss_of(recipe: Mapping[str, Any]) -> str:
    types = recipe.get("loss", {}).get("type", "?")
    names = types if isinstance(types, list) else [types]
    return " + ".join(str(name.get("type") if isinstance(name, dict) else name) for name in names)


def differing_keys(runs: Sequence[RunFiles]) -> Cells:
    """Returns the keys of the recipes that differ, with each run's value. `output_dir` is left out."""
    flat = [dict(_flat(run.recipe)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key != "output_dir"]
    rows = [[key, *(_as_in_yaml(one.get(key, "")) for one in flat)] for key in keys]
    return Cells(["key", *(run.name for run in runs)], [row for row in rows if len(set(row[1:])) > 1])


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        dotted = f"{key}.{name}" if key else str(name)
        listed = item if isinstance(item, list) else [item]
        nested = any(isinstance(each, Mapping) for each in listed)
        yield from _flat(item, dotted) if nested else [(dotted, item)]


def _as_in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
        for metric, form in _KEY_METRICS.items():
            first, last = (line.get(metric) for line in (lines[0], lines[-1]))
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
        (words, *estimate(first, metric), *estimate(last, metric))
        for metric, words in METRIC_NAMES.items()
        if metric in last
    ]
    after = tuple(f"after step {line['step']}" for line in (first, last))
    return Cells(("", after[0], "interval", after[1], "interval"), rows)


def last_evaluations(runs: Sequence[RunFiles], name: str) -> list[Cells]:
    """Returns the last evaluations of a held-out set: a table of runs on pairs, and one of online runs."""
    offline = [run for run in runs if name in run.evals and not run.recipe.get("online")]
    online = [run for run in runs if name in run.evals and run.recipe.get("online")]
    return [_last_evaluations_cells(alike, name) for alike in (offline, online) if alike]


def _last_evaluations_cells(runs: Sequence[RunFiles], name: str) -> Cells:
    metrics = interval_metrics(runs)
    rows = [
        (run.name, str(last["step"]), *(text for metric in metrics for text in estimate(last, metric)))
        for run in runs
        for last in run.evals[name][-1:]
    ]
    titles = (title for metric in metrics for title in (METRIC_NAMES[metric], "interval"))
    return Cells(("run", "after step", *titles), rows)


def difference_cells(runs: Sequence[RunFiles], name: str) -> tuple[Cells, list[str]]:
    """Returns, for each other run, its metrics minus those of the first run that has metrics of single pairs.

    Each difference has an interval. A run without the same held-out pairs has no row, but a sentence with the
    reason. Metrics that the recipes make incomparable are left out, see `comparison_notes`.
    """
    found = [(run, held_out_pairs(run, name)) for run in runs]
    reasons = [f"{run.name} {_why_no_pairs(run, name)}." for run, pairs in found if pairs is None]
    measured = [(run, pairs) for run, pairs in found if pairs is not None]
    if all(run.recipe.get("online") for run in runs):  # measured on prompts
        return Cells((), ()), []
    if len(measured) < 2:
        return Cells((), ()), [f"No differences pair by pair on {name}. {' '.join(reasons)}"]
    (first, base), *others = measured
    same_beta = len({str(run.recipe.get("loss", {}).get("beta")) for run in runs}) == 1
    metrics = ["rewards/accuracies"] + ["rewards/margins"] * same_beta
    metrics += ["loss"] * (same_beta and len({_loss_of(run.recipe) for run in runs}) == 1)
    rows = []
    for run, pairs in others:
        if not pairs["pair"].equals(base["pair"]):
            reasons.append(
                f"{run.name} cannot be compared with {first.name} pair by pair: its held-out pairs are not "
                "the same."
            )
            continue
        differences = np.stack([pairs[m].to_numpy() - base[m].to_numpy() for m in metrics], axis=1)
        prompts = base["prompt"].to_numpy() if "prompt" in base.column_names else None
        bounds = mean_intervals(differences, seed=0, prompts=prompts)
        texts = (
            (f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}")
            for mean, (low, high) in zip(differences.mean(axis=0), bounds, strict=True)
        )
        rows.append((f"{run.name} - {first.name}", *(text for both in texts for text in both)))
    titles = (title for metric in metrics for title in (METRIC_NAMES[metric], "interval"))
    return Cells(("difference", *titles), rows), reasons


def _why_no_pairs(run: RunFiles, name: str) -> str:
    """Returns the words after the run's name that say why it has no metrics of single held-out pairs."""
    if name not in run.evals:
        return f"was not measured on {name}"
    if run.recipe.get("online"):
        return "was trained online and is measured on prompts, not on pairs"
    return "has no held_out.parquet of its last evaluation"


def source_cells(run: RunFiles) -> Cells:
    """Returns the rows that were read, kept, dropped and cut, for each source of the training data."""
    sources = (run.data or {}).get("train", {}).get("sources", ())
    rows = []
    for source in sources:
        dropped = ", ".join(
            f"{reason} {left_out['rows']:,}" for reason, left_out in source.get("dropped", {}).items()
        )
        cut = source.get("prompt_truncated", 0) + source.get("completions_truncated", 0)
        kept = source.get("pairs_kept", source.get("prompts_kept", 0))
        rows.append(
            (source["name"], f"{source.get('rows_read', 0):,}", f"{kept:,}", dropped or "0", f"{cut:,}")
        )
    return Cells(("source", "rows read", "kept", "dropped", "truncated"), rows)


def length_cells(run: RunFiles) -> Cells:
    """Returns the lengths of the prompts and completions of the training data, in tokens."""
    lengths = (run.data or {}).get("train", {}).get("lengths_tokens", {})
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [
        (name.replace("_", " "), *(f"{spread[column]:,.5g}" for column in columns))
        for name, spread in lengths.items()
    ]
    return Cells(("tokens", "mean", "median", "p90", "p99", "max"), rows)


def packing_sentence(run: RunFiles) -> str:
    """Returns a sentence on an epoch's packing; "" if there is no packing report, as in online runs."""
    if run.packing is None:
        return ""
    ours = run.packing["statistics"]
    shared = ours["saved_by_sharing_tokens"] / max(ours["unshared_tokens"], 1)
    return (
        f"{ours['num_pairs']:,} pairs an epoch in {ours['num_steps']:,} steps and {ours['num_rows']:,} rows "
        f"of up to {run.packing['token_budget']:,} tokens, {ours['budget_fill']:.0%} full; "
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
