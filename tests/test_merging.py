"""Pairs of one prompt in one group: less is computed, and every number stays what it was."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_train import make_recipe, metrics
from tiny_models import tiny_model
from tiny_recipe import load, message_of
from tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.flops import AttentionKind, ModelShape, pair_flops
from dpo_pack.data.merging import PairSizes, merge_group, number_prompts, prompt_merging
from dpo_pack.data.packing import plan_epoch, plan_epoch_rows
from dpo_pack.data.store import PairTable
from dpo_pack.layout import Group, layout_row
from dpo_pack.prepare import prepare_data, prepare_tokenizer
from dpo_pack.recipe import Recipe
from dpo_pack.reference import pair_lengths
from dpo_pack.train import train

SHAPE = ModelShape(
    token_weights=1000.0,
    head_weights=50,
    attention=(AttentionKind(num_layers=2, width=16, window=None),),
)
NUM_PROMPTS = 4
NUM_COMPLETIONS = 4  # ranked, so 6 pairs a prompt


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and rankings as all their pairs, one prompt after another."""
    directory = tmp_path_factory.mktemp("rankings")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(directory / "model")
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(directory / "model")
    random = np.random.default_rng(0)
    words = ["red", "green", "blue", "one", "two", "three", "sun", "moon"]

    def text(least: int, most: int) -> str:
        return "".join(" " + words[i] for i in random.integers(0, len(words), random.integers(least, most)))

    rows = []
    for _ in range(NUM_PROMPTS):
        prompt = "ask" + text(4, 12)
        ranking = [f" it is{text(1, 8)} {number}" for number in range(NUM_COMPLETIONS)]
        rows += [
            {"prompt": prompt, "chosen": better, "rejected": worse}
            for better, worse in itertools.combinations(ranking, 2)
        ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def ranking_recipe(assets: Path, output_dir: Path, *overrides: str) -> Recipe:
    settings = (
        "data.shuffle=false",
        "packing.pairs_per_step=8",
        "packing.token_budget=256",
        "optim.warmup_steps=0",
        "train.epochs=1",
        f"reference.cache_dir={assets / 'cache'}",
    )
    return make_recipe(assets, output_dir, *settings, *overrides)


@pytest.fixture(scope="module")
def table(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    recipe = ranking_recipe(assets, tmp_path_factory.mktemp("unused") / "run")
    return prepare_data(recipe, prepare_tokenizer(recipe), Console(quiet=True)).train


def test_equal_completions_of_a_prompt_become_one_and_every_pair_knows_its_own(table: PairTable) -> None:
    merged = merge_group(table, [0, 1, 5])  # of a ranking a, b, c, d: ab, ac, cd
    assert len(merged.completions) == 4
    assert merged.pair_completions.tolist() == [[0, 1], [0, 2], [2, 3]]
    for pair, (chosen, rejected) in zip([0, 1, 5], merged.pair_completions.tolist(), strict=True):
        assert np.array_equal(merged.completions[chosen], table.chosen(pair))
        assert np.array_equal(merged.completions[rejected], table.rejected(pair))


def test_prompts_are_numbered_by_their_token_ids(table: PairTable) -> None:
    numbers = number_prompts(table)
    assert len(set(numbers.tolist())) == NUM_PROMPTS
    assert all(len(set(part.tolist())) == 1 for part in np.split(numbers, NUM_PROMPTS))


def test_a_group_is_measured_as_the_layout_lays_it_out(table: PairTable) -> None:
    merging = prompt_merging(table, SHAPE)
    for pairs in ([0, 1], [0, 1, 2, 3, 4, 5], [7, 7], [12, 17]):
        group = Group(context=table.prompt(pairs[0]), completions=merge_group(table, pairs).completions)
        layout = layout_row([group], share_prompt=True)
        size = merging.measure(np.array(pairs))
        assert size.tokens == layout.num_tokens
        assert size.scored_tokens == layout.completion_lengths.sum()
        area = sum(
            sum(range(k - q + 1, k + 1))
            for q, k in zip(layout.query_lengths.tolist(), layout.key_lengths.tolist(), strict=True)
        )
        forward = 2 * 1000 * size.tokens + 2 * 50 * size.scored_tokens + 2 * 2 * 16 * area
        assert size.cost == pytest.approx(3 * forward)


def test_a_group_above_the_budget_is_cut_into_groups_that_fit(table: PairTable) -> None:
    tokens = pair_lengths(table).row_tokens(share_prompt=True)
    costs = pair_flops(SHAPE, pair_lengths(table), share_prompt=True)
    sizes = PairSizes(tokens=tokens, costs=costs, merging=prompt_merging(table, SHAPE))
    pairs = np.arange(table.num_pairs)
    whole, whole_tokens, _ = sizes.items_of(pairs, 1000)
    assert [item.tolist() for item in whole] == [list(range(6 * p, 6 * p + 6)) for p in range(NUM_PROMPTS)]
    budget = int(tokens.max()) + 3
    items, item_tokens, _ = sizes.items_of(pairs, budget)
    assert len(items) > NUM_PROMPTS and item_tokens.max() <= budget < whole_tokens.max()
    assert sorted(itertools.chain(*(item.tolist() for item in items))) == pairs.tolist()


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("scope", ["step", "epoch"])
def test_a_merging_plan_trains_every_pair_once_within_the_budget(
    table: PairTable, scope: str, num_ranks: int
) -> None:
    tokens = pair_lengths(table).row_tokens(share_prompt=True)
    costs = pair_flops(SHAPE, pair_lengths(table), share_prompt=True)
    shared: dict[str, Any] = {
        "order": np.random.default_rng(0).permutation(table.num_pairs),
        "token_budget": 150,
        "algorithm": "best_fit_decreasing",
        "num_ranks": num_ranks,
        "row_costs": costs,
        "merging": prompt_merging(table, SHAPE),
    }
    if scope == "step":
        plan = plan_epoch(tokens, pairs_per_step=10, **shared)
    else:
        plan = plan_epoch_rows(tokens, rows_per_step=2, window_pairs=100, **shared)
    trained = [pair for step in plan for rows in step for row in rows for pair in row.tolist()]
    assert sorted(trained) == list(range(table.num_pairs))
    rows = [row for step in plan for rows in step for row in rows]
    assert all(plan.tokens_in(row) <= 150 for row in rows)
    assert sum(plan.tokens_in(row) for row in rows) < tokens.sum()
    assert sum(plan.cost_of(row) for row in rows) < costs.sum()


@pytest.mark.parametrize("loss", ["sigmoid", "sppo_hard"])
def test_merged_prompts_give_the_numbers_of_unmerged_ones_and_compute_fewer_tokens(
    assets: Path, tmp_path: Path, loss: str
) -> None:
    """Through train_step: losses, gradients, rewards and token averages of every step."""
    records = {}
    for merge in ("false", "true"):
        overrides = (f"packing.merge_prompts={merge}", f"loss.type={loss}")
        train(ranking_recipe(assets, tmp_path / merge, *overrides), Console(quiet=True))
        records[merge] = [record for record in metrics(tmp_path / merge) if record["split"] == "train"]
    for plain, merged in zip(records["false"], records["true"], strict=True):
        assert merged["tokens"] < 0.7 * plain["tokens"]
        for name in (set(plain) & set(merged)) - {"tokens", "rows", "split", "source"}:
            if name == "rewards/accuracies" and plain["step"] == 1:
                continue  # the policy is its reference: which margin is above zero is rounding
            if isinstance(plain[name], float) and not name.startswith(("seconds", "mfu")):
                assert merged[name] == pytest.approx(plain[name], abs=3e-5, rel=3e-5), name
        assert merged["pairs"] == plain["pairs"] == 8


def test_scope_epoch_brings_the_pairs_of_a_prompt_together_and_trains_them_all(
    assets: Path, tmp_path: Path
) -> None:
    recipe = ranking_recipe(
        assets, tmp_path / "run", "packing.pairs_per_step=64", "packing.scope=epoch",
        "packing.rows_per_step=1", "packing.token_budget=128", "packing.merge_prompts=true",
        "data.shuffle=true", "train.epochs=2",
    )  # fmt: skip
    train(recipe, Console(quiet=True))
    steps = [record for record in metrics(tmp_path / "run") if record["split"] == "train"]
    assert sum(step["pairs"] for step in steps) == 2 * NUM_PROMPTS * 6
    assert steps[-1]["epoch"] == 2.0
    assert {step["rows"] for step in steps} == {1}
    report = json.loads((tmp_path / "run" / "packing_report.json").read_text())
    assert report["statistics"]["merged_pairs"] == NUM_PROMPTS * 6


def test_a_run_of_scope_epoch_goes_on_where_it_stopped(
    assets: Path, tmp_path: Path, console: Console
) -> None:
    overrides = (
        "packing.pairs_per_step=64", "packing.scope=epoch", "packing.rows_per_step=2",
        "packing.token_budget=128", "data.shuffle=true", "train.epochs=2", "checkpoint.every_steps=3",
    )  # fmt: skip
    train(ranking_recipe(assets, tmp_path / "one", *overrides, "checkpoint.keep=100"), console)
    checkpoint = tmp_path / "one" / "checkpoints" / "step-000003"
    train(ranking_recipe(assets, tmp_path / "two", *overrides, f"checkpoint.resume={checkpoint}"), console)
    straight = [record for record in metrics(tmp_path / "one") if record["split"] == "train"]
    resumed = [record for record in metrics(tmp_path / "two") if record["split"] == "train"]
    assert len(resumed) == len(straight) - 3 > 1
    assert [record["loss"] for record in resumed] == [record["loss"] for record in straight[3:]]


def test_merging_needs_packed_rows_with_shared_prompts() -> None:
    for other in ("packing.mode=padded", "packing.share_prompt=false"):
        message = message_of(partial(load, "packing.merge_prompts=true", other))
        assert message.startswith("packing.merge_prompts")
