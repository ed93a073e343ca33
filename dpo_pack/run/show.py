"""Shows a recipe's training pairs as the model will meet them (`dpopack show`), without loading weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from dpo_pack.data.faults import SIDES, Fault, find_faults, notes_of
from dpo_pack.data.formats import FORMATS, Row
from dpo_pack.data.merging import prompt_merging
from dpo_pack.data.store import PairTable, join_pairs, pair_lengths
from dpo_pack.data.view import LeftOut, LeftOutReason, SourceView, Token, ViewedPair, view_source
from dpo_pack.model.config import known_positions
from dpo_pack.model.layout import common_prefix_length
from dpo_pack.packing.flops import ModelShape
from dpo_pack.packing.report import DrawnRow, draw_row
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.recipe.schema import SourceRecipe
from dpo_pack.run.models import recipe_precision, resolve_policy
from dpo_pack.run.plans import plan_settings
from dpo_pack.run.setup import prepare_tokenizer, require_pairs
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.output import printable

FIRST_PAIRS = 2  # of each training source; pairs with a fault are shown beside them
# Groups of pairs are packed by tokens alone: costs decide nothing on one rank.
_TOKENS_ONLY = ModelShape(token_weights=1.0, head_weights=0, attention=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """A pair of the report."""

    source: str  # its name in reports
    row: int
    place: str  # for people
    content: Row  # what the format reads of the row, under our column names
    chosen: tuple[Token, ...]  # prompt and completion; tokens that were cut included
    rejected: tuple[Token, ...]
    num_shared: int  # first tokens that chosen and rejected have in common, without those that were cut
    ends: dict[str, str | None]  # for "chosen" and "rejected": the token that ends it (EOS); None: missing
    notes: tuple[str, ...]  # faults of this pair
    new_notes: tuple[str, ...]  # of faults that no earlier shown pair of the source has


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A row as packing makes it from the pairs that were read."""

    drawn: DrawnRow
    pairs: dict[str, DrawnRow]  # each pair alone, by its place
    token_budget: int
    share_prompt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecipe:
    """All that `dpopack show` shows."""

    model: str
    tokenizer: str
    num_tokens: int  # entries of the tokenizer
    eos: str
    template: str | None  # where the chat template comes from; None if no source needs one
    max_length: int
    num_positions: int | None  # that the model computes exactly; None: its config has no such number
    truncation: str
    sources: tuple[SourceView, ...]
    faults: tuple[Fault, ...]
    pairs: tuple[ShownPair, ...]
    asked: bool  # the pairs are those that --pair names
    left_out: tuple[LeftOutReason, ...]
    rows_left_out: tuple[LeftOut, ...]  # rows of `left_out`; with --pair, only the rows that it names
    row: PackedRow | None  # None: no pair was kept


def show_recipe(
    recipe: Recipe, console: Console, *, asked_rows: Collection[int] = (), reads_all: bool = False
) -> ShownRecipe:
    """Reads the first rows of each source, the rows `asked_rows`, or all rows; held-out sources are the last.

    Raises RecipeError for an online recipe, or if no source has one of the rows. Raises DataError and
    ModelError as `view_source` does.
    """
    require_pairs(recipe)
    tokenizer = prepare_tokenizer(recipe)
    num_positions = _known_positions(recipe)
    with console.status("Reading data") as status:

        def progress(what: str, done: int, total: int | None) -> None:
            status.update(printable(f"{what}: {done:,}{f' of {total:,}' if total else ''} rows"))

        views = [
            view_source(
                source,
                key,
                recipe.data,
                tokenizer,
                name=name,
                label=label,
                asked_rows=asked_rows,
                reads_all=reads_all,
                num_positions=num_positions,
                progress=progress,
            )
            for key, source, name, label in _sources(recipe)
        ]
    faults = [fault for view in views for fault in find_faults(view)]
    left_out = [reason for view in views for reason in view.left_out]
    rows_left_out = [row for reason in left_out for row in reason.rows]
    if asked_rows:
        _check_asked(views, asked_rows)
        rows_left_out = [row for row in rows_left_out if row.row_number in asked_rows]
    is_templated = any(FORMATS[view.format].content == "messages" for view in views)
    template = recipe.tokenizer.chat_template
    return ShownRecipe(
        model=recipe.model.path,
        tokenizer=recipe.tokenizer.path or recipe.model.path,
        num_tokens=len(tokenizer),
        eos=str(tokenizer.eos_token),
        template=(str(template) if template else "the tokenizer's own") if is_templated else None,
        max_length=recipe.data.max_length,
        num_positions=num_positions,
        truncation=recipe.data.truncation,
        sources=tuple(views),
        faults=tuple(faults),
        pairs=tuple(pair for view in views for pair in _shown_pairs(view, faults, asked_rows)),
        asked=bool(asked_rows),
        left_out=tuple(left_out),
        rows_left_out=tuple(rows_left_out),
        row=_packed_row(recipe, views[: len(recipe.data.train)]),
    )


def _check_asked(views: Sequence[SourceView], asked_rows: Collection[int]) -> None:
    """Raises RecipeError if no source has one of the rows."""
    there = {pair.row_number for view in views for pair in view.pairs}
    there |= {row.row_number for view in views for reason in view.left_out for row in reason.rows}
    if missing := sorted(set(asked_rows) - there):
        has = "; ".join(
            f"of {view.origin.label}, {view.origin.row_word}s 1 to {view.last_row:,} were read"
            for view in views
        )
        raise RecipeError(f"--pair {missing[0]}: there is no such {views[0].origin.row_word}; {has}")


def _known_positions(recipe: Recipe) -> int | None:
    """Returns the positions that the recipe's model computes exactly; None if they are not known."""
    precision = recipe_precision(recipe, torch.device("cpu"))  # any device: only the config is used
    try:
        return known_positions(resolve_policy(recipe, precision).config)
    except ModelError:  # with `tokenizer.path`, pairs can be shown where the model is not there
        return None


def _sources(recipe: Recipe) -> list[tuple[str, SourceRecipe, str, str]]:
    """Returns key, source, name in reports and name for people of each source, held-out sources last.

    The name for people is the source's own name or that of its file.
    """
    train = recipe.data.train
    sets = [("train", train), ("eval", recipe.data.eval_sources)]
    named = [
        (f"data.{part}.{number}", source, name)
        for part, sources in sets
        for number, (source, name) in enumerate(zip(sources, source_names(sources), strict=True))
    ]
    labels = [
        source.name or (Path(source.path).name if Path(source.path).is_file() else source.path)
        for _, source, _ in named
    ]
    if any(
        labels[: len(train)].count(label) > 1 or labels[len(train) :].count(label) > 1 for label in labels
    ):
        labels = [name for _, _, name in named]
    return [
        (*one, label if number < len(train) else f"{label} (held out)")
        for number, (one, label) in enumerate(zip(named, labels, strict=True))
    ]


def _picked(view: SourceView, faults: Sequence[Fault], asked_rows: Collection[int]) -> list[ViewedPair]:
    """Returns the pairs that were asked for; else the first ones, and the first one with each fault."""
    if asked_rows:
        return [pair for pair in view.pairs if pair.row_number in asked_rows]
    num_first = 1 if view.origin.is_held_out else FIRST_PAIRS
    with_fault = {fault.rows[0] for fault in faults if fault.origin == view.origin}
    return [
        pair
        for position, pair in enumerate(view.pairs)
        if position < num_first or pair.row_number in with_fault
    ]


def _shown_pairs(
    view: SourceView, faults: Sequence[Fault], asked_rows: Collection[int]
) -> Iterator[ShownPair]:
    known: set[str] = set()  # names of the faults of earlier pairs
    for pair in _picked(view, faults, asked_rows):
        sides = [pair.tokens(side) for side in SIDES]
        kept = [np.array([token.id for token in tokens if not token.is_cut]) for tokens in sides]
        notes = notes_of(pair, faults)
        yield ShownPair(
            source=pair.origin.name,
            row=pair.row_number,
            place=pair.origin.place(pair.row_number),
            content=pair.content,
            chosen=tuple(sides[0]),
            rejected=tuple(sides[1]),
            num_shared=common_prefix_length(kept),
            ends={side: pair.end_of(side) for side in SIDES},
            notes=tuple(notes.values()),
            new_notes=tuple(note for name, note in notes.items() if asked_rows or name not in known),
        )
        known |= notes.keys()


def _packed_row(recipe: Recipe, views: Sequence[SourceView]) -> PackedRow | None:
    """Plans the pairs that were read, in their order; returns the row of the first step with most pairs."""
    pairs = [pair for view in views for pair in view.pairs]
    if not pairs:
        return None
    weights, numbers = [pair.pair.weight for pair in pairs], [pair.row_number for pair in pairs]
    table = PairTable.of([join_pairs([pair.fitted for pair in pairs], weights, numbers)])
    lengths, settings, packing = pair_lengths(table), plan_settings(recipe), recipe.packing
    is_padded = packing.mode == "padded"
    share_prompt = recipe.shares_prompts and not is_padded
    plan = settings.plan(
        lengths.padded_tokens() if is_padded else lengths.row_tokens(share_prompt=share_prompt),
        order=np.arange(len(pairs)),
        merging=prompt_merging(table, _TOKENS_ONLY) if packing.merge_prompts else None,
    )
    row = max(plan.pack_step(0)[0], key=len)
    return PackedRow(
        drawn=draw_row(plan, lengths, row, share_prompt),
        pairs={
            pairs[index].origin.place(pairs[index].row_number): draw_row(
                plan, lengths, np.array([index]), share_prompt
            )
            for index in row.tolist()
        },
        token_budget=packing.token_budget,
        share_prompt=share_prompt,
    )


def to_json(shown: ShownRecipe) -> str:
    """Returns the report as JSON text. A sequence has the tokens that the model gets."""
    value = {
        "model": shown.model,
        "tokenizer": shown.tokenizer,
        "sources": [
            {
                "name": view.origin.name,
                "format": view.format,
                "columns": view.columns,
                "columns_not_read": view.columns_not_read,
                "rows_read": view.num_rows,
                "rows": view.num_rows_of_source,
                "pairs_kept": view.num_kept,
            }
            for view in shown.sources
        ],
        "warnings": [
            {
                "name": fault.name,
                "source": fault.origin.name,
                "sentence": fault.sentence,
                "remedy": fault.remedy,
                "count": fault.num_rows,
                "of": fault.of_rows,
                "unit": fault.unit,
                "rows": fault.rows,
            }
            for fault in shown.faults
        ],
        "pairs": [
            {
                "source": pair.source,
                "row": pair.row,
                "content": pair.content,
                "chosen": _sequence_json(pair.chosen),
                "rejected": _sequence_json(pair.rejected),
                "shared_tokens": pair.num_shared,
                "ends_with_eos": {side: end is not None for side, end in pair.ends.items()},
                "cut_tokens": {
                    "prompt": sum(token.is_cut for token in pair.chosen if token.part == "prompt"),
                    **{
                        side: sum(token.is_cut for token in tokens if token.part == "completion")
                        for side, tokens in (("chosen", pair.chosen), ("rejected", pair.rejected))
                    },
                },
                "warnings": list(pair.notes),
            }
            for pair in shown.pairs
        ],
        "dropped": [
            {
                "source": row.origin.name,
                "row": row.row_number,
                "reason": row.reason,
                "detail": row.detail,
                "content": row.content,
            }
            for row in shown.rows_left_out
        ],
        "dropped_rows": {
            view.origin.name: {reason.reason: reason.num_rows for reason in view.left_out}
            for view in shown.sources
        },
    }
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def _sequence_json(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    return [
        {"id": token.id, "text": token.text, "part": token.part, "scored": token.scored}
        for token in tokens
        if not token.is_cut
    ]
