"""What `dpopack show` shows: pairs as the model gets them, their faults, and rows that are left out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpo_pack.data.faults import (
    FEW,
    SENTENCES,
    SIDES,
    Origin,
    explain,
    faults_of,
    find_in,
    longest_length,
    sentence_of,
    sequence,
)
from dpo_pack.data.images import ImageProcessor, ReadImage, pixels_of, png_url
from dpo_pack.data.tokenization import TokenizedPair
from dpo_pack.packing.lengths import AnyIntArray, common_prefix_length

# Tokens decode to this if their last bytes begin a character, whose other bytes are in the next tokens.
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of a sequence. The texts of all tokens of a sequence, joined, are the text of the sequence."""

    id: int
    text: str  # "" if the token is a part of a character; the last such token has the whole character
    part: Literal["prompt", "completion"]
    scored: bool | float  # True, False, or the token's weight in the sum of log-probs
    is_placeholder: bool  # one of an image, of which the first one has a text that describes the image
    is_cut: bool  # truncation removes the token, so the model does not see it


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """A pair as the model gets it."""

    row: int
    content: Any  # what the format reads of the row, under our column names
    chosen: Sequence[Token]  # prompt and completion
    rejected: Sequence[Token]
    shared_tokens: int  # first tokens that chosen and rejected have in common
    ends_with: Mapping[str, str]  # the token that ends chosen, rejected (EOS); "": missing
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """An image of shown pairs, as the model gets it."""

    label: str  # [image 640x480, 391 tokens]
    pairs: Sequence[str]  # the places of all pairs that were read and have it
    tiles: Sequence[tuple[str, int, int]]  # PNG as a data URL; rows, columns of its tokens (0: unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutRow:
    """A row that does not become a pair."""

    row: int
    reason: str
    detail: str
    content: Any  # as in ShownPair; the whole row if the format reads nothing of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of some pairs of a source, or a reason for which rows are left out."""

    name: str  # a snake_case word
    sentence: str
    remedy: str
    rows: Sequence[int]  # numbers of rows that have the fault; of rows that are left out, the first ones
    count: int  # of all rows that have the fault
    of: int
    unit: Literal["pair", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """The rows of a source that were read."""

    name: str  # in reports
    label: str  # for people: the name of the file
    row_word: str  # the unit of row numbers: "row" or "line"
    format: str
    columns: Mapping[str, str]  # our names -> the source's, of the columns that the format reads
    columns_not_read: Sequence[str]
    notes: Sequence[str]  # what was changed for the chat template, and how much arrives
    rows_read: int  # and tokenised
    rows: int | None  # None: not known before the source's end, and the end was not reached
    pairs_kept: int
    warnings: Sequence[Fault]  # first those that most rows have
    left_out: Sequence[Fault]  # the reasons for which rows are left out
    dropped: Sequence[LeftOutRow]  # the first ones of each reason; if rows were asked for, only those
    pairs: Sequence[ShownPair]  # those asked for; else the first ones, and the first one with each fault

    def place(self, row_number: int) -> str:
        return f"{self.label} {self.row_word} {row_number:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A row as packing makes it from the pairs that were read. Numbers are tokens."""

    pairs: Mapping[str, Mapping[str, int]]  # by the place of each pair: prompt, chosen, rejected
    tokens: int
    token_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRecipe:
    """All that `dpopack show` shows."""

    model: str
    tokenizer: str
    settings: Sequence[str]  # sentences about the model, its tokenizer and the limits of lengths
    sources: Sequence[SourceView]  # held-out ones are last
    asked: bool  # the pairs are those that --pair names
    packed_row: PackedRow | None  # None: no pair was kept
    images: Sequence[ShownImage] = ()  # of the pairs that are shown

    @property
    def pairs(self) -> list[ShownPair]:
        return [pair for source in self.sources for pair in source.pairs]

    @property
    def warnings(self) -> list[Fault]:
        return [fault for source in self.sources for fault in source.warnings]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each pair: source, row, warnings, and as texts prompt, chosen and rejected."""

        def text(tokens: Sequence[Token], part: str) -> str:
            return "".join(token.text for token in tokens if token.part == part)

        return [
            {"source": source.name, "row": pair.row, "warnings": list(pair.warnings)}
            | {"prompt": text(pair.chosen, "prompt"), "chosen": text(pair.chosen, "completion")}
            | {"rejected": text(pair.rejected, "completion")}
            for source in self.sources
            for pair in source.pairs
        ]

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self.sources)
        return f"ShownRecipe({names}: {len(self.pairs):,} pairs, {len(self.warnings):,} warnings)"


def find_faults(pairs: Sequence[TokenizedPair], origin: Origin) -> Iterator[Fault]:
    """Yields the faults of the pairs of a source."""
    for name, found in faults_of(pairs, origin).items():
        if name == "prompt_in_completion" and len(found) < FEW * len(pairs):
            continue  # a few answers may well repeat it
        pair, evidence = max(found, key=lambda one: longest_length(one[0].whole))
        note, remedy = explain(name, evidence, pair, origin)
        yield Fault(
            name=name,
            sentence=sentence_of(name) if name in SENTENCES else f"{sentence_of(name)}: {note}",
            remedy=remedy,
            rows=[pair.row.number for pair, _ in found],
            count=len(found),
            of=len(pairs),
            unit="pair",
        )


def shown_pair(pair: TokenizedPair, origin: Origin, content: Any, faults: Sequence[Fault]) -> ShownPair:
    """Returns the pair with the texts of its tokens, and with those of its source's faults that it has."""
    whole, fitted, found = pair.whole, pair.fitted, dict(find_in(pair, origin))
    num_prompt = len(whole.context)
    # `prompt_left` cuts the tokens before `end`; BOS stays if there is room for it.
    begin = int(len(fitted.context) > 1 and whole.context[0] == origin.tokenizer.bos_token_id)
    end = begin + num_prompt - len(fitted.context)
    sides: dict[str, list[Token]] = {}
    ends_with: dict[str, str] = {}
    of_sides = zip(SIDES, fitted.completions, whole.weights or (None, None), strict=True)
    for side, completion, weights in of_sides:
        ids, num_kept = sequence(pair, side), num_prompt + len(completion)
        scored = np.zeros(len(ids))
        scored[num_prompt:num_kept] = 1.0 if weights is None else weights[: num_kept - num_prompt]
        texts, placeholders = _with_images(token_texts(ids, origin), ids, pair, origin)
        sides[side] = [
            Token(
                id=id,
                text=text,
                part="prompt" if at < num_prompt else "completion",
                scored=bool(weight) if weight in (0, 1) else weight,
                is_placeholder=at in placeholders,
                is_cut=begin <= at < end or at >= num_kept,
            )
            for at, (id, text, weight) in enumerate(zip(ids.tolist(), texts, scored.tolist(), strict=True))
        ]
        ends_with[side] = origin.text(np.array(origin.ends.found_in(completion)[-1:]))
    return ShownPair(
        row=pair.row.number,
        content=content,
        chosen=sides["chosen"],
        rejected=sides["rejected"],
        shared_tokens=len(fitted.context) + common_prefix_length(fitted.completions),
        ends_with=ends_with,
        warnings=[
            explain(fault.name, found[fault.name], pair, origin)[0] for fault in faults if fault.name in found
        ],
    )


def _with_images(
    texts: list[str], ids: AnyIntArray, pair: TokenizedPair, origin: Origin
) -> tuple[list[str], set[int]]:
    """Returns the texts with `[image 640x480, 391 tokens]` in place of each image, and all placeholders."""
    if not pair.row.images or origin.settings.images is None:
        return texts, set()
    processor, begin = origin.settings.images.processor, 0
    places = np.flatnonzero(ids == processor.token_id)
    for image in pair.row.images:
        of_image = places[begin : begin + processor.num_tokens((image.width, image.height))].tolist()
        begin += len(of_image)
        for place in of_image:
            texts[place] = ""
        texts[of_image[0]] = _image_label(image, of_image[-1] + 1 - of_image[0])
    return texts, set(places.tolist())


def _image_label(image: ReadImage, num_tokens: int) -> str:
    return f"[image {image.width}x{image.height}, {num_tokens:,} tokens]"


def shown_image(image: ReadImage, pairs: Sequence[str], processor: ImageProcessor, draws: bool) -> ShownImage:
    """Returns an image as the model gets it. With `draws`, raises BadRow if its file has changed."""
    num_tokens = processor.num_tokens((image.width, image.height))
    tiles, views = [], processor.views(pixels_of(image)) if draws else []
    for view in views:
        of_tile = num_tokens / len(views)
        rows = round((of_tile * view.shape[0] / view.shape[1]) ** 0.5)
        is_grid = rows > 0 and of_tile % rows == 0
        tiles.append((png_url(view), rows * is_grid, int(of_tile // rows) if is_grid else 0))
    return ShownImage(label=_image_label(image, num_tokens), pairs=pairs, tiles=tiles)


def token_texts(ids: AnyIntArray, origin: Origin) -> list[str]:
    """Returns the texts of the tokens, which are those of the sequence: alone, some decode to others."""
    texts: list[str] = []
    begin = known = 0  # `ids[begin:known]` gave the last text that is not empty
    for end in range(1, len(ids) + 1):
        text = origin.text(ids[begin:end], known - begin)
        is_part = text.endswith(_PART_OF_A_CHARACTER) and end < len(ids)
        texts.append("" if is_part else text)
        if not is_part:
            begin, known = known, end
    return texts
