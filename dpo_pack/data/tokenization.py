"""Rows -> token ids: chat templates, EOS, the boundary between prompt and completion.

Ids are those of TRL 1.16 (`DPOTrainer._prepare_dataset`): the prompt, and the prompt with each completion,
are tokenised as whole texts, and the completions begin where the three part.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dpo_pack.data.formats import FORMATS, BadRow, Message, Pair, with_system_prompt
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import TokenizedPairs, common_prefix_length, join_pairs
from dpo_pack.data.truncation import LengthLimits, PairIds, TokenIds, truncate
from dpo_pack.errors import ModelError, RecipeError

# Raised whenever a change of ours gives other token ids for the same rows.
TOKENIZATION_VERSION = 2

# Texts handed to the tokenizer at once. Its encodings take some hundred bytes per token.
_ENCODE_CHARS = 1 << 21
# A template may end a turn with a line break after the token that closes it.
_TURN_END_TOKENS = 3


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def eos_token(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | dict[str, str] | None: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...
    @property
    def split_special_tokens(self) -> bool: ...
    @property
    def is_fast(self) -> bool: ...
    @property
    def backend_tokenizer(self) -> Any: ...
    def save_pretrained(self, save_directory: str) -> Any: ...
    def __len__(self) -> int: ...
    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationSettings:
    """What, besides rows and tokenizer, decides the token ids."""

    format: str
    system_prompt: str | None
    limits: LengthLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A row that gave no pair."""

    row_number: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedBatch:
    """What became of some consecutive rows."""

    num_rows: int
    pairs: TokenizedPairs
    dropped: tuple[DroppedRow, ...]  # in row order
    counts: Counter[str]  # of kept pairs and of their completions, see _notes


def check_tokenizer(tokenizer: Tokenizer, settings: TokenizationSettings, label: str) -> None:
    """Raises ModelError when the tokenizer lacks what the format needs.

    Raises RecipeError for a system prompt that no row could use.
    """
    if settings.format == "conversational":
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer has no chat template, which conversational data ({label}) needs; "
                "name a Jinja file in tokenizer.chat_template"
            )
        return
    if settings.system_prompt is not None:
        raise RecipeError(
            f"data.system_prompt applies to conversational data only, and {label} is {settings.format}; "
            "remove it, or put the text into the prompts"
        )
    if settings.format != "tokenized" and tokenizer.eos_token is None:
        raise ModelError(
            f"the tokenizer has no EOS token to end the completions of {label} with; "
            "set tokenizer.path to one that has, or tokenise the data yourself (format: tokenized)"
        )


def tokenize_batch(
    rows: Sequence[NumberedRow], settings: TokenizationSettings, tokenizer: Tokenizer
) -> TokenizedBatch:
    """Token ids of the rows that give a pair, and the reasons of those that give none."""
    parsed: list[tuple[int, Pair]] = []
    texts: list[str] = []
    dropped: list[DroppedRow] = []
    for number, row in rows:
        try:
            pair = _parse(row, settings, tokenizer)
            if settings.format != "tokenized":
                texts += _render(pair, tokenizer)
        except BadRow as bad:
            dropped.append(DroppedRow(row_number=number, reason=bad.reason, detail=bad.detail))
        else:
            parsed.append((number, pair))
    ids = _joined_ids(parsed) if settings.format == "tokenized" else encode_texts(texts, settings, tokenizer)
    ends, counts = _EndTokens.of(tokenizer, settings.format), Counter[str]()
    kept: list[PairIds] = []
    weights: list[float] = []
    row_numbers: list[int] = []
    for (number, pair), prompt, with_chosen, with_rejected in zip(parsed, ids, ids, ids, strict=True):
        try:
            whole = split_at_boundary(prompt, with_chosen, with_rejected)
            fitted = truncate(whole, settings.limits, tokenizer.bos_token_id)
        except BadRow as bad:
            dropped.append(DroppedRow(row_number=number, reason=bad.reason, detail=bad.detail))
            continue
        kept.append(fitted)
        weights.append(pair.weight)
        row_numbers.append(number)
        counts.update(_notes(len(prompt), whole, fitted, ends))
    return TokenizedBatch(
        num_rows=len(rows),
        pairs=join_pairs(kept, weights, row_numbers),
        dropped=tuple(sorted(dropped, key=lambda row: row.row_number)),
        counts=counts,
    )


def split_at_boundary(prompt: TokenIds, with_chosen: TokenIds, with_rejected: TokenIds) -> PairIds:
    """The completions begin where the three sequences part, at the earlier of the two places.

    That is before the end of the prompt where tokens merge across it, or where a template renders the
    prompt alone differently. Raises BadRow when that leaves a part of the pair without tokens.
    """
    boundary = min(common_prefix_length(prompt, with_chosen), common_prefix_length(prompt, with_rejected))
    if boundary == 0:
        raise BadRow("empty_prompt", "no prompt token comes before the completions")
    pair = PairIds(prompt=prompt[:boundary], chosen=with_chosen[boundary:], rejected=with_rejected[boundary:])
    for column, completion in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if len(completion) == 0:
            raise BadRow("empty_completion", f"the {column} completion has no tokens")
    if np.array_equal(pair.chosen, pair.rejected):
        raise BadRow("identical_completions", "chosen and rejected are the same, so the pair prefers nothing")
    return pair


def _parse(row: Mapping[str, Any] | BadRow, settings: TokenizationSettings, tokenizer: Tokenizer) -> Pair:
    if isinstance(row, BadRow):
        raise row
    pair = FORMATS[settings.format](row)
    if settings.system_prompt is not None:
        pair = with_system_prompt(pair, settings.system_prompt)
    if settings.format == "tokenized":
        _check_vocabulary(pair, len(tokenizer))
    return pair


def _check_vocabulary(pair: Pair, vocabulary_size: int) -> None:
    for part, ids in (("prompt", pair.prompt), ("chosen", pair.chosen), ("rejected", pair.rejected)):
        for token in ids:
            assert isinstance(token, int)
            if not 0 <= token < vocabulary_size:
                last = vocabulary_size - 1
                detail = f"{part}_ids has the token id {token}; the tokenizer's are 0 to {last}"
                raise BadRow("token_id_out_of_range", detail)


def _render(pair: Pair, tokenizer: Tokenizer) -> tuple[str, str, str]:
    """The texts of the prompt, of prompt + chosen and of prompt + rejected."""
    if isinstance(pair.prompt, str):
        assert isinstance(pair.chosen, str) and isinstance(pair.rejected, str)
        eos = tokenizer.eos_token or ""
        chosen = pair.chosen.removesuffix(eos) + eos
        rejected = pair.rejected.removesuffix(eos) + eos
        texts = pair.prompt, pair.prompt + chosen, pair.prompt + rejected
    else:
        texts = _apply_chat_template(pair, tokenizer)
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(text[error.start]):04x}"
            raise BadRow("invalid_unicode", f"half of a surrogate pair ({lone}), which is no text") from None
    return texts


def _apply_chat_template(pair: Pair, tokenizer: Tokenizer) -> tuple[str, str, str]:
    prompt: Any = pair.prompt
    options = {**pair.template_options, "tokenize": False}
    try:
        return (
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options),
            tokenizer.apply_chat_template(prompt + pair.chosen, **options),
            tokenizer.apply_chat_template(prompt + pair.rejected, **options),
        )
    except Exception as error:  # a template is a program that came with the model: it may raise anything
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadRow("template_error", f"the chat template cannot render it ({what})") from error


def encode_texts(
    texts: list[str], settings: TokenizationSettings, tokenizer: Tokenizer
) -> Iterator[TokenIds]:
    """Ids of each text, many texts at a time, so that the tokenizer's threads have work."""
    start = 0
    while start < len(texts):
        end, num_chars = start, 0
        while end < len(texts) and num_chars < _ENCODE_CHARS:
            num_chars += len(texts[end])
            end += 1
        encoding = tokenizer(
            texts[start:end],
            add_special_tokens=settings.format != "conversational",  # templates write their own
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # lengths are ours to judge
        )
        yield from (np.array(ids, dtype=np.int32) for ids in encoding["input_ids"])
        start = end


def _joined_ids(parsed: list[tuple[int, Pair]]) -> Iterator[TokenIds]:
    """Rows that are token ids already, in the form that `encode_texts` gives."""
    for _, pair in parsed:
        parts = pair.prompt, pair.chosen, pair.rejected
        prompt, chosen, rejected = (np.array(ids, dtype=np.int32) for ids in parts)
        yield from (prompt, np.concatenate([prompt, chosen]), np.concatenate([prompt, rejected]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndTokens:
    """Which tokens end a completion, and how far from its end they may stand."""

    ids: frozenset[int]
    window: int

    @staticmethod
    def of(tokenizer: Tokenizer, format: str) -> "_EndTokens":
        eos = frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        if format != "conversational":
            return _EndTokens(ids=eos, window=1)
        # A template closes turns with EOS or with a special token of its own (<end_of_turn>, <|eot_id|>).
        special = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        return _EndTokens(ids=eos | special, window=_TURN_END_TOKENS)

    def end(self, completion: TokenIds) -> bool:
        return any(token in self.ids for token in completion[-self.window :].tolist())


def _notes(num_prompt_tokens: int, whole: PairIds, fitted: PairIds, ends: _EndTokens) -> Counter[str]:
    """What the report counts about a kept pair (the first two) and its completions (the others)."""
    notes = Counter[str](
        prompt_boundary_moved=len(whole.prompt) < num_prompt_tokens,
        prompt_truncated=len(fitted.prompt) < len(whole.prompt),
    )
    for before, after in ((whole.chosen, fitted.chosen), (whole.rejected, fitted.rejected)):
        notes["completions_truncated"] += len(after) < len(before)
        notes["completions_without_eos"] += not ends.end(before)
        notes["eos_lost"] += ends.end(before) and not ends.end(after)
    return notes
