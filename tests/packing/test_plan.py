"""Packing: every pair once, no row above the budget, the same steps whatever the ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.million_pairs import SEVEN_B
from support.plans import make_plan
from support.processor import slowness

from dpo_pack.packing import bin_packing
from dpo_pack.packing.bin_packing import (
    BALANCE_TOLERANCE,
    MOST_TOKENS_ALONE,
    ROW_OVERHEAD_TOKENS,
    best_fit_decreasing,
    equalize_rows,
    next_fit,
    pack_sequences_longest_first,
    padded_rows,
    split_over_ranks,
)
from dpo_pack.packing.lengths import (
    AnyIntArray,
    Beginnings,
    FloatArray,
    IntArray,
    PairLengths,
    PairSizes,
    pair_flops,
)
from dpo_pack.packing.plan import PackingPlan, epoch_order
from dpo_pack.reports.packing import rank_balance

BUDGET = 100
without_deadline = settings(deadline=None)  # machines are busy; a slow example is no error
lengths_strategy = st.lists(st.integers(1, 130), max_size=60)


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def one_source(num_pairs: int, *, weight: float = 1.0) -> tuple[IntArray, FloatArray]:
    """Source of each pair and weight of the source, for `epoch_order`."""
    return np.zeros(num_pairs, dtype=np.int64), np.array([weight])


def as_lists(rows: list[IntArray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def sizes_of(lengths: list[int]) -> PairSizes:
    return make_plan(ints(lengths), token_budget=BUDGET, pairs_per_step=1).sizes


def flat_pairs(step: tuple[tuple[IntArray, ...], ...]) -> list[int]:
    return [pair for rows in step for row in rows for pair in row.tolist()]


# ---- Lengths


def test_a_shared_pair_takes_the_common_prefix_once_and_an_unshared_one_takes_it_twice() -> None:
    # prompt 5, completions 4 and 3 of which the first token is common: shared 6, tails 3 and 2
    lengths = PairLengths(prompt=ints([5]), chosen=ints([4]), rejected=ints([3]), shared=ints([6]))
    assert lengths.row_tokens(share_prompt=True).tolist() == [6 + 3 + 2]
    assert lengths.row_tokens(share_prompt=False).tolist() == [9 + 8]
    assert lengths.row_tokens(pads=True).tolist() == [2 * 9]


def test_row_tokens_of_int32_lengths_do_not_overflow() -> None:
    long = np.array([2**30], dtype=np.int32)
    lengths = PairLengths(prompt=long, chosen=long, rejected=long, shared=long)
    assert lengths.row_tokens(share_prompt=False).tolist() == [4 * 2**30]
    assert lengths.row_tokens(pads=True).tolist() == [4 * 2**30]


# ---- Bin packers


@without_deadline
@given(lengths=lengths_strategy)
def test_neighbouring_next_fit_rows_would_not_fit_together_and_file_order_is_kept(lengths: list[int]) -> None:
    rows = as_lists(next_fit(sizes_of(lengths), np.arange(len(lengths)), BUDGET))
    assert list(itertools.chain(*rows)) == list(range(len(lengths)))
    for row, following in itertools.pairwise(rows):
        assert sum(lengths[pair] for pair in row) + lengths[following[0]] > BUDGET


def test_a_row_without_gradients_has_few_keys_however_much_its_pairs_share() -> None:
    plan = with_beginnings("one", 2_000, 4_000, 1)
    for budget, most in ((16_384, MOST_TOKENS_ALONE), (MOST_TOKENS_ALONE, MOST_TOKENS_ALONE), (2**18, 2**18)):
        rows = next_fit(plan.sizes, np.arange(2_000), budget)
        alone = [int(plan.sizes.tokens[row].sum()) for row in rows]
        assert max(alone) <= most and np.concatenate(rows).tolist() == list(range(2_000))
        assert all(plan.sizes.of_row(row).tokens <= budget for row in rows)
        fuller = [of + int(plan.sizes.tokens[row[-1] + 1]) for of, row in zip(alone, rows[:-1], strict=False)]
        assert budget < MOST_TOKENS_ALONE or min(fuller) > most  # a row ends only where a limit is reached


@pytest.mark.parametrize("kind", ["one", "ten", "half"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_row_has_few_keys_however_much_its_pairs_share(kind: str, num_ranks: int) -> None:
    for budget in (8192, 2**15, 2**18):
        plan = replace(with_beginnings(kind, 640, 4_000, num_ranks), token_budget=budget)
        most = max(budget, MOST_TOKENS_ALONE)
        rows = [row for step in plan for rows in step for row in rows]
        assert sum(map(len, rows)) == 640
        assert max(int(plan.sizes.tokens[row].sum()) for row in rows) <= most
        assert max(plan.sizes.of_row(row).tokens for row in rows) <= budget
        if budget == 2**15 and num_ranks == 1 and kind == "one":  # 64 pairs of 4,300 tokens
            assert len(rows) == 10 * 3


@without_deadline
@given(lengths=lengths_strategy)
def test_best_fit_decreasing_equals_its_definition_that_tries_every_row(lengths: list[int]) -> None:
    rows: list[list[int]] = []
    for pair in sorted(range(len(lengths)), key=lambda pair: -lengths[pair]):
        free = {i: BUDGET - sum(lengths[p] for p in row) - lengths[pair] for i, row in enumerate(rows)}
        fitting = [i for i, left in free.items() if left >= 0]
        if fitting:
            rows[min(fitting, key=free.__getitem__)].append(pair)
        else:
            rows.append([pair])
    assert as_lists(best_fit_decreasing(ints(lengths), BUDGET)) == rows


# ---- Padded rows


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to cut a set into non-empty parts."""
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [items[0], *parts[i]], *parts[i + 1 :]]


@without_deadline
@given(lengths=st.lists(st.integers(1, 1300), max_size=6))
def test_padded_rows_cost_no_more_than_any_partition_tried_by_brute_force(lengths: list[int]) -> None:
    def cost(rows: list[list[int]]) -> int:
        return sum(len(row) * max(lengths[pair] for pair in row) + ROW_OVERHEAD_TOKENS for row in rows)

    feasible = [
        rows
        for rows in partitions(list(range(len(lengths))))
        if all(len(row) == 1 or len(row) * max(lengths[pair] for pair in row) <= 1000 for row in rows)
    ]
    assert cost(as_lists(padded_rows(ints(lengths), 1000))) == min(map(cost, feasible))


# ---- The reference pass


def test_a_pass_without_gradients_keeps_beginnings_together() -> None:
    keys = ints([1, 0, 2, 1, 0, 2, 1])
    tokens, common = ints([60, 30, 50, 70, 90, 55, 45]), ints([0, 40, 20])[keys]
    beginnings = Beginnings(keys=keys, tokens=common, costs=common.astype(np.float64))
    sizes = PairSizes(tokens=tokens, costs=tokens.astype(np.float64), beginnings=beginnings)
    rows = pack_sequences_longest_first(sizes, BUDGET)
    assert sorted(map(sorted, as_lists(rows))) == [[0, 3, 6], [1], [2, 5], [4]]
    assert [sizes.of_row(row).tokens for row in rows] == [95, 90, 85, 30]


@without_deadline
@given(lengths=lengths_strategy)
def test_longest_first_rows_hold_every_pair_once_and_begin_with_the_largest_row(lengths: list[int]) -> None:
    rows = pack_sequences_longest_first(sizes_of(lengths), BUDGET)
    assert sorted(itertools.chain(*as_lists(rows))) == list(range(len(lengths)))
    tokens = [int(ints(lengths)[row].sum()) for row in rows]
    assert tokens == sorted(tokens, reverse=True)
    assert all(count <= BUDGET or len(row) == 1 for count, row in zip(tokens, rows, strict=True))


# ---- The order of an epoch


@without_deadline
@given(
    sources=st.lists(st.integers(0, 2), max_size=40),
    weights=st.lists(st.floats(0, 3), min_size=3, max_size=3),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_a_pair_comes_as_often_as_the_weight_of_its_source_says(
    sources: list[int], weights: list[float], seed: int, epoch: int, shuffle: bool
) -> None:
    indices = np.array(sources, dtype=np.int16)
    order = epoch_order(indices, np.array(weights), shuffle=shuffle, seed=seed, epoch=epoch)
    copies = Counter(order.tolist())
    for pair, source in enumerate(sources):
        assert np.floor(weights[source]) <= copies[pair] <= np.ceil(weights[source])
    for source, weight in enumerate(weights):
        drawn = sum(copies[pair] for pair in range(len(sources)) if sources[pair] == source)
        assert abs(drawn - weight * sources.count(source)) <= 0.5 + 1e-9


def test_the_fraction_of_a_source_is_drawn_anew_each_epoch_and_epochs_are_equally_long() -> None:
    def drawn(epoch: int) -> list[int]:
        order = epoch_order(*one_source(100, weight=0.5), shuffle=False, seed=0, epoch=epoch)
        return [int(pair) for pair in order]

    assert len(drawn(0)) == len(drawn(1)) == 50
    assert drawn(0) == drawn(0) != drawn(1)


def test_which_pairs_are_drawn_has_nothing_to_do_with_which_a_shuffle_puts_first() -> None:
    drawn = epoch_order(*one_source(1000, weight=0.5), shuffle=False, seed=0, epoch=0)
    shuffled_first = epoch_order(*one_source(1000), shuffle=True, seed=0, epoch=0)[:500]
    # of two independent halves a quarter is in both: 250, standard deviation 8
    assert 200 < len(np.intersect1d(drawn, shuffled_first)) < 300


def test_seeds_and_epochs_give_different_permutations_and_the_same_arguments_the_same_one() -> None:
    orders = {
        tuple(epoch_order(*one_source(50), shuffle=True, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(epoch_order(*one_source(50), shuffle=True, seed=2, epoch=1).tolist()) in orders


def test_the_shuffled_order_is_the_one_older_runs_had() -> None:
    # A resumed run goes on in this order: where it has to change, raise PLAN_VERSION as well.
    order = epoch_order(*one_source(10), shuffle=True, seed=0, epoch=0)
    assert order.tolist() == [9, 7, 2, 0, 4, 3, 5, 6, 1, 8]


# ---- Plans


@without_deadline
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=50),
    pairs_per_step=st.integers(1, 20),
    is_packed=st.booleans(),
    num_ranks=st.integers(1, 9),
    equal_rows=st.booleans(),
)
def test_a_plan_trains_every_pair_once_within_the_budget_in_the_same_steps_on_any_ranks(
    lengths: list[int], pairs_per_step: int, is_packed: bool, num_ranks: int, equal_rows: bool
) -> None:
    plan, alone = (
        make_plan(
            ints(lengths),
            order=epoch_order(*one_source(len(lengths)), shuffle=True, seed=1, epoch=0),
            token_budget=BUDGET,
            pairs_per_step=pairs_per_step,
            is_packed=is_packed,
            num_ranks=number,
            equal_rows=equal_rows,
        )
        for number in (num_ranks, 1)
    )
    steps = list(plan)
    assert len(steps) == len(plan) == -(-len(lengths) // pairs_per_step) == len(plan.step_begins) - 1
    assert alone.fingerprint == plan.fingerprint
    assert sorted(itertools.chain(*map(flat_pairs, steps))) == list(range(len(lengths)))
    for number, step in enumerate(steps):
        pairs = plan.pairs(number)
        assert len(pairs) == pairs_per_step or number == len(plan) - 1
        assert pairs.tolist() == alone.pairs(number).tolist()
        assert sorted(flat_pairs(step)) == sorted(pairs.tolist())
        assert len(step) == num_ranks
        assert sum(bool(rows) for rows in step) == min(num_ranks, len(pairs))
        for row in itertools.chain(*step):
            assert len(row) == 1 or plan.sizes.of_row(row).tokens <= BUDGET
        num_rows = {len(rows) for rows in step}
        if equal_rows and len(pairs) >= num_ranks * max(num_rows):
            assert len(num_rows) == 1
    with pytest.raises(AssertionError):
        plan.pairs(len(plan))


@without_deadline
@given(
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    equal_rows=st.booleans(),
)
def test_pairs_of_one_beginning_stand_together_and_rows_have_it_once(
    pairs: list[tuple[int, int]], num_ranks: int, equal_rows: bool
) -> None:
    common = ints([0, 16, 40, 70])  # tokens of each beginning; pairs of number 0 have none
    keys, own = ints([key for key, _ in pairs]), ints([tokens for _, tokens in pairs])
    beginnings = Beginnings(keys=keys, tokens=common[keys], costs=common[keys].astype(np.float64))
    plan = make_plan(
        own + common[keys],
        token_budget=BUDGET,
        pairs_per_step=16,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
        beginnings=beginnings,
    )
    alone = 0
    for number, step in enumerate(plan):
        assert sorted(flat_pairs(step)) == sorted(plan.pairs(number).tolist())
        assert sum(bool(rows) for rows in step) == min(num_ranks, len(plan.pairs(number)))
        for row in itertools.chain(*step):
            of_row = [key for key, _ in itertools.groupby(keys[row].tolist()) if key]
            assert len(of_row) == len(set(of_row))
            tokens = int(own[row].sum() + common[of_row].sum())
            assert plan.sizes.of_row(row) == (tokens, tokens)
            assert len(row) == 1 or tokens <= BUDGET
            alone += tokens
        if num_ranks == 1:  # never more than a row for each beginning and those of the pairs without any
            assert sum(map(len, step)) <= len(plan.pairs(number))
    assert plan.count_tokens() == alone


def test_64_pairs_with_a_system_prompt_compute_it_once_in_each_row() -> None:
    own = 40 + np.arange(64) * 5 % 211
    keys, common = np.ones(64, dtype=np.int64), np.full(64, 500)
    beginnings = Beginnings(keys=keys, tokens=common, costs=common.astype(np.float64))
    ((rows,),) = make_plan(
        own + 500,
        token_budget=2048,
        pairs_per_step=64,
        beginnings=beginnings,
    )
    plan_tokens = sum(int(own[row].sum()) + 500 for row in rows)
    assert len(rows) == -(-own.sum() // (2048 - 500))
    assert plan_tokens == own.sum() + 500 + 500 * (len(rows) - 1)


def test_beginnings_stay_on_few_ranks() -> None:
    keys = np.arange(64) % 4 + 1  # four agents on four ranks
    common = np.full(64, 2000)
    plan = make_plan(
        common + 500,
        token_budget=8192,
        pairs_per_step=64,
        num_ranks=4,
        beginnings=Beginnings(keys=keys, tokens=common, costs=common.astype(np.float64)),
    )
    (step,) = plan
    tokens = [sum(plan.sizes.of_row(row).tokens for row in rows) for rows in step]
    assert max(tokens) <= 12000 and sum(tokens) <= 64 * 500 + 8 * 2000


def with_beginnings(kind: str, num_pairs: int, common_tokens: int, num_ranks: int) -> PackingPlan:
    """The plan of pairs with HH's lengths, of which all, a tenth each or half have a common beginning."""
    random = np.random.RandomState(0)
    own = np.clip(265 * np.exp(0.7 * random.standard_normal(num_pairs)), 8, 2000).astype(np.int64)
    kinds: dict[str, AnyIntArray | int] = {
        "none": 0,
        "one": 1,
        "ten": random.randint(1, 11, num_pairs),
        "half": random.randint(0, 2, num_pairs),
    }
    keys = np.broadcast_to(kinds[kind], num_pairs).astype(np.int64)
    common = common_tokens * (keys != 0)
    return make_plan(
        own + common,
        token_budget=8192,
        pairs_per_step=64,
        num_ranks=num_ranks,
        beginnings=Beginnings(keys=keys, tokens=common, costs=common.astype(np.float64)),
    )


@pytest.mark.parametrize(
    ("kind", "common_tokens", "uneven", "copies"),
    [("one", 500, 1.01, 8), ("half", 500, 1.01, 6), ("half", 2000, 1.03, 6), ("ten", 500, 1.1, 17)],
)
def test_ranks_are_even_in_the_rows_that_they_compute(
    kind: str, common_tokens: int, uneven: float, copies: int
) -> None:
    """uneven: the slowest rank over the mean, on average. copies: of beginnings in a step, on average."""
    plan = with_beginnings(kind, 3200, common_tokens, 8)
    costs = np.array([[sum(plan.sizes.of_row(row).cost for row in rows) for rows in step] for step in plan])
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() <= uneven
    assert plan.sizes.beginnings is not None
    own = plan.sizes.tokens - plan.sizes.beginnings.tokens
    assert (costs.sum() - own.sum()) / common_tokens / len(plan) <= copies


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("num_ranks", "most"), [(1, 0.12), (8, 0.2)])
def test_beginnings_are_planned_in_little_time(num_ranks: int, most: float) -> None:
    def seconds(kind: str) -> float:
        plan, times = with_beginnings(kind, 20_000, 500, num_ranks), list[float]()
        for _ in range(4):
            times.append(time.process_time())
            for _ in plan:
                pass
        return 5 * float(np.diff([*times, time.process_time()]).min())  # of 100,000 pairs, the best of four

    limit = seconds("none") + most * slowness()
    assert max(map(seconds, ("one", "ten", "half"))) <= limit


def test_padded_rows_count_their_padding_in_tokens_and_cost() -> None:
    order = ints([0, 1])
    plan = make_plan(ints([40, 44]), order=order, token_budget=BUDGET, pairs_per_step=2, is_packed=False)
    (((row,),),) = plan
    assert plan.sizes.of_row(row).tokens == plan.sizes.of_row(row).cost == 2 * 44


def test_the_plan_names_the_pairs_of_the_epoch_that_exceed_the_budget() -> None:
    lengths, order = ints([101, 100, 300, 101]), ints([2, 1, 0, 2])
    plan = make_plan(lengths, order=order, token_budget=BUDGET, pairs_per_step=2)
    assert plan.oversize_pairs.tolist() == [0, 2]


def test_the_fingerprint_tells_apart_whatever_changes_steps_or_rows() -> None:
    def fingerprint(
        lengths: tuple[int, ...] = (10, 20, 30),
        order: tuple[int, ...] = (0, 1, 2),
        token_budget: int = 100,
        pairs_per_step: int = 2,
        is_packed: bool = True,
    ) -> str:
        return make_plan(
            np.array(lengths, dtype=np.int32),
            order=np.array(order, dtype=np.int32),
            token_budget=token_budget,
            pairs_per_step=pairs_per_step,
            is_packed=is_packed,
        ).fingerprint

    variants = [
        fingerprint(),
        fingerprint(lengths=(10, 20, 31)),
        fingerprint(order=(0, 2, 1)),
        fingerprint(order=(0, 1)),
        fingerprint(token_budget=101),
        fingerprint(pairs_per_step=3),
        fingerprint(is_packed=False),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint() == fingerprint()


# ---- Ranks


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40), num_ranks=st.integers(2, 6))
def test_where_ranks_are_uneven_no_move_or_swap_would_help_slowest(costs: list[int], num_ranks: int) -> None:
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


@pytest.mark.parametrize(("large", "expected"), [(94, [99, 101]), (93, [99, 99])])
def test_a_split_within_one_percent_of_the_mean_is_left_alone(large: int, expected: list[int]) -> None:
    # Longest processing time gives large + 7 and large + 5. A swap makes them equal.
    costs = np.array([large, large, 3, 3, 2, 2, 2], dtype=np.float64)
    assert sorted(costs[part].sum() for part in split_over_ranks(costs, 2)) == expected


@pytest.mark.parametrize(("most", "expected"), [(12, [9.0, 9.0]), (11, [8.0, 10.0])])
def test_too_many_items_stay(most: int, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bin_packing, "MAX_SWAPS", most)
    costs = np.array([5.0, 4.0, 3.0, 3.0, 3.0])  # two items on one rank, three on the other: 6 swaps, 6 moves
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


# ---- What the planner must reach on real lengths


@pytest.mark.parametrize(
    ("num_ranks", "pairs_per_step", "most"), [(1, 64, 1.0), (8, 128, 1.02), (64, 512, 1.05)]
)
def test_rows_of_hh_are_few_and_the_slowest_rank_is_close_to_the_mean_in_every_full_step(
    num_ranks: int, pairs_per_step: int, most: float
) -> None:
    """Pairs with the medians and the tails of HH: prompts of 121, completions of 30 and 33 tokens."""
    random = np.random.RandomState(0)
    prompt, chosen, rejected = (
        np.clip(median * np.exp(0.8 * random.standard_normal(2303)), 4, 1000).astype(np.int64)
        for median in (121, 30, 33)
    )
    hh = PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)
    tokens = hh.row_tokens(share_prompt=True)
    plan = make_plan(
        tokens,
        order=epoch_order(*one_source(len(prompt)), shuffle=True, seed=0, epoch=0),
        token_budget=8192,
        pairs_per_step=pairs_per_step,
        num_ranks=num_ranks,
        row_costs=pair_flops(SEVEN_B, hh, share_prompt=True),
    )
    assert rank_balance(plan)["worst_full_step_slowest_over_mean"] <= most
    if num_ranks == 1:
        for step in range(len(plan)):
            assert len(plan.pack_step(step)[0]) <= -(-tokens[plan.pairs(step)].sum() // 8192) + 1


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_million_pairs_are_planned_in_seconds_and_the_first_step_starts_at_once() -> None:
    script = Path(__file__).parents[1] / "support" / "million_pairs.py"
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    measured, slower = json.loads(process.stdout), slowness()
    assert measured["first_step_s"] < 0.5 * slower
    assert measured["epoch_s"] < 5.0 * slower
    assert measured["plan_bytes"] < 250e6
