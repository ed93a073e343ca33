"""One source -> its token store: found in the cache, or read, tokenised and written to it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpo_pack.data.formats import BadRow, detect_format
from dpo_pack.data.keys import content_key
from dpo_pack.data.locating import LocatedSource, locate_source
from dpo_pack.data.readers import NumberedRow, OpenRows
from dpo_pack.data.store import TokenizedPairs, TokenStore, open_store, write_store
from dpo_pack.data.tokenization import (
    TOKENIZATION_VERSION,
    DroppedRow,
    TokenizationSettings,
    TokenizedBatch,
    Tokenizer,
    check_tokenizer,
)
from dpo_pack.data.truncation import LengthLimits
from dpo_pack.data.workers import tokenize_rows
from dpo_pack.errors import CacheError, DataError

if TYPE_CHECKING:
    from dpo_pack.recipe_schema import DataRecipe, SourceRecipe

Progress = Callable[[str, int, int | None], None]  # what, how many done, of how many (None: not known)

# Reasons that data.truncation decides on; all others are data.on_bad_row's.
_TRUNCATION_REASONS = ("too_long", "prompt_too_long", "identical_after_truncation")
_LISTED_ROWS = 100  # row numbers a report lists for each reason
_DETECTION_ROWS = 1000  # rows in which `format: auto` looks for one that some format reads


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """A source's pairs, and whether they had to be tokenised."""

    recipe: "SourceRecipe"
    store: TokenStore
    rows_tokenized: int  # 0: the store was in the cache


def load_source(
    source: "SourceRecipe",
    key: str,
    data: "DataRecipe",
    *,
    tokenizer: Tokenizer,
    tokenizer_key: str,
    cache_dir: Path,
    progress: Progress,
) -> LoadedSource:
    """The store of one source; `key` is its recipe key, "data.train.0".

    Raises DataError for what is wrong with the source, ModelError when the tokenizer cannot serve it.
    """
    located = locate_source(source, key, cache_dir / "file_hashes.json")
    directory = cache_dir / "tokens" / _store_key(located, source, data, tokenizer_key)
    store, ingestion = open_store(directory), None
    if store is None:
        ingestion = _Ingestion(located=located, source=source, data=data, tokenizer=tokenizer)
        write_store(directory, ingestion.batches(progress), ingestion.summary)
        store = open_store(directory)
        if store is None:
            raise CacheError(f"{directory} was removed or damaged while it was written; run again")
    return LoadedSource(
        recipe=source, store=store, rows_tokenized=0 if ingestion is None else ingestion.num_rows
    )


def _store_key(located: LocatedSource, source: "SourceRecipe", data: "DataRecipe", tokenizer_key: str) -> str:
    """Everything that decides a store's content."""
    return content_key(
        {
            "version": TOKENIZATION_VERSION,
            "source": located.fingerprint,
            "split": source.split,
            "format": source.format,
            "columns": dict(source.columns),
            "max_pairs": source.max_pairs,
            "max_length": data.max_length,
            "max_prompt_length": data.max_prompt_length,
            "truncation": data.truncation,
            "on_bad_row": data.on_bad_row,
            "system_prompt": data.system_prompt,
            "tokenizer": tokenizer_key,
        }
    )


@dataclass(slots=True, kw_only=True)
class _Ingestion:
    """The pass over one source, and what it counts on the way."""

    located: LocatedSource
    source: "SourceRecipe"
    data: "DataRecipe"
    tokenizer: Tokenizer
    format: str = ""
    row_word: str = "row"
    num_rows: int = 0
    num_pairs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    dropped_counts: Counter[str] = field(default_factory=Counter)
    dropped_rows: dict[str, list[int]] = field(default_factory=dict)
    first_dropped: DroppedRow | None = None

    def batches(self, progress: Progress) -> Iterator[TokenizedPairs]:
        """The source's pairs. Raises DataError at a row that stops the run, and when no pair is left."""
        opened = self.located.open()
        self.row_word = opened.row_word
        with closing(opened.rows):
            self.format, rows = self._known_format(opened)
            settings = self._settings()
            check_tokenizer(self.tokenizer, settings, self.located.label)
            num_workers = 0 if self.data.num_workers == "auto" else self.data.num_workers
            tokenized = tokenize_rows(
                rows, settings, self.tokenizer, num_workers=num_workers, max_pairs=self.source.max_pairs
            )
            with closing(tokenized):
                for batch in tokenized:
                    self._count(batch, opened)
                    progress(f"Tokenizing {self.located.label}", self.num_rows, opened.num_rows)
                    yield batch.pairs
        self._check_any_left()

    def summary(self) -> dict[str, Any]:
        """What the pass counted, for the manifest and the data report."""
        dropped = {
            reason: {"rows": count, f"{self.row_word}_numbers": self.dropped_rows[reason]}
            for reason, count in sorted(self.dropped_counts.items())
        }
        return {
            "format": self.format,
            "rows_read": self.num_rows,
            "pairs_kept": self.num_pairs,
            "dropped": dropped,
            **self.counts,
        }

    def _settings(self) -> TokenizationSettings:
        limits = LengthLimits(
            max_length=self.data.max_length,
            max_prompt_length=self.data.max_prompt_length,
            truncation=self.data.truncation,
        )
        return TokenizationSettings(format=self.format, system_prompt=self.data.system_prompt, limits=limits)

    def _known_format(self, opened: OpenRows) -> tuple[str, Iterator[NumberedRow]]:
        """The format, for `auto` that of the first row some format reads, and all rows."""
        if self.source.format != "auto":
            return self.source.format, opened.rows
        seen: list[NumberedRow] = []
        for number, row in islice(opened.rows, _DETECTION_ROWS):
            seen.append((number, row))
            try:
                if not isinstance(row, BadRow):
                    return detect_format(row), chain(seen, opened.rows)
            except BadRow as bad:
                row = bad
            if self.data.on_bad_row == "error":
                self._stop(DroppedRow(row_number=number, reason=row.reason, detail=row.detail), opened)
        return "preference", chain(seen, opened.rows)  # whose errors are the plainest

    def _count(self, batch: TokenizedBatch, opened: OpenRows) -> None:
        for row in batch.dropped:
            if self._stops_run(row, opened):
                self._stop(row, opened)
            self.first_dropped = self.first_dropped or row
            self.dropped_counts[row.reason] += 1
            listed = self.dropped_rows.setdefault(row.reason, [])
            if len(listed) < _LISTED_ROWS:
                listed.append(row.row_number)
        self.counts.update(batch.counts)
        self.num_rows += batch.num_rows
        self.num_pairs += len(batch.pairs.records)

    def _stops_run(self, row: DroppedRow, opened: OpenRows) -> bool:
        if row.reason in _TRUNCATION_REASONS:
            return self.data.truncation == "error"
        return _is_in_all_rows(row, opened) or self.data.on_bad_row == "error"

    def _stop(self, row: DroppedRow, opened: OpenRows) -> None:
        remedy = self._remedy(row) or "mend the row, or set data.on_bad_row: skip"
        if row.reason == "missing_column" and not _is_in_all_rows(row, opened):
            remedy += ", or set data.on_bad_row: skip"
        raise DataError(f"{self.located.label} {self.row_word} {row.row_number}: {row.detail}; {remedy}")

    def _remedy(self, row: DroppedRow) -> str | None:
        """What the recipe can do about such rows, where that is not leaving them out."""
        return {
            "missing_column": f"name the column in {self.located.key}.columns",
            "too_long": "raise data.max_length or choose another data.truncation",
            "prompt_too_long": "raise data.max_prompt_length or choose another data.truncation",
        }.get(row.reason)

    def _check_any_left(self) -> None:
        if self.num_rows == 0:
            raise DataError(f"{self.located.label} has no rows; correct or remove {self.located.key}")
        if self.num_pairs == 0:
            assert self.first_dropped is not None
            remedy = self._remedy(self.first_dropped) or f"mend the rows, or remove {self.located.key}"
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped_counts.most_common())
            raise DataError(
                f"{self.located.label}: no pairs left of {self.num_rows} rows ({reasons}); the first: "
                f"{self.row_word} {self.first_dropped.row_number}: {self.first_dropped.detail}; {remedy}"
            )


def _is_in_all_rows(row: DroppedRow, opened: OpenRows) -> bool:
    """A columnar source that lacks a column lacks it in every row."""
    return row.reason == "missing_column" and opened.columns is not None
