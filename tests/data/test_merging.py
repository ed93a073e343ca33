"""Pairs of one prompt in one group: less is computed, and every number stays what it was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.plans import make_plan
from support.reference_pairs import make_table
from support.rows import write_rows
from support.run_files import timeless
from support.tiny_run import tiny_run

from dpo_pack.data.merging import merge_group, prompt_merging
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.model.layout import packed_row
from dpo_pack.packing.lengths import AttentionKind, Group, IntArray, ModelShape, PairSizes, pair_flops
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.run.pairs import offline_source, trained_pair_sizes
from dpo_pack.run.setup import prepare, prepare_data, prepare_tokenizer
from dpo_pack.trainer import train
from dpo_pack.training.batches import RowBuilder
from dpo_pack.training.throughput import Meter

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
    tiny_run(directory)
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
    write_rows(directory / "pairs.jsonl", rows)
    return directory


def ranking_recipe(assets: Path, output_dir: Path, *overrides: str) -> Recipe:
    settings = ("data.shuffle=false", "packing.token_budget=256", "optim.warmup_steps=0", "train.epochs=1")
    return load_recipe(assets / "recipe.yaml", [*settings, f"output_dir={output_dir}", *overrides])


@pytest.fixture(scope="module")
def table(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> PairTable:
    recipe = ranking_recipe(assets, tmp_path_factory.mktemp("unused") / "run")
    return prepare_data(recipe, prepare_tokenizer(recipe), Console(quiet=True)).train


def test_equal_completions_of_a_prompt_become_one_and_every_pair_knows_its_own(table: PairTable) -> None:
    merged, pair_completions = merge_group(table, [0, 1, 5])  # of a ranking a, b, c, d: ab, ac, cd
    assert len(merged.completions) == 4
    assert pair_completions.tolist() == [[0, 1], [0, 2], [2, 3]]
    for pair, (chosen, rejected) in zip([0, 1, 5], pair_completions.tolist(), strict=True):
        assert np.array_equal(merged.completions[chosen], table.group(pair).completions[0])
        assert np.array_equal(merged.completions[rejected], table.group(pair).completions[1])


def test_prompts_are_numbered_by_their_token_ids(table: PairTable) -> None:
    numbers = prompt_merging(table, SHAPE).prompts
    assert len(set(numbers.tolist())) == NUM_PROMPTS
    assert all(len(set(part.tolist())) == 1 for part in np.split(numbers, NUM_PROMPTS))


def test_a_group_is_measured_as_the_layout_lays_it_out(table: PairTable) -> None:
    merging = prompt_merging(table, SHAPE)
    for pairs in ([0, 1], [0, 1, 2, 3, 4, 5], [7, 7], [12, 17]):
        group, _ = merge_group(table, pairs)
        row = packed_row([group], torch.device("cpu"), share_prompt=True)
        assert row.segments is not None
        size = merging.measure(np.array(pairs))
        assert size.tokens == row.num_tokens
        area = sum(
            sum(range(k - q + 1, k + 1))
            for q, k in zip(row.segments.query_lengths, row.segments.key_lengths, strict=True)
        )
        forward = 2 * 1000 * size.tokens + 2 * 50 * row.completion_lengths.sum() + 2 * 2 * 16 * area
        assert size.cost == pytest.approx(3 * forward)


def test_a_group_above_the_budget_is_cut_into_groups_that_fit(table: PairTable) -> None:
    tokens = pair_lengths(table).row_tokens(share_prompt=True)
    costs = pair_flops(SHAPE, pair_lengths(table), share_prompt=True)
    sizes = PairSizes(tokens=tokens, costs=costs, merging=prompt_merging(table, SHAPE))
    pairs = np.arange(table.num_pairs)
    whole = sizes.items_of(pairs, 1000)
    assert whole.groups is not None
    of_prompts = [list(range(6 * prompt, 6 * prompt + 6)) for prompt in range(NUM_PROMPTS)]
    assert [group.tolist() for group in whole.groups] == of_prompts
    budget = int(tokens.max()) + 3
    items = sizes.items_of(pairs, budget)
    assert items.groups is not None
    assert len(items.groups) > NUM_PROMPTS and items.tokens.max() <= budget < whole.tokens.max()
    assert sorted(itertools.chain(*(group.tolist() for group in items.groups))) == pairs.tolist()


def two_long_pairs() -> PairTable:
    """A prompt of 20 tokens; two pairs of completions of 400, of which 350 are the pair's own beginning."""
    prompt = [3] * 20
    return make_table(
        [(prompt, [*begun, *[7] * 50], [*begun, *[8] * 50]) for begun in ([5] * 350, [6] * 350)]
    )


def test_pairs_that_take_fewer_tokens_apart_stay_apart_in_plan_and_row() -> None:
    table = two_long_pairs()
    merging = prompt_merging(table, SHAPE)
    alone = pair_lengths(table).row_tokens(share_prompt=True)
    assert merging.measure(np.arange(2)).tokens == 20 + 4 * 400 > alone.sum() == 2 * (20 + 350 + 2 * 50)
    plan = make_plan(
        alone, order=np.arange(2), token_budget=1000, pairs_per_step=2,
        algorithm="best_fit_decreasing", merging=merging,
    )  # fmt: skip
    ((row,),) = plan.pack_step(0)
    assert plan.sizes.of_row(row).tokens == alone.sum()
    builder = RowBuilder(
        table=table, reference=None, is_packed=True, share_prompt=True,
        device=torch.device("cpu"), merging=merging,
    )  # fmt: skip
    assert builder.build(row).row.num_tokens == alone.sum()


def test_pairs_that_take_as_many_tokens_merged_as_apart_stay_apart() -> None:
    begun = ([5] * 10, [6] * 10)  # of both completions of a pair
    table = make_table([([3] * 20, [*own, *[7] * 40], [*own, *[8] * 40]) for own in begun])
    merging = prompt_merging(table, SHAPE)
    assert (
        merging.measure(np.arange(2)).tokens == 220 == pair_lengths(table).row_tokens(share_prompt=True).sum()
    )
    assert [group.tolist() for group in merging.groups_of(np.arange(2))] == [[0], [1]]


def test_parts_of_a_cut_group_meet_in_a_row_only_if_it_holds_them_as_one_group_again() -> None:
    prompt, begun = [3] * 100, [5] * 40
    ends = itertools.count(10)
    pairs = [(prompt, [*begun, *[next(ends)] * 60], [*begun, *[next(ends)] * 60]) for _ in range(2)]
    table = make_table([*pairs, (prompt, [8] * 100, [9] * 100)])
    merging = prompt_merging(table, SHAPE)
    sizes = [merging.measure(np.array(group)).tokens for group in ([0, 1], [2], [0, 1, 2])]
    assert sizes == [380, 300, 700]  # two of them are 680, were they not one again
    plan = make_plan(
        merging.tokens, order=np.arange(3), token_budget=690, pairs_per_step=3,
        algorithm="best_fit_decreasing", merging=merging,
    )  # fmt: skip
    assert sorted(plan.sizes.of_row(row).tokens for row in plan.pack_step(0)[0]) == [300, 380]


completions = st.builds(
    lambda begin, length, end, more: [10 + begin] * length + [20 + end] * more,
    st.integers(0, 2), st.integers(0, 60), st.integers(0, 4), st.integers(1, 30),
)  # fmt: skip
pairs_of_prompts = st.tuples(st.sampled_from([[3] * 2, [4] * 30]), completions, completions)


@settings(deadline=None)
@given(
    pairs=st.lists(pairs_of_prompts, min_size=1, max_size=14),
    token_budget=st.integers(20, 400),
    scope=st.sampled_from(["step", "epoch"]),
    algorithm=st.sampled_from(["best_fit_decreasing", "next_fit"]),
    num_ranks=st.integers(1, 3),
    equal_rows=st.booleans(),
)
def test_whatever_pairs_share_merged_rows_keep_to_the_budget_and_take_no_more_than_unmerged_ones(
    pairs: list[Any], token_budget: int, scope: str, **settings: Any
) -> None:
    table = make_table(pairs)
    alone = pair_lengths(table).row_tokens(share_prompt=True)
    order = np.append(np.random.default_rng(0).permutation(len(pairs)), 0)  # with a copy
    settings |= {"order": order, "token_budget": token_budget, "merging": prompt_merging(table, SHAPE)}
    if scope == "step":
        plan = make_plan(alone, pairs_per_step=10, **settings)
    else:
        plan = make_plan(alone, rows_per_step=2, window_pairs=9, **settings)
    rows = [row for step in plan for rows in step for row in rows]
    assert sorted(itertools.chain(*(row.tolist() for row in rows))) == sorted(order.tolist())
    for row in rows:
        assert len(row) == 1 or plan.sizes.of_row(row).tokens <= token_budget
        assert plan.sizes.of_row(row).tokens <= alone[row].sum()


def test_cutting_many_pairs_of_a_prompt_looks_at_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table([([3] * 4, [10, number], [11, number]) for number in range(300)])
    looked_at: list[int] = []

    def counting(table: PairTable, pairs: Sequence[int]) -> tuple[Group, IntArray]:
        looked_at.append(len(pairs))
        return merge_group(table, pairs)

    monkeypatch.setattr("dpo_pack.data.merging.merge_group", counting)
    merging = prompt_merging(table, SHAPE)
    sizes = PairSizes(tokens=merging.tokens, costs=np.ones(300), merging=merging)
    tokens = sizes.items_of(np.arange(300), 50).tokens
    assert len(tokens) == 300 // 11 + 1 and max(tokens) <= 50  # 4 tokens, and 4 a pair
    assert sum(looked_at) <= 4 * 300


def test_under_an_adapter_merged_groups_cost_two_passes_as_single_pairs_do(
    assets: Path, tmp_path: Path
) -> None:
    recipe = ranking_recipe(assets, tmp_path / "run", "packing.merge_prompts=true")
    prepared = prepare(recipe, Console(quiet=True))
    source = offline_source(recipe, prepared.data, prepared.policy_facts)
    rows = [np.arange(6), np.array([6, 12])]  # a whole ranking, and pairs of different prompts
    flops = []
    for adapter in (False, True):
        sizes = trained_pair_sizes(prepared, source, trains_adapter=adapter)
        meter = Meter(sizes=sizes, peak_flops=None)
        flops.append([meter.add([row], pairs=len(row), tokens=1, seconds=1.0) for row in rows])
    assert np.array(flops[1]) / flops[0] == pytest.approx(2 / 3)


def test_scope_epoch_brings_the_pairs_of_a_prompt_together_and_trains_them_all(
    assets: Path, tmp_path: Path
) -> None:
    recipe = ranking_recipe(
        assets, tmp_path / "run", "packing.pairs_per_step=64", "packing.scope=epoch",
        "packing.rows_per_step=1", "packing.token_budget=128", "packing.merge_prompts=true",
        "data.shuffle=true", "train.epochs=2",
    )  # fmt: skip
    train(recipe, Console(quiet=True))
    steps = [record for record in timeless(tmp_path / "run") if record["split"] == "train"]
    assert sum(step["pairs"] for step in steps) == 2 * NUM_PROMPTS * 6
    assert steps[-1]["epoch"] == 2.0
    assert {step["rows"] for step in steps} == {1}
