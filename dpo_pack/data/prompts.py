"""Sources of a recipe -> prompts for an online run, as token ids and as a judge would read them.

Rows are read as those of offline sources are; their completions, if they have any, are not used. Unlike
tokenised pairs, prompts are held in memory, since judges read their text.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpo_pack.data.epoch_order import check_weights
from dpo_pack.data.formats import BadRow, Message, detect_prompt_format, prompt_of, with_system_message
from dpo_pack.data.keys import content_key
from dpo_pack.data.locating import LocatedSource, locate_source
from dpo_pack.data.pairs import HELD_OUT, DataSplits, split_by_prompt
from dpo_pack.data.quality import key_values, summarize_lengths
from dpo_pack.data.readers import NumberedRow
from dpo_pack.data.store import PairTable, TokenStore, join_pairs
from dpo_pack.data.tokenization import TokenizationSettings, Tokenizer, check_tokenizer, encode_texts
from dpo_pack.data.truncation import LengthLimits, PairIds, TokenIds, truncate
from dpo_pack.errors import DataError
from dpo_pack.recipe import source_names

if TYPE_CHECKING:
    from dpo_pack.recipe_schema import DataRecipe, SourceRecipe

_BATCH_ROWS = 1000
_LISTED_ROWS = 100
_NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What is to be answered."""

    ids: TokenIds  # [C], C >= 1: what the policy continues
    text: str  # the same as text, special tokens included
    messages: tuple[Message, ...] | None  # of a conversational row
    row_number: int  # in its source, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplits:
    """Prompts to train on, and held-out ones by the name of their set."""

    train: tuple[Prompt, ...]
    eval: dict[str, tuple[Prompt, ...]]


def load_prompts(
    data: "DataRecipe", *, tokenizer: Tokenizer, max_new_tokens: int, seed: int, cache_dir: Path
) -> DataSplits:
    """Reads and tokenises the prompts of all sources, each with room for `max_new_tokens` more.

    `train` of the result is a table of the prompts whose completions have no tokens; `prompts` holds them.
    Raises DataError and ModelError as `load_data` does.
    """

    def load(source: "SourceRecipe", key: str) -> "_PromptReader":
        located = locate_source(source, key, cache_dir / "file_hashes.json", prompts_suffice=True)
        reader = _PromptReader(
            located=located, source=source, data=data, tokenizer=tokenizer, max_new_tokens=max_new_tokens
        )
        reader.read()
        return reader

    readers = [load(source, f"data.train.{number}") for number, source in enumerate(data.train)]
    prompts = [prompt for reader in readers for prompt in reader.prompts]
    table = PairTable.of([_store(reader.prompts) for reader in readers])
    held_out: dict[str, tuple[Prompt, ...]] = {}
    if isinstance(data.eval, tuple):
        for number, (name, source) in enumerate(zip(source_names(data.eval), data.eval, strict=True)):
            held_out[name] = tuple(load(source, f"data.eval.{number}").prompts)
    else:
        kept, held = split_by_prompt(table.prompt_keys, data.eval.fraction, seed)
        held_out[HELD_OUT] = tuple(prompts[position] for position in held.tolist())
        table, prompts = table.select(kept), [prompts[position] for position in kept.tolist()]
    source_weights = np.array([source.weight for source in data.train], dtype=np.float64)
    check_weights(table.source_indices, source_weights)
    sources = [
        {"name": name, **reader.report()}
        for name, reader in zip(source_names(data.train), readers, strict=True)
    ]
    report = {
        "train": {
            "prompts": len(prompts),
            "distinct_prompts": len(np.unique(key_values(table.prompt_keys))),
            "lengths_tokens": {"prompt": summarize_lengths(table.prompt_lengths)},
            "sources": sources,
        },
        "eval": {name: {"prompts": len(of_set)} for name, of_set in held_out.items()},
    }
    return DataSplits(
        train=table,
        eval=(),
        source_weights=source_weights,
        report=report,
        fingerprint=table.fingerprint,
        eval_fingerprint=content_key(
            [[name, PairTable.of([_store(of_set)]).fingerprint] for name, of_set in held_out.items()]
        ),
        prompts=PromptSplits(train=tuple(prompts), eval=held_out),
    )


@dataclass(slots=True, kw_only=True)
class _PromptReader:
    """The pass over one source, and what it counts on the way."""

    located: LocatedSource
    source: "SourceRecipe"
    data: "DataRecipe"
    tokenizer: Tokenizer
    max_new_tokens: int
    format: str = ""
    row_word: str = "row"
    num_rows: int = 0
    num_truncated: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)

    def read(self) -> None:
        """Raises DataError at a row that stops the run, and when no prompt is left."""
        opened = self.located.open()
        self.row_word = opened.row_word
        with closing(opened.rows) as rows:
            while batch := list(islice(rows, _BATCH_ROWS)):
                self._read_batch(batch)
                if self.source.max_pairs is not None and len(self.prompts) >= self.source.max_pairs:
                    del self.prompts[self.source.max_pairs :]
                    break
        if not self.prompts:
            reasons = Counter({reason: len(rows) for reason, rows in self.dropped.items()})
            listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()) or "no rows"
            raise DataError(
                f"{self.located.label}: no prompts left of {self.num_rows} rows ({listed}); correct or "
                f"remove {self.located.key}"
            )

    def report(self) -> dict[str, Any]:
        dropped = {
            reason: {"rows": len(rows), f"{self.row_word}_numbers": rows[:_LISTED_ROWS]}
            for reason, rows in sorted(self.dropped.items())
        }
        return {
            "path": self.source.path,
            "split": self.source.split,
            "weight": self.source.weight,
            "format": self.format,
            "rows_read": self.num_rows,
            "prompts_kept": len(self.prompts),
            "prompts_truncated": self.num_truncated,
            "dropped": dropped,
        }

    def _read_batch(self, batch: Sequence[NumberedRow]) -> None:
        rendered: list[tuple[int, str, Any]] = []
        for number, row in batch:
            self.num_rows += 1
            try:
                rendered.append((number, *self._render(row)))
            except BadRow as bad:
                self._drop(number, bad)
        for (number, text, content), ids in zip(rendered, self._ids(rendered), strict=True):
            try:
                fitted = self._fit(ids)
            except BadRow as bad:
                self._drop(number, bad)
                continue
            self.num_truncated += len(fitted) < len(ids)
            is_conversation = self.format == "conversational"
            messages = tuple(content) if is_conversation else None
            self.prompts.append(Prompt(ids=fitted, text=text, messages=messages, row_number=number))

    def _render(self, row: Any) -> tuple[str, Any]:
        """A row's prompt as text and as it was given."""
        if isinstance(row, BadRow):
            raise row
        if not self.format:
            self.format = detect_prompt_format(row) if self.source.format == "auto" else self.source.format
            check_tokenizer(self.tokenizer, self._settings(), self.located.label)
        content, options = prompt_of(row, self.format)
        if self.format == "conversational" and self.data.system_prompt is not None:
            assert isinstance(content, list)
            content = with_system_message(content, self.data.system_prompt)
        if self.format == "tokenized":
            _check_ids(content, len(self.tokenizer))
            ids: Any = content
            return str(self.tokenizer.decode(list(ids))), content
        text = content if isinstance(content, str) else self._templated(content, options)
        if not text:
            raise BadRow("empty_prompt", "the prompt is empty")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow("invalid_unicode", "half of a surrogate pair, which is no text") from None
        return text, content

    def _templated(self, messages: list[Any], options: dict[str, Any]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **options
                )
            )
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            what = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadRow("template_error", f"the chat template cannot render it ({what})") from error

    def _ids(self, rendered: Sequence[tuple[int, str, Any]]) -> Iterator[TokenIds]:
        if self.format == "tokenized":
            yield from (np.array(content, dtype=np.int32) for _, _, content in rendered)
            return
        eos = self.tokenizer.eos_token_id
        for (_, text, _), ids in zip(
            rendered,
            encode_texts([text for _, text, _ in rendered], self._settings(), self.tokenizer),
            strict=True,
        ):
            # Some tokenizers end every text with EOS; a prompt goes on.
            adds_eos = len(ids) and ids[-1] == eos and not text.endswith(self.tokenizer.eos_token or "\0")
            yield ids[:-1] if adds_eos else ids

    def _fit(self, ids: TokenIds) -> TokenIds:
        if len(ids) == 0:
            raise BadRow("empty_prompt", "the prompt has no tokens")
        room = np.zeros(self.max_new_tokens, dtype=np.int32)
        whole = PairIds(prompt=ids, chosen=room, rejected=room)
        return truncate(whole, self._settings().limits, self.tokenizer.bos_token_id).prompt

    def _settings(self) -> TokenizationSettings:
        limits = LengthLimits(
            max_length=self.data.max_length,
            max_prompt_length=self.data.max_prompt_length,
            truncation=self.data.truncation,
        )
        return TokenizationSettings(format=self.format, system_prompt=self.data.system_prompt, limits=limits)

    def _drop(self, number: int, bad: BadRow) -> None:
        is_too_long = bad.reason in ("too_long", "prompt_too_long")
        stops = self.data.truncation == "error" if is_too_long else self.data.on_bad_row == "error"
        if stops:
            remedy = (
                "raise data.max_length, lower online.max_new_tokens or choose another data.truncation"
                if is_too_long
                else "mend the row, or set data.on_bad_row: skip"
            )
            raise DataError(f"{self.located.label} {self.row_word} {number}: {bad.detail}; {remedy}")
        self.dropped.setdefault(bad.reason, []).append(number)


def _check_ids(ids: Any, vocabulary_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocabulary_size]
    if wrong:
        detail = f"prompt_ids has the token id {wrong[0]}; the tokenizer's are 0 to {vocabulary_size - 1}"
        raise BadRow("token_id_out_of_range", detail)


def _store(prompts: Sequence[Prompt]) -> TokenStore:
    """The prompts as pairs whose completions have no tokens, in memory."""
    joined = join_pairs(
        [PairIds(prompt=prompt.ids, chosen=_NO_TOKENS, rejected=_NO_TOKENS) for prompt in prompts],
        [1.0] * len(prompts),
        [prompt.row_number for prompt in prompts],
    )
    return TokenStore(
        directory=Path(), fingerprint="", tokens=joined.tokens, records=joined.records, summary={}
    )
