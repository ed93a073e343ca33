"""Reads what `dpopack train` has left in a run's directory, makes tables and curves of it for a page, and
prints the end of a run.

A file that is not there or cannot be read leaves out its part of the page. Files that grow with the steps are
streamed and thinned, so neither the page nor the memory for it grows with them.

A run is a dict: `path`, `name`, `info` (run.json), `recipe`, `steps` and `curves` (of logged steps, by
metric), `lines_per_point`, `evals` (lines by held-out set, among them the first and the last), `samples` (of
each prompt the latest from the start and from the policy), `warnings` (step and text), `notes` (the other
warnings in console.log), `texts` (of files that are shown whole).
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console
from tokenizers import Tokenizer

from dpo_pack.data.store import PairTable, open_store
from dpo_pack.recipe.text import read_yaml, to_yaml, without_servers
from dpo_pack.reports.tables import (
    INTERVALS,
    Cells,
    evaluation_cells,
    pairs_and_prompts,
    render_completions,
    terminal_table,
)
from dpo_pack.system.console import format_rate, format_seconds
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import Json, leaves, parse_json, read_json, text_of
from dpo_pack.system.process import counted, lone_half
from dpo_pack.training.health import what_can_be_told

_MOST_POINTS = 2_000  # a curve has at most so many points
_MOST_POINTS_OF_ALL_RUNS = 8_000  # of one metric in all runs, so that a page of many runs stays small
_MOST_NOTES = 200
_SHOWN_WHOLE = ("recipe.yaml", "run.json", "data_report.json", "packing_report.json")
_MOST_PAIRS = 100  # with the lowest margins, on the page
_MOST_CHARACTERS = 800  # of a text of such a pair

# The metrics of each chart, by its title. A metric of evaluations, which have intervals, begins with "eval ";
# with "pairs " before that, it is drawn over the pairs that the run had trained on.
CHARTS = {
    "Loss": ("loss", "eval loss"),
    "Reward accuracy": ("rewards/accuracies", "eval rewards/accuracies"),
    "Reward margin": ("rewards/margins", "eval rewards/margins"),
    "Loss by pairs seen, held out": ("pairs eval loss",),
    "Reward accuracy by pairs seen, held out": ("pairs eval rewards/accuracies",),
    "Reward margin by pairs seen, held out": ("pairs eval rewards/margins",),
    "Wins against the start, held out": ("eval online/win_rate",),
    "Wins against the start by pairs seen, held out": ("pairs eval online/win_rate",),
    "Score, held out": ("eval online/scores",),
    "Score above the start's, held out": ("eval online/score_gain",),
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


def read_runs(paths: Sequence[Path]) -> list[Json]:
    """Reads the files of runs, finished or not. Raises RunError if a path holds no run."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    most = min(_MOST_POINTS, max(_MOST_POINTS_OF_ALL_RUNS // len(paths), 100))
    runs = []
    for name, path in zip(names, paths, strict=True):
        info = read_json(path / "run.json")
        if info is None or "status" not in info:
            raise RunError(f"{path}: no run (no readable run.json); give the output_dir of a 'dpopack train'")
        if lone_half(str(path)):
            raise RunError(f"{path}: the name of this directory is not UTF-8; rename it")
        run = {"name": name, "path": path, "info": info, **read_metrics(path / "metrics.jsonl", most)}
        logged = {warning for _, warning in run["warnings"]}
        printed = (re.match(r"\s*(?:Warning|Note): (.*)", line) for line in _lines(path / "console.log"))
        notes = dict.fromkeys(note[1] for note in printed if note is not None and note[1] not in logged)
        samples = {
            (sample["source"], sample["prompt"], sample["model"] == "start"): sample
            for sample in _json_lines(_lines(path / "samples.jsonl"))
        }
        texts = {file: text_of(path / file) for file in _SHOWN_WHOLE}
        recipe = without_servers(read_yaml(texts["recipe.yaml"], where=str(path / "recipe.yaml")) or {})
        texts["recipe.yaml"] = to_yaml(recipe)  # others may see the page
        run |= {"recipe": recipe, "samples": list(samples.values()), "texts": texts}
        runs.append({**run, "notes": list(notes)[:_MOST_NOTES]})
    return runs


def read_metrics(path: Path, most: int) -> Json:
    """Returns what metrics.jsonl says of a run. A curve has the first line, and then at most `most` means of
    successive ones. A value that was not finite is null in its line, and is in no mean."""
    num_later = sum('"split": "train"' in line for line in _lines(path)) - 1
    group = max(1, -(-num_later // most))
    charted = {metric for metrics in CHARTS.values() for metric in metrics}
    steps: list[int] = []
    points: list[dict[str, tuple[float, int]]] = []  # sum and number of each metric's values
    evals: dict[str, list[Json]] = {}
    warnings: list[tuple[int, str]] = []
    num_lines = 0
    # The first preview has one name of two.
    renamed = (line if '"logratio/' in line else line.replace('"kl/', '"logratio/') for line in _lines(path))
    for line in _json_lines(renamed):
        if line["split"] != "train":
            lines = evals.setdefault(str(line["source"]), [])
            lines.append(line)
            if len(lines) > most:
                del lines[1:-1:2]
            continue
        warnings += [(line["step"], warning) for warning in line.get("warnings", ())]
        if num_lines == 0 or (num_lines - 1) % group == 0:
            steps.append(line["step"])
            points.append({})
        num_lines, steps[-1] = num_lines + 1, line["step"]
        for metric in charted & line.keys():
            if line[metric] is not None:
                total, count = points[-1].get(metric, (0.0, 0))
                points[-1][metric] = (total + line[metric], count + 1)
    curves = {
        metric: [point[metric][0] / point[metric][1] if metric in point else None for point in points]
        for metric in {metric for point in points for metric in point}
    }
    facts = {"steps": steps, "curves": curves, "lines_per_point": group}
    return {**facts, "evals": evals, "warnings": warnings}


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            yield from file


def _json_lines(lines: Iterable[str]) -> Iterator[Json]:
    """Yields the lines that can be read: the last one of a killed process may be cut."""
    return (found for line in lines if (found := parse_json(line.encode())) is not None)


# ------------------------------------------------------------------------------- pairs


def lowest_margins(run: Json) -> list[Json]:
    """Returns the pairs with the lowest mean margins of pairs.parquet (by the last one the policy knows wrong
    labels by heart): source, row, margin, num_times, last_step and, if their tokens are at hand, texts."""
    from pyarrow import acero, dataset  # imports pandas, which no step needs

    parts = sorted((run["path"] / "pairs.parquet").glob("part-*.parquet"))
    if not parts:
        return []
    columns = {name: pc.field(name) for name in ("row", "step", "margin")}
    columns["source"] = pc.field("source").cast("string")
    sums = [
        ("margin", "hash_mean", None, "margin"),
        ("margin", "hash_count", None, "num_times"),
        ("step", "hash_max", None, "last_step"),
    ]
    streamed = [
        acero.Declaration(
            "scan", acero.ScanNodeOptions(dataset.dataset(parts), columns=["source", *columns])
        ),
        acero.Declaration("filter", acero.FilterNodeOptions(pc.is_finite(pc.field("margin")))),
        acero.Declaration("project", acero.ProjectNodeOptions(list(columns.values()), list(columns))),
        acero.Declaration("aggregate", acero.AggregateNodeOptions(sums, keys=["source", "row"])),
    ]
    # On one thread, each process adds up in the same order.
    pairs = acero.Declaration.from_sequence(streamed).to_table(use_threads=False)
    order = [("margin", "ascending"), ("source", "ascending"), ("row", "ascending")]
    lowest = pairs.sort_by(order).slice(0, _MOST_PAIRS).to_pylist()
    texts = _texts(run, [(pair["source"], pair["row"]) for pair in lowest])
    return [{**pair, "texts": texts.get((pair["source"], pair["row"]), {})} for pair in lowest]


def _texts(run: Json, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, str]]:
    """Returns prompt, chosen and rejected by source and row, if the tokenizer and the cache are at hand."""
    named = [run["recipe"].get(section, {}).get("path") for section in ("tokenizer", "model")]
    files = (Path(place) / "tokenizer.json" for place in (run["path"] / "model", *named) if place)
    texts: dict[tuple[str, int], dict[str, str]] = {}
    try:
        tokenizer = Tokenizer.from_file(str(next(filter(Path.is_file, files))))
    except Exception:  # no file, or a damaged one: tokenizers raises no other class
        return texts
    for source in (read_json(run["path"] / "data_report.json") or {}).get("train", {}).get("sources", ()):
        rows = [row for name, row in keys if name == source["name"]]
        with contextlib.suppress(CacheError):
            store = open_store(Path(source.get("token_store", "None")))  # "None": tokens are not on disk
            for table in () if store is None else (PairTable.of([part]) for part in store.ranges or (store,)):
                for pair in np.flatnonzero(np.isin(table.row_numbers, rows)).tolist():
                    texts[source["name"], int(table.row_numbers[pair])] = pair_texts(table, pair, tokenizer)
    return texts


def pair_texts(table: PairTable, pair: int, tokenizer: Any) -> dict[str, str]:
    """Returns prompt, chosen and rejected of a pair, shortened. Raises CacheError."""
    group = table.group(pair)
    parts = [group.context, *group.completions]
    decoded = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in parts]
    return dict(zip(("prompt", "chosen", "rejected"), map(_shortened, decoded), strict=True))


def _shortened(text: str) -> str:
    left_out, half = len(text) - _MOST_CHARACTERS, _MOST_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


# ------------------------------------------------------------------------------- tables and curves


def runs_cells(runs: Sequence[Json]) -> Cells:
    """Returns a row for each run: how far it came and how fast."""
    rows = []
    for run in runs:
        totals = run["info"].get("totals", {})
        counts = [f"{totals.get(name, 0):,}" for name in ("steps", "pairs")]
        seconds, rate = totals.get("train_seconds", 0), totals.get("pairs_per_second", 0)
        rows.append([run["name"], run["info"]["status"], *counts, format_seconds(seconds), format_rate(rate)])
    return Cells(("run", "status", "steps", "pairs", "time of steps", "pairs/s"), rows)


def run_facts(run: Json) -> str:
    """Returns when the run began (earlier releases did not write it), and the settings that tell one run from
    another."""
    date = [f"{text[:10]} {text[11:16]} UTC"] if isinstance(text := run["info"].get("begun"), str) else []
    values = dict(leaves(run["recipe"], separator="."))
    if isinstance(terms := values.get("loss.type"), list):
        terms = [(term["type"], term.get("weight", 1)) for term in terms]
        values["loss.type"] = " + ".join(loss if one == 1 else f"{one:g} {loss}" for loss, one in terms)
    named = {"loss": "loss.type", "beta": "loss.beta", "rate": "optim.lr"}
    settings = [f"{word} {_text(values[key])}" for word, key in named.items() if key in values]
    pairs = values.get("packing.pairs_per_step")
    return ", ".join([*date, *settings, *([] if pairs is None else [f"{counted(pairs, 'pair')} a step"])])


def differing_keys(runs: Sequence[Json]) -> Cells:
    """Returns the keys of the recipes and of run.json's versions that differ, with each run's value."""
    also = ("dpo_pack", "versions", "devices", "git_commit")
    trees = [{**run["recipe"], **{key: run["info"].get(key) for key in also}} for run in runs]
    flat = [dict(leaves(tree, separator=".")) for tree in trees]
    texts = {
        key: [_text(one.get(key)) for one in flat]
        for key in dict.fromkeys(key for one in flat for key in one)
        if key != "output_dir"
    }
    rows = [[key, *values] for key, values in texts.items() if len(set(values)) > 1]
    return Cells(["key", *(run["name"] for run in runs)], rows)


def _text(value: Any) -> str:
    """Returns the text of a value. A key without a value, null, and a key that is not there look alike."""
    is_text = value is None or isinstance(value, str)
    return value or "" if is_text else json.dumps(value, ensure_ascii=False)


def last_evaluations(runs: Sequence[Json], name: str) -> Cells:
    """Returns the last evaluation of each run on a held-out set; of a single run the first one, too."""
    if len(runs) == 1:
        first, last = (runs[0]["evals"][name][number] for number in (0, -1))
        lines = {f"after step {line['step']}": line for line in (first, last)}
    else:
        lasts = {run["name"]: run["evals"][name][-1] for run in runs if name in run["evals"]}
        lines = {f"{run}, step {line['step']}": line for run, line in lasts.items()}
    columns, rows, _ = evaluation_cells(lines)
    return Cells(columns, [("measured on", *map(pairs_and_prompts, lines.values())), *rows])


def sample_rows(runs: Sequence[Json]) -> dict[tuple[str, str], dict[str, str]]:
    """Returns for source and prompt of each sample its latest completions, by name: of a single run those
    before and after training, of several runs the latest one of each run."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for run in runs:
        for sample in run["samples"]:
            is_start = sample["model"] == "start"
            name = run["name"] if len(runs) > 1 else "before training" if is_start else "after training"
            if len(runs) == 1 or not is_start:
                rows.setdefault((sample["source"], sample["prompt"]), {})[name] = sample["completion"]
    return rows


def chart_data(runs: Sequence[Json]) -> Json:
    """Returns what assets/run.js draws. A curve names its steps by their position in "steps"; its values are
    [values], or of an evaluation [values, lower bounds, upper bounds]."""
    tracks: list[tuple[int, list[str], Json]] = []  # run, words that name it, values by metric
    steps: list[Sequence[int]] = []  # of each track
    for number, run in enumerate(runs):
        names = [run["name"]] if len(runs) > 1 else []
        tracks.append((number, names, {name: [_rounded(of)] for name, of in run["curves"].items()}))
        steps.append(run["steps"])
        for held_out, lines in run["evals"].items():
            values = {}
            for metric in {metric for line in lines for metric in line.get("intervals", {})}:
                bounds = [line.get("intervals", {}).get(metric) or (None, None) for line in lines]
                columns = [[line.get(metric) for line in lines], *zip(*bounds, strict=True)]
                values[f"eval {metric}"] = list(map(_rounded, columns))
            tracks.append((number, [*names, held_out], values))
            steps.append([line["step"] for line in lines])
            if all("pairs_seen" in line for line in lines):  # else an earlier release has written some
                by_pairs = {f"pairs {metric}": columns for metric, columns in values.items()}
                tracks.append((number, [*names, held_out], by_pairs))
                steps.append([line["pairs_seen"] for line in lines])
    charts = []
    for title, of_chart in CHARTS.items():
        has_metrics = len({metric.removeprefix("eval ") for metric in of_chart}) > 1
        curves = []
        for place, (number, names, values) in enumerate(tracks):
            for metric in (metric for metric in of_chart if metric in values):
                words = [*names, metric.rpartition("/")[2].replace("_", " ")] if has_metrics else names
                label = " ".join(words) or "training"
                curves.append({"run": number, "label": label, "steps": place, "values": values[metric]})
        if curves:
            axis = "pairs" if of_chart[0].startswith("pairs ") else "step"
            charts.append({"title": title, "axis": axis, "is_log": "grad_norm" in of_chart, "curves": curves})
    return {
        "num_runs": len(runs),
        "steps": steps,
        "charts": charts,
        "lines_per_point": max(run["lines_per_point"] for run in runs),
    }


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]


# ------------------------------------------------------------------------------- the end of a run


def print_ending(
    root: Path, evaluation: Mapping[str, Json], warnings: Sequence[str], console: Console
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


def print_next(root: Path, evaluation: Mapping[str, Json], console: Console, *, has_images: bool) -> None:
    """Prints the commands to look at the finished run in `root`, whose model has this evaluation."""
    console.print()
    console.print("Next:")
    console.print(f"  dpopack sample {shlex.quote(str(root))}{' --prompt TEXT' if has_images else ''}")
    if any("rewards/margins" in metrics for metrics in evaluation.values()):  # an online run has no pairs
        console.print(f"  dpopack evaluate {shlex.quote(str(root / 'recipe.yaml'))}")
