"""Large sources are tokenised in ranges of rows: with what one store gives, and no row is tokenised twice."""

import gzip
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.file_operations import fork
from support.rows import load_splits
from support.rows import write_rows as write
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data import ingest, sources
from dpo_pack.data.faults import faults_of
from dpo_pack.data.sources import Data
from dpo_pack.data.tokenization import tokenize_rows
from dpo_pack.system import files
from dpo_pack.system.errors import CacheError, DataError

TOKENIZER = tiny_tokenizer()
TEXTS = [{"prompt": f"Is {n} it?", "chosen": f" Yes, {n} is.", "rejected": " It is not."} for n in range(400)]
Rows = Sequence[dict[str, Any]]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ranges of 8 to 64 rows, mostly about 20. Their files need not be safe from a power failure."""
    monkeypatch.setattr(files, "sync", lambda path: None)
    for module, name, rows in (
        (sources, "SMALLEST_RANGE", 8),
        (ingest, "SMALLEST_RANGE", 8),
        (ingest, "LARGEST_RANGE", 64),
        (ingest, "MORE_ROWS", 16),
    ):
        monkeypatch.setattr(module, name, rows)


load = partial(load_splits, tokenizer=TOKENIZER)


def as_one_store(cache: Path, train: Any, **settings: Any) -> Data:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SMALLEST_RANGE", 1 << 30)
        return load(cache, train, **settings)


def ranges_of(data: Data) -> list[tuple[str, int]]:
    """The name of each range of the only source, and the number of rows before it."""
    return [(str(one.directory), one.rows_before) for one in data.train.parts]


def assert_same(data: Data, other: Data) -> None:
    assert (data.fingerprint, data.eval_fingerprint) == (other.fingerprint, other.eval_fingerprint)
    for column in fields(data.train):
        if column.name not in ("parts", "part_indices", "offsets"):
            np.testing.assert_array_equal(getattr(data.train, column.name), getattr(other.train, column.name))
    for pair in range(data.train.num_pairs):
        ours, theirs = data.train.group(pair), other.train.group(pair)
        for one, two in zip(
            (ours.context, *ours.completions), (theirs.context, *theirs.completions), strict=True
        ):
            np.testing.assert_array_equal(one, two)
        for ones, twos in zip(ours.scored or (), theirs.scored or (), strict=True):
            np.testing.assert_array_equal(ones, twos)
    here = ("rows_tokenized", "token_store", "token_store_reused")
    reports = [json.loads(json.dumps(one.report)) for one in (data, other)]
    for report in reports:
        for source in (report, *report["train"]["sources"]):
            for name in here:
                source.pop(name, None)
    for source, theirs in zip(reports[0]["train"]["sources"], reports[1]["train"]["sources"], strict=True):
        assert source == theirs
    assert reports[0] == reports[1]


def with_faults(rows: Rows) -> list[dict[str, Any]]:
    """The rows, with bad ones, other columns and repeated answers among them."""
    changed = [dict(row) for row in rows]
    for number in range(5, len(rows), 31):
        changed[number]["chosen"] = changed[number]["rejected"]
        changed[number + 1]["chosen"] = None
        changed[number + 2] |= {"note": "n", "score": number}
        changed[number + 3]["weight"] = 0.5
    return changed


def weighted(rows: Rows) -> list[dict[str, Any]]:
    """Rows of token ids, of which one in fifty has a token that counts less."""
    made = []
    for number, row in enumerate(rows):
        ids = {f"{name}_ids": TOKENIZER(row[name])["input_ids"] for name in ("prompt", "chosen", "rejected")}
        made.append(ids)
        if number % 50 == 30:
            weights = [0.5] + [1.0] * (len(ids["chosen_ids"]) - 1)
            made[-1] = {**ids, "chosen_weights": weights}
    return made


def jsonl(path: Path) -> str:
    lines = [json.dumps(row) for row in with_faults(TEXTS)]
    lines[100:100] = ["", "{broken", "[1]", "  "]
    path.with_suffix(".jsonl").write_text("\n" + "\n".join(lines))
    return str(path.with_suffix(".jsonl"))


def packed(path: Path) -> str:
    with gzip.open(path.with_suffix(".jsonl.gz"), "wt") as file:
        file.write("\r\n".join(json.dumps(row) for row in TEXTS))
    return str(path.with_suffix(".jsonl.gz"))


def parquet(path: Path) -> str:
    rows = [{**row, "note": "not read"} for row in TEXTS]
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=90)
    return str(path.with_suffix(".parquet"))


def folder(path: Path) -> str:
    path.mkdir()
    write(path / "a.jsonl", TEXTS[:150])
    (path / "b.json").write_text(json.dumps(with_faults(TEXTS)[150:]))
    return str(path)


def token_ids(path: Path) -> str:
    return write(path.with_suffix(".jsonl"), weighted(TEXTS))


def inferred(path: Path) -> str:
    pairs = [{"chosen": r["prompt"] + r["chosen"], "rejected": r["prompt"] + r["rejected"]} for r in TEXTS]
    return write(path.with_suffix(".jsonl"), [*pairs, {"chosen": "a", "rejected": "b", "text": "c d"}])


KINDS = [jsonl, packed, parquet, folder, token_ids, inferred]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_ranges_give_what_one_store_gives(tmp_path: Path, make: Callable[[Path], str]) -> None:
    other = write(tmp_path / "other.jsonl", TEXTS[:5])  # too few rows for ranges
    settings: dict[str, Any] = {
        "train": [other, make(tmp_path / "set")],
        "on_bad_row": "skip",
        "eval": {"fraction": 0.1},
    }
    one = as_one_store(tmp_path / "one", **settings)
    data = load(tmp_path / "cache", **settings)
    assert data.report["rows_tokenized"] == one.report["rows_tokenized"]
    assert len(data.train.parts) > 11 and len(one.train.parts) == 2
    largest = [max(part.largest_token_id for part in splits.train.parts) for splits in (data, one)]
    assert largest[0] == largest[1]
    assert_same(data, one)
    again = load(tmp_path / "cache", **settings)
    assert again.report["rows_tokenized"] == 0
    assert_same(again, one)


def tokenized_rows(monkeypatch: pytest.MonkeyPatch, *, most: int | None = None) -> list[int]:
    """The numbers of rows that are tokenised from now on. More than `most` kill the process."""
    numbers: list[int] = []

    def counted(rows: Any, *arguments: Any, **options: Any) -> Any:
        def read() -> Any:
            for numbered in rows:
                numbers.append(numbered[0])
                if most is not None and len(numbers) > most:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield numbered

        return tokenize_rows(read(), *arguments, **options)

    monkeypatch.setattr(ingest, "tokenize_rows", counted)
    return numbers


def test_after_a_kill_only_missing_ranges_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)

    def killed() -> int:
        with pytest.MonkeyPatch.context() as patch:
            tokenized_rows(patch, most=250)
            return load(tmp_path / "cache", path).train.num_pairs

    _, status = os.waitpid(fork(killed), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    numbers = tokenized_rows(monkeypatch)
    data = load(tmp_path / "cache", path)
    # The first row that is tokenised is the first one of a range, not far before the 250th.
    assert numbers == list(range(numbers[0], 401)) and 250 - 64 <= numbers[0] <= 250
    assert numbers[0] - 1 in [before for _, before in ranges_of(data)]
    assert data.report["rows_tokenized"] == len(numbers)
    assert_same(data, as_one_store(tmp_path / "one", path))


@pytest.mark.parametrize("size", [300, 301, 12])
def test_a_grown_file_costs_its_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS[:size])
    load(tmp_path / "cache", path)
    write(tmp_path / "a.jsonl", TEXTS)
    numbers = tokenized_rows(monkeypatch)
    grown = load(tmp_path / "cache", path)
    assert numbers == list(range(size + 1, 401)) and grown.report["rows_tokenized"] == 400 - size
    assert_same(grown, as_one_store(tmp_path / "one", path))


def test_rows_that_come_or_go_cost_their_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    first = load(tmp_path / "cache", path)
    new = [
        {"prompt": f"Is new {number} it?", "chosen": " Yes, it is.", "rejected": " No, it is not."}
        for number in range(3)
    ]
    rows = [*TEXTS[:201], *new, *TEXTS[201:310], *TEXTS[311:]]
    write(tmp_path / "a.jsonl", rows)
    numbers = tokenized_rows(monkeypatch)
    data = load(tmp_path / "cache", path)
    assert {202, 203, 204} < set(numbers) and len(numbers) < 130
    assert len({name for name, _ in ranges_of(data)} & {name for name, _ in ranges_of(first)}) > 10
    assert_same(data, as_one_store(tmp_path / "one", path))


def test_a_range_is_not_used_for_rows_that_are_read_in_another_way(tmp_path: Path) -> None:
    pairs = [
        {"chosen": f"Is {n} it? Yes, {n}.", "rejected": f"Is {n} it? No, it is not."} for n in range(100)
    ]
    path = write(tmp_path / "a.jsonl", pairs)
    load(tmp_path / "cache", path)
    # The same rows, but now other rows have a prompt, so it must not be missing.
    write(tmp_path / "a.jsonl", [*TEXTS[:30], *pairs])
    data = load(tmp_path / "cache", path, on_bad_row="skip")
    assert data.train.num_pairs == 30
    assert_same(data, as_one_store(tmp_path / "one", path, on_bad_row="skip"))
    assert load(tmp_path / "cache", path, on_bad_row="skip", max_length=64).report["rows_tokenized"] == 130


def test_bad_rows_stop_the_run_with_one_line_and_skipping_costs_their_ranges(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a")

    def refused(read: Callable[..., Data], cache: str) -> str:
        with pytest.raises(DataError) as error:
            read(tmp_path / cache, path)
        return str(error.value)

    messages = [refused(as_one_store, "one"), *(refused(load, "cache") for _ in range(2))]
    assert "line 7: " in messages[0] and "of 402 rows" in messages[0] and len(set(messages)) == 1
    one_fault = [*TEXTS[:200], {"prompt": "q"}, *TEXTS[200:]]
    path = write(tmp_path / "a.jsonl", one_fault)
    refused(load, "fresh")
    assert load(tmp_path / "fresh", path, on_bad_row="skip").report["rows_tokenized"] == 0


def test_a_range_without_a_pair_has_no_store(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*TEXTS[:40], *({"prompt": f"q{n}"} for n in range(200)), *TEXTS[40:]])
    data = load(tmp_path / "cache", path, on_bad_row="skip")
    assert data.train.num_pairs == 400
    assert_same(data, as_one_store(tmp_path / "one", path, on_bad_row="skip"))


def test_damage_costs_one_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    data = load(tmp_path / "cache", path)
    name, before = ranges_of(data)[5]
    tokens = np.fromfile(Path(name) / "tokens.bin", dtype=np.int32)
    tokens[0] += 1
    tokens.tofile(Path(name) / "tokens.bin")
    with pytest.raises(CacheError, match=f"its token ids of row {before + 1} have changed"):
        data.train.group(before)
    numbers = tokenized_rows(monkeypatch)
    again = load(tmp_path / "cache", path)
    assert numbers == list(range(before + 1, ranges_of(data)[6][1] + 1))
    assert_same(again, as_one_store(tmp_path / "one", path))


@pytest.mark.parametrize(("size", "grown", "place"), [(8, 60, -1), (100, 110, 0)])
def test_damage_of_a_range_that_has_grown_is_told_with_the_row_of_the_source_and_not_copied(
    tmp_path: Path, size: int, grown: int, place: int
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS[:size])
    name, rows_before = ranges_of(load(tmp_path / "cache", path))[-1]
    tokens = np.fromfile(Path(name) / "tokens.bin", dtype=np.int32)
    tokens[place] = 0
    tokens.tofile(Path(name) / "tokens.bin")
    write(tmp_path / "a.jsonl", TEXTS[:grown])
    row = (rows_before + 1, size)[place]
    with pytest.raises(CacheError, match=f"is damaged: its token ids of row {row} have changed"):
        load(tmp_path / "cache", path)
    assert_same(load(tmp_path / "cache", path), as_one_store(tmp_path / "one", path))


@pytest.mark.parametrize("num_rows", [5, 200])  # one store, and ranges
def test_a_file_that_changes_while_it_is_read_leaves_no_tokens_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    path, found = write(tmp_path / "a.jsonl", TEXTS[:num_rows]), faults_of

    def rewrite(*arguments: Any) -> Any:
        changed = [{**row, "chosen": " No."} for row in TEXTS[:num_rows]]
        with Path(path).open("r+") as file:  # in place, as rsync --inplace does
            file.write("\n".join(json.dumps(row) for row in changed))
        return found(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "faults_of", rewrite)
        with pytest.raises(DataError, match="a.jsonl: it has changed while it was read; run the same"):
            load(tmp_path / "cache", path)
    write(tmp_path / "a.jsonl", TEXTS[:num_rows])
    assert_same(load(tmp_path / "cache", path), as_one_store(tmp_path / "one", path))
