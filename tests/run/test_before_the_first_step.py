"""A run before its first step: what it tells, what identifies it, and that a full disk ends it at once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.refusals import refusal
from support.tiny_models import tiny_config
from support.whole_runs import text

from dpo_pack.data.store import longest_sequence
from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.checkpoint import run_identity
from dpo_pack.run.evaluate import evaluate_models
from dpo_pack.run.log import describe_training
from dpo_pack.run.models import Setup, resolve_model
from dpo_pack.run.pairs import offline_source
from dpo_pack.run.setup import (
    check_data,
    check_recipe,
    load_proved,
    prepare,
    setting_warnings,
)
from dpo_pack.run.state import Criterion
from dpo_pack.system.errors import ModelError, UnsupportedModelError


@pytest.fixture(scope="module")
def begun(assets: Path) -> tuple[Setup, LoadedModel]:
    prepared = prepare(load_recipe(assets / "recipe.yaml"), Console(quiet=True))
    return prepared, load_proved(prepared)


@pytest.mark.parametrize("is_other", [True, False])
def test_a_reference_or_model_that_reads_other_tokens_is_refused(
    is_other: bool, assets: Path, tmp_path: Path, console: Console
) -> None:
    shutil.copytree(assets / "model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary |= {first: vocabulary[second], second: vocabulary[first]}
    file.write_text(json.dumps(content), encoding="utf-8")
    if not is_other:  # a model without tokenizer files has the run's
        file.unlink()
        (tmp_path / "other" / "tokenizer_config.json").unlink()
    other, plain = f"{tmp_path / 'other'}", load_recipe(assets / "recipe.yaml")
    recipe = load_recipe(assets / "recipe.yaml", [f"reference.path={other}"])
    if not is_other:
        assert check_recipe(recipe)[1] == []
        return
    words = f"{other} has another tokenizer than {assets / 'model'}: 2 ids are other tokens"
    messages = [
        refusal(lambda: prepare(recipe, Console(quiet=True)), ModelError),
        refusal(lambda: evaluate_models(plain, [other], Console(quiet=True)), ModelError),
        *check_recipe(recipe)[1],
    ]
    assert len(messages) == 3 and all(words in message for message in messages)
    turned = load_recipe(assets / "recipe.yaml", [f"tokenizer.path={other}"])
    prepare(turned, console)
    words = f"Warning: model.path: {assets / 'model'} has another tokenizer than {other}: 2 ids"
    assert words in text(console) and any(words in line for line in check_recipe(turned)[0])


def test_evaluations_in_float32_are_not_compared_with_those_in_training_s_precision(
    begun: tuple[Setup, LoadedModel], assets: Path
) -> None:
    """A resumed run whose `auto` decides otherwise forgets which evaluation was best, and says so."""
    criterion, judged_by = Criterion(metric="loss", eval_set="heldout", num_best=1), []
    for how in ("training", "float32"):
        overrides = ["model.autocast=bfloat16", f"train.eval_precision={how}"]
        prepared = prepare(load_recipe(assets / "recipe.yaml", overrides), Console(quiet=True))
        source = offline_source(prepared)
        identity = run_identity(prepared, begun[1], source, criterion, None)
        judged_by.append(identity.judged_by)
    assert judged_by[1] == f"{judged_by[0]}, 6 pairs in float32"


def test_llama_4_is_refused_if_a_pair_longer_than_every_budget_would_reach_its_scaled_positions(
    assets: Path,
) -> None:
    budgets = ["packing.token_budget=8", "reference.token_budget=8"]
    prepared = prepare(load_recipe(assets / "recipe.yaml", budgets), Console(quiet=True))
    longest_row = 2 * longest_sequence(prepared.tables)  # without a shared prompt it is there twice

    def check(floor_scale: int) -> None:
        config = tiny_config(
            "llama4_text",
            vocab_size=len(prepared.tokenizer),
            attention_chunk_size=128,
            attn_temperature_tuning=True,
            floor_scale=floor_scale,
        )
        facts = replace(prepared.policy_facts, config=config)
        check_data(facts, prepared.tokenizer, prepared.tables, 8, None)

    check(longest_row + 1)
    with pytest.raises(UnsupportedModelError, match=f"rows may have {longest_row} tokens"):
        check(longest_row)


@pytest.mark.parametrize(
    ("overrides", "num_parameters", "told"),
    [
        (("loss.beta=1", "optim.lr=1e-4"), 10**9, ""),
        (("loss.beta=1.5",), 1, "loss.beta is 1.5"),
        (("loss.beta=2", "loss.type=[{type: sigmoid, weight: 0.5}, {type: sft}]"), 1, "loss.beta is 2"),
        (("loss.beta=2", "loss.type=simpo"), 1, ""),
        (("optim.lr=2e-4",), 50_000_000, "optim.lr is 0.0002; above 1e-4, 50.0M parameters"),
        (("optim.lr=2e-4",), 49_999_999, ""),
        (("optim.lr=9e-3", "model.lora={}"), 10**9, ""),
        (("optim.lr=1e-2", "model.lora={}"), 10**9, "optim.lr is 0.01; from 1e-2 on, adapters"),
    ],
)
def test_a_rate_or_beta_that_is_most_often_a_mistake_is_told_at_the_start(
    overrides: Any, num_parameters: int, told: str, begun: Any, assets: Path, console: Console
) -> None:
    recipe = load_recipe(assets / "recipe.yaml", overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelFacts, "num_parameters", num_parameters)
        facts, checked = resolve_model(recipe, begun[0].device), check_recipe(recipe)[0]
        setup = replace(begun[0], recipe=recipe, console=console, policy_facts=facts)
        describe_training(setup, None)  # by train and doctor
    for lines in (text(console).splitlines(), checked):
        warnings = [line for line in lines if "Warning" in line]
        assert len(warnings) == bool(told) and all(told in line for line in warnings)


def test_the_quickstart_begins_without_a_warning(begun: tuple[Setup, LoadedModel]) -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "configs/quickstart.yaml")
    assert not [*setting_warnings(recipe.loss, recipe.optim.lr, begun[0].policy_facts)]
