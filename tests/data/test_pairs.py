"""Recipes' sources become splits; what became of every row is reported; nothing is tokenised twice."""

import gzip
import io
import json
import operator
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.refusals import refusal
from support.rows import assistant, user
from support.rows import load_splits as load
from support.rows import write_rows as write
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data import sources
from dpo_pack.data.ingest import Ingestion
from dpo_pack.data.sources import Data, locate_source, split_by_prompt
from dpo_pack.data.store import content_key
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.run.setup import prepare_data
from dpo_pack.system.errors import DataError

TOKENIZER = tiny_tokenizer()


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{number}", "chosen": f" yes {number}", "rejected": " no"} for number in numbers]


def refused(tmp_path: Path, train: Any, **settings: Any) -> str:
    return refusal(lambda: load(tmp_path, train, **settings))


def test_weights_that_leave_no_pair_of_an_epoch_are_refused_when_data_is_read(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.jsonl", rows(number)) for number in range(2)]
    light = [{"path": path, "weight": 0.4} for path in paths]
    assert refused(tmp_path, light) == (
        "data.train: with the sources' weights an epoch has no pair; raise data.train.*.weight"
    )
    assert load(tmp_path, [light[0], paths[1]]).train.num_pairs == 2
    heavy_held_out = [{"path": write(tmp_path / "three.jsonl", rows(1, 2, 3)), "weight": 0.1}]
    assert "weights an epoch has no pair" in refused(tmp_path, heavy_held_out, eval={"fraction": 0.5})


def test_pairs_of_all_sources_are_in_order_with_source_row_and_weight(tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", rows(0, 1))
    second = write(tmp_path / "second.jsonl", [{**rows(2)[0], "weight": 0.25}])
    splits = load(tmp_path, [first, {"path": second, "weight": 1.5}])
    assert [TOKENIZER.decode(splits.train.group(pair).context) for pair in range(3)] == ["q0", "q1", "q2"]
    assert TOKENIZER.decode(splits.train.group(2).completions[0]) == " yes 2</s>"
    assert TOKENIZER.decode(splits.train.group(0).completions[1]) == " no</s>"
    assert splits.train.source_indices.tolist() == [0, 0, 1]
    assert splits.train.row_numbers.tolist() == [1, 2, 1]
    assert splits.train.weights.tolist() == [1.0, 1.0, 0.25]
    assert splits.source_weights.tolist() == [1.0, 1.5]
    assert splits.eval == {}


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.5, 0.5), [4, 4]), ((3, 1), [4, 1]), ((0.1, 0.3), [3, 10]), ((9, 0.1), [4, 0])],  # as in TRL
)
def test_a_share_takes_the_first_pairs_of_each_source(
    tmp_path: Path, shares: tuple[float, float], expected: list[int]
) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", rows(*range(n))) for n in (4, 10)]
    sources = [{"path": path, "share": share} for path, share in zip(paths, shares, strict=True)]
    splits = load(tmp_path, sources)
    assert splits.train.row_numbers.tolist() == [row + 1 for number in expected for row in range(number)]
    assert [source["pairs_in_mixture"] for source in splits.report["train"]["sources"]] == expected
    held_out = load(tmp_path, sources, eval={"fraction": 0.3})
    assert held_out.train.num_pairs + held_out.eval["held_out"].num_pairs == sum(expected)


def test_max_pairs_are_the_first_that_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(0), {"prompt": "bad"}, *rows(1, 2, 3)])
    splits = load(tmp_path, {"path": path, "max_pairs": 2}, on_bad_row="skip")
    assert splits.train.row_numbers.tolist() == [1, 3]
    assert splits.report["train"]["sources"][0]["rows_read"] == 3


def test_a_second_start_does_not_call_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, dev = write(tmp_path / "a.jsonl", rows(*range(20))), write(tmp_path / "b.jsonl", rows(1, 30))
    first = load(tmp_path, train, eval=dev)
    assert first.report["rows_tokenized"] == 22

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(type(TOKENIZER), "__call__", fail)
    monkeypatch.setattr(type(TOKENIZER), "apply_chat_template", fail)
    second = load(tmp_path, train, eval=dev)
    assert second.report["rows_tokenized"] == 0
    assert second.fingerprint == first.fingerprint
    assert second.report["train"]["sources"][0]["token_store_reused"]
    again = {key: value for key, value in second.report["train"].items() if key != "sources"}
    assert again == {key: value for key, value in first.report["train"].items() if key != "sources"}


def test_every_option_is_in_the_key_of_a_store_unless_it_is_named_as_neutral(tmp_path: Path) -> None:
    class MoreOptions(SourceRecipe):
        added_later: int = 0

    path = write(tmp_path / "a.jsonl", rows(0))
    data = DataRecipe.model_validate({"train": path, "truncation": "prompt_left"})

    def key(source: SourceRecipe) -> str:
        located = locate_source(source, "data.train.0", tmp_path / "hashes.json")
        ingestion = Ingestion(located=located, source=source, data=data, tokenizer=TOKENIZER)
        with ingestion.start():
            facts = sources._facts_of_tokens(ingestion, "tokenizer")
        return content_key({**facts, "source": located.fingerprint})

    assert key(MoreOptions(path=path, added_later=1)) != key(MoreOptions(path=path))
    # Stores that earlier versions wrote are found.
    fingerprint = locate_source(data.train[0], "data.train.0", tmp_path / "hashes.json").fingerprint
    assert key(data.train[0]) == content_key(
        {
            **{"version": 11, "source": fingerprint, "tokenizer": "tokenizer", "found_format": "preference"},
            **{"split": "train", "format": "auto", "columns": {}, "max_pairs": None, "max_length": 2048},
            **{"max_prompt_length": None, "truncation": "prompt_left", "on_bad_row": "error"},
            "system_prompt": None,
        }
    )


def test_changed_rows_and_changed_tokenizers_are_tokenised_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(0, 1, 2))
    first = load(tmp_path, path)
    write(tmp_path / "a.jsonl", rows(0, 1, 9))
    changed = load(tmp_path, path)
    assert changed.report["rows_tokenized"] == 3
    assert changed.fingerprint != first.fingerprint
    assert load(tmp_path, path, tiny_tokenizer(chat_template=True)).report["rows_tokenized"] == 3


BAD_LINE = '{"prompt": "q" "chosen": 1}'


def test_the_first_bad_row_stops_with_its_line_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    write(path, rows(0, 1))
    path.write_text(path.read_text() + f"\n{BAD_LINE}\n" + json.dumps({"prompt": "q"}))
    assert refused(tmp_path, str(path)) == (
        f"{path} line 4: invalid JSON (Expecting ',' delimiter at column 16); "
        "invalid_json: 1 of 4 rows, missing_column: 1; mend the rows, or set data.on_bad_row: skip"
    )
    assert not (tmp_path / "cache" / "tokens").exists() or not any((tmp_path / "cache" / "tokens").iterdir())


def test_skipped_rows_are_counted_and_listed_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    bad = [{"prompt": "q"}, {"prompt": "q", "chosen": " ", "rejected": "b"}, {"prompt": "q", "chosen": "b"}]
    write(path, [*bad, *rows(0, 1)])
    path.write_text(path.read_text() + f"{BAD_LINE}\n")
    splits = load(tmp_path, str(path), on_bad_row="skip")
    source = splits.report["train"]["sources"][0]
    assert splits.train.num_pairs == source["pairs_kept"] == 2
    assert source["rows_read"] == 6
    assert source["format"] == "preference"
    assert source["dropped"] == {
        "empty_completion": {"rows": 1, "line_numbers": [2]},
        "invalid_json": {"rows": 1, "line_numbers": [6]},
        "missing_column": {"rows": 2, "line_numbers": [1, 3]},
    }


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_missing_columns_of_json_rows_name_the_key_that_maps_them(tmp_path: Path, on_bad_row: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "better": "a", "worse": "b"}])
    message = refused(tmp_path, path, on_bad_row=on_bad_row)
    assert "line 1: no column 'chosen' (there are: question, better, worse); " in message
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert message.endswith(f"; set data.train.0.columns: {columns}".replace("'", ""))
    assert load(tmp_path, {"path": path, "columns": columns}).train.num_pairs == 1


def test_too_long_pairs_are_dropped_counted_and_listed_or_stop_the_run(tmp_path: Path) -> None:
    long = {"prompt": "long", "chosen": " word" * 50, "rejected": "b"}
    path = write(tmp_path / "a.jsonl", [*rows(0), long])
    source = load(tmp_path, path, max_length=40).report["train"]["sources"][0]
    assert source["dropped"] == {"too_long": {"rows": 1, "line_numbers": [2]}}
    message = refused(tmp_path, path, max_length=40, truncation="error")
    assert "line 2: " in message and "data.max_length is 40; too_long: 1 of 2 rows; raise" in message
    cut = load(tmp_path, path, max_length=40, truncation="completion_right").report["train"]["sources"][0]
    assert (cut["dropped"], cut["completions_truncated"], cut["eos_lost"]) == ({}, 1, 1)


QUESTIONS: list[dict[str, Any]] = [
    {"question": f"How much is {number} + 1?", "chosen": f"It is {number + 1}.", "rejected": "Nobody knows."}
    for number in range(30)
]
# The answers of some rows begin alike, so these rows could be taken for pairs with an implicit prompt.
QUESTIONS += [{**row, "rejected": "It is unknown."} for row in QUESTIONS[:3]]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_texts_without_a_prompt_column_are_refused_where_another_column_may_be_the_prompt(
    tmp_path: Path, name: str, on_bad_row: str
) -> None:
    path = tmp_path / name
    if name == "a.jsonl":
        write(path, QUESTIONS)
    else:
        pq.write_table(pa.Table.from_pylist(QUESTIONS), path)
    assert refused(tmp_path, str(path), on_bad_row=on_bad_row) == (
        f"{path}: no column 'prompt', and 'question' may be it; set data.train.0.columns: "
        "{prompt: question}, or {prompt: null} if chosen and rejected begin with the prompt, or "
        "{instruction: question} to use the chat template"
    )
    source = {"path": str(path), "columns": {"prompt": "question"}}
    splits = load(tmp_path, source, on_bad_row=on_bad_row)
    assert splits.train.num_pairs == len(QUESTIONS)
    assert TOKENIZER.decode(splits.train.group(1).context) == QUESTIONS[1]["question"]


IMPLICIT = [
    {"chosen": f"Question {number}? Yes, of course.", "rejected": f"Question {number}? No."}
    for number in range(30)
]


@pytest.mark.parametrize(
    "values",
    [
        ["one word"] * 30,
        ["天气怎么样"] * 30,
        [None] * 29 + ["What?"],
        [{"post": {"body": "a question"}}] * 30,
        [[user("a question")]] * 30,
        [*["word"] * 29, "two words"],
        [chr(ord("a") + number % 26) * (number + 1) for number in range(30)],  # as many different words
    ],
)
def test_a_column_with_text_may_be_the_prompt(tmp_path: Path, values: list[Any]) -> None:
    path = write(tmp_path / "a.jsonl", [{**row, "other": v} for row, v in zip(IMPLICIT, values, strict=True)])
    assert "no column 'prompt', and 'other' may be it" in refused(tmp_path, path)
    splits = load(tmp_path, {"path": path, "columns": {"prompt": None}})
    assert TOKENIZER.decode(splits.train.group(2).context) == "Question 2?"


@pytest.mark.parametrize("before", [{}, {"question": None}])
def test_questions_that_begin_late_are_not_overlooked(tmp_path: Path, before: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [*({**row, **before} for row in IMPLICIT * 4), *QUESTIONS[-1:]])
    assert " 121: no column 'prompt', and 'question' may be it" in refused(tmp_path, path)


def test_answers_in_an_object_do_not_hide_a_column_that_may_be_the_prompt(tmp_path: Path) -> None:
    rows = [
        {"question": row["question"], "answer": {"a": row["chosen"], "b": row["rejected"]}}
        for row in QUESTIONS
    ]
    source: dict[str, Any] = {
        "path": write(tmp_path / "a.jsonl", rows),
        "columns": {"chosen": "answer.a", "rejected": "answer.b"},
    }
    assert "{prompt: question}" in refused(tmp_path, source)
    source["columns"]["prompt"] = "question"
    assert load(tmp_path, source).train.num_pairs == len(rows)


def test_columns_of_ids_scores_and_categories_are_not_taken_for_the_prompt(tmp_path: Path) -> None:
    others = [
        {"id": f"hh-{number}", "source": "web", "score": "4.5", "rank": number, "tags": ["a", "b"]}
        for number in range(30)
    ]
    path = write(tmp_path / "a.jsonl", [{**row, **more} for row, more in zip(IMPLICIT, others, strict=True)])
    splits = load(tmp_path, path)
    assert TOKENIZER.decode(splits.train.group(2).context) == "Question 2?"
    source = splits.report["train"]["sources"][0]
    assert source["columns_not_read"] == ["id", "source", "score", "rank", "tags"]
    few = write(tmp_path / "few.jsonl", [{**row, "word": "sky"} for row in IMPLICIT[:5]])
    assert "'word' may be it" in refused(tmp_path, few)
    scored = write(tmp_path / "scored.jsonl", [{**row, "score": "4.5"} for row in IMPLICIT[:5]])
    assert load(tmp_path, scored).train.num_pairs == 5


def test_a_misspelt_column_is_named_and_not_taken_for_one_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", QUESTIONS)
    message = refused(tmp_path, {"path": path, "columns": {"prompt": "qestion"}})
    names = "no column 'qestion', which data.train.0.columns.prompt names"
    assert f"{names} (did you mean question? there are: question, " in message
    assert "missing_column: 33 of 33 rows; set data.train.0.columns: {prompt: question}" in message


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_beginnings_that_most_rows_do_not_have_are_not_prompts(tmp_path: Path, on_bad_row: str) -> None:
    answers = [{column: row[column] for column in ("chosen", "rejected")} for row in QUESTIONS]
    path = write(tmp_path / "a.jsonl", answers)
    message = refused(tmp_path, path, on_bad_row=on_bad_row)
    assert "no_common_prompt: 30 of 33 rows; name the column of the prompt in data.train.0.columns" in message
    assert "skip" not in message
    declared = {"path": path, "columns": {"prompt": None}}
    assert load(tmp_path, declared, on_bad_row="skip").train.num_pairs == 3


SKIP = {"on_bad_row": "skip"}
LONG = {"prompt": "p", "chosen": "a " * 50, "rejected": "b"}


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ([], {}, "has no rows; correct or remove data.train.0"),
        (
            [{"chosen": "a"}, {"chosen": "a"}, {"chosen": 1, "rejected": 2}],
            SKIP,
            r"no pairs left of 3 rows \(missing_column 2, wrong_type 1\)"
            ".*the first: line 1: no column 'rejected'.*name the columns of prompt, chosen and",
        ),
        ([LONG], {"max_length": 20}, "choose another data.truncation"),
        # A fault of most rows does not suggest to skip them.
        (
            [*rows(0), *[{**rows(1)[0], "chosen": None}] * 3],
            {},
            "line 2: chosen is null, not text; wrong_type: 3 of 4 rows; mend the rows((?!skip).)*$",
        ),
        (
            [{**rows(1)[0], "chosen": None}] * 3000,
            {},
            "wrong_type: 1,024 of the first 1,024 rows; mend the rows",
        ),
        (
            [*rows(0, 1), *IMPLICIT[:1]],
            {},
            r"line 3: no column 'prompt', which other rows have; "
            "missing_column: 1 of 3 rows; mend the rows, or set data.on_bad_row: skip$",
        ),
        # A row of many columns is refused in a short line.
        ([{f"column {number}": 1 for number in range(100_000)}], {}, r"^(?=.{,2100}$)"),
    ],
)
def test_rows_that_stop_a_run_are_told_with_what_mends_them(
    tmp_path: Path, content: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    assert re.search(message, refused(tmp_path, write(tmp_path / "a.jsonl", content), **settings))


@pytest.mark.parametrize("value", [{"bytes": b"\x89PNG", "path": None}, b"\x89PNG", [b"\x89PNG"], "cat.png"])
def test_a_columnar_source_with_images_is_refused_without_advice_to_skip(tmp_path: Path, value: Any) -> None:
    column = "image" if isinstance(value, str) else "picture_of_it"
    table = pa.Table.from_pylist([{**row, column: value} for row in rows(0, 1)])
    pq.write_table(table, tmp_path / "a.parquet")
    message = refused(tmp_path, str(tmp_path / "a.parquet"))
    assert f"row 1: column '{column}' " in message and "only text is read" in message
    assert "media: 2 of 2 rows" in message and "skip" not in message
    skipped = refused(tmp_path, str(tmp_path / "a.parquet"), on_bad_row="skip")
    assert "no pairs left of 2 rows (media 2)" in skipped


def test_a_start_prints_what_is_left_out_and_not_read_of_sources(tmp_path: Path, console: Console) -> None:
    noted, held = ([{**row, "id": row["prompt"], "note": "n"} for row in rows(*n)] for n in ((0, 1), (2, 3)))
    train = write(tmp_path / "a.jsonl", [*noted, {**noted[0], "chosen": " "}])
    dev = write(tmp_path / "dev.jsonl", [*held, {**held[0], "chosen": None}])
    data = {"train": train, "eval": dev, "on_bad_row": "skip"}
    model = {"path": str(tmp_path / "no-model")}
    recipe = parse_recipe({"output_dir": str(tmp_path / "run"), "model": model, "data": data})
    for _ in range(2):  # the second start reads the cache
        prepare_data(recipe, TOKENIZER, console)
        assert isinstance(console.file, io.StringIO)
        printed = console.file.getvalue().splitlines()
        assert printed[1:] == [
            "  a: Warning: 1 of 3 rows are left out: 1 empty_completion",
            "  a: columns that are not read: id, note",
            "  dev: Warning: 1 of 3 rows are left out: 1 wrong_type",
            "  dev: columns that are not read: id, note",
        ]
        console.file.truncate(console.file.seek(0))


def test_a_start_warns_of_pairs_that_are_held_out_too_and_of_copies(tmp_path: Path, console: Console) -> None:
    train, dev = write(tmp_path / "a.jsonl", rows(0, 1, 1, 2)), write(tmp_path / "dev.jsonl", rows(1, 9))
    model = {"path": str(tmp_path / "no-model")}
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "model": model}
    prepare_data(parse_recipe({**settings, "data": {"train": train, "eval": dev}}), TOKENIZER, console)
    assert isinstance(console.file, io.StringIO)
    warned = [line for line in console.file.getvalue().splitlines() if "Warning" in line]
    assert [line.split(",")[0] for line in warned] == [
        "  Warning: 2 of 4 training pairs are held out too",
        "  Warning: 1 of 4 training pairs repeat another one",
    ]


def test_a_start_warns_of_contradictions_and_of_weights_all_0(tmp_path: Path, console: Console) -> None:
    first, *others = [{**row, "weight": 0} for row in rows(0, 1, 2)]
    swapped = {**first, "chosen": first["rejected"], "rejected": first["chosen"]}
    same_answers = write(tmp_path / "same.jsonl", [{**swapped, "prompt": "q1"}, *rows(3)])
    train = [write(tmp_path / "a.jsonl", [first, *others]), write(tmp_path / "b.jsonl", [first, swapped])]
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "model": {"path": str(tmp_path / "no")}}
    assert isinstance(console.file, io.StringIO)
    is_0 = "training pairs have the weight 0 (column weight): none is learned"
    for some, warnings in (
        (train[:1], [is_0]),
        ([train[0], same_answers], []),
        (
            train[1:],
            ["  Warning: 2 of 2 training pairs are contradicted: another pair has the same prompt", is_0],
        ),
        (
            train,
            ["  Warning: 3 of 5 training pairs are contradicted: another pair has the same prompt", is_0],
        ),
    ):
        prepare_data(parse_recipe({**settings, "data": {"train": some}}), TOKENIZER, console)
        lines = [line for line in console.file.getvalue().splitlines() if "Warning" in line]
        lines = [line for line in lines if "repeat" not in line]
        assert len(lines) == len(warnings) and all(map(operator.contains, lines, warnings))
        console.file.truncate(console.file.seek(0))


def test_the_format_is_detected_past_bad_rows_and_reported(tmp_path: Path) -> None:
    turns = {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}
    path = write(tmp_path / "a.jsonl", [{"text": "?"}, turns])
    assert load(tmp_path, path, on_bad_row="skip").report["train"]["sources"][0]["format"] == "transcript"
    assert "line 1: no column 'chosen'" in refused(tmp_path, path)


@pytest.mark.slow
def test_real_transcripts_lose_exactly_their_known_bad_rows(tmp_path: Path, shared_dir: Path) -> None:
    path = shared_dir / "data" / "hh_harmless_base_test.jsonl.gz"
    assert "line 87: the chosen completion is empty" in refused(tmp_path, str(path))
    splits = load(tmp_path, str(path), on_bad_row="skip", max_length=8192)
    source = splits.report["train"]["sources"][0]
    assert {reason: dropped["rows"] for reason, dropped in source["dropped"].items()} == {
        "empty_completion": 4,
        "no_common_prompt": 5,
    }
    assert (source["format"], source["rows_read"], source["pairs_kept"]) == ("transcript", 2312, 2303)


def test_repetitions_and_leaks_are_counted(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(0, 1, 1, 2, 3))
    other_answer = {"prompt": "q0", "chosen": " perhaps", "rejected": " no"}
    dev = write(tmp_path / "dev.jsonl", [*rows(1, 9), other_answer])
    report = load(tmp_path, train, eval=[dev]).report
    assert (report["train"]["pairs"], report["train"]["prompts"]) == (5, 4)
    assert report["train"]["duplicate_pairs"] == 1
    assert report["train_pairs_contradicted"] == 0
    assert report["train_pairs_in_eval"] == 2  # both copies of pair 1
    assert report["train_prompts_in_eval"] == 2  # q0 and q1
    assert report["eval"]["dev"]["duplicate_pairs"] == 0
    alone = load(tmp_path, train).report
    assert alone["train_pairs_in_eval"] == alone["train_prompts_in_eval"] == 0
    both = load(tmp_path, [train, dev]).report["train"]
    assert [source["pairs"] for source in both["sources"]] == [5, 3] and both["pairs"] == 8


def test_lengths_are_summarised_in_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(*range(10)))
    splits = load(tmp_path, path)
    lengths = splits.report["train"]["lengths_tokens"]
    longest = splits.train.prompt_lengths + np.maximum(
        splits.train.chosen_lengths, splits.train.rejected_lengths
    )
    assert set(lengths) == {"prompt", "chosen", "rejected", "longest_sequence"}
    assert lengths["longest_sequence"]["max"] == longest.max()
    assert lengths["longest_sequence"]["mean"] == pytest.approx(longest.mean())
    # Of 10 lengths, half are no longer than the fifth.
    assert lengths["chosen"]["p50"] == np.sort(splits.train.chosen_lengths)[4]


def test_eval_sets_are_named_after_their_sources(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path / "dev.jsonl", rows(5)), write(tmp_path / "other" / "dev.jsonl", rows(6, 7))]
    named = {"path": paths[0], "name": "mine"}
    splits = load(tmp_path, write(tmp_path / "a.jsonl", rows(0)), eval=[*paths, named])
    num_pairs = [(name, pairs.num_pairs) for name, pairs in splits.eval.items()]
    assert num_pairs == [("dev", 1), (paths[1], 2), ("mine", 1)]
    assert [splits.report["eval"][name]["source"]["path"] for name in splits.eval] == [*paths, paths[0]]


def keys_of(prompts: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[P, 16] one key for each different prompt."""
    return np.array([[prompt] * 16 for prompt in prompts], dtype=np.uint8)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=60), st.floats(0.01, 0.6), st.integers(-5, 5))
def test_a_held_out_fraction_splits_by_prompt(prompts: list[int], fraction: float, seed: int) -> None:
    try:
        kept, held_out = split_by_prompt(keys_of(prompts), fraction, seed)
    except DataError:
        largest_group = max(map(prompts.count, prompts))
        assert len(set(prompts)) < 2 or fraction * len(prompts) > len(prompts) - largest_group
        return
    assert sorted([*kept, *held_out]) == list(range(len(prompts)))
    assert len(kept) > 0
    assert len(held_out) >= fraction * len(prompts)
    held_out_prompts = {prompts[pair] for pair in held_out}
    assert held_out_prompts.isdisjoint(prompts[pair] for pair in kept)
    backwards = split_by_prompt(keys_of(prompts[::-1]), fraction, seed)[1]
    assert {prompts[::-1][pair] for pair in backwards} == held_out_prompts


def test_a_held_out_fraction_is_about_what_was_asked_and_depends_on_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(*range(200)))
    first, same, other = (load(tmp_path, path, seed=seed, eval={"fraction": 0.1}) for seed in (0, 0, 1))
    (name, held_out), *others = first.eval.items()
    assert (name, held_out.num_pairs, first.train.num_pairs, others) == ("held_out", 20, 180, [])
    assert first.report["train_prompts_in_eval"] == 0
    assert same.fingerprint == first.fingerprint
    assert other.fingerprint != first.fingerprint


def sides(splits: Data, prompts: list[int]) -> tuple[set[int], set[int]]:
    """The prompts that are trained on and those that are held out; `prompts` has that of each row."""
    tables = splits.train, splits.eval["held_out"]
    kept, held_out = ({prompts[row - 1] for row in table.row_numbers.tolist()} for table in tables)
    return kept, held_out


NUM_QUESTIONS = 11
NUM_ANSWERS = 4


@pytest.mark.parametrize("case", ["left truncation", "tokens across the boundary", "no prompt column"])
def test_no_prompt_is_on_both_sides_of_a_held_out_fraction(tmp_path: Path, case: str) -> None:
    """With token ids of the stored prompts as keys, almost every prompt was on both sides."""
    content, prompts = [], []
    for answer in range(NUM_ANSWERS):
        for question in range(NUM_QUESTIONS):
            # The longer the answer, the less of the prompt is left where it is cut on the left.
            row = {
                "prompt": f"Question {question}: how do I bake bread number {question}? The sk",
                "chosen": f"{'y is blue' if answer % 2 else 'in'}{' again' * answer}",
                "rejected": f"{'y is green' if answer % 2 else 'inny'}{' never' * answer}",
            }
            if case == "no prompt column":
                prompt = row.pop("prompt")
                row = {column: prompt + completion for column, completion in row.items()}
            content.append(row)
            prompts.append(question)
    settings: dict[str, Any] = {"eval": {"fraction": 0.3}}
    if case == "left truncation":
        settings |= {"truncation": "prompt_left", "max_length": 40}
    path = write(tmp_path / "a.jsonl", content)
    splits = load(tmp_path, path, **settings)
    kept, held_out = sides(splits, prompts)
    assert kept and held_out and kept.isdisjoint(held_out)
    assert splits.report["train_prompts_in_eval"] == 0
    source = splits.report["train"]["sources"][0]
    if case == "no prompt column":
        assert source["prompts_inferred"] == NUM_QUESTIONS * NUM_ANSWERS
        assert splits.report["held_out_by"] == "first 10 characters"  # "Question 1", which begins 10 and 11
    else:
        assert source["prompts"] == NUM_QUESTIONS and splits.report["held_out_by"] == "prompt"
        assert source["prompt_truncated" if case == "left truncation" else "prompt_boundary_moved"] > 10
    # A source of its own has every prompt of the training pairs, and the report says so.
    report = load(tmp_path, path, **settings | {"eval": path}).report
    assert report["train_prompts_in_eval"] == report["train"]["prompts"] >= 8


def test_one_source_without_prompts_is_enough_to_split_all_by_their_beginnings(tmp_path: Path) -> None:
    bare = [{"chosen": f"{number} q yes", "rejected": f"{number} q no"} for number in range(20)]
    paths = [write(tmp_path / "a.jsonl", rows(*range(20))), write(tmp_path / "b.jsonl", bare)]
    report = load(tmp_path, paths, eval={"fraction": 0.1}).report
    assert report["held_out_by"].startswith("first ")
    assert [source["prompts_inferred"] > 0 for source in report["train"]["sources"]] == [False, True]


def test_a_seed_holds_out_the_same_prompts_in_every_release() -> None:
    """Else pairs that a released version trained on would judge a run that goes on from it."""
    keys = np.arange(160, dtype=np.uint8).reshape(10, 16)
    kept, held_out = split_by_prompt(keys, 0.35, 3)
    assert held_out.tolist() == [0, 1, 4, 7] and sorted([*kept, *held_out]) == list(range(10))


def test_the_same_prompts_are_held_out_whatever_tokenizer_and_template_a_model_has(tmp_path: Path) -> None:
    answers = [[assistant(content)] for content in "ab"]
    content = [
        {"prompt": [user(f"q{number}")], "chosen": answers[0], "rejected": answers[1]} for number in range(20)
    ]
    path, tokenizer = write(tmp_path / "a.jsonl", content), tiny_tokenizer(chat_template=True)
    first = load(tmp_path, path, tokenizer, eval={"fraction": 0.3})
    tokenizer.chat_template = "Today is another day. " + str(tokenizer.chat_template)
    second = load(tmp_path, path, tokenizer, eval={"fraction": 0.3})
    assert second.eval["held_out"].row_numbers.tolist() == first.eval["held_out"].row_numbers.tolist()
    assert second.fingerprint != first.fingerprint


def test_inferred_prompts_that_begin_too_long_alike_are_not_split(tmp_path: Path) -> None:
    header = "Below is an instruction that describes a task. Write a response to it.\n\n"
    content = [{"chosen": f"{header}q{n} yes", "rejected": f"{header}q{n} no"} for n in range(20)]
    message = refused(tmp_path, write(tmp_path / "a.jsonl", content), eval={"fraction": 0.1})
    assert "begin with the same 64 characters; name the column in data.train.*.columns.prompt" in message


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    data = DataRecipe(train=(SourceRecipe(path="unused"),))
    peaks_bytes = []
    for num_rows in (1_100, 2_100):  # at least two whole batches
        path = tmp_path / f"{num_rows}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            for number in range(num_rows):
                row = {"prompt_ids": [number % 250] * 80, "chosen_ids": [3] * 10, "rejected_ids": [4] * 10}
                file.write(json.dumps(row) + "\n")
        tracemalloc.start()
        try:
            source = SourceRecipe(path=str(path))
            located = locate_source(source, "data.train.0", tmp_path / "cache" / "file_hashes.json")
            ingestion = Ingestion(located=located, source=source, data=data, tokenizer=TOKENIZER)
            sources.load_source(ingestion, "tiny", tmp_path / "cache")
            peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # The 1,000 rows more have 0.4 MB of token ids and 0.1 MB of records.
    assert peaks_bytes[1] - peaks_bytes[0] < 0.1e6
