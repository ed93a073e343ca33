"""Whole runs with each kind of loss: coupled, reference-free, weighted, one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.marks import slow
from support.run_files import losses, records
from support.tiny_run import write_rows

import dpo_pack.trainer as train_module
from dpo_pack.model.building import load_model
from dpo_pack.model.facts import ModelFacts
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run import models as recipe_models
from dpo_pack.trainer import train

Make = Callable[..., Recipe]


@pytest.fixture
def make(assets: Path, tmp_path: Path) -> Make:
    """A recipe of the tiny run with overrides, in an output_dir of the given name. Tests share its cache."""

    def recipe(name: str, *overrides: str) -> Recipe:
        return load_recipe(assets / "recipe.yaml", [f"output_dir={tmp_path / name}", *overrides])

    return recipe


MIXED = "[{type: aot}, {type: sigmoid, weight: 0.5}, {type: sft, weight: 0.1}]"
LAYOUTS = (
    ("packing.token_budget=4096",),
    ("packing.token_budget=64",),
    ("packing.token_budget=1",),
    ("packing.mode=padded", "packing.token_budget=256"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [f"loss.type={MIXED}", "loss.type=aot_unpaired", "loss.type=aot", "loss.type=cpo"]
)
def test_what_couples_pairs_or_averages_over_tokens_does_so_over_the_step(
    loss: str, make: Make, console: Console
) -> None:
    # Far enough from the reference that sorting matters.
    far = (
        "loss.label_smoothing=0.1",
        "loss.beta=1",
        "optim.lr=1e-2",
        "optim.schedule=constant",
        "train.epochs=2",
    )
    runs = []
    for number, layout in enumerate(LAYOUTS):
        recipe = make(f"run-{number}", loss, *layout, *far)
        train(recipe, console)
        runs.append((records(recipe.output_dir, "train"), records(recipe.output_dir, "eval")))
    assert len({steps[0]["rows"] for steps, _ in runs}) > 2
    for steps, evaluations in runs[1:]:
        for ours, first in zip(steps + evaluations, runs[0][0] + runs[0][1], strict=True):
            for name in ("loss", "rewards/margins", *(("grad_norm",) if "grad_norm" in first else ())):
                assert ours[name] == pytest.approx(first[name], abs=2e-5, rel=2e-5), name


def test_only_losses_that_couple_pairs_pay_for_a_second_forward(
    make: Make, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[bool] = []
    step = train_module.Trainer.train_step

    def counting(session: Any, batch: Any) -> Any:
        hook = session.state.scorer.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
        try:
            return step(session, batch)
        finally:
            hook.remove()

    monkeypatch.setattr(train_module.Trainer, "train_step", counting)
    one_step = ("train.max_steps=1", "data.eval=[]")
    for name, loss in (("plain", "[{type: sigmoid}, {type: sft}]"), ("coupled", "aot")):
        recipe = make(name, f"loss.type={loss}", *one_step)
        train(recipe, console)
        rows = records(recipe.output_dir, "train")[0]["rows"]
        assert rows > 1
        assert forwards == ([False] * rows if name == "coupled" else []) + [True] * rows
        forwards.clear()


@pytest.mark.parametrize("name", ["simpo", "sft", *slow("orpo", "cpo")])
def test_a_loss_without_a_reference_computes_and_keeps_none(
    name: str, make: Make, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("dpo_pack.trainer.prepare_reference", lambda *_: pytest.fail("a reference pass"))
    loaded: list[str] = []

    def spy(facts: ModelFacts, **settings: Any) -> Any:
        loaded.append(facts.path)
        return load_model(facts, **settings)

    monkeypatch.setattr(recipe_models, "load_model", spy)
    own_cache = f"reference.cache_dir={cache}"
    recipe = make("run", f"loss.type={name}", "train.epochs=3", "optim.lr=3e-3", own_cache)
    train(recipe, console)
    assert len(loaded) == 1
    assert not (recipe.output_dir / "reference.parquet").exists()
    before, after = records(recipe.output_dir, "eval")[0], records(recipe.output_dir, "eval")[-1]
    assert after["loss"] < before["loss"]
    assert not (cache / "reference").exists()


def test_one_s_own_loss_trains_as_the_built_in_one(
    make: Make, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loss_for_a_run.py").write_text(
        "from torch.nn.functional import logsigmoid\n\n\n"
        "def mine(policy, reference, options):\n"
        "    chosen, rejected = policy.chosen - reference.chosen, policy.rejected - reference.rejected\n"
        "    return -logsigmoid(options.beta * (chosen - rejected))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "loss_for_a_run", raising=False)
    built_in, own = make("built-in"), make("own", "loss.type=loss_for_a_run:mine")
    train(built_in, console)
    train(own, console)
    assert losses(own.output_dir) == pytest.approx(losses(built_in.output_dir))


@pytest.mark.parametrize("loss", ["aot", *slow("sigmoid", "simpo")])
def test_a_pair_of_weight_zero_changes_nothing(
    loss: str, make: Make, console: Console, assets: Path, tmp_path: Path
) -> None:
    """Whatever stands in it. The loss is divided by the number of pairs, those of weight zero too."""
    lines = (assets / "pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][:8]
    runs = []
    for name, ending in (("one", " sun moon"), ("other", " bread water bread")):
        last = rows[-1] | {"weight": 0.0, "chosen": rows[-1]["chosen"] + ending}
        write_rows(tmp_path / f"{name}.jsonl", [*rows[:-1], last])
        source = f"data.train={tmp_path / name}.jsonl"
        recipe = make(name, source, f"loss.type={loss}", "data.eval=[]", "optim.warmup_steps=0")
        train(recipe, console)
        runs.append(records(recipe.output_dir, "train")[0])
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-6)
    assert runs[0]["grad_norm"] == pytest.approx(runs[1]["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("modifier", ["weighting=wpo", "ld_alpha=0.25"])
def test_modifiers_change_the_loss_and_not_with_the_packing(
    modifier: str, make: Make, console: Console
) -> None:
    start = ("optim.warmup_steps=0", "loss.type=ipo", "data.eval=[]", "train.epochs=2")
    plain = make("plain", *start)
    train(plain, console)
    runs = []
    for number, layout in enumerate((LAYOUTS[0], LAYOUTS[1], LAYOUTS[-1])):
        recipe = make(f"run-{number}", *start, *layout, f"loss.{modifier}")
        train(recipe, console)
        runs.append(records(recipe.output_dir, "train"))
    for steps in runs:
        assert steps[-1]["loss"] != pytest.approx(records(plain.output_dir, "train")[-1]["loss"], rel=1e-3)
        for ours, first in zip(steps, runs[0], strict=True):
            assert ours["loss"] == pytest.approx(first["loss"], rel=2e-5)
            assert ours["logps/chosen"] == pytest.approx(first["logps/chosen"], rel=2e-5)
