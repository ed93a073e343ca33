"""Files of every kind give their rows; damaged ones one clear line."""

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.limits import memory_limit
from support.refusals import refusal

from dpo_pack.data import readers
from dpo_pack.data.formats import FORMATS
from dpo_pack.data.ingest import LocatedSource
from dpo_pack.data.readers import ColumnNames, NumberedRow, OpenRows, open_files
from dpo_pack.data.sources import locate_source
from dpo_pack.data.values import BadRow
from dpo_pack.recipe.schema import SourceRecipe
from dpo_pack.system.errors import DataError, RecipeError

ROWS = [{"prompt": f"q{i} “ü”", "chosen": f"a,{i}\n", "rejected": f'"b{i}"'} for i in range(5)]
TABLE = pa.Table.from_pylist([{**row, "unused": [1, 2]} for row in ROWS])


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_csv(path: Path) -> None:
    fields = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
    quoted = [",".join('"' + field.replace('"', '""') + '"' for field in row) for row in fields]
    text = ("\r\n".join(quoted) + "\r\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_ipc(path: Path, new_writer: Callable[..., Any], table: pa.Table = TABLE) -> None:
    with new_writer(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(json_lines(ROWS)),
    "b.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + json_lines(ROWS).rstrip()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(json_lines(ROWS))),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "b.json": lambda path: path.write_text("\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False)),
    "lines.json": lambda path: path.write_bytes(json_lines(ROWS)),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=2),
    "file.arrow": lambda path: write_ipc(path, pa.ipc.new_file),
    "stream.arrow": lambda path: write_ipc(path, pa.ipc.new_stream),
    "a.csv": write_csv,
    "a.csv.gz": write_csv,
}


def names(label: str = "pairs", **mapping: str | None) -> ColumnNames:
    return ColumnNames(source=SourceRecipe(path=label, columns=mapping), key="data.train.0")


def opened(path: Path, **mapping: str) -> OpenRows:
    return open_files([path], names(path.name, **mapping))


def read(path: Path, **mapping: str) -> list[NumberedRow]:
    return list(opened(path, **mapping).rows)


def locate(path: Path | str, tmp_path: Path, **settings: Any) -> LocatedSource:
    source = SourceRecipe.model_validate({"path": str(path), **settings})
    return locate_source(source, "data.train.0", tmp_path / "cache" / "file_hashes.json")


def refused(path: Path) -> str:
    return refusal(lambda: read(path), DataError)


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize("name", WRITERS)
def test_columns_are_read_under_our_names_even_when_swapped(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    rows = read(tmp_path / name, chosen="rejected", rejected="chosen")
    expected = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    assert rows == list(enumerate(expected, start=1))


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + json_lines(ROWS[:1]) + b"  \r\n" + json_lines(ROWS[1:2]))
    assert read(tmp_path / "a.jsonl") == [(2, ROWS[0]), (4, ROWS[1])]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"prompt": "q" "chosen": 1}', "invalid_json", "Expecting ',' delimiter at column 16"),
        (b'{"prompt": "q', "invalid_json", "Unterminated string"),
        (b'{"prompt": "\xff"}', "not_utf8", "byte 0xff at position 13"),
        (b"[1, 2]", "not_an_object", "list"),
        (b"[" * 100_000, "invalid_json", "recursion"),
        (b"9" * 5000, "invalid_json", "4300 digits"),
    ],
)
def test_a_line_that_is_no_json_object_is_a_bad_row_and_the_next_is_read(
    tmp_path: Path, line: bytes, reason: str, detail: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS[:1]) + line + b"\n" + json_lines(ROWS[1:2]))
    first, (number, bad), last = read(tmp_path / "a.jsonl")
    assert (first, last) == ((1, ROWS[0]), (3, ROWS[1]))
    assert isinstance(bad, BadRow) and number == 2
    assert bad.reason == reason
    assert detail in bad.detail and "\n" not in bad.detail


@pytest.mark.parametrize("chunk_chars", [1, 2, 7, 64])
def test_json_arrays_are_read_whatever_part_of_a_row_fits_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_chars: int
) -> None:
    monkeypatch.setattr(readers, "_JSON_CHUNK_CHARS", chunk_chars)
    (tmp_path / "a.json").write_text(" \n" + json.dumps(ROWS, indent=1) + "\n")
    assert read(tmp_path / "a.json") == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize(
    ("rows", "number", "told"),
    [
        ("[{},{},]", 3, "a comma without a row at the end"),
        ("[{}, ,,{}]", 2, "a comma without a row before this row"),
        ("[ ,{},{}]", 1, "a comma without a row before this row"),
        ("[{} {}]", 2, "no comma before this row"),
        ("[{}\n{}]", 2, "no comma before this row"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_wrong_comma_is_a_bad_row_and_later_rows_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, rows: str, number: int, told: str
) -> None:
    monkeypatch.setattr("dpo_pack.data.readers._JSON_CHUNK_CHARS", size)
    (tmp_path / "a.json").write_text(rows.replace("{}", json.dumps(ROWS[0])))
    found = read(tmp_path / "a.json")
    ((place, bad),) = ((place, row) for place, row in found if isinstance(row, BadRow))
    assert bad.reason == "invalid_json" and told in str(bad) and place == number
    assert [one for one in found if not isinstance(one[1], BadRow)] == [(1, ROWS[0]), (2, ROWS[0])]


@pytest.mark.parametrize("name", ["big.json", "big.jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    row = {"prompt": "q" * 1000, "chosen": "a" * 1000, "rejected": "b" * 1000}
    big = [row] * 6000  # 18 MB
    (tmp_path / name).write_bytes(json_lines(big) if name == "big.jsonl" else json.dumps(big).encode())
    tracemalloc.start()
    try:
        assert sum(1 for _ in opened(tmp_path / name).rows) == len(big)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6e6


LONG = {**ROWS[0], "chosen": "a" * 2000}
LONG_CSV = "prompt,chosen,rejected\nq,a,b\n"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path: path.write_bytes(json_lines([ROWS[0], LONG]))),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(json_lines([ROWS[0], LONG])))),
        ("a.json", lambda path: path.write_text(json.dumps([ROWS[0], LONG, *[ROWS[1]] * 100]))),
        ("line.csv", lambda path: path.write_text(LONG_CSV + "a" * 2000)),
        ("fields.csv", lambda path: path.write_text(LONG_CSV + "," * 2000)),
    ],
)
def test_a_row_that_is_too_long_to_be_a_pair_is_refused_and_those_before_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_SIZE", 1000)
    monkeypatch.setattr(readers, "_JSON_CHUNK_CHARS", 100)
    write(tmp_path / name)
    rows = opened(tmp_path / name).rows
    assert next(rows)[0] == 1
    assert re.match(rf"{name}.*more than 1,000 (bytes|characters)", refusal(lambda: next(rows), DataError))


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("a.jsonl.gz", b'{"prompt": "'),
        ("a.jsonl.gz", b" "),
        ("a.json.gz", b'[{"prompt": "'),
        ("a.json.gz", b"["),
        ("a.csv.gz", b"prompt,chosen,rejected\n"),
    ],
)
def test_a_line_of_three_gigabytes_is_refused_cheaply(tmp_path: Path, name: str, begin: bytes) -> None:
    megabyte = gzip.compress((b" " if begin in (b" ", b"[") else b"a") * 1_000_000)
    (tmp_path / name).write_bytes(gzip.compress(begin) + megabyte * 3000)
    with memory_limit(300_000_000):
        assert re.match(f"{name}.*more than 16,777,216", refused(tmp_path / name))


CSV = b"prompt,chosen,rejected\n" + b"q,a,b\n" * 50
OTHER_KIND = b"neither one nor the other, but long enough to have a footer"
CUT_OFF = "cannot be read .* damaged or incomplete"
NOT_UTF_8 = "not UTF-8: byte 0xff.*; save it as UTF-8"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "q"}', r"row 2: invalid JSON \(the array is not closed\)"),
        ("a.json", b'[{"prompt": "q"}, {"prompt" "r"}]', "row 2: invalid JSON .Expecting ':' delimiter"),
        (
            "a.json",
            b'[{"prompt": "q"},\n {"prompt" "r"}]',
            r"row 2: invalid JSON \(.* at character 11, on line 2 of the file\), so",
        ),
        (
            "b.json",
            b'\n[{"prompt": "q"},\n {"prompt": "r",\n }]',
            r"row 2: .*, on line 4 of the file; remove the comma",
        ),
        (
            "c.json",
            b'[{"prompt": [1, ]}]',
            r"row 1: .*, on line 1 of the file; remove the comma before \} or \]",
        ),
        ("a.json", b'[{"prompt": "q"}] [{"prompt": "r"}]', "text after the end of the array"),
        ("a.json", b'["\xff"]', NOT_UTF_8),
        ("a.csv", CSV + b"q,a,\xff\n", NOT_UTF_8),
        ("a.csv", CSV + b'q,"a,b\n', "cannot be read after row 50"),
        ("a.jsonl.gz", gzip.compress(json_lines(ROWS), mtime=0)[:-12], CUT_OFF),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)[:-12], CUT_OFF),
        ("a.csv.gz", gzip.compress(CSV, mtime=0)[:-12], CUT_OFF),
        *(
            (name, OTHER_KIND, "cannot be read")
            for name in ("a.jsonl.gz", "a.json.gz", "a.parquet", "a.arrow")
        ),
    ],
)
def test_a_file_that_is_damaged_or_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.match(f"{name}.*{message}", refused(tmp_path / name))


def test_a_parquet_file_damaged_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, compression="none", use_dictionary=False, write_statistics=False)
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        read(path)


def test_csv_rows_of_another_width_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nq,a,b\n\nq,a\nq,a,b,c\nq,a,b\n")
    rows = read(tmp_path / "a.csv")
    assert [number for number, _ in rows] == [1, 2, 3, 4]
    assert [row.reason for _, row in rows if isinstance(row, BadRow)] == ["wrong_number_of_fields"] * 2
    assert "2 fields for 3 columns (it ends on line 4)" in str(rows[1][1])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected,chosen\nq,a,b,c\n")
    table = pa.Table.from_arrays([pa.array(["q"])] * 4, names=["prompt", "chosen", "rejected", "chosen"])
    pq.write_table(table, tmp_path / "a.parquet")
    write_ipc(tmp_path / "a.arrow", pa.ipc.new_file, table)
    for name in ("a.csv", "a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=f"{name}: two columns are named 'chosen'; rename or remove one"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_with_half_of_a_surrogate_pair_is_a_bad_row(tmp_path: Path, name: str) -> None:
    rows = [{**ROWS[0], "x\ud800": 1}, {**ROWS[0], "prompt": [{"role": "user", "k\udcfc": "a"}]}, ROWS[1]]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / name).write_text(f"[{','.join(lines)}]" if name == "a.json" else "\n".join(lines))
    (_, first), (_, second), (_, third) = read(tmp_path / name)
    assert isinstance(first, BadRow) and first.reason == "invalid_unicode" and "x\\ud800" in first.detail
    assert isinstance(second, dict) and third == ROWS[1]
    with pytest.raises(BadRow, match="invalid_unicode"):
        FORMATS["conversational"].prompt(second)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_json_object_with_a_key_twice_is_a_bad_row(tmp_path: Path, name: str) -> None:
    row, good = json.dumps(ROWS[0]), json.dumps(ROWS[1])
    message = '[{"role": "user", "content": "a", "role": "system"}]'
    lines = [row[:-1] + ', "chosen": "c"}', good, f'{{"prompt": {message}, "chosen": [], "rejected": []}}']
    text = f"[{','.join(lines)}]" if name == "a.json" else "\n".join(lines)
    (tmp_path / name).write_text(text)
    (_, first), (_, second), (_, third) = read(tmp_path / name)
    assert isinstance(first, BadRow) and first.reason == "repeated_key"
    assert first.detail == "a JSON object has the key 'chosen' twice"
    assert second == ROWS[1]
    assert isinstance(third, dict)
    with pytest.raises(BadRow, match="repeated_key.*'role' twice"):
        FORMATS["conversational"].prompt(third)


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("none.jsonl", {}, DataError, "none.jsonl: no such file or directory"),
        ("pairs.xlsx", {}, DataError, "pairs.xlsx: no reader"),
        ("a.jsonl", {"split": "test"}, RecipeError, "data.train.0.split"),
        ("empty", {}, DataError, "empty: no data files"),
    ],
)
def test_what_is_no_source_of_rows_is_refused(
    tmp_path: Path, name: str, settings: dict[str, str], error: type[Exception], message: str
) -> None:
    (tmp_path / "pairs.xlsx").write_text("")
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS))
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        locate(tmp_path / name, tmp_path, **settings)


@pytest.fixture
def saved_splits(tmp_path: Path) -> Path:
    train = datasets.Dataset.from_list(ROWS)
    test = datasets.Dataset.from_list(ROWS[:2])
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_datasets_directory_gives_the_rows_of_a_split(tmp_path: Path, saved_splits: Path) -> None:
    train, test = locate(saved_splits, tmp_path), locate(saved_splits, tmp_path, split="test")
    assert list(train.open().rows) == list(enumerate(ROWS, start=1))
    assert list(test.open().rows) == list(enumerate(ROWS[:2], start=1))
    assert test.open().num_rows == 2
    assert train.fingerprint != test.fingerprint
    assert list(locate(saved_splits / "test", tmp_path).open().rows) == list(enumerate(ROWS[:2], start=1))


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path: Path, saved_splits: Path) -> None:
    with pytest.raises(DataError, match="no split 'dev'; data.train.0.split can be: test, train"):
        locate(saved_splits, tmp_path, split="dev")
    with pytest.raises(RecipeError, match="saved without splits"):
        locate(saved_splits / "train", tmp_path, split="test")


def test_a_damaged_datasets_directory_is_refused(tmp_path: Path, saved_splits: Path) -> None:
    (saved_splits / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    assert "`datasets` cannot load it" in refusal(locate(saved_splits, tmp_path).open, DataError)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.mark.usefixtures("datasets_cache")
def test_a_directory_of_data_files_gives_the_rows_of_a_split(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "train.jsonl").write_bytes(json_lines(ROWS))
    (directory / "test.jsonl").write_bytes(json_lines(ROWS[:2]))
    assert list(locate(directory, tmp_path).open().rows) == list(enumerate(ROWS, start=1))
    assert len(list(locate(directory, tmp_path, split="test").open().rows)) == 2
    message = refusal(locate(directory, tmp_path, split="dev").open, DataError)
    assert re.search('Unknown split "dev".*data.train.0.path, .split', message)


def test_the_fingerprint_of_a_file_is_its_content(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(json_lines(ROWS))
    first = locate(tmp_path / "a.jsonl", tmp_path).fingerprint
    assert locate(tmp_path / "b.jsonl", tmp_path).fingerprint == first
    (tmp_path / "b.jsonl").write_bytes(json_lines(ROWS)[:-2] + b" \n")  # as long as before
    assert locate(tmp_path / "b.jsonl", tmp_path).fingerprint != first


def test_an_unchanged_file_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(ROWS))
    first = locate(tmp_path / "a.jsonl", tmp_path).fingerprint
    monkeypatch.delattr("hashlib.file_digest")
    assert locate(tmp_path / "a.jsonl", tmp_path).fingerprint == first
