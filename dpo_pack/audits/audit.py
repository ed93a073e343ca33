"""`dpopack audit`: a row for each training pair. What is known of it for nothing, what a finished run logged
of it, and with folds what a model says that has not seen it: an adapter that was trained on other pairs.

Legend: P training pairs. Columns of audit.parquet have [P] values, docs/audit.md defines them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console

from dpo_pack.audits.statistics import NEGATED, NUM_DRAWS, calibration, certainty, divide, sigmoid, swap_test
from dpo_pack.data.store import PairTable, content_key, distinct_keys
from dpo_pack.packing.lengths import ADAPTER_PASSES, FloatArray, IntArray
from dpo_pack.recipe.data import source_names
from dpo_pack.recipe.load import INFO_FILE, is_adapter, parse_recipe
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
from dpo_pack.system.errors import DataError
from dpo_pack.system.files import discard, read_json, write_text_atomically, written_aside
from dpo_pack.system.machine import release_memory
from dpo_pack.training.health import with_interval
from dpo_pack.training.metrics import pair_metrics
from dpo_pack.training.references import CachedReference

FEWEST_PAIRS, FEWEST_STEPS, DEFAULT_LR = 500, 32, 2e-5  # of folds
_TIMED_PAIRS, _MOST_TEXTS = 32, 30  # of each list on the page
CAVEATS = (
    "Where labels are wrong already, these AUROCs are lower bounds: a swap makes a wrong label right. Random "
    "swaps, though, are easier to find than people's errors, which are about pairs that are hard to judge."
)
QUIET = Console(quiet=True)
Columns = dict[str, Any]
Train = Callable[..., object]  # trainer.train, which is above this room


def audit_pairs(
    setup: Setup, output: Path, *, num_folds: int, train_pairs: int, lr: float | None, train: Train
) -> None:
    """Writes the audit, and its page beside it; prints its tables. Without folds, nothing is trained. Every
    rank must call it. Raises DataError."""
    table, console, seed = setup.data.train, setup.console, setup.recipe.seed
    folds = folds_of(table, num_folds, seed) if num_folds else None
    reference = prepare_reference(setup, tables=[table]).values
    columns, cells, order = pair_columns(setup, reference.of(table)), dict[str, Cells](), ("row", "ascending")
    looks, note = look_columns(setup)
    notes, columns = [note] if note else [], columns | looks
    if folds is not None:
        options: Any = {"train_pairs": train_pairs, "lr": lr, "runs": output.with_name(".folds")}
        margins = unseen_margins(setup, reference, folds, train=train, **options)
        unseen, cells = fold_columns(margins, columns["length_gap"], folds, seed)
        columns, notes, order = columns | unseen, [*notes, CAVEATS], ("p_wrong", "descending")
    pairs = pa.table(columns)
    marks = _marks(pairs)
    counts = {what: pc.sum(mask).as_py() or 0 for what, mask in marks.items()}
    dropped = [source["dropped"] for source in setup.data.report["train"]["sources"]]
    equal = sum(of.get("identical_after_truncation", {"rows": 0})["rows"] for of in dropped)
    counts["left out, because both answers are equal after truncation"] = equal
    rows = [(what, f"{count:,}") for what, count in counts.items()]
    cells = {f"Of {table.num_pairs:,} pairs": Cells(("", "pairs"), rows), **cells}
    page = output.with_suffix(".html")

    def write() -> None:
        numbered = pairs.append_column("at", pa.array(np.arange(table.num_pairs)))
        lists = {
            what: numbered.filter(mask).sort_by([order]).slice(0, _MOST_TEXTS).to_pylist()
            for what, mask in [*marks.items()][:-2]  # copies look alike
        }
        values: Any = {"path": output, "cells": cells, "notes": notes, "lists": lists}
        values["texts_of"] = lambda at: pair_texts(table, at, setup.tokenizer)
        text = render_page("audit.html.jinja", **values)
        _write(output, pairs)
        write_text_atomically(page, text)

    ranks.first_does_for_all(write)
    for part in (*(terminal_table(title, each) for title, each in cells.items()), *notes):
        console.print(part)
    console.print(f"Audit: {output}; page: {page}")


def _marks(pairs: pa.Table) -> dict[str, Any]:
    """Returns [P] booleans by what they say of a pair."""
    marks: dict[str, Any] = {}
    if "p_wrong" in pairs.column_names:
        marks["improbable: p_wrong above 0.5"] = pc.greater(pairs["p_wrong"], 0.5)
        marks["improbable, and explained by length"] = pairs["longer_explains"]
    if "never_learned" in pairs.column_names:
        marks["never learned at two looks or more"] = pairs["never_learned"]
    return {
        **marks,
        "contradicted by another pair": pairs["contradicted_by"].is_valid(),
        "the rejected answer has the higher score": pc.less(pairs["score_margin"], 0),
        "duplicates of an earlier pair": pairs["duplicate_of"].is_valid(),
        "of these, equal only after truncation": pairs["equal_after_truncation"],
    }


def _places(setup: Setup) -> list[str]:
    """Returns where each pair is, [P]: "source row 3"."""
    table, sources = setup.data.train, source_names(setup.recipe.data.train)
    both = zip(table.source_indices, table.row_numbers, strict=True)
    return [f"{sources[source]} row {row}" for source, row in both]


def pair_columns(setup: Setup, logps: FloatArray) -> Columns:
    """Returns what is known without training. logps: [P, (chosen, rejected)] of the reference, in nats."""
    table, sources = setup.data.train, np.array(source_names(setup.recipe.data.train))
    places, sides = np.array(_places(setup)), [table.chosen_keys, table.rejected_keys]
    both = [np.concatenate(keys, axis=1) for keys in (sides, sides[::-1])]  # the second: answers exchanged
    first, number = distinct_keys(np.concatenate(both))
    same, opposite = first[number].reshape(2, -1)  # [P] the first pair that has these tokens
    is_copy = same < np.arange(len(same))
    return {
        "source": sources[table.source_indices],
        "row": table.row_numbers.astype(np.int64),
        "pair": table.pair_names,
        "reference_margin": logps[:, 0] / table.chosen_scored - logps[:, 1] / table.rejected_scored,
        "chosen_tokens": table.chosen_lengths,
        "rejected_tokens": table.rejected_lengths,
        "length_gap": table.chosen_lengths - table.rejected_lengths,
        "score_margin": pa.array(table.score_margins, from_pandas=True),  # null: there is none
        "equal_after_truncation": is_copy & (table.pair_keys != table.pair_keys[same]).any(axis=1),
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
        what = ", ".join(changed) or "keys of data"
        return {}, f"No margins of the run in {root}: its pairs are not these; changed since: {what}."
    lines = pq.read_table(path, columns=["source", "row", "step", "margin", "loss"]).sort_by("step")
    sides = (lines["source"].cast("string"), lines["row"].cast("string"))
    lines = lines.append_column("place", pc.binary_join_element_wise(*sides, " row "))
    kinds = [("margin", "list"), ("loss", "list"), ("margin", "max")]
    looks = lines.group_by("place", use_threads=False).aggregate(kinds)  # on threads, order is lost
    looks = looks.take(pc.index_in(pa.array(_places(setup)), value_set=looks["place"]))  # null: no look
    has_two = pc.greater(pc.list_value_length(looks["margin_list"]), 1)
    never_learned = pc.if_else(has_two, pc.less_equal(looks["margin_max"], 0), pa.scalar(None, pa.bool_()))
    note = "" if pc.any(has_two).as_py() else "Never learned is not said: the run had no two looks at a pair."
    columns = {"margin": looks["margin_list"], "loss": looks["loss_list"], "never_learned": never_learned}
    return columns, note


# ------------------------------------------------------------------------- models that have not seen the pair


def folds_of(table: PairTable, num_folds: int, seed: int) -> IntArray:
    """Returns the fold of each pair, [P]. Pairs with a prompt in common, as written or as tokens, are in one
    fold; so are pairs with a completion in common, because its key has the prompt in it. Raises DataError."""
    if table.num_pairs < FEWEST_PAIRS:
        what = f"--folds: {table.num_pairs:,} pairs are too few to train models on a part of them"
        raise DataError(f"{what}, {FEWEST_PAIRS} are enough; leave --folds out, the rest needs no minimum")
    keys = [distinct_keys(kind)[1] for kind in (table.prompt_keys, table.whole_prompt_keys)]
    folds = divide(keys, num_folds, seed)
    if table.num_pairs - (largest := int(np.bincount(folds).max())) < FEWEST_PAIRS / 4:
        what = f"--folds {num_folds}: {largest:,} of {table.num_pairs:,} pairs are in one fold"
        remedy = "take more folds, or set data.train.*.columns.prompt: pairs of one prompt stay together"
        raise DataError(f"{what}, so too few are left to train on; {remedy}")
    return folds


def unseen_margins(
    setup: Setup,
    reference: FrozenReference,
    folds: IntArray,
    *,
    train_pairs: int,
    lr: float | None,
    runs: Path,
    train: Train,
) -> FloatArray:
    """Returns the margin of each pair in nats, [P], of an adapter that `train` trains on pairs of the other
    folds, at most `train_pairs`. After a stop, the runs in `runs` go on; at the end they are removed."""
    table, recipe, console = setup.data.train, setup.recipe, setup.console
    tree, has_adapter = recipe.model_dump(mode="json"), recipe.model.lora or is_adapter(recipe.model.path)
    tree["model"]["lora"] = tree["model"]["lora"] if has_adapter else {"r": 16, "alpha": 32}
    tree["optim"]["lr"] = lr or (recipe.optim.lr if has_adapter else DEFAULT_LR)
    tree["logging"], tree["data"]["eval"] = {"samples": None, "pairs": False}, []
    tree |= {"train": {}, "checkpoint": {}, "export": {"verify": "none"}}
    rng, num_folds = np.random.default_rng(recipe.seed), int(folds.max()) + 1
    used = np.zeros((num_folds, table.num_pairs), dtype=np.bool_)
    for fold, of_fold in enumerate(used):
        of_fold[rng.permutation(np.flatnonzero(folds != fold))[:train_pairs]] = True
    per_step = max(1, int(used.sum(axis=1).min()) // FEWEST_STEPS)
    tree["packing"]["pairs_per_step"] = min(recipe.packing.pairs_per_step, per_step)
    timed, tokens = rng.permutation(table.num_pairs)[:_TIMED_PAIRS], row_builder(setup, table).sizes().tokens
    _, seconds = _score(setup, None, reference, timed, "Measuring the time of some pairs")
    passes = table.num_pairs + ADAPTER_PASSES * used.sum()
    seconds *= tokens.mean() * passes / tokens[timed].sum()
    console.print(
        f"{num_folds} folds: an adapter ({tree['model']['lora'] or recipe.model.path}, optim.lr "
        f"{tree['optim']['lr']:g}) trains on {used[0].sum():,} other pairs and scores the fold; about "
        f"{format_seconds(seconds)} in all"
    )
    root = runs / content_key([tree, folds.tolist(), train_pairs, reference.fingerprint()])
    # Of copies the mean counts: all of them are used, or none.
    columns = {"pair": table.pair_names, **{str(fold): of * 1.0 for fold, of in enumerate(used)}}
    ranks.first_does_for_all(lambda: _write(root / "used.parquet", pa.table(columns)))
    margins = np.zeros(table.num_pairs)
    for fold in range(num_folds):
        keep = {"keep": {"from": str(root / "used.parquet"), "by": str(fold), "above": 0.99}, "share": None}
        sources = np.unique(table.source_indices[used[fold]]).tolist()
        data = {**tree["data"], "train": [tree["data"]["train"][source] | keep for source in sources]}
        with shown(console, f"Fold {fold + 1}: training on {used[fold].sum():,} other pairs"):
            train(parse_recipe({**tree, "output_dir": str(root / str(fold)), "data": data}), QUIET)
        path, here = str(root / str(fold) / "model"), np.flatnonzero(folds == fold)
        margins[here], _ = _score(setup, path, reference, here, f"Fold {fold + 1}: scoring")
    ranks.only_first_does(lambda: discard(runs))
    return margins


def _score(
    setup: Setup, adapter: str | None, reference: FrozenReference, pairs: IntArray, work: str
) -> tuple[FloatArray, float]:
    """Returns the pairs' margins in nats, and the seconds of the pass."""
    release_memory()
    facts = adapter and resolve_model(setup.recipe, setup.device, adapter, recipe_key="--folds")
    facts = facts and replace(facts, processor=setup.policy_facts.processor)
    scorer, table = (
        load_proved(replace(setup, console=QUIET), facts or None).scorer,
        setup.data.train.select(pairs),
    )
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
    columns = {
        "fold": folds,
        "unseen_margin": margins,
        "p_wrong": p_wrong,
        "longer_explains": longer_explains,
    }
    return columns, {
        f"{NEGATED:.0%} of the labels swapped, {NUM_DRAWS} draws: what finds them?": Cells(
            ("score", "AUROC (95 % of the draws)"), rows
        ),
        "Calibration, in tenths of the pairs": Cells(
            ("the model's probability of the answer it prefers", "labels that say the same", "pairs"), bins
        ),
    }
