"""Remedies are followed: what a message tells the user to do ends with the pair that the row means."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rows import assistant, said, user, write_rows
from support.tiny_pictures import encoded, picture, picture_processor, picture_tokenizer
from support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from dpo_pack.data.faults import FAULTS, Origin, faults_of, remedy_of
from dpo_pack.data.ingest import _ABOUT_COLUMNS, _REMEDIES, Ingestion
from dpo_pack.data.sources import locate_source
from dpo_pack.recipe.schema import DataRecipe, SourceRecipe
from dpo_pack.system.errors import DataError

ASK, GOOD, BAD = user("why is it"), assistant("good one"), assistant("bad one")
ROW: dict[str, Any] = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
TEXTS = {"prompt": "why is it", "chosen": " good one", "rejected": " bad one"}
CALL = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
PICTURED = {**ROW, "images": ["a.png"]}
IDS = {"prompt_ids": [4, 5], "chosen_ids": [6, 2], "rejected_ids": [7, 2]}
OPEN = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"


def template(body: str = "{{ m.content or '' }}", end: str = "</s>\n", opens: str = OPEN) -> str:
    return f"{{% for m in messages %}}{{{{ '<s>' + m.role + '\n' }}}}{body}{end}{{% endfor %}}{opens}"


THREE_ROLES = template("{% if m.role in ['user', 'assistant'] %}{{ m.content or '' }}{% endif %}")
LAST_IS_OTHER = template("{{ '!' if loop.last and m.role == 'assistant' }}{{ m.content }}")
SO_FAR = [assistant("so"), user("and")]
TURNS = {**ROW, "chosen": [*SO_FAR, GOOD], "rejected": [*SO_FAR, BAD]}
JSON = {"chosen": '{"q": "why is it", "a": "good one"}', "rejected": '{"q": "why is it", "a": "bad one"}'}
DIALOGUE = {"chosen": "\n\nHuman: why is it\n\nAssistant: very\n\nAssistant: good one"}
DIALOGUE |= {"rejected": DIALOGUE["chosen"].replace("good", "bad")}
NAMED = {"id": "q1", "topic": "sky", "worse": "bad one", "better": "good one", "question: asked": "why is it"}
ANSWERS = [{"response": "bad one", "overall_score": 2.0}, {"response": "good one", "overall_score": 9.0}]
CHOICE = {"prompt": "why is it", "first": "good one", "second": "bad one"}
REASONED = {**ROW, "chosen": [{**GOOD, "reasoning_content": "hm"}]}
WRITES_REASONS = template("{{ (m.reasoning_content or '') ~ m.content }}")
# The code, a row (or rows), what the source and the run have, what the remedy says, and what follows it.
# Keys: those of the source and of data; row, template and images (model.images), bos (of the tokenizer).
CASES: list[tuple[str, Any, dict[str, Any], str, dict[str, Any]]] = [
    *(
        (code, row, {}, f"set data.train.0.columns: {{{line}}}", {"columns": columns})
        for code, row, line, columns in (
            ("wrong_type", {**ROW, "chosen": "good one", "rejected": "bad one"}, "messages: prompt",
             {"messages": "prompt"}),
            ("wrong_type", {**TEXTS, "chosen": GOOD, "rejected": BAD}, "instruction: prompt",
             {"instruction": "prompt"}),
            ("wrong_type", JSON, "instruction: chosen.q, chosen: chosen.a, rejected: rejected.a",
             {"instruction": "chosen.q", "chosen": "chosen.a", "rejected": "rejected.a"}),
            ("prompt_mismatch", {"prompt": "another", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
             "prompt: null", {"prompt": None}),
            ("missing_column", NAMED,
             "instruction: 'question: asked', chosen: better, rejected: worse",
             {"instruction": "question: asked", "chosen": "better", "rejected": "worse"}),
            ("missing_column", {"instruction": "why is it", "completions": ANSWERS},
             "prompt: instruction, answers: completions",
             {"prompt": "instruction", "answers": "completions"}),
            ("no_common_prompt", {"asked": [ASK], "chosen": [GOOD], "rejected": [BAD]}, "prompt: asked",
             {"prompt": "asked"}),
            ("unknown_option", {**ROW, "chat_template_kwargs": {"thinkng": True}},
             "chat_template_kwargs: null", {"chat_template_kwargs": None}),
        )
    ),
    ("role_not_written", {**ROW, "prompt": [said("critic", "why is it")]}, {"template": THREE_ROLES},
     "map the role to one that the template writes", {"row": ROW}),
    ("text_not_written", {**ROW, "prompt": [{"role": "user", "value": "why is it"}]}, {},
     "put all text into the message's content", {"row": ROW}),
    *(("reasoning_not_written", REASONED, {}, said_so, follow) for said_so, follow in (
        ("leave the reasoning out", {"row": ROW}),
        ("name another template in tokenizer.chat_template", {"template": WRITES_REASONS}))),
    ("call_not_written", {**ROW, "chosen": [{**GOOD, **CALL}]}, {}, "write the call as text into content",
     {"row": {**ROW, "chosen": [assistant("good one f")]}}),
    ("empty_completion", {**ROW, "chosen": [assistant(" ")]}, {}, "give it text", {"row": ROW}),
    ("empty_completion", ROW, {"template": template("{{ m.content if m.role == 'user' }}")},
     "give it content that a chat template writes", {"template": template()}),
    ("empty_completion", {**TEXTS, "chosen": " "}, {}, "of 1 rows; give it text", {"row": TEXTS}),
    ("template_error", {**ROW, "prompt": [said("critic", "why is it")]}, {"template": CHAT_TEMPLATE},
     "name another template in tokenizer.chat_template", {"template": template()}),
    ("rewritten_turns", TURNS, {"template": LAST_IS_OTHER}, "set data.scored_turns: all",
     {"scored_turns": "all"}),
    ("answered_prompt", {**ROW, "prompt": [ASK, assistant("very")]}, {},
     "set data.continue_final_message: true", {"continue_final_message": True}),
    ("answered_prompt", DIALOGUE, {"format": "transcript", "turns": "messages"},
     "set data.continue_final_message: true", {"continue_final_message": True}),
    ("no_json_type", {**ROW, "chosen": [{**GOOD, "day": datetime.date(2024, 5, 2)}]}, {}, "store it as text",
     {"row": {**ROW, "chosen": [{**GOOD, "day": "2024-05-02"}]}}),
    ("tie", [{**CHOICE, "preference": n} for n in (-1, 0, -2)], {},
     "remove such rows, or set data.on_bad_row: skip", {"on_bad_row": "skip"}),
    ("nothing_scored", {**ROW, "chosen": [said("tool", "good one")]}, {"template": template()},
     "data.scored_turns: all", {"scored_turns": "all"}),
    *(("media", PICTURED, {}, line, follow) for line, follow in (
        ("set model.images: true if the model reads", {"images": True}), ("or remove them", {"row": ROW}))),
    ("image_count", {**PICTURED, "photos": ["more/b.png"]}, {"images": True}, "in one column, one for each",
     {"row": PICTURED}),
    ("media_read", {**ROW, "picture": "a.png"}, {"images": True}, "as image in data.train.0.columns",
     {"columns": {"image": "picture"}}),
    ("missing_image", {**PICTURED, "images": ["b.png"]}, {"images": True}, "set data.train.0.image_folder",
     {"image_folder": "more"}),
    ("image_outside", {**PICTURED, "images": ["{}/more/b.png"]}, {"images": True, "image_folder": "other"},
     "set data.train.0.image_folder to a folder that has them all", {"image_folder": "more"}),
    ("too_long", TEXTS, {"truncation": "error", "max_length": 9}, "raise data.max_length",
     {"max_length": 99}),
    ("prompt_too_long", TEXTS, {"truncation": "error", "max_prompt_length": 2},
     "raise data.max_prompt_length", {"max_prompt_length": 99}),
    ("prompt_in_completion", {**TEXTS, "chosen": "why is it good one", "rejected": "why is it bad one"}, {},
     "set data.train.0.columns: {prompt: null}", {"columns": {"prompt": None}}),
    ("no_generation_prompt", ROW, {"template": template(opens="")}, "mend it in tokenizer.chat_template",
     {"template": template()}),
    ("prompt_boundary_moved", {**TEXTS, "prompt": "why is it ", "chosen": "the good one"}, {},
     "if prompts end with a space, move it to the completions", {"row": TEXTS}),
    ("no_eos", ROW, {"template": template(end="\n")}, "end each answer with EOS, </s> (id 2)",
     {"template": template()}),
    ("eos_inside", {**TEXTS, "chosen": " good</s> one"}, {}, "leave EOS out of the rows", {"row": TEXTS}),
    ("bos_twice", {**TEXTS, "prompt": "<s>why is it"}, {"bos": True}, 'remove "<s>" from the rows',
     {"row": TEXTS}),
    ("bos_missing", IDS, {"bos": True}, "begin tokenizer.chat_template with {{ bos_token }}, or prompt_ids",
     {"row": {**IDS, "prompt_ids": [1, 4, 5]}}),
    ("control_tokens_in_text", {**ROW, "prompt": [user("why is it<pad>")]}, {}, "remove it from the texts",
     {"row": ROW}),
    ("foreign_marks", {**TEXTS, "prompt": "[INST]why is it[/INST]"}, {},
     "give messages in place of texts with marks", {"row": ROW}),
    *(("tools_not_written", {**ROW, "tools": [{"name": "f", "description": "tells"}]}, {}, line, follow)
      for line, follow in (("tokenizer.chat_template", {"template": CHAT_TEMPLATE}),
                           ("or remove the column tools", {"row": ROW}))),
    ("prompt_cut", TEXTS, {"truncation": "prompt_left", "max_prompt_length": 3}, "data.max_prompt_length: ",
     {"max_prompt_length": 40}),
    ("completion_cut", TEXTS, {"truncation": "completion_right", "max_length": 11}, "data.max_length: ",
     {"max_length": 60}),
    *((f"{part}_is_a_label", [{**TEXTS, part: "12"}] * 20, {}, f"in data.train.0.columns.{part}",
       {"row": [{**TEXTS, "right": TEXTS[part]}] * 20, "columns": {part: "right"}})
      for part in ("prompt", "chosen", "rejected")),
]  # fmt: skip


def test_no_code_of_a_remedy_is_absent() -> None:
    assert {case[0] for case in CASES} == {*_REMEDIES, *_ABOUT_COLUMNS, *FAULTS}


def read(tmp_path: Path, row: Any, **given: Any) -> tuple[dict[str, str], set[tuple[str, ...]]]:
    """Reads rows as a run does. Returns the remedy of each fault, or of the error, and the pairs."""
    rows = row if isinstance(row, list) else [row]
    reads_images, path = given.pop("images", False), tmp_path / "rows.jsonl"
    tokenizer: Any = picture_tokenizer() if reads_images else tiny_tokenizer(chat_template=True)
    if not reads_images:
        tokenizer.chat_template = given.pop("template", template())
    if given.pop("bos", False):
        post = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.backend_tokenizer.post_processor = post
    for name in ("a.png", "more/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(picture(1)))
    if "date" in repr(rows):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
        path.write_text(path.read_text().replace("{}/more", f"{tmp_path}/more"))
    if "image_folder" in given:
        given["image_folder"] = str(tmp_path / given["image_folder"])
    of_source = {key: given.pop(key) for key in [*given] if key in SourceRecipe.model_fields}
    source = SourceRecipe.model_validate({"path": str(path), **of_source})
    ingestion = Ingestion(
        located=locate_source(source, "data.train.0", None, reads_images=reads_images),
        source=source,
        data=DataRecipe.model_validate({"train": str(path), **given}),
        tokenizer=tokenizer,
        images=picture_processor() if reads_images else None,
    )
    remedies, pairs = {}, set()
    try:
        with ingestion.start() as numbered:
            origin = Origin("data.train.0", ingestion.settings)
            for batch in ingestion.batches(numbered):
                for name, having in faults_of(batch.kept, origin).items():
                    remedies[name] = remedy_of(name, having[0][1], having[0][0], origin)
                for kept in batch.kept:
                    ids = (kept.fitted.context, *kept.fitted.completions)
                    pairs.add(tuple(str(tokenizer.decode(part)) for part in ids))
    except DataError as error:
        remedies = dict.fromkeys([*ingestion.dropped_counts], str(error))
    return remedies, pairs


@pytest.mark.parametrize(("code", "row", "given", "said_so", "follow"), CASES)
def test_who_follows_a_remedy_gets_the_pair_that_the_row_means(
    code: str, row: Any, given: dict[str, Any], said_so: str, follow: dict[str, Any], tmp_path: Path
) -> None:
    reason = "media" if code == "media_read" else code
    assert said_so in read(tmp_path, row, **given)[0][reason]
    changed = {**given, **follow}
    remedies, pairs = read(tmp_path, changed.pop("row", row), **changed)
    assert reason not in remedies or (code == "bos_missing" and not remedies)
    for prompt, chosen, rejected in pairs:
        if "prompt_ids" not in str(row):
            assert "why is it" in prompt and "good one" in chosen and "bad one" in rejected
            assert not {"good", "bad"} & {*prompt.split()} and "bad" not in chosen and "good" not in rejected
    assert len(pairs) == 1


@pytest.mark.parametrize(
    ("rows", "source"),
    [
        ([{**TEXTS, "prompt": 3}], {"columns": {name: name for name in TEXTS}}),
        ([{**IDS, "chosen_ids": "6 2"}] * 2 + [{**IDS, "chosen_ids": []}], {"format": "tokenized"}),
    ],
)
def test_a_remedy_names_no_columns_that_mend_nothing(rows: Any, source: Any, tmp_path: Path) -> None:
    assert "columns:" not in read(tmp_path, rows, **source)[0]["wrong_type"]


def images_of_an_answer() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    swift = {"messages": [user("<image>why is it"), GOOD], "rejected_response": "bad one"}
    for row in (PICTURED, {**swift, "images": ["a.png"]}):
        yield {**row, "rejected_images": ["more/b.png"]}, {}
        yield {**row, "rejected_images": ["more/b.png"]}, {"image": "rejected_images"}
        yield {**row, "photos": ["more/b.png"]}, {}
    yield {**ROW, "chosen_image": "a.png", "rejected_image": "more/b.png"}, {"images": "chosen_image"}


@pytest.mark.parametrize(("row", "columns"), [*images_of_an_answer()])
def test_images_of_one_answer_are_refused_without_a_way_to_wrong_pairs(
    row: dict[str, Any], columns: dict[str, str], tmp_path: Path
) -> None:
    told = read(tmp_path, row, columns=columns, images=True)[0]["image_count"]
    assert "chosen and rejected have one prompt with one list of images" in told and "columns" not in told


def test_turns_of_transcripts_meet_masks_pictures_and_the_system_prompt(tmp_path: Path) -> None:
    begin = "\n\nHuman: {}why is it\n\nAssistant: "
    row = {side: f"{begin.format('')}so\n\nAssistant: {side}" for side in ("chosen", "rejected")}
    row["rejected"] = row["rejected"].replace("so", "no")
    turns = {"format": "transcript", "turns": "messages"}
    ((prompt, *sides),) = read(tmp_path, row, **turns, system_prompt="be kind")[1]
    assert prompt == "<s>system\nbe kind</s>\n<s>user\nwhy is it</s>\n<s>assistant\n"
    assert sides == [
        f"{so}</s>\n<s>assistant\n{side}</s>\n" for so, side in (("so", "chosen"), ("no", "rejected"))
    ]
    answers = {side: begin.format("<image>") + side for side in ("chosen", "rejected")}
    for columns in ({}, {"images": "pics"}):
        pictured = {**answers, columns.get("images", "images"): ["a.png"]}
        ((prompt, *_),) = read(tmp_path, pictured, **turns, columns=columns, images=True)[1]
        assert "<fake_token_around_image>why is it</s>" in prompt
    told = read(tmp_path, {**answers, "images": ["a.png"]}, format="transcript", images=True)[0]
    assert "no place for images" in told["media"]
