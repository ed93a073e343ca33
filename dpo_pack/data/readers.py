"""Reads the rows of a file one at a time, so memory does not grow with the file. Too long rows are refused.

A reader yields (row number from 1, of JSON lines the line number; row), where a row that cannot be parsed is
a BadRow. It raises DataError if damage makes the rest of the file unreadable.
"""

import codecs
import csv
import difflib
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dpo_pack.data.formats import FORMATS, MAX_ROW_SIZE, BadRow, RowImages, holds_media, is_media_name
from dpo_pack.recipe.data import FIELDS_OF_FORMAT, IMAGE_FIELDS
from dpo_pack.system.errors import DataError, first_line

NumberedRow = tuple[int, dict[str, Any] | BadRow]
# Takes the columns to read (None: all). Yields rows with the column names that the source has: mappings,
# BadRows, or other values of JSON, which are no rows; JSON lines as bytes.
RowReader = Callable[[Sequence[str] | None], Iterator[tuple[int, Any]]]
Columns = Sequence[tuple[str, str]]  # the names and types of columns, in Arrow's words

READ_ROWS = 100  # columnar files are decoded in batches of at most so many rows
FIRST_ROWS = 100  # so many rows show which columns a source has and what they hold
_JSON_CHUNK_CHARS = 1 << 20
_MAX_ROW_SIZE = MAX_ROW_SIZE

# A column that the recipe's `columns` gives another of our names is not read under these names too.
TAKEN_ONCE = {
    *("system", "messages", "conversations", "instruction", "input", "history"),
    *("first", "second", "preference", "better", "answers"),
}


class _RowTooLong(Exception):
    """The next row of a file exceeds _MAX_ROW_SIZE."""


# Reading a missing, cut-off or otherwise damaged file raises one of these.
_FILE_ERRORS = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, _RowTooLong)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """The renaming of a source's columns to ours (prompt, chosen, ...), and the source's name in messages."""

    mapping: Mapping[str, str | None]  # `data.*.columns`: our name -> the source's; None: none
    label: str  # the path or hub id, as the user wrote it
    key: str  # the recipe key of the source, "data.train.0"
    prompts_suffice: bool = False  # rows need no completions: they will be generated
    reads_images: bool = False  # model.images

    def completed(self, present: Sequence[str]) -> Mapping[str, str | None]:
        """Returns the mapping with the columns of the known data set that has all the columns in `present`.
        Raises DataError, see `_completed_as_known`."""
        columns = frozenset(present)  # a set, because a row can have very many columns
        if any(theirs is not None and theirs not in columns for theirs in self.mapping.values()):
            return self.mapping  # `rename` and `select` name the column that is missing
        there = {ours for ours in (*columns, *self.mapping) if self.mapping.get(ours, ours) in columns}
        return self.mapping if there >= {"chosen", "rejected"} else self._completed_as_known(columns, there)

    def _completed_as_known(self, columns: frozenset[str], there: set[str]) -> Mapping[str, str | None]:
        """`there`: our names of columns. Raises DataError if two known data sets differ in which answer is
        better, or if each row has one answer and a label (KTO), unless only prompts are read."""
        if {"completion", "label"} <= there and not self.prompts_suffice:
            raise DataError(
                f"{self.label}: each row has one answer (completion) and a label, as KTO takes them, and a "
                "pair needs two answers: join two rows of one prompt, the completion with label true as "
                "chosen and the other one as rejected, or take a paired version of the data set"
            )
        found: list[Mapping[str, str | None]] = []
        for name, format in FORMATS.items():
            for known in format.known_columns if set(FIELDS_OF_FORMAT[name]).issuperset(self.mapping) else ():
                added = {ours: theirs for ours, theirs in known.items() if ours not in there}
                completed = {**self.mapping, **added}
                if added and columns.issuperset(added.values()) and completed not in found:
                    found.append(completed)
        if len(found) > 1 and not self.prompts_suffice:
            ours = next(ours for ours in found[0] if found[0][ours] != found[1].get(ours))
            choices = " or ".join(f"{{{ours}: {mapping[ours]}}}" for mapping in found)
            raise DataError(
                f"{self.label}: {len(found)} columns may say which answer is better; set {self.key}.columns: "
                f"{choices}"
            )
        return found[0] if found else self.mapping

    @staticmethod
    def example(present: Iterable[str]) -> str:
        """Returns how `columns` could name a pair's columns among those that are there; "": too few are."""
        missing = [ours for ours in ("prompt", "chosen", "rejected") if ours not in present]
        others = [column for column in present if column not in ("prompt", "chosen", "rejected")]
        missing = missing[-2:] if len(missing) > len(others) else missing  # the prompt is known by its name
        named = ", ".join(f"{ours}: {column}" for ours, column in zip(missing, others, strict=False))
        return f", as in {{{named}}}" if 0 < len(missing) <= len(others) else ""

    def rename(self, row: dict[str, Any], mapping: Mapping[str, str | None]) -> dict[str, Any]:
        """Returns the row with our column names, as `mapping` says (see `completed`). Raises BadRow if a
        mapped column is missing, or if a column has images, video or audio."""
        renamed = dict(row)
        for name in TAKEN_ONCE.intersection(mapping.values()).difference(mapping):
            renamed.pop(name, None)
        for ours, theirs in mapping.items():
            if theirs is None:
                renamed.pop(ours, None)
            elif theirs not in row:
                detail = missing_column(f"{self.key}.columns.{ours}", theirs, tuple(row))
                raise BadRow("missing_column", detail, row)
            else:
                renamed[ours] = row[theirs]
        known = {*mapping.values()}
        if self.reads_images:
            known |= _take_images(row, renamed, mapping)
        for column, value in row.items():
            is_text = column not in IMAGE_FIELDS and any(column in of for of in FIELDS_OF_FORMAT.values())
            if isinstance(value, bytes) and is_text:
                detail = f"column {column!r} is binary, and its bytes are no UTF-8 text; only text is read"
                raise BadRow("media", detail, row)
            if column not in known and holds_media(column, value):
                detail = f"column {column!r} has images, video or audio, and only text is read"
                raise BadRow("media", detail, row)
        return renamed

    def with_nested(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row with a column `input.messages` if `columns` names it. Raises DataError."""
        for theirs in self.mapping.values():
            if theirs is None or "." not in theirs:
                continue
            column, *keys = theirs.split(".")
            value = row.get(column)
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None and theirs in row:
                raise DataError(
                    f"{self.label}: column {theirs!r} and key {'.'.join(keys)} of column {column!r} are both "
                    f"there, and {self.key}.columns may mean either; rename one of them"
                )
            if value is not None:
                row = {**row, theirs: value}
        return row

    def select(self, columns: Columns) -> list[str] | None:
        """Returns the columns to read: those of formats, those that may have images, video or audio, and
        texts if no column is the prompt; None: all, for the key of an object that `columns` names. Raises
        DataError if columns are missing or have one name."""
        owners = {name for name, _ in columns}
        inner = [key for key in self.mapping.values() if key and "." in key and key.split(".")[0] in owners]
        present = [*(name for name, _ in columns), *(key for key in inner if key not in owners)]
        there = f"the columns are: {', '.join(present) or 'none'}"
        repeated = [column for column, count in Counter(present).items() if count > 1]
        if repeated:
            raise DataError(f"{self.label}: two columns are named {repeated[0]!r}; rename or remove one")
        for ours, theirs in self.mapping.items():
            if theirs is not None and theirs not in present:
                missing = missing_column(f"{self.key}.columns.{ours}", theirs, tuple(present))
                raise DataError(f"{self.label}: {missing}; correct the name")
        mapping = self.completed(present)
        names = {field: mapping.get(field, field) for fields in FIELDS_OF_FORMAT.values() for field in fields}
        read = set(present).intersection(names.values())
        needed: list[tuple[str, ...]] = [format.completion_columns for format in FORMATS.values()]
        if self.prompts_suffice:
            needed += [(format.prompt_column,) for format in FORMATS.values() if format.prompt_column]
        if any(all(names[column] in read for column in columns) for columns in needed):
            has_prompt = mapping.get("prompt", "prompt") in (*read, None)
            checked = ("binary",) if has_prompt else ("binary", "string")
            return (
                None
                if inner
                else [
                    name
                    for name, kind in columns
                    if name in read or is_media_name(name) or any(word in kind for word in checked)
                ]
            )
        if self.prompts_suffice:
            raise DataError(
                f"{self.label}: no column 'prompt'; {there}; name it in {self.key}.columns.prompt"
            )
        raise DataError(
            f"{self.label}: no columns 'chosen' and 'rejected'; {there}; say which they are in "
            f"{self.key}.columns{self.example(present)}; if another column says which of two answers is "
            "better, name the three columns first, second and preference"
        )


def _take_images(row: Mapping[str, Any], renamed: dict[str, Any], mapping: Mapping[str, Any]) -> set[str]:
    """Puts the images of a row into `renamed`, and returns the columns that may have some. Raises BadRow."""
    named = [column for column in IMAGE_FIELDS if mapping.get(column) is not None]
    given = [column for column in named or IMAGE_FIELDS if holds_media(column, renamed.get(column))]
    # A path beside the image, as in RLAIF-V; the report lists it among the columns that are not read.
    texts = (name for name, value in row.items() if given and isinstance(value, str))
    if len(given) == 2:
        raise BadRow("image_count", "images and image both have images; name one in columns", row)
    value = renamed.pop(given[0]) if given else []
    renamed["images"] = RowImages(value if isinstance(value, list) else [value])
    known = {name for name in texts if not re.search("video|audio", name.lower())}
    return known.union(IMAGE_FIELDS if given or named else ())


@lru_cache(maxsize=64)
def missing_column(key: str, column: str, present: tuple[str, ...]) -> str:
    """Says that the column that the recipe key `key` names is missing, and which column may be meant."""
    close = difflib.get_close_matches(column, present, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"no column {column!r}, which {key} names ({meant}there are: {', '.join(present) or 'none'})"


# An opened columnar file: Arrow's schema, the number of rows (None if it is not known before the end), and a
# function that yields Arrow record batches with at least these columns.
_Table = tuple[Any, int | None, Callable[[list[str]], Iterable[Any]]]


def data_suffix(path: Path) -> str:
    """Returns the suffix that decides the reader: ".jsonl" of "a.jsonl", ".jsonl.gz" of "a.jsonl.gz"."""
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]).lower()


class OpenRows:
    """The rows of an opened source. A caller that stops before the end must close `rows`."""

    def __init__(
        self,
        read: RowReader,
        names: ColumnNames,
        row_word: str,
        *,
        columns: Columns | None = None,
        num_rows: int | None = None,
        errors: tuple[type[Exception], ...] = _FILE_ERRORS,
    ) -> None:
        """`columns` are those of a columnar source; None if each row has its own (JSON). Reading raises
        `errors` if the file is damaged. Raises DataError if the source lacks the columns that it needs."""
        self._read, self._names, self._errors = read, names, errors
        self.row_word = row_word  # the unit of row numbers: "row" or "line"
        self.num_rows = num_rows  # None if it is not known before the end
        self.columns = dict.fromkeys(name for name, _ in columns or ())  # of JSON: of the rows read so far
        self.mapping = dict(names.mapping)  # our names -> the source's; of JSON: of the rows read so far
        self._first_number = 0  # of the source's first row, which a caller may skip in `unparsed`
        self.unparsed = self._read_unparsed(None if columns is None else names.select(columns))
        self.rows = self._read_rows()  # from `unparsed`, with our column names, see ColumnNames

    def _read_unparsed(self, wanted: Sequence[str] | None) -> Generator[tuple[int, Any], None, None]:
        number = 0
        try:
            for number, row in self._read(wanted):
                self._first_number = self._first_number or number
                yield number, row
        except self._errors as error:
            raise _unreadable(self._names.label, self.row_word, number, error) from error

    def _read_rows(self) -> Generator[NumberedRow, None, None]:
        completed = lru_cache(maxsize=64)(self._names.completed)
        has_nested = any("." in theirs for theirs in self._names.mapping.values() if theirs is not None)
        for number, row in self.unparsed:
            row = _json_row(row) if isinstance(row, bytes) else row
            if not isinstance(row, dict | BadRow):
                row = BadRow("not_an_object", f"no JSON object but a {type(row).__name__}", row)
            elif isinstance(row, dict):
                row = self._names.with_nested(row) if has_nested else row
                try:
                    mapping = completed(tuple(row))
                except DataError:
                    if number == self._first_number:
                        raise
                    mapping = (
                        self._names.mapping
                    )  # only this row is at fault, not the source: it is a bad row
                self.columns.update(dict.fromkeys(row))
                self.mapping.update(mapping)
                try:
                    row = self._names.rename(row, mapping)
                except BadRow as bad:
                    row = bad.with_traceback(None)
            yield number, row

    def first_rows(self) -> list[Mapping[str, Any]]:
        """Returns the first rows, all columns by their own names."""
        rows = (row for _, row in islice(self._read_unparsed(None), FIRST_ROWS))
        parsed = (_json_row(row) if isinstance(row, bytes) else row for row in rows)
        return [row for row in parsed if isinstance(row, dict)]


def _open_json_lines(path: Path, names: ColumnNames) -> OpenRows:
    return OpenRows(lambda columns: _read_json_lines(path), names, "line")


def _open_json(path: Path, names: ColumnNames) -> OpenRows:
    """Opens a .json file: an array of objects, or JSON lines, which some data sets save as .json."""
    is_array = _is_array(path, names.label)
    return open_files([path], names) if is_array else _open_json_lines(path, names)


def _is_array(path: Path, label: str) -> bool:
    try:
        with _open_binary(path) as file:
            return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except _FILE_ERRORS as error:
        raise _unreadable(label, "row", 0, error) from error


def open_files(paths: Sequence[Path], names: ColumnNames) -> OpenRows:
    """Opens files of JSON or CSV as one source."""

    def read(columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
        return enumerate((row for path in paths for _, row in _rows_of(path, names.label)), start=1)

    return OpenRows(read, names, "row")


def _rows_of(path: Path, label: str) -> Iterator[tuple[int, Any]]:
    if ".csv" in data_suffix(path):
        return _csv_rows(path, None)
    is_array = ".jsonl" not in data_suffix(path) and _is_array(path, label)
    return _read_json_array(path, label) if is_array else _read_json_lines(path)


def check_start(path: Path, label: str) -> None:
    """Raises DataError if a file is not what its name says, or one object around the rows."""
    start = b""
    with suppress(*_FILE_ERRORS):  # whoever reads the rows says so
        with path.open("rb") as plain:
            start = plain.read(1 << 12)
        if data_suffix(path).endswith(".gz") and start.startswith(b"\x1f\x8b"):
            with _open_binary(path) as file:
                start = file.read(1 << 12)
    for suffixes, pattern, what in _OTHER_STARTS:
        found = re.match(pattern, start) if data_suffix(path).startswith(suffixes) else None
        if found is not None:
            groups = [group.decode(errors="replace") for group in found.groups()]
            raise DataError(f"{label} is {what.format(*groups)}")


# Suffixes of files, how their first bytes are then not, and what the file is.
_OTHER_STARTS = (
    ("", rb"version https://git-lfs", "a Git LFS pointer, not the data; run 'git lfs pull'"),
    ("", rb"\x1f\x8b|BZh\d|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04", "compressed; decompress it first"),
    ((".json", ".csv"), rb"\xff\xfe|\xfe\xff|.\x00|\x00.", "UTF-16 text; save it as UTF-8 (iconv)"),
    ((".json", ".csv"), rb"\s*<[!?hH]", "a page of the web, not the data; download the file itself"),
    (".jsonl", rb"\s*\[\s*\{", "a JSON array, not JSON lines; give it a name that ends in .json"),
    (
        ".json",
        # One object whose first value, simple ones aside, is a list of objects that look like rows.
        rb'\s*\{(?:\s*"[^"]*"\s*:\s*(?:"[^"]*"|[-\w.]+|\{[^{}]*\})\s*,)*'
        rb'\s*"(?!prompt|chosen|rejected|messages|conversation|answers|history|context|tools)([^"]+)"\s*:'
        rb'\s*\[\s*\{\s*"(?:id|prompt\w*|chosen|rejected|messages|conversations|instruction|question)"',
        "one JSON object with the rows in {0!r}; save this list alone (jq '.{0}' FILE)",
    ),
    (
        ".json",
        rb'\s*\{\s*"(?:prompt|chosen|rejected|question|instruction|columns)"\s*:\s*'
        rb'(?:\{\s*"0"\s*:|\[\s*"(?:[^"\\]|\\.)*"\s*,)',
        "one JSON object of columns; save rows (pandas: to_json(FILE, orient='records', lines=True))",
    ),
    (".json", rb"\s*\{\s*\n", "JSON whose rows take several lines; write each on one line (jq -c . FILE)"),
    (".csv", rb"(?:[^,\n]*[^,\n\w])?prompt([;\t|])[^,\n]*\n", "separated by {0!r}; save it with commas"),
)


def _open_csv(path: Path, names: ColumnNames) -> OpenRows:
    try:
        with closing(_read_csv(path)) as records:
            header = next(records)[1]
    except StopIteration:
        raise DataError(f"{names.label} is empty; give a file with rows, or remove the source") from None
    except _FILE_ERRORS as error:
        raise _unreadable(names.label, "row", 0, error) from error
    columns = [(name, "string") for name in header]
    return OpenRows(partial(_csv_rows, path), names, "row", columns=columns)


def _open_columnar(
    path: Path, names: ColumnNames, open_table: Callable[[Path], AbstractContextManager[_Table]]
) -> OpenRows:
    import pyarrow as pa

    errors = (*_FILE_ERRORS, pa.ArrowException)
    try:
        with open_table(path) as (schema, num_rows, _):
            pass
    except errors as error:
        raise _unreadable(names.label, "row", 0, error) from error

    def batches(columns: list[str]) -> Iterator[Any]:
        with open_table(path) as (_, _, read_batches):
            for batch in read_batches(columns):
                for part in _small_parts(batch.select(columns)):
                    yield columns_of(part)

    return OpenRows(
        lambda columns: rows_of_columns(batches(list(columns or schema.names))),
        names,
        "row",
        columns=[(field.name, str(field.type)) for field in schema],
        num_rows=num_rows,
        errors=errors,
    )


def columns_of(table: Any) -> dict[str, list[Any]]:
    """Returns the values of each column of an Arrow table: maps as objects, JSON parsed, bytes as text."""
    columns = {}
    for field in table.schema:
        values = table.column(field.name).to_pylist(maps_as_pydicts="strict")
        if any(word in str(field.type) for word in ("json", "binary")):
            values = [_decoded(value, field.type) for value in values]
        columns[field.name] = values
    return columns


def _decoded(value: Any, kind: Any) -> Any:
    if isinstance(value, dict):
        kinds = dict.fromkeys(value, kind.item_type) if str(kind).startswith("map") else {}
        kinds = kinds or {name: kind.field(name).type for name in value if name != "bytes"}  # of an image
        return {name: _decoded(inner, kinds.get(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_decoded(inner, kind.value_type) for inner in value]
    try:
        if isinstance(value, bytes):
            return value.decode() if kind is not None else value
        return _JSON.decode(value) if isinstance(value, str) and "arrow.json" in str(kind) else value
    except UnicodeDecodeError:
        return value
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", f"a column of type JSON has invalid JSON ({first_line(error)})", value)


def _small_parts(batch: Any) -> Iterator[Any]:
    """Cuts an Arrow batch into parts of at most READ_ROWS rows and _MAX_ROW_SIZE bytes."""
    if batch.num_rows <= READ_ROWS and batch.nbytes <= _MAX_ROW_SIZE:
        yield batch
    elif batch.num_rows > 1:
        middle = batch.num_rows // 2
        yield from _small_parts(batch.slice(0, middle))
        yield from _small_parts(batch.slice(middle))
    elif any("dictionary" in str(type) for type in batch.schema.types):
        yield batch  # `nbytes` counts the dictionary of all rows, so it does not say how large the row is
    else:
        raise _RowTooLong


@contextmanager
def _parquet_table(path: Path) -> Iterator[_Table]:
    import pyarrow.parquet as pq

    def batches(columns: list[str]) -> Iterator[Any]:
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        for group in groups:  # check the sizes before anything is decompressed
            for column in map(group.column, range(group.num_columns)):
                is_read = column.path_in_schema.split(".")[0] in columns
                if is_read and column.total_uncompressed_size > group.num_rows * _MAX_ROW_SIZE:
                    raise _RowTooLong
        yield from file.iter_batches(batch_size=READ_ROWS, columns=columns)

    with pq.ParquetFile(path) as file:
        yield file.schema_arrow, file.metadata.num_rows, batches


@contextmanager
def _arrow_table(path: Path) -> Iterator[_Table]:
    """Opens Arrow IPC in its file form or in its stream form; `datasets` writes streams."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield reader.schema, None, lambda columns: batches


def rows_of_columns(batches: Iterable[Mapping[str, list[Any]]]) -> Iterator[NumberedRow]:
    """Yields the numbered rows of batches. A batch maps column names to lists of values."""
    number = 0
    for batch in batches:
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(batch, values, strict=True))


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with _open_binary(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_ROW_SIZE + 1), b""), start=1):
            if len(line) > _MAX_ROW_SIZE:
                raise _RowTooLong
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace() and line:
                yield number, line.rstrip(b"\r\n")


def _json_row(line: bytes) -> Any:
    try:
        row = _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        reason = "not_utf8"
        detail = f"not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"
    except json.JSONDecodeError as error:
        reason, what = "invalid_json", error.msg.removesuffix(" at")
        detail = f"invalid JSON ({what} at column {error.colno})"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        reason, detail = "invalid_json", f"invalid JSON ({first_line(error)})"
    else:
        return row
    return BadRow(reason, detail, line.decode(errors="backslashreplace").strip())


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRow:
    """Makes a JSON object, or a BadRow if it has a key twice: `json` would keep the last value only."""
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return BadRow("repeated_key", f"a JSON object has the key {repeated!r} twice", values)


_JSON = json.JSONDecoder(object_pairs_hook=_json_object)


def _read_json_array(path: Path, label: str) -> Iterator[tuple[int, Any]]:
    """Decodes the values of the array one by one from a buffer that holds only a part of the file."""
    with io.TextIOWrapper(_open_binary(path), encoding="utf-8-sig") as text:
        yield from enumerate(_array_values(text, label), start=1)


def _array_values(text: TextIO, label: str) -> Iterator[object]:
    separators = re.compile(r"[\s,]*")
    while text.read(1) != "[":  # _open_json has found a "[" already
        pass
    buffer, position, number, num_read = "", 0, 1, 0  # num_read: characters read since the last row
    while True:
        position = separators.match(buffer, position).end()  # type: ignore[union-attr]
        if buffer[position : position + 1] == "]":
            if (buffer[position + 1 :] + text.read(_JSON_CHUNK_CHARS)).strip():
                raise DataError(f"{label}: text after the end of the array; give one array or JSON lines")
            return
        problem = "the array is not closed"
        if position < len(buffer):
            try:
                value, position = _JSON.raw_decode(buffer, position)
                yield value
                number, num_read = number + 1, 0
                continue
            except json.JSONDecodeError as error:
                problem = f"{error.msg.removesuffix(' at')} {error.pos - position + 1} characters into it"
            except (ValueError, RecursionError) as error:
                problem = first_line(error)
        # A long row is decoded again after each read. The buffer doubles, so the cost is linear in length.
        more = text.read(max(_JSON_CHUNK_CHARS, len(buffer) - position))
        num_read += len(more)
        if not more or num_read > _MAX_ROW_SIZE:
            problem += f", or a row of more than {_MAX_ROW_SIZE:,} characters" if more else ""
            raise DataError(
                f"{label} row {number}: invalid JSON ({problem}); correct this line, because "
                "the rows after it cannot be read"
            )
        buffer, position = buffer[position:] + more, 0


def _csv_rows(path: Path, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    with closing(_read_csv(path)) as records:
        header, number = next(records, (0, []))[1], 0
        for line, values in records:
            if not values:  # a blank line
                continue
            number += 1
            if len(values) != len(header):
                detail = f"{len(values)} fields for {len(header)} columns (it ends on line {line})"
                yield number, BadRow("wrong_number_of_fields", detail, values)
                continue
            row = dict(zip(header, values, strict=True))
            yield number, row if columns is None else {column: row[column] for column in columns}


def _read_csv(path: Path) -> Generator[tuple[int, list[str]], None, None]:
    """Yields (number of its final line, fields) for each record; the header is the first record."""
    csv.field_size_limit(_MAX_ROW_SIZE)  # the default, 128 KiB, is too small for some completions
    with io.TextIOWrapper(_open_binary(path), encoding="utf-8-sig", newline="") as text:
        size = 0

        def lines() -> Iterator[str]:
            nonlocal size
            while line := text.readline(_MAX_ROW_SIZE + 1):
                size += len(line)
                if size > _MAX_ROW_SIZE:
                    raise _RowTooLong
                yield line

        reader = csv.reader(lines(), strict=True)
        for values in reader:
            size = 0
            yield reader.line_num, values


def _open_binary(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _unreadable(label: str, row_word: str, number: int, error: Exception) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        what, remedy = f"not UTF-8: byte 0x{error.object[error.start]:02x}", "save it as UTF-8"
    elif isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return DataError(f"{label}: {error.strerror}; check the path")
    elif isinstance(error, _RowTooLong):
        what, remedy = f"a row has more than {_MAX_ROW_SIZE:,} bytes", "shorten or remove this row"
    else:
        what, remedy = first_line(error), "the file is damaged or incomplete: copy or download it again"
    where = f"after {row_word} {number}" if number else "at its beginning"
    return DataError(f"{label}: cannot be read {where} ({what}); {remedy}")


READERS: dict[str, Callable[[Path, ColumnNames], OpenRows]] = {
    ".jsonl": _open_json_lines,
    ".jsonl.gz": _open_json_lines,
    ".json": _open_json,
    ".json.gz": _open_json,
    ".parquet": partial(_open_columnar, open_table=_parquet_table),
    ".arrow": partial(_open_columnar, open_table=_arrow_table),
    ".csv": _open_csv,
    ".csv.gz": _open_csv,
}
