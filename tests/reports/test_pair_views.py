"""`dpopack show`: every common fault can be named from the screen, and nothing is hidden without a word."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.cells import cell_len
from support.outline import Outline
from support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer

import dpo_pack.data.view
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports.pages import pairs_page
from dpo_pack.reports.pair_views import render_pairs
from dpo_pack.run.show import ShownRecipe, show_recipe, to_json
from dpo_pack.system.console import _Console
from dpo_pack.system.errors import DataError, RecipeError

Row = dict[str, Any]
Shows = Callable[..., ShownRecipe]
PAIR = {"prompt": "Which answer is better?", "chosen": " The first answer.", "rejected": " The second one."}
CHAT = {
    "prompt": [{"role": "user", "content": "Which answer is better?"}],
    "chosen": [{"role": "assistant", "content": "The first answer."}],
    "rejected": [{"role": "assistant", "content": "The second one."}],
}
WITHOUT_GENERATION_PROMPT = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
)
WITHOUT_EOS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture
def shows(tmp_path: Path) -> Shows:
    """Shows rows with the tiny tokenizer. `model/` has no weights and no config: none are read."""

    def run(
        rows: Sequence[Row | str],
        *overrides: str,
        template: str | None = CHAT_TEMPLATE,
        asked: Sequence[int] = (),
        reads_all: bool = False,
    ) -> ShownRecipe:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        recipe = {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "pairs.jsonl")},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        loaded = load_recipe(tmp_path / "recipe.yaml", overrides)
        return show_recipe(loaded, _console(), asked_rows=asked, reads_all=reads_all)

    return run


def _console(width: int = 80, *, colour: bool = False) -> _Console:
    return _Console(
        verbose=False,
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )


def screen(shown: ShownRecipe, width: int = 80, *, colour: bool = False, lists_dropped: bool = False) -> str:
    console = _console(width, colour=colour)
    render_pairs(shown, console, lists_dropped=lists_dropped)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def page_text(shown: ShownRecipe) -> str:
    outline = Outline()
    outline.feed(pairs_page(shown))
    outline.close()
    assert outline.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(outline.tags)
    assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in outline.attributes}
    return joined("".join(outline.text))


def joined(text: str) -> str:
    return " ".join(text.split())


def turns(number: int) -> list[Row]:
    return [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": f"message {turn} of the chat"}
        for turn in range(2 * number - 1)
    ]


BOTH = {"chosen": PAIR["prompt"] + PAIR["chosen"], "rejected": PAIR["prompt"] + PAIR["rejected"]}
LONG_CHAT = {**CHAT, "prompt": turns(6)}
# A fault: rows, recipe keys, template, what the screen must say about it, and a remedy.
FAULTS: dict[str, tuple[list[Row], list[str], str, str, str]] = {
    "a wrong column": (
        [{**PAIR, **BOTH}] * 3,
        [],
        CHAT_TEMPLATE,
        "all 3 pairs: the completions contain the prompt again",
        r"prompt and answer together: set data.train.0.columns: {prompt: null}; but if other columns have",
    ),
    "the prompt is repeated in messages": (
        [{**CHAT, "chosen": [{"role": "assistant", "content": "Which answer is better? The first."}]}],
        [],
        CHAT_TEMPLATE,
        "chosen contains the prompt again",
        "remove the prompt from chosen and rejected",
    ),
    "a template without generation prompt": (
        [CHAT] * 3,
        [],
        WITHOUT_GENERATION_PROMPT,
        'begin with it: "<s>assistant\\\\n"',
        "the template must write .* if add_generation_prompt is true",
    ),
    "a generation prompt that is not before an answer": (
        [CHAT] * 3,
        [],
        CHAT_TEMPLATE.replace("and thinking", ""),
        'the prompt alone ends with "<think></think>", which does not come before the completions',
        "chat_template_kwargs",
    ),
    "missing EOS": (
        [CHAT],
        [],
        WITHOUT_EOS,
        'EOS "</s>" is missing at its end',
        r"the chat template must end each answer with EOS, </s> \(id 2\), or another special token",
    ),
    "missing EOS in token ids": (
        [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9, 2]}],
        [],
        CHAT_TEMPLATE,
        "EOS is missing: chosen ends with",
        "write EOS, .* at the end of chosen_ids and rejected_ids",
    ),
    "a prompt that is cut": (
        [LONG_CHAT] * 3,
        ["data.truncation=prompt_left", "data.max_length=64"],
        CHAT_TEMPLATE,
        "the beginning of the prompt is cut off",
        r"data.max_length: \d+ keeps these pairs whole",
    ),
    "a completion that is cut": (
        [{**PAIR, "chosen": " The first answer." * 8}] * 3,
        ["data.truncation=completion_right", "data.max_length=32"],
        CHAT_TEMPLATE,
        "tokens of chosen are cut, and EOS with them",
        r"data.max_length: \d+ keeps these pairs whole",
    ),
    "a token over the boundary": (
        [{"prompt": "The answer is ", "chosen": "better", "rejected": "helpful"}],
        [],
        CHAT_TEMPLATE,
        'the end of the prompt, " ", and the beginning of a completion become one token',
        "a space at the end of the prompt",
    ),
    "equal completions": (
        [PAIR, {**PAIR, "rejected": PAIR["chosen"]}, {**PAIR, "rejected": PAIR["chosen"]}],
        [],
        CHAT_TEMPLATE,
        r"2 of 3 rows .*a run stops there.*chosen and rejected are the same",
        "if the columns are wrong, correct data.train.0.columns; if not, mend the rows",
    ),
    "empty completions": (
        [PAIR, {**PAIR, "rejected": " "}],
        [],
        CHAT_TEMPLATE,
        "the rejected completion is empty",
        "if the columns are wrong, correct data.train.0.columns; if not, mend the rows",
    ),
    "a column of labels": (
        [{**PAIR, "prompt": f"item-{number}"} for number in range(30)],
        [],
        CHAT_TEMPLATE,
        'prompt is an id or a category, no text: "item-0"',
        "wrong column\\? Name the column of the texts in data.train.0.columns.prompt",
    ),
    "no pair at all": (
        [{"question": "x", "answer": "y"}] * 3,
        [],
        CHAT_TEMPLATE,
        r"all 3 rows: no pair \(missing_column\).*no column 'chosen' \(there are: question, answer\)",
        "name the column in data.train.0.columns",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_remedy_on_the_screen_and_on_the_page(name: str, shows: Shows) -> None:
    rows, overrides, template, fault, remedy = FAULTS[name]
    shown = shows(rows, *overrides, template=template)
    for text in (joined(screen(shown)), page_text(shown)):
        assert re.search(fault, text), text
        assert re.search(f"Remedy: .*{remedy}", text), text
    assert json.loads(to_json(shown))["warnings"]


def test_the_remedy_for_a_cut_prompt_names_only_the_limit_that_is_too_low(shows: Shows) -> None:
    prompt = {"prompt_ids": [1, *range(10, 40)]}  # 31 tokens
    rows = [{**prompt, "chosen_ids": [50, 51, 2], "rejected_ids": [52, 2]}]
    for limits, remedy in (
        (("data.max_length=33", "data.max_prompt_length=31"), "data.max_length: 34 keeps"),
        (("data.max_length=34", "data.max_prompt_length=30"), "data.max_prompt_length: 31 keeps"),
    ):
        (fault,) = shows(rows, "data.truncation=prompt_left", *limits).faults
        assert fault.remedy.startswith(remedy)


@pytest.mark.parametrize(
    "rows", [[PAIR], [CHAT], [{**CHAT, "prompt": turns(3)}]], ids=["text", "chat", "turns"]
)
def test_pairs_that_are_in_order_get_no_warning(rows: list[Row], shows: Shows) -> None:
    shown = shows(rows * 3)
    assert shown.faults == () and "No common fault was found" in screen(shown)
    assert screen(shown).count('ends with EOS "</s>"') == 4  # two pairs, two completions each
    assert "Left out: none of the rows" in screen(shown)


def test_a_template_that_renders_no_prompt_without_the_beginning_of_an_answer_is_in_order(
    shows: Shows,
) -> None:
    is_prompt = "messages[-1].role == 'user' and not add_generation_prompt"
    refuses = "{% if " + is_prompt + " %}{{ raise_exception('no answer') }}{% endif %}"
    assert shows([CHAT] * 3, template=refuses + CHAT_TEMPLATE).faults == ()


def test_a_row_that_stops_a_run_may_be_skipped_unless_most_rows_are_such(shows: Shows) -> None:
    empty = {**PAIR, "chosen": ""}
    assert "or set data.on_bad_row: skip" in joined(screen(shows([PAIR, PAIR, empty])))
    assert "data.on_bad_row" not in joined(screen(shows([PAIR, empty, empty])))


# ---- Tokens


def test_json_has_each_token_that_the_model_gets_with_id_text_part_and_score(shows: Shows) -> None:
    value = json.loads(to_json(shows([PAIR, PAIR, {**PAIR, "chosen": ""}])))
    assert {"pairs", "dropped"} <= value.keys()
    pair = value["pairs"][0]
    assert (pair["source"], pair["row"]) == ("pairs", 1)
    tokenizer = tiny_tokenizer()
    for side in ("chosen", "rejected"):
        tokens = pair[side]
        assert all(token.keys() == {"id", "text", "part", "scored"} for token in tokens)
        text = PAIR["prompt"] + PAIR[side] + "</s>"
        assert [token["id"] for token in tokens] == tokenizer(text)["input_ids"]
        assert "".join(token["text"] for token in tokens) == text
        prompt = [token for token in tokens if token["part"] == "prompt"]
        assert "".join(token["text"] for token in prompt) == PAIR["prompt"]
        assert tokens[: len(prompt)] == prompt
        assert [token["scored"] for token in tokens] == [token["part"] == "completion" for token in tokens]
    assert pair["ends_with_eos"] == {"chosen": True, "rejected": True}
    assert pair["cut_tokens"] == {"prompt": 0, "chosen": 0, "rejected": 0}
    (dropped,) = value["dropped"]
    assert (dropped["source"], dropped["row"], dropped["reason"]) == ("pairs", 3, "empty_completion")
    assert dropped["content"] == {**PAIR, "chosen": ""}


@pytest.mark.parametrize("text", ["Zażółć 日本語 👍🏽!", "tab\tand\x1b[31m[b]x[/b]\u200b", "a\n\n b  c "])
def test_the_texts_of_tokens_are_the_text_whatever_its_characters(text: str, shows: Shows) -> None:
    pair = json.loads(to_json(shows([{**PAIR, "chosen": text}] * 3)))["pairs"][0]
    assert "".join(token["text"] for token in pair["chosen"]) == PAIR["prompt"] + text + "</s>"
    assert "\x1b" not in screen(shows([{**PAIR, "chosen": text}] * 3))


def test_what_both_completions_begin_with_is_counted_and_marked(shows: Shows) -> None:
    shown = shows([{"prompt": "ask", "chosen": "one two", "rejected": "one red"}] * 2)
    pair = shown.pairs[0]
    differs = [a.id != b.id for a, b in zip(pair.chosen, pair.rejected, strict=False)]
    shared = differs.index(True)
    num_prompt = len(tiny_tokenizer()("ask")["input_ids"])
    assert pair.num_shared == shared > num_prompt
    assert f"the first {shared - num_prompt} in both" in joined(screen(shown))
    assert screen(shown).count("[differs]") == 4


def test_tokens_that_were_cut_are_shown_as_cut_and_are_not_among_those_of_the_model(shows: Shows) -> None:
    shown = shows([LONG_CHAT], "data.truncation=prompt_left", "data.max_length=64")
    pair = shown.pairs[0]
    kept = [token for token in pair.chosen if not token.is_cut]
    assert max(len(kept), sum(not token.is_cut for token in pair.rejected)) == 64
    assert pair.chosen[1].is_cut and kept == [pair.chosen[0], *pair.chosen[1 - len(kept) :]]  # BOS stays
    num_cut = json.loads(to_json(shown))["pairs"][0]["cut_tokens"]["prompt"]
    assert num_cut == len(pair.chosen) - len(kept)
    assert f"<s>[{num_cut} tokens cut off: user\\nmessage 0" in joined(screen(shown))
    assert "message 0 of the chat" in page_text(shown)


def test_bos_stays_in_front_of_a_prompt_that_is_cut(shows: Shows) -> None:
    prompt_ids = [1, *range(10, 40)]
    rows = [{"prompt_ids": prompt_ids, "chosen_ids": [50, 2], "rejected_ids": [51, 2]}]
    pair = json.loads(to_json(shows(rows, "data.truncation=prompt_left", "data.max_length=10")))["pairs"][0]
    assert [token["id"] for token in pair["chosen"]] == [1, *prompt_ids[-7:], 50, 2]


def test_ids_are_on_the_screen_for_pairs_that_are_asked_for(shows: Shows) -> None:
    rows = [PAIR, {**PAIR, "chosen": ""}, {**PAIR, "prompt": "Which one?"}]
    text = screen(shows(rows, asked=[3]))
    first = tiny_tokenizer()("Which one?")["input_ids"][0]
    assert f"({first})" in text and "pairs.jsonl line 3" in text and "pairs.jsonl line 1" not in text
    left_out = screen(shows(rows, asked=[2]))
    assert "pairs.jsonl line 2: the chosen completion is empty" in left_out and "PROMPT" not in left_out


# ---- What is read, and what is left out


def test_only_the_first_rows_are_tokenised_and_the_screen_says_so(
    shows: Shows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpo_pack.data.view, "FIRST_ROWS", 5)
    rows: list[Row | str] = [*([PAIR] * 9), "{bad", PAIR]
    shown = shows(rows)
    assert shown.sources[0].num_rows == 5 and "only the first 5 rows tokenised" in joined(screen(shown))
    assert "--dropped reads all" in joined(screen(shown))
    asked = shows(rows, asked=[8])
    assert asked.sources[0].num_rows == 6 and [pair.row for pair in asked.pairs] == [8]
    whole = shows(rows, reads_all=True)
    assert "all 11 rows tokenised, 10 kept, 1 left out" in joined(screen(whole))
    assert "line 10: invalid JSON" in joined(screen(whole)) and "{bad" in screen(whole)
    assert len(whole.sources[0].pairs) == 5  # memory does not grow with the source
    exact = shows([PAIR] * 5)
    assert "all 5 rows tokenised" in joined(screen(exact))


def test_rows_that_are_left_out_have_their_reason_file_row_and_text(shows: Shows) -> None:
    rows: list[Row | str] = [
        PAIR,
        "[1, 2]",
        {"prompt": "x"},
        {**PAIR, "prompt": 3},
        '{"prompt": "a", "prompt": "b"}',
        {**PAIR, "chosen": " long" * 3000},
    ]
    shown = shows(rows)
    text = joined(screen(shown))
    for place, content in {
        "line 2: no JSON object": "[1, 2]",
        "line 3: no column 'chosen'": "prompt: x",
        "line 4: prompt is a number": "rejected: The second one.",
        "line 5: a JSON object has the key 'prompt' twice": "prompt: b",
        "line 6: ": "characters not shown here; --html shows all]",
    }.items():
        assert place in text and content in text, place
    assert " long" * 3000 in re.sub(r"\s+", " ", pairs_page(shown))
    assert [row["row"] for row in json.loads(to_json(shown))["dropped"]] == [2, 3, 4, 5, 6]


COMPARED: Row = {
    "prompt": "Which answer is better?",
    "response_0": "The first one.",
    "response_1": "The second one.",
    "better_response_id": 0,
    "safer_response_id": 1,
    "sha256": "b4e6",
}
SAFER = "data.train.0.columns={better: safer_response_id}"


def test_the_screen_and_the_json_say_which_column_each_field_is_read_from(
    shows: Shows, tmp_path: Path
) -> None:
    shown = shows([COMPARED] * 2, SAFER, f"data.eval={{path: {tmp_path}/pairs.jsonl, columns: {SAFER[21:]}}}")
    named = "columns: prompt, first = response_0, second = response_1, better = safer_response_id; "
    assert joined(screen(shown)).count(f"{named}not read: better_response_id, sha256") == 1  # not twice
    assert named in page_text(shown)
    source, _ = json.loads(to_json(shown))["sources"]
    assert source["columns"]["better"] == "safer_response_id" and "prompt" in source["columns"]
    assert source["columns_not_read"] == ["better_response_id", "sha256"]


def test_what_is_read_of_a_row_is_shown_once(shows: Shows) -> None:
    same = {**COMPARED, "response_1": COMPARED["response_0"]}
    shown = shows([COMPARED, same], SAFER, asked=[1, 2])
    read = "prompt: Which answer is better? first: The first one. second: The"
    text = joined(screen(shown))
    assert f"{read} second one. better: 1" in text and f"{read} first one. better: 1" in text
    assert "sha256: " not in text and "response_0: " not in text
    fields = ["prompt", "first", "second", "better"]
    report = json.loads(to_json(shown))
    assert [list(row["content"]) for row in (*report["pairs"], *report["dropped"])] == [fields] * 2


def test_the_rows_that_stop_a_run_are_counted_and_need_a_remedy(shows: Shows) -> None:
    bad, long = {**PAIR, "chosen": ""}, {**PAIR, "chosen": " long" * 3000}
    for rows, which in (([bad], "this one"), ([bad, bad], "these"), ([bad, long], "1 of these")):
        text = joined(screen(shows([PAIR] * 3 + rows)))
        assert f"3 kept, {len(rows)} left out, and a run stops because of {which} columns: " in text
        assert (
            "empty_completion; a run stops there; remedy: mend the rows, or set data.on_bad_row: skip" in text
        )
    skipped = joined(screen(shows([PAIR] * 11 + [bad, long], "data.on_bad_row=skip")))
    assert "2 left out columns: " in skipped and "mend" not in skipped and "a run stops" not in skipped
    assert "too_long; remedy: raise data.max_length" in skipped


def test_rows_that_are_left_out_are_listed_without_pairs(shows: Shows) -> None:
    shown = shows([PAIR, {**PAIR, "chosen": ""}], reads_all=True)
    text = screen(shown, lists_dropped=True)
    assert "line 2: the chosen completion is empty" in text
    assert "PROMPT" not in text and "packed row" not in text and len(shown.pairs) == 1


def test_more_rows_of_a_reason_than_are_shown_are_counted(shows: Shows) -> None:
    rows = [PAIR, *([{**PAIR, "chosen": ""}] * 7)]
    assert "[6 more of these rows; --dropped lists more]" in screen(shows(rows))
    assert "[2 more of these rows; --json and --html list more]" in screen(
        shows(rows, reads_all=True), lists_dropped=True
    )


def test_a_long_prompt_is_shortened_with_the_number_of_tokens_and_the_page_has_them_all(shows: Shows) -> None:
    words = [f"w{number}" for number in range(200)]
    shown = shows([{**PAIR, "prompt": " ".join(words)}])
    num_tokens = sum(token.part == "prompt" for token in shown.pairs[0].chosen)
    assert f"[{num_tokens - 120:,} tokens not shown here; --html shows all]" in joined(screen(shown))
    page = page_text(shown)
    assert all(word in page for word in words)


def test_a_pair_with_more_tokens_than_the_model_has_positions_is_a_fault(shows: Shows) -> None:
    rows = [PAIR, {**PAIR, "prompt": "ask " * 2100}]  # the model is exact for 2,048 positions
    text = joined(screen(shows(rows, "data.max_length=20000")))
    assert "one completion, but this model is exact for 2,048 positions only; data.truncation" in text
    assert "WARNING pairs.jsonl, 1 of 2 pairs (line 2): a sequence has more positions" in text
    assert "Remedy: set data.max_length: 2048." in text
    assert "positions" not in screen(shows(rows))


def test_max_pairs_ends_the_reading_as_in_a_run(shows: Shows) -> None:
    shown = shows([PAIR] * 5, "data.train.0.max_pairs=2")
    assert (shown.sources[0].num_rows, shown.sources[0].num_kept) == (2, 2)


@pytest.mark.parametrize("asked", [4, 10**9])
def test_a_row_that_is_not_there_is_refused_with_those_that_are(asked: int, shows: Shows) -> None:
    with pytest.raises(RecipeError, match=rf"--pair {asked}: .*of pairs.jsonl, lines 1 to 3 were read"):
        shows([PAIR] * 3, asked=[asked])


def test_a_source_without_rows_and_an_online_recipe_are_refused(shows: Shows) -> None:
    with pytest.raises(DataError, match="has no rows"):
        shows([])
    online = ["online.judges=[{type: function, function: a:b}]", "train.max_steps=1"]
    with pytest.raises(RecipeError, match="online: this command needs pairs"):
        shows([PAIR], *online)


# ---- The row, and how it all fits


@pytest.mark.parametrize(
    "override", ["seed=1", "packing.share_prompt=false", "packing.mode=padded", "packing.merge_prompts=true"]
)
def test_one_packed_row_is_drawn_from_the_pairs_that_were_read(override: str, shows: Shows) -> None:
    shown = shows([PAIR] * 3, override)
    assert shown.row is not None
    assert list(shown.row.pairs) == [f"pairs.jsonl line {number}" for number in (1, 2, 3)]
    assert f"3 pairs, {shown.row.drawn.tokens:,} of 8,192 tokens" in screen(shown)
    page_text(shown)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool, shows: Shows) -> None:
    rows: list[Row | str] = [
        {**PAIR, "prompt": "x" * 300 + "\n" + "日本語 word " * 90},
        {**PAIR, "chosen": ""},
        "{" + "bad " * 200,
        PAIR,
    ]
    shown = shows(rows, f"data.max_length={2000 + width}")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen(shown, width, colour=colour))
    assert max(map(cell_len, text.splitlines())) <= width


def test_marks_stand_between_tokens_only_where_there_is_no_colour(shows: Shows) -> None:
    shown = shows([PAIR])
    assert "·" in screen(shown) and "·" not in screen(shown, colour=True)
    assert "\x1b[4;34m" in screen(shown, colour=True)


def test_a_note_on_a_pair_is_told_once_and_again_for_pairs_that_are_asked_for(shows: Shows) -> None:
    moons = [f"the red moon {number}" for number in range(3)]
    rows = [{"prompt": moon, "chosen": f"{moon} yes", "rejected": f"{moon} no"} for moon in moons]
    shown = shows(rows, template=None)
    assert len(shown.pairs) == 2 and screen(shown).count("\n! ") == 1
    assert page_text(shown).count("contain the prompt again:") == 1
    assert [len(pair["warnings"]) for pair in json.loads(to_json(shown))["pairs"]] == [1, 1]
    assert screen(shows(rows, template=None, asked=[1, 2])).count("\n! ") == 2


def test_held_out_sources_are_shown_after_the_training_data_with_their_faults(
    shows: Shows, tmp_path: Path
) -> None:
    rows = [{"prompt": f"ask {n}", "chosen": " yes", "rejected": " no"} for n in range(3)]
    repeated = [{"prompt": "the red moon", "chosen": "the red moon yes", "rejected": "the red moon no"}] * 3
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in repeated))
    shown = shows(rows, f"data.eval={tmp_path / 'held.jsonl'}", template=None)
    text = joined(screen(shown, 120))
    assert "held.jsonl (held out), format preference: all 3 rows tokenised, 3 kept" in text
    assert "WARNING held.jsonl (held out), all 3 pairs: the completions contain the prompt again" in text
    assert "data.eval.0.columns: {prompt: null}" in text
    assert [(pair.source, pair.row) for pair in shown.pairs] == [("pairs", 1), ("pairs", 2), ("held", 1)]
    assert shown.row is not None and all("held" not in place for place in shown.row.pairs)


def test_the_bars_of_a_packed_row_have_a_legend_and_a_scale(shows: Shows) -> None:
    rows = [{"prompt": "ask " * 30, "chosen": " yes" * 20, "rejected": " no"}]
    text = screen(shows(rows, template=None), 60)
    assert re.search(r"█ prompt  ▓ chosen  ▒ rejected\none character of a bar: [\d.]+ tokens\n", text)
