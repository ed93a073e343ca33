"""Prompts of a verdict, and what two models answer to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.refusals import refusal
from support.rows import said, user, write_rows
from support.tiny_adapters import saved_adapter
from support.tiny_tokenizer import tiny_tokenizer
from support.tiny_verdict import contest_in, finish
from support.whole_runs import text
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpo_pack.data.tokenization import Prompt
from dpo_pack.online.interface import Completion, Rollout, SamplingSettings
from dpo_pack.online.judges import without_reasoning
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.recipe.data import SourceRecipe
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import resolve_model
from dpo_pack.run.setup import prepare_data
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError, RunError
from dpo_pack.verdicts import answers
from dpo_pack.verdicts.answers import Contest, answer_prompts, choose_prompts, prepare_contest

GREEDY = SamplingSettings(completions_per_prompt=1, max_new_tokens=4, temperature=0.0)
DRAWN = replace(GREEDY, max_new_tokens=8, temperature=1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run that is as good as finished. Nobody may write there."""
    directory = tmp_path_factory.mktemp("verdict")
    finish(contest_in(directory).recipe)
    return directory


def asked(*texts: str) -> list[Prompt]:
    rows = [np.array(tiny_tokenizer()(one)["input_ids"], dtype=np.int32) for one in texts]
    return [
        Prompt(ids=ids, text=one, messages=None, row_number=n)
        for n, (one, ids) in enumerate(zip(texts, rows, strict=True), 1)
    ]


def held_out(contest: Contest, source: SourceRecipe | None = None, num: int = 100) -> list[str]:
    """The texts of the prompts that leave room for 8 tokens."""
    return [one.text for one in choose_prompts(contest, source, num=num, max_new_tokens=8)]


def texts(rollouts: list[Rollout]) -> list[tuple[str, ...]]:
    return [tuple(answer.text for answer in rollout.completions) for rollout in rollouts]


def trained_prompt(directory: Path) -> str:
    return str(json.loads((directory / "pairs.jsonl").read_text().splitlines()[0])["prompt"])


# ------------------------------------------------------------------------------------------------ prompts


def test_prompts_are_those_of_the_held_out_source_each_once_and_in_the_same_order(
    directory: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"ask {name}", "chosen": " yes", "rejected": " no"} for name in "abcdefgabc"]
    held = write_rows(tmp_path / "held.jsonl", rows)
    contest = contest_in(directory, f"data.eval={held}", f"output_dir={tmp_path}")
    finish(contest.recipe)
    found = held_out(contest)
    assert sorted(found) == [f"ask {name}" for name in "abcdefg"] != found
    assert held_out(contest, num=3) == found[:3]  # so answers are kept when more prompts are asked for
    assert "Prompts: 3 (7 different ones)" in text(contest.console)
    seeded = contest_in(directory, f"data.eval={held}", f"output_dir={tmp_path}", "seed=1")
    assert held_out(seeded) != found


def test_a_prompt_that_was_trained_on_or_leaves_no_room_is_left_out(directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt} for prompt in (trained_prompt(directory), "ask new", "ask " * 190)]
    source = SourceRecipe(path=write_rows(tmp_path / "own.jsonl", rows))
    contest = contest_in(directory)
    assert held_out(contest, source) == ["ask new"]
    assert "Prompts: 1 (3 different ones, 1 trained on, 1 too long for 8 more)" in text(contest.console)
    write_rows(tmp_path / "own.jsonl", rows[:1])
    told = refusal(lambda: held_out(contest, source), RunError)
    assert "none is left (1 different ones, 1 trained on); name others" in told


def test_a_held_out_prompt_that_was_trained_on_too_is_left_out(directory: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": prompt, "chosen": " yes", "rejected": " no"}
        for prompt in (trained_prompt(directory), "ask new")
    ]
    held = write_rows(tmp_path / "held.jsonl", rows)
    contest = contest_in(directory, f"data.eval={held}", f"output_dir={tmp_path}")
    finish(contest.recipe)
    assert held_out(contest) == ["ask new"]


@pytest.mark.parametrize("is_online", [False, True])
def test_of_a_fraction_only_the_rows_that_were_held_out_are_prompts(
    is_online: bool, directory: Path, tmp_path: Path
) -> None:
    options = ["data.eval={fraction: 0.3}", f"output_dir={tmp_path}"]
    if is_online:
        judges = "judges: [{type: function, function: m:f}]"
        options += [f"online={{{judges}, max_new_tokens: 4}}", "train.max_steps=1"]
    paths = []
    for name in ("one", "two"):
        rows = [{"prompt": f"ask {name} {n}", "chosen": " yes", "rejected": " no"} for n in range(10)]
        if not is_online:  # a row that is no pair is neither trained on nor held out
            rows.append({"prompt": f"ask {name} in vain", "chosen": " yes", "rejected": " yes"})
        paths.append(write_rows(tmp_path / f"{name}.jsonl", rows))
    options.append(f"data.train=[{', '.join(paths)}]")
    contest = contest_in(directory, *options, "data.on_bad_row=skip")
    finish(contest.recipe)
    data = prepare_data(contest.recipe, contest.tokenizer, contest.console, takes_prompts=True)
    expected = [prompt.text for prompt in data.eval_prompts.get("held_out", ())]
    if not is_online:
        table = data.eval["held_out"]
        groups = [table.group(number) for number in range(table.num_pairs)]
        expected = [str(contest.tokenizer.decode(group.context.tolist())) for group in groups]
    assert len(expected) == 6 and sorted(held_out(contest)) == sorted(expected)


def test_messages_and_tools_are_as_the_row_has_them(directory: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": "of a city"}}]
    row = {"prompt": [user("warm?"), said("assistant", "where?"), user("Rome")], "tools": tools}
    source = SourceRecipe(path=write_rows(tmp_path / "own.jsonl", [row]))
    contest = contest_in(directory, f"output_dir={tmp_path}")  # no run is there
    contest.tokenizer.chat_template = tiny_tokenizer(chat_template=True).chat_template
    (prompt,) = choose_prompts(contest, source, num=1, max_new_tokens=8)
    assert list(prompt.messages or ()) == row["prompt"] and prompt.tools == tools
    assert prompt.text.startswith("<s>tools\n") and prompt.text.endswith("<s>assistant\n")


@pytest.mark.parametrize("part", ["train", "eval"])
def test_data_that_changed_since_the_run_are_refused_or_with_own_prompts_a_warning(
    part: str, directory: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"ask {n}", "chosen": " yes", "rejected": " no"} for n in range(4)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    contest = contest_in(directory, f"data.{part}={path}", f"output_dir={tmp_path}")
    finish(contest.recipe)
    assert held_out(contest)
    write_rows(tmp_path / "pairs.jsonl", rows[:3])
    told = refusal(lambda: held_out(contest), RunError)
    assert told.startswith(f"verdict: {path} changed since the run") and "in verdict.prompts" in told
    source = SourceRecipe(path=write_rows(tmp_path / "own.jsonl", [{"prompt": "ask me"}]))
    assert held_out(contest, source) == ["ask me"]
    told = "Warning: the prompts that were trained on are unknown, so all count (verdict: "
    assert told in text(contest.console)


def test_without_held_out_prompts_and_with_images_one_line_says_what_to_do(directory: Path) -> None:
    cases: list[tuple[type[DpoPackError], tuple[str, ...], str]] = [
        (RecipeError, ("data.eval=[]",), "verdict.prompts: no prompts are held out .*; name a data source"),
        (RecipeError, ("output_dir=unused",), "verdict.prompts: no prompts are held out"),
    ]
    for kind, overrides, message in cases:
        with pytest.raises(kind, match=message):
            held_out(contest_in(directory, *overrides))
    contest = contest_in(directory)
    pictured = contest.recipe.model.model_copy(update={"images": True})
    contest = replace(contest, recipe=contest.recipe.model_copy(update={"model": pictured}))
    assert "images are not answered yet" in refusal(lambda: held_out(contest), RecipeError)


# ------------------------------------------------------------------------------------------------ answers


def test_answers_are_what_transformers_writes_greedily(directory: Path, tmp_path: Path) -> None:
    contest = contest_in(directory)
    rollouts = answer_prompts(contest, asked("ask red", "ask one two three"), GREEDY, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    for side, path in enumerate(("model", "other")):
        model: Any = AutoModelForCausalLM.from_pretrained(directory / path, attn_implementation="eager")
        for rollout in rollouts:
            ids = torch.tensor([rollout.draw.prompt.ids.tolist()])
            written = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
            expected = tokenizer.decode(written, skip_special_tokens=True)
            assert rollout.completions[side].text == expected
    assert len(set(texts(rollouts)[0])) == 2  # the models differ


def test_both_models_get_the_same_random_numbers(directory: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    with torch.no_grad():
        next(model.parameters()).add_(1e-7)  # another model, as its hash says, and the same answers
    model.save_pretrained(tmp_path / "same")
    AutoTokenizer.from_pretrained(directory / "model").save_pretrained(tmp_path / "same")
    contest = contest_in(directory, new=str(tmp_path / "same"))
    prompts = asked(*(f"ask {n}" for n in range(6)))
    found = texts(answer_prompts(contest, prompts, DRAWN, tmp_path / "verdict"))
    assert all(start == new for start, new in found) and len(set(found)) == 6
    assert len((tmp_path / "verdict" / "answers.jsonl").read_text().splitlines()) == 12
    assert "100% are identical" in text(contest.console)
    seeded = replace(contest, recipe=contest.recipe.model_copy(update={"seed": 7}))
    assert texts(answer_prompts(seeded, prompts, DRAWN, tmp_path / "verdict")) != found


def test_a_verdict_that_is_killed_goes_on_with_the_same_answers(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_BATCH_PROMPTS", 2)
    contest, prompts = contest_in(directory), asked(*(f"ask {'red ' * n}" for n in range(5)))
    whole = answer_prompts(contest, prompts, DRAWN, tmp_path / "whole")
    generate, asked_for = TransformersGenerator.generate, list[int]()

    def dies(self: TransformersGenerator, draws: Any) -> Any:
        if len(asked_for) == 4:  # the first batch of the new model is done
            raise KeyboardInterrupt
        asked_for.append(len(draws))
        return generate(self, draws)

    monkeypatch.setattr(TransformersGenerator, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        answer_prompts(contest, prompts, DRAWN, tmp_path / "killed")
    with (tmp_path / "killed" / "answers.jsonl").open("a") as file:
        file.write('{"key": "x", "answ')  # a line that was cut
    asked_for[:] = [0]
    again = answer_prompts(contest, prompts, DRAWN, tmp_path / "killed")
    assert sum(asked_for) == 3  # of the new model's answers, those that were missing
    assert texts(again) == texts(whole)
    files = [(tmp_path / name / "answers.jsonl").read_text() for name in ("whole", "killed")]
    assert files[0] == files[1]


def test_answers_that_are_cut_off_are_told_and_warned_of(directory: Path, tmp_path: Path) -> None:
    contest = contest_in(directory)
    (rollout,) = answer_prompts(contest, asked("ask red"), replace(GREEDY, max_new_tokens=1), tmp_path)
    assert not any(answer.is_finished for answer in rollout.completions)
    told = text(contest.console)
    assert (
        "1 and 1 tokens on average; verdict.max_new_tokens cuts off 100% and 100%; 0% are identical" in told
    )
    assert (
        "Warning: judges see only the beginnings of 100% of a model's answers; raise verdict.max_new" in told
    )


def test_an_adapter_answers_in_the_precision_of_its_base(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_autocast(*arguments: Any, **options: Any) -> Any:
        facts = resolve_model(*arguments, **options)
        autocast = None if facts.adapter is None else torch.bfloat16  # as on CUDA, for adapters only
        return replace(facts, precision=replace(facts.precision, autocast=autocast))

    monkeypatch.setattr(answers, "resolve_model", with_autocast)
    saved_adapter(tmp_path / "adapter", directory / "model")
    contest = contest_in(directory, new=str(tmp_path / "adapter"))
    assert contest.new.adapter is not None and contest.new.precision == contest.start.precision
    rollouts = answer_prompts(contest, asked("ask red one two"), DRAWN, tmp_path)
    assert len(set(texts(rollouts)[0])) == 2


def test_a_model_with_other_tokens_or_one_that_fails_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, draws: object) -> None:
        raise ValueError("no cache\nsecond line")

    monkeypatch.setattr(TransformersGenerator, "generate", fails)
    told = refusal(lambda: answer_prompts(contest_in(directory), asked("ask"), GREEDY, tmp_path), ModelError)
    assert told.endswith("cannot answer (no cache)")
    AutoModelForCausalLM.from_pretrained(directory / "model").save_pretrained(tmp_path / "new")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "new")
    told = refusal(lambda: contest_in(directory, new=str(tmp_path / "new")), ModelError)
    assert "another tokenizer" in told and told.endswith("; compare models with the same tokenizer")


@pytest.mark.parametrize(
    ("written", "prompt", "said"),
    [
        ("<think>Is it 4?</think>\n\nIt is 5.", "", "It is 5."),
        ("Is it 4?</think>It is 5.", "<think>\n", "It is 5."),  # the template has begun the reasoning
        ("Is it 4? Or 5", "<|assistant|><think>\n", ""),
        ("<think>Is it 4? Or 5", "", ""),
        ("It is 5.", "<think>\n\n</think>\n\n", "It is 5."),
        (" It is 5.", "", " It is 5."),
        ("The mark </think> ends it.", "Which mark?", "The mark </think> ends it."),
        ("<|channel|>analysis<|message|>4?<|end|><|channel|>final<|message|>It is 5.", "", "It is 5."),
        ("<|channel|>final<|message|>It is 5.", "", "It is 5."),
    ],
)
def test_what_a_model_thinks_is_cut_from_its_answer(written: str, prompt: str, said: str) -> None:
    assert without_reasoning(written, prompt=prompt).lstrip("\n") == said


def test_reasoning_between_special_tokens_is_cut_though_texts_have_no_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    ids = np.array(tokenizer("[THINK]four?[/THINK] five STOP six</s>")["input_ids"], dtype=np.int32)
    answer = Completion(ids=ids, text="four? five STOP six", is_finished=True)
    (prompt,) = asked("ask")
    assert answers._said(answer, prompt, tokenizer, ["STOP"]) == "five"
    plain = Completion(ids=ids[-1:], text=" as it is", is_finished=True)
    assert answers._said(plain, prompt, tokenizer, []) == "as it is"


@pytest.mark.slow
def test_a_finished_run_and_its_start_answer_its_held_out_prompts(
    straight: Path, tmp_path: Path, console: Console
) -> None:
    recipe = load_recipe(straight, lenient=True)
    contest = prepare_contest(recipe, str(straight / "model"), console)
    prompts = choose_prompts(contest, None, num=4, max_new_tokens=4)
    lines = Path(recipe.data.eval_sources[0].path).read_text().splitlines()
    written = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 4 and {prompt.text for prompt in prompts} < set(written)
    found = texts(answer_prompts(contest, prompts, GREEDY, tmp_path))
    assert len(found) == 4 and any(start != new for start, new in found)
