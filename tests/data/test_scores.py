"""Scores of answers: which columns and answers have them, which are refused, and what becomes of them."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.refusals import refusal
from support.rows import assistant, load_splits, user, write_rows
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.recipe.load import parse_recipe
from dpo_pack.run.setup import prepare_data

BOTH = {"chosen_score": "good", "rejected_score": "bad"}
TOKENIZER, CHAT = tiny_tokenizer(), tiny_tokenizer(chat_template=True)


def scored(*scores: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [
        {"prompt": f"q{number}", "chosen": " yes", "rejected": " no", "good": good, "bad": bad}
        for number, (good, bad) in enumerate(scores)
    ]


def margins(
    tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any = TOKENIZER, **source: Any
) -> list[float]:
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    found = load_splits(tmp_path, {"path": path, **source}, tokenizer).train.score_margins
    return [math.inf if math.isnan(margin) else margin for margin in found.tolist()]  # inf equals inf


def test_a_margin_is_the_difference_of_two_columns_or_one_column(tmp_path: Path) -> None:
    rows = scored((0.7, 0.1), (3, 4), ("5.5", -1), (None, None))
    assert margins(tmp_path, rows, columns=BOTH) == [0.7 - 0.1, -1.0, 6.5, math.inf]
    assert margins(tmp_path, rows, columns={"score_margin": "good"}) == [0.7, 3.0, 5.5, math.inf]
    assert margins(tmp_path, rows) == [math.inf] * 4


@pytest.mark.parametrize(
    "format", ["conversational", "openai", "transcript", "tokenized", "alpaca", "pictured"]
)
def test_rows_of_other_formats_have_scores_too(tmp_path: Path, format: str) -> None:
    answers = {"chosen": [assistant("yes")], "rejected": [assistant("no")]}
    rows: dict[str, dict[str, Any]] = {
        "conversational": {"prompt": [user("q")], **answers},
        "openai": {
            "input": {"messages": [user("q")]},
            "preferred_output": answers["chosen"],
            "non_preferred_output": answers["rejected"],
        },
        "transcript": {side: f"\n\nHuman: q\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        "tokenized": {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]},
        "alpaca": {"instruction": "q", "chosen": "yes", "rejected": "no"},
        "pictured": {"prompt": "q", "chosen": "yes", "rejected": "no"},
    }
    row = {**rows[format], "good": 2, "bad": 0.5}
    assert margins(tmp_path, [row], CHAT, columns=BOTH, format=format) == [1.5]


def test_an_empty_cell_of_a_csv_file_is_no_score(tmp_path: Path) -> None:
    text = io.StringIO()
    rows = scored((1, 0.5), (None, None))
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "pairs.csv").write_text(text.getvalue())
    source = {"path": str(tmp_path / "pairs.csv"), "columns": BOTH}
    found = load_splits(tmp_path, source, TOKENIZER).train.score_margins
    assert found[0] == 0.5 and np.isnan(found[1])


@pytest.mark.parametrize("wrong", ["high", True, [1], math.nan, math.inf, None])
def test_a_score_that_is_no_finite_number_makes_a_bad_row(tmp_path: Path, wrong: Any) -> None:
    rows = scored((2, 1), (1, wrong))
    message = refusal(lambda: margins(tmp_path, rows, columns=BOTH))
    assert f"line 2: rejected_score is {str(wrong)!r}, not a finite number; invalid_score: 1 of 2" in message
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    kept = load_splits(tmp_path, {"path": path, "columns": BOTH}, on_bad_row="skip")
    assert kept.train.score_margins.tolist() == [1]


def test_ranked_answers_bring_their_scores_and_ranks_are_none(tmp_path: Path) -> None:
    def ranked(*answers: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": "q", "answers": [{**one, "answer": f"a{n}"} for n, one in enumerate(answers)]}

    by_score = ranked({"score": 2.5}, {"score": 4}, {"score": -1})
    assert margins(tmp_path, [by_score], CHAT) == [5.0]
    assert margins(tmp_path, [ranked({"overall_score": 8}, {"overall_score": 6.5})], CHAT) == [1.5]
    assert margins(tmp_path, [ranked({"rank": 1}, {"rank": 3})], CHAT) == [math.inf]
    beside = ranked({"rank": 1, "score": 0.5}, {"rank": 2, "score": 2})
    assert margins(tmp_path, [beside], CHAT) == [-1.5]
    empty = ranked({"rank": 1, "overall_score": None, "score": 3}, {"rank": 2, "score": 2})
    assert margins(tmp_path, [empty], CHAT) == [1.0]
    infinite = ranked({"rank": 1, "score": math.inf}, {"rank": 2, "score": 2})
    assert "invalid_score: 1 of 1" in refusal(lambda: margins(tmp_path, [infinite], CHAT))
    assert margins(tmp_path, [ranked({"rank": 1, "score": "A"}, {"rank": 2, "score": 1})], CHAT) == [math.inf]


def test_rejected_answers_with_the_higher_score_are_counted_and_kept(
    tmp_path: Path, console: Console
) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", scored((2, 1), (1, 2), (1, 1), (0, 3), (None, None)))
    data = {"train": {"path": path, "columns": BOTH}}
    recipe = {"output_dir": str(tmp_path / "run"), "model": {"path": str(tmp_path)}, "data": data}
    found = prepare_data(parse_recipe(recipe), tiny_tokenizer(), console)
    assert found.train.num_pairs == 5
    assert found.report["train"]["sources"][0]["scores_against_labels"] == 2
    assert isinstance(console.file, io.StringIO)
    told = "Warning: in 2 of 5 pairs the rejected answer has the higher score, which changes no label"
    assert told in console.file.getvalue()


def test_another_column_of_scores_costs_new_tokens_and_scores_change_no_fingerprint(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", scored((2, 1)))
    plain = load_splits(tmp_path, path, TOKENIZER)
    with_scores = load_splits(tmp_path, {"path": path, "columns": {"score_margin": "good"}}, TOKENIZER)
    other = load_splits(tmp_path, {"path": path, "columns": {"score_margin": "bad"}}, TOKENIZER)
    assert [one.train.score_margins[0] for one in (with_scores, other)] == [2, 1]
    assert plain.fingerprint == with_scores.fingerprint == other.fingerprint
