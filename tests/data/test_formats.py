"""Rows become pairs, or are refused with the reason."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import assistant, said, user

from dpo_pack.data.formats import FORMATS, TRANSCRIPT_TURNS, Pair
from dpo_pack.data.ingest import _TRUNCATION_REASONS
from dpo_pack.data.values import BadRow, is_media_name
from dpo_pack.recipe.data import FIELDS_OF_FORMAT


def test_each_format_has_its_columns() -> None:
    assert FORMATS.keys() == FIELDS_OF_FORMAT.keys()


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


ASKED = [user("a"), assistant("b"), user("c")]
YES, NO = [assistant("yes")], [assistant("no")]
DIALOGUES = {"chosen": [*ASKED, *YES], "rejected": [*ASKED, *NO]}
START = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
CALLED = [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "result"},
    assistant("yes"),
]
REASONED = [assistant("yes", reasoning_content="because")]
WITH_NULLS = {
    "chosen": [{**user("a"), "reasoning_content": None}, *REASONED],
    "rejected": [{**user("a"), "reasoning_content": None}, assistant("no", reasoning_content=None)],
}
CHOICE = {"chosen": "yes", "rejected": "no"}
INSTRUCTION = {"instruction": "do", **CHOICE}
HISTORY = [["hi", "yes"]]
TWO_SYSTEMS = {"messages": [said("system", "a"), user("q")], "system": "b", **CHOICE}
COMPARED = {"prompt": "a", "first": "yes", "second": "no"}
SWAPPED = {"prompt": "a", "first": "no", "second": "yes"}


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        (
            "preference",
            {"prompt": " Q ", "chosen": " yes", "rejected": " no ", "other": 1},
            (" Q ", " yes", " no "),
        ),
        *(
            ("preference", {"prompt": START, "chosen": " a", "rejected": text}, (START, " a", text))
            for text in (" b\n\nHuman: c\n\nAssistant: d",)
        ),
        ("transcript", {"chosen": f"{START} good", "rejected": f"{START} bad"}, (START, " good", " bad")),
        ("conversational", {"prompt": ASKED, "chosen": YES, "rejected": NO}, (ASKED, YES, NO)),
        ("conversational", DIALOGUES, (ASKED, YES, NO)),
        # A prompt that the conversations repeat is not doubled.
        *(("conversational", {"prompt": p, **DIALOGUES}, (ASKED, YES, NO)) for p in ("a", "c", ASKED)),
        # Where one conversation continues the other, the last common message is a completion.
        ("conversational", {"chosen": ASKED[:2], "rejected": ASKED}, (ASKED[:1], ASKED[1:2], ASKED[1:])),
        (
            "conversational",
            {"chosen": [user("a"), *CALLED], "rejected": [user("a"), *NO]},
            ([user("a")], CALLED, NO),
        ),
        ("conversational", WITH_NULLS, ([user("a")], REASONED, NO)),
        ("conversational", {"prompt": [user("a")], **WITH_NULLS}, ([user("a")], REASONED, NO)),
        ("messages", {**TWO_SYSTEMS, "system": "a"}, (TWO_SYSTEMS["messages"], YES, NO)),
        *(("alpaca", {**INSTRUCTION, "system": none}, ([user("do")], YES, NO)) for none in (None, "", " ")),
        (
            "alpaca",
            {**INSTRUCTION, "input": "this", "history": HISTORY},
            ([user("hi"), assistant("yes"), user("do\nthis")], YES, NO),
        ),
        *(
            ("compared", {**COMPARED, **first}, ([user("a")], YES, NO))
            for first in ({"preference": -3}, {"better": 0})
        ),
        *(
            ("compared", {**SWAPPED, **second}, ([user("a")], YES, NO))
            for second in ({"preference": "0.5"}, {"better": 1})
        ),
    ],
)
def test_what_rows_of_a_format_say(format: str, row: dict[str, Any], expected: tuple[Any, Any, Any]) -> None:
    assert parts(FORMATS[format].pair(row)) == expected


def test_names_of_images_are_told_from_names_that_hold_the_word() -> None:
    media = ["image", "Images", "image_url", "imageUrl", "chosen_image", "input_audio", "video_path", "img"]
    assert [name for name in media if not is_media_name(name)] == []
    others = ["prompt", "imagery", "num_images_seen", "image_caption", "imagine", "audience", "type"]
    assert [name for name in others if is_media_name(name)] == []


def test_keys_that_hold_null_are_as_good_as_absent_at_any_depth() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Paris", "expr": None, "days": [1, None]}}}
    row: dict[str, Any] = {
        "prompt": [{**user("hello"), "tool_calls": None}],
        "chosen": [user("hi"), {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}],
        "rejected": [{"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]}],
        "tools": [{"name": "f", "parameters": {"city": {"type": "string", "enum": None}}}],
        "chat_template_kwargs": {"thinking": None, "documents": [{"title": "t", "text": None}]},
    }
    pair = FORMATS["conversational"].pair(row)
    plain = {"function": {"name": "f", "arguments": {"city": "Paris", "days": [1, None]}}}
    assert pair.prompt == [user("hello")]
    assert pair.chosen == [user("hi"), {"role": "assistant", "content": None, "tool_calls": [plain]}]
    assert pair.rejected == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert pair.template_options == {
        "tools": [{"name": "f", "parameters": {"city": {"type": "string"}}}],
        "documents": [{"title": "t"}],
    }
    assert row["chosen"][1]["tool_calls"] == [call]  # the row is as it was


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


@pytest.mark.parametrize(
    ("start", "prompt"),
    [
        (START, ASKED),
        (START.strip(), ASKED),  # without the first line break
        ("Be kind.\nAlways." + START, [said("system", "Be kind.\nAlways."), *ASKED]),
        ("\n\nHuman: Human: a\nb\n\nAssistant:", [user("Human: a\nb")]),
    ],
)
def test_the_turns_of_a_transcript_are_messages(start: str, prompt: list[Any]) -> None:
    row = {"chosen": f"{start} yes", "rejected": f"{start} no\n", "prompt": "unread", "weight": 2.0}
    pair = TRANSCRIPT_TURNS.pair(row)
    assert (*parts(pair), pair.weight) == (prompt, YES, NO, 2.0)
    assert TRANSCRIPT_TURNS.prompt(row).prompt == prompt
    going_on = TRANSCRIPT_TURNS.pair({**row, "chosen": f"{start} so\n\nAssistant: yes"})
    assert parts(going_on) == (prompt, [assistant("so"), *YES], NO)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ("no turns at all", "no_assistant_turn"),
        (f"{START} yes\n\nHuman: no", "no_assistant_turn"),
        (f"{START} ", "empty_completion"),
        ("\n\nHuman: other\n\nAssistant: yes", "no_common_prompt"),
        (f"Be kind.{START} yes", "no_common_prompt"),  # rejected has no such text
        ("\n\nAssistant: yes", "no_common_prompt"),
        (None, "wrong_type"),
    ],
)
def test_a_transcript_whose_turns_make_no_pair_is_a_bad_row(chosen: Any, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        TRANSCRIPT_TURNS.pair({"chosen": chosen, "rejected": f"{START} no"})
    assert caught.value.reason == reason


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
    ("transcript", {**TURNS, "rejected": TURNS["rejected"] + "\n\nHuman: no"}, "no_assistant_turn"),
    ("preference", {"prompt": START, "chosen": " a", "rejected": " b\n\nHuman: c"}, "no_assistant_turn"),
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
    *(
        ("conversational", {"chosen": [*start, *YES], "rejected": [*start, *NO]}, "no_common_prompt")
        for start in ([], [assistant("b")])
    ),
    *(
        ("conversational", {**MESSAGES, "prompt": [{"role": "user", **message}]}, "media")
        for message in (
            {"content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]},
            {"content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]},
            {"content": [{"type": "input_audio", "input_audio": {"data": "UklG"}}]},
            {"content": [{"video": "a.mp4"}, {"text": "What is it?"}]},
            {"content": [{"type": "tool_result", "content": [{"type": "image", "source": "a.png"}]}]},
            {"content": "<image> What is it?", "images": ["a.png"]},
            {"content": [{"type": "image", "image": {"bytes": b"\xff\xd8"}}]},
        )
    ),
    ("conversational", {**MESSAGES, "prompt": [user([{"type": "text", "text": b"\xff"}])]}, "no_json_type"),
    ("conversational", {"prompt": "something else", **DIALOGUES}, "prompt_mismatch"),
    ("conversational", {**MESSAGES, "chosen": [user("q"), assistant("a")]}, "prompt_mismatch"),
    ("conversational", {**MESSAGES, "rejected": [user("q"), assistant("b")]}, "prompt_mismatch"),
    # TRL's loop looks at the last character here and takes all of " " but that for the prompt.
    ("preference", {"chosen": "yes ", "rejected": "no"}, "no_common_prompt"),
    *(
        ("compared", {"prompt": "why", "first": "good", "second": "bad", **change}, reason)
        for change, reason in (
            ({"preference": 0}, "tie"),
            ({"preference": None}, "wrong_type"),
            ({"preference": "much"}, "wrong_type"),
            ({}, "missing_column"),
            ({"better": 2}, "wrong_type"),
            ({"better": 0, "preference": 1}, "contradicting_columns"),
            ({"preference": -1, "first": 3}, "wrong_type"),
            ({"preference": -1, "first": user("why")}, "no_assistant_turn"),
            ({"preference": -1, "first": " "}, "empty_completion"),
            ({"better": "tie (bothbad)"}, "tie"),
            ({"better": "neither"}, "tie"),
            ({"better": "model_c"}, "wrong_type"),
        )
    ),
    *(
        ("ranked", {"prompt": "why", "answers": answers}, reason)
        for answers, reason in (
            ([{"answer": "a", "rank": 1}, {"answer": "b", "rank": 1}], "tie"),
            ([{"answer": "a", "rank": 1}], "too_few_answers"),
            ([{"answer": "a", "rank": 1}, {"answer": "b"}], "missing_column"),
            (["a", "b"], "wrong_type"),
        )
    ),
    *(
        ("alpaca", {**INSTRUCTION, **change}, "wrong_type")
        for change in ({"input": 3}, {"history": [["hi"]]}, {"history": "hi"}, {"system": 3})
    ),
    ("sharegpt", {"conversations": [{"from": "robot", "value": "{}"}], **CHOICE}, "unknown_role"),
    (
        "sharegpt",
        {"conversations": [user("q")], **CHOICE, "chosen": {"from": "gpt", "value": "", "weight": 1}},
        "empty_completion",
    ),
    ("sharegpt", {"conversations": [{"from": "function_call", "value": "f(1)"}], **CHOICE}, "wrong_type"),
    ("preference", {side: f'{{"q": "{side}"}}' for side in ("chosen", "rejected")}, "wrong_type"),
    ("messages", TWO_SYSTEMS, "two_system_prompts"),
    *(
        ("swift", {"messages": messages, "rejected_response": "bad"}, reason)
        for messages, reason in (
            ([1, 2], "wrong_type"),
            ([user("why"), "a"], "wrong_type"),
            ([user("why"), {"content": "a"}], "wrong_type"),
            ([{"from": ["x"]}], "unknown_role"),
            ([user("why")], "no_assistant_turn"),
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


def test_every_reason_for_a_bad_row_has_a_row_in_the_docs() -> None:
    root = Path(__file__).resolve().parents[2]
    section = (
        (root / "docs" / "data.md")
        .read_text(encoding="utf-8")
        .partition("\n## What is left out, and why?\n")[2]
    )
    cells = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.M)
    documented = {*re.findall(r"\w+", " ".join(cells)), *_TRUNCATION_REASONS}  # not in this table
    for file in sorted((root / "dpo_pack" / "data").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="BadRow"), args=[ast.Constant(value=reason), *_]):
                    assert reason in documented, f"docs/data.md has no row for {reason!r} ({file.name})"
