"""Which tokens are scored, from rows to a store on disk: given by the row, or found from turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import refusal
from support.rows import assistant, said, user
from support.rows import load_splits as load
from support.rows import write_rows as write
from support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer

from dpo_pack.system.errors import DataError

ROW: dict[str, Any] = {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9, 2], "rejected_ids": [7, 10, 2]}


def refused(tmp_path: Path, row: dict[str, Any], **settings: Any) -> str:
    path = write(tmp_path / "pairs.jsonl", [ROW, ROW, {**ROW, **row}])
    return refusal(lambda: load(tmp_path, path, **settings), DataError)


def test_scored_tokens_of_rows_are_those_of_the_table_also_from_the_cache_and_after_rows_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.data.tokenization._BATCH_ROWS", 1)
    some = {**ROW, "chosen_weights": [1, 0, 0.0, 1.0], "rejected_weights": None}
    path = write(tmp_path / "pairs.jsonl", [ROW, some, ROW])
    for _ in range(2):
        table = load(tmp_path, path).train
        scored = [table.group(pair).scored for pair in range(3)]
        assert [of_pair and of_pair[0].tolist() for of_pair in scored] == [
            [True] * 4, [True, False, False, True], [True] * 4,
        ]  # fmt: skip
        assert scored[1] is not None and scored[1][1].all()
        assert table.chosen_scored.tolist() == [4, 2, 4] and table.chosen_lengths.tolist() == [4, 4, 4]
        assert table.group(1).completions[0].tolist() == [7, 8, 9, 2]


def test_a_changed_byte_of_scored_tokens_makes_the_store_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{**ROW, "chosen_weights": [1, 0, 0, 1]}])
    load(tmp_path, path)
    (file,) = (tmp_path / "cache" / "tokens").glob("*/scored.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    again = load(tmp_path, path)
    assert again.report["rows_tokenized"] == 1 and again.train.chosen_scored.tolist() == [2]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen_weights": [1, 1]}, "chosen_weights has 2 numbers for a completion of 4 tokens"),
        ({"chosen_weights": [1, 0.5, 0, 0]}, "chosen_weights is no list of 1 and 0"),
        ({"chosen_weights": [2, 1, 0, 0]}, "chosen_weights is no list of 1 and 0"),
        ({"chosen_weights": [1, -1, 0, 0]}, "chosen_weights is no list of 1 and 0"),
        ({"rejected_weights": [1, 0, float("nan")]}, "rejected_weights is no list of 1 and 0"),
        ({"rejected_weights": [0, 0, 0.0]}, "rejected_weights are all 0: the completion adds nothing"),
        ({"rejected_weights": [1, True, 0]}, "rejected_weights is no list of 1 and 0"),
        ({"rejected_weights": 1}, "rejected_weights is no list of 1 and 0"),
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


# ---- Turns of conversations

MARKS = CHAT_TEMPLATE.replace(
    "{{- '<s>' + message.role + '\n' + (message.content or '') + '</s>\n' }}",
    "{{- '<s>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{- message.content + '</s>' }}{% endgeneration %}"
    "{% else %}{{- message.content + '</s>' }}{% endif %}{{ '\n' }}",
)
REWRITES = CHAT_TEMPLATE.replace(
    "(message.content or '')",
    "(message.content if loop.last or message.role != 'assistant' else '~' + message.content)",
)
CALL = [assistant("call"), said("tool", "sunny"), assistant("It is sunny.")]
AGENT: dict[str, Any] = {"prompt": [user("the sky?")], "chosen": CALL, "rejected": [assistant("rain")]}
SIMPLE = {**AGENT, "chosen": CALL[:1]}


def chat_tokenizer(template: str = CHAT_TEMPLATE) -> Any:
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = template
    return tokenizer


def scored_text(tmp_path: Path, template: str, **settings: Any) -> list[str]:
    """The texts of the tokens that are scored, of chosen and of rejected."""
    tokenizer = chat_tokenizer(template)
    table = load(tmp_path, write(tmp_path / "chat.jsonl", [AGENT]), tokenizer=tokenizer, **settings).train
    pair = table.group(0)
    scored = pair.scored or [np.ones(len(ids), dtype=np.bool_) for ids in pair.completions]
    return [tokenizer.decode(ids[of_side]) for ids, of_side in zip(pair.completions, scored, strict=True)]


def test_only_what_the_assistant_says_is_scored_and_its_ends_of_turns_are(tmp_path: Path) -> None:
    assert "{% generation %}" in MARKS and REWRITES != CHAT_TEMPLATE
    rejected = "rain</s>\n"
    whole = "call</s>\n<s>tool\nsunny</s>\n<s>assistant\nIt is sunny.</s>\n"
    assert scored_text(tmp_path, CHAT_TEMPLATE) == ["call</s>\nIt is sunny.</s>\n", rejected]
    assert scored_text(tmp_path, MARKS) == ["call</s>It is sunny.</s>", rejected]
    for template in (CHAT_TEMPLATE, MARKS, REWRITES):
        texts = scored_text(tmp_path, template, scored_turns="all")
        assert texts[0].endswith("sunny</s>\n<s>assistant\nIt is sunny.</s>\n") and texts[1] == rejected
    assert scored_text(tmp_path, CHAT_TEMPLATE, scored_turns="all")[0] == whole


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [SIMPLE, SIMPLE, AGENT])
    with pytest.raises(DataError) as error:
        load(tmp_path, path, tokenizer=chat_tokenizer(REWRITES))
    message = str(error.value)
    assert message.startswith(
        f"{path} line 3: message 1 of chosen: the chat template writes earlier turns in an"
    )
    assert "; set data.scored_turns: all, or name another template in tokenizer.chat_template" in message
    assert "\n" not in message
    skipped = load(tmp_path, path, tokenizer=chat_tokenizer(REWRITES), on_bad_row="skip").train
    assert skipped.num_pairs == 2 and skipped.group(0).scored is None


def test_a_completion_in_which_the_assistant_says_nothing_is_refused_with_the_remedy(tmp_path: Path) -> None:
    row = {**AGENT, "rejected": [user("and bread?")]}
    path = write(tmp_path / "chat.jsonl", [row])
    with pytest.raises(
        DataError, match="rejected has nothing that the assistant says, only user; .* the role assistant,"
    ):
        load(tmp_path, path, tokenizer=chat_tokenizer())
    assert load(tmp_path, path, tokenizer=chat_tokenizer(), scored_turns="all").train.num_pairs == 1
