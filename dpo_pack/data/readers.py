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
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from dpo_pack.data.columns import keys_of, open_dialogues, side_of, value_at
from dpo_pack.data.formats import FORMATS
from dpo_pack.data.values import MAX_ROW_SIZE, BadRow, RowImages, holds_media, is_media_name
from dpo_pack.recipe.data import FIELDS_OF_FORMAT, IMAGE_FIELDS, SourceRecipe
from dpo_pack.system.errors import DataError, first_line
from dpo_pack.system.process import lone_half

NumberedRow = tuple[int, dict[str, Any] | BadRow]
# Takes the columns to read (None: all). Yields rows with the column names that the source has: mappings,
# BadRows, or other values of JSON, which are no rows; JSON lines as bytes.
RowReader = Callable[[Sequence[str] | None], Iterator[tuple[int, Any]]]
Columns = Sequence[tuple[str, str]]  # the names and types of columns, in Arrow's words
Mapped = Mapping[str, str | None]  # our names of columns -> the source's; None: none

READ_ROWS = 100  # columnar files are decoded in batches of so many rows
FIRST_ROWS = 100  # so many rows show which columns a source has and what they hold
_JSON_CHUNK_CHARS = 1 << 20

# A column that the recipe's `columns` gives another of our names is not read under these names too.
TAKEN_ONCE = {
    *("system", "messages", "conversations", "instruction", "input", "history"),
    *("first", "second", "preference", "better", "answers"),
}


class _RowTooLong(Exception):
    """The next row of a file exceeds MAX_ROW_SIZE."""


# Reading a missing, cut-off or otherwise damaged file raises one of these.
_FILE_ERRORS = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error, _RowTooLong)


# ---- Names of columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """The renaming of a source's columns to ours (prompt, chosen, ...)."""

    source: SourceRecipe
    key: str  # the recipe key of the source, "data.train.0"
    reads_images: bool = False  # model.images

    def rename(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row with our column names; that of a column may be a path of keys, `input.messages`, of
        objects or JSON text. Raises BadRow if a mapped column is missing, or if a column has media."""
        renamed, mapping = dict(row), self.source.columns
        for name in TAKEN_ONCE.intersection(mapping.values()).difference(mapping):
            renamed.pop(name, None)
        for ours, theirs in mapping.items():
            if theirs is None:
                renamed.pop(ours, None)
                continue
            nested, why = value_at(row, theirs) if "." in theirs else (None, "")
            if nested is not None and theirs in row:
                raise DataError(
                    f"{self.source.path}: there are a column {theirs!r} and such a key of an object, and "
                    f"{self.key}.columns may mean either; rename one of them"
                )
            if nested is None and theirs not in row:
                missing = _missing(f"{self.key}.columns.{ours}", theirs, tuple(row))
                raise BadRow("missing_column", f"{missing}{why}", row)
            renamed[ours] = row[theirs] if nested is None else nested
        media = [column for column, value in row.items() if holds_media(column, value)]
        if media or self.reads_images:
            self._take_media(row, renamed, media)
        if self.source.format == "auto" or FORMATS[self.source.format].content == "messages":
            open_dialogues(renamed)
        return renamed

    def _take_media(self, row: Mapping[str, Any], renamed: dict[str, Any], media: Sequence[str]) -> None:
        """Puts the images of a row into `renamed`. `media`: its columns that have some. Raises BadRow."""
        mapping = self.source.columns
        known = {theirs for ours, theirs in mapping.items() if self.reads_images or ours not in IMAGE_FIELDS}
        named = {mapping.get(field) for field in IMAGE_FIELDS}
        if self.reads_images:
            known |= _take_images(row, renamed, mapping)
        for column in media:
            if isinstance(row[column], bytes) and column in _TEXT_FIELDS:
                detail = f"column {column!r} is binary, and its bytes are no UTF-8 text"
                raise BadRow("media", f"{detail}, and only text is read", row)
            is_only = column in named and len(media) == 1  # of both answers, whatever its name says
            if column in known and (is_only or not side_of(column)):
                continue
            detail = f"column {column!r} has images, video or audio"
            is_second = self.reads_images and renamed.get("images") and not re.search("video|audio", column)
            if side_of(column) or is_second:
                rule = "chosen and rejected have one prompt with one list of images"
                raise BadRow("image_count", f"{detail}, too, or of one answer; {rule}", row)
            raise BadRow("media", f"{detail}, and only text is read", row)

    def select(self, columns: Columns) -> list[str] | None:
        """Returns the columns to read: those of formats and of media, and texts if no column is the prompt;
        None: all, for a key of an object. Raises DataError if columns are missing or have one name."""
        owners = [name for name, _ in columns]
        if len(owners) > len(set(owners)):
            repeated = Counter(owners).most_common(1)[0][0]
            raise DataError(f"{self.source.path}: two columns are named {repeated!r}; rename or remove one")
        mapping, inner = self.source.columns, list[str]()
        for ours, theirs in mapping.items():
            if theirs is not None and theirs not in owners:
                if theirs.split(".")[0] not in owners:
                    missing = _missing(f"{self.key}.columns.{ours}", theirs, tuple(owners))
                    raise DataError(f"{self.source.path}: {missing}; correct the name")
                inner.append(theirs)
        names = {field: mapping.get(field, field) for fields in FIELDS_OF_FORMAT.values() for field in fields}
        read = {*owners, *inner}.intersection(names.values())
        if not any({*map(names.get, format.completion_columns)} <= read for format in FORMATS.values()):
            return None  # the rows are refused, with columns that may be meant
        has_prompt = mapping.get("prompt", "prompt") in (*read, None)
        others = re.compile("binary" if has_prompt else "binary|string")
        wanted = [n for n, kind in columns if n in read or is_media_name(n) or others.search(kind)]
        return None if inner else wanted


def is_among(name: str, columns: Collection[str]) -> bool:
    """Whether rows with these columns may have `name`, which may be a path of keys, `input.messages`."""
    return name in columns or name.split(".")[0] in columns


_TEXT_FIELDS = {field for fields in FIELDS_OF_FORMAT.values() for field in fields} - {*IMAGE_FIELDS}


@lru_cache(maxsize=64)
def _missing(key: str, column: str, present: tuple[str, ...]) -> str:
    """Says that a column that `key` names is missing, and which column may be meant."""
    close = difflib.get_close_matches(column, present, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"no column {column!r}, which {key} names ({meant}there are: {', '.join(present) or 'none'})"


def _take_images(row: Mapping[str, Any], renamed: dict[str, Any], mapping: Mapped) -> set[str]:
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


# ---- Opened sources


class OpenRows:
    """The rows of an opened source. A caller that stops before the end must close `rows`."""

    num_rows: int | None = None  # None if it is not known before the end

    def __init__(
        self, read: RowReader, names: ColumnNames, row_word: str, *, columns: Columns | None = None
    ) -> None:
        """`columns`: those of a columnar source. Raises DataError if it lacks the columns that it needs."""
        self._read, self.names = read, names
        self.row_word = row_word  # the unit of row numbers: "row" or "line"
        self.columns = dict.fromkeys(name for name, _ in columns or ())  # of JSON: of the rows read so far
        self.unparsed = self._read_unparsed(None if columns is None else names.select(columns))
        self.rows = self._read_rows()  # from `unparsed`, with our column names, see ColumnNames

    def _read_unparsed(self, wanted: Sequence[str] | None) -> Generator[tuple[int, Any], None, None]:
        number = 0
        with _readable(self.names.source.path, lambda: f"after {self.row_word} {number}"):
            for number, row in self._read(wanted):
                yield number, row

    def _read_rows(self) -> Generator[NumberedRow, None, None]:
        nested = [name for name in self.names.source.columns.values() if name is not None and "." in name]
        for number, row in self.unparsed:
            row = _json_row(row) if isinstance(row, bytes) else row
            if isinstance(row, dict):
                self.columns.update(dict.fromkeys([*row, *keys_of(row, nested)]))
                try:
                    row = self.names.rename(row)
                except BadRow as bad:
                    row = bad.with_traceback(None)
            elif not isinstance(row, BadRow):
                row = BadRow("not_an_object", f"no JSON object but a {type(row).__name__}", row)
            yield number, row

    def first_rows(self) -> list[Mapping[str, Any]]:
        """Returns the first rows, all columns by their own names."""
        rows = (row for _, row in islice(self._read_unparsed(None), FIRST_ROWS))
        parsed = (_json_row(row) if isinstance(row, bytes) else row for row in rows)
        return [row for row in parsed if isinstance(row, dict)]


def data_suffix(path: Path) -> str:
    """Returns the suffix that decides the reader: ".jsonl" of "a.jsonl", ".jsonl.gz" of "a.jsonl.gz"."""
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]).lower()


def open_files(paths: Sequence[Path], names: ColumnNames) -> OpenRows:
    """Opens a file, or several ones of JSON or CSV as one source. Raises DataError."""
    if data_suffix(paths[0]) in (".parquet", ".arrow"):
        return _open_columnar(paths[0], names)
    with _readable(names.source.path):
        word = "line" if len(paths) == 1 and _has_json_lines(paths[0]) else "row"
    return OpenRows(lambda columns: _rows_of(paths, names.source.path), names, word)


def _rows_of(paths: Sequence[Path], label: str) -> Iterator[tuple[int, Any]]:
    numbers = count(1)  # of the rows of several files
    for path in paths:
        if ".csv" in data_suffix(path):
            rows = _read_csv(path, label)
        else:
            rows = _read_json_lines(path) if _has_json_lines(path) else _read_json_array(path, label)
        for number, row in rows:
            yield number if len(paths) == 1 else next(numbers), row


def _has_json_lines(path: Path) -> bool:
    """A .json file is an array of objects, or JSON lines, which some data sets save as .json."""
    if ".json" not in data_suffix(path) or ".jsonl" in data_suffix(path):
        return ".jsonl" in data_suffix(path)
    with _open_binary(path) as file:
        return not file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def check_first_bytes(path: Path, label: str) -> None:
    """Raises DataError if a file is not what its name says."""
    start = b""
    with suppress(*_FILE_ERRORS):  # whoever reads the rows says so
        with path.open("rb") as plain:
            start = plain.read(1 << 12)
        if path.suffix == ".gz" and start.startswith(b"\x1f\x8b"):
            with _open_binary(path) as file:
                start = file.read(1 << 12)
    if what := other_content(start, data_suffix(path)):
        raise DataError(f"{label} is {what}")


def other_content(start: bytes, suffix: str) -> str:
    """Returns what a file with these first bytes is, if its suffix says something else; "": nothing is known.
    The suffix of any image is "image"."""
    for suffixes, pattern, what in _OTHER_STARTS:
        if suffix.startswith(suffixes) and re.match(pattern, start, re.IGNORECASE | re.DOTALL):
            return what
    return ""


# Suffixes of files, how their first bytes are then not, and what the file is.
_OTHER_STARTS = (
    ("", rb"version https://git-lfs", "a Git LFS pointer, not the data; run 'git lfs pull'"),
    ("", rb"\x1f\x8b|BZh\d|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04", "compressed; decompress it first"),
    ((".json", ".csv"), rb"\xff\xfe|\xfe\xff|.\x00|\x00.", "UTF-16 text; save it as UTF-8 (iconv)"),
    ("image", rb"\Z", "empty, and has no bytes"),
    ("image", rb"\s*(<[?!][^>]*>\s*)*<svg", "SVG; save it as PNG"),
    (("image", ".json", ".csv"), rb"\s*<[!?h]", "a page of the web, not the data; download the file itself"),
    ("image", rb"....ftypavi[fs]", "AVIF; save it as PNG or JPEG"),
    ("image", rb"....ftyp(hei|hev|mif1|msf1)", "HEIC; save it as PNG or JPEG"),
    ("image", rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI", "a video; save the picture that you mean as PNG"),
    ("image", rb"%PDF|%!PS", "a PDF or PostScript document; save the picture as PNG"),
    (".jsonl", rb"\s*\[\s*\{", "a JSON array, not JSON lines; give it a name that ends in .json"),
    (".json", rb"\s*\{\s*\n", "JSON whose rows take several lines; write each on one line (jq -c . FILE)"),
)


def _open_binary(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


@contextmanager
def _readable(label: str, where: Callable[[], str] = lambda: "at its beginning") -> Iterator[None]:
    """Raises DataError in place of what the reading of a damaged file raises."""
    import pyarrow as pa

    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{label}: {error.strerror}; check the path") from error
    except (*_FILE_ERRORS, pa.ArrowException) as error:
        what, remedy = first_line(error), "the file is damaged or incomplete: copy or download it again"
        if isinstance(error, UnicodeDecodeError):
            what, remedy = f"not UTF-8: byte 0x{error.object[error.start]:02x}", "save it as UTF-8"
        elif isinstance(error, _RowTooLong):
            what, remedy = f"a row has more than {MAX_ROW_SIZE:,} bytes", "shorten or remove this row"
        raise DataError(f"{label}: cannot be read {where()} ({what}); {remedy}") from error


# ---- JSON


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with _open_binary(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_SIZE + 1), b""), start=1):
            if len(line) > MAX_ROW_SIZE:
                raise _RowTooLong
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace() and line:
                yield number, line.rstrip(b"\r\n")


def _json_row(line: bytes) -> Any:
    try:
        return _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        reason = "not_utf8"
        detail = f"not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"
    except json.JSONDecodeError as error:
        reason, what = "invalid_json", error.msg.removesuffix(" at")
        detail = f"invalid JSON ({what} at column {error.colno}{_comma_remedy(error)})"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        reason, detail = "invalid_json", f"invalid JSON ({first_line(error)})"
    return BadRow(reason, detail, line.decode(errors="backslashreplace").strip())


def _comma_remedy(error: json.JSONDecodeError) -> str:
    comma = len(error.doc[: error.pos + 1].rstrip(" \t\r\n}]")) - 1  # Python 3.13 is at it, others behind it
    return "; remove the comma before } or ]" if re.match(r",\s*[}\]]", error.doc[comma:]) else ""


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRow:
    """Makes a JSON object, or a BadRow if it has a key twice: `json` would keep the last value only."""
    values = dict(pairs)
    if lone := lone_half("".join(values)):
        return BadRow(
            "invalid_unicode", f"a key of a JSON object has half of a surrogate pair: {lone}", values
        )
    if len(values) == len(pairs):
        return values
    repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
    return BadRow("repeated_key", f"a JSON object has the key {repeated!r} twice", values)


_JSON = json.JSONDecoder(object_pairs_hook=_json_object)


def _read_json_array(path: Path, label: str) -> Iterator[tuple[int, Any]]:
    """Decodes the values of an array one by one from a buffer that holds only a part of the file."""
    separators = re.compile(r"[\s,]*")
    with io.TextIOWrapper(_open_binary(path), encoding="utf-8-sig") as text:
        line = 1  # of the file, where the buffer begins
        while (character := text.read(1)) != "[":  # `_has_json_lines` has found a "[" already
            line += character == "\n"
        buffer, position, number, num_read = "", 0, 1, 0  # num_read: characters read since the last row
        commas = 0  # since the last row
        while True:
            begin, position = position, separators.match(buffer, position).end()  # type: ignore[union-attr]
            commas, is_end = commas + buffer.count(",", begin, position), buffer.startswith("]", position)
            if position < len(buffer) and commas > (number > 1 and not is_end):
                where = "at the end" if is_end else "before this row"  # which has the number, too
                yield number, BadRow("invalid_json", f"invalid JSON (a comma without a row {where})", ",")
                commas = int(number > 1)
            if is_end:
                if (buffer[position + 1 :] + text.read(_JSON_CHUNK_CHARS)).strip():
                    raise DataError(f"{label}: text after the end of the array; give one array or JSON lines")
                return
            problem = "the array is not closed"
            if position < len(buffer):
                try:
                    value, position = _JSON.raw_decode(buffer, position)
                    if number > 1 and not commas:
                        yield number, BadRow("invalid_json", "invalid JSON (no comma before this row)", value)
                    yield number, value
                    number, num_read, commas = number + 1, 0, 0
                    continue
                except (ValueError, RecursionError) as error:
                    problem = first_line(error)
                    if isinstance(error, json.JSONDecodeError):  # its line is of the buffer
                        problem = f"{error.msg.removesuffix(' at')} at character {error.pos - position + 1}"
                        problem += f", on line {line + buffer.count(chr(10), 0, error.pos)} of the file"
                        problem += _comma_remedy(error)
            # A long row is decoded again after each read. The buffer doubles, so this costs linear time.
            more = text.read(max(_JSON_CHUNK_CHARS, len(buffer) - position))
            num_read += len(more)
            if num_read > MAX_ROW_SIZE:
                raise _RowTooLong
            if not more:
                raise DataError(
                    f"{label} row {number}: invalid JSON ({problem}), so no later row can be read"
                )
            line += buffer.count("\n", 0, position)
            buffer, position = buffer[position:] + more, 0


# ---- CSV


def _read_csv(path: Path, label: str) -> Iterator[NumberedRow]:
    csv.field_size_limit(MAX_ROW_SIZE)  # the default, 128 KiB, is too small for some completions
    with io.TextIOWrapper(_open_binary(path), encoding="utf-8-sig", newline="") as text:
        records = csv.reader(_csv_lines(text), strict=True)
        header, number = next(records, []), 0
        if len(header) > len(set(header)):
            repeated = Counter(header).most_common(1)[0][0]
            raise DataError(f"{label}: two columns are named {repeated!r}; rename or remove one")
        for values in records:
            if not values:  # a blank line
                continue
            number += 1
            row: dict[str, Any] | BadRow = dict(zip(header, values, strict=False))
            if len(values) != len(header):
                where = f"(it ends on line {records.line_num})"
                detail = f"{len(values)} fields for {len(header)} columns {where}"
                row = BadRow("wrong_number_of_fields", detail, values)
            yield number, row


def _csv_lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(MAX_ROW_SIZE + 1):
        if len(line) > MAX_ROW_SIZE:
            raise _RowTooLong
        yield line


# ---- Columnar files


def _open_columnar(path: Path, names: ColumnNames) -> OpenRows:
    def tables(columns: list[str]) -> Iterator[Any]:
        with _table(path) as (_, _, batches):
            for batch in batches(columns=columns):
                for begin in range(0, batch.num_rows, READ_ROWS):
                    yield batch.select(columns).slice(begin, READ_ROWS)

    with _readable(names.source.path), _table(path) as (schema, num_rows, _):
        pass
    return open_tables(tables, names, schema, num_rows)


def open_tables(
    read: Callable[[list[str]], Iterable[Any]], names: ColumnNames, schema: Any, num_rows: int | None
) -> OpenRows:
    """Opens the Arrow tables or batches that `read` yields of columns."""

    def rows(wanted: Sequence[str] | None) -> Iterator[NumberedRow]:
        numbers = count(1)
        for table in read(list(wanted or schema.names)):
            values = {field.name: _values(table.column(field.name), field) for field in table.schema}
            for row in zip(*values.values(), strict=True):
                yield next(numbers), dict(zip(values, row, strict=True))

    columns = [(field.name, str(field.type)) for field in schema]
    opened = OpenRows(rows, names, "row", columns=columns)
    opened.num_rows = num_rows
    return opened


@contextmanager
def _table(path: Path) -> Iterator[tuple[Any, int | None, Callable[..., Iterable[Any]]]]:
    """Opens Parquet, or Arrow IPC in its file or stream form (`datasets` writes streams): the schema, the
    number of rows (None: not known), and a function that yields batches with at least `columns`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if data_suffix(path) == ".parquet":
        with pq.ParquetFile(path) as parquet:
            yield parquet.schema_arrow, parquet.metadata.num_rows, partial(parquet.iter_batches, READ_ROWS)
        return
    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            parts = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            yield reader.schema, None, lambda columns: parts


def _values(column: Any, field: Any) -> list[Any]:
    """Returns the values of an Arrow column: maps as objects, JSON parsed, bytes as text (but of media)."""
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    kind = str(field.type)
    if "json" in kind or ("binary" in kind and not is_media_name(field.name)):
        values = [_decoded(value, field.type) for value in values]
    return values


def _decoded(value: Any, kind: Any) -> Any:
    if isinstance(value, dict):
        kinds = dict.fromkeys(value, kind.item_type) if str(kind).startswith("map") else {}
        kinds = kinds or {name: kind.field(name).type for name in value}
        media = {name for name in value if name == "bytes" or is_media_name(str(name))}
        media = {name for name in media if "json" not in str(kinds[name])}
        return {n: inner if n in media else _decoded(inner, kinds[n]) for n, inner in value.items()}
    if isinstance(value, list):
        return [_decoded(inner, kind.value_type) for inner in value]
    try:
        if isinstance(value, bytes):
            return value.decode()
        return _JSON.decode(value) if isinstance(value, str) and "arrow.json" in str(kind) else value
    except UnicodeDecodeError:
        return value
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", f"a column of type JSON has invalid JSON ({first_line(error)})", value)
