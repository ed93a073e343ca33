"""Turns rows into token ids: chat templates, EOS, the boundary between prompt and completion, truncation.

The ids are those of TRL 1.16 (`DPOTrainer._prepare_dataset`): the prompt, and the prompt with each
completion, are tokenised as whole texts. The completions begin where these three first differ.
"""

import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpo_pack.data.formats import (
    FORMATS,
    SIDES,
    TRANSCRIPT_TURNS,
    Format,
    Pair,
    check_last_turn,
    with_system,
    with_system_message,
)
from dpo_pack.data.images import ImageReader, ReadImage
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import KEY_BYTES, NO_TOKENS, TokenIds, TokenStore, content_key, join_pairs
from dpo_pack.data.tokenizer import (
    TURN_END_TOKENS,
    Tokenizer,
    apply_chat_template,
    begin_of_turn,
    is_dialogue,
    scored_tokens,
    template_names,
)
from dpo_pack.data.values import BadRow, Message, score_margin_of
from dpo_pack.data.written import check_written, suited
from dpo_pack.packing.lengths import AnyIntArray, Bools, Group, common_prefix_length
from dpo_pack.recipe.data import FIELDS_OF_FORMAT, SCORE_FIELDS, DataRecipe, SourceRecipe
from dpo_pack.system.errors import DataError, ModelError, RecipeError

# Increase this number whenever a change of our code gives other token ids or other records for the same rows.
TOKENIZATION_VERSION = 11

# A longer text is refused, because encoding takes a second and 200 MB for a million characters.
_MAX_TEXT_CHARS = 1 << 22
CHOSEN_KEY = "chosen_is/"  # begins the names of counts: why an answer is chosen
# Byte n of an inferred prompt's key hashes its first BEGINNINGS[n] characters, of which a split needs few.
BEGINNINGS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
DroppedRow = tuple[int, BadRow]  # the number of a row without a pair or prompt, and the reason

# What a report always counts of kept pairs, and of their completions.
_COUNTS = (
    *("prompt_boundary_moved", "prompt_truncated"),
    *("completions_truncated", "completions_without_eos", "eos_lost"),
)

# The rows of a batch: at most so many, and no more after so many bytes. The tokenizer gets all their texts in
# one call, so that its threads have work, and its encodings take some hundred bytes a token.
_BATCH_ROWS = 512
_BATCH_BYTES = 1 << 20
_Result = Callable[[], "TokenizedBatch"]
Submit = Callable[[list[NumberedRow]], _Result]


@dataclass(slots=True, kw_only=True)
class TokenizationSettings:
    """All that decides the token ids of a source's rows."""

    format: str
    data: DataRecipe
    source: SourceRecipe
    tokenizer: Tokenizer
    completion_tokens: int | None = None  # tokens to leave free after a prompt; None if rows are pairs
    images: ImageReader | None = None  # None: rows with images are bad rows
    content: str = field(init=False)  # of the format
    template_options: dict[str, Any] = field(init=False)  # of the recipe; those of a row win
    end_ids: frozenset[int] = field(init=False)  # the tokens that end a completion
    end_window: int = field(init=False, default=1)  # it has an end if one of so many last tokens is one

    def __post_init__(self) -> None:
        self.content = self.reader.content
        self.template_options = {**self.data.chat_template_kwargs, **self.source.chat_template_kwargs}
        eos = self.tokenizer.eos_token_id
        self.end_ids = frozenset() if eos is None else frozenset([eos])
        if self.content == "messages":
            # A template ends turns with EOS or with another special token (<end_of_turn>, <|eot_id|>).
            added, self.end_window = self.tokenizer.added_tokens_decoder, TURN_END_TOKENS
            self.end_ids |= {id for id, token in added.items() if token.special}

    @property
    def reader(self) -> Format:
        """What reads the rows."""
        return TRANSCRIPT_TURNS if self.source.turns == "messages" else FORMATS[self.format]

    def ends_of(self, completion: AnyIntArray) -> list[int]:
        """Returns the tokens at the completion's end that end it."""
        return [token for token in completion[-self.end_window :].tolist() if token in self.end_ids]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt that the policy answers."""

    ids: TokenIds  # [C], C >= 1: the tokens that the policy continues
    text: str  # the whole prompt as text, special tokens included
    messages: tuple[Message, ...] | None  # only of a conversational row
    row_number: int  # in its source, from 1
    tools: Any = None  # of a conversational row: the tools that the policy may call


class ReadRow(NamedTuple):
    """A row as text."""

    number: int
    pair: Pair  # as the row has it, with the recipe's system prompt
    written: Pair  # in the form that the chat template writes
    texts: tuple[str, ...]  # prompt; of a pair also prompt + chosen, prompt + rejected; none for token ids
    counts: Mapping[str, int]  # of `check_written`
    contents: Sequence[Sequence[str]] = ()  # the texts of the messages of prompt, chosen and rejected
    has_other_turns: bool = False  # a completion is anything but one message of the assistant
    # Then, of all tokens of both sequences, whether the assistant says it; None: the whole completion. An
    # image is one of these tokens.
    turns: Sequence[Bools | None] = ()
    images: tuple[ReadImage, ...] = ()  # of the prompt, in order
    key: bytes = b""  # `pair_key`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedPair:
    """A pair before and after it became tokens; if rows are prompts, completions have no tokens."""

    row: ReadRow
    alone: TokenIds  # the prompt, tokenised without a completion
    whole: Group  # before truncation
    fitted: Group  # the tokens that the model gets


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedBatch:
    """The result for some consecutive rows: pairs or prompts, dropped rows and counts."""

    num_rows: int
    pairs: TokenStore  # if rows are prompts, the completions have no tokens
    prompts: tuple[Prompt, ...]  # one for each pair; empty if rows are pairs
    dropped: tuple[DroppedRow, ...]  # in row order
    counts: Counter[str]  # counts of kept pairs and of their completions, see _count
    kept: tuple[TokenizedPair, ...] = ()  # the pairs; empty if rows are prompts


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a key of all that decides token ids: a tokenizer with its template, versions of libraries."""
    settings = {
        "class": type(tokenizer).__name__,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "split_special_tokens": tokenizer.split_special_tokens,
        "versions": [version("tokenizers"), version("transformers")],
    }
    if not tokenizer.is_fast:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
            hashes = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
        return content_key([settings, hashes])
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Every call of the tokenizer sets and unsets these two entries. Our calls neither truncate nor pad.
    del backend["truncation"], backend["padding"]
    return content_key([settings, backend])


def check_tokenizer(settings: TokenizationSettings, label: str) -> None:
    """Raises ModelError if the tokenizer lacks the template or the token that the format needs, RecipeError
    if the recipe has a system prompt or options that no row of this format can use."""
    tokenizer, format, options = settings.tokenizer, settings.format, settings.template_options
    if settings.content == "messages":
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer has no chat template, which {format} data ({label}) needs; "
                "name a Jinja file in tokenizer.chat_template"
            )
        for name in options.keys() - template_names(str(tokenizer.chat_template)):
            what = f"chat_template_kwargs.{name} (of data or {label}): the chat template has no {name}"
            raise RecipeError(f"{what}, so it would change nothing; correct the name, or leave it out")
    elif options or settings.data.system_prompt is not None:
        key = "chat_template_kwargs" if settings.data.system_prompt is None else "system_prompt"
        raise RecipeError(
            f"data.{key} applies to conversational data only, and {label} is {format}; "
            "remove it, or put the text into the prompts"
        )
    elif settings.content == "text" and tokenizer.eos_token is None:
        raise ModelError(
            f"the tokenizer has no EOS token to end the completions of {label} with; "
            "set tokenizer.path to one that has, or tokenise the data yourself (format: tokenized)"
        )


def tokenize_batch(rows: Sequence[NumberedRow], settings: TokenizationSettings) -> TokenizedBatch:
    """Returns the token ids of the rows that give a pair or a prompt, and the reasons of all other rows."""
    is_pairs = settings.completion_tokens is None
    parsed, kept, dropped = list[ReadRow](), list[TokenizedPair](), list[DroppedRow]()
    for number, values in rows:
        try:
            parsed.append(read_row(number, values, settings))
        except BadRow as bad:
            dropped.append((number, bad.with_traceback(None)))
    encode = _given_ids if settings.content == "token_ids" else _encode
    ids = encode(parsed, settings)
    fit = fit_pair if is_pairs else _fit_prompt
    for row in parsed:
        sequences = tuple(islice(ids, 3 if is_pairs else 1))
        try:
            kept.append(fit(row, sequences, settings))
        except BadRow as bad:
            dropped.append((row.number, bad.with_traceback(None)))
    return TokenizedBatch(
        num_rows=len(rows),
        pairs=join_pairs(
            [one.fitted for one in kept],
            [one.row.pair.weight for one in kept],
            [one.row.number for one in kept],
            [_whole_prompt_key(one.row) for one in kept],
            [one.row.images for one in kept],
            settings.images.processor.fingerprint if settings.images is not None else "",
            [one.row.key for one in kept],
            [one.row.pair.score_margin for one in kept],
        ),
        prompts=() if is_pairs else tuple(_prompt_of(one, settings) for one in kept),
        dropped=tuple(sorted(dropped, key=lambda row: row[0])),
        counts=_count(kept, settings),
        kept=tuple(kept) if is_pairs else (),
    )


def read_row(number: int, row: Mapping[str, Any] | BadRow, settings: TokenizationSettings) -> ReadRow:
    """Returns the pair of a row, or its prompt alone if rows are prompts, and its texts. Raises BadRow."""
    if isinstance(row, BadRow):
        raise row
    format, tokenizer = settings.reader, settings.tokenizer
    is_pair = settings.completion_tokens is None
    pair = (format.pair if is_pair else format.prompt)(row)
    if "system" in settings.source.columns:
        pair = with_system(row, pair)
    if is_pair and (scores := settings.source.columns.keys() & {*SCORE_FIELDS}):
        pair = replace(pair, score_margin=score_margin_of(row, scores))
    if settings.content == "messages":
        read = _read_messages(number, row, pair, settings)
    elif settings.images is not None and row["images"]:
        raise BadRow("media", f"rows of format {settings.format} have no place for images")
    elif settings.content == "token_ids":
        _check_ids(pair, len(tokenizer) - 1)
        return ReadRow(number, pair, pair, (), {}, key=pair_key(pair))
    else:  # each completion ends with one EOS
        prompt, eos = str(pair.prompt), tokenizer.eos_token or ""
        texts = [prompt]
        for completion in (str(pair.chosen), str(pair.rejected)) if is_pair else ():
            if eos and eos in completion:  # its end may be `...<|im_end|>\n` already
                completion = re.sub(rf"({re.escape(eos)}\s*)+\Z", "", completion)
            texts.append(prompt + completion + eos)
        counts = {"characters": sum(map(len, texts[1:] or texts))}
        if begin_of_turn(tokenizer) not in prompt:
            is_transcript = settings.format == "transcript"
            counts["transcripts_without_template" if is_transcript else "prompts_without_template"] = 1
        read = ReadRow(number, pair, pair, tuple(texts), counts, key=pair_key(pair))
    for text in read.texts:
        if len(text) > _MAX_TEXT_CHARS:
            limit = f"more than {_MAX_TEXT_CHARS:,}"
            raise BadRow("text_too_long", f"prompt and completion have {len(text):,} characters, {limit}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(text[error.start]):04x}"
            raise BadRow("invalid_unicode", f"a text has half of a surrogate pair ({lone})") from None
    if read.has_other_turns and settings.data.scored_turns == "assistant":
        read = read._replace(turns=scored_tokens(read.written, read.texts[1:], tokenizer))
    if settings.images is not None:
        read = read._replace(texts=settings.images.expanded(read.texts, read.images))
    return read


def _check_ids(pair: Pair, last: int) -> None:
    for part in ("prompt", "chosen", "rejected"):
        if wrong := [token for token in getattr(pair, part) if not 0 <= token <= last]:
            detail = f"{part}_ids has the token id {wrong[0]}; the tokenizer's ids are 0 to {last}"
            raise BadRow("token_id_out_of_range", detail)


def _read_messages(
    number: int, row: Mapping[str, Any], pair: Pair, settings: TokenizationSettings
) -> ReadRow:
    tokenizer, data, images = settings.tokenizer, settings.data, tuple[ReadImage, ...]()
    if settings.images is not None:
        pair, images = settings.images.of_pair(pair, row["images"])
    key = pair_key(pair, images)
    if data.system_prompt is not None:
        assert isinstance(pair.prompt, list)
        pair = replace(pair, prompt=with_system_message(pair.prompt, data.system_prompt))
    if pair.template_options:
        known = {"tools", *template_names(str(tokenizer.chat_template))}
        for name, value in pair.template_options.items():
            if name not in known and value not in (None, "", [], {}):
                detail = f"the row's chat_template_kwargs has {name}, which the chat template does not have"
                raise BadRow("unknown_option", detail)
    if settings.template_options:
        pair = replace(pair, template_options={**settings.template_options, **pair.template_options})
    check_last_turn(pair, continues=data.continue_final_message)
    fit = suited(pair, tokenizer)
    written = fit.pair
    sides: Any = (written.chosen, written.rejected) if settings.completion_tokens is None else ()
    texts = apply_chat_template(written, sides, tokenizer)
    counts, contents = check_written(fit, texts, tokenizer)
    if settings.images is not None:
        scaled = sum(image.is_scaled for image in images)
        counts = {**counts, "images": len(images), "images_scaled": scaled}
    other_turns = any(map(is_dialogue, sides))
    return ReadRow(number, pair, written, texts, counts, contents, other_turns, (), images, key)


def pair_key(pair: Pair, images: Sequence[ReadImage] = ()) -> bytes:
    """Returns 16 bytes that name a pair as its row has it: prompt, chosen, rejected, tools, and the bytes of
    its images. No key of `data`, template or tokenizer changes it."""
    written = (pair.prompt, pair.chosen, pair.rejected, pair.template_options.get("tools"))
    return _hash_of(written, [image.written for image in images])


def _whole_prompt_key(row: ReadRow) -> bytes:
    """Returns 16 bytes that name a prompt before it is tokenised, or the BEGINNINGS of an inferred one."""
    pair = row.pair
    if pair.has_inferred_prompt:
        parts = (str(pair.prompt)[:length].encode(errors="surrogatepass") for length in BEGINNINGS)
        return b"".join(hashlib.blake2b(part, digest_size=1).digest() for part in parts)
    return _hash_of(pair.prompt, [image.key for image in row.images])


def _hash_of(content: object, images: Sequence[bytes]) -> bytes:
    text = json.dumps(content, sort_keys=True, default=str)  # Arrow has dates, which JSON lacks
    return hashlib.blake2b(b"".join([text.encode(), *images]), digest_size=KEY_BYTES).digest()


def _encode(parsed: Sequence[ReadRow], settings: TokenizationSettings) -> Iterator[TokenIds]:
    is_text, eos = settings.content == "text", settings.tokenizer.eos_token_id
    if texts := [text for row in parsed for text in row.texts]:
        encoding = settings.tokenizer(
            texts,
            add_special_tokens=is_text,  # templates write special tokens
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warnings about lengths: truncate() checks the lengths
        )
        for ids in encoding["input_ids"]:
            has_second_eos = is_text and ids[-2:] == [eos, eos]  # the tokenizer's own
            yield np.array(ids[:-1] if has_second_eos else ids, dtype=np.int32)


def _given_ids(parsed: Sequence[ReadRow], settings: TokenizationSettings) -> Iterator[TokenIds]:
    for _, pair, *_ in parsed:
        prompt = np.array(pair.prompt, dtype=np.int32)
        yield prompt
        if settings.completion_tokens is None:
            for completion in (pair.chosen, pair.rejected):
                yield np.concatenate([prompt, np.array(completion, dtype=np.int32)])


def fit_pair(row: ReadRow, sequences: Sequence[TokenIds], settings: TokenizationSettings) -> TokenizedPair:
    """Returns a pair from its prompt, prompt + chosen and prompt + rejected. The completions begin where one
    of the longer two first differs from the prompt's tokens, maybe before its end. Raises BadRow."""
    prompt, *wholes = sequences
    boundary = common_prefix_length(sequences)
    if boundary == 0:
        raise BadRow("empty_prompt", "no prompt token comes before the completions")
    chosen, rejected = (ids[boundary:] for ids in wholes)
    for column, completion in zip(SIDES, (chosen, rejected), strict=True):
        if len(completion) == 0:
            raise BadRow("empty_completion", f"the {column} completion has no tokens")
    if np.array_equal(chosen, rejected):
        raise BadRow("identical_completions", "chosen and rejected are the same, so the pair prefers nothing")
    whole, limits = Group(context=prompt[:boundary], completions=(chosen, rejected)), settings.data
    if row.turns or (row.pair.chosen_weights, row.pair.rejected_weights) != (None, None):
        whole = _with_scored(whole, row)
    if settings.images is not None:
        settings.images.check_placeholders(whole, has_images=bool(row.images))
    if row.images and limits.truncation == "prompt_left":  # it would cut images
        limits = limits.model_copy(update={"truncation": "drop"})
    fitted = truncate(whole, limits, settings.tokenizer.bos_token_id)
    return TokenizedPair(row=row, alone=prompt, whole=whole, fitted=fitted)


def _with_scored(ids: Group, row: ReadRow) -> Group:
    """Raises BadRow if no token of a completion is scored."""
    given: Sequence[Any] = (row.pair.chosen_weights, row.pair.rejected_weights)
    if row.turns:
        ends = [*zip(row.turns, map(len, ids.completions), strict=True)]
        for of_side, length in ends:  # an image is one place, and stands before the completions
            assert of_side is None or row.images or len(of_side) == len(ids.context) + length
        given = [None if of_side is None else of_side[-length:] for of_side, length in ends]
    scored = []
    for side, of_side, completion in zip(SIDES, given, ids.completions, strict=True):
        scored.append(np.asarray(np.ones(len(completion)) if of_side is None else of_side, dtype=np.bool_))
        assert len(scored[-1]) == len(completion)
        if not scored[-1].any():
            roles = ", ".join(dict.fromkeys(message["role"] for message in getattr(row.pair, side)))
            raise BadRow("nothing_scored", f"{side} has nothing that the assistant says, only {roles}")
    return replace(ids, scored=tuple(scored))


def truncate(pair: Group, limits: DataRecipe, bos_token_id: int | None) -> Group:
    """Cuts a pair that is too long, as `data.truncation` says: the oldest tokens of its prompt (BOS and at
    least one token stay) or the ends of its completions. Raises BadRow if the pair may not be cut or is
    still too long, or if the completions are then equal or have no scored token."""
    cuts_prompt = limits.truncation == "prompt_left"
    prompt_limit, max_length = limits.max_prompt_length, limits.max_length
    if prompt_limit is not None and len(pair.context) > prompt_limit:
        if not cuts_prompt:
            detail = f"the prompt has {len(pair.context)} tokens, data.max_prompt_length is {prompt_limit}"
            raise BadRow("prompt_too_long", detail)
        pair = _with_newest_prompt(pair, prompt_limit, bos_token_id)
    completion_length = max(map(len, pair.completions))
    if len(pair.context) + completion_length <= max_length:
        return pair
    if cuts_prompt and completion_length < max_length:
        return _with_newest_prompt(pair, max_length - completion_length, bos_token_id)
    if limits.truncation == "completion_right" and len(pair.context) < max_length:
        return _with_shorter_completions(pair, max_length - len(pair.context))
    detail = f"{len(pair.context)} prompt and {completion_length} completion tokens"
    raise BadRow("too_long", f"{detail}, data.max_length is {max_length}")


def _with_newest_prompt(pair: Group, length: int, bos_token_id: int | None) -> Group:
    # Models attend heavily to the first position and expect BOS there, so BOS is kept.
    if length > 1 and pair.context[0] == bos_token_id:
        return replace(pair, context=np.concatenate([pair.context[:1], pair.context[1 - length :]]))
    return replace(pair, context=pair.context[-length:])


def _with_shorter_completions(pair: Group, length: int) -> Group:
    chosen, rejected = (completion[:length] for completion in pair.completions)
    if np.array_equal(chosen, rejected):
        detail = f"the first {length} tokens of the completions, all that data.max_length leaves, are equal"
        raise BadRow("identical_after_truncation", detail)
    scored = None if pair.scored is None else tuple(of_side[:length] for of_side in pair.scored)
    if scored is not None and not all(of_side.any() for of_side in scored):
        detail = f"the first {length} tokens of a completion, all that data.max_length leaves, are not scored"
        raise BadRow("unscored_after_truncation", detail)
    return replace(pair, completions=(chosen, rejected), scored=scored)


def _fit_prompt(row: ReadRow, sequences: Sequence[TokenIds], settings: TokenizationSettings) -> TokenizedPair:
    """Returns the prompt, cut if a completion needs the room. Raises BadRow."""
    (ids,), tokenizer = sequences, settings.tokenizer
    text = row.texts[0] if row.texts else str(tokenizer.decode(ids.tolist()))
    # Some tokenizers add EOS to every text. A prompt must not end with it, because the policy continues it.
    has_own_end = not row.texts or text.endswith(tokenizer.eos_token or "\0")
    if len(ids) and ids[-1] == tokenizer.eos_token_id and not has_own_end:
        ids = ids[:-1]
    if not text or len(ids) == 0:
        raise BadRow("empty_prompt", "the prompt is empty")
    room = np.zeros(settings.completion_tokens or 0, dtype=np.int32)
    whole = Group(context=ids, completions=(room, room))
    fitted = truncate(whole, settings.data, tokenizer.bos_token_id)
    fitted = replace(fitted, completions=(NO_TOKENS, NO_TOKENS))
    return TokenizedPair(row=row, alone=ids, whole=whole, fitted=fitted)


def _prompt_of(pair: TokenizedPair, settings: TokenizationSettings) -> Prompt:
    row, whole = pair.row, pair.whole.context
    messages: Any = tuple(row.pair.prompt) if settings.content == "messages" else None
    text = row.texts[0] if row.texts else str(settings.tokenizer.decode(whole.tolist()))
    ids, tools = pair.fitted.context.astype(np.int32, copy=False), row.pair.template_options.get("tools")
    return Prompt(ids=ids, text=text, messages=messages, row_number=row.number, tools=tools)


def _count(kept: Sequence[TokenizedPair], settings: TokenizationSettings) -> Counter[str]:
    is_pairs, tokenizer = settings.completion_tokens is None, settings.tokenizer
    unknown = tokenizer.unk_token_id  # some tokenizers name EOS, because they never need one
    knows_all = unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id)
    columns = {**{name: name for name in FIELDS_OF_FORMAT[settings.format]}, **settings.source.columns}
    counts = Counter[str](dict.fromkeys(_COUNTS if is_pairs else (), 0))
    counts.update({} if settings.images is None else {"images": 0, "images_scaled": 0})
    for one in kept:
        row, whole, fitted = one.row, one.whole, one.fitted
        counts.update(row.counts)
        counts["prompts_inferred"] += row.pair.has_inferred_prompt
        counts["scores_against_labels"] += row.pair.score_margin < 0
        if row.pair.choice:
            counts[CHOSEN_KEY + row.pair.choice.format_map(columns)] += 1
        if row.has_other_turns:
            counts["pairs_with_other_turns"] += 1
        for ids in () if knows_all else (fitted.context, *fitted.completions):
            counts["unknown_tokens"] += int((ids == unknown).sum())
        if not is_pairs:
            counts["prompts_truncated"] += len(fitted.context) < len(whole.context)
            continue
        counts["prompt_boundary_moved"] += len(whole.context) < len(one.alone)
        counts["completions_without_eos"] += sum(not settings.ends_of(ids) for ids in whole.completions)
        if fitted is not whole:
            _count_cut(counts, one, settings)
    return counts


def _count_cut(counts: Counter[str], pair: TokenizedPair, settings: TokenizationSettings) -> None:
    whole, fitted = pair.whole, pair.fitted
    cut = [whole.context[: len(whole.context) - len(fitted.context)]] * 2  # once for each side
    counts["prompt_truncated"] += len(cut[0]) > 0
    for before, after in zip(whole.completions, fitted.completions, strict=True):
        cut.append(before[len(after) :])
        counts["completions_truncated"] += len(after) < len(before)
        counts["eos_lost"] += bool(settings.ends_of(before)) and not settings.ends_of(after)
    decode = settings.tokenizer.decode
    texts = (decode(ids.tolist(), skip_special_tokens=True) for ids in cut if len(ids))
    counts["characters_cut"] += sum(map(len, texts)) if pair.row.texts else 0


def tokenize_rows(
    rows: Iterator[NumberedRow], submit: Submit, *, num_workers: int, max_pairs: int | None
) -> Generator[TokenizedBatch, None, None]:
    """Yields batches in row order, until the rows end or `max_pairs` are kept; no row is read in vain."""
    wanted = sys.maxsize if max_pairs is None else max_pairs
    most_under_way = max(1, 2 * num_workers)  # so that no worker waits for the reader
    under_way: deque[_Result] = deque()
    while True:
        while len(under_way) < most_under_way:
            batch, num_bytes = [], 0
            for row in islice(rows, min(_BATCH_ROWS, wanted)):
                batch.append(row)
                num_bytes += len(pickle.dumps(row))  # measures any type, in a microsecond a row
                if num_bytes > _BATCH_BYTES:
                    break
            if not batch:
                break
            wanted -= len(batch)  # assumes that all rows are kept; corrected below
            under_way.append(submit(batch))
        if not under_way:
            return
        tokenized = under_way.popleft()()
        wanted += tokenized.num_rows - len(tokenized.pairs.records)
        yield tokenized


@contextmanager
def tokenizing(settings: TokenizationSettings, num_workers: int = 0) -> Iterator[Submit]:
    """Gives a function that starts to tokenise a batch and returns a function that waits for the result."""
    if num_workers > 1:
        with _worker_processes(settings, num_workers) as pool:
            yield lambda batch: pool.submit(_tokenize_in_worker, batch).result
    else:
        yield lambda batch: partial(tokenize_batch, batch, settings)


@contextmanager
def _worker_processes(settings: TokenizationSettings, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy locks of the tokenizer's threads
        initializer=_start_worker,
        initargs=(settings,),
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenised was killed, probably because memory ran out; set data.num_workers: 0"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker: TokenizationSettings | None = None


def _start_worker(settings: TokenizationSettings) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too, but the parent stops them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    _worker = settings


def _tokenize_in_worker(batch: list[NumberedRow]) -> TokenizedBatch:
    assert _worker is not None
    return tokenize_batch(batch, _worker)
