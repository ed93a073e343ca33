"""Runs in bf16: which of their held-out pairs are evaluated in fp32, and what that says of rounding."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.marks import slow
from support.run_files import timeless, weights

from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run.evaluate import evaluate_models, evaluate_pairs
from dpo_pack.run.pairs import exact_tables
from dpo_pack.run.setup import prepare
from dpo_pack.trainer import train

QUIET = Console(quiet=True)


@pytest.mark.parametrize("precision", ["model.autocast=bfloat16", *slow("model.dtype=bfloat16")])
def test_a_run_in_bfloat16_evaluates_some_pairs_in_float32_or_all_or_none(
    assets: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.run.pairs._FEWEST_PAIRS", 3)  # of 6 pairs
    console = Console(file=io.StringIO(), width=200)

    def recipe(how: str) -> Recipe:
        output = f"output_dir={tmp_path / how}"
        return load_recipe(assets / "recipe.yaml", [output, precision, f"train.eval_precision={how}"])

    def last(how: str) -> dict[str, Any]:
        train(recipe(how), console)
        return timeless(tmp_path / how, "eval")[-1]

    rounded, exact, few = last("training"), last("float32"), last("auto")
    is_exported_in = torch.bfloat16 if "dtype" in precision else torch.float32
    assert {tensor.dtype for tensor in weights(tmp_path / "training").values()} == {is_exported_in}
    # How pairs are evaluated changes no step.
    for how in ("float32", "auto"):
        assert timeless(tmp_path / "training", "train") == timeless(tmp_path / how, "train")
    assert [line["eval_precision"] for line in (rounded, exact, few)] == ["bfloat16", "float32", "float32"]
    assert [line["pairs"] for line in (rounded, exact, few)] == [6, 6, 3] and few["held_out_pairs"] == 6
    assert "of 3 of 6 held-out pairs" in console.file.getvalue()  # type: ignore[attr-defined]
    of = {how: pq.read_table(tmp_path / how / "held_out.parquet").to_pandas() for how in ("float32", "auto")}
    assert {*of["auto"]["eval_precision"]} == {"float32"}
    both = of["auto"].merge(of["float32"], on="row", how="left", validate="1:1")
    assert both["rewards/margins_x"].tolist() == pytest.approx(both["rewards/margins_y"].tolist(), abs=1e-6)
    assert few["rewards/margins"] == pytest.approx(both["rewards/margins_y"].mean(), abs=1e-6)
    # Its rounding is measured where pairs are computed twice; the estimate is of that size.
    assert rounded["margin_noise"] / 4 < exact["margin_noise"] < 4 * rounded["margin_noise"]
    (results,) = evaluate_models(recipe("float32"), [str(tmp_path / "training" / "model")], QUIET)
    for name in exact["intervals"]:
        assert results["heldout"].record[name] == pytest.approx(exact[name], abs=1e-6)


def test_a_run_in_bfloat16_may_have_no_held_out_pairs(assets: Path, tmp_path: Path) -> None:
    overrides = (f"output_dir={tmp_path}", "model.autocast=bfloat16", "data.eval=[]", "train.max_steps=1")
    train(load_recipe(assets / "recipe.yaml", overrides), QUIET)
    assert timeless(tmp_path, "eval") == []


@pytest.mark.parametrize(("how", "expected"), [("training", [False] * 2), ("float32", [True, False] * 2)])
def test_with_a_moving_reference_a_pass_is_in_float32_only_where_it_says_so(
    assets: Path, tmp_path: Path, how: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def watched(scorer: Any, *arguments: Any, **options: Any) -> Any:
        passes.append(scorer.compute_dtype == torch.float32)
        return evaluate_pairs(scorer, *arguments, **options)

    monkeypatch.setattr("dpo_pack.run.evaluate.evaluate_pairs", watched)
    overrides = (
        "model.autocast=bfloat16",
        "reference.sync={every_steps: 9, mixup: 0.5}",
        "train.max_steps=3",
    )
    recipe = load_recipe(
        assets / "recipe.yaml", (f"output_dir={tmp_path}", f"train.eval_precision={how}", *overrides)
    )
    train(recipe, QUIET)
    assert passes == expected and timeless(tmp_path, "eval")[-1]["margin_noise"] > 0


def test_auto_evaluates_as_many_pairs_in_float32_as_add_a_tenth_to_the_run(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.run.pairs._FEWEST_PAIRS", 2)

    def rows(*overrides: str) -> list[int] | None:
        recipe = load_recipe(assets / "recipe.yaml", ["model.autocast=bfloat16", *overrides])
        tables = exact_tables(prepare(recipe, QUIET))
        return None if tables is None else tables["heldout"].row_numbers.tolist()

    # 6 pairs, 3 times in fp32 (4 x), against a tenth of 16 pairs an epoch, 3 passes each.
    assert rows("train.epochs=15") == [1, 2, 3, 4, 5, 6]
    some = rows("train.epochs=14")
    assert some is not None and len(some) == 5 and sorted(some) == some == rows("train.epochs=14")
    assert rows("train.epochs=14", "seed=1") != some
    for overrides in (["train.eval_every_steps=1"], ["train.max_steps=2"]):
        found = rows("train.epochs=15", *overrides)
        assert found is not None and len(found) == 2
    assert rows("train.eval_precision=training") is rows("model.autocast=none") is None
