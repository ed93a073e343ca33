"""Reads what `dpopack train` has left in a run's directory into plain values, for the run's page.

A file that is not there or cannot be read leaves out its part of the page.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
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
    train: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    evals: Mapping[str, Sequence[Mapping[str, Any]]]  # evaluation lines of metrics.jsonl, by held-out set
    samples: Sequence[Mapping[str, Any]]
    warnings: Sequence[tuple[int, str]]  # about the run's health, each with the step after which it was given
    notes: Sequence[str]  # warnings that only console.log has, and lines that cannot be read
    texts: Mapping[str, str]  # of _SHOWN_WHOLE


def read_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Reads the files of runs, finished or not. Raises RunError if a path holds no run."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = list(map(str, paths))
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_run(path: Path, name: str) -> RunFiles:
    info = read_json(path / "run.json")
    if info is None or "status" not in info:
        raise RunError(f"{path}: no run (no readable run.json); give the output_dir of a 'dpopack train'")
    lines, num_unreadable = _json_lines(path / "metrics.jsonl")
    train = [line for line in lines if line.get("split") == "train"]
    evals: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("split") != "train":
            evals.setdefault(str(line.get("source")), []).append(line)
    warnings = [(line["step"], warning) for line in train for warning in line.get("warnings", ())]
    printed = re.findall(r"^\s*(?:Warning|Note): (.*)$", text_of(path / "console.log"), flags=re.MULTILINE)
    notes = [note for note in dict.fromkeys(printed) if note not in {warning for _, warning in warnings}]
    if num_unreadable:
        notes.append(f"metrics.jsonl has {num_unreadable:,} line(s) that cannot be read; they are left out.")
    texts = {name: text_of(path / name) for name in _SHOWN_WHOLE}
    return RunFiles(
        path=path,
        name=name,
        info=info,
        recipe=read_yaml(texts["recipe.yaml"], where=str(path / "recipe.yaml")) or {},
        train=train,
        evals=evals,
        samples=_json_lines(path / "samples.jsonl")[0],
        warnings=warnings,
        notes=notes,
        texts=texts,
    )


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    lines = [parse_json(line) for line in text_of(path).encode().splitlines()]
    return [line for line in lines if line is not None], lines.count(None)


def lowest_margins(run: RunFiles) -> list[dict[str, Any]]:
    """Returns the pairs with the lowest mean margins of pairs.parquet, lowest first.

    A pair has source, row, margin (the mean: by the last one the policy knows wrong labels by heart),
    num_times, last_step and texts (prompt, chosen, rejected; None if their tokens are not at hand).
    """
    tables = []
    for part in sorted((run.path / "pairs.parquet").glob("part-*.parquet")):
        with pq.ParquetFile(part) as file:  # on one thread: each run reads in the same order
            tables.append(file.read(["source", "row", "step", "margin"], use_threads=False))
    if not tables:
        return []
    lines = pa.concat_tables(tables)
    lines = lines.filter(pc.is_finite(lines["margin"]))
    lines = lines.set_column(0, "source", lines["source"].cast(pa.string()))
    pairs = lines.group_by(["source", "row"], use_threads=False).aggregate(
        [("margin", "mean"), ("margin", "count"), ("step", "max")]
    )
    pairs = pairs.select(["source", "row", "margin_mean", "margin_count", "step_max"])
    pairs = pairs.rename_columns(["source", "row", "margin", "num_times", "last_step"])
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
            if store is None:
                continue
            table = PairTable.of([store])
            for pair in np.flatnonzero(np.isin(table.row_numbers, rows)).tolist():
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
