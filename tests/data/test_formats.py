"""Rows become pairs, or are refused with the reason."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import assistant, user

from dpo_pack.data.formats import (
    FORMATS,
    BadRow,
    Message,
    Pair,
    Row,
    _as_messages,
    is_media_name,
    possible_formats,
)
from dpo_pack.data.ingest import _TRUNCATION_REASONS


def parts(pair: Pair) -> tuple[Any, Any, Any]:
    return pair.prompt, pair.chosen, pair.rejected


def naive_implicit_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """TRL 1.16's `extract_prompt`, written as it is there (0 < the place where the two part)."""
    index = 0
    for index in range(min(len(chosen), len(rejected))):
        if chosen[index] != rejected[index]:
            if chosen[index - 1] == " ":
                index -= 1
            break
    return chosen[:index], chosen[index:], rejected[index:]


def test_preference_takes_the_three_texts_as_they_are() -> None:
    pair = FORMATS["preference"].pair({"prompt": " Q ", "chosen": " yes", "rejected": " no ", "other": 1})
    assert parts(pair) == (" Q ", " yes", " no ")
    assert pair.weight == 1.0


@given(st.text("ab ", min_size=1, max_size=6), st.text("ab ", max_size=5), st.text("ab ", max_size=5))
def test_an_implicit_text_prompt_is_the_one_trl_finds(start: str, chosen: str, rejected: str) -> None:
    expected = naive_implicit_prompt(start + chosen, start + rejected)
    try:
        pair = FORMATS["preference"].pair({"chosen": start + chosen, "rejected": start + rejected})
    except BadRow as bad:
        assert (bad.reason == "no_common_prompt") == (expected[0] == "")
        assert bad.reason == "no_common_prompt" or not all(text.strip() for text in expected[1:])
    else:
        assert parts(pair) == expected


def test_texts_that_begin_differently_have_no_implicit_prompt() -> None:
    # TRL's loop looks at the last character here and takes all of " " but that for the prompt.
    with pytest.raises(BadRow, match="no_common_prompt"):
        FORMATS["preference"].pair({"chosen": "yes ", "rejected": "no"})


def test_a_transcript_is_split_at_its_last_assistant_turn() -> None:
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pair = FORMATS["transcript"].pair({"chosen": f"{start} good", "rejected": f"{start} bad"})
    assert parts(pair) == (start, " good", " bad")


def test_a_conversation_with_a_prompt_is_taken_as_it_is() -> None:
    row = {"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    assert parts(FORMATS["conversational"].pair(row)) == (row["prompt"], row["chosen"], row["rejected"])


def test_an_implicit_conversational_prompt_is_the_messages_both_begin_with() -> None:
    start = [user("a"), assistant("b"), user("c")]
    row = {"chosen": [*start, assistant("yes")], "rejected": [*start, assistant("no")]}
    assert parts(FORMATS["conversational"].pair(row)) == (start, [assistant("yes")], [assistant("no")])


def test_where_one_conversation_continues_the_other_the_last_common_message_is_a_completion() -> None:
    start = [user("a"), assistant("b")]
    row = {"chosen": start, "rejected": [*start, user("c")]}
    expected = [user("a")], [assistant("b")], [assistant("b"), user("c")]
    assert parts(FORMATS["conversational"].pair(row)) == expected


def test_a_turn_with_tool_calls_is_one_completion() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    called = [call, {"role": "tool", "content": "result"}, assistant("yes")]
    row = {"chosen": [user("a"), *called], "rejected": [user("a"), assistant("no")]}
    assert parts(FORMATS["conversational"].pair(row)) == ([user("a")], called, [assistant("no")])


def test_names_of_images_are_told_from_names_that_hold_the_word() -> None:
    media = ["image", "Images", "image_url", "imageUrl", "chosen_image", "input_audio", "video_path", "img"]
    assert [name for name in media if not is_media_name(name)] == []
    others = ["prompt", "imagery", "num_images_seen", "image_caption", "imagine", "audience", "type"]
    assert [name for name in others if is_media_name(name)] == []


@pytest.mark.parametrize("prompt", ["a", "c", [user("a"), assistant("b"), user("c")]])
def test_a_prompt_that_the_conversations_repeat_is_not_doubled(prompt: object) -> None:
    start = [user("a"), assistant("b"), user("c")]
    row = {"prompt": prompt, "chosen": [*start, assistant("yes")], "rejected": [*start, assistant("no")]}
    assert parts(FORMATS["conversational"].pair(row)) == (start, [assistant("yes")], [assistant("no")])


def test_a_text_prompt_that_the_conversations_lack_is_refused() -> None:
    row = {
        "prompt": "something else",
        "chosen": [user("a"), assistant("yes")],
        "rejected": [user("a"), assistant("no")],
    }
    with pytest.raises(BadRow, match="prompt_mismatch"):
        FORMATS["conversational"].pair(row)


def test_keys_that_hold_null_are_as_good_as_absent_at_any_depth() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Paris", "expr": None, "days": [1, None]}}}
    row: dict[str, Any] = {
        "prompt": [{**user("hi"), "tool_calls": None}],
        "chosen": [user("hi"), {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}],
        "rejected": [{"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]}],
        "tools": [{"name": "f", "parameters": {"city": {"type": "string", "enum": None}}}],
        "chat_template_kwargs": {"thinking": None, "documents": [{"title": "t", "text": None}]},
    }
    pair = FORMATS["conversational"].pair(row)
    plain = {"function": {"name": "f", "arguments": {"city": "Paris", "days": [1, None]}}}
    assert pair.prompt == [user("hi")]
    assert pair.chosen == [user("hi"), {"role": "assistant", "content": None, "tool_calls": [plain]}]
    assert pair.rejected == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert pair.template_options == {
        "tools": [{"name": "f", "parameters": {"city": {"type": "string"}}}],
        "documents": [{"title": "t"}],
    }
    assert row["chosen"][1]["tool_calls"] == [call]  # the row is as it was


def test_nulls_beside_it_do_not_hide_that_a_conversation_repeats_the_prompt() -> None:
    reasoning = {"reasoning_content": None}
    row = {
        "prompt": [user("a")],
        "chosen": [{**user("a"), **reasoning}, {**assistant("yes"), "reasoning_content": "because"}],
        "rejected": [{**user("a"), **reasoning}, {**assistant("no"), **reasoning}],
    }
    completions = [{**assistant("yes"), "reasoning_content": "because"}], [assistant("no")]
    assert parts(FORMATS["conversational"].pair(row)) == ([user("a")], *completions)
    without = {column: row[column] for column in ("chosen", "rejected")}
    assert parts(FORMATS["conversational"].pair(without)) == ([user("a")], *completions)
    assert FORMATS["conversational"].prompt(row).prompt == [user("a")]


def test_a_message_without_content_has_none() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    row = {"prompt": [user("hi")], "chosen": [call], "rejected": [assistant("no")]}
    assert FORMATS["conversational"].pair(row).chosen == [{**call, "content": None}]


def test_nulls_in_json_text_stay() -> None:
    row = {**MESSAGES, "tools": '[{"default": null}]', "chat_template_kwargs": '{"thinking": null}'}
    assert FORMATS["conversational"].pair(row).template_options == {
        "tools": [{"default": None}],
        "thinking": None,
    }


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_and_template_arguments_travel_with_the_pair(tools: object) -> None:
    row = {
        "prompt": [user("hi")],
        "chosen": [assistant("yes")],
        "rejected": [assistant("no")],
        "tools": tools,
        "chat_template_kwargs": {"thinking": False},
    }
    assert FORMATS["conversational"].pair(row).template_options == {
        "tools": [{"name": "f"}],
        "thinking": False,
    }
    without = FORMATS["conversational"].pair({**row, "tools": [], "chat_template_kwargs": None})
    assert without.template_options == {}


TEXTS = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(("value", "weight"), [(None, 1.0), (0, 0.0), (2.5, 2.5), ("0.5", 0.5)])
def test_a_weight_column_weighs_the_pair(value: object, weight: float) -> None:
    assert FORMATS["preference"].pair({**TEXTS, "weight": value}).weight == weight


MESSAGES = {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
IDS = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(2000), [])
TURNS = {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}

BAD_ROWS = [
    ("preference", {"prompt": "q", "rejected": "b"}, "missing_column"),
    ("preference", {}, "missing_column"),
    ("preference", {**TEXTS, "chosen": None}, "wrong_type"),
    ("preference", {**TEXTS, "prompt": None}, "wrong_type"),
    ("preference", {**TEXTS, "rejected": 3}, "wrong_type"),
    ("preference", {**TEXTS, "chosen": [assistant("a")]}, "wrong_type"),
    ("preference", {**TEXTS, "chosen": ""}, "empty_completion"),
    ("preference", {**TEXTS, "rejected": " \n"}, "empty_completion"),
    ("preference", {"chosen": "", "rejected": ""}, "no_common_prompt"),
    *(
        ("preference", {**TEXTS, "weight": weight}, "invalid_weight")
        for weight in (-1, float("nan"), float("inf"), True, "heavy", [1.0], 1e39, 10**400)
    ),
    ("transcript", {**TURNS, "chosen": "\n\nHuman: p\n\nAssistant: a"}, "no_common_prompt"),
    ("transcript", {**TURNS, "chosen": "no turns at all"}, "no_assistant_turn"),
    ("transcript", {**TURNS, "rejected": "\n\nHuman: q\n\nAssistant: "}, "empty_completion"),
    ("conversational", {**MESSAGES, "chosen": "a"}, "wrong_type"),
    ("conversational", {**MESSAGES, "chosen": ["a"]}, "wrong_type"),
    ("conversational", {**MESSAGES, "chosen": [{"content": "a"}]}, "wrong_type"),
    ("conversational", {**MESSAGES, "chosen": [{"role": "assistant", "content": 3}]}, "wrong_type"),
    ("conversational", {**MESSAGES, "chosen": [{"role": "assistant", "content": NESTED}]}, "wrong_type"),
    ("conversational", {**MESSAGES, "tools": NESTED}, "wrong_type"),
    ("conversational", {**MESSAGES, "prompt": None}, "wrong_type"),
    ("conversational", {**MESSAGES, "prompt": []}, "empty_prompt"),
    ("conversational", {**MESSAGES, "chosen": []}, "empty_completion"),
    ("conversational", {**MESSAGES, "chosen": [assistant(" ")]}, "empty_completion"),
    ("conversational", {**MESSAGES, "tools": "not JSON"}, "wrong_type"),
    ("conversational", {**MESSAGES, "tools": {"name": "f"}}, "wrong_type"),
    ("conversational", {**MESSAGES, "chat_template_kwargs": [1]}, "wrong_type"),
    *(
        ("conversational", {"chosen": [user("p"), assistant("a")], "rejected": rejected}, reason)
        for rejected, reason in (
            ([user("q"), assistant("b")], "no_common_prompt"),
            ([user("p"), assistant("b"), user("q"), assistant("a")], "no_common_prompt"),
            ([user("p"), user("q")], "no_assistant_turn"),
        )
    ),
    ("conversational", {"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no_common_prompt"),
    *(
        ("conversational", {**MESSAGES, "prompt": [{"role": "user", **message}]}, "media")
        for message in (
            {"content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]},
            {"content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]},
            {"content": [{"type": "input_audio", "input_audio": {"data": "UklG"}}]},
            {"content": [{"video": "a.mp4"}, {"text": "What is it?"}]},
            {"content": [{"type": "tool_result", "content": [{"type": "image", "source": "a.png"}]}]},
            {"content": "<image> What is it?", "images": ["a.png"]},
        )
    ),
    ("tokenized", TEXTS, "missing_column"),
    ("tokenized", {**IDS, "chosen_ids": [1.5]}, "wrong_type"),
    ("tokenized", {**IDS, "chosen_ids": [True]}, "wrong_type"),
    ("tokenized", {**IDS, "chosen_ids": "1 2"}, "wrong_type"),
]


@pytest.mark.parametrize(("format", "row", "reason"), BAD_ROWS)
def test_a_bad_row_is_refused_with_its_reason(format: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as raised:
        FORMATS[format].pair(row)
    assert raised.value.reason == reason
    assert raised.value.detail and "\n" not in raised.value.detail


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (TEXTS, "preference"),
        ({"chosen": "q a", "rejected": "q b"}, "preference"),
        (MESSAGES, "conversational"),
        ({**MESSAGES, "prompt": "q"}, "conversational"),
        (TURNS, "transcript"),
        ({**TURNS, "prompt": "q"}, "preference"),
        (IDS, "tokenized"),
    ],
)
def test_the_format_is_told_from_a_row(row: dict[str, Any], format: str) -> None:
    assert possible_formats(row, {})[0] == format


def test_every_reason_for_a_bad_row_has_a_row_in_the_docs() -> None:
    root = Path(__file__).resolve().parents[2]
    section = (root / "docs" / "data.md").read_text(encoding="utf-8").partition("\n## Bad rows\n")[2]
    cells = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.M)
    documented = {*re.findall(r"\w+", " ".join(cells)), *_TRUNCATION_REASONS}  # those are in section Length
    for file in sorted((root / "dpo_pack" / "data").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="BadRow"), args=[ast.Constant(value=reason), *_]):
                    assert reason in documented, f"docs/data.md has no row for {reason!r} ({file.name})"


def test_a_format_made_by_as_messages_may_have_options_of_its_completions() -> None:
    def completions(row: Row, *, good: str) -> tuple[list[Message], list[Message]]:
        return [assistant(good)], [assistant("bad")]

    functions = _as_messages(lambda row: [user(row["question"])], completions)
    pair = functions["pair"]({"question": "q"}, good="fine")
    assert parts(pair) == ([user("q")], [assistant("fine")], [assistant("bad")])
    assert functions["prompt"]({"question": "q"}, good="fine").prompt == [user("q")]
