"""Reads a recipe's pairs for `dpopack show`, without loading weights. Writes no files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dpo_pack.data.faults import FEW, Origin, source_notes
from dpo_pack.data.formats import FORMATS, BadRow
from dpo_pack.data.ingest import Ingestion
from dpo_pack.data.merging import prompt_merging
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.sources import locate_source
from dpo_pack.data.store import PairTable, join_pairs, pair_lengths
from dpo_pack.data.tokenization import TokenizedPair, tokenize_rows, tokenizing
from dpo_pack.data.view import (
    Fault,
    LeftOutRow,
    PackedRow,
    ShownRecipe,
    SourceView,
    find_faults,
    shown_image,
    shown_pair,
)
from dpo_pack.model.config import known_positions
from dpo_pack.packing.bin_packing import PADDED
from dpo_pack.packing.lengths import ModelShape
from dpo_pack.packing.plan import PlanSettings
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.run.models import CPU, resolve_model
from dpo_pack.run.pairs import plan_settings
from dpo_pack.run.setup import NO_PAIRS, prepare_tokenizer
from dpo_pack.system.errors import DataError, ModelError, RecipeError
from dpo_pack.system.process import printable

FIRST_ROWS = 200  # of each source that are read, besides the rows that the user asks for
# Groups of pairs are packed by tokens alone: costs decide nothing on one rank.
_TOKENS_ONLY = ModelShape(token_weights=1.0, head_weights=0, attention=())


def show_recipe(
    recipe: Recipe,
    console: Console,
    *,
    asked_rows: Collection[int] = (),
    reads_all: bool = False,
    draws: bool = False,
) -> ShownRecipe:
    """Reads the first rows of each source and the rows `asked_rows`, or all rows; leaves out bad rows.

    With `draws` the images of shown pairs have their tiles, for a page.

    Raises RecipeError for an online recipe, or if no source has one of the rows; DataError if a source cannot
    be read, has no rows, or has an image that changes meanwhile; ModelError if the tokenizer lacks a feature.
    """
    if recipe.online is not None:
        raise RecipeError(NO_PAIRS)
    data, images = recipe.data, None
    try:  # any device: only the config is used
        facts = resolve_model(recipe, CPU)
        num_positions, images = known_positions(facts.config), facts.processor
    except ModelError:  # with `tokenizer.path`, pairs can be shown where the model is not there
        if recipe.model.images:
            raise
        num_positions = None
    tokenizer = prepare_tokenizer(recipe, images)
    views: list[SourceView] = []
    read: dict[str, TokenizedPair] = {}  # the pairs by their places
    trained: dict[str, TokenizedPair] = {}  # those of training sources
    for part, sources in (("train", data.train), ("eval", data.eval_sources)):
        labels = [source.name or Path(source.path).name for source in sources]
        for number, (source, name) in enumerate(zip(sources, source_names(sources), strict=True)):
            label = labels[number] if labels.count(labels[number]) == 1 else name
            located = locate_source(source, f"data.{part}.{number}", None, reads_images=images is not None)
            view, pairs = _view_source(
                Ingestion(
                    located=located,
                    source=source,
                    data=data,
                    tokenizer=tokenizer,
                    images=images,
                ),
                name,
                label if part == "train" else f"{label} (held out)",
                console,
                asked_rows=asked_rows,
                reads_all=reads_all,
                num_positions=num_positions,
            )
            views.append(view)
            placed = {view.place(pair.row.number): pair for pair in pairs}
            read |= placed
            trained |= placed if part == "train" else {}
    there = {pair.row for view in views for pair in view.pairs}
    there |= {row.row for view in views for row in view.dropped}
    if missing := sorted(set(asked_rows) - there):
        names = ", ".join(view.label for view in views)
        raise RecipeError(f"--pair {missing[0]}: no such {views[0].row_word} was read of {names}")
    owners: dict[bytes, list[str]] = {}  # the places of the pairs that have each image
    for place, pair in read.items():
        for image in pair.row.images:
            owners.setdefault(image.key, []).append(place)
    shown = (read[view.place(pair.row)] for view in views for pair in view.pairs)
    found = {image.key: image for pair in shown for image in pair.row.images}
    try:
        drawn = [shown_image(image, owners[key], images, draws) for key, image in found.items() if images]
    except BadRow as bad:
        raise DataError(f"{bad.detail}; run the same command again, which reads all images anew") from bad
    template = "no chat template, because the data is not a conversation"
    if any(FORMATS[view.format].content == "messages" for view in views):
        owner = "processor" if images is not None and images.gives_template(tokenizer) else "tokenizer"
        template = f"chat template: {recipe.tokenizer.chat_template or f'of the {owner}'}"
    positions = "unknown" if num_positions is None else f"{num_positions:,}"
    return ShownRecipe(
        model=recipe.model.path,
        tokenizer=recipe.tokenizer.path or recipe.model.path,
        settings=(
            f"Model {recipe.model.path}, tokenizer {recipe.tokenizer.path or 'of the model'}, "
            f'{len(tokenizer):,} tokens, EOS "{tokenizer.eos_token}"; {template}',
            f"data.max_length: {data.max_length:,} tokens of prompt and one completion; data.truncation: "
            f"{data.truncation}; positions that the model computes exactly: {positions}",
            *(f"{view.label}: {note}" for view in views for note in view.notes),
        ),
        sources=views,
        asked=bool(asked_rows),
        packed_row=_packed_row(
            trained,
            plan_settings(recipe),
            share_prompt=recipe.shares_prompts,
            merges_prompts=recipe.packing.merge_prompts,
        ),
        images=drawn,
    )


def _view_source(
    ingestion: Ingestion,
    name: str,
    label: str,
    console: Console,
    *,
    asked_rows: Collection[int],
    reads_all: bool,
    num_positions: int | None,
) -> tuple[SourceView, list[TokenizedPair]]:
    key, tokenizer, max_pairs = ingestion.located.key, ingestion.tokenizer, ingestion.source.max_pairs
    pairs: list[TokenizedPair] = []
    contents: dict[int, Any] = {}  # of the rows of `pairs`
    dropped: list[LeftOutRow] = []
    taken: dict[int, Any] = {}  # the rows that are being tokenised
    with ingestion.start() as rows, console.status("Reading data") as status:
        selected = _selected(rows, taken, asked_rows, reads_all=reads_all)
        with (
            tokenizing(ingestion.settings, tokenizer) as submit,
            closing(tokenize_rows(selected, submit, num_workers=0, max_pairs=max_pairs)) as batches,
        ):
            for batch in batches:
                ingestion.count(batch)
                status.update(printable(f"Reading {label}: {ingestion.num_rows:,} rows"))
                content = {number: _content(row, ingestion.columns_read) for number, row in taken.items()}
                taken.clear()
                dropped += [
                    LeftOutRow(row=number, reason=bad.reason, detail=bad.detail, content=content[number])
                    for number, bad in batch.dropped
                    if number in (asked_rows or ingestion.dropped_rows[bad.reason])
                ]
                for pair in batch.kept:
                    if len(pairs) < FIRST_ROWS or pair.row.number in asked_rows:
                        pairs.append(pair)
                        contents[pair.row.number] = content[pair.row.number]
        is_at_end = next(rows, None) is None and (reads_all or ingestion.num_rows <= FIRST_ROWS)
    if ingestion.num_rows == 0:
        raise DataError(f"{ingestion.located.label} has no rows; correct or remove {key}")
    origin = Origin.of(key, ingestion.settings, tokenizer, num_positions=num_positions)
    left_out = [_reason(reason, ingestion) for reason in ingestion.first_dropped]
    many = [reason for reason in left_out if reason.count >= FEW * reason.of]
    faults = sorted([*find_faults(pairs, origin), *many], key=lambda fault: -fault.count)
    first = [pair.row.number for pair in pairs[: 2 if key.startswith("data.train.") else 1]]
    wanted = asked_rows or {*first, *(fault.rows[0] for fault in faults)}
    shown = [pair for pair in pairs if pair.row.number in wanted]
    summary = ingestion.summary()
    view = SourceView(
        name=name,
        label=label,
        row_word=ingestion.opened.row_word,
        format=ingestion.format,
        columns=ingestion.columns_read,
        columns_not_read=summary["columns_not_read"],
        notes=list(source_notes(summary, names_left_out=False)),
        rows_read=ingestion.num_rows,
        rows=ingestion.num_rows if is_at_end else ingestion.opened.num_rows,
        pairs_kept=ingestion.num_kept,
        warnings=faults,
        left_out=left_out,
        dropped=dropped,
        pairs=[shown_pair(pair, origin, contents[pair.row.number], faults) for pair in shown],
    )
    return view, pairs


def _selected(
    rows: Iterator[NumberedRow], taken: dict[int, Any], asked_rows: Collection[int], *, reads_all: bool
) -> Iterator[NumberedRow]:
    last_asked = max(asked_rows, default=0)
    for position, (number, row) in enumerate(rows, 1):
        if position <= FIRST_ROWS or reads_all or number in asked_rows:
            taken[number] = row
            yield number, row
        if position >= FIRST_ROWS and number >= last_asked and not reads_all:
            return


def _content(row: Any, fields: Collection[str]) -> Any:
    if isinstance(row, BadRow):
        return _shortened(row.content)
    return _shortened({field: row[field] for field in fields if field in row} or row)


def _shortened(value: Any) -> Any:
    """Returns the value with the beginnings of images, which can be megabytes."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    is_image = isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image"))
    return f"{value[:40]!r}..." if is_image else value


def _reason(name: str, ingestion: Ingestion) -> Fault:
    number, bad = ingestion.first_dropped[name]
    remedy = ingestion.advice(bad)
    if name in ("empty_completion", "identical_completions"):
        remedy = f"correct {ingestion.located.key}.columns if they are wrong, or {remedy or 'mend the rows'}"
    consequence = "a run stops there" if ingestion.stops_run(name) else "left out"
    return Fault(
        name=name,
        sentence=f"no pair ({name}), {consequence}; {ingestion.opened.row_word} {number:,}: {bad.detail}",
        remedy=remedy,
        rows=ingestion.dropped_rows[name],
        count=ingestion.dropped_counts[name],
        of=ingestion.num_rows,
        unit="row",
    )


def _packed_row(
    pairs: Mapping[str, TokenizedPair], settings: PlanSettings, *, share_prompt: bool, merges_prompts: bool
) -> PackedRow | None:
    if not pairs:
        return None
    places, order = list(pairs), np.arange(len(pairs))
    fitted = [pair.fitted for pair in pairs.values()]
    table = PairTable.of([join_pairs(fitted, [1.0] * len(pairs), order.tolist())])
    lengths, is_padded = pair_lengths(table), settings.algorithm == PADDED
    share_prompt = share_prompt and not is_padded
    plan = settings.plan(
        lengths.padded_tokens() if is_padded else lengths.row_tokens(share_prompt=share_prompt),
        order=order,
        merging=prompt_merging(table, _TOKENS_ONLY) if merges_prompts else None,
    )
    row = max(plan.pack_step(0)[0], key=len)
    # Of what both completions begin with, a row that shares prompts has one copy.
    once = lengths.shared if share_prompt else lengths.prompt
    parts = {
        "prompt": once if share_prompt else 2 * once,
        "chosen": lengths.prompt + lengths.chosen - once,
        "rejected": lengths.prompt + lengths.rejected - once,
    }
    return PackedRow(
        pairs={places[pair]: {part: int(tokens[pair]) for part, tokens in parts.items()} for pair in row},
        tokens=plan.sizes.of_row(row).tokens,
        token_budget=settings.token_budget,
    )
