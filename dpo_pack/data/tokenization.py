"""Turns rows into token ids: chat templates, EOS, the boundary between prompt and completion.

The ids are those of TRL 1.16 (`DPOTrainer._prepare_dataset`): the prompt, and the prompt with each
completion, are tokenised as whole texts. The completions begin where these three sequences first differ.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpo_pack.data.chat import assistant_weights, has_other_turns, rendering
from dpo_pack.data.formats import FORMATS, BadRow, Message, Pair, with_system_message
from dpo_pack.data.keys import beginning_key, prompt_key
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import NO_TOKENS, TokenStore, common_prefix_length, join_pairs
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.data.truncation import LengthLimits, PairIds, TokenIds, TokenWeights, truncate
from dpo_pack.system.errors import ModelError, RecipeError

# Increase this number whenever a change of our code gives other token ids or other records for the same rows.
TOKENIZATION_VERSION = 3

# The tokenizer gets about so many characters in one call. Its encodings take some hundred bytes a token.
_ENCODE_CHARS = 1 << 21
# A longer text is refused, because encoding takes a second and 200 MB for a million characters.
_MAX_TEXT_CHARS = 1 << 22
DroppedRow = tuple[int, BadRow]  # the number of a row without a pair or prompt, and the reason

# The end of a turn is among so many last tokens, because a template may write a line break after it.
_TURN_END_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationSettings:
    """The settings that decide the token ids, together with the rows and the tokenizer."""

    format: str
    system_prompt: str | None
    limits: LengthLimits
    scored_turns: str = "assistant"  # or "all"; of conversations
    completion_tokens: int | None = None  # tokens to leave free after a prompt; None if rows are pairs
    format_options: Mapping[str, Any] = field(default_factory=dict)  # see Format.options


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt that the policy answers."""

    ids: TokenIds  # [C], C >= 1: the tokens that the policy continues
    text: str  # the whole prompt as text, special tokens included
    messages: tuple[Message, ...] | None  # only of a conversational row
    row_number: int  # in its source, from 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedPair:
    """A pair before and after it became tokens."""

    row_number: int
    pair: Pair
    alone: TokenIds  # the prompt, tokenised without a completion
    whole: PairIds  # before truncation
    fitted: PairIds  # the tokens that the model gets


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedBatch:
    """The result for some consecutive rows: pairs or prompts, dropped rows and counts."""

    num_rows: int
    pairs: TokenStore  # if rows are prompts, the completions have no tokens
    prompts: tuple[Prompt, ...]  # one for each pair; empty if rows are pairs
    dropped: tuple[DroppedRow, ...]  # in row order
    counts: Counter[str]  # counts of kept pairs and of their completions, see _pair_notes
    kept: tuple[TokenizedPair, ...] = ()  # the pairs; empty if rows are prompts


def check_tokenizer(tokenizer: Tokenizer, settings: TokenizationSettings, label: str) -> None:
    """Checks that the tokenizer has the template or the token that the format needs; else raises ModelError.

    Raises RecipeError if the recipe has a system prompt that no row of this format can use.
    """
    content = FORMATS[settings.format].content
    if content == "messages":
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer has no chat template, which {settings.format} data ({label}) needs; "
                "name a Jinja file in tokenizer.chat_template"
            )
        return
    if settings.system_prompt is not None:
        raise RecipeError(
            f"data.system_prompt applies to conversational data only, and {label} is {settings.format}; "
            "remove it, or put the text into the prompts"
        )
    if content == "text" and tokenizer.eos_token is None:
        raise ModelError(
            f"the tokenizer has no EOS token to end the completions of {label} with; "
            "set tokenizer.path to one that has, or tokenise the data yourself (format: tokenized)"
        )


def tokenize_batch(
    rows: Sequence[NumberedRow], settings: TokenizationSettings, tokenizer: Tokenizer
) -> TokenizedBatch:
    """Returns the token ids of the rows that give a pair or a prompt, and the reasons of all other rows."""
    is_text = FORMATS[settings.format].content != "token_ids"
    is_dialogue = FORMATS[settings.format].content == "messages" and settings.completion_tokens is None
    parsed: list[tuple[int, Pair, tuple[str, ...]]] = []  # for the texts see render
    weights: dict[int, list[TokenWeights | None]] = {}  # by row number, of rows with several turns
    dropped: list[DroppedRow] = []
    for number, row in rows:
        try:
            pair = parse_row(row, settings, tokenizer)
            texts = render(pair, settings, tokenizer) if is_text else ()
            if is_dialogue and settings.scored_turns == "assistant" and has_other_turns(pair):
                weights[number] = assistant_weights(pair, texts[1:], tokenizer)
            parsed.append((number, pair, texts))
        except BadRow as bad:
            dropped.append((number, bad.with_traceback(None)))
    if is_text:
        ids = _encode([text for _, _, texts in parsed for text in texts], settings, tokenizer)
    else:
        ids = _given_ids([pair for _, pair, _ in parsed], settings)
    sequences_per_row = 3 if settings.completion_tokens is None else 1
    ends, counts = EndTokens.of(tokenizer, settings.format), Counter[str]()
    kept: list[tuple[int, Pair, PairIds]] = []
    prompts: list[Prompt] = []
    tokenized: list[TokenizedPair] = []
    for (number, pair, texts), *sequences in zip(parsed, *[ids] * sequences_per_row, strict=True):
        try:
            if settings.completion_tokens is None:
                whole = with_weights(split_at_boundary(*sequences), pair, weights.get(number))
                fitted = truncate(whole, settings.limits, tokenizer.bos_token_id)
                counts.update(_pair_notes(len(sequences[0]), whole, fitted, ends))
                tokenized.append(
                    TokenizedPair(
                        row_number=number, pair=pair, alone=sequences[0], whole=whole, fitted=fitted
                    )
                )
            else:
                prompt, is_truncated = _fit_prompt(number, pair, texts, sequences[0], settings, tokenizer)
                prompts.append(prompt)
                fitted = PairIds(prompt=prompt.ids, chosen=NO_TOKENS, rejected=NO_TOKENS)
                counts["prompts_truncated"] += is_truncated
        except BadRow as bad:
            dropped.append((number, bad.with_traceback(None)))
        else:
            kept.append((number, pair, fitted))
            counts["prompts_inferred"] += pair.has_inferred_prompt
            if is_dialogue and has_other_turns(pair):
                counts["pairs_with_other_turns"] += 1
    pairs = [fitted for _, _, fitted in kept]
    return TokenizedBatch(
        num_rows=len(rows),
        pairs=join_pairs(
            pairs,
            [pair.weight for _, pair, _ in kept],
            [number for number, _, _ in kept],
            [_whole_prompt_key(pair) for _, pair, _ in kept],
        ),
        prompts=tuple(prompts),
        dropped=tuple(sorted(dropped, key=lambda row: row[0])),
        counts=counts,
        kept=tuple(tokenized),
    )


def split_at_boundary(prompt: TokenIds, with_chosen: TokenIds, with_rejected: TokenIds) -> PairIds:
    """Splits the sequences where one of the two longer sequences first differs from the prompt's tokens.

    This boundary is before the end of the prompt if a token covers the end of the prompt and the beginning of
    a completion, or if a template renders the prompt alone differently. Raises BadRow if a part is empty.
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


def with_weights(ids: PairIds, pair: Pair, of_turns: Sequence[TokenWeights | None] | None) -> PairIds:
    """Returns the token ids with the weights of the row, or with those of its turns.

    `of_turns` has the weights of all tokens of prompt + chosen and of prompt + rejected, or None. Raises
    BadRow if a completion has no token that is scored.
    """
    given: Sequence[Any] = (pair.chosen_weights, pair.rejected_weights)
    if of_turns is not None:
        given = [None if of_side is None else of_side[len(ids.prompt) :] for of_side in of_turns]
    weights = [None if of_side is None else np.asarray(of_side, dtype=np.float32) for of_side in given]
    for side, of_side in zip(("chosen", "rejected"), weights, strict=True):
        assert of_side is None or len(of_side) == len(ids.completion(side))
        if of_side is not None and not of_side.any():
            raise BadRow("nothing_scored", f"{side} has nothing that the assistant says")
    return replace(ids, chosen_weights=weights[0], rejected_weights=weights[1])


def _whole_prompt_key(pair: Pair) -> bytes:
    return beginning_key(str(pair.prompt)) if pair.has_inferred_prompt else prompt_key(pair.prompt)


def parse_row(row: Mapping[str, Any] | BadRow, settings: TokenizationSettings, tokenizer: Tokenizer) -> Pair:
    """Returns the pair of a row, or its prompt alone if rows are prompts. Raises BadRow."""
    if isinstance(row, BadRow):
        raise row
    format = FORMATS[settings.format]
    read = format.pair if settings.completion_tokens is None else format.prompt
    pair = read(row, **settings.format_options)
    if settings.system_prompt is not None:
        assert isinstance(pair.prompt, list), "check_tokenizer refuses it for other formats"
        pair = replace(pair, prompt=with_system_message(pair.prompt, settings.system_prompt))
    if format.content == "token_ids":
        _check_vocabulary(pair, len(tokenizer))
    return pair


def _check_vocabulary(pair: Pair, vocabulary_size: int) -> None:
    for part, ids in (("prompt", pair.prompt), ("chosen", pair.chosen), ("rejected", pair.rejected)):
        for token in ids:
            assert isinstance(token, int)
            if not 0 <= token < vocabulary_size:
                last = vocabulary_size - 1
                detail = f"{part}_ids has the token id {token}; the tokenizer's ids are 0 to {last}"
                raise BadRow("token_id_out_of_range", detail)


def render(pair: Pair, settings: TokenizationSettings, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the text of the prompt and, for a pair, the texts prompt + chosen and prompt + rejected."""
    completions = () if settings.completion_tokens is not None else (pair.chosen, pair.rejected)
    texts: tuple[str, ...]
    if isinstance(pair.prompt, str):
        eos = tokenizer.eos_token or ""
        ended = (str(completion).removesuffix(eos) + eos for completion in completions)
        texts = (pair.prompt, *(pair.prompt + completion for completion in ended))
    else:
        texts = _apply_chat_template(pair, completions, tokenizer)
    for text in texts:
        if len(text) > _MAX_TEXT_CHARS:
            limit = f"more than {_MAX_TEXT_CHARS:,}"
            raise BadRow("text_too_long", f"prompt and completion have {len(text):,} characters, {limit}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(text[error.start]):04x}"
            raise BadRow("invalid_unicode", f"a text has half of a surrogate pair ({lone})") from None
    return texts


def _apply_chat_template(pair: Pair, completions: Sequence[Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    prompt: Any = pair.prompt
    options = {**pair.template_options, "tokenize": False}
    with rendering():
        return (
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options),
            *(tokenizer.apply_chat_template(prompt + completion, **options) for completion in completions),
        )


def template_opens_turn(pair: Pair, tokenizer: Tokenizer) -> bool:
    """Returns True if the chat template writes the beginning of an answer after the prompt of a pair.

    Also True if the template renders no prompt without this beginning.
    """
    try:
        # [] is a completion of no messages.
        with_opening, without = _apply_chat_template(pair, ([],), tokenizer)
    except BadRow:
        return True
    return with_opening != without


def _encode(texts: list[str], settings: TokenizationSettings, tokenizer: Tokenizer) -> Iterator[TokenIds]:
    """Yields the ids of each text. The tokenizer gets many texts in a call, so that its threads have work."""
    start = 0
    while start < len(texts):
        end, num_chars = start, 0
        while end < len(texts) and num_chars < _ENCODE_CHARS:
            num_chars += len(texts[end])
            end += 1
        encoding = tokenizer(
            texts[start:end],
            add_special_tokens=FORMATS[settings.format].content == "text",  # templates write special tokens
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warnings about lengths: truncate() checks the lengths
        )
        yield from (np.array(ids, dtype=np.int32) for ids in encoding["input_ids"])
        start = end


def _given_ids(pairs: Sequence[Pair], settings: TokenizationSettings) -> Iterator[TokenIds]:
    """Yields the same sequences as `_encode`, for rows that are token ids already."""
    for pair in pairs:
        prompt = np.array(pair.prompt, dtype=np.int32)
        yield prompt
        if settings.completion_tokens is None:
            for completion in (pair.chosen, pair.rejected):
                yield np.concatenate([prompt, np.array(completion, dtype=np.int32)])


def _fit_prompt(
    number: int,
    pair: Pair,
    texts: Sequence[str],
    ids: TokenIds,
    settings: TokenizationSettings,
    tokenizer: Tokenizer,
) -> tuple[Prompt, bool]:
    """Returns the prompt, cut if a completion needs the room, and True if it was cut. Raises BadRow."""
    text = texts[0] if texts else str(tokenizer.decode(ids.tolist()))
    # Some tokenizers add EOS to every text. A prompt must not end with it, because the policy continues it.
    has_own_end = not texts or text.endswith(tokenizer.eos_token or "\0")
    if len(ids) and ids[-1] == tokenizer.eos_token_id and not has_own_end:
        ids = ids[:-1]
    if not text or len(ids) == 0:
        raise BadRow("empty_prompt", "the prompt is empty")
    room = np.zeros(settings.completion_tokens or 0, dtype=np.int32)
    fitted = truncate(
        PairIds(prompt=ids, chosen=room, rejected=room), settings.limits, tokenizer.bos_token_id
    )
    is_conversation = FORMATS[settings.format].content == "messages"
    messages: Any = tuple(pair.prompt) if is_conversation else None
    prompt = Prompt(ids=fitted.prompt, text=text, messages=messages, row_number=number)
    return prompt, len(fitted.prompt) < len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """The tokens that end a completion: a completion has an end if its last `window` tokens contain one."""

    ids: frozenset[int]
    window: int

    @staticmethod
    def of(tokenizer: Tokenizer, format: str) -> "EndTokens":
        eos = frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        if FORMATS[format].content != "messages":
            return EndTokens(ids=eos, window=1)
        # A template ends turns with EOS or with another special token (<end_of_turn>, <|eot_id|>).
        special = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        return EndTokens(ids=eos | special, window=_TURN_END_TOKENS)

    def found_in(self, completion: TokenIds) -> list[int]:
        """Returns the end tokens that the completion has at its end; an empty list if it has no end."""
        return [token for token in completion[-self.window :].tolist() if token in self.ids]


def _pair_notes(num_prompt_tokens: int, whole: PairIds, fitted: PairIds, ends: EndTokens) -> Counter[str]:
    """Returns the report's counts of a kept pair: two counts of pairs, then three of completions."""
    notes = Counter[str](
        prompt_boundary_moved=len(whole.prompt) < num_prompt_tokens,
        prompt_truncated=len(fitted.prompt) < len(whole.prompt),
    )
    for before, after in ((whole.chosen, fitted.chosen), (whole.rejected, fitted.rejected)):
        notes["completions_truncated"] += len(after) < len(before)
        notes["completions_without_eos"] += not ends.found_in(before)
        notes["eos_lost"] += bool(ends.found_in(before)) and not ends.found_in(after)
    return notes
