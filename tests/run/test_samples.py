"""samples.jsonl: greedy completions that change no step; `dpopack sample`: what models answer to prompts."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.marks import slow
from support.reference_pairs import make_table
from support.rows import write_rows
from support.tiny_adapters import saved_adapter
from support.tiny_online import online_recipe
from support.tiny_tokenizer import tiny_tokenizer
from support.whole_runs import assert_same_run, at_step, lines, saved_weights, text, whole_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.run.samples import read_samples, sample_models, sample_prompts
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError
from dpo_pack.system.files import read_json
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.trainer import train

SOME = "logging.samples={num: 2, max_new_tokens: 4, every_evals: 2}"  # an evaluation after every other step


def samples(run: Path) -> list[dict[str, Any]]:
    return read_samples(run / "samples.jsonl")


@pytest.fixture(scope="module")
def sampled(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with samples, which nothing interrupted. Nobody may write there."""
    run = tmp_path_factory.mktemp("sampled") / "run"
    train(whole_run(assets, run, SOME), Console(quiet=True))
    return run


def test_samples_are_what_transformers_writes_greedily(sampled: Path, assets: Path) -> None:
    written = samples(sampled)
    assert [(sample["step"], sample["model"]) for sample in written] == [
        (step, "policy" if step else "start") for step in (0, 4, 8) for _ in range(2)
    ]
    assert {sample["source"] for sample in written} == {"heldout"}
    tokenizer = AutoTokenizer.from_pretrained(sampled / "model")
    for step, path in ((0, assets / "model"), (8, sampled / "model")):
        model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        for sample in (sample for sample in written if sample["step"] == step):
            ids = torch.tensor([tokenizer.encode(sample["prompt"], add_special_tokens=False)])
            output = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
            if output[-1] == tokenizer.eos_token_id:
                output.pop()
            assert sample["completion"] == tokenizer.decode(output)


def test_samples_change_no_step(sampled: Path, straight: Path) -> None:
    assert_same_run(sampled, straight)


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("step", "action", "ends"),
    [(7, fail, ZeroDivisionError), *slow((3, stop, Interrupted))],
    ids=["kill", "stop"],
)
def test_a_resumed_run_has_each_sample_once(
    step: int,
    action: Callable[[], None],
    ends: type[BaseException],
    sampled: Path,
    assets: Path,
    tmp_path: Path,
) -> None:
    recipe = whole_run(assets, tmp_path / "run", SOME, "checkpoint.every_steps=3")
    with pytest.raises(ends):
        train(recipe, Console(quiet=True), after_step=at_step(step, action))
    file = tmp_path / "run" / "samples.jsonl"
    later = json.dumps({**samples(tmp_path / "run")[-1], "step": 7})
    file.write_text(f'{file.read_text()}{later}\n{{"step": 4, "sou')  # the last line was cut
    train(recipe, Console(quiet=True))
    ours, theirs = ((one / "samples.jsonl").read_bytes() for one in (tmp_path / "run", sampled))
    assert ours == theirs


@pytest.mark.slow
def test_with_load_best_the_last_samples_are_of_the_weights_that_are_left(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    best = ("checkpoint.keep_best=1", "checkpoint.load_best=true", "optim.schedule=constant", "loss.beta=1")
    often = ("optim.lr=0.05", "train.eval_every_steps=1", "logging.samples={num: 1, max_new_tokens: 1}")
    train(whole_run(assets, tmp_path / "run", *best, *often), console)
    step = read_json(tmp_path / "run" / "run.json")["best"]["step"]
    assert step < 8  # or the test shows nothing
    assert [sample["step"] for sample in samples(tmp_path / "run")] == [0, step]


def test_prompts_are_of_each_held_out_set_in_turn_and_all_different(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    row = {"chosen": " yes", "rejected": " no"}
    for name, prompts in (("one", ["a", "a", "b", "c"]), ("two", ["d"])):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"ask {prompt}", **row} for prompt in prompts])
    sets = ", ".join(f"{{path: {tmp_path / name}.jsonl, name: {name}}}" for name in ("one", "two"))
    few = ("logging.samples={num: 3, max_new_tokens: 1}", "train.max_steps=1", f"data.eval=[{sets}]")
    train(whole_run(assets, tmp_path / "run", *few), console)
    found = [(sample["source"], sample["prompt"][-1]) for sample in samples(tmp_path / "run")[:3]]
    assert found == [("one", "a"), ("two", "d"), ("one", "b")]


def test_prompts_that_leave_just_enough_room_have_samples_and_longer_ones_none() -> None:
    table = make_table([([5] * length, [7], [8]) for length in (5, 4, 3)])
    data: Any = SimpleNamespace(eval={"heldout": table}, eval_prompts={})
    found = sample_prompts(data, tiny_tokenizer(), num=3, most_tokens=4)
    assert [len(prompt.ids) for _, prompt in found] == [4, 3]


def test_where_nothing_is_held_out_prompts_are_training_prompts(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    plain = ("data.eval=[]", "train.eval_every_steps=null", "train.max_steps=1")
    train(whole_run(assets, tmp_path / "run", *plain, "logging.samples={max_new_tokens: 1}"), console)
    assert [(sample["step"], sample["source"]) for sample in samples(tmp_path / "run")] == [
        (step, "pairs") for step in (0, 1) for _ in range(3)
    ]


@pytest.mark.slow
def test_an_online_run_has_samples_of_its_prompts_and_draws_the_same_completions(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    for setting in ("{num: 1, max_new_tokens: 2}", "null"):
        run = tmp_path / f"run-{len(kept)}"
        some = (f"logging.samples={setting}", "train.max_steps=2")
        train(online_recipe(tmp_path / "assets", run, *some), Console(quiet=True))
        kept[setting] = (saved_weights(run / "model"), lines(run))
    assert len({str(one) for one in kept.values()}) == 1
    written = [(sample["step"], sample["source"]) for sample in samples(tmp_path / "run-0")]
    assert written == [(0, "pairs"), (2, "pairs")]


def test_a_model_that_fails_to_generate_trains_all_the_same(
    straight: Path, assets: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(self: object, draws: object) -> None:
        raise RuntimeError("no cache\nsecond line")

    monkeypatch.setattr(TransformersGenerator, "generate", generate)
    train(whole_run(assets, tmp_path / "run", SOME), console)
    assert text(console).count("Samples: none") == text(console).count("Samples: none (no cache)\n") == 1
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert saved_weights(tmp_path / "run" / "model") == saved_weights(straight / "model")


# --------------------------------------------------------------------------------------------- dpopack sample


def test_a_run_is_compared_with_its_start_on_the_prompts_of_its_samples(
    sampled: Path, assets: Path, console: Console
) -> None:
    prompts, answers = sample_models([str(sampled)], console, texts=(), num=None)
    written = read_samples(sampled / "samples.jsonl")
    start, policy = written[:2], written[-2:]
    assert prompts == [("heldout", sample["prompt"]) for sample in start]
    assert answers == {
        str(assets / "model"): [sample["completion"] for sample in start],
        str(sampled / "model"): [sample["completion"] for sample in policy],
    }


def test_several_models_complete_a_text_of_the_user(
    sampled: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    saved_adapter(tmp_path / "adapter", assets / "model")
    models = [str(sampled), str(tmp_path / "adapter"), str(assets / "model")]
    prompts, answers = sample_models(models, console, texts=("ask red", "ask blue"), num=None)
    assert prompts == [("prompt", "ask red"), ("prompt", "ask blue")]
    assert list(answers) == [
        str(path) for path in (assets / "model", sampled / "model", tmp_path / "adapter")
    ]
    assert {len(texts) for texts in answers.values()} == {2}


def test_a_recipe_has_the_prompts_of_a_model_and_num_says_how_many(assets: Path, console: Console) -> None:
    models = [str(assets / "model"), str(assets / "recipe.yaml")]
    ((source, prompt),), _ = sample_models(models, console, texts=(), num=1)
    assert source == "heldout" and prompt.startswith("ask")
    asked: dict[str, Any] = {"texts": ("ask red",), "num": None}
    shorter, longer = (sample_models(models, console, **asked, max_new_tokens=most) for most in (1, 9))
    assert len(shorter[1][models[0]][0]) <= 1 < len(longer[1][models[0]][0])
    assert "An answer has at most 9 tokens (--max-new-tokens)" in text(console)


def test_wrong_arguments_are_refused_in_one_line(
    sampled: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    model, recipe = str(assets / "model"), str(assets / "recipe.yaml")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["another"])
    shutil.copytree(model, tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    other = str(tmp_path / "other")
    cases: list[tuple[type[DpoPackError], list[str], tuple[str, ...], str]] = [
        (RecipeError, [model], (), "is not a run, so it has no prompts; give --prompt TEXT or a recipe"),
        (RecipeError, [recipe], (), "give one or several runs or models, and at most one recipe"),
        (RecipeError, [model, recipe, recipe], (), "at most one recipe"),
        (RecipeError, [model], ("ask " * 1000,), "--prompt: has .* tokens; give 1 to 192"),
        (
            ModelError,
            [model, other],
            ("ask",),
            f"{other} has another tokenizer than {model}: 1 ids .*'another'.*; sample them with two",
        ),
    ]
    for kind, models, texts, message in cases:
        with pytest.raises(kind, match=message):
            sample_models(models, console, texts=texts, num=None)
    with pytest.raises(RecipeError, match="give --prompt or --num, not both"):
        sample_models([model], console, texts=("ask",), num=2)
