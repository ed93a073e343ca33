"""Prompts for online runs: from rows of every format, with room for a completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rows import assistant, load_splits, user, write_rows
from support.tiny_tokenizer import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from dpo_pack.data.sources import Data
from dpo_pack.data.tokenization import Prompt
from dpo_pack.data.tokenizer import Tokenizer
from dpo_pack.system.errors import DataError

TOKENIZER: Tokenizer = tiny_tokenizer(chat_template=True)
USER = [user("how are you")]


def prompts(
    tmp_path: Path, rows: list[dict[str, Any]] | None = None, *, tokenizer: Tokenizer = TOKENIZER, **data: Any
) -> Data:
    path = tmp_path / "prompts.jsonl"
    if rows is not None:
        write_rows(path, rows)
    data = {"train": str(path), "max_length": 64, **data}
    return load_splits(tmp_path, tokenizer=tokenizer, max_new_tokens=16, **data)


def train_prompts(splits: Data) -> tuple[Prompt, ...]:
    return splits.prompts


@pytest.mark.parametrize(
    "row, text",
    [
        ({"prompt": "ask me"}, "ask me"),
        ({"prompt": "ask me", "chosen": "a", "rejected": "b"}, "ask me"),
        ({"prompt": "ask me</s>"}, "ask me</s>"),  # the user's own EOS stays
        ({"chosen": "ask me this", "rejected": "ask me that"}, "ask me th"),
        ({"chosen": "\n\nHuman: hi\n\nAssistant: a", "rejected": "\n\nHuman: hi\n\nAssistant: b"},
         "\n\nHuman: hi\n\nAssistant:"),
        ({"prompt": USER}, "<s>user\nhow are you</s>\n<s>assistant\n"),
        ({"prompt": "how are you", "chosen": [*USER, assistant("a")],
          "rejected": [*USER, assistant("b")]},
         "<s>user\nhow are you</s>\n<s>assistant\n"),
        ({"first": [*USER, assistant("a")], "second": [*USER, assistant("b")], "better": 0, "weight": 0},
         "<s>user\nhow are you</s>\n<s>assistant\n"),
        ({"prompt_ids": [5, 6, 7]}, tiny_tokenizer().decode([5, 6, 7])),
        ({"prompt_ids": [5]}, tiny_tokenizer().decode([5])),
    ],
)  # fmt: skip
def test_a_prompt_is_read_from_every_kind_of_row(row: dict[str, Any], text: str, tmp_path: Path) -> None:
    data = prompts(tmp_path, [row])
    (prompt,) = train_prompts(data)
    assert data.train.weights == 1  # a weight is one of a pair, which a prompt is not
    assert prompt.text == text and prompt.row_number == 1
    assert prompt.ids.tolist() == (row.get("prompt_ids") or tiny_tokenizer()(text)["input_ids"])
    assert (prompt.messages is None) == ("how are you" not in text)
    assert prompt.messages is None or list(prompt.messages) == USER


def test_an_eos_that_the_tokenizer_adds_does_not_end_a_prompt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    words = tokenizer("ask me")["input_ids"]
    add_eos = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = add_eos
    assert tokenizer("ask me")["input_ids"] == [*words, tokenizer.eos_token_id]
    (prompt,) = train_prompts(prompts(tmp_path, [{"prompt": "ask me"}], tokenizer=tokenizer))
    assert prompt.ids.tolist() == words


def test_a_columnar_source_needs_a_prompt_column_only(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["one", "two"], "noise": [1, 2]}), tmp_path / "q.parquet")
    source = {"path": str(tmp_path / "q.parquet"), "columns": {"prompt": "question"}}
    assert [p.text for p in train_prompts(prompts(tmp_path, train=[source]))] == ["one", "two"]
    with pytest.raises(DataError, match=r"no column 'prompt'.*data\.train\.0\.columns"):
        prompts(tmp_path, train=[str(tmp_path / "q.parquet")])


def test_a_prompt_leaves_room_for_its_completion_or_is_dropped_cut_or_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a b c"}, {"prompt": "a b " * 40}]
    dropped = prompts(tmp_path, rows)
    assert len(train_prompts(dropped)) == 1
    source = dropped.report["train"]["sources"][0]
    assert source["dropped"] == {"too_long": {"rows": 1, "line_numbers": [2]}} and source["rows_read"] == 2
    cut = train_prompts(prompts(tmp_path, rows, truncation="prompt_left"))
    assert [len(p.ids) for p in cut] == [len(tiny_tokenizer()("a b c")["input_ids"]), 64 - 16]
    with pytest.raises(
        DataError, match=r"prompts\.jsonl line 2: .*data\.max_length is 64; too_long: 1 of 2 rows; raise"
    ):
        prompts(tmp_path, rows, truncation="error")


def test_bad_rows_stop_the_run_or_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "one"}, {"prompt": 3}, {"prompt": ""}, {"prompt": "two"}]
    with pytest.raises(DataError, match=r"prompts\.jsonl line 2: prompt is a number, not text"):
        prompts(tmp_path, rows)
    skipped = prompts(tmp_path, rows, on_bad_row="skip")
    assert [p.text for p in train_prompts(skipped)] == ["one", "two"]
    assert set(skipped.report["train"]["sources"][0]["dropped"]) == {"wrong_type", "empty_prompt"}
    with pytest.raises(DataError, match="no prompts left of 1 rows"):
        prompts(tmp_path, [{"prompt": ""}], on_bad_row="skip")


def test_held_out_prompts_are_a_source_or_a_fraction_that_training_never_sees(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {number % 10}"} for number in range(20)]
    splits = prompts(tmp_path, rows, eval={"fraction": 0.2})
    held_out = {p.text for p in splits.eval_prompts["held_out"]}
    assert held_out and held_out.isdisjoint(p.text for p in splits.prompts)
    assert splits.train.num_pairs == len(splits.prompts) == 20 - len(splits.eval_prompts["held_out"])
    named = prompts(tmp_path, eval=[{"path": str(tmp_path / "prompts.jsonl"), "max_pairs": 3}])
    assert len(named.eval_prompts["prompts"]) == 3
    assert named.report["eval"]["prompts"]["source"]["rows_read"] == 3
