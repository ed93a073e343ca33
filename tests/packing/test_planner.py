"""Plans for many ranks and of scope epoch: balance, few rows, every pair once, the same steps."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.million_pairs import SEVEN_B
from support.plans import make_plan
from support.processor import slowness

from dpo_pack.packing import bin_packing
from dpo_pack.packing.bin_packing import (
    BALANCE_TOLERANCE,
    BIN_PACKERS,
    ROW_OVERHEAD_TOKENS,
    best_fit_decreasing,
    equalize_rows,
    fewest_rows_possible,
    pack_window,
    split_over_ranks,
)
from dpo_pack.packing.lengths import IntArray, PairLengths, pair_flops
from dpo_pack.packing.plan import PackingPlan, PlanSettings, epoch_order
from dpo_pack.packing.report import rank_balance

BUDGET = 100
lengths_strategy = st.lists(st.integers(1, 130), min_size=1, max_size=60)


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def flat_pairs(plan: PackingPlan, step: int) -> list[int]:
    return [pair for rows in plan.pack_step(step) for row in rows for pair in row.tolist()]


# ---- Ranks


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40), num_ranks=st.integers(2, 6))
def test_where_ranks_are_uneven_no_single_move_or_swap_would_make_the_slowest_faster(
    costs: list[int], num_ranks: int
) -> None:
    values = np.array(costs, dtype=np.float64)
    parts = split_over_ranks(values, num_ranks)
    loads = [float(values[part].sum()) for part in parts]
    if max(loads) <= BALANCE_TOLERANCE * sum(loads) / num_ranks:
        return
    slow = int(np.argmax(loads))
    for fast in set(range(num_ranks)) - {slow}:
        theirs = [0.0, *values[parts[fast]].tolist()]  # nothing in return is a move
        for ours in values[parts[slow]].tolist():
            for over in (ours - taken for taken in theirs):
                assert max(loads[slow] - over, loads[fast] + over) >= loads[slow] * (1 - 1e-6)


# ---- Rows of a step


# ---- Scope epoch


def epoch_plan(
    lengths: list[int],
    *,
    rows_per_step: int,
    window_pairs: int,
    algorithm: str = "best_fit_decreasing",
    num_ranks: int = 1,
    equal_rows: bool = False,
    epoch: int = 0,
) -> PackingPlan:
    return make_plan(
        ints(lengths),
        order=epoch_order(len(lengths), shuffle=True, seed=1, epoch=epoch),
        token_budget=BUDGET,
        rows_per_step=rows_per_step,
        window_pairs=window_pairs,
        algorithm=algorithm,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
    )


@given(
    lengths=lengths_strategy,
    rows_per_step=st.integers(1, 5),
    window_pairs=st.integers(1, 70),
    algorithm=st.sampled_from(sorted(BIN_PACKERS)),
    num_ranks=st.integers(1, 4),
    equal_rows=st.booleans(),
)
def test_scope_epoch_trains_every_pair_once_in_full_steps_and_a_last_one_on_any_ranks(
    lengths: list[int],
    rows_per_step: int,
    window_pairs: int,
    algorithm: str,
    num_ranks: int,
    equal_rows: bool,
) -> None:
    shape = {"rows_per_step": rows_per_step, "window_pairs": window_pairs, "algorithm": algorithm}
    alone = epoch_plan(lengths, **shape)  # type: ignore[arg-type]
    plan = epoch_plan(lengths, num_ranks=num_ranks, equal_rows=equal_rows, **shape)  # type: ignore[arg-type]
    assert alone.fingerprint == plan.fingerprint and len(alone) == len(plan)
    trained: list[int] = []
    for step in range(len(plan)):
        assert alone.pairs(step).tolist() == plan.pairs(step).tolist()
        assert sorted(flat_pairs(plan, step)) == sorted(plan.pairs(step).tolist())
        assert len(alone.pack_step(step)[0]) == rows_per_step or step == len(plan) - 1
        for row in itertools.chain(*plan.pack_step(step)):
            assert len(row) == 1 or plan.sizes.of_row(row).tokens <= BUDGET
        num_rows = {len(rows) for rows in plan.pack_step(step)}
        if equal_rows and len(plan.pairs(step)) >= num_ranks * max(num_rows):
            assert len(num_rows) == 1
        trained += plan.pairs(step).tolist()
    assert sorted(trained) == list(range(len(lengths)))


def test_windows_are_not_mixed_and_rows_do_not_come_in_the_order_of_their_lengths() -> None:
    tokens = np.random.default_rng(0).integers(5, 40, 4000)
    order = np.concatenate([np.random.default_rng(w).permutation(1000) + 1000 * w for w in range(4)])
    plan = make_plan(
        tokens,
        order=order,
        token_budget=200,
        rows_per_step=1,
        window_pairs=1000,
    )
    windows = [int(pair) // 1000 for pair in plan.order]
    assert windows == sorted(windows)
    # Where a pair is trained says nothing about its length: of 4,000, a correlation of 0.016 is chance.
    assert abs(np.corrcoef(tokens[plan.order], np.arange(4000))[0, 1]) < 0.06
    # Rows are more alike than random ones: each has its share of long and of short pairs.
    full = [tokens[plan.pairs(step)] for step in range(len(plan)) if tokens[plan.pairs(step)].sum() > 180]
    assert len(full) > 0.97 * len(plan)
    assert np.std([row.mean() for row in full]) < 0.5 * np.std(tokens) / np.sqrt(200 / tokens.mean())


def test_another_epoch_makes_other_rows_of_the_same_pairs() -> None:
    lengths = np.random.default_rng(0).integers(5, 40, 500).tolist()
    plans = [epoch_plan(lengths, rows_per_step=1, window_pairs=500, epoch=epoch) for epoch in (0, 1)]
    rows = [{frozenset(plan.pairs(step).tolist()) for step in range(len(plan))} for plan in plans]
    assert len(rows[0] & rows[1]) < 0.05 * len(rows[0])


@pytest.mark.parametrize("seed", range(4))
def test_of_finished_rows_and_rows_packed_again_a_step_takes_those_whose_slowest_rank_ends_first(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(200, 9000, 60)
    plan = make_plan(
        tokens, order=ints(list(range(60))), token_budget=10_000, rows_per_step=4, window_pairs=60,
        algorithm="best_fit_decreasing", num_ranks=2, row_costs=tokens * (1.0 + tokens / 4000),
    )  # fmt: skip

    def slowest(ranks: Sequence[Sequence[IntArray]]) -> float:
        costs = [sum(plan.sizes.of_row(row).cost for row in rows) for rows in ranks]
        a_token = sum(costs) / sum(plan.sizes.of_row(row).tokens for rows in ranks for row in rows)
        return max(
            cost + ROW_OVERHEAD_TOKENS * a_token * len(rows) for cost, rows in zip(costs, ranks, strict=True)
        )

    taken = {"finished": 0, "packed again": 0}
    for step in range(len(plan)):
        rows, packed = plan._finished_rows(step), plan._pack(plan.pairs(step))
        ranks = plan.pack_step(step)
        if len(rows) >= plan.num_ranks:
            parts = split_over_ranks(np.array([plan.sizes.of_row(row).cost for row in rows]), plan.num_ranks)
            finished = [[rows[i] for i in part] for part in parts]
            is_finished = [list(map(tuple, rows)) for rows in ranks] == [
                list(map(tuple, rows)) for rows in finished
            ]
            taken["finished" if is_finished else "packed again"] += 1
            if not is_finished:
                assert slowest(ranks) == slowest(packed) < slowest(finished)
            elif slowest(packed) < slowest(finished):  # even enough: not packed again
                costs = [sum(plan.sizes.of_row(row).cost for row in rows) for rows in ranks]
                assert max(costs) <= 1.02 * sum(costs) / 2
    assert min(taken.values()) > 0, taken


@pytest.mark.parametrize(("large", "expected"), [(94, [99, 101]), (93, [99, 99])])
def test_a_split_within_one_percent_of_the_mean_is_left_alone(large: int, expected: list[int]) -> None:
    # Longest processing time gives large + 7 and large + 5. A swap makes them equal.
    costs = np.array([large, large, 3, 3, 2, 2, 2], dtype=np.float64)
    assert sorted(costs[part].sum() for part in split_over_ranks(costs, 2)) == expected


@pytest.mark.parametrize(("most", "expected"), [(6, [9.0, 9.0]), (5, [8.0, 10.0])])
def test_ranks_of_too_many_items_are_split_without_swaps(
    most: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bin_packing, "MAX_SWAPS", most)
    costs = np.array([5.0, 4.0, 3.0, 3.0, 3.0])  # two items on one rank and three on the other: six swaps
    assert sorted(costs[part].sum() for part in split_over_ranks(costs, 2)) == expected


def test_a_rank_with_too_few_rows_splits_its_costliest_row_or_takes_the_cheapest_spare_item() -> None:
    ranks = [[[0], [1], [2]], [[3, 4], [5, 6]]]
    equalize_rows(ranks, [1.0, 1, 1, 5, 5, 1, 1])
    assert sorted(ranks[1]) == [[3], [4], [5, 6]]
    # The last rank has one row of one item. Two ranks can spare an item; item 2 fills a row alone.
    ranks = [[[0, 1], [7]], [[2], [3, 4, 5]], [[6]]]
    equalize_rows(ranks, [1.0, 1, 2, 8, 9, 6, 1, 1])
    assert ranks == [[[0, 1], [7]], [[2], [3, 4]], [[6], [5]]]
    ranks = [[[0], [1]], [[2]]]  # nobody can spare one
    equalize_rows(ranks, [9.0, 9, 1])
    assert ranks == [[[0], [1]], [[2]]]


@pytest.mark.parametrize("equal_rows", [False, True])
def test_finished_rows_go_to_ranks_whole_where_that_is_even(equal_rows: bool) -> None:
    """Packed again, the costliest pairs of equal cost would meet in other rows."""

    def rows_of(tokens: list[int], costs: list[float]) -> list[list[list[int]]]:
        plan = make_plan(
            ints(tokens), order=np.arange(len(tokens)), row_costs=np.array(costs), token_budget=100_000,
            rows_per_step=9, window_pairs=9, algorithm="next_fit", num_ranks=2, equal_rows=equal_rows,
        )  # fmt: skip
        return sorted(sorted(row.tolist() for row in rows) for rows in plan.pack_step(0))

    assert rows_of([50_000] * 4, [50.0] * 4) == [[[0, 1]], [[2, 3]]]
    three = rows_of([50_000, 50_000, 60_000, 60_000], [50.0] * 4)  # rows of 2, 1 and 1 pairs
    assert three == ([[[0], [2]], [[1], [3]]] if equal_rows else [[[0, 1]], [[2], [3]]])
    # One rank is half a percent above the mean. Packed again, both would cost the same.
    assert rows_of([50_000] * 4, [50.0, 50.0, 50.5, 50.5]) == [[[0, 1]], [[2, 3]]]


def test_finished_rows_that_leave_a_rank_idle_are_packed_again_even_if_no_rank_gets_faster() -> None:
    plan = make_plan(
        ints([9, 2, 2]), order=np.arange(3), row_costs=np.array([90.0, 10.0, 10.0]), token_budget=10,
        rows_per_step=2, window_pairs=3, algorithm="next_fit", num_ranks=3,
    )  # fmt: skip
    assert sorted(row.tolist() for (row,) in plan.pack_step(0)) == [[0], [1], [2]]


@given(lengths=lengths_strategy)
@example([63, 31, 41, 65])  # two items that fit in none of the first rows share a row
@example([38, 35, 31, 33, 35])  # one row more than the bound: still the even rows
@example([69, 53, 44, 56, 65, 45, 63])  # two rows more: the fewer rows of best fit
@example([17, 52, 58, 57, 54, 52])  # two rows more, and best fit has as many
def test_rows_of_a_window_equal_their_naive_definition(lengths: list[int]) -> None:
    """As many rows as the volume bound, each item in the emptiest; best fit decreasing where it is better."""
    oversize = [[item] for item, length in enumerate(lengths) if length > BUDGET]
    fitting = [item for item, length in enumerate(lengths) if length <= BUDGET]
    least = -(-sum(lengths[item] for item in fitting) // BUDGET)
    rows: list[list[int]] = [[] for _ in range(least)]
    for item in sorted(fitting, key=lambda item: -int(np.log2(lengths[item]) * 12)):
        emptiest = min(rows, key=lambda row: sum(lengths[i] for i in row))
        if sum(lengths[i] for i in emptiest) + lengths[item] <= BUDGET:
            emptiest.append(item)
        else:
            rows.append([item])
    rows = [row for row in rows if row] + oversize
    if len(rows) > least + len(oversize) + 1:
        fuller = [row.tolist() for row in best_fit_decreasing(ints(lengths), BUDGET)]
        rows = fuller if len(fuller) < len(rows) else rows
    assert fewest_rows_possible(ints(lengths), BUDGET) == least + len(oversize)
    packed = pack_window(ints(lengths), np.arange(len(lengths)), BUDGET, "best_fit_decreasing")
    assert [row.tolist() for row in packed] == sorted(rows, key=lambda row: row[0])


# ---- What the planner must reach on real lengths


@pytest.fixture(scope="module")
def hh() -> PairLengths:
    """As many pairs with the medians and the tails of HH: prompts of 121, completions of 30 and 33 tokens."""
    random = np.random.RandomState(0)
    prompt, chosen, rejected = (
        np.clip(median * np.exp(0.8 * random.standard_normal(2303)), 4, 1000).astype(np.int64)
        for median in (121, 30, 33)
    )
    return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)


def hh_plan(hh: PairLengths, *, num_ranks: int, settings: PlanSettings) -> PackingPlan:
    return settings.plan(
        hh.row_tokens(share_prompt=True),
        order=epoch_order(len(hh.prompt), shuffle=True, seed=0, epoch=0),
        num_ranks=num_ranks,
        row_costs=pair_flops(SEVEN_B, hh, share_prompt=True),
    )


SCOPE_STEP = PlanSettings(token_budget=8192, pairs_per_step=64, algorithm="best_fit_decreasing")


@pytest.mark.parametrize(("num_ranks", "pairs_per_step", "most"), [(8, 128, 1.02), (64, 512, 1.05)])
def test_the_slowest_rank_of_hh_is_close_to_the_mean_in_every_full_step(
    hh: PairLengths, num_ranks: int, pairs_per_step: int, most: float
) -> None:
    plan = hh_plan(hh, num_ranks=num_ranks, settings=replace(SCOPE_STEP, pairs_per_step=pairs_per_step))
    balance = rank_balance(plan)
    print(num_ranks, pairs_per_step, balance)
    assert balance["worst_full_step_slowest_over_mean"] <= most


def test_rows_of_hh_are_within_one_of_the_volume_bound_on_one_rank_and_in_scope_epoch(
    hh: PairLengths,
) -> None:
    tokens = hh.row_tokens(share_prompt=True)
    steps = hh_plan(hh, num_ranks=1, settings=SCOPE_STEP)
    for step in range(len(steps)):
        bound = fewest_rows_possible(tokens[steps.pairs(step)], 8192)
        assert len(steps.pack_step(step)[0]) <= bound + 1
    epoch = hh_plan(hh, num_ranks=1, settings=replace(SCOPE_STEP, rows_per_step=4))
    num_rows = sum(len(rows) for (rows,) in epoch)
    assert num_rows <= fewest_rows_possible(tokens, 8192) + 1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_million_pairs_are_planned_in_seconds_and_the_first_step_starts_at_once() -> None:
    script = Path(__file__).parents[1] / "support" / "million_pairs.py"
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    measured, slower = json.loads(process.stdout), slowness()
    assert measured["first_step_s"] < 0.5 * slower
    assert measured["epoch_s"] < 5.0 * slower
    assert measured["rows_a_step_s"] < 5.0 * slower
    assert measured["plan_bytes"] < 250e6
