"""The name of a pair is a hash of what its row has, whatever becomes of it later."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.rows import assistant, load_splits, user, write_rows
from support.tiny_pictures import encoded, picture, picture_processor, picture_tokenizer, trl_row
from support.tiny_tokenizer import tiny_tokenizer

TEXT = {"prompt": "q " * 9, "chosen": " yes", "rejected": " no"}
SIDES = {"chosen": [assistant("yes")], "rejected": [assistant("no")]}
CHAT: dict[str, Any] = {"prompt": [user("q")], **SIDES, "tools": [{"name": "t"}]}


def names(tmp_path: Path, row: dict[str, Any], tokenizer: Any = None, **settings: Any) -> list[str]:
    path = write_rows(tmp_path / "pairs.jsonl", [row])
    return load_splits(tmp_path, path, tokenizer or tiny_tokenizer(), **settings).train.pair_names


def test_a_pair_has_the_hash_of_prompt_answers_and_tools(tmp_path: Path) -> None:
    chat = tiny_tokenizer(chat_template=True)
    for row, tokenizer in ((TEXT, None), (CHAT, chat)):
        parts = [row["prompt"], row["chosen"], row["rejected"], row.get("tools")]
        written = json.dumps(parts, sort_keys=True)
        expected = hashlib.blake2b(written.encode(), digest_size=16).hexdigest()
        assert names(tmp_path, row, tokenizer) == [expected]
    ids = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}
    expected = hashlib.blake2b(b"[[5, 6], [7], [8], null]", digest_size=16).hexdigest()
    assert names(tmp_path, ids) == [expected]


@pytest.mark.parametrize("key", TEXT)
def test_another_prompt_or_answer_has_another_name(tmp_path: Path, key: str) -> None:
    assert names(tmp_path, TEXT) != names(tmp_path, {**TEXT, key: f"{TEXT[key]}!"})


def test_no_template_system_prompt_or_truncation_changes_the_name(tmp_path: Path) -> None:
    chat, other = tiny_tokenizer(chat_template=True), tiny_tokenizer(chat_template=True)
    other.chat_template = str(other.chat_template).replace("<s>", "</s>")
    name = names(tmp_path, CHAT, chat)
    assert name == names(tmp_path, CHAT, other, system_prompt="Be kind.")
    assert name == names(tmp_path, {**CHAT, "weight": 2, "chat_template_kwargs": {"thinking": True}}, chat)
    assert name != names(tmp_path, {**CHAT, "tools": [{"name": "u"}]}, chat)
    short = {"max_length": 12, "truncation": "prompt_left"}
    assert names(tmp_path, TEXT) == names(tmp_path, TEXT, **short)


def test_an_image_is_named_by_its_bytes_in_whatever_place_and_size_it_is(tmp_path: Path) -> None:
    first, second = encoded(picture(1)), encoded(picture(2))
    for name, content in (("a.png", first), ("b.png", first), ("c.png", second)):
        (tmp_path / name).write_bytes(content)

    def of(file: str, **settings: Any) -> list[str]:
        images = picture_processor()
        return names(tmp_path, trl_row([file]), picture_tokenizer(), images=images, **settings)

    assert of("a.png") == of("b.png") == of("a.png", max_pixels=600)
    assert of("a.png") != of("c.png")
