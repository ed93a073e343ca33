"""Reads and tokenises the pairs or prompts of one source, and counts its rows.

The token ids of pairs are kept in a directory on disk, the source's store, so the next run need not tokenise
them. Prompts are kept in memory only, because judges read their text, which a store does not have.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dpo_pack.data.formats import (
    FORMATS,
    BadRow,
    Pair,
    Row,
    are_labels,
    possible_formats,
    texts_of_columns,
)
from dpo_pack.data.keys import content_key
from dpo_pack.data.locating import LocatedSource, locate_source
from dpo_pack.data.readers import TAKEN_ONCE, NumberedRow, OpenRows, missing_column
from dpo_pack.data.store import TokenStore, join_stores, open_store, write_store
from dpo_pack.data.tokenization import (
    TOKENIZATION_VERSION,
    DroppedRow,
    Prompt,
    TokenizationSettings,
    TokenizedBatch,
    check_tokenizer,
)
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.data.truncation import LengthLimits
from dpo_pack.data.workers import tokenize_rows
from dpo_pack.recipe.data import FIELDS_OF_FORMAT
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.system.errors import CacheError, DataError

Progress = Callable[[str, int, int | None], None]  # task, rows done, rows in all (None if not known)

# data.truncation decides about rows with these reasons; data.on_bad_row decides about all other bad rows.
_TRUNCATION_REASONS = (
    "too_long",
    "prompt_too_long",
    "identical_after_truncation",
    "unscored_after_truncation",
)
LISTED_ROWS = 100  # the most row numbers that a report lists for each reason
_NAMED_COLUMNS = 20  # an error message names at most so many columns
_DETECTION_ROWS = 1000  # `format: auto` looks for a readable row in so many rows

# The recipe keys that do not change a source's tokens. The name of a store is a hash of the other keys. So if
# somebody forgets to list a key here, a new value makes a new store; it never finds tokens of an old value.
# A hub data set's content, which `datasets` names, depends on config, data_dir and revision.
_SOURCE_KEYS_BESIDE_TOKENS = {"path", "name", "weight", "config", "data_dir", "revision"}
_DATA_KEYS_BESIDE_TOKENS = {"train", "eval", "shuffle", "num_workers", "scored_turns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """The pairs of a source. A source of prompts only has pairs whose completions have no tokens."""

    recipe: SourceRecipe
    store: TokenStore
    rows_tokenized: int  # 0 if the store was in the cache
    prompts: tuple[Prompt, ...] = ()  # one for each pair of the store
    columns_read: Mapping[str, str] = field(default_factory=dict)  # field -> column, of rows read now


def load_source(
    source: SourceRecipe,
    key: str,
    *,
    data: DataRecipe,
    tokenizer: Tokenizer,
    tokenizer_key: str,
    cache_dir: Path,
    progress: Progress | None = None,
    max_new_tokens: int | None = None,
    max_rows: int | None = None,
) -> LoadedSource:
    """Returns the pairs of one source; `key` is its recipe key, "data.train.0".

    With `max_new_tokens`, rows are prompts that leave room for so many tokens in data.max_length. With
    `max_rows`, only so many rows are read, and nothing is written. Raises DataError if the source has an
    error, ModelError if the tokenizer lacks a feature that rows need.
    """
    is_prompts = max_new_tokens is not None
    hash_memo = cache_dir / "file_hashes.json" if max_rows is None else None
    ingestion = Ingestion(
        located=locate_source(source, key, hash_memo, prompts_suffice=is_prompts),
        source=source,
        data=data,
        tokenizer=tokenizer,
        completion_tokens=max_new_tokens,
        max_rows=max_rows,
    )
    if is_prompts or max_rows is not None:
        batches = list(ingestion.batches(progress))
        return LoadedSource(
            recipe=source,
            store=join_stores([batch.pairs for batch in batches], ingestion.summary()),
            rows_tokenized=ingestion.num_rows,
            prompts=tuple(prompt for batch in batches for prompt in batch.prompts),
            columns_read=ingestion.columns_read,
        )
    name = _store_key(ingestion.located, source, data, tokenizer_key, ingestion.find_format())
    directory = cache_dir / "tokens" / name
    store, num_rows = open_store(directory), 0
    if store is not None and ingestion.reads_more_than(store):
        store.forget()
        store = None
    if store is None:
        pairs = (batch.pairs for batch in ingestion.batches(progress))
        write_store(directory, pairs, ingestion.summary)
        store, num_rows = open_store(directory), ingestion.num_rows
        if store is None:
            raise CacheError(f"{directory} was removed or damaged while it was written; run again")
    return LoadedSource(recipe=source, store=store, rows_tokenized=num_rows)


def columns_sentence(read: Mapping[str, str], not_read: Sequence[str]) -> str:
    """Returns which column each field of a pair is read from, and which columns are not read."""
    named = (field if field == column else f"{field} = {column}" for field, column in read.items())
    others = f"; not read: {', '.join(not_read)}" if not_read else ""
    return f"columns: {', '.join(named) or 'none'}{others}"


def _store_key(
    located: LocatedSource, source: SourceRecipe, data: DataRecipe, tokenizer_key: str, found_format: str
) -> str:
    """Returns the name of a source's store: a hash of everything that decides the token ids.

    Options of other formats are not hashed. So a new option of one format leaves other formats' stores valid.
    """
    others = {option for format in FORMATS.values() for option in format.options}
    others.difference_update(FORMATS[found_format].options)
    # Stores of earlier releases, which scored all turns, have no such key.
    masks_turns = FORMATS[found_format].content == "messages" and data.scored_turns == "assistant"
    return content_key(
        {
            **({"scored_turns": data.scored_turns} if masks_turns else {}),
            "version": TOKENIZATION_VERSION,
            "source": located.fingerprint,
            "tokenizer": tokenizer_key,
            **source.model_dump(mode="json", exclude=_SOURCE_KEYS_BESIDE_TOKENS | others),
            **data.model_dump(mode="json", exclude=_DATA_KEYS_BESIDE_TOKENS),
            "found_format": found_format,
        }
    )


@dataclass(slots=True, kw_only=True)
class Ingestion:
    """One pass over the rows of a source, with its counts of rows, pairs and dropped rows."""

    located: LocatedSource
    source: SourceRecipe
    data: DataRecipe
    tokenizer: Tokenizer
    completion_tokens: int | None = None  # tokens to leave free after a prompt; None if rows are pairs
    max_rows: int | None = None  # None: all rows are read
    format: str = ""
    row_word: str = "row"
    mapping: Mapping[str, str | None] = field(default_factory=dict)  # of the source, see OpenRows
    columns: Mapping[str, None] = field(default_factory=dict)  # of the source, see OpenRows
    infers_prompts: bool = False  # the prompts are what chosen and rejected begin with
    num_rows: int = 0
    num_kept: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    dropped_counts: Counter[str] = field(default_factory=Counter)
    dropped_rows: dict[str, list[int]] = field(default_factory=dict)
    first_dropped: dict[str, DroppedRow] = field(default_factory=dict)  # the first row of each reason

    @property
    def kept_word(self) -> str:
        return "pairs" if self.completion_tokens is None else "prompts"

    def find_format(self) -> str:
        """Returns the format of the rows. Raises DataError as `batches` does."""
        if self.source.format != "auto":
            return self.source.format
        opened = self.open()
        with closing(opened.rows):
            return self._known_format(opened)[0]

    def batches(self, progress: Progress | None = None) -> Iterator[TokenizedBatch]:
        """Yields the rows as tokens. Raises DataError if bad rows stop the run or all rows are dropped."""
        opened = self.open()
        with closing(opened.rows):
            rows, settings = self.start(opened)
            wanted = 0 if self.max_rows is not None else self.data.num_workers
            batches = tokenize_rows(
                islice(rows, self.max_rows),
                settings,
                self.tokenizer,
                num_workers=0 if wanted == "auto" else wanted,
                max_pairs=self.source.max_pairs,
            )
            with closing(batches):
                for batch in batches:
                    self.count(batch)
                    if self.num_kept == 0 and self.num_rows >= _DETECTION_ROWS:
                        self._check_rows("the first ")  # the rest of a large file would take long
                    if progress is not None:
                        progress(f"Tokenizing {self.located.label}", self.num_rows, opened.num_rows)
                    yield batch
        self._check_rows("the first " if self.num_rows == self.max_rows else "")
        self._check_any_left()

    def start(self, opened: OpenRows) -> tuple[Iterator[NumberedRow], TokenizationSettings]:
        """Finds the format; returns all rows and how to tokenise them. Raises DataError and ModelError."""
        self.format, rows = self._known_format(opened)
        self._check_columns_are_read()
        rows = self._with_known_prompts(opened, rows)
        settings = TokenizationSettings(
            format=self.format,
            system_prompt=self.data.system_prompt,
            limits=LengthLimits(
                max_length=self.data.max_length,
                max_prompt_length=self.data.max_prompt_length,
                truncation=self.data.truncation,
            ),
            scored_turns=self.data.scored_turns,
            completion_tokens=self.completion_tokens,
            format_options=FORMATS[self.format].options_of(self.source),
        )
        check_tokenizer(self.tokenizer, settings, self.located.label)
        return rows, settings

    def reads_more_than(self, store: TokenStore) -> bool:
        """Returns True if an earlier release wrote the store and did not read a column that is read now."""
        added = {"chosen_weights", "rejected_weights"} - self.source.columns.keys()
        not_read = store.summary.get("columns_not_read", ())
        return store.summary.get("format") == "tokenized" and not added.isdisjoint(not_read)

    def summary(self) -> dict[str, Any]:
        """Returns the counts of rows and pairs, for the store's manifest and for data_report.json."""
        dropped = {
            reason: {"rows": count, f"{self.row_word}_numbers": self.dropped_rows[reason]}
            for reason, count in sorted(self.dropped_counts.items())
        }
        return {
            "format": self.format,
            "rows_read": self.num_rows,
            f"{self.kept_word}_kept": self.num_kept,
            "dropped": dropped,
            "columns_not_read": self.columns_not_read,
            **self.counts,
        }

    def open(self) -> OpenRows:
        opened = self.located.open()
        self.row_word, self.mapping, self.columns = opened.row_word, opened.mapping, opened.columns
        return opened

    def _known_format(self, opened: OpenRows) -> tuple[str, Iterator[NumberedRow]]:
        """Returns the format and all rows of the source. With `auto`, the first readable row decides."""
        if self.source.format != "auto":
            return self.source.format, opened.rows
        seen: list[NumberedRow] = []
        likely = ""
        for number, row in islice(opened.rows, _DETECTION_ROWS):
            seen.append((number, row))
            if isinstance(row, BadRow):
                continue  # bad rows are counted when they are tokenised
            possible = possible_formats(row, self.source.columns)
            likely = likely or next(iter(possible), "")
            pairs = {name: pair for name in possible if (pair := self._pair(row, name)) is not None}
            if pairs:
                self._check_is_one_pair(number, pairs)
                return next(iter(pairs)), chain(seen, opened.rows)
        return likely or "preference", chain(seen, opened.rows)

    def _pair(self, row: Row, name: str) -> Pair | None:
        """Returns the pair or prompt that this format makes of a row; None if the row is bad."""
        format = FORMATS[name]
        read = format.pair if self.completion_tokens is None else format.prompt
        try:
            return read(row, **format.options_of(self.source))
        except BadRow:
            return None

    def _check_is_one_pair(self, number: int, pairs: Mapping[str, Pair]) -> None:
        first = next(iter(pairs.values()))
        other = [name for name, pair in pairs.items() if pair != first]
        if other:
            names = [next(iter(pairs)), *other]
            columns = " or ".join(f"{FORMATS[name].prompt_column} ({name})" for name in names)
            choices = " or ".join(f"format: {name}" for name in names)
            raise DataError(
                f"{self.located.label} {self.row_word} {number}: the prompt may be the column {columns}; set "
                f"{self.located.key}.{choices}"
            )

    def _check_columns_are_read(self) -> None:
        """Raises DataError if the format does not read a column that the recipe names.

        If no row has one of these columns, the error names that one: without it, no format could be found.
        """
        named = {ours: theirs for ours, theirs in self.source.columns.items() if theirs is not None}
        unread = [ours for ours in named if ours not in FIELDS_OF_FORMAT[self.format]]
        if not unread:
            return
        for ours, theirs in named.items() if self.columns else ():
            if theirs not in self.columns:
                missing = missing_column(f"{self.located.key}.columns.{ours}", theirs, tuple(self.columns))
                raise DataError(f"{self.located.label}: {missing}; correct the name")
        ours = unread[0]
        remedy = f"remove {ours}, or set {self.located.key}.format"
        if ours == "system" and self.format == "preference":
            prompt = named.get("prompt", "prompt")
            remedy = (
                f"set {self.located.key}.columns: {{instruction: {prompt}, system: {named[ours]}}}, which "
                "makes messages of prompt, chosen and rejected"
            )
        raise DataError(
            f"{self.located.label}: its rows are read as {self.format}, which has no column {ours}, "
            f"but {self.located.key}.columns.{ours} names column {named[ours]!r}; {remedy}"
        )

    @property
    def _columns(self) -> dict[str, str | None]:
        """The fields that the format reads, and the source's names of their columns."""
        skipped = TAKEN_ONCE.intersection(self.mapping.values()).difference(self.mapping)
        if self.format == "conversational" and not self.source.names_system:
            skipped.add("system")
        fields = (field for field in FIELDS_OF_FORMAT[self.format] if field not in skipped)
        return {field: self.mapping.get(field, field) for field in fields}

    @property
    def columns_read(self) -> dict[str, str]:
        """The fields that the rows read so far have, and the source's names of their columns."""
        columns = self._columns.items()
        return {field: column for field, column in columns if column is not None and column in self.columns}

    @property
    def columns_not_read(self) -> list[str]:
        """The source's names of the columns that the format does not read."""
        read = set(self._columns.values())
        return [column for column in self.columns if column not in read]

    def _with_known_prompts(self, opened: OpenRows, rows: Iterator[NumberedRow]) -> Iterator[NumberedRow]:
        """Returns the rows; a row of texts becomes a BadRow if it is uncertain what its prompt is.

        Without a prompt column, the common beginning of chosen and rejected is the prompt. Raises DataError
        if another column may be the prompt.
        """
        format, prompt = FORMATS[self.format], self.source.columns.get("prompt", "prompt")
        if not format.infers_prompts or prompt is None:
            return rows
        first_rows = [] if prompt in opened.columns else opened.first_rows()
        columns = {**opened.columns, **dict.fromkeys(chain.from_iterable(first_rows))}
        if prompt in columns:
            return (_refuse_without_prompt(numbered, None) for numbered in rows)
        completions = [self.source.columns.get(column, column) for column in format.completion_columns]
        is_pair = self.completion_tokens is None
        if prompt != "prompt" or (is_pair and not columns.keys() >= set(completions)):
            return rows  # each row will be refused, because it lacks a column that it must have
        read = {*FIELDS_OF_FORMAT[self.format], *self._columns.values()}
        texts = texts_of_columns(first_rows, beside=read)
        possible = [column for column in texts if not are_labels(texts[column])]
        # Columns with many different texts come first, because questions differ; `system` comes last.
        possible.sort(key=lambda column: (column == "system", -len(set(texts[column]))))
        if possible:
            names = " or ".join(map(repr, possible[:_NAMED_COLUMNS]))
            more = ", ..." if len(columns) > _NAMED_COLUMNS else ""
            raise DataError(
                f"{self.located.label}: no column 'prompt', and {names} may be it; the columns are: "
                f"{', '.join(islice(columns, _NAMED_COLUMNS))}{more}; set {self.located.key}.columns: "
                f"{{prompt: {possible[0]}}}, or {{prompt: null}} if chosen and rejected begin with the "
                f"prompt, or {{instruction: {possible[0]}}} to use the chat template"
            )
        self.infers_prompts = True
        known = {*read, *texts}
        return (_refuse_without_prompt(numbered, known) for numbered in rows)

    def count(self, batch: TokenizedBatch) -> None:
        """Adds the rows of a batch to the counts."""
        for number, bad in batch.dropped:
            self.first_dropped.setdefault(bad.reason, (number, bad))
            self.dropped_counts[bad.reason] += 1
            listed = self.dropped_rows.setdefault(bad.reason, [])
            if len(listed) < LISTED_ROWS:
                listed.append(number)
        self.counts.update(batch.counts)
        self.num_rows += batch.num_rows
        self.num_kept += len(batch.pairs.records)

    def stops_run(self, reason: str) -> bool:
        """Returns True if rows with this reason end a run."""
        if reason in _TRUNCATION_REASONS:
            return self.data.truncation == "error"
        if self.infers_prompts and reason == "no_common_prompt" and self._is_in_most_rows(reason):
            return True  # the common beginnings of the other rows are not their prompts either
        return self.data.on_bad_row == "error"

    def _is_in_most_rows(self, reason: str) -> bool:
        return 2 * self.dropped_counts[reason] > self.num_rows

    def _check_rows(self, which: str) -> None:
        """Raises DataError if dropped rows stop the run. It names the first one and counts each reason."""
        stopping = [reason for reason in self.first_dropped if self.stops_run(reason)]
        if not stopping:
            return
        number, bad = self.first_dropped[stopping[0]]
        kinds = [f"{bad.reason}: {self.dropped_counts[bad.reason]:,} of {which}{self.num_rows:,} rows"]
        kinds += [f"{other}: {self.dropped_counts[other]:,}" for other in stopping[1:]]
        raise DataError(
            f"{self.located.label} {self.row_word} {number}: {bad.detail}; {', '.join(kinds)}; "
            f"{self.advice(bad)}"
        )

    def advice(self, bad: BadRow) -> str:
        """Returns the remedy, with `skip` if rows like this one stop a run and are fewer than half of all.

        To skip most rows of a source would hide what is wrong with it. Returns "" if the recipe leaves the
        rows out and no other key would keep them.
        """
        remedy = self.remedy(bad) or ("mend the rows" if self.stops_run(bad.reason) else "")
        may_skip = bad.reason not in _TRUNCATION_REASONS and not self._is_in_most_rows(bad.reason)
        if may_skip and self.stops_run(bad.reason):
            remedy += ", or set data.on_bad_row: skip"
        return remedy

    def remedy(self, bad: BadRow) -> str | None:
        """Returns what the user can change so that rows with this fault are kept, or None."""
        shorter = "" if self.completion_tokens is None else ", lower online.max_new_tokens"
        if bad.reason == "no_common_prompt" and "prompt" not in FIELDS_OF_FORMAT[self.format]:
            return None
        return {
            "missing_column": f"name the column in {self.located.key}.columns",
            "no_common_prompt": f"name the column of the prompt in {self.located.key}.columns",
            "answered_prompt": f"name another column in {self.located.key}.columns, or set its format",
            "tie": "remove such rows",
            "rewritten_turns": "set data.scored_turns: all, or name a template that has "
            "{% generation %} marks in tokenizer.chat_template",
            "nothing_scored": None
            if self.format == "tokenized"
            else "set data.scored_turns: all, or mend the rows",
            "media": "remove them from the data if the text alone is enough",
            "too_long": f"raise data.max_length{shorter} or choose another data.truncation",
            "prompt_too_long": "raise data.max_prompt_length or choose another data.truncation",
        }.get(bad.reason)

    def _check_any_left(self) -> None:
        if self.num_rows == 0:
            raise DataError(f"{self.located.label} has no rows; correct or remove {self.located.key}")
        if self.num_kept == 0:
            number, bad = next(iter(self.first_dropped.values()))
            remedy = self.remedy(bad) or f"mend the rows, or remove {self.located.key}"
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped_counts.most_common())
            raise DataError(
                f"{self.located.label}: no {self.kept_word} left of {self.num_rows} rows ({reasons}); "
                f"the first: {self.row_word} {number}: {bad.detail}; {remedy}"
            )


def _refuse_without_prompt(numbered: NumberedRow, known: Container[str | None] | None) -> NumberedRow:
    """Returns the row; instead of a row without the column `prompt` a BadRow, if that column may be missing.

    `known` are the columns that are not the prompt: the row is refused if another column has texts, because
    that column may be the prompt. `known` is None if other rows have the column `prompt`.
    """
    number, row = numbered
    if isinstance(row, BadRow) or "prompt" in row:
        return numbered
    if known is None:
        detail = f"no column 'prompt', which other rows have (there are: {', '.join(row) or 'none'})"
    elif texts := texts_of_columns([row], beside=known):
        detail = f"no column 'prompt', and {next(iter(texts))!r} may be it"
    else:
        return numbered
    return number, BadRow("missing_column", detail)
