"""Runs in bf16: what their evaluations say is what an evaluation in fp32 says, within the interval."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.marks import slow
from support.run_files import timeless, weights

from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run.evaluate import evaluate_models
from dpo_pack.run.pairs import evaluates_in_float32
from dpo_pack.run.setup import prepare
from dpo_pack.trainer import train

QUIET = Console(quiet=True)


@pytest.mark.parametrize("precision", ["model.autocast=bfloat16", *slow("model.dtype=bfloat16")])
def test_a_run_in_bfloat16_reports_what_float32_finds(
    assets: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(how: str) -> Recipe:
        output = f"output_dir={tmp_path / how}"
        return load_recipe(assets / "recipe.yaml", [output, precision, f"train.eval_precision={how}"])

    def evaluated(how: str) -> dict[str, object]:
        (results,) = evaluate_models(recipe(how), [str(tmp_path / "training" / "model")], QUIET)
        return results["heldout"].record

    train(recipe("training"), QUIET)
    train(recipe("float32"), QUIET)
    is_exported_in = torch.bfloat16 if "dtype" in precision else torch.float32
    assert {tensor.dtype for tensor in weights(tmp_path / "training").values()} == {is_exported_in}
    # How pairs are evaluated changes no step.
    assert timeless(tmp_path / "training", "train") == timeless(tmp_path / "float32", "train")
    rounded, exact = timeless(tmp_path / "training", "eval")[-1], timeless(tmp_path / "float32", "eval")[-1]
    assert rounded["eval_precision"] == "bfloat16" and exact["eval_precision"] == "float32"
    assert rounded["margin_noise"] > 100 * exact["margin_noise"]
    again = evaluated("float32")
    for name in exact["intervals"]:  # all pairs are measured
        assert rounded[name] == pytest.approx(exact[name], abs=1e-6)
        assert rounded["intervals"][name] == pytest.approx(exact["intervals"][name], abs=1e-6)
        assert again[name] == pytest.approx(exact[name], abs=1e-6)
    monkeypatch.setattr("dpo_pack.training.held_out.MOST_MEASURED", 3)  # of 6 pairs
    monkeypatch.setattr("dpo_pack.training.held_out.MOST_CANDIDATES", 5)
    few = evaluated("training")
    assert few["measured_pairs"] == 3
    low, high = few["intervals"]["rewards/margins"]  # type: ignore[index]
    assert low < exact["rewards/margins"] < high
    assert few["rewards/margins"] != pytest.approx(exact["rewards/margins"], abs=1e-9)


def test_auto_evaluates_in_float32_where_that_adds_little(assets: Path, tmp_path: Path) -> None:
    def is_exact(*overrides: str) -> bool:
        setup = prepare(load_recipe(assets / "recipe.yaml", list(overrides)), QUIET)
        return evaluates_in_float32(setup)

    # 6 pairs, 3 times in fp32 (4 x), against 16 pairs an epoch, 3 passes each: 30 epochs make 5 %.
    assert not is_exact("train.epochs=29") and is_exact("train.epochs=30")
    assert not is_exact("train.epochs=60", "train.eval_every_steps=1")
    assert not is_exact("train.epochs=60", "train.max_steps=2")
