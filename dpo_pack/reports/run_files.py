"""Reads what `dpopack train` has left in a run's directory into plain values, for the run's page.

A file that is not there or cannot be read leaves out its part of the page, and the page says so.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What the files of one run say."""

    path: Path
    name: str
    info: Mapping[str, Any]  # run.json
    recipe: Mapping[str, Any]
    recipe_text: str  # recipe.yaml
    train: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    evals: Mapping[str, Sequence[Mapping[str, Any]]]  # evaluation lines of metrics.jsonl, by held-out set
    samples: Sequence[Mapping[str, Any]]
    notes: Sequence[str]  # warnings that only console.log has, and notes on lines that cannot be read
    data: Mapping[str, Any] | None
    packing: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A pair with a low margin. `texts`: prompt, chosen, rejected; None if their tokens are not at hand."""

    source: str
    row: int
    margin: float  # the mean over all steps that trained on the pair
    num_times: int
    last_step: int
    texts: tuple[str, str, str] | None


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
    printed = re.findall(r"^\s*(?:Warning|Note): (.*)$", text_of(path / "console.log"), flags=re.MULTILINE)
    notes += [note for note in dict.fromkeys(printed) if note not in given]
    recipe_text = text_of(path / "recipe.yaml")
    return RunFiles(
        path=path,
        name=name,
        info=info,
        recipe=read_yaml(recipe_text, where=str(path / "recipe.yaml")) or {},
        recipe_text=recipe_text,
        train=train,
        evals=evals,
        samples=_json_lines(path / "samples.jsonl")[0],
        notes=notes,
        data=read_json(path / "data_report.json"),
        packing=read_json(path / "packing_report.json"),
    )


def _json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file of JSON lines, and the number of lines that hold none."""
    lines = [parse_json(line) for line in text_of(path).encode().splitlines()]
    return [line for line in lines if line is not None], lines.count(None)


def sample_rows(runs: Sequence[RunFiles]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Returns source and prompt of each sample, and its completions, each with the name of its model.

    If there is one run: the completions before training and the latest ones. If there are several runs: the
    latest ones of each run.
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
    """Returns the pairs with the lowest mean margins, lowest first, from pairs.parquet.

    The mean is over all times that a pair was trained on. The last time alone shows less: in later epochs the
    policy has seen the pair already, and has learned many wrong labels by heart.
    """
    directory = run.path / "pairs.parquet"
    tables = []
    for part in sorted(directory.glob("part-*.parquet")):
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
    worst = pairs.sort_by(order).slice(0, _MOST_PAIRS).to_pylist()
    texts = pair_texts(run, [(pair["source"], pair["row"]) for pair in worst])
    return [Disagreement(**pair, texts=texts.get((pair["source"], pair["row"]))) for pair in worst]


def held_out_pairs(run: RunFiles, name: str) -> pa.Table | None:
    """Returns each held-out pair's metrics at the run's last evaluation; None if no file has them."""
    try:
        with pq.ParquetFile(run.path / "held_out.parquet") as file:
            lines = file.read(use_threads=False)
    except (OSError, pa.ArrowException):
        return None
    last = run.evals[name][-1].get("step") if name in run.evals else None
    if last is None or not {"step", "source", "pair"} <= set(lines.column_names):
        return None
    lines = lines.filter((pc.field("source") == name) & (pc.field("step") == last))
    return lines if lines.num_rows else None


def pair_texts(run: RunFiles, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], tuple[str, str, str]]:
    """Returns prompt, chosen and rejected of pairs, which `keys` name by source and row.

    The texts are decoded from the tokens in the cache. A pair that the cache no longer has is left out.
    """
    texts: dict[tuple[str, int], tuple[str, str, str]] = {}
    tokenizer = _tokenizer(run)
    for source in (run.data or {}).get("train", {}).get("sources", ()):
        rows = [row for name, row in keys if name == source["name"]]
        with contextlib.suppress(CacheError):
            store = open_store(Path(source.get("token_store", "None")))  # "None": tokens are not on disk
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


def warnings_of(run: RunFiles) -> list[tuple[int, str]]:
    """Returns the warnings about the run's health, each with the step after which it was given."""
    return [(line["step"], warning) for line in run.train for warning in line.get("warnings", ())]
