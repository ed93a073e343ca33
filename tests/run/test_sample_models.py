"""`dpopack sample`: what models answer to the same prompts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from support.tiny_adapters import saved_adapter
from support.whole_runs import whole_run
from transformers import AutoTokenizer

from dpo_pack.run import samples
from dpo_pack.run.samples import read_samples, sample_models
from dpo_pack.system.errors import DpoPackError, ModelError, RecipeError
from dpo_pack.trainer import train

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def run(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with two samples of four tokens. Nobody may write there."""
    path = tmp_path_factory.mktemp("sample") / "run"
    few = ("train.max_steps=1", "logging.samples={num: 2, max_new_tokens: 4}", "optim.lr=0.05")
    train(whole_run(assets, path, *few), Console(quiet=True))
    return path


def test_a_run_is_compared_with_its_start_on_the_prompts_of_its_samples(
    run: Path, assets: Path, console: Console
) -> None:
    prompts, answers = sample_models([str(run)], console, texts=(), num=None)
    written = read_samples(run / "samples.jsonl")
    start, policy = written[:2], written[2:]
    assert prompts == [("heldout", sample.prompt) for sample in start]
    assert answers == {
        str(assets / "model"): [sample.completion for sample in start],
        str(run / "model"): [sample.completion for sample in policy],
    }


def test_several_models_complete_a_text_of_the_user(
    run: Path, assets: Path, tmp_path: Path, console: Console
) -> None:
    saved_adapter(tmp_path / "adapter", assets / "model")
    models = [str(run), str(tmp_path / "adapter"), str(assets / "model")]
    prompts, answers = sample_models(models, console, texts=("ask red", "ask blue"), num=None)
    assert prompts == [("prompt", "ask red"), ("prompt", "ask blue")]
    assert list(answers) == [str(path) for path in (assets / "model", run / "model", tmp_path / "adapter")]
    assert {len(texts) for texts in answers.values()} == {2}


def test_a_recipe_has_the_prompts_of_a_model_and_num_says_how_many(assets: Path, console: Console) -> None:
    models = [str(assets / "model"), str(assets / "recipe.yaml")]
    ((source, prompt),), _ = sample_models(models, console, texts=(), num=1)
    assert source == "heldout" and prompt.startswith("ask")


@pytest.mark.parametrize(
    ("ids", "expected"), [([5, 6, 2], [5, 6]), ([5, 2], [5]), ([2], [2]), ([5, 2, 6], [5, 2, 6])]
)
def test_the_eos_that_a_tokenizer_adds_is_not_continued(ids: list[int], expected: list[int]) -> None:
    tokenizer: Any = Mock(return_value={"input_ids": [ids]}, chat_template=None, eos_token_id=2)
    assert samples._prompt("a text", tokenizer, {}, most_tokens=4).ids.tolist() == expected


def test_wrong_arguments_are_refused_in_one_line(
    run: Path, assets: Path, tmp_path: Path, console: Console
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
