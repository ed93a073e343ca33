"""`dpopack sample`: what models answer to the same prompts, side by side."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from support.tiny_adapters import saved_adapter
from support.whole_runs import text, whole_run
from transformers import AutoTokenizer

from dpo_pack.commands import sample
from dpo_pack.commands.sample import sample_models
from dpo_pack.run.samples import read_samples
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
    sample_models([str(run)], console, texts=(), num=None)
    shown = text(console)
    written = read_samples(run / "samples.jsonl")
    assert len(written) == 4
    for start, policy in zip(written[:2], written[2:], strict=True):
        assert f"heldout: {start.prompt}\n" in shown
        (line,) = (line for line in shown.splitlines() if start.completion.strip() in line)
        assert line.index(start.completion.strip()) < line.rindex(policy.completion.strip())
    assert shown.count(str(assets / "model")) == shown.count(str(run / "model")) == 2
    assert shown.count(" [...] ") == 5  # four answers, and what it means
    assert "An answer that ends in [...] was cut after 4 tokens" in shown


def test_several_models_complete_a_text_of_the_user(run: Path, assets: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=1000)  # no path is longer than a column
    saved_adapter(tmp_path / "adapter", assets / "model")
    models = [str(run), str(tmp_path / "adapter"), str(assets / "model")]
    sample_models(models, console, texts=("ask red", "ask blue"), num=None)
    shown = text(console)
    assert [shown.count(f"prompt: ask {colour}") for colour in ("red", "blue")] == [1, 1]
    for model in (assets / "model", run / "model", tmp_path / "adapter"):
        assert shown.count(str(model)) == 2


def test_a_recipe_has_the_prompts_of_a_model_and_num_says_how_many(assets: Path, console: Console) -> None:
    sample_models([str(assets / "model"), str(assets / "recipe.yaml")], console, texts=(), num=1)
    assert text(console).count("heldout: ask") == 1


@pytest.mark.parametrize(
    ("ids", "expected"), [([5, 6, 2], [5, 6]), ([5, 2], [5]), ([2], [2]), ([5, 2, 6], [5, 2, 6])]
)
def test_the_eos_that_a_tokenizer_adds_is_not_continued(ids: list[int], expected: list[int]) -> None:
    tokenizer: Any = Mock(return_value={"input_ids": [ids]}, chat_template=None, eos_token_id=2)
    assert sample._prompt("a text", tokenizer, most_tokens=4).prompt.ids.tolist() == expected


def _no_model(run: Path, tmp_path: Path) -> list[str]:
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("model"))
    return [str(tmp_path / "copy")]


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
            f"{other} has another tokenizer than {model}; sample them with two",
        ),
        (ModelError, _no_model(run, tmp_path), (), "has no model yet; finish the run"),
    ]
    for kind, models, texts, message in cases:
        with pytest.raises(kind, match=message):
            sample_models(models, console, texts=texts, num=None)
    with pytest.raises(RecipeError, match="give --prompt or --num, not both"):
        sample_models([model], console, texts=("ask",), num=2)
