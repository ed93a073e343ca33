"""Reads what `dpopack train` has left in a run's directory into plain values, for the run's page.

A file that is not there or cannot be read leaves out its part of the page. Files that grow with the steps are
streamed and thinned, so neither the page nor the memory for it grows with them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dpo_pack.data.store import PairTable, open_store
from dpo_pack.recipe.text import read_yaml
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.files import parse_json, read_json, text_of

_MOST_POINTS = 2_000  # a curve has at most so many points
_MOST_POINTS_OF_ALL_RUNS = 8_000  # of one metric in all runs, so that a page of many runs stays small
_MOST_NOTES = 200
_MOST_WAITING = 2**20  # lines of pairs.parquet that are added up together, or as many as there are pairs
_SUMS = ["source", "row", "margin", "num_times", "last_step"]  # columns, added up for each source and row
_MOST_PAIRS = 100  # with the lowest margins, on the page
_MOST_CHARACTERS = 800  # of a text of such a pair
_SHOWN_WHOLE = ("recipe.yaml", "run.json", "data_report.json", "packing_report.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What the files of one run say."""

    path: Path
    name: str
    info: Mapping[str, Any]  # run.json
    recipe: Mapping[str, Any]
    curves: Mapping[str, Sequence[Any]]  # of the lines of steps, see `thinned`
    lines_per_point: int
    evals: Mapping[str, Sequence[Mapping[str, Any]]]  # by held-out set: lines, among them the first and last
    samples: Iterable[Mapping[str, Any]]  # of each prompt the latest from the start, and from the policy
    warnings: Sequence[tuple[int, str]]  # about the run's health, each with the step after which it was given
    notes: Sequence[str]  # warnings that only console.log has, and lines that cannot be read
    texts: Mapping[str, str]  # of _SHOWN_WHOLE


def read_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Reads the files of runs, finished or not. Raises RunError if a path holds no run."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    most = min(_MOST_POINTS, max(_MOST_POINTS_OF_ALL_RUNS // len(paths), 100))
    return [_read_run(path, name, most) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str, most: int) -> RunFiles:
    info = read_json(path / "run.json")
    if info is None or "status" not in info:
        raise RunError(f"{path}: no run (no readable run.json); give the output_dir of a 'dpopack train'")
    metrics = path / "metrics.jsonl"
    num_lines = Counter('"split": "train"' in line for line in _lines(metrics))
    group, every = (max(1, -(-num_lines[is_train] // most)) for is_train in (True, False))
    evals: dict[str, list[Mapping[str, Any]]] = {}
    warnings: list[tuple[int, str]] = []
    counts: Counter[str | None] = Counter()

    def train_lines() -> Iterator[Mapping[str, Any]]:
        for line in map(_parsed, _lines(metrics)):
            if line is not None and line.get("split") == "train":
                warnings.extend((line["step"], warning) for warning in line.get("warnings", ()))
                yield line
                continue
            source = None if line is None else str(line.get("source"))
            if line is not None and source is not None:
                # The latest line is always the last one; it stays if its number is a multiple of `every`.
                kept = evals.setdefault(source, [])
                kept[len(kept) if (counts[source] - 1) % every == 0 else -1 :] = [line]
            counts[source] += 1

    curves = thinned(train_lines(), group=group)
    said = {warning for _, warning in warnings}
    printed = (re.match(r"\s*(?:Warning|Note): (.*)", line) for line in _lines(path / "console.log"))
    notes = dict.fromkeys(note[1] for note in printed if note is not None and note[1] not in said)
    shown = list(notes)[:_MOST_NOTES]
    if len(notes) > len(shown):
        shown.append(f"console.log has {len(notes) - len(shown):,} more notes and warnings.")
    if counts[None]:
        shown.append(f"metrics.jsonl has {counts[None]:,} line(s) that cannot be read; they are left out.")
    samples = (sample for sample in map(_parsed, _lines(path / "samples.jsonl")) if sample is not None)
    latest = {(each["source"], each["prompt"], each["model"] == "start"): each for each in samples}
    texts = {name: text_of(path / name) for name in _SHOWN_WHOLE}
    return RunFiles(
        path=path,
        name=name,
        info=info,
        recipe=read_yaml(texts["recipe.yaml"], where=str(path / "recipe.yaml")) or {},
        curves=curves,
        lines_per_point=group,
        evals=evals,
        samples=latest.values(),
        warnings=warnings,
        notes=shown,
        texts=texts,
    )


def _lines(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parsed(line: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = parse_json(line.encode())
    return found


def thinned(lines: Iterable[Mapping[str, Any]], *, group: int) -> dict[str, list[Any]]:
    """Returns the means of numbers over each `group` successive lines, and as "step" the last step of each.

    A value that was not finite is null in its line, and is left out of the mean.
    """
    curves: dict[str, list[Any]] = {"step": []}
    lines, num_points = iter(lines), 0
    while some := list(itertools.islice(lines, group)):
        for metric in dict.fromkeys(itertools.chain(*some)):
            numbers = [line[metric] for line in some if isinstance(line.get(metric), int | float)]
            if numbers:
                curve = curves.setdefault(metric, [])
                curve += [None] * (num_points - len(curve))
                curve.append(sum(numbers) / len(numbers))
        curves["step"][num_points:] = [some[-1]["step"]]
        num_points += 1
    return {metric: curve + [None] * (num_points - len(curve)) for metric, curve in curves.items()}


def lowest_margins(run: RunFiles) -> list[dict[str, Any]]:
    """Returns the pairs with the lowest mean margins of pairs.parquet, lowest first.

    A pair has source, row, margin (the mean: by the last one the policy knows wrong labels by heart),
    num_times, last_step and texts (prompt, chosen, rejected; None if their tokens are not at hand).
    """
    sums: list[pa.Table] = []  # the first of earlier parts, added up
    parts = sorted((run.path / "pairs.parquet").glob("part-*.parquet"))
    for part in parts:
        with pq.ParquetFile(part) as file:  # on one thread: each run reads in the same order
            lines = file.read(["source", "row", "step", "margin"], use_threads=False)
        lines = lines.filter(pc.is_finite(lines["margin"]))
        columns = [lines["source"].cast(pa.string()), lines["row"], lines["margin"].cast(pa.float64())]
        columns += [pa.array(np.ones(len(lines), dtype=np.int64)), lines["step"]]
        sums.append(pa.table(columns, names=_SUMS))
        if part is parts[-1] or sum(map(len, sums[1:])) > max(_MOST_WAITING, len(sums[0])):
            grouped = pa.concat_tables(sums).group_by(_SUMS[:2], use_threads=False)
            sums = [grouped.aggregate([("margin", "sum"), ("num_times", "sum"), ("last_step", "max")])]
            sums[0] = sums[0].select([*_SUMS[:2], "margin_sum", "num_times_sum", "last_step_max"])
            sums[0] = sums[0].rename_columns(_SUMS)
    if not sums:
        return []
    pairs = sums[0].set_column(2, "margin", pc.divide(sums[0]["margin"], sums[0]["num_times"]))
    order = [("margin", "ascending"), ("source", "ascending"), ("row", "ascending")]
    lowest = pairs.sort_by(order).slice(0, _MOST_PAIRS).to_pylist()
    texts = _texts(run, [(pair["source"], pair["row"]) for pair in lowest])
    return [{**pair, "texts": texts.get((pair["source"], pair["row"]))} for pair in lowest]


def _texts(run: RunFiles, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Returns prompt, chosen and rejected by source and row, decoded from the tokens in the cache, if both
    tokenizer and tokens are at hand."""
    named = [run.recipe.get(section, {}).get("path") for section in ("tokenizer", "model")]
    files = (Path(directory) / "tokenizer.json" for directory in (run.path / "model", *named) if directory)
    texts: dict[tuple[str, int], list[tuple[str, str]]] = {}
    try:
        tokenizer = Tokenizer.from_file(str(next(filter(Path.is_file, files))))
    except Exception:  # no file, or a damaged one: tokenizers raises no other class
        return texts
    for source in (read_json(run.path / "data_report.json") or {}).get("train", {}).get("sources", ()):
        rows = [row for name, row in keys if name == source["name"]]
        with contextlib.suppress(CacheError):
            store = open_store(Path(source.get("token_store", "None")))  # "None": tokens are not on disk
            tables = () if store is None else (PairTable.of([part]) for part in store.parts)
            places = ((table, np.flatnonzero(np.isin(table.row_numbers, rows)).tolist()) for table in tables)
            for table, pair in ((table, pair) for table, pairs in places for pair in pairs):
                group = table.group(pair)
                parts = zip(
                    ("prompt", "chosen", "rejected"), (group.context, *group.completions), strict=True
                )
                texts[source["name"], int(table.row_numbers[pair])] = [
                    (part, _shortened(tokenizer.decode(ids.tolist(), skip_special_tokens=False)))
                    for part, ids in parts
                ]
    return texts


def _shortened(text: str) -> str:
    left_out, half = len(text) - _MOST_CHARACTERS, _MOST_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"
