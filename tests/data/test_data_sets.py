"""Popular preference sets: their lines in docs/data.md are read; bad rows of their formats are refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from support.refusals import refusal
from support.rows import load_splits, said, write_rows
from support.tiny_pictures import encoded, picture, picture_processor, picture_tokenizer
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.faults import source_notes
from dpo_pack.data.sources import Data
from dpo_pack.system.errors import DataError, RecipeError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TOKENIZER: Any = tiny_tokenizer(chat_template=True)


def shared(who: str, value: str) -> dict[str, str]:
    return {"from": who, "value": value}


ASK, GOOD, BAD = said("user", "why"), said("assistant", "good"), said("assistant", "bad")
WHOLE = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
TURNS = {"chosen": "\n\nHuman: why\n\nAssistant: good", "rejected": "\n\nHuman: why\n\nAssistant: bad"}
SCORES = {"score_chosen": 8.0, "score_rejected": 2.0}
CAPYBARA = {
    "source": "Dove",
    "conversation": [{"input": "hi", "output": "yes"}, {"input": "why", "output": None}],
    "original_response": "good",
    "prompt": "hi why",
    "chosen": [said("user", "hi"), said("assistant", "yes"), ASK, GOOD],
    "rejected": [said("user", "hi"), said("assistant", "yes"), ASK, BAD],
    "rating_chosen": 5,
}
NECTAR = {
    "prompt": "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: why\n\nAssistant: ",
    "answers": [
        {"answer": "so", "model": "a", "rank": 2.0},
        {"answer": "good", "model": "b", "rank": 1.0},
        {"answer": "bad", "model": "c", "rank": 7.0},
    ],
    "turns": 2,
    "num_responses": 3,
    "source": ["sharegpt"],
    "good_natured": True,
}
HELPSTEER_2 = {
    "split": "train",
    "prompt": "hi\n<extra_id_1>Assistant\nyes\n<extra_id_1>User\nwhy",
    "response_1": "bad",
    "response_2": "good",
    "preference_strength": 2,
    "preference_statement": "Response 2 is better than Response 1",
    "preference_elaboration": "it is good",
}
HELPSTEER_3 = {
    "domain": "general",
    "language": "english",
    "context": [ASK],
    "response1": "good",
    "response2": "bad",
    "overall_preference": -1,
    "individual_preference": [{"score": -1, "reasoning": "it is good", "feedback_1": "", "feedback_2": ""}],
}
PKU = {
    "prompt": "why",
    "response_0": "good",
    "response_1": "bad",
    "prompt_source": "x",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
    "better_response_id": 1,
    "safer_response_id": 0,
}
ORCA = {"system": "be kind", "question": "why", "chosen": "good", "rejected": "bad"}
DISTILABEL_ORCA = {
    "system": "be kind",
    "input": "why",
    "chosen": "good",
    "rejected": "bad",
    "generations": ["good", "bad"],
    "order": ["chosen", "rejected"],
    "labelling_model": "gpt",
    "labelling_prompt": [ASK],
    "rating": [9.0, 2.0],
    "status": "unchanged",
    "in_gsm8k_train": False,
}
ULTRA: dict[str, Any] = {
    "source": "evol_instruct",
    "instruction": "why",
    "models": ["a", "b", "c"],
    "completions": [
        {"annotations": {"honesty": {"Rating": "4", "Rationale": "x"}}, "custom_system_prompt": "be brief"}
        | {
            "critique": "x",
            "fine-grained_score": 3.0,
            "model": name,
            "overall_score": score,
            "principle": "h",
        }
        | {"response": response}
        for name, score, response in (("a", 7.0, "so"), ("b", 8.5, "good"), ("c", 3.0, "bad"))
    ],
    "correct_answers": ["None"],
    "incorrect_answers": ["None"],
}
SHP = {
    "post_id": "x1",
    "domain": "askculinary_train",
    "upvote_ratio": 0.9,
    "history": "why",
    "c_root_id_A": "h1",
    "c_root_id_B": "h2",
    "score_A": 9,
    "score_B": 3,
    "human_ref_A": "good",
    "human_ref_B": "bad",
    "labels": 1,
    "seconds_difference": 30.0,
    "score_ratio": 3.0,
}
TEXT = json.dumps({"question": "why", "chosen": "good", "rejected": "bad"})
IMAGE = {"bytes": encoded(picture(1)), "path": "1.png"}
SEEN = {"ds_name": "x", "origin_dataset": "y", "origin_split": json.dumps({"model": "m"}), "image": IMAGE}
PARTS = [{"text": None, "type": "image"}, {"text": "why", "type": "text"}]
# By the name in docs/data.md: the columns of a row, and the format and the number of messages of its prompt.
ROWS: dict[str, tuple[dict[str, Any], str, int]] = {
    "Anthropic/hh-rlhf": (TURNS, "transcript", 0),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {"prompt": "why", "prompt_id": "1", **WHOLE, "messages": [ASK, GOOD], **SCORES},
        "conversational",
        1,
    ),
    "argilla/ultrafeedback-binarized-preferences-cleaned": (
        {"source": "x", "prompt": "why", **WHOLE, "chosen-rating": 5.0, "chosen-model": "m"},
        "conversational",
        1,
    ),
    "argilla/ultrafeedback-binarized-preferences": (
        {"source": "x", "instruction": "why", "chosen_response": "good", "rejected_response": "bad"},
        "alpaca",
        1,
    ),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        {"id": "1", "prompt": "why", **WHOLE, "source": "x"},
        "conversational",
        1,
    ),
    "allenai/olmo-2-1124-7b-preference-mix": ({"id": "1", **WHOLE, "source": "x"}, "conversational", 1),
    "allenai/Dolci-Instruct-DPO": (
        {**WHOLE, "prompt_id": "1", "chosen_model": "m", "preference_type": "delta"},
        "conversational",
        1,
    ),
    "Intel/orca_dpo_pairs": (ORCA, "alpaca", 2),
    "HuggingFaceH4/orca_dpo_pairs": (
        {
            "prompt": "why",
            "chosen": [said("system", "be kind"), ASK, GOOD],
            "rejected": [said("system", "be kind"), ASK, BAD],
        },
        "conversational",
        2,
    ),
    "argilla/distilabel-intel-orca-dpo-pairs": (DISTILABEL_ORCA, "alpaca", 2),
    "berkeley-nest/Nectar": (NECTAR, "ranked", 3),
    "nvidia/HelpSteer2": (HELPSTEER_2, "compared", 3),
    "nvidia/HelpSteer3": (HELPSTEER_3, "compared", 1),
    "argilla/distilabel-capybara-dpo-7k-binarized": (CAPYBARA, "conversational", 3),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": ({**WHOLE, "source": "x"}, "conversational", 1),
    "PKU-Alignment/PKU-SafeRLHF": (PKU, "compared", 1),
    "openbmb/UltraFeedback": (ULTRA, "ranked", 1),
    "stanfordnlp/SHP": (SHP, "compared", 1),
    "openbmb/RLHF-V-Dataset": ({**SEEN, "text": TEXT, "image_path": "x/1.jpg"}, "alpaca", 1),
    "openbmb/RLAIF-V-Dataset": (
        {**SEEN, "question": "why", "chosen": "good", "rejected": "bad", "image_path": "x/1.jpg"},
        "alpaca",
        1,
    ),
    "trl-lib/rlaif-v": (
        {
            "images": [IMAGE],
            "prompt": [said("user", PARTS)],
            "chosen": [said("assistant", [{"text": "good", "type": "text"}])],
            "rejected": [said("assistant", [{"text": "bad", "type": "text"}])],
        },
        "conversational",
        1,
    ),
    "argilla/dpo-mix-7k": ({"dataset": "x", **WHOLE, "chosen_rating": 5.0}, "conversational", 1),
    "argilla/distilabel-math-preference-dpo": (
        {"metadata": None, "instruction": "why", "chosen_response": "good", "rejected_response": "bad"},
        "alpaca",
        1,
    ),
    "llamafactory/DPO-En-Zh-20k": (
        {
            "conversations": [shared("human", "why")],
            "chosen": shared("gpt", "good"),
            "rejected": shared("gpt", "bad"),
        },
        "sharegpt",
        1,
    ),
}


def documented() -> dict[str, dict[str, Any]]:
    """The `data.train` lines of docs/data.md, by the hub id that they name."""
    lines = re.findall(r"^\| [^|]*\| `(\{path: .*\})` \|", DOCS.read_text(encoding="utf-8"), re.M)
    sources = [yaml.safe_load(line) for line in lines]
    return {source["path"]: source for source in sources}


load = partial(load_splits, tokenizer=TOKENIZER)
PICTURED = picture_tokenizer()
load_pictured = partial(load_splits, tokenizer=PICTURED, images=picture_processor())


def loaded(tmp_path: Path, rows: list[dict[str, Any]], source: dict[str, Any], **data: Any) -> Data:
    return load(tmp_path, {"path": write_rows(tmp_path / "rows.jsonl", rows), **source}, **data)


def refused(tmp_path: Path, rows: list[dict[str, Any]], **source: Any) -> str:
    told = refusal(lambda: loaded(tmp_path, rows, source), DataError)
    return told.removeprefix(f"{tmp_path}/rows.jsonl")


def test_every_data_set_of_the_docs_has_a_test_row_and_the_other_way_round() -> None:
    assert documented().keys() == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_the_docs_read_a_popular_data_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, format, num_messages = ROWS[name]
    asked: dict[str, Any] = {}

    def load_dataset(path: str, **options: Any) -> datasets.Dataset:
        asked.update({key: value for key, value in options.items() if value is not None}, path=path)
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = documented()[name]
    kept = {key: source[key] for key in ("config", "data_dir", "revision") if key in source}
    pictured = not {"image", "images"}.isdisjoint(row)
    splits = load_pictured(tmp_path, source) if pictured else load(tmp_path, source)
    assert asked == {
        "path": name,
        "split": source.get("split", "train"),
        **{"name" if key == "config" else key: value for key, value in kept.items()},
    }
    assert splits.report["train"]["sources"][0]["format"] == format
    group = splits.train.group(0)
    tokenizer = PICTURED if pictured else TOKENIZER
    prompt, chosen, rejected = (str(tokenizer.decode(ids)) for ids in (group.context, *group.completions))
    assert len(group.images) == pictured
    assert prompt.count("why") == 1 and "good" in chosen and "bad" in rejected
    if num_messages:
        assert prompt.count("<s>") == num_messages + 1 and prompt.endswith("<s>assistant\n")
        assert not re.search("Human|extra_id", prompt)
    assert ("be kind" in prompt) == ("be kind" in str(row))


# ---- One format taken for another


@pytest.mark.parametrize(("chosen", "rejected"), [(GOOD, BAD), ("good", "bad"), ([GOOD], [BAD])])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_answers_are_texts_messages_or_lists(column: str, chosen: Any, rejected: Any, tmp_path: Path) -> None:
    splits = loaded(tmp_path, [{column: [ASK], "chosen": chosen, "rejected": rejected}], {})
    assert TOKENIZER.decode(splits.train.group(0).context) == "<s>user\nwhy</s>\n<s>assistant\n"
    assert TOKENIZER.decode(splits.train.group(0).completions[0]).startswith("good")
    renamed = [{"prompt": [ASK], "chosen": chosen, "rejected": rejected}]
    again = loaded(tmp_path, renamed, {"columns": {"messages": "prompt"}})
    assert again.train.fingerprint == splits.train.fingerprint


@pytest.mark.parametrize(
    ("row", "formats"),
    [
        ({"prompt": "q", "instruction": "why", "chosen": "a", "rejected": "b"}, ("alpaca", "preference")),
        ({"prompt": "q", "messages": [ASK], "chosen": "a", "rejected": "b"}, ("messages", "preference")),
        ({"instruction": "q", "messages": [ASK], "chosen": "a", "rejected": "b"}, ("messages", "alpaca")),
    ],
)
def test_two_readings_that_both_fit_are_refused_with_the_lines_that_choose(
    row: dict[str, Any], formats: tuple[str, str], tmp_path: Path
) -> None:
    first, second = formats
    message = refused(tmp_path, [row])
    assert message.endswith(f"; set data.train.0.format: {first} or format: {second}")
    for format in formats:
        report = loaded(tmp_path, [row], {"format": format}).report
        assert report["train"]["sources"][0]["format"] == format


# ---- Preferences


def test_a_tie_stops_the_run_with_its_row_or_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "why", "first": "good", "second": "bad", "preference": n % 3} for n in range(6)]
    assert refused(tmp_path, rows) == (
        " line 1: preference is '0': neither answer is better; tie: 2 of 6 rows; remove such rows, or set "
        "data.on_bad_row: skip"
    )
    splits = loaded(tmp_path, rows, {}, on_bad_row="skip")
    dropped = splits.report["train"]["sources"][0]["dropped"]
    assert splits.train.num_pairs == 4 and dropped == {"tie": {"rows": 2, "line_numbers": [1, 4]}}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("openbmb/UltraFeedback", "the answer of the highest overall_score, rejected that of the lowest"),
        ("stanfordnlp/SHP", "human_ref_A where labels is 1"),
        ("nvidia/HelpSteer3", "response1 where overall_preference is below 0"),
    ],
)
def test_what_was_chosen_is_told_in_the_words_of_the_file_and_equal_answers_are_no_pair(
    name: str, told: str, tmp_path: Path
) -> None:
    row, columns = ROWS[name][0], documented()[name]["columns"]
    scores = [{**one, "overall_score": 5.0} for one in ULTRA["completions"]]
    equal = {**row, "labels": "tie", "overall_preference": 0, "completions": scores}
    assert "tie: 1 of 3 rows" in refused(tmp_path, [row, equal, row], columns=columns)
    report = loaded(tmp_path, [row, equal, row], {"columns": columns}, on_bad_row="skip").report
    assert f"chosen is {told} (2 of 2)" in source_notes(report["train"]["sources"][0])
    always = loaded(tmp_path, [row] * 20, {"columns": columns}).report["train"]["sources"][0]
    assert any("Warning: chosen is always" in note for note in source_notes(always)) == (" where " in told)


# ---- System prompts


def test_a_system_column_is_read_of_conversations_where_the_recipe_names_it(tmp_path: Path) -> None:
    row = {**WHOLE, "system": "be kind"}
    texts = [
        TOKENIZER.decode(loaded(tmp_path, [row], source).train.group(0).context)
        for source in ({}, {"columns": {"system": "system"}})
    ]
    assert texts[1] == "<s>system\nbe kind</s>\n" + texts[0]
    report = loaded(tmp_path, [row], {}).report
    assert report["train"]["sources"][0]["columns_not_read"] == ["system"]


def test_a_system_prompt_of_texts_is_refused_and_is_read_of_messages(tmp_path: Path) -> None:
    assert "or {instruction: question} to use the chat template" in refused(tmp_path, [ORCA])
    message = refused(tmp_path, [ORCA], columns={"prompt": "question", "system": "system"})
    assert message.endswith("set data.train.0.columns: {system: system, instruction: question}")
    splits = loaded(tmp_path, [ORCA], {"columns": {"instruction": "question", "system": "system"}})
    assert TOKENIZER.decode(splits.train.group(0).context).startswith("<s>system\nbe kind</s>")


@pytest.mark.parametrize(
    "name", ["berkeley-nest/Nectar", "nvidia/HelpSteer2", "nvidia/HelpSteer3", "llamafactory/DPO-En-Zh-20k"]
)
def test_prompts_of_these_formats_are_read_for_online_runs(name: str, tmp_path: Path) -> None:
    row, _, num_messages = ROWS[name]
    columns = {"columns": documented()[name].get("columns", {})}
    splits = loaded(tmp_path, [row], columns, max_new_tokens=4)
    assert len(splits.prompts[0].messages or ()) == num_messages


# ---- Keys of the hub


@pytest.mark.parametrize("key", ["config", "data_dir", "revision"])
def test_keys_of_the_hub_are_refused_for_local_sources(key: str, tmp_path: Path) -> None:
    message = refusal(lambda: loaded(tmp_path, [TURNS], {key: "x"}), RecipeError)
    assert re.search(rf"data\.train\.0\.{key}: .*leave {key} out", message)
