"""Prepares rows of a source for `dpopack show`: the tokens that the model will get. Writes no files.

Each row is tokenised with the length limits of a run, and once more without, to find what truncation cuts.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dpo_pack.data.formats import FORMATS, BadRow, Pair, Row
from dpo_pack.data.ingest import LISTED_ROWS, Ingestion, Progress
from dpo_pack.data.locating import locate_source
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import PairTable, TokenStore
from dpo_pack.data.tokenization import (
    EndTokens,
    TokenizationSettings,
    parse_row,
    template_opens_turn,
    tokenize_batch,
)
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.data.truncation import LengthLimits, PairIds, TokenIds, truncate
from dpo_pack.data.workers import tokenize_rows
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.system.errors import DataError

FIRST_ROWS = 200  # shown of each source, besides the rows that the user asks for
_UNLIMITED = LengthLimits(max_length=1 << 31, max_prompt_length=None, truncation="drop")
# Tokens decode to this if their last bytes begin a character, whose other bytes are in the next tokens.
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source that rows come from."""

    name: str  # as in reports
    label: str  # for people: the name of the file
    key: str  # "data.train.0"
    row_word: str  # the unit of row numbers: "row" or "line"

    @property
    def is_held_out(self) -> bool:
        return self.key.startswith("data.eval.")

    def place(self, row_number: int) -> str:
        return f"{self.label} {self.row_word} {row_number:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a sequence. The texts of all tokens of a sequence, joined, are the text of the sequence."""

    id: int
    text: str  # "" if the token is a part of a character; the last such token has the whole character
    part: Literal["prompt", "completion"]
    scored: bool | float  # True, False, or the token's weight in the sum of log-probs
    is_cut: bool  # truncation removes the token, so the model does not see it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ViewedPair:
    """A pair, before and after it became tokens."""

    origin: Origin
    format: str
    row_number: int
    content: Row  # what the format reads of the row, under our column names
    pair: Pair
    alone: TokenIds  # the prompt, tokenised without a completion
    whole: PairIds  # before truncation
    fitted: PairIds  # the tokens that the model gets
    limits: LengthLimits
    num_positions: int | None  # that the model computes exactly; None: not known
    opens_turn: bool  # False: no template, or it writes nothing for a generation prompt
    tokenizer: Tokenizer
    ends: EndTokens  # the tokens that can end a completion

    def end_of(self, side: str) -> str | None:
        """Returns the last token that ends the model's completion: EOS, or a template's token after a turn.

        Returns None if there is no such token.
        """
        found = self.ends.found_in(self.fitted.completion(side))
        return _decode(found[-1:], self.tokenizer) if found else None

    def tokens(self, side: str) -> list[Token]:
        """Returns the prompt and one completion ("chosen" or "rejected"), also the tokens that were cut."""
        prompt, completion = self.whole.prompt, self.whole.completion(side)
        texts = token_texts(np.concatenate([prompt, completion]), self.tokenizer)
        kept = len(self.fitted.completion(side))
        begin, end = self._cut_prompt
        cut = [begin <= position < end for position in range(len(prompt))]
        cut += [position >= kept for position in range(len(completion))]
        ids = [*prompt.tolist(), *completion.tolist()]
        weights = self.whole.chosen_weights if side == "chosen" else self.whole.rejected_weights
        assert weights is not None
        scored = [bool(weight) if weight in (0, 1) else weight for weight in weights.tolist()]
        return [
            Token(
                id=id,
                text=text,
                part="prompt" if position < len(prompt) else "completion",
                scored=position >= len(prompt) and not is_cut and scored[position - len(prompt)],
                is_cut=is_cut,
            )
            for position, (id, text, is_cut) in enumerate(zip(ids, texts, cut, strict=True))
        ]

    @property
    def _cut_prompt(self) -> tuple[int, int]:
        """(begin, end) of the prompt tokens that `prompt_left` cuts. BOS stays if there is room for it."""
        whole, fitted = self.whole.prompt, self.fitted.prompt
        keeps_first = len(fitted) > 1 and whole[0] == self.tokenizer.bos_token_id
        return int(keeps_first), int(keeps_first) + len(whole) - len(fitted)

    def text_after_boundary(self) -> str:
        """Returns the end of the prompt's text that is tokenised with a completion, or "" if no part is."""
        return "".join(token_texts(self.alone, self.tokenizer)[len(self.whole.prompt) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row that does not become a pair."""

    origin: Origin
    row_number: int
    reason: str
    detail: str
    content: (
        Any  # what the format reads of the row, under our column names; the whole row if it reads nothing
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutReason:
    """All rows of a source that are left out for one reason."""

    origin: Origin
    reason: str
    num_rows: int
    of_rows: int  # tokenised rows of the source
    remedy: str  # "" if the rows are to be left out and only a change of the data would keep them
    stops_run: bool
    rows: tuple[LeftOut, ...]  # the first ones


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceView:
    """The rows of a source that were read."""

    origin: Origin
    format: str
    columns: Mapping[str, str]  # our names -> the source's, of the columns that the format reads
    columns_not_read: Sequence[str]
    num_rows: int  # tokenised
    num_kept: int
    num_rows_of_source: int | None  # None: not known before its end, and the end was not reached
    last_row: int  # the number of the last row that was read
    pairs: tuple[ViewedPair, ...]  # of the first rows, and of the rows that were asked for
    left_out: tuple[LeftOutReason, ...]


def view_source(
    source: SourceRecipe,
    key: str,
    data: DataRecipe,
    tokenizer: Tokenizer,
    *,
    name: str,
    label: str,
    asked_rows: Collection[int] = (),
    reads_all: bool = False,
    num_positions: int | None = None,
    progress: Progress,
) -> SourceView:
    """Views the first rows of a source and `asked_rows`; with `reads_all` also counts all other rows.

    `num_positions` is how many positions the model computes exactly; None if that is not known.
    A bad row that would stop a run is only left out here. Raises DataError if the source cannot be read or
    has no rows, ModelError if the tokenizer lacks a feature.
    """
    located = locate_source(source, key, None)
    ingestion = Ingestion(located=located, source=source, data=data, tokenizer=tokenizer)
    pairs: list[ViewedPair] = []
    left_out: dict[str, list[LeftOut]] = {}
    opened = ingestion.open()
    origin = Origin(name=name, label=label, key=key, row_word=opened.row_word)
    with closing(opened.rows):
        rows, settings = ingestion.start(opened)
        selection = _Selection(rows=rows, asked_rows=asked_rows, reads_all=reads_all)
        batches = tokenize_rows(
            iter(selection), settings, tokenizer, num_workers=0, max_pairs=source.max_pairs
        )
        with closing(batches):
            for batch in batches:
                taken = selection.take()
                ingestion.count(batch)
                progress(f"Reading {label}", ingestion.num_rows, opened.num_rows)
                for number, bad in batch.dropped:
                    listed = left_out.setdefault(bad.reason, [])
                    if len(listed) < LISTED_ROWS:
                        content, _ = taken[number]
                        listed.append(
                            LeftOut(
                                origin=origin,
                                row_number=number,
                                reason=bad.reason,
                                detail=bad.detail,
                                content=content.content
                                if isinstance(content, BadRow)
                                else _content(content, ingestion.columns_read) or content,
                            )
                        )
                dropped = {number for number, _ in batch.dropped}
                kept = [(at, row) for at, (row, is_shown) in taken.items() if is_shown and at not in dropped]
                pairs += _view(
                    kept, origin, settings, tokenizer, ingestion.columns_read, num_positions=num_positions
                )
    if ingestion.num_rows == 0:
        raise DataError(f"{located.label} has no rows; correct or remove {key}")
    return SourceView(
        origin=origin,
        format=ingestion.format,
        columns=ingestion.columns_read,
        columns_not_read=ingestion.columns_not_read,
        num_rows=ingestion.num_rows,
        num_kept=ingestion.num_kept,
        num_rows_of_source=selection.num_rows if selection.is_at_end else opened.num_rows,
        last_row=selection.last_row,
        pairs=tuple(pairs),
        left_out=tuple(
            LeftOutReason(
                origin=origin,
                reason=reason,
                num_rows=ingestion.dropped_counts[reason],
                of_rows=ingestion.num_rows,
                remedy=ingestion.advice(bad),
                stops_run=ingestion.stops_run(reason),
                rows=tuple(left_out[reason]),
            )
            for reason, (_, bad) in ingestion.first_dropped.items()
        ),
    )


class _Selection:
    """Yields the rows to tokenise, and keeps them until `take` returns them after each batch."""

    def __init__(self, *, rows: Iterator[NumberedRow], asked_rows: Collection[int], reads_all: bool) -> None:
        self.rows, self.asked_rows, self.reads_all = rows, asked_rows, reads_all
        self.num_rows = self.last_row = 0
        self.is_at_end = False
        self._taken: dict[int, tuple[Any, bool]] = {}

    def __iter__(self) -> Iterator[NumberedRow]:
        last_asked = max(self.asked_rows, default=0)
        for number, row in self.rows:
            if not self.reads_all and self.num_rows >= FIRST_ROWS and self.last_row >= last_asked:
                return
            self.num_rows, self.last_row = self.num_rows + 1, number
            is_shown = self.num_rows <= FIRST_ROWS or number in self.asked_rows
            if is_shown or self.reads_all:
                self._taken[number] = (row, is_shown)
                yield number, row
        self.is_at_end = True

    def take(self) -> dict[int, tuple[Any, bool]]:
        """Returns the rows since the last call by their numbers, each with True if it is to be shown."""
        taken, self._taken = self._taken, {}
        return taken


def _view(
    rows: Sequence[NumberedRow],
    origin: Origin,
    settings: TokenizationSettings,
    tokenizer: Tokenizer,
    fields: Collection[str],
    *,
    num_positions: int | None,
) -> list[ViewedPair]:
    """Returns the pairs of rows, whose format reads the fields. Each row must give a pair."""
    unlimited = replace(settings, limits=_UNLIMITED)
    whole = _pair_ids(tokenize_batch(rows, unlimited, tokenizer).pairs)
    prompts = tokenize_batch(rows, replace(unlimited, completion_tokens=0), tokenizer).prompts
    alone = {prompt.row_number: prompt.ids for prompt in prompts}
    is_conversation = FORMATS[settings.format].content == "messages"
    pairs = []
    for (number, row), ids in zip(rows, whole, strict=True):
        pair = parse_row(row, settings, tokenizer)
        pairs.append(
            ViewedPair(
                origin=origin,
                format=settings.format,
                row_number=number,
                content=_content(row, fields),
                pair=pair,
                alone=alone.get(number, ids.prompt),
                whole=ids,
                fitted=truncate(ids, settings.limits, tokenizer.bos_token_id),
                limits=settings.limits,
                num_positions=num_positions,
                opens_turn=is_conversation and template_opens_turn(pair, tokenizer),
                tokenizer=tokenizer,
                ends=EndTokens.of(tokenizer, settings.format),
            )
        )
    return pairs


def _content(row: Any, fields: Collection[str]) -> dict[str, Any]:
    return {field: row[field] for field in fields if field in row}


def _pair_ids(pairs: TokenStore) -> list[PairIds]:
    table = PairTable.of([pairs])
    return [
        PairIds(
            prompt=table.prompt(i),
            chosen=table.chosen(i),
            rejected=table.rejected(i),
            chosen_weights=table.token_weights(i)[0],
            rejected_weights=table.token_weights(i)[1],
        )
        for i in range(table.num_pairs)
    ]


def token_texts(ids: TokenIds, tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each token; joined, they are the text of the sequence.

    A token alone may decode to another text than inside its sequence (a space at its beginning, a part of a
    character). So each token is decoded with tokens before it, whose text is then removed.
    """
    texts: list[str] = []
    values = ids.tolist()
    begin = known = 0  # `values[begin:known]` gave the last text that is not empty
    for end in range(1, len(values) + 1):
        before = _decode(values[begin:known], tokenizer)
        now = _decode(values[begin:end], tokenizer)
        is_part = now.endswith(_PART_OF_A_CHARACTER) and end < len(values)
        texts.append("" if is_part else now[len(before) :])
        if not is_part:
            begin, known = known, end
    return texts


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
