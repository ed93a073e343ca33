"""The pairs that a source's keys choose to train on, and what each key leaves out."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support.refusals import refusal
from support.rows import load_splits, write_rows
from support.tiny_pictures import encoded, picture, picture_processor, picture_tokenizer, trl_row
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.sources import Data
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.run.setup import prepare_data

TOKENIZER, NUM_PAIRS = tiny_tokenizer(), 20


def write_pairs(tmp_path: Path, name: str = "pairs", num_pairs: int = NUM_PAIRS) -> str:
    """In row n, from 1, chosen has n words more than rejected, and the margin is n / 2; none in row 1."""
    rows = [
        {
            "prompt": f"{name} {n}",
            "chosen": " yes" * (n + 1),
            "rejected": " no",
            "m": n / 2 if n > 1 else None,
        }
        for n in range(1, num_pairs + 1)
    ]
    return write_rows(tmp_path / f"{name}.jsonl", rows)


def load(tmp_path: Path, *, eval: Any = (), **source: Any) -> Data:
    train = {"path": write_pairs(tmp_path), "columns": {"score_margin": "m"}, **source}
    return load_splits(tmp_path, train, TOKENIZER, eval=eval)


def rows_of(data: Data) -> list[int]:
    found: list[int] = data.train.row_numbers.tolist()
    return found


def selection(data: Data) -> Any:
    return data.report["train"]["sources"][0]["selection"]


def save(tmp_path: Path, names: Sequence[Any], name: str = "audit", **columns: Any) -> str:
    path = tmp_path / f"{name}.parquet"
    pq.write_table(pa.table({"pair": names, **columns}), path)
    return str(path)


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return load(tmp_path).train.pair_names


def test_a_file_keeps_the_pairs_that_it_names_whatever_else_it_has(tmp_path: Path, names: list[str]) -> None:
    some = [names[6], "0" * 32, None, names[2], names[2]]
    data = load(tmp_path, keep={"from": save(tmp_path, some)})
    assert rows_of(data) == [3, 7]
    assert selection(data) == {"pairs_before": 20, "left_out": {"keep": 18}, "pairs_after": 2}
    as_category = save(tmp_path, pa.array(some).dictionary_encode(), note=["x"] * 5)
    assert rows_of(load(tmp_path, keep={"from": as_category})) == [3, 7]
    as_large = save(tmp_path, pa.array(some, pa.large_string()))
    assert rows_of(load(tmp_path, keep={"from": as_large})) == [3, 7]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"above": 5}, [2, 3, 4]),
        ({"below": 5}, [7, 8]),
        ({"above": 3, "below": 8}, [3, 4, 5, 7]),
        ({"part": 0.5, "order": "largest"}, [2, 3, 4]),
        ({"part": 0.5, "order": "smallest"}, [5, 7, 8]),
        ({"part": 0.2, "order": "smallest"}, [8]),
    ],
)
def test_numbers_of_the_file_choose(
    tmp_path: Path, names: list[str], keep: dict[str, Any], expected: list[int]
) -> None:
    """Row 7 is in the file twice, with a mean of 4; rows 1 and 6 have no number; others are not in it."""
    numbers = {1: None, 2: 9, 3: 7, 4: 6, 5: 5, 6: math.nan, 7: 8, 8: 3}
    columns = {"p": pa.array([*numbers.values(), 0], pa.float64())}
    path = save(tmp_path, [names[row - 1] for row in (*numbers, 7)], **columns)
    assert rows_of(load(tmp_path, keep={"from": path, "by": "p", **keep})) == expected


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.float32()])
def test_any_numbers_may_decide(tmp_path: Path, names: list[str], kind: pa.DataType) -> None:
    path = save(tmp_path, names[:4], never_learned=pa.array([0, 1, 0, 1]).cast(kind))
    data = load(tmp_path, keep={"from": path, "by": "never_learned", "below": 1})
    assert rows_of(data) == [1, 3]


def test_a_random_part_depends_on_the_seed_and_not_on_the_order_of_the_file(
    tmp_path: Path, names: list[str]
) -> None:
    train = {"path": write_pairs(tmp_path), "columns": {"score_margin": "m"}}

    def chosen(some: list[str], seed: int) -> list[int]:
        keep = {"from": save(tmp_path, some), "part": 0.5, "order": "random"}
        return rows_of(load_splits(tmp_path, {**train, "keep": keep}, TOKENIZER, seed=seed))

    parts = [chosen(names, seed) for seed in range(6)]
    assert parts == [chosen(names[::-1], seed) for seed in range(6)]
    assert {len(part) for part in parts} == {10} and len({*map(tuple, parts)}) == 6


def test_ties_at_the_border_of_a_part_are_broken_by_the_seed(tmp_path: Path, names: list[str]) -> None:
    path = save(tmp_path, names, p=[1.0] * 20)
    chosen = rows_of(load(tmp_path, keep={"from": path, "by": "p", "part": 0.5, "order": "largest"}))
    assert len(chosen) == 10 and chosen != list(range(1, 11))


def test_lengths_and_scores_choose_and_a_pair_without_a_score_has_not_enough(tmp_path: Path) -> None:
    every = load(tmp_path).train
    gaps = abs(every.chosen_lengths - every.rejected_lengths)
    data = load(tmp_path, max_length_gap=int(gaps[4]))
    assert rows_of(data) == [1, 2, 3, 4, 5]
    assert rows_of(load(tmp_path, min_margin=9)) == [18, 19, 20]
    assert rows_of(load(tmp_path, min_margin=-100)) == list(range(2, 21))


def test_each_key_chooses_of_what_the_keys_before_it_leave_and_one_line_says_so(
    tmp_path: Path, names: list[str], console: Console
) -> None:
    gap = int(load(tmp_path).train.chosen_lengths[11] - load(tmp_path).train.rejected_lengths[11])
    keep = {"from": save(tmp_path, names, p=range(20)), "by": "p", "part": 0.5, "order": "smallest"}
    source: dict[str, Any] = {"path": write_pairs(tmp_path), "columns": {"score_margin": "m"}}
    source |= {"max_length_gap": gap, "min_margin": 2, "keep": keep}
    recipe = {"output_dir": "run", "model": {"path": str(tmp_path)}, "data": {"train": source}}
    data = prepare_data(parse_recipe(recipe), TOKENIZER, console)
    assert rows_of(data) == [4, 5, 6, 7]  # of 4 to 12
    left_out = {"max_length_gap": 8, "min_margin": 3, "keep": 5}
    assert selection(data) == {"pairs_before": 20, "left_out": left_out, "pairs_after": 4}
    assert isinstance(console.file, io.StringIO)
    assert (
        "pairs: 4 of 20 pairs are chosen to train on; left out by max_length_gap 8, min_margin 3, keep 5"
        in console.file.getvalue()
    )


def test_held_out_pairs_are_the_same_with_and_without_a_choice(tmp_path: Path, names: list[str]) -> None:
    held_out = {"fraction": 0.3}
    every = load(tmp_path, eval=held_out)
    some = load(tmp_path, eval=held_out, keep={"from": save(tmp_path, names[:10])})
    assert some.eval_fingerprint == every.eval_fingerprint
    assert some.eval["held_out"].row_numbers.tolist() == every.eval["held_out"].row_numbers.tolist()
    assert rows_of(some) == [row for row in rows_of(every) if row <= 10]
    assert selection(some)["pairs_before"] == every.train.num_pairs


def test_max_pairs_counts_pairs_before_the_choice_and_weights_those_after_it(
    tmp_path: Path, names: list[str]
) -> None:
    keep = {"from": save(tmp_path, names[3:])}
    data = load(tmp_path, keep=keep, max_pairs=5, weight=2.0)
    assert rows_of(data) == [4, 5] and data.source_weights.tolist() == [2.0]
    assert selection(data)["pairs_before"] == 5


def test_copies_of_a_pair_are_taken_or_left_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "chosen": " yes", "rejected": " no"} for n in (1, 2, 3, 1, 2, 3)]
    path = write_rows(tmp_path / "copies.jsonl", rows)
    names = load_splits(tmp_path, path, TOKENIZER).train.pair_names
    file = save(tmp_path, names, p=[1, 2, 3, 1, 2, 3])
    for order, expected in (("smallest", [1, 2, 4, 5]), ("largest", [2, 3, 5, 6])):
        keep = {"from": file, "by": "p", "part": 0.5, "order": order}
        assert rows_of(load_splits(tmp_path, {"path": path, "keep": keep}, TOKENIZER)) == expected
    keep = {"from": file, "part": 0.5, "order": "random"}
    assert (
        len({row % 3 for row in rows_of(load_splits(tmp_path, {"path": path, "keep": keep}, TOKENIZER))}) == 2
    )


def test_the_choice_costs_no_tokens_and_names_the_pairs_in_the_fingerprint(
    tmp_path: Path, names: list[str]
) -> None:
    some = load(tmp_path, keep={"from": save(tmp_path, names[:5])})
    again = load(
        tmp_path, keep={"from": save(tmp_path, names[4::-1], "other", p=[1] * 5), "by": "p", "above": 0}
    )
    others = load(tmp_path, keep={"from": save(tmp_path, names[1:6])})
    assert some.report["rows_tokenized"] == again.report["rows_tokenized"] == 0
    assert some.fingerprint == again.fingerprint != others.fingerprint


def test_pairs_with_images_are_chosen_by_the_content_of_their_images(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
    path = write_rows(tmp_path / "pairs.jsonl", [trl_row([f"{number}.png"]) for number in range(3)])
    images: dict[str, Any] = {"tokenizer": picture_tokenizer(), "images": picture_processor()}
    every = load_splits(tmp_path, path, **images)
    keep = {"from": save(tmp_path, every.train.pair_names[1:2])}
    for number in range(3):
        (tmp_path / f"{number}.png").rename(tmp_path / f"moved{number}.png")
    path = write_rows(tmp_path / "moved.jsonl", [trl_row([f"moved{number}.png"]) for number in range(3)])
    assert rows_of(load_splits(tmp_path, {"path": path, "keep": keep}, **images)) == [2]


def test_a_choice_of_no_pair_is_refused(tmp_path: Path, names: list[str]) -> None:
    none = "it chooses none of the 20 pairs of "
    unknown = {"from": save(tmp_path, ["f" * 32])}
    few = {"from": save(tmp_path, names, "few", p=range(20)), "by": "p"}
    for source, key in (
        ({"keep": unknown}, "keep"),
        ({"keep": {**few, "above": 19}}, "keep"),
        ({"keep": {**few, "part": 0.001, "order": "largest"}}, "keep"),
        ({"max_length_gap": 0}, "max_length_gap"),
        ({"min_margin": 11}, "min_margin"),
    ):
        message = refusal(lambda source=source: load(tmp_path, **source))  # type: ignore[misc]
        assert message.startswith(f"data.train.0.{key}: {none}")
    message = refusal(lambda: load(tmp_path, columns={}, min_margin=0))
    assert "or name scores in data.train.0.columns" in message


def test_a_file_that_cannot_be_used_is_refused_with_the_key(tmp_path: Path, names: list[str]) -> None:
    text, empty = tmp_path / "text.parquet", tmp_path / "empty.parquet"
    text.write_text("pair\n")
    empty.touch()
    texts = save(tmp_path, names, p=["much"] * 20)
    for keep, what in (
        ({"from": str(tmp_path / "absent.parquet")}, "No such file"),
        ({"from": str(text)}, "Parquet"),
        ({"from": str(empty)}, "Parquet"),
        ({"from": str(tmp_path)}, "directory"),
        ({"from": save(tmp_path, [1, 2], "numbers"), "by": "p", "above": 1}, '"p" does not exist'),
        ({"from": save(tmp_path, [b"\xff"], "bytes")}, "UTF8"),
        ({"from": save(tmp_path, [[1]], "lists")}, "list"),
        ({"from": texts, "by": "p", "above": 1}, "a column p of numbers"),
    ):
        message = refusal(lambda keep=keep: load(tmp_path, keep=keep))  # type: ignore[misc]
        assert message.startswith(f"data.train.0.keep.from: {keep['from']}: ") and what in message, message
    pq.write_table(pa.table({"name": names}), tmp_path / "unnamed.parquet")
    message = refusal(lambda: load(tmp_path, keep={"from": str(tmp_path / "unnamed.parquet")}))
    assert '"pair" does not exist' in message and "a column pair with names of pairs" in message


def test_a_file_without_lines_keeps_nothing(tmp_path: Path) -> None:
    file = save(tmp_path, pa.array([], pa.string()))
    assert "it chooses none of the 20 pairs" in refusal(lambda: load(tmp_path, keep={"from": file}))
