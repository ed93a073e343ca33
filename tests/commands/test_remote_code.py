"""Code that comes with a model runs only where the user has allowed it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.remote_code import add_remote_code
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_config
from support.tiny_run import tiny_run
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForSequenceClassification

import dpo_pack
from dpo_pack.commands.main import main
from dpo_pack.model.scorer import Precision
from dpo_pack.online.reward_model import load_reward_model
from dpo_pack.recipe.schema import ModelRecipe


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose model has code of its own; where the code runs, it makes the file `ran`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    recipe = tiny_run(tmp_path)
    saved_adapter(tmp_path / "adapter", tmp_path / "model")
    add_remote_code(tmp_path / "model", tmp_path / "ran")
    return recipe


ONLINE = "{judges: [{type: function, function: support.online_judges:count_e}], max_new_tokens: 4}"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs a command that must succeed."""
    monkeypatch.setattr(sys, "argv", ["dpopack", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


COMMANDS = {
    "precompute-ref": ("precompute-ref", "recipe.yaml"),
    "inspect-packing": ("inspect-packing", "recipe.yaml"),
    "merge": ("merge", "adapter", "merged"),
    "recipe --check": ("recipe", "--check", "recipe.yaml"),
    "doctor": ("doctor", "recipe.yaml"),
    "train": ("train", "recipe.yaml", "train.max_steps=1"),
    "train an adapter": ("train", "recipe.yaml", "train.max_steps=1", "packing.mode=padded", "model.lora={}"),
    "train online": (
        "train",
        "recipe.yaml",
        "train.max_steps=1",
        "packing.pairs_per_step=2",
        f"online={ONLINE}",
    ),
    "evaluate": ("evaluate", "recipe.yaml", "--model", "model"),
    "sample": ("sample", "model", "--prompt", "ask"),
    "evaluate an adapter": ("evaluate", "recipe.yaml", "--model", "adapter"),
}
QUICK = ("precompute-ref", "inspect-packing", "merge")


@pytest.mark.parametrize(
    "command",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name not in QUICK)],
)
def test_no_command_runs_code_of_a_model(command: str, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, *COMMANDS[command])
    assert not (recipe.parent / "ran").exists()


def test_a_reward_model_runs_no_code_that_comes_with_it(recipe: Path, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))
    classifier.save_pretrained(tmp_path / "judge")
    add_remote_code(tmp_path / "judge", tmp_path / "ran")
    load_reward_model(
        str(tmp_path / "judge"),
        tiny_tokenizer(),
        settings=ModelRecipe(path="policy"),
        precision=Precision(parameters=torch.float32, autocast=None),
        token_budget=64,
        device=torch.device("cpu"),
        recipe_key="online.judges.0.path",
    )
    assert not (tmp_path / "ran").exists()


def test_the_code_does_run_where_the_recipe_allows_it(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "inspect-packing", "recipe.yaml", "model.trust_remote_code=true")
    assert (recipe.parent / "ran").exists()


def test_the_package_says_nowhere_that_it_trusts_remote_code() -> None:
    """Each value of `trust_remote_code` is a variable that holds the recipe's word, or the default, False."""
    trusting = re.compile(r"\btrust_remote_code\b[^,)\n]*[=:]\s*(True|1)\b")
    files = Path(dpo_pack.__file__).parent.rglob("*.py")
    found = [
        (file.name, line) for file in files for line in file.read_text().splitlines() if trusting.search(line)
    ]
    assert [name for name, line in found if "if trusts_code else" not in line] == []  # that is a card's text
    for text in ("f(trust_remote_code=True)", '"trust_remote_code": True', "trust_remote_code: bool = True"):
        assert trusting.search(text), "the pattern finds nothing"
