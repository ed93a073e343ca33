"""One pass over the rows of a source: finds the format, tokenises the rows and counts them.

A large source is tokenised in ranges of rows, so that no row is tokenised twice. Each range has a store of
its own, whose name is a hash of its rows, as the file has them, and of all else that decides their token ids.
So a stopped pass goes on, and a source that has changed costs the ranges with changed rows. A range ends
after a row whose hash says so: rows that come or go leave other ranges as they were. If rows are added at the
end, the new last range begins with a copy of the old one. The rows are read twice: to cut them into ranges,
and to tokenise those of missing ranges.
"""

import hashlib
import os
import pickle
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

from dpo_pack.data.columns import Columns, are_labels, likelihood, proposal, texts_of_columns
from dpo_pack.data.faults import Origin, faults_of
from dpo_pack.data.formats import FORMATS, Pair, check_last_turn, possible_formats, with_system
from dpo_pack.data.images import ImageProcessor, ImageReader
from dpo_pack.data.readers import FIRST_ROWS, TAKEN_ONCE, NumberedRow, OpenRows, is_among
from dpo_pack.data.store import (
    KEY_BYTES,
    PairTable,
    TokenStore,
    content_key,
    open_store,
    write_ranged_store,
    write_store,
)
from dpo_pack.data.tokenization import (
    DroppedRow,
    Submit,
    TokenizationSettings,
    TokenizedBatch,
    check_tokenizer,
    tokenize_rows,
    tokenizing,
)
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.data.values import BadRow
from dpo_pack.recipe.data import FIELDS_OF_FORMAT, IMAGE_FIELDS, SCORE_FIELDS
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.recipe.text import to_yaml
from dpo_pack.system.errors import DataError

Progress = Callable[[str, int, int | None], None]  # task, rows done, rows in all (None if not known)

# data.truncation decides about rows with these reasons; data.on_bad_row decides about all other bad rows.
_TRUNCATION_REASONS = (
    *("too_long", "prompt_too_long"),
    *("identical_after_truncation", "unscored_after_truncation"),
)
LISTED_ROWS = 100  # the most row numbers that a report lists for each reason
_NAMED_COLUMNS = 20  # an error message names at most so many columns
_DETECTION_ROWS = 1000  # `format: auto` looks for a readable row in so many rows
SMALLEST_RANGE, LARGEST_RANGE = 1 << 14, 1 << 18  # rows; the last range of a source may be smaller
MORE_ROWS = 1 << 16  # after the smallest range, one row of so many ends it
# What the summary of a range's store has of its Ingestion, and columns, `rows_before`.
_SAVED = ("num_rows", "num_kept", "counts", "faults", "dropped_counts", "dropped_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    """A source that exists and can be opened."""

    label: str  # the path or hub id, as the user wrote it
    key: str  # its recipe key, "data.train.0"
    fingerprint: str  # names its content, as it was found
    hash: Callable[[], str]  # the same of its present content
    open: Callable[[], OpenRows]  # raises DataError if the source cannot be read
    files_not_read: Sequence[str] = ()  # data files of a directory that are in none of its splits

    def check_unchanged(self) -> None:
        """Raises DataError if the content is another one than was found, and tokens must not get its name."""
        if self.hash() != self.fingerprint:
            raise DataError(f"{self.label}: it has changed while it was read; run the same command again")


@dataclass(slots=True, kw_only=True)
class Ingestion:
    """One pass over the rows of a source, with its counts of rows, pairs and dropped rows."""

    located: LocatedSource
    source: SourceRecipe
    data: DataRecipe
    tokenizer: Tokenizer
    images: ImageProcessor | None = None  # None: rows with images are bad rows
    completion_tokens: int | None = None  # tokens to leave free after a prompt; None if rows are pairs
    max_rows: int | None = None  # None: all rows are read
    progress: Progress | None = None
    # What `start` finds.
    format: str = ""
    needs_prompt: bool = False  # of texts: a row without the column prompt is a bad row
    # If chosen and rejected begin with the prompt: a text in a column beside these may be the prompt instead.
    known_columns: Sequence[str] | None = None
    opened: OpenRows = field(init=False)
    settings: TokenizationSettings = field(init=False)
    num_workers: int = field(init=False)
    submit: Submit = field(init=False)  # of `tokenizing` with these workers
    # The counts, which a copy by `replace` does not have.
    num_rows: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)  # rows whose tokens were in the cache
    num_kept: int = field(init=False, default=0)
    counts: Counter[str] = field(init=False, default_factory=Counter)
    faults: dict[str, dict[str, int]] = field(init=False, default_factory=dict)  # name: pairs, first_row
    dropped_counts: Counter[str] = field(init=False, default_factory=Counter)
    dropped_rows: dict[str, list[int]] = field(init=False, default_factory=dict)
    first_dropped: dict[str, DroppedRow] = field(init=False, default_factory=dict)  # of each reason

    @contextmanager
    def start(self) -> Iterator[Iterator[NumberedRow]]:
        """Opens the source, finds its format, gives all rows. Raises DataError, RecipeError, ModelError."""
        self.opened, self.format = self.located.open(), self.source.format
        rows: Iterator[NumberedRow] = self.opened.rows
        with closing(self.opened.rows):
            if self.format == "auto":
                self.format, rows = self._find_format(rows)
            if FORMATS[self.format].infers_prompts:
                self._check_prompts()
            self.settings = TokenizationSettings(
                format=self.format,
                data=self.data,
                source=self.source,
                tokenizer=self.tokenizer,
                completion_tokens=self.completion_tokens,
                images=None if self.images is None else self._image_reader(self.images),
            )
            check_tokenizer(self.settings, self.located.label)
            wanted = self.data.num_workers
            self.num_workers = 0 if wanted == "auto" or self.max_rows is not None else wanted
            with tokenizing(self.settings, self.num_workers) as self.submit:
                yield self.checked(rows)

    def _image_reader(self, processor: ImageProcessor) -> ImageReader:
        folder, path = self.source.image_folder, Path(self.located.label)
        if folder is None and path.exists():
            folder = path if path.is_dir() else path.parent
        return ImageReader(
            processor=processor,
            folder=folder and Path(os.path.abspath(folder)),  # without `..`, as the paths of images
            max_pixels=self.data.max_pixels,
        )

    # ---- Which format, which columns

    def _find_format(self, rows: Iterator[NumberedRow]) -> tuple[str, Iterator[NumberedRow]]:
        """Returns the format of the first readable row, or of one with images among the first rows, and all
        rows. Raises DataError if two formats can read it, or if none reads a column that the recipe names."""
        rows, every = tee(rows)
        ahead = list(islice(rows, 0 if self.images is None else FIRST_ROWS))
        ahead.sort(key=lambda one: isinstance(one[1], BadRow) or not one[1].get("images"))
        likely, named, is_whole = "", {ours for ours, theirs in self.source.columns.items() if theirs}, False
        for number, row in chain(ahead, islice(rows, _DETECTION_ROWS)):
            if isinstance(row, BadRow):
                continue  # bad rows are counted when they are tokenised
            is_whole = True  # it has the columns that the recipe names
            pairs: dict[str, Pair] = {}
            for name in possible_formats(row, self.source.columns):
                likely, format = likely or name, FORMATS[name]
                with suppress(BadRow):
                    pair = (format.pair if self.completion_tokens is None else format.prompt)(row)
                    check_last_turn(pair)
                    pairs[name] = with_system(row, pair) if "system" in self.source.columns else pair
            first, *others = pairs or [""]
            different = [name for name in others if pairs[name] != pairs[first]]
            if different:
                names = [first, *different]
                columns = " or ".join(f"{FORMATS[name].prompt_column} ({name})" for name in names)
                raise DataError(
                    f"{self._place(number)}: the prompt may be the column {columns}; "
                    f"set {self.located.key}." + " or ".join(f"format: {name}" for name in names)
                )
            if first:
                return first, every
        reading = (name for name, fields in FIELDS_OF_FORMAT.items() if named.issubset(fields))
        format_name = likely or next(reading, "preference")
        if is_whole and (unread := sorted(named.difference(FIELDS_OF_FORMAT[format_name]))):
            raise DataError(
                f"{self.located.label}: no format reads these columns together; as {format_name}, "
                f"{unread[0]} is not read; remove it from {self.located.key}.columns, or set its format"
            )
        return format_name, every

    def _check_prompts(self) -> None:
        """Raises DataError if the source has no column prompt, and another column may be it."""
        prompt = self.source.columns.get("prompt", "prompt")
        first_rows = [] if prompt is None or prompt in self.opened.columns else self.opened.first_rows()
        columns = {*self.opened.columns, *chain.from_iterable(first_rows)}
        self.needs_prompt = prompt is not None and is_among(prompt, columns)
        if self.needs_prompt or prompt != "prompt":
            return  # without the column that the recipe names, each row is refused
        read = {*FIELDS_OF_FORMAT[self.format], *self._columns.values()}
        texts = texts_of_columns(first_rows, beside=read)
        possible = [column for column in texts if not are_labels(texts[column])]
        answers = [self.source.columns.get(name, name) for name in FORMATS[self.format].completion_columns]
        has_answers = all(name is not None and is_among(name, columns) for name in answers)
        if not has_answers and self.completion_tokens is None:
            return
        if not possible:
            self.known_columns = sorted(column for column in {*read, *texts} if column is not None)
            return
        possible.sort(key=lambda column: likelihood(column, texts[column]))
        names = " or ".join(map(repr, possible[:_NAMED_COLUMNS]))
        prompt, instruction = (
            to_yaml({field: possible[0]}, one_line=True) for field in ("prompt", "instruction")
        )
        raise DataError(
            f"{self.located.label}: no column 'prompt', and {names} may be it; set {self.located.key}."
            f"columns: {prompt}, or {{prompt: null}} if chosen and rejected begin with the prompt, or "
            f"{instruction} to use the chat template"
        )

    def checked(self, rows: Iterator[NumberedRow]) -> Iterator[NumberedRow]:
        """Yields the rows; a row of texts becomes a BadRow if it is uncertain what its prompt is."""
        beside = self.known_columns
        for number, row in rows:
            if isinstance(row, dict) and "prompt" not in row:
                if self.needs_prompt:
                    row = BadRow("missing_column", "no column 'prompt', which other rows have", row)
                elif beside is not None and (others := texts_of_columns([row], beside=beside)):
                    detail = f"no column 'prompt', and {next(iter(others))!r} may be it"
                    row = BadRow("missing_column", detail, row)
            yield number, row

    @property
    def _columns(self) -> dict[str, str | None]:
        """The fields that the format reads, and the source's names of their columns."""
        mapping = self.source.columns
        skipped = TAKEN_ONCE.intersection(mapping.values()).union(SCORE_FIELDS).difference(mapping)
        if self.format == "conversational" and "system" not in mapping:
            skipped.add("system")
        if named := {field for field in IMAGE_FIELDS if mapping.get(field) is not None}:
            skipped.update({*IMAGE_FIELDS} - named)
        fields = FIELDS_OF_FORMAT[self.format]
        return {name: mapping.get(name, name) for name in fields if name not in skipped}

    @property
    def columns_read(self) -> dict[str, str]:
        """The fields that the rows read so far have, and the source's names of their columns."""
        return {
            field: column
            for field, column in self._columns.items()
            if column is not None and is_among(column, self.opened.columns)
        }

    # ---- Rows as tokens

    def batches(
        self, rows: Iterator[NumberedRow], part: "Ingestion | None" = None
    ) -> Iterator[TokenizedBatch]:
        """Yields rows of `start` as tokens, no more than the missing pairs, and counts them here, those of a
        range in `part`, too. Raises DataError if rows stop the run, without `part` as `check` at the end."""
        origin = Origin(self.located.key, self.settings)
        most_pairs = self.source.max_pairs and self.source.max_pairs - self.num_kept
        rows = islice(rows, self.max_rows)
        batches = tokenize_rows(rows, self.submit, num_workers=self.num_workers, max_pairs=most_pairs)
        with closing(batches):
            for batch in batches:
                found = faults_of(batch.kept, origin)
                for counter in (self, part) if part else (self,):
                    counter.count(batch)
                    for name, pairs in found.items():
                        first = {"pairs": 0, "first_row": pairs[0][0].row.number}
                        counter.faults.setdefault(name, first)["pairs"] += len(pairs)
                if self.num_kept == 0 and self.num_rows >= _DETECTION_ROWS:
                    self.check(is_end=False)  # the rest of a large file would take long
                if self.progress is not None:
                    self.progress(f"Tokenizing {self.located.label}", self.num_rows, self.opened.num_rows)
                yield batch
        if part is None:
            self.check()

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

    def count_saved(self, saved: Mapping[str, Any], rows_before: int) -> None:
        """Adds the counts that were saved with a range, which now has so many rows before it."""
        shift = rows_before - saved["rows_before"]
        self.num_cached += saved["num_rows"]
        self.num_rows += saved["num_rows"]
        self.num_kept += saved["num_kept"]
        self.counts.update(saved["counts"])
        self.dropped_counts.update(saved["dropped_counts"])
        self.opened.columns.update(saved["columns"])
        for reason, numbers in saved["dropped_rows"].items():
            listed = self.dropped_rows.setdefault(reason, [])
            listed += [number + shift for number in numbers][: LISTED_ROWS - len(listed)]
        for name, fault in saved["faults"].items():
            first = {"pairs": 0, "first_row": fault["first_row"] + shift}
            self.faults.setdefault(name, first)["pairs"] += fault["pairs"]

    def summary(self) -> dict[str, Any]:
        """Returns the counts of rows and pairs, for the store's manifest and for data_report.json."""
        dropped = {
            reason: {"rows": count, f"{self.opened.row_word}_numbers": self.dropped_rows[reason]}
            for reason, count in sorted(self.dropped_counts.items())
        }
        read = {*self._columns.values()}
        read.update(column.split(".")[0] for column in self.source.columns.values() if column is not None)
        summary = {
            "format": self.format,
            "rows_read": self.num_rows,
            "pairs_kept" if self.completion_tokens is None else "prompts_kept": self.num_kept,
            "dropped": dropped,
            "columns_not_read": [column for column in self.opened.columns if column not in read],
            **self.counts,
            "faults": self.faults,
        }
        if characters := self.counts["characters"]:
            missing = self.counts["characters_of_earlier_reasoning"] + self.counts["characters_cut"]
            summary["characters_in_tokens"] = max(0.0, 1 - missing / characters)
        if self.located.files_not_read:
            summary["files_not_read"] = [*self.located.files_not_read]
        return summary

    # ---- Rows that stop a run, and what mends them

    def check(self, *, is_end: bool = True) -> None:
        """Raises DataError if bad rows stop the run or, at its end, none is kept or the source changed."""
        if is_end:
            self.located.check_unchanged()
        if self.num_rows == 0:
            raise DataError(f"{self.located.label} has no rows; correct or remove {self.located.key}")
        which = "" if is_end and self.num_rows != self.max_rows else "the first "
        if stopping := [reason for reason in self.first_dropped if self.stops_run(reason)]:
            number, bad = self.first_dropped[stopping[0]]
            kinds = [f"{bad.reason}: {self.dropped_counts[bad.reason]:,} of {which}{self.num_rows:,} rows"]
            kinds += [f"{other}: {self.dropped_counts[other]:,}" for other in stopping[1:]]
            raise DataError(f"{self._place(number)}: {bad.detail}; {', '.join(kinds)}; {self.advice(bad)}")
        if is_end and self.num_kept == 0:
            number, bad = next(iter(self.first_dropped.values()))
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped_counts.most_common())
            kept = "pairs" if self.completion_tokens is None else "prompts"
            raise DataError(
                f"{self.located.label}: no {kept} left of {which}{self.num_rows} rows ({reasons}); the "
                f"first: {self.opened.row_word} {number}: {bad.detail}; "
                f"{self._remedy(bad) or f'mend the rows, or remove {self.located.key}'}"
            )

    def _place(self, number: int) -> str:
        return f"{self.located.label} {self.opened.row_word} {number}"

    def stops_run(self, reason: str) -> bool:
        """Returns True if rows with this reason end a run."""
        if reason in _TRUNCATION_REASONS:
            return self.data.truncation == "error"
        infers = FORMATS[self.format].infers_prompts and "prompt" not in self.source.columns
        if infers and reason == "no_common_prompt" and self._is_in_most_rows(reason):
            return True  # the common beginnings of the other rows are not their prompts either
        return self.data.on_bad_row == "error"

    def _is_in_most_rows(self, reason: str) -> bool:
        return 2 * self.dropped_counts[reason] > self.num_rows

    def advice(self, bad: BadRow) -> str:
        """Returns the remedy, with `skip` if such rows stop a run and are not most of all; "": none."""
        remedy = self._remedy(bad) or ("mend the rows" if self.stops_run(bad.reason) else "")
        may_skip = bad.reason not in _TRUNCATION_REASONS and not self._is_in_most_rows(bad.reason)
        if may_skip and self.stops_run(bad.reason):
            remedy += ", or set data.on_bad_row: skip"
        return remedy

    def _remedy(self, bad: BadRow) -> str:
        """Returns what the user can change so that rows with this fault are kept; "": nothing is known."""
        if bad.reason in _ABOUT_COLUMNS:
            if not self._is_in_most_rows(bad.reason):
                return ""
            if self.completion_tokens is None and (other := self._other_columns()):
                return other
        names = {"KEY": self.located.key, "TEMPLATE": "name another template in tokenizer.chat_template"}
        reason = "media_read" if bad.reason == "media" and self.images is not None else bad.reason
        if reason == "empty_completion" and bad.detail.endswith(" is empty"):  # whatever writes it
            return "give it text"
        return re.sub("KEY|TEMPLATE", lambda word: names[word[0]], _REMEDIES.get(reason, ""))

    def _other_columns(self) -> str:
        """Returns the `columns` with which most of the first rows are pairs; "": none are found."""
        rows, present = self.opened.first_rows(), dict(self.source.columns)
        kept: Columns = {
            ours: theirs for ours, theirs in present.items() if ours in (*IMAGE_FIELDS, *_BESIDE)
        }

        def reads(columns: Columns) -> bool:
            source = self.source.model_copy(update={"columns": {**kept, **columns}})
            names, num_read = replace(self.opened.names, source=source), 0
            for row in rows:
                with suppress(BadRow, DataError):
                    renamed = names.rename(dict(row))
                    formats = possible_formats(renamed, source.columns)
                    name = source.format if source.format != "auto" else (formats or ["preference"])[0]
                    pair: Any = FORMATS[name].pair(renamed)
                    check_last_turn(pair)
                    is_read = columns.keys() - {"prompt"} <= {*FIELDS_OF_FORMAT[name]}
                    has_turns = FORMATS[name].content == "messages"
                    turns = [pair.chosen[0], pair.rejected[0]] if has_turns else []
                    num_read += is_read and all(turn["role"] == "assistant" for turn in turns)
            return 2 * num_read > len(rows)

        is_chat = self.tokenizer.chat_template is not None and self.images is None
        fields = ("instruction", "prompt", "messages") if is_chat else ("prompt", "instruction", "messages")
        if (found := proposal(rows, reads, fields)) is None:
            return ""
        found, present = (
            {ours: theirs for ours, theirs in one.items() if ours != theirs or ours == "system"}
            for one in ({**kept, **found}, present)
        )
        return f"set {self.located.key}.columns: {to_yaml(found, one_line=True)}" if found != present else ""


_ABOUT_COLUMNS = ("wrong_type", "prompt_mismatch", "missing_column", "no_common_prompt")
_BESIDE = ("weight", "tools", "chat_template_kwargs", "system", *SCORE_FIELDS)  # a prompt and answers
_REMEDIES = {
    "role_not_written": "map the role to one that the template writes, or TEMPLATE",
    "text_not_written": "put all text into the message's content, as text or as parts, or TEMPLATE",
    "reasoning_not_written": "leave the reasoning out, keep it with an option of the template in "
    "chat_template_kwargs, or TEMPLATE",
    "call_not_written": "write the call as text into content, or TEMPLATE",
    "empty_completion": "give it content that a chat template writes, or TEMPLATE",
    "template_error": "if the rows are right, TEMPLATE",
    "rewritten_turns": "set data.scored_turns: all, or TEMPLATE, one that has {% generation %} marks",
    "unknown_option": "correct the name, or set KEY.columns: {chat_template_kwargs: null}, which reads no "
    "options of rows",
    "missing_column": "name the columns of prompt, chosen and rejected in KEY.columns, or first, second and "
    "better or preference, if a column says which is better; join two rows of KTO: each has one answer",
    "no_common_prompt": "name the column of the prompt in KEY.columns",
    "answered_prompt": "set data.continue_final_message: true if the answers go on with this message, or "
    "name another column in KEY.columns, or set its format",
    "no_json_type": "store it as text, or name files of JSON lines in KEY.path",
    "tie": "remove such rows",
    "nothing_scored": "write the role assistant, or score all roles with data.scored_turns: all",
    "media": "set model.images: true if the model reads images of prompts, or remove them if text is enough",
    "image_count": "give the row all images of its prompt in one column, one for each place in the prompt",
    "media_read": "name the column of the prompt's images as image in KEY.columns, set KEY.format (pictured: "
    "texts and images), or remove them if the text is enough",  # with model.images
    "missing_image": "set KEY.image_folder, or mend the rows",
    "image_outside": "set KEY.image_folder to a folder that has them all; paths with .. must stay in it",
    "too_long": "raise data.max_length, choose another data.truncation, or set data.max_pixels of images",
    "prompt_too_long": "raise data.max_prompt_length or choose another data.truncation",
}


def columns_sentence(read: Mapping[str, str], not_read: Sequence[str]) -> str:
    """Returns which column each field of a pair is read from, and which columns are not read."""
    named = (field if field == column else f"{field} = {column}" for field, column in read.items())
    others = f"; not read: {', '.join(not_read)}" if not_read else ""
    return f"columns: {', '.join(named) or 'none'}{others}"


# ---- Ranges of a large source


def write_ranges(directory: Path, ingestion: Ingestion, facts: Mapping[str, Any]) -> TokenStore:
    """Writes the store of a source, which `ingestion` has started; `facts` decide the ids of given rows.
    Raises DataError if bad rows stop the run or if no row is kept, and CacheError."""
    stored = {path.name for path in directory.parent.glob("*")}
    prompts = {"needs_prompt": ingestion.needs_prompt, "known_columns": ingestion.known_columns}
    most_pairs, max_pairs = ingestion.source.max_pairs, ingestion.source.max_pairs
    ranges: list[TokenStore] = []
    scanned, opened = ingestion.located.open(), ingestion.located.open()
    with closing(scanned.unparsed), closing(opened.rows):
        rows = ingestion.checked(opened.rows)
        while max_pairs != 0:
            # What becomes of a run with bad rows is decided at the end, so `on_bad_row` changes no range.
            key = content_key({**facts, "max_pairs": max_pairs, **prompts, "on_bad_row": None})
            most_rows = min(LARGEST_RANGE, max(SMALLEST_RANGE, max_pairs or LARGEST_RANGE))
            rows_before, names = next_range(islice(scanned.unparsed, most_rows), key)
            if not names:
                break
            opened.columns.clear()
            part = replace(ingestion)  # with its own counts
            part.opened = opened
            num_known = max((n for n, name in enumerate(names, 1) if name in stored), default=len(names))
            store = open_store(directory.with_name(names[num_known - 1]))
            if store is None or _is_stopped_by(store, ingestion):
                store, num_known = None, 0  # rows that stop the run are read again, for the message
            else:
                deque(islice(opened.unparsed, num_known), maxlen=0)  # `rows` goes on after them
                for counter in (part, ingestion):
                    counter.count_saved(store.summary, rows_before)
            if num_known < len(names):
                batches = ingestion.batches(islice(rows, len(names) - num_known), part)
                store = _write_range(directory.with_name(names[-1]), store, batches, part, rows_before)
            ingestion.opened.columns.update(opened.columns)
            if store is not None:
                ranges.append(replace(store, rows_before=rows_before))
            max_pairs = most_pairs and most_pairs - ingestion.num_kept
    ingestion.check()
    return write_ranged_store(directory, ranges, ingestion.summary())


def next_range(rows: Iterator[tuple[int, Any]], decided: str) -> tuple[int, list[str]]:
    """Takes the next range from rows as their file has them. Returns the number of rows before it, and for
    each of its rows the name of a store that ends there. `decided`: all else that decides token ids."""
    digest = hashlib.blake2b(decided.encode(), digest_size=KEY_BYTES)
    first, names = 0, list[str]()
    for number, row in rows:
        content = row if isinstance(row, bytes) else pickle.dumps(row)
        key = hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
        first = first or number
        digest.update(b"%d:%b" % (number - first, key))
        names.append(digest.hexdigest())
        if len(names) >= SMALLEST_RANGE and int.from_bytes(key[:4]) % MORE_ROWS == 0:
            break
    return first - 1, names


def _write_range(
    path: Path,
    beginning: TokenStore | None,
    batches: Iterator[TokenizedBatch],
    part: Ingestion,
    rows_before: int,
) -> TokenStore | None:
    """Writes and opens the store of a range, unless no pair is kept: `beginning`, then `batches`."""

    def pairs() -> Iterator[TokenStore]:
        if beginning is not None:
            table = PairTable.of([replace(beginning, rows_before=rows_before)])
            for pair in range(table.num_pairs):
                table.group(pair)  # raises CacheError: damage must not be copied
            yield beginning
        for batch in batches:
            batch.pairs.records["row_number"] -= rows_before
            yield batch.pairs
        part.located.check_unchanged()

    more = {"columns": part.opened.columns, "rows_before": rows_before}
    return write_store(path, pairs(), lambda: {name: getattr(part, name) for name in _SAVED} | more)


def _is_stopped_by(store: TokenStore, ingestion: Ingestion) -> bool:
    counted = replace(ingestion)
    counted.num_rows, counted.dropped_counts = store.summary["num_rows"], store.summary["dropped_counts"]
    return any(map(counted.stops_run, counted.dropped_counts))
