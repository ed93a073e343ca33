"""A recipe is resolved once: every config is loaded, every model built and every epoch planned one time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.tiny_models import tiny_model
from support.tiny_run import tiny_run
from support.tiny_tokenizer import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import dpo_pack.trainer as train_module
from dpo_pack.model import loading
from dpo_pack.packing.plan import plan_epoch
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.trainer import train
from dpo_pack.training import batches


@dataclass(slots=True)
class Calls:
    """What was loaded, built and planned since the test began."""

    configs: Counter[str] = field(default_factory=Counter)  # by the directory's name
    builds: Counter[str] = field(default_factory=Counter)  # on the meta device, by family
    plans: Counter[tuple[int, bytes]] = field(default_factory=Counter)  # by token budget and epoch's order

    def of_budget(self, token_budget: int) -> list[int]:
        """How often each epoch was planned for rows of this many tokens."""
        return [count for (budget, _), count in self.plans.items() if budget == token_budget]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counted = Calls()
    read_config: Any = AutoConfig.from_pretrained
    build: Any = AutoModelForCausalLM.from_config
    plan = plan_epoch

    class CountingConfig:
        @staticmethod
        def from_pretrained(path: str, **options: Any) -> Any:
            counted.configs[Path(path).name] += 1
            return read_config(path, **options)

    def counting_build(config: Any, **options: Any) -> Any:
        counted.builds[config.model_type] += 1
        return build(config, **options)

    def counting_plan(*arguments: Any, **options: Any) -> Any:
        counted.plans[(options["token_budget"], options["order"].tobytes())] += 1
        return plan(*arguments, **options)

    monkeypatch.setattr(loading, "AutoConfig", CountingConfig)
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", counting_build)
    monkeypatch.setattr(batches, "plan_epoch", counting_plan)
    return counted


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    """A tiny run, and a reference of another family beside it."""
    path = tiny_run(tmp_path)
    tiny_model("qwen3", vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path / "other")
    return path


def start(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the first step, as `dpopack train` does it."""
    monkeypatch.setattr(train_module.Trainer, "run_steps", lambda *_: None)
    monkeypatch.setattr(train_module.Trainer, "finish", lambda session: None)
    train(recipe, Console(quiet=True))


@pytest.mark.parametrize("setting", ["model.lora={r: 2}", *slow("packing.mode=padded", "loss.type=simpo")])
def test_a_run_starts_with_one_config_one_meta_build_and_one_plan_an_epoch(
    setting: str, recipe_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(load_recipe(recipe_path, [setting]), monkeypatch)
    assert calls.configs == {"model": 1} and calls.builds == {"llama": 1}
    assert calls.of_budget(128) == [1]
    assert max(calls.plans.values()) == 1  # the report's other budgets included
