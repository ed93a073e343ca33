"""Held-out pairs: records of their metrics, intervals and groups, on two ranks, in both precisions."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.loss_options import loss_options
from support.marks import slow
from support.reference_pairs import load_scorer, make_table, random_pairs
from support.run_files import timeless, weights
from support.two_ranks import run_on_ranks
from torch import Tensor

from dpo_pack.data.store import PairTable
from dpo_pack.losses.preference import Objective, make_objective
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run.evaluate import (
    LENGTH_BUCKETS,
    METRICS_WITH_INTERVALS,
    HeldOutResult,
    compare_models,
    evaluate_models,
    evaluate_pairs,
    held_out_result,
    length_preference,
    means_by_group,
)
from dpo_pack.run.pairs import exact_tables
from dpo_pack.run.setup import prepare
from dpo_pack.system.console import Shown, shown
from dpo_pack.trainer import train
from dpo_pack.training.batches import RowBuilder
from dpo_pack.training.metrics import column, mean_intervals

NUM_PAIRS = 23
SOURCES = ("hh", "web", "unused")
OBJECTIVE = make_objective([("sigmoid", 1.0), ("sft", 0.1)], dataclasses.asdict(loss_options(beta=0.3)))


def make_builder(*, packed: bool = True) -> RowBuilder:
    random = np.random.default_rng(1)
    return RowBuilder(
        table=make_table(random_pairs(NUM_PAIRS)),
        reference=random.uniform(-60, -20, (NUM_PAIRS, 2)),
        is_packed=packed,
        share_prompt=packed,
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def policy(model_path: Path) -> CompletionLogps:
    return load_scorer(model_path)


def evaluate(policy: CompletionLogps, *, token_budget: int = 64, packed: bool = True) -> Tensor:
    return evaluate_pairs(policy, make_builder(packed=packed), OBJECTIVE, token_budget=token_budget)


def test_values_are_in_the_table_s_order_whatever_the_rows(policy: CompletionLogps, model_path: Path) -> None:
    values = evaluate(policy)
    builder = make_builder()
    for pair in (0, 7, NUM_PAIRS - 1):
        alone = policy(builder.build(np.array([pair])).row).sums
        assert values[pair, 1:3].tolist() == pytest.approx(alone.tolist(), abs=1e-4)
    assert builder.reference is not None
    assert values[:, 3:5].tolist() == builder.reference.tolist()
    assert torch.allclose(evaluate(policy, token_budget=1), values, atol=1e-4)
    assert torch.allclose(evaluate(policy, token_budget=10_000), values, atol=1e-4)
    padded, in_rows = load_scorer(model_path, packed=False), list[int]()
    builder = make_builder(packed=False)
    alike = evaluate_pairs(padded, builder, OBJECTIVE, token_budget=128, progress=in_rows.append)
    assert torch.allclose(alike, values, atol=1e-4)
    assert in_rows == [len(row) for row in padded_rows(builder.sizes().tokens, 128)]


@pytest.mark.multiprocess
def test_two_ranks_count_each_pair_once_and_agree_with_one(policy: CompletionLogps) -> None:
    budget = 56  # tokens, for an odd number of rows: one rank computes the last row again, in vain
    assert len(pack_sequences_longest_first(make_builder().sizes(), budget)) % 2 == 1
    single = evaluate(policy, token_budget=budget)

    def on_a_rank() -> int:
        counted: list[int] = []
        values = evaluate_pairs(
            policy, make_builder(), OBJECTIVE, token_budget=budget, progress=counted.append
        )
        assert torch.allclose(values, single, atol=1e-9)  # the same rows, so the same products
        return sum(counted)

    counts = run_on_ranks(on_a_rank)
    assert min(counts) > 0 and sum(counts) == NUM_PAIRS


def result(
    policy: CompletionLogps, objective: Objective = OBJECTIVE, *, reference: CompletionLogps | None = None
) -> HeldOutResult:
    """`reference`: the model whose log-probs are the reference's, in rows of its own kind."""
    builder = make_builder(packed=policy.backend is not None)
    if reference is not None:
        values = evaluate(reference, packed=reference.backend is not None)
        sums = torch.stack(
            [column(values, f"policy_{side}") for side in ("chosen", "rejected")], dim=1
        ).numpy()
        builder = dataclasses.replace(builder, reference=(sums))
    values = evaluate_pairs(policy, builder, objective, token_budget=64)
    dtype = torch.float32 if policy.compute_dtype == torch.float64 else policy.compute_dtype
    return held_out_result(
        "held_out", values, builder.table, objective, source_names=("pairs",), dtype=dtype, seed=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_that_has_not_moved_is_at_one_half_whatever_rows_its_reference_was_in(
    model_path: Path, dtype: torch.dtype
) -> None:
    packed, padded = (load_scorer(model_path, packed=is_packed) for is_packed in (True, False))
    for scorer in (packed, padded):
        scorer.autocast = None if dtype == torch.float32 else dtype
    found = result(packed, reference=padded)
    margins = found.metrics["rewards/margins"]
    assert (margins != 0).any()  # they are rounding
    assert (found.metrics["rewards/accuracies"] == 0.5).all() and found.record["rewards/accuracies"] == 0.5
    assert found.record["length/prefers_longer"] == 0.5


def test_one_step_of_the_default_learning_rate_makes_margins_that_are_no_ties(model_path: Path) -> None:
    """AdamW's first step moves each weight by the learning rate, along the gradient's sign."""
    reference, policy, exact, moved = (load_scorer(model_path) for _ in range(4))
    sums = policy(make_builder().build(np.arange(NUM_PAIRS)).row).sums
    wanted = torch.arange(NUM_PAIRS) % 4 > 0  # the step makes the rejected one of the other pairs more likely
    ((sums[1::2] - sums[0::2]) * torch.where(wanted, 1, -1)).sum().backward()
    with torch.no_grad():
        for ours, theirs in zip(policy.parameters(), moved.parameters(), strict=True):
            if ours.grad is not None:
                ours.sub_(5e-7 * ours.grad.sign())
            theirs.copy_(ours)
    found = result(policy, reference=reference)
    truth = result(moved.double(), reference=exact.double()).metrics["rewards/margins"]
    assert 0 < (truth < 0).sum() < NUM_PAIRS
    assert found.metrics["rewards/accuracies"].tolist() == (truth > 0).astype(float).tolist()


def test_a_record_has_averages_intervals_and_breakdowns(policy: CompletionLogps) -> None:
    found = result(policy)
    assert found.record["pairs"] == found.record["effective_pairs"] == NUM_PAIRS
    for name in ("logratio/chosen", "logratio/rejected"):  # under its first name, too
        old = name.replace("logratio/", "kl/")
        assert found.record[name] == found.record[old]
        assert found.metrics[name].tolist() == found.metrics[old].tolist()
        assert found.record["intervals"][name] == found.record["intervals"][old]
    assert list(found.record["intervals"]) == list(METRICS_WITH_INTERVALS) == list(found.metrics)
    for name in METRICS_WITH_INTERVALS:
        low, high = found.record["intervals"][name]
        assert low <= found.record[name] <= high
        assert found.record[name] == pytest.approx(found.metrics[name].mean())
    by_length = found.record["by_length"].values()
    assert sum(part["pairs"] for part in by_length) == NUM_PAIRS
    mean = sum(part["pairs"] * part["rewards/margins"] for part in by_length) / NUM_PAIRS
    assert mean == pytest.approx(found.record["rewards/margins"])
    assert 0 <= found.record["length/prefers_longer"] <= 1
    assert {"rewards/margins_p50", "entropy", "logps/chosen_per_token"} <= found.record.keys()
    options = dataclasses.asdict(loss_options(beta=2.0))
    free = make_objective([("simpo", 1.0)], options, needs_reference=False)
    simpo = result(policy, free).record
    assert not [name for name in [*simpo, *simpo["intervals"]] if name.startswith(("kl/", "logratio/"))]


def test_a_comparison_is_the_mean_of_each_pair_s_difference_with_a_narrower_interval(
    policy: CompletionLogps, tmp_path: Path
) -> None:
    one = result(policy)
    random = np.random.default_rng(0)
    better = {name: column + random.normal(0.2, 0.01, NUM_PAIRS) for name, column in one.metrics.items()}
    other = dataclasses.replace(one, metrics=better)
    results = [{"held_out": one}, {"held_out": other}]
    difference = compare_models(results, ["first", "second"], seed=0)["held_out"]["difference"]
    low, high = difference["intervals"]["rewards/margins"]
    assert difference["rewards/margins"] == pytest.approx(0.2, abs=0.01)
    assert 0 < low < difference["rewards/margins"] < high
    own_low, own_high = one.record["intervals"]["rewards/margins"]
    assert high - low < (own_high - own_low) / 10
    assert sum(part["pairs"] for part in difference["by_length"].values()) == NUM_PAIRS


# --------------------------------------------------------------------------------------- Groups and intervals


def pairs(chosen: list[int], rejected: list[int], sources: list[int] | None = None) -> PairTable:
    keys = np.zeros((len(chosen), 16), dtype=np.uint8)
    keys[:, 0] = np.arange(len(chosen))  # each pair has its own prompt
    return dataclasses.replace(
        make_table(random_pairs(len(chosen))),
        chosen_scored=np.array(chosen, dtype=np.float64),
        rejected_scored=np.array(rejected, dtype=np.float64),
        source_indices=np.array(sources or [0] * len(chosen), dtype=np.int16),
        whole_prompt_keys=keys,
    )


def test_edges_of_length_buckets() -> None:
    # chosen / rejected: under a half; a half; just shorter than a tenth; equal; a tenth longer; twice.
    some = pairs([49, 50, 90, 100, 110, 200], [100, 100, 100, 100, 100, 100])
    described = means_by_group({"pair": np.arange(6.0)}, some, SOURCES, seed=0)
    assert list(described["by_length"]) == list(LENGTH_BUCKETS)
    assert [(part["pairs"], part["pair"]) for part in described["by_length"].values()] == [
        (1, 0.0), (2, 1.5), (1, 3.0), (1, 4.0), (1, 5.0)
    ]  # fmt: skip


def test_a_description_has_means_and_intervals_of_the_whole_and_of_its_parts() -> None:
    accuracy = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    some = pairs([20, 20, 20, 5, 5, 5], [10, 10, 10, 10, 10, 10], [0, 1, 1, 1, 0, 0])
    described = means_by_group({"rewards/accuracies": accuracy, "loss": 1 - accuracy}, some, SOURCES, seed=0)
    assert (described["pairs"], described["rewards/accuracies"], described["loss"]) == (6, 0.5, 0.5)
    low, high = described["intervals"]["rewards/accuracies"]
    assert 0.0 <= low < 0.5 < high <= 1.0
    assert list(described["by_source"]) == ["hh", "web"]  # a source without pairs is left out
    assert described["by_source"]["hh"]["rewards/accuracies"] == pytest.approx(1 / 3)
    assert described["by_source"]["web"]["pairs"] == 3
    assert described["by_length"]["chosen_over_twice"]["rewards/accuracies"] == pytest.approx(2 / 3)
    assert described["by_length"]["chosen_shorter"]["rewards/accuracies"] == pytest.approx(1 / 3)


def test_pairs_of_one_prompt_are_drawn_together_and_weigh_alike() -> None:
    some = pairs([9] * 4, [9] * 4)
    some.whole_prompt_keys[:, 0] = (1, 1, 0, 0)
    described = means_by_group({"loss": np.array([0.0, 1.0, 0.5, 0.5])}, some, SOURCES, seed=0)
    assert "by_source" not in described  # there is one source
    assert (described["pairs"], described["prompts"]) == (4, 2)
    assert described["intervals"]["loss"] == [0.5, 0.5]  # each prompt's mean is 0.5
    values, prompts = np.array([[0.0]] + [[1.0]] * 9), np.array([0] + [4] * 9)
    resampled_means = {0.0, 0.9, 1.0}  # of the two prompts: the first twice, both, the second twice
    assert set(mean_intervals(values, seed=0, prompts=prompts)[0].tolist()) <= resampled_means


def test_length_preference_of_a_policy_that_only_learned_length() -> None:
    some = pairs([20, 30, 5, 8, 7], [10, 10, 10, 10, 7])  # the data prefers the longer one in 2 of 4
    longer_wins = np.array([1.0, 1.0, 0.0, 0.0, 1.0])
    assert length_preference(longer_wins, some) == {"length/chosen_longer": 0.5, "length/prefers_longer": 1.0}
    always_chosen = np.array([1.0, 1.0, 1.0, 0.5, 0.0])  # right, right, right, undecided; one of equal length
    assert length_preference(always_chosen, some)["length/prefers_longer"] == (1 + 1 + 0 + 0.5) / 4


def test_intervals_hold_the_true_mean_about_95_times_in_100() -> None:
    random = np.random.default_rng(2)
    held = 0
    for trial in range(200):
        low, high = mean_intervals(random.exponential(size=(80, 1)), seed=trial)[0]
        held += low <= 1.0 <= high
    assert 0.89 <= held / 200 <= 0.99


QUIET = Console(quiet=True)


@pytest.mark.parametrize("precision", ["model.autocast=bfloat16", *slow("model.dtype=bfloat16")])
def test_a_run_in_bfloat16_evaluates_some_pairs_in_float32_or_all_or_none(
    assets: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpo_pack.run.pairs._FEWEST_PAIRS", 3)  # of 6 pairs
    console = Console(file=io.StringIO(), width=200)
    bars: list[Shown] = []

    @contextlib.contextmanager
    def seen(*arguments: Any) -> Iterator[Shown]:
        with shown(*arguments) as bar:
            bars.append(bar)
            yield bar

    monkeypatch.setattr("dpo_pack.run.evaluate.shown", seen)

    def recipe(how: str) -> Recipe:
        output = f"output_dir={tmp_path / how}"
        return load_recipe(assets / "recipe.yaml", [output, precision, f"train.eval_precision={how}"])

    def last(how: str) -> dict[str, Any]:
        train(recipe(how), console)
        return timeless(tmp_path / how, "eval")[-1]

    rounded, exact, few = last("training"), last("float32"), last("auto")
    counted = {(bar.work, bar.done, bar.total) for bar in bars}  # each pass by itself
    assert counted == {
        *(("Evaluating heldout in bfloat16", num, num) for num in (3, 6)),
        *(("Evaluating heldout in float32", num, num) for num in (3, 6)),
    }
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
