"""Reads a recipe's pairs for `dpopack show`, without loading weights. Writes no files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from dpo_pack.data.faults import FEW, Origin, source_notes
from dpo_pack.data.formats import FORMATS, BadRow
from dpo_pack.data.images import image_label
from dpo_pack.data.ingest import Ingestion, columns_sentence
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.sources import locate_source
from dpo_pack.data.store import PairTable, join_pairs, pair_lengths
from dpo_pack.data.tokenization import TokenizedPair, tokenize_rows, tokenizing
from dpo_pack.data.view import ShownRecipe, find_faults, shown_pair
from dpo_pack.model.config import known_positions
from dpo_pack.packing.plan import plan_epoch
from dpo_pack.recipe.data import PackingRecipe
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.run.models import CPU, resolve_model
from dpo_pack.run.setup import NO_PAIRS, prepare_tokenizer
from dpo_pack.system.errors import DataError, ModelError, RecipeError
from dpo_pack.system.process import printable

FIRST_ROWS = 200  # of each source that are read, besides the rows that the user asks for


def show_recipe(
    recipe: Recipe, console: Console, *, asked_rows: Collection[int] = (), reads_all: bool = False
) -> ShownRecipe:
    """Reads the first rows of each source and the rows `asked_rows`, or all rows; leaves out bad rows.

    Raises RecipeError for an online recipe, or if no source has one of the rows; DataError if a source cannot
    be read or has no rows; ModelError if the tokenizer lacks a feature.
    """
    if recipe.online is not None:
        raise RecipeError(NO_PAIRS)
    data, images, num_positions = recipe.data, None, None
    try:  # any device: only the config is used
        facts = resolve_model(recipe, CPU)
        num_positions, images = known_positions(facts.config), facts.processor
    except ModelError:  # with `tokenizer.path`, pairs can be shown where the model is not there
        if recipe.model.images:
            raise
    tokenizer = prepare_tokenizer(recipe, images)
    report: dict[str, Any] = {"model": recipe.model.path, "asked": bool(asked_rows)}
    report |= {name: [] for name in ("settings", "sources", "warnings", "pairs", "left_out", "dropped")}
    read: dict[str, TokenizedPair] = {}  # the pairs by their places
    trained: dict[str, TokenizedPair] = {}  # those of training sources
    for part, sources in (("train", data.train), ("eval", data.eval_sources)):
        labels = [source.name or Path(source.path).name for source in sources]
        for number, (source, name) in enumerate(zip(sources, source_names(sources), strict=True)):
            label = labels[number] if labels.count(labels[number]) == 1 else name
            label = label if part == "train" else f"{label} (held out)"
            key = f"data.{part}.{number}"
            located = locate_source(source, key, None, reads_images=images is not None)
            ingestion = Ingestion(
                located=located, source=source, data=data, tokenizer=tokenizer, images=images
            )
            rows = _read_rows(ingestion, label, console, asked_rows, reads_all=reads_all)
            origin = Origin(key, ingestion.settings, tokenizer, num_positions)
            pairs = _report_source(
                report, ingestion, rows, origin, asked_rows, {"name": name, "label": label}
            )
            read |= pairs
            trained |= pairs if part == "train" else {}
    there = {row["row"] for row in (*report["pairs"], *report["dropped"])}
    if missing := sorted(set(asked_rows) - there):
        names = ", ".join(source["label"] for source in report["sources"])
        raise RecipeError(f"--pair {missing[0]}: no such {ingestion.opened.row_word} was read of {names}")
    owners: dict[bytes, list[str]] = {}  # the places of the pairs that have each image
    for place, pair in read.items():
        for image in pair.row.images:
            owners.setdefault(image.key, []).append(place)
    shown = [image for pair in report["pairs"] for image in read[pair["place"]].row.images]
    shown = list({image.key: image for image in shown}.values())
    report["images"] = [
        {"label": image_label(image, images), "pairs": owners[image.key]} for image in shown if images
    ]
    report["image_token"] = None if images is None else images.token_id
    report["packed_row"] = _packed_row(trained, recipe.packing, share_prompt=recipe.shares_prompts)
    template = "no chat template, because the data is not a conversation"
    if any(FORMATS[source["format"]].content == "messages" for source in report["sources"]):
        owner = "processor" if images is not None and images.gives_template(tokenizer) else "tokenizer"
        template = f"chat template: {recipe.tokenizer.chat_template or f'of the {owner}'}"
    positions = "unknown" if num_positions is None else f"{num_positions:,}"
    report["settings"] = [
        f"Model {recipe.model.path}, tokenizer {recipe.tokenizer.path or 'of the model'}, "
        f'{len(tokenizer):,} tokens, EOS "{tokenizer.eos_token}"; {template}',
        f"data.max_length: {data.max_length:,} tokens of prompt and one completion; data.truncation: "
        f"{data.truncation}; positions that the model computes exactly: {positions}",
        *dict.fromkeys(report["settings"]),
    ]
    return ShownRecipe(report=report, images=shown)


class _Rows(NamedTuple):
    pairs: list[TokenizedPair]  # the first ones, and those asked for
    dropped: list[dict[str, Any]]  # rows that are left out: the first ones of each reason, or those asked for
    contents: dict[int, Any]  # of the rows of `pairs`: what the format reads
    num_rows: int | None  # of the source; None: not known


def _read_rows(
    ingestion: Ingestion, label: str, console: Console, asked_rows: Collection[int], *, reads_all: bool
) -> _Rows:
    pairs, dropped, contents = list[TokenizedPair](), list[dict[str, Any]](), dict[int, Any]()
    taken: dict[int, Any] = {}  # the rows that are being tokenised

    def selected() -> Iterator[NumberedRow]:
        for position, (number, row) in enumerate(rows, 1):
            if position <= FIRST_ROWS or reads_all or number in asked_rows:
                taken[number] = row
                yield number, row
            if position >= FIRST_ROWS and number >= max(asked_rows, default=0) and not reads_all:
                return

    with (
        ingestion.start() as rows,
        console.status("Reading data") as status,
        tokenizing(ingestion.settings, ingestion.tokenizer) as submit,
        closing(
            tokenize_rows(selected(), submit, num_workers=0, max_pairs=ingestion.source.max_pairs)
        ) as batches,
    ):
        for batch in batches:
            ingestion.count(batch)
            status.update(printable(f"Reading {label}: {ingestion.num_rows:,} rows"))
            for number, bad in batch.dropped:
                if number in (asked_rows or ingestion.dropped_rows[bad.reason]):
                    content = _content(taken[number], ingestion.columns_read)
                    row = {"row": number, "reason": bad.reason, "detail": bad.detail, "content": content}
                    dropped.append(row)
            for pair in batch.kept:
                if len(pairs) < FIRST_ROWS or pair.row.number in asked_rows:
                    pairs.append(pair)
                    contents[pair.row.number] = _content(taken[pair.row.number], ingestion.columns_read)
            taken.clear()
        is_at_end = next(rows, None) is None and (reads_all or ingestion.num_rows <= FIRST_ROWS)
    if ingestion.num_rows == 0:
        raise DataError(f"{ingestion.located.label} has no rows; correct or remove {ingestion.located.key}")
    num_rows = ingestion.num_rows if is_at_end else ingestion.opened.num_rows
    return _Rows(pairs, dropped, contents, num_rows)


def _report_source(
    report: dict[str, Any],
    ingestion: Ingestion,
    rows: _Rows,
    origin: Origin,
    asked_rows: Collection[int],
    names: dict[str, str],
) -> dict[str, TokenizedPair]:
    """Adds a source to the report, and returns its pairs by their places."""
    pairs, summary, word = rows.pairs, ingestion.summary(), ingestion.opened.row_word
    left_out = [_reason(reason, ingestion) for reason in ingestion.first_dropped]
    faults = [*find_faults(pairs, origin), *(one for one in left_out if one["count"] >= FEW * one["of"])]
    faults.sort(key=lambda fault: -fault["count"])
    first = [pair.row.number for pair in pairs[: 2 if origin.key.startswith("data.train.") else 1]]
    wanted = asked_rows or {*first, *(fault["rows"][0] for fault in faults)}
    places = {f"{names['label']} {word} {pair.row.number:,}": pair for pair in pairs}
    known = {fault["name"] for fault in faults}
    of_source = {
        "warnings": faults,
        "left_out": left_out,
        "dropped": rows.dropped,
        "pairs": [
            {"place": place, "content": rows.contents[pair.row.number], **shown_pair(pair, origin, known)}
            for place, pair in places.items()
            if pair.row.number in wanted
        ],
    }
    for name, ones in of_source.items():
        report[name] += ({"source": names["name"], **one} for one in ones)
    source = {
        **names,
        "row_word": word,
        "format": ingestion.format,
        "columns": ingestion.columns_read,
        "columns_not_read": summary["columns_not_read"],
        "rows_read": ingestion.num_rows,
        "rows": rows.num_rows,
        "pairs_kept": ingestion.num_kept,
    }
    report["sources"].append(source)
    of_all = "only" if rows.num_rows is None else f"{ingestion.num_rows:,} of"
    report["settings"] += [
        f"{names['label']}, format {ingestion.format}: {of_all} {rows.num_rows or ingestion.num_rows:,} rows "
        f"tokenised, {ingestion.num_kept:,} kept, {ingestion.num_rows - ingestion.num_kept:,} left out",
        columns_sentence(ingestion.columns_read, summary["columns_not_read"]),
        *(f"{names['label']}: {note}" for note in source_notes(summary, names_left_out=False)),
    ]
    return places


def _reason(name: str, ingestion: Ingestion) -> dict[str, Any]:
    """Returns a reason for which rows are left out."""
    number, bad = ingestion.first_dropped[name]
    remedy = ingestion.advice(bad)
    if name in ("empty_completion", "identical_completions"):
        remedy = f"correct {ingestion.located.key}.columns if they are wrong, or {remedy or 'mend the rows'}"
    outcome = "a run stops there" if ingestion.stops_run(name) else "left out"
    return {
        "name": name,
        "sentence": f"no pair ({name}), {outcome}; {ingestion.opened.row_word} {number:,}: {bad.detail}",
        "remedy": remedy,
        "rows": ingestion.dropped_rows[name],
        "count": ingestion.dropped_counts[name],
        "of": ingestion.num_rows,
        "unit": "row",
    }


def _content(row: Any, fields: Collection[str]) -> Any:
    """Returns what the format reads of a row, with the beginnings of images, which can be megabytes."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shortened(one) for key, one in value.items()}
        if isinstance(value, list):
            return [shortened(one) for one in value]
        is_image = isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image"))
        return f"{value[:40]!r}..." if is_image else value

    if isinstance(row, BadRow):
        return shortened(row.content)
    return shortened({field: row[field] for field in fields if field in row} or row)


def _packed_row(
    pairs: Mapping[str, TokenizedPair], packing: PackingRecipe, *, share_prompt: bool
) -> dict[str, Any] | None:
    """Returns a row as packing makes it from the pairs that were read, in tokens."""
    if not pairs:
        return None
    places, order, fitted = list(pairs), np.arange(len(pairs)), [pair.fitted for pair in pairs.values()]
    lengths = pair_lengths(PairTable.of([join_pairs(fitted, [1.0] * len(pairs), order.tolist())]))
    is_padded = packing.mode == "padded"
    share_prompt = share_prompt and not is_padded
    tokens = lengths.padded_tokens() if is_padded else lengths.row_tokens(share_prompt=share_prompt)
    plan = plan_epoch(
        tokens,
        order=order,
        token_budget=packing.token_budget,
        pairs_per_step=packing.pairs_per_step,
        is_packed=not is_padded,
    )
    row = max(plan.pack_step(0)[0], key=len)
    # Of what both completions begin with, a row that shares prompts has one copy.
    once = lengths.shared if share_prompt else lengths.prompt
    parts = {
        "prompt": once if share_prompt else 2 * once,
        "chosen": lengths.prompt + lengths.chosen - once,
        "rejected": lengths.prompt + lengths.rejected - once,
    }
    return {
        "pairs": {places[pair]: {part: int(size[pair]) for part, size in parts.items()} for pair in row},
        "tokens": plan.sizes.of_row(row).tokens,
        "token_budget": packing.token_budget,
    }
