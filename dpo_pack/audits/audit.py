"""`dpopack audit`: a row for each training pair. What is known of it for nothing, what a finished run logged
of it, and with folds what a model says that has not seen it: an adapter that was trained on other pairs.

Legend: P training pairs. Columns of audit.parquet have [P] values, docs/audit.md defines them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console

from dpo_pack.audits.certainty import NEGATED, NUM_DRAWS, calibration, certainty, divide, sigmoid, swap_test
from dpo_pack.data.sources import Data, components, keys_together
from dpo_pack.data.store import PairTable, distinct_keys
from dpo_pack.packing.lengths import ADAPTER_PASSES, FloatArray, IntArray
from dpo_pack.recipe.data import source_names
from dpo_pack.recipe.load import INFO_FILE, RECIPE_FILE, is_adapter, load_recipe, parse_recipe
from dpo_pack.recipe.text import to_yaml
from dpo_pack.reference.cache import FrozenReference
from dpo_pack.reports.pages import render_page
from dpo_pack.reports.run_files import pair_texts
from dpo_pack.reports.tables import Cells, terminal_table
from dpo_pack.run.evaluate import evaluate_pairs
from dpo_pack.run.models import Setup, resolve_model
from dpo_pack.run.pairs import prepare_reference, row_builder
from dpo_pack.run.run_dir import PARTS, input_fingerprints
from dpo_pack.run.setup import load_proved
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds, shown
from dpo_pack.system.errors import DataError, RecipeError, RunError
from dpo_pack.system.files import discard, read_json, write_text_atomically, writing, written_aside
from dpo_pack.system.machine import release_memory
from dpo_pack.training.health import with_interval
from dpo_pack.training.metrics import pair_metrics
from dpo_pack.training.references import CachedReference

# Of folds: all pairs, those that an adapter trains on, its steps.
FEWEST_PAIRS, FEWEST_TRAINED, FEWEST_STEPS, DEFAULT_LR = 500, 200, 32, 2e-5
_TIMED_PAIRS, _MOST_TEXTS = 32, 30  # of each list on the page
CAVEATS = (
    "Where labels are wrong already, the AUROCs are lower bounds: a swap makes a wrong label right. Random "
    "swaps, though, are easier to find than people's errors, which are about pairs that are hard to judge."
)
QUIET = Console(quiet=True)
Columns = dict[str, Any]
Train = Callable[..., object]  # trainer.train, which is above this room


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOptions:
    """How models are trained that have not seen the pairs that they score. Raises RecipeError."""

    num_folds: int
    train_pairs: int = 20_000  # the most of one model
    lr: float | None = None  # None: the recipe's if it trains an adapter, else DEFAULT_LR

    def __post_init__(self) -> None:
        if self.num_folds < 2:
            raise RecipeError(f"--folds {self.num_folds}: give at least 2, or leave it out")
        if self.train_pairs < FEWEST_TRAINED:
            few = f"--train-pairs {self.train_pairs}: a model of so few pairs says little"
            raise RecipeError(f"{few}; give at least {FEWEST_TRAINED}")
        if self.lr is not None and not 0 < self.lr < np.inf:
            raise RecipeError(f"--lr {self.lr:g}: give a number above 0, or leave it out")


def check_output(inputs: Mapping[str, str | None], output: Path) -> None:
    """Raises RecipeError or CacheError if an audit cannot be written there, or would replace an input."""
    if output.suffix != ".parquet":
        raise RecipeError(f"--output {output}: name a file .parquet; its page, .html, is written beside it")
    for file in (output, output.with_suffix(".html")):
        if file.is_dir():
            raise RecipeError(f"--output {output}: {file} is a directory; name another file")
        for key, path in inputs.items():
            if path is not None and os.path.realpath(path) == os.path.realpath(file):
                raise RecipeError(f"--output {output}: it would replace what {key} names; name another file")
    with writing(output):
        tempfile.TemporaryFile(dir=next(filter(Path.exists, output.absolute().parents))).close()


def audit_pairs(setup: Setup, output: Path, train: Train, options: FoldOptions | None) -> None:
    """Writes the audit, and its page beside it; prints its tables. Without options, nothing is trained. Every
    rank must call it. Raises DataError and RunError."""
    table, console, seed = setup.data.train, setup.console, setup.recipe.seed
    folds = folds_of(setup.data, options.num_folds, seed) if options else None
    reference = prepare_reference(setup, tables=[table]).values
    columns, cells, order = pair_columns(setup, reference.of(table)), dict[str, Cells](), ("row", "ascending")
    looks, note = look_columns(setup)
    notes, columns = [note] if note else [], columns | looks
    runs = output.with_name(f".{output.name}.folds")
    if options is not None and folds is not None:
        ranks.first_does_for_all(lambda: discard(runs))  # of an audit that was stopped
        margins = unseen_margins(setup, reference, folds, options, runs, train)
        unseen, cells = fold_columns(margins, columns["length_gap"], folds, seed)
        columns, notes, order = columns | unseen, [*notes, CAVEATS], ("p_wrong", "descending")
    pairs = pa.table(columns)
    marks = _marks(pairs)
    counts = {what: pc.sum(mask).as_py() or 0 for what, mask in marks.items()}
    dropped = [source["dropped"] for source in setup.data.report["train"]["sources"]]
    equal = sum(of.get("identical_after_truncation", {"rows": 0})["rows"] for of in dropped)
    counts["Left out, because both answers are equal after truncation"] = equal
    rows = [(what, f"{count:,}") for what, count in counts.items()]
    cells = {f"Of {table.num_pairs:,} pairs": Cells(("", "pairs"), rows), **cells}
    page = output.with_suffix(".html")

    def write() -> None:
        numbered = pairs.append_column("at", pa.array(np.arange(table.num_pairs)))
        lists = {
            what: numbered.filter(mask).sort_by([order]).slice(0, _MOST_TEXTS).to_pylist()
            for what, mask in [*marks.items()][:-1]  # copies look alike
        }
        values: Any = {"path": output, "cells": cells, "notes": notes, "lists": lists}
        values["texts_of"] = lambda at: pair_texts(table, at, setup.tokenizer)
        text = render_page("audit.html.jinja", **values)
        _write(output, pairs)
        write_text_atomically(page, text)

    ranks.first_does_for_all(write)
    ranks.only_first_does(lambda: discard(runs))
    for part in (*notes, *(terminal_table(title, each) for title, each in cells.items())):
        console.print(part)
    console.print(f"Audit: {output}; page: {page}")


def _marks(pairs: pa.Table) -> dict[str, Any]:
    """Returns [P] booleans by what they say of a pair."""
    marks: dict[str, Any] = {}
    if "p_wrong" in pairs.column_names:
        marks["Improbable: p_wrong above 0.5"] = pc.greater(pairs["p_wrong"], 0.5)
        marks["Improbable, and explained by length"] = pairs["longer_explains"]
    if "never_learned" in pairs.column_names:
        marks["Never learned at two looks or more"] = pairs["never_learned"]
    return {
        **marks,
        "Contradicted by another pair": pairs["contradicted_by"].is_valid(),
        "The rejected answer has the higher score": pc.less(pairs["score_margin"], 0),
        "Copies of an earlier pair": pairs["duplicate_of"].is_valid(),
    }


def _places(table: PairTable, sources: Sequence[str]) -> list[str]:
    """Returns where each pair is, [P]: "source row 3", by names of the sources."""
    both = zip(table.source_indices, table.row_numbers, strict=True)
    return [f"{sources[source]} row {row}" for source, row in both]


def pair_columns(setup: Setup, logps: FloatArray) -> Columns:
    """Returns what is known without training. logps: [P, (chosen, rejected)] of the reference, in nats."""
    table, sources = setup.data.train, source_names(setup.recipe.data.train)
    places, sides = np.array(_places(table, sources)), [table.chosen_keys, table.rejected_keys]
    both = [np.concatenate(keys, axis=1) for keys in (sides, sides[::-1])]  # the second: answers exchanged
    first, number = distinct_keys(np.concatenate(both))
    same, opposite = first[number].reshape(2, -1)  # [P] the first pair that has these tokens
    is_copy = same < np.arange(len(same))
    return {
        "source": np.array(sources)[table.source_indices],
        "row": table.row_numbers.astype(np.int64),
        "pair": table.pair_names,
        "reference_margin": logps[:, 0] / table.chosen_scored - logps[:, 1] / table.rejected_scored,
        "chosen_tokens": table.chosen_lengths,
        "rejected_tokens": table.rejected_lengths,
        "length_gap": table.chosen_lengths - table.rejected_lengths,
        "score_margin": pa.array(table.score_margins, from_pandas=True),  # null: there is none
        "equal_after_truncation": (table.chosen_keys == table.rejected_keys).all(axis=1),
        "duplicate_of": pa.array(places[same], mask=~is_copy),
        "contradicted_by": pa.array(places[opposite % len(same)], mask=opposite >= len(same)),
    }


def look_columns(setup: Setup) -> tuple[Columns, str]:
    """Returns what the finished run in `output_dir` logged of each pair each time that it trained on it, and
    a sentence about what is not said."""
    recipe, root = setup.recipe, setup.recipe.output_dir
    info, path = read_json(root / INFO_FILE) or {}, root / PARTS["pairs"]
    if info.get("status") != "finished" or not path.is_dir():
        return {}, f"No margins of a run: {root} has no finished run with {path.name}."
    keys = [f"data.train.{number}.path" for number in range(len(recipe.data.train))]
    now, then = input_fingerprints(recipe, keys), info.get("inputs", {})
    changed = [f"{key} ({recipe.inputs[key]})" for key in keys if now[key] != then.get(key, now[key])]
    if changed or info["fingerprints"]["data"] != setup.data.fingerprint:
        what = ", ".join(changed) or "the tokenizer, its template, or keys of data (weight and keep, too)"
        return {}, f"No margins of the run in {root}: its pairs are not these; changed since: {what}."
    lines = pq.read_table(path, columns=["source", "row", "step", "margin", "loss"]).sort_by("step")
    sides = (lines["source"].cast("string"), lines["row"].cast("string"))
    lines = lines.append_column("place", pc.binary_join_element_wise(*sides, " row "))
    kinds = [("margin", "list"), ("loss", "list"), ("margin", "max")]
    looks = lines.group_by("place", use_threads=False).aggregate(kinds)  # on threads, order is lost
    names = source_names(load_recipe(root / RECIPE_FILE).data.train)  # sources may have other names now
    places = pa.array(_places(setup.data.train, names))
    looks = looks.take(pc.index_in(places, value_set=looks["place"]))  # null: no look
    has_two = pc.greater(pc.list_value_length(looks["margin_list"]), 1)
    never_learned = pc.if_else(has_two, pc.less_equal(looks["margin_max"], 0), pa.scalar(None, pa.bool_()))
    note = "" if pc.any(has_two).as_py() else "never_learned is empty: the run trained on no pair twice."
    columns = {"margin": looks["margin_list"], "loss": looks["loss_list"], "never_learned": never_learned}
    return columns, note


# ------------------------------------------------------------------------- models that have not seen the pair


def folds_of(data: Data, num_folds: int, seed: int) -> IntArray:
    """Returns the fold of each pair, [P]. Pairs that `keys_together` joins are in one fold; so are those
    whose prompts have equal tokens, copies for one. Raises DataError."""
    table, largest = data.train, 0
    if table.num_pairs < FEWEST_PAIRS:
        what = f"--folds: {table.num_pairs:,} pairs are too few to train models on a part of them"
        raise DataError(f"{what}, {FEWEST_PAIRS} are enough; leave --folds out, the rest needs no minimum")
    pairs, tokens = np.arange(table.num_pairs), distinct_keys(table.prompt_keys)[1]
    for keys in keys_together(table, data.report["train"]["sources"]).values():
        shared = np.concatenate((tokens, distinct_keys(keys)[1] + len(pairs)))
        groups = components(len(pairs), np.tile(pairs, 2), shared)
        folds = divide(groups, num_folds, seed)
        sizes, largest = np.bincount(folds, minlength=num_folds), int(np.bincount(groups).max())
        if sizes.all() and len(pairs) - sizes.max() >= FEWEST_TRAINED:
            return folds
    raise DataError(
        f"--folds {num_folds}: {largest:,} of {len(pairs):,} pairs stay together, by a prompt or an image, "
        f"so a fold has no pair or leaves fewer than {FEWEST_TRAINED} to train on; take 2 folds or none, or "
        "name a column of prompts in data.train.*.columns.prompt if the rows have one"
    )


def unseen_margins(
    setup: Setup, reference: FrozenReference, folds: IntArray, options: FoldOptions, runs: Path, train: Train
) -> FloatArray:
    """Returns the margin of each pair in nats, [P], of an adapter that `train` trains in `runs` on pairs of
    the other folds. Raises RunError if one is not finite."""
    table, recipe, console = setup.data.train, setup.recipe, setup.console
    tree, default_lr = recipe.model_dump(mode="json"), DEFAULT_LR
    adapter: Any = {"r": 16, "alpha": 32}
    if recipe.model.lora or is_adapter(recipe.model.path):
        adapter = recipe.model.model_dump(mode="json", exclude_unset=True).get("lora")
        default_lr = recipe.optim.lr
    tree["model"]["lora"], tree["reference"]["sync"] = adapter, None
    tree["optim"] |= {"lr": default_lr if options.lr is None else options.lr, "warmup_steps": None}
    tree["logging"], tree["data"]["eval"] = {"samples": None, "pairs": False}, []
    tree |= {"train": {}, "checkpoint": {}, "export": {"verify": "none"}, "verdict": None}
    rng, (first, name_of) = np.random.default_rng(recipe.seed), distinct_keys(table.pair_keys)
    used = np.zeros((folds.max() + 1, table.num_pairs), dtype=np.bool_)
    for fold, of_fold in enumerate(used):  # names are drawn: copies of a pair are used together
        drawn = rng.permutation(np.flatnonzero(folds[first] != fold))
        drawn = drawn[np.cumsum(np.bincount(name_of)[drawn]) <= options.train_pairs]
        of_fold[:] = np.isin(name_of, drawn)
    per_step = max(1, int(used.sum(axis=1).min()) // FEWEST_STEPS)
    tree["packing"]["pairs_per_step"] = min(recipe.packing.pairs_per_step, per_step)
    timed, tokens = rng.permutation(table.num_pairs)[:_TIMED_PAIRS], row_builder(setup, table).sizes().tokens
    _, seconds = _score(setup, None, reference, timed, "Measuring the time of some pairs")
    passes = table.num_pairs + ADAPTER_PASSES * used.sum()
    seconds *= tokens.mean() * passes / tokens[timed].sum()
    named = to_yaml(adapter, one_line=True) if adapter else recipe.model.path
    console.print(
        f"{len(used)} folds: an adapter ({named}, optim.lr {tree['optim']['lr']:g}) trains on "
        f"{used[0].sum():,} other pairs and scores the fold; about {format_seconds(seconds)} in all"
    )
    margins = np.zeros(table.num_pairs)
    for fold, of_fold in enumerate(used):
        root, keep = runs / str(fold), runs / f"{fold}.parquet"
        names = pa.table({"pair": table.select(np.flatnonzero(of_fold)).pair_names})
        ranks.first_does_for_all(partial(_write, keep, names))
        own = {"keep": {"from": str(keep)}, "share": None, "weight": 1.0}
        sources = np.unique(table.source_indices[of_fold]).tolist()
        data = {**tree["data"], "train": [tree["data"]["train"][source] | own for source in sources]}
        with shown(console, f"Fold {fold + 1}: training on {of_fold.sum():,} other pairs"):
            train(parse_recipe({**tree, "output_dir": str(root), "data": data}), QUIET)
        here = np.flatnonzero(folds == fold)
        margins[here], _ = _score(setup, str(root / "model"), reference, here, f"Fold {fold + 1}: scoring")
        if num_wrong := int((~np.isfinite(margins[here])).sum()):
            what = f"--folds: the model of fold {fold + 1} gives {num_wrong:,} margins that are not finite"
            raise RunError(f"{what}; lower --lr")
    return margins


def _score(
    setup: Setup, adapter: str | None, reference: FrozenReference, pairs: IntArray, work: str
) -> tuple[FloatArray, float]:
    """Returns the pairs' margins in nats, and the seconds of the pass."""
    release_memory()
    facts = adapter and resolve_model(setup.recipe, setup.device, adapter, recipe_key="--folds")
    facts = facts and replace(facts, processor=setup.policy_facts.processor)
    scorer = load_proved(replace(setup, console=QUIET), facts or None).scorer
    table = setup.data.train.select(pairs)
    builder, begun = row_builder(setup, table, CachedReference(lookup=reference.of)), time.monotonic()
    with shown(setup.console, work, "pairs", len(pairs)) as bar:
        budget, objective = setup.reference_token_budget, setup.objective
        values = evaluate_pairs(scorer, builder, objective, token_budget=budget, progress=bar.advance)
    return pair_metrics(values, beta=1.0)["rewards/margins"].cpu().numpy(), time.monotonic() - begun


def _write(path: Path, pairs: pa.Table) -> None:
    with written_aside(path) as temporary:
        pq.write_table(pairs, temporary, write_page_checksum=True)


def fold_columns(
    margins: FloatArray, length_gaps: IntArray, folds: IntArray, seed: int
) -> tuple[Columns, dict[str, Cells]]:
    """Returns what models say that have not seen the pair, and tables of how far to believe it. margins: [P]
    in nats."""
    z, of_length = certainty(margins, folds), certainty(length_gaps, folds)
    p_wrong = sigmoid(-z)
    found = swap_test((z, of_length), np.abs(length_gaps), seed)
    scores = ("p_wrong", "the length gap alone", "|length_gap|")
    rows = [
        (score, with_interval(mean, bounds)) for score, (mean, *bounds) in zip(scores, found, strict=True)
    ]
    bins = [(f"{sure:.3f}", f"{agrees:.3f}", f"{num:,}") for num, sure, agrees in calibration(z)]
    longer_explains = (sigmoid(-of_length) < 0.3) & (p_wrong > 0.5)
    columns = {"fold": folds, "unseen_margin": margins, "p_wrong": p_wrong}
    heads = ("the model's probability of the answer it prefers", "labels that say the same", "pairs")
    swapped = f"{NEGATED:.0%} of the labels swapped, {NUM_DRAWS} draws: what finds them?"
    return columns | {"longer_explains": longer_explains}, {
        swapped: Cells(("score", "AUROC (95 % of the draws)"), rows),
        "Calibration, in tenths of the pairs": Cells(heads, bins),
    }
