"""What a row says is the same whatever form it has on its way: types of values, JSON text, other layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from support.rows import said, tokenization_settings, write_rows
from support.tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dpo_pack.data.columns import open_dialogues, side_of
from dpo_pack.data.faults import source_notes
from dpo_pack.data.formats import FORMATS, SIDES, Pair
from dpo_pack.data.ingest import Ingestion
from dpo_pack.data.sources import load_source, locate_source
from dpo_pack.data.tokenization import read_row
from dpo_pack.data.values import BadRow
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.system.errors import DataError, RecipeError

TOKENIZER: Any = tiny_tokenizer(chat_template=True)
TOKENIZER.chat_template = TOKENIZER.chat_template.replace(
    "(message.content or '')",
    "(message.content or '') + (message.tool_calls | tojson if message.tool_calls else '')",
)


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])]


ASK, GOOD, BAD = said("user", "why"), said("assistant", "good"), said("assistant", "bad")
CALLS: list[dict[str, Any]] = [
    {"prompt": [ASK], "chosen": call(day="2024-05-02", n="007"), "rejected": [BAD]},
    {"prompt": [ASK], "chosen": call(expr=2.5, n=3), "rejected": [BAD]},
]


def pairs_of(path: Path | str, data: dict[str, Any] | None = None, **source: Any) -> list[Pair]:
    recipe = SourceRecipe.model_validate({"path": str(path), **source})
    ingestion = Ingestion(
        located=locate_source(recipe, "data.train.0", None),
        source=recipe,
        data=DataRecipe.model_validate({"train": str(path), **(data or {})}),
        tokenizer=TOKENIZER,
    )
    with ingestion.start() as rows:
        return [kept.row.pair for batch in ingestion.batches(rows) for kept in batch.kept]


def notes(path: Path, tokenizer: Any, **source: str) -> str:
    return "\n".join(source_notes(summary_of(path, tokenizer, **source)))


def summary_of(path: Path, tokenizer: Any, **source: Any) -> Any:
    data = DataRecipe.model_validate({"train": {"path": str(path), **source}})
    located = locate_source(data.train[0], "data.train.0", None)
    ingestion = Ingestion(located=located, source=data.train[0], data=data, tokenizer=tokenizer, max_rows=9)
    return load_source(ingestion, "", path).store.summary


def rows_file(tmp_path: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_rows(tmp_path / name, list(rows))
    return tmp_path / name


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "saved", "files"])
def test_values_keep_their_type_in_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    expected = pairs_of(rows_file(tmp_path, *CALLS))
    assert [pair.chosen[0]["tool_calls"][0]["function"]["arguments"] for pair in expected] == [  # type: ignore
        {"day": "2024-05-02", "n": "007"},
        {"expr": 2.5, "n": 3},
    ]
    made = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert "Json" in repr(made.features["chosen"])
    if name == "files":
        rows_file(tmp_path, CALLS[0], name="files/a.jsonl")
        rows_file(tmp_path, CALLS[1], name="files/b.jsonl")
    elif name == "saved":
        made.save_to_disk(tmp_path / name)
    elif name == "rows.parquet":
        made.to_parquet(tmp_path / name)
    else:
        table = made.with_format("arrow")[:]
        with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    assert pairs_of(tmp_path / name) == expected


def test_maps_are_objects_and_bytes_are_text(tmp_path: Path) -> None:
    options = pa.array([[("thinking", "yes")]], pa.map_(pa.string(), pa.string()))
    columns = {"prompt": [[ASK]], "chosen": [[GOOD]], "rejected": [[BAD]]}
    pq.write_table(pa.table({**columns, "chat_template_kwargs": options}), tmp_path / "a.parquet")
    assert pairs_of(tmp_path / "a.parquet")[0].template_options == {"thinking": "yes"}
    table = pa.table({"prompt": [b"why"], "chosen": [b" good"], "rejected": [b" bad"]})
    pq.write_table(table, tmp_path / "b.parquet")
    assert pairs_of(tmp_path / "b.parquet")[0].chosen == " good"
    pq.write_table(table.set_column(1, "chosen", [[b"\xff\xfe"]]), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="'chosen' is binary, and its bytes are no UTF-8 text"):
        pairs_of(tmp_path / "c.parquet")


def test_a_leaf_that_json_does_not_have_is_a_bad_row_that_names_the_key() -> None:
    row = {"prompt": [ASK], "chosen": call(day=date(2024, 5, 2)), "rejected": [BAD]}
    with pytest.raises(BadRow, match=r"no_json_type.*chosen has a date \(2024-05-02\)"):
        FORMATS["conversational"].pair(row)
    with pytest.raises(BadRow, match=r"no_json_type.*chosen has a date \(2024-05-02\)"):
        FORMATS["preference"].pair({"prompt": "when", "chosen": date(2024, 5, 2), "rejected": "never"})


def shared(role: str, content: str) -> dict[str, str]:
    return {"from": {"user": "human", "assistant": "gpt"}[role], "value": content}


LISTS = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
WHOLE = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}


@pytest.mark.parametrize(
    "row",
    [
        {key: json.dumps(value) for key, value in LISTS.items()},
        {key: json.dumps(value) for key, value in WHOLE.items()},
        {key: repr(value) for key, value in LISTS.items()},
        {key: repr(value).replace("}, {", "}\n {") for key, value in WHOLE.items()},  # as numpy prints
        {"messages": json.dumps([ASK]), "chosen": "good", "rejected": "bad"},
        {key: {k: [m[k] for m in value] for k in ("role", "content")} for key, value in LISTS.items()},
        {
            "input": {"messages": [ASK], "tools": []},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        {"prompt": "why", "chosen": json.dumps([ASK, GOOD]), "rejected": json.dumps([ASK, BAD])},
        {key: json.dumps({"messages": value, "tools": []}) for key, value in WHOLE.items()},
        {key: str({"messages": value}) for key, value in WHOLE.items()},
        {key: {"conversations": [shared(**message) for message in value]} for key, value in LISTS.items()},
        {key: [{**shared(**message), "id": key} for message in value] for key, value in WHOLE.items()},
        {"prompt": [ASK], "answers": [{"score": 1, "response": "bad"}, {"score": 2.5, "response": "good"}]},
        {"prompt": [ASK], "answers": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}]},
        {"first": WHOLE["rejected"], "second": WHOLE["chosen"], "better": "model_b"},
        {"messages": WHOLE["chosen"], "rejected_response": "bad"},
        {"messages": json.dumps(WHOLE["chosen"]), "rejected_messages": WHOLE["rejected"]},
        {"prompt": "why", "first": "good", "second": "bad", "better": "A"},
        {"prompt": "why", "first": "bad", "second": "good", "preference": "second"},
    ],
)
def test_rows_of_other_forms_are_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    (pair,) = pairs_of(rows_file(tmp_path, row))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([ASK], [GOOD], [BAD])


def test_messages_in_a_text_that_is_not_read_are_no_answer(tmp_path: Path) -> None:
    """`datasets` prints a list in a message as a numpy array, where it writes CSV."""
    printed = str([{**GOOD, "tool_calls": "LIST"}]).replace("'LIST'", "array([{'name': 'f'}], dtype=object)")
    path = rows_file(tmp_path, {"prompt": str([ASK]), "chosen": printed, "rejected": str([BAD])})
    with pytest.raises(DataError, match="chosen is a list of messages as text.*; store it as JSON"):
        pairs_of(path)


OBJECTS = {key: json.dumps({"messages": value}) for key, value in LISTS.items()}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": json.dumps([ASK]), "chosen": '["a"]', "rejected": '{"role": ["b"]}'},
        {**OBJECTS, "prompt": "why"},
        {**OBJECTS, "rejected": "bad"},
    ],
)
def test_text_that_happens_to_be_json_stays_text(row: dict[str, str], tmp_path: Path) -> None:
    (pair,) = pairs_of(rows_file(tmp_path, row))
    assert (pair.prompt, pair.chosen, pair.rejected) == tuple(row.values())


def test_an_input_is_a_dialogue_of_openai_in_any_roles_or_text_of_alpaca(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "instruction": "judge",
        "input": OBJECTS["prompt"],
        "chosen": "good",
        "rejected": "bad",
    }
    (pair,) = pairs_of(rows_file(tmp_path, row))
    assert pair.prompt == [said("user", f"judge\n{OBJECTS['prompt']}")]
    asked = [said("critic", "why")]
    row = {"input": {"messages": asked}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
    open_dialogues(row)
    assert FORMATS["openai"].pair(row).prompt == asked


def test_columns_may_name_a_key_in_a_column(tmp_path: Path) -> None:
    row = {"input": {"messages": [ASK]}, "good": [GOOD], "bad": [BAD]}
    columns = {"prompt": "input.messages", "chosen": "good", "rejected": "bad"}
    (expected,) = pairs_of(rows_file(tmp_path, row), columns=columns)
    assert expected.prompt == [ASK]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert pairs_of(tmp_path / "a.parquet", columns=columns) == [expected]
    exact = {"input.messages": [ASK], "good": [GOOD], "bad": [BAD]}
    assert pairs_of(rows_file(tmp_path, exact, name="b.jsonl"), columns=columns) == [expected]
    both = {**row, **exact, "input": {"messages": "other"}}
    with pytest.raises(DataError, match="'input.messages' and such a key of an object"):
        pairs_of(rows_file(tmp_path, both, name="c.jsonl"), columns=columns)


CALL = {"name": "f", "arguments": {"city": "Rome"}}
CALLING = said("assistant", None, tool_calls=[{"type": "function", "function": CALL}])


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    ("row", "prompt", "chosen"),
    [
        (
            {"conversations": [shared("user", "why"), {"from": "function_call", "value": json.dumps(CALL)},
                               {"from": "observation", "value": "21"}],
             "chosen": shared("assistant", "good")},
            [ASK, CALLING, said("tool", "21")], [GOOD],
        ),
        (
            {"conversations": [shared("user", "why")],
             "chosen": {"from": "function_call", "value": json.dumps([CALL])}}, [ASK], [CALLING],
        ),
        (
            {"messages": [ASK, said("tool_call", json.dumps(CALL)), said("tool_response", "21"), GOOD]},
            [ASK, CALLING, said("tool", "21")], [GOOD],
        ),
        (
            {key: json.dumps({"messages": [one]})
             for key, one in zip(LISTS, (ASK, CALLING, BAD), strict=True)},
            [ASK], [CALLING],
        ),
    ],
)  # fmt: skip
def test_calls_and_their_tools_are_read_in_every_form(
    row: dict[str, Any], prompt: Any, chosen: Any, file: str, tmp_path: Path
) -> None:
    tools = [{"name": "f", "description": "tells"}]
    for owner in ({"tools": json.dumps(tools)}, {"tools": tools}):
        side = "rejected_response" if "messages" in row else "rejected"
        rows_file(tmp_path, {side: "bad", **row, **owner})
        if file == "rows.parquet":
            pq.write_table(pa.Table.from_pylist([{side: "bad", **row, **owner}]), tmp_path / file)
        (pair,) = pairs_of(tmp_path / file)
        assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, chosen, [BAD])
        assert pair.template_options == {"tools": tools}


def test_objects_with_tools_must_agree_and_keep_them(tmp_path: Path) -> None:
    tools = [{"name": "f"}]
    row = {key: json.dumps({"messages": value, "tools": tools}) for key, value in WHOLE.items()}
    assert [pair.template_options for pair in pairs_of(rows_file(tmp_path, row))] == [{"tools": tools}]
    for other, reason in (
        ({"tools": [{"name": "g"}]}, "contradicting"),
        ({"system": "be kind"}, "wrong_type"),
    ):
        wrong = {**row, "rejected": {"messages": WHOLE["rejected"], **other}}
        with pytest.raises(DataError, match=reason):
            pairs_of(rows_file(tmp_path, wrong))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "why", "good": "good", "bad": "bad", "other": 1}', None),
        ("{'question': 'why', 'good': 'good', 'bad': 'bad', 'other': 1}", None),
        ('[{"question": "why"}]', "text is a list, neither an object nor JSON of one"),
        ("plain words", "text is text, neither an object nor JSON of one"),
        ('{"q": "why"}', "text has q"),
        ("{1: 'why'}", "text has 1"),
    ],
)
def test_columns_may_name_a_key_in_json_text(text: str, says: str | None, tmp_path: Path) -> None:
    columns = {"instruction": "text.question", "chosen": "text.good", "rejected": "text.bad"}
    path = rows_file(tmp_path, {"text": text, "id": 1})
    if says:
        with pytest.raises(DataError, match=f"no column 'text.question'.*; {says}"):
            pairs_of(path, columns=columns)
        return
    (pair,) = pairs_of(path, columns=columns)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([ASK], [GOOD], [BAD])
    assert summary_of(path, TOKENIZER, columns=columns)["columns_not_read"] == ["id", "text.other"]


def test_the_side_that_is_not_chosen_is_rejected() -> None:
    rejected = ("not_chosen", "less_preferred", "dispreferred", "non_preferred_output", "lessPreferred")
    chosen = ("chosen", "more_preferred", "preferred_output", "notes_chosen")
    assert [*map(side_of, (*rejected, *chosen))] == ["rejected"] * 5 + ["chosen"] * 4


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LFS, "Git LFS"),
        ("why".encode("utf-16"), "UTF-16"),
        (b"<!DOCTYPE html>", "a page"),
        (b"[{}]", "array"),
    ],
)
def test_files_are_called_what_they_are(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=says):
        pairs_of(tmp_path / "a.jsonl")


def test_template_options_come_from_the_recipe_the_source_and_the_row() -> None:
    options: Any = {"chat_template_kwargs": {"a": 0, "b": 1, "thinking": 2}}
    settings = tokenization_settings("conversational", TOKENIZER, **options)
    settings = replace(settings, source=SourceRecipe(path="a.jsonl", chat_template_kwargs={"a": 1}))
    read = read_row(1, {**LISTS, "chat_template_kwargs": {"thinking": 3}}, settings)
    assert read.pair.template_options == {"a": 1, "b": 1, "thinking": 3}
    with pytest.raises(Exception, match="dpo-pack sets tokenize"):
        DataRecipe.model_validate({"train": "a.jsonl", "chat_template_kwargs": {"tokenize": True}})


def test_an_option_that_the_template_does_not_have_is_refused(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]})
    assert pairs_of(path, {"chat_template_kwargs": {"thinking": True}})
    with pytest.raises(
        RecipeError, match=r"chat_template_kwargs\.thinkng .*the chat template has no thinkng"
    ):
        pairs_of(path, chat_template_kwargs={"thinkng": True})


def test_an_option_of_a_row_that_the_template_does_not_have_makes_a_bad_row(tmp_path: Path) -> None:
    empty = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "chat_template_kwargs": {"other": ""}}
    path = rows_file(tmp_path, {**empty, "chat_template_kwargs": {"thinking": True}}, empty)
    assert len(pairs_of(path)) == 2
    wrong = rows_file(tmp_path, empty, {**empty, "chat_template_kwargs": {"thinkng": False}}, name="b.jsonl")
    with pytest.raises(
        DataError, match="line 2: the row's chat_template_kwargs has thinkng, .*: null}, which"
    ):
        pairs_of(wrong)
    assert len(pairs_of(wrong, columns={"chat_template_kwargs": None})) == 2


def test_texts_that_a_chat_model_would_get_otherwise_are_told(tmp_path: Path) -> None:
    plain = {"prompt": "why", "chosen": " a", "rejected": " b"}
    rendered = {**plain, "prompt": "<s>user\nwhy</s>\n<s>assistant\n"}
    assert "in 1 of 2 pairs texts are without the marks of the chat template" in notes(
        rows_file(tmp_path, plain, rendered), TOKENIZER
    )
    dialogue = {side: f"\n\nHuman: why\n\nAssistant: {side}" for side in SIDES}
    told = notes(dialogues := rows_file(tmp_path, dialogue), TOKENIZER)
    assert "in 1 of 1 pairs dialogues are without the marks" in told and "turns: messages" in told
    assert "template" not in notes(dialogues, TOKENIZER, format="transcript", turns="messages")
    for path in (rows_file(tmp_path, plain), dialogues):
        assert "template" not in notes(path, tiny_tokenizer())


def test_tokens_that_stand_for_unknown_texts_are_told(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(("<unk>", "<s>", "</s>", "why", "a", "b"))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    path = rows_file(tmp_path, {"prompt": "why", "chosen": " a \U0001f600 x", "rejected": " b"})
    for unk, told in (("<unk>", True), ("</s>", False)):  # GPT-2 names EOS, and never writes it
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=unk, **named)
        assert (
            "2 tokens stand for texts that this tokenizer does not know" in notes(path, tokenizer)
        ) == told


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        (("train.jsonl", "test.jsonl"), ""),
        (("train.jsonl", "more.jsonl", "dataset_info.json", ".cache/a.json"), "more.jsonl"),
        (("a.jsonl", "b.csv", "c.csv"), "a.jsonl"),
    ],
)
def test_files_of_a_folder_in_no_split_are_told(files: tuple[str, ...], unread: str, tmp_path: Path) -> None:
    for name in files:
        path = rows_file(tmp_path, {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, name=name)
        if name.endswith(".csv"):
            path.write_text("prompt,chosen,rejected\nwhy, a, b\n")
    told = f"files of the directory that are not read (1): {unread}"
    assert (told in notes(tmp_path, TOKENIZER).splitlines()) == bool(unread)


def test_a_prompt_that_ends_with_an_answer_is_refused_or_goes_on_as_one_turn(tmp_path: Path) -> None:
    begun = {"prompt": [ASK, said("assistant", "be")], "chosen": [GOOD], "rejected": [BAD]}
    path = rows_file(tmp_path, begun)
    with pytest.raises(DataError, match="answered_prompt.*set data.continue_final_message: true"):
        pairs_of(path)
    settings = tokenization_settings("conversational", TOKENIZER, continue_final_message=True)
    prompt, chosen, _ = read_row(1, begun, settings).texts
    _, whole, _ = read_row(1, {**LISTS, "chosen": [said("assistant", "begood")]}, settings).texts
    assert prompt.endswith("be") and chosen == whole and chosen.startswith(prompt)
    assert len(pairs_of(path, {"continue_final_message": True})) == 1
