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
from support.rows import assistant, user, write_rows
from support.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer

import dpo_pack.run.show
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reports.pages import pairs_page
from dpo_pack.reports.pair_views import render_pairs, to_json
from dpo_pack.run.show import ShownRecipe, show_recipe
from dpo_pack.system.console import _Console
from dpo_pack.system.errors import DataError, RecipeError

Row = dict[str, Any]
Shows = Callable[..., ShownRecipe]
PAIR = {"prompt": "Which answer is better?", "chosen": " The first answer.", "rejected": " The second one."}
CHAT = {
    "prompt": [user("Which answer is better?")],
    "chosen": [assistant("The first answer.")],
    "rejected": [assistant("The second one.")],
}
WITHOUT_GENERATION_PROMPT = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
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
        shown = show_recipe(loaded, console := _console(), asked_rows=asked, reads_all=reads_all)
        is_long = reads_all or bool(asked)  # in a log, a line before long work
        assert console.file.getvalue() == "Reading pairs ...\n" * is_long  # type: ignore[attr-defined]
        return shown

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
    render_pairs(shown.report, console, lists_dropped=lists_dropped)
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


def as_json(shown: ShownRecipe) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(to_json(shown.report))
    return value


def joined(text: str) -> str:
    return " ".join(text.split())


def turns(number: int) -> list[Row]:
    return [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": f"message {turn} of the chat"}
        for turn in range(2 * number - 1)
    ]


BOTH = {"chosen": PAIR["prompt"] + PAIR["chosen"], "rejected": PAIR["prompt"] + PAIR["rejected"]}
LONG_CHAT = {**CHAT, "prompt": turns(6)}
LONG_ANSWER = {**PAIR, "chosen": " The first answer." * 8}
SAME = {**PAIR, "rejected": PAIR["chosen"]}
EMPTY = {**PAIR, "chosen": ""}
LABELS = [{**PAIR, "prompt": f"item-{number}"} for number in range(30)]
CUT_LEFT = ["data.truncation=prompt_left", "data.max_length=64"]
CUT_RIGHT = ["data.truncation=completion_right", "data.max_length=32"]
IDS = {"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9, 2]}
TWO_BOS = "<s><s>" + CHAT_TEMPLATE
LATE = CHAT_TEMPLATE.replace("and thinking", "")
# A fault: rows, recipe keys, template, the warning's name, of how many it is said, and the remedy's key.
FAULTS: list[tuple[list[Row], list[str], str, str, str, str]] = [
    ([{**PAIR, **BOTH}] * 3, [], CHAT_TEMPLATE, "prompt_in_completion", "3 of 3 pairs",
     r"data\.train\.0\.columns: {prompt: null}"),
    ([{**CHAT, "chosen": [assistant("Which answer is better? The first.")]}], [],
     CHAT_TEMPLATE, "prompt_in_completion", "1 of 1 pair", r"data\.train\.0\.columns"),
    ([CHAT] * 3, [], WITHOUT_GENERATION_PROMPT, "no_generation_prompt", "3 of 3 pairs",
     r'"<s>assistant\\+n" .*tokenizer\.chat_template'),
    ([CHAT] * 3, [], LATE, "prompt_boundary_moved", "3 of 3 pairs", "chat_template_kwargs"),
    ([IDS], [], CHAT_TEMPLATE, "no_eos", "1 of 1 pair", "</s>.*chosen_ids and rejected_ids"),
    ([LONG_CHAT] * 3, CUT_LEFT, CHAT_TEMPLATE, "prompt_cut", "3 of 3 pairs", r"data\.max_length: \d+"),
    ([LONG_ANSWER] * 3, CUT_RIGHT, CHAT_TEMPLATE, "completion_cut", "3 of 3 pairs", r"data\.max_length: \d+"),
    ([PAIR, SAME, SAME], [], CHAT_TEMPLATE, "identical_completions", r"2 of 3 rows \(lines 2, 3\)",
     r"data\.train\.0\.columns"),
    ([PAIR, EMPTY], [], CHAT_TEMPLATE, "empty_completion", r"1 of 2 rows \(line 2\)",
     r"data\.train\.0\.columns"),
    ([{**CHAT, "prompt": [user("<image>What?"), assistant("A cat."), user("Sure?")]}], [], CHAT_TEMPLATE,
     "foreign_marks", "1 of 1 pair", r"images with model\.images: true"),
    ([CHAT], [], TWO_BOS, "bos_twice", "1 of 1 pair", r"tokenizer\.chat_template"),
    (LABELS, [], CHAT_TEMPLATE, "prompt_is_a_label", "30 of 30 pairs", r"data\.train\.0\.columns\.prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "overrides", "template", "name", "where", "remedy"), FAULTS)
def test_a_fault_is_named_with_its_remedy_in_every_view(
    rows: list[Row], overrides: list[str], template: str, name: str, where: str, remedy: str, shows: Shows
) -> None:
    shown = shows(rows, *overrides, template=template)
    (warning,) = as_json(shown)["warnings"]
    assert (warning["name"], warning["source"]) == (name, "pairs") and re.search(remedy, warning["remedy"])
    for text in (joined(screen(shown)), page_text(shown)):
        assert re.search(f"WARNING pairs, {where}.*Remedy: .*{remedy}", text), text


def test_the_remedy_for_cut_pairs_keeps_the_longest_and_names_the_low_limit(shows: Shows) -> None:
    prompt = [1, *range(10, 40)]  # 31 tokens
    ids: Row = {"chosen_ids": [50, 51, 2], "rejected_ids": [52, 2]}
    rows = [{**ids, "prompt_ids": prompt}, {**ids, "prompt_ids": [1, 2]}]
    for limits, remedy in (
        (("data.max_length=33", "data.max_prompt_length=31"), "data.max_length: 34 keeps"),
        (("data.max_length=34", "data.max_prompt_length=30"), "data.max_prompt_length: 31 keeps"),
    ):
        (fault,) = shows(rows, "data.truncation=prompt_left", *limits).report["warnings"]
        assert fault["remedy"].startswith(remedy) and fault["rows"] == [1]


@pytest.mark.parametrize(
    "rows", [[PAIR], [CHAT], [{**CHAT, "prompt": turns(3)}]], ids=["text", "chat", "turns"]
)
def test_pairs_that_are_in_order_get_no_warning(rows: list[Row], shows: Shows) -> None:
    shown = shows(rows * 3)
    assert shown.report["warnings"] == [] and "No common fault" in screen(shown)
    assert screen(shown).count('ends with "</s>"') == 4  # two pairs, two completions each
    assert "Left out: none of the rows" in screen(shown)


# ---- Tokens


def test_json_has_each_token_that_the_model_gets_with_id_text_part_and_score(shows: Shows) -> None:
    value = as_json(shows([PAIR, PAIR, EMPTY]))
    pair = value["pairs"][0]
    assert (pair["source"], pair["row"], pair["content"]) == ("pairs", 1, PAIR)
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
    assert pair["ends_with"] == {"chosen": "</s>", "rejected": "</s>"}
    (dropped,) = value["dropped"]
    assert (dropped["source"], dropped["row"], dropped["reason"]) == ("pairs", 3, "empty_completion")
    assert dropped["content"] == EMPTY
    assert [(source["name"], source["pairs_kept"]) for source in value["sources"]] == [("pairs", 2)]
    assert [(reason["name"], reason["count"]) for reason in value["left_out"]] == [("empty_completion", 1)]


@pytest.mark.parametrize("text", ["Zażółć 日本語 👍🏽!", "tab\tand\x1b[31m[b]x[/b]\u200b", "a\n\n b  c "])
def test_the_texts_of_tokens_are_the_text_whatever_its_characters(text: str, shows: Shows) -> None:
    shown = shows([{**PAIR, "chosen": text}] * 3)
    assert (
        "".join(token["text"] for token in shown.report["pairs"][0]["chosen"])
        == PAIR["prompt"] + text + "</s>"
    )
    assert "\x1b" not in screen(shown) and "\x1b" not in pairs_page(shown)


def test_half_of_a_surrogate_pair_is_shown_in_every_view(shows: Shows, tmp_path: Path) -> None:
    shown = shows([PAIR, '{"prompt": "a", "chosen": "\\ud800", "rejected": "b"}'])
    for text in (screen(shown), pairs_page(shown), to_json(shown.report)):
        assert b"ud800" in text.encode()
    assert as_json(shown)["dropped"][0]["content"]["chosen"] == "\ud800"


def test_tokens_that_were_cut_are_shown_as_cut_and_are_not_among_those_of_the_model(shows: Shows) -> None:
    shown = shows([LONG_CHAT], *CUT_LEFT)
    pair = shown.report["pairs"][0]
    kept = [token for token in pair["chosen"] if not token["is_cut"]]
    assert max(len(kept), sum(not token["is_cut"] for token in pair["rejected"])) == 64
    assert pair["chosen"][1]["is_cut"] and kept == [
        pair["chosen"][0],
        *pair["chosen"][1 - len(kept) :],
    ]  # BOS stays
    ids = [token["id"] for token in as_json(shown)["pairs"][0]["chosen"]]
    assert ids == [token["id"] for token in kept]
    assert not any(token["scored"] for token in pair["chosen"] if token["is_cut"])
    assert "<s>[cut off:|user|↵ me|ss|a|g|e| |0|" in joined(screen(shown))
    assert "message 0 of the chat" in page_text(shown)
    shown = shows([LONG_ANSWER], *CUT_RIGHT)
    sides = shown.report["pairs"][0]["chosen"], shown.report["pairs"][0]["rejected"]
    assert [sum(not token["is_cut"] for token in side) for side in sides][0] == 32 and sides[0][-1]["is_cut"]
    assert shown.report["pairs"][0]["ends_with"] == {"chosen": "", "rejected": "</s>"}
    assert re.search(r"</s>\] ?\[no EOS\]", joined(screen(shown)))


# ---- What is read, and what is left out


def test_only_the_first_rows_are_tokenised_and_told(shows: Shows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo_pack.run.show, "FIRST_ROWS", 5)
    rows: list[Row | str] = [*([PAIR] * 9), "{bad", PAIR]
    shown = shows(rows)
    assert shown.report["sources"][0]["rows_read"] == 5 and shown.report["sources"][0]["rows"] is None
    assert "only 5 rows tokenised" in joined(screen(shown)) and "--dropped (reads all rows)" in screen(shown)
    asked = shows(rows, asked=[8])
    assert [pair["row"] for pair in asked.report["pairs"]] == [8]
    whole = shows(rows, reads_all=True)
    assert "11 of 11 rows tokenised, 10 kept, 1 left out" in joined(screen(whole))
    assert "line 10: invalid JSON" in joined(screen(whole)) and "{bad" in screen(whole)
    assert "(line 10): no pair (invalid_json), a run stops there; invalid JSON" in joined(screen(whole))
    assert (
        whole.report["packed_row"] is not None and len(whole.report["packed_row"]["pairs"]) == 5
    )  # memory does not grow with rows
    assert "5 of 5 rows tokenised" in joined(screen(shows([PAIR] * 5)))
    assert "1 of 1 row tokenised" in joined(screen(one := shows([PAIR]))) and ": 1 pair, " in repr(one)


def test_rows_that_are_left_out_are_listed_without_pairs_and_counted(shows: Shows) -> None:
    shown = shows([PAIR, *([EMPTY] * 7)], reads_all=True)
    text = screen(shown, lists_dropped=True)
    assert "line 6: the chosen completion is empty" in text and "line 7: the chosen" not in text
    assert "[2 more of these rows; " in text
    assert "PROMPT" not in text and "packed row" not in text and len(shown.report["pairs"]) == 1
    assert "[6 more of these rows; " in screen(shown)


def test_max_pairs_ends_the_reading_as_in_a_run(shows: Shows) -> None:
    shown = shows([PAIR] * 5, "data.train.0.max_pairs=2")
    source = shown.report["sources"][0]
    assert (source["rows_read"], source["pairs_kept"], source["rows"]) == (2, 2, None)


def test_a_source_without_rows_and_an_online_recipe_are_refused(shows: Shows) -> None:
    with pytest.raises(DataError, match="has no rows"):
        shows([])
    online = ["online.judges=[{type: function, function: a:b}]", "train.max_steps=1"]
    with pytest.raises(RecipeError, match="online: this command needs pairs"):
        shows([PAIR], *online)


# ---- The row, and how it all fits


@pytest.mark.parametrize(
    ("override", "tokens"),
    [
        ("seed=1", (8, 5, 5)),  # what both completions begin with is shared
        ("packing.share_prompt=false", (14, 6, 6)),
        ("packing.mode=padded", (14, 6, 6)),
    ],
)
def test_one_packed_row_is_made_of_those_pairs(
    override: str, tokens: tuple[int, int, int], shows: Shows
) -> None:
    shown = shows([PAIR] * 3, override)
    row = shown.packed_row
    parts = dict(zip(("prompt", "chosen", "rejected"), tokens, strict=True))
    assert row.pairs == {f"pairs line {number}": parts for number in (1, 2, 3)}
    assert row.tokens == 3 * sum(tokens)
    for text in (joined(screen(shown)), page_text(shown)):
        assert f"3 pairs, {row['tokens']:,} of 2,048 tokens" in text
        assert f"pairs line 2: {sum(tokens)}" in text


def test_what_pairs_of_the_row_have_in_common_is_in_it_once(shows: Shows) -> None:
    pairs = [{**PAIR, "prompt": "red green blue " * 8 + word} for word in ("sun", "moon")]
    alone, row = shows(pairs, "packing.share_prompt=false").packed_row, shows(pairs).packed_row
    assert row.tokens == sum(sum(parts.values()) for parts in row.pairs.values())
    first, second = (parts["prompt"] for parts in row.pairs.values())
    assert second + 16 <= first and row.tokens < alone.tokens / 2


def test_in_python_what_is_shown_of_a_source_is_read_as_attributes(shows: Shows) -> None:
    (source,) = shows([PAIR, EMPTY], "data.on_bad_row=skip").sources
    (left_out,) = source.dropped
    assert (source.pairs_kept, left_out.row, len(source.pairs)) == (1, 2, 1)
    with pytest.raises(AttributeError, match="pairs_kept"):
        _ = source.no_such_name


def test_a_line_says_which_keys_leave_out_some_of_the_pairs_that_are_shown(shows: Shows) -> None:
    pairs = [{**PAIR, "m": number} for number in range(3)]
    scores = ("data.train.0.columns={score_margin: m}", "data.train.0.min_margin=1")
    shown = shows(pairs, *scores)
    assert shown.sources[0].pairs_kept == 3
    assert "a run trains on fewer of these pairs: min_margin chooses" in screen(shown, 200)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool, shows: Shows) -> None:
    rows: list[Row | str] = [
        {**PAIR, "prompt": "x" * 300 + "\n" + "日本語 word " * 90},
        EMPTY,
        "{" + "bad " * 200,
        PAIR,
    ]
    shown = shows(rows, f"data.max_length={2000 + width}")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen(shown, width, colour=colour))
    assert max(map(cell_len, text.splitlines())) <= width


def test_a_note_says_what_is_wrong_with_a_pair(shows: Shows) -> None:
    moons = [f"the red moon {number}" for number in range(3)]
    rows = [{"prompt": moon, "chosen": f"{moon} yes", "rejected": f"{moon} no"} for moon in moons]
    rows += [{"prompt": f"{moon}?", "chosen": "yes", "rejected": "no"} for moon in moons * 10]
    shown = shows(rows, template=None)  # fewer than a tenth of the pairs
    assert shown.report["warnings"] == [] and shown.report["pairs"][0]["warnings"] == []
    shown = shows(rows[:4], template=None)
    assert [len(pair["warnings"]) for pair in shown.report["pairs"]] == [1, 1]
    assert (
        screen(shown).count("\n! ")
        == page_text(shown).count("! prompt_in_completion chosen and rejected:")
        == 2
    )


def test_held_out_sources_are_shown_after_training_data_with_faults(shows: Shows, tmp_path: Path) -> None:
    rows = [{"prompt": f"ask {n}", "chosen": " yes", "rejected": " no"} for n in range(3)]
    repeated = [{"prompt": "the red moon", "chosen": "the red moon yes", "rejected": "the red moon no"}] * 3
    write_rows(tmp_path / "held.jsonl", repeated)
    shown = shows(rows, f"data.eval={tmp_path / 'held.jsonl'}", template=None)
    text = joined(screen(shown, 120))
    assert "held (held out), format preference: 3 of 3 rows tokenised, 3 kept" in text
    assert "WARNING held (held out), 3 of 3 pairs (lines 1, 2, 3): " in text
    assert "data.eval.0.columns: {prompt: null}" in text
    pairs = [(pair["source"], pair["row"]) for pair in as_json(shown)["pairs"]]
    assert pairs == [("pairs", 1), ("pairs", 2), ("held (held out)", 1)]
    assert shown.report["packed_row"] is not None and all(
        "held" not in place for place in shown.report["packed_row"]["pairs"]
    )
