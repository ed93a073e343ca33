"""Weights of tokens on their way from rows to a store on disk: given by the row, or found from turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.load import load_data
from dpo_pack.data.splits import DataSplits
from dpo_pack.data.store import write_store
from dpo_pack.recipe.schema import DataRecipe
from dpo_pack.system.errors import DataError

ROW: dict[str, Any] = {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9, 2], "rejected_ids": [7, 10, 2]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tmp_path: Path, train: Any, *, tokenizer: Any = None, **settings: Any) -> DataSplits:
    data = DataRecipe.model_validate({"train": train, **settings})
    return load_data(data, tokenizer=tokenizer or tiny_tokenizer(), seed=0, cache_dir=tmp_path / "cache")


def refused(tmp_path: Path, row: dict[str, Any], **settings: Any) -> str:
    path = write(tmp_path / "pairs.jsonl", [ROW, ROW, {**ROW, **row}])
    with pytest.raises(DataError) as error:
        load(tmp_path, path, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_weights_of_rows_are_those_of_the_table_also_from_the_cache_and_after_rows_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.data.workers._BATCH_ROWS", 1)
    weighted = {**ROW, "chosen_weights": [1, 0, 0.25, 2.5], "rejected_weights": None}
    path = write(tmp_path / "pairs.jsonl", [ROW, weighted, ROW])
    for _ in range(2):
        table = load(tmp_path, path).train
        assert [table.token_weights(pair)[0].tolist() for pair in range(3)] == [
            [1, 1, 1, 1], [1, 0, 0.25, 2.5], [1, 1, 1, 1],
        ]  # fmt: skip
        assert table.token_weights(1)[1].tolist() == [1, 1, 1]
        assert table.has_token_weights.tolist() == [False, True, False]
        assert table.chosen_scored.tolist() == [4, 3.75, 4] and table.chosen_lengths.tolist() == [4, 4, 4]
        assert table.chosen(1).tolist() == [7, 8, 9, 2]


def test_a_changed_byte_of_weights_makes_the_store_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{**ROW, "chosen_weights": [1, 0, 0, 1]}])
    load(tmp_path, path)
    (file,) = (tmp_path / "cache" / "tokens").glob("*/weights.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"\x41")
    again = load(tmp_path, path)
    assert again.report["rows_tokenized"] == 1 and again.train.chosen_scored.tolist() == [2]


def test_a_store_of_a_release_that_did_not_read_weights_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "pairs.jsonl", [{**ROW, "chosen_weights": [1, 0, 0, 1]}])
    load(tmp_path, path)
    (directory,) = (tmp_path / "cache" / "tokens").iterdir()
    plain = load(tmp_path, write(tmp_path / "plain.jsonl", [ROW])).train.stores[0]
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    summary = {**plain.summary, "columns_not_read": ["chosen_weights"]}
    write_store(directory, [plain], lambda: summary)  # type: ignore[list-item]
    assert load(tmp_path, path).train.chosen_scored.tolist() == [2]
    assert load(tmp_path, path).report["rows_tokenized"] == 0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen_weights": [1, 1]}, "chosen_weights has 2 numbers for a completion of 4 tokens"),
        (
            {"chosen_weights": [1, -1, 0, 0]},
            "number 2 of chosen_weights is -1, not a finite number of at least",
        ),
        (
            {"rejected_weights": [1, 0, float("nan")]},
            "number 3 of rejected_weights is nan, not a finite number",
        ),
        (
            {"rejected_weights": [1, 0, float("inf")]},
            "number 3 of rejected_weights is inf, not a finite number",
        ),
        ({"rejected_weights": [0, 0, 0.0]}, "rejected_weights are all 0, so the completion adds nothing"),
        ({"rejected_weights": [1, True, 0]}, "rejected_weights is no list of numbers"),
        ({"rejected_weights": 1}, "rejected_weights is no list of numbers"),
    ],
)
def test_wrong_weights_are_refused_by_file_and_row(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    message = refused(tmp_path, row)
    assert f"pairs.jsonl line 3: {says}" in message or f"pairs.jsonl row 3: {says}" in message


def test_a_completion_whose_scored_tokens_are_all_cut_off_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "chosen_weights": [0, 0, 0, 1]}]
    data = load(tmp_path, write(tmp_path / "pairs.jsonl", rows), max_length=4, truncation="completion_right")
    assert data.train.num_pairs == 1
    assert data.report["train"]["sources"][0]["dropped"]["unscored_after_truncation"]["rows"] == 1
