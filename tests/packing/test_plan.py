"""Packing: every pair once, no row above the budget, the same steps whatever the ranks."""

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import make_plan

from dpo_pack.packing.bin_packing import (
    BIN_PACKERS,
    PADDED,
    ROW_OVERHEAD_TOKENS,
    best_fit_decreasing,
    first_fit_decreasing,
    next_fit,
    pack_sequences_longest_first,
    padded_rows,
)
from dpo_pack.packing.lengths import IntArray, PairLengths
from dpo_pack.packing.plan import PackingPlan, epoch_order
from dpo_pack.recipe.data import PackingRecipe

BUDGET = 100
without_deadline = settings(deadline=None)  # machines are busy; a slow example is no error
lengths_strategy = st.lists(st.integers(1, 130), max_size=60)
algorithm_strategy = st.sampled_from([*sorted(BIN_PACKERS), PADDED])


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def as_lists(rows: list[IntArray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


def flat_pairs(step: tuple[tuple[IntArray, ...], ...]) -> list[int]:
    return [pair for rows in step for row in rows for pair in row.tolist()]


def shuffled_plan(lengths: list[int], *, pairs_per_step: int, algorithm: str, num_ranks: int) -> PackingPlan:
    return make_plan(
        ints(lengths),
        order=epoch_order(len(lengths), shuffle=True, seed=1, epoch=0),
        token_budget=BUDGET,
        pairs_per_step=pairs_per_step,
        algorithm=algorithm,
        num_ranks=num_ranks,
    )


# ---- Lengths


def test_a_shared_pair_takes_the_common_prefix_once_and_an_unshared_one_takes_it_twice() -> None:
    # prompt 5, completions 4 and 3 of which the first token is common: shared 6, tails 3 and 2
    lengths = PairLengths(prompt=ints([5]), chosen=ints([4]), rejected=ints([3]), shared=ints([6]))
    assert lengths.row_tokens(share_prompt=True).tolist() == [6 + 3 + 2]
    assert lengths.row_tokens(share_prompt=False).tolist() == [9 + 8]
    assert lengths.padded_tokens().tolist() == [2 * 9]


def test_row_tokens_of_int32_lengths_do_not_overflow() -> None:
    long = np.array([2**30], dtype=np.int32)
    lengths = PairLengths(prompt=long, chosen=long, rejected=long, shared=long)
    assert lengths.row_tokens(share_prompt=False).tolist() == [4 * 2**30]
    assert lengths.padded_tokens().tolist() == [4 * 2**30]


# ---- Bin packers


@without_deadline
@given(lengths=lengths_strategy)
def test_neighbouring_next_fit_rows_would_not_fit_together_and_file_order_is_kept(lengths: list[int]) -> None:
    rows = as_lists(next_fit(ints(lengths), BUDGET))
    assert list(itertools.chain(*rows)) == list(range(len(lengths)))
    for row, following in itertools.pairwise(rows):
        assert sum(lengths[pair] for pair in row) + lengths[following[0]] > BUDGET


def naive_decreasing(lengths: list[int], *, best: bool) -> list[list[int]]:
    """First-fit or best-fit decreasing by trying every row, in O(n x rows)."""
    rows: list[list[int]] = []
    for pair in sorted(range(len(lengths)), key=lambda pair: -lengths[pair]):
        free = {i: BUDGET - sum(lengths[p] for p in row) - lengths[pair] for i, row in enumerate(rows)}
        fitting = [i for i, left in free.items() if left >= 0]
        if fitting:
            rows[min(fitting, key=lambda i: free[i]) if best else fitting[0]].append(pair)
        else:
            rows.append([pair])
    return rows


@without_deadline
@given(lengths=lengths_strategy)
def test_the_decreasing_packers_equal_their_naive_definitions(lengths: list[int]) -> None:
    assert as_lists(best_fit_decreasing(ints(lengths), BUDGET)) == naive_decreasing(lengths, best=True)
    assert as_lists(first_fit_decreasing(ints(lengths), BUDGET)) == naive_decreasing(lengths, best=False)


def test_a_recipe_may_name_every_bin_packer() -> None:
    assert get_args(PackingRecipe.model_fields["algorithm"].annotation) == tuple(BIN_PACKERS)


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


@without_deadline
@given(lengths=lengths_strategy)
def test_longest_first_rows_hold_every_pair_once_and_begin_with_the_largest_row(lengths: list[int]) -> None:
    rows = pack_sequences_longest_first(ints(lengths), BUDGET)
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
    order = epoch_order(
        len(sources),
        shuffle=shuffle,
        seed=seed,
        epoch=epoch,
        source_indices=np.array(sources, dtype=np.int16),
        source_weights=np.array(weights),
    )
    copies = Counter(order.tolist())
    for pair, source in enumerate(sources):
        assert np.floor(weights[source]) <= copies[pair] <= np.ceil(weights[source])
    for source, weight in enumerate(weights):
        drawn = sum(copies[pair] for pair in range(len(sources)) if sources[pair] == source)
        assert abs(drawn - weight * sources.count(source)) <= 0.5 + 1e-9


def test_the_fraction_of_a_source_is_drawn_anew_each_epoch_and_epochs_are_equally_long() -> None:
    def drawn(epoch: int) -> list[int]:
        order = epoch_order(
            100,
            shuffle=False,
            seed=0,
            epoch=epoch,
            source_indices=np.zeros(100, dtype=np.int16),
            source_weights=np.array([0.5]),
        )
        return [int(pair) for pair in order]

    assert len(drawn(0)) == len(drawn(1)) == 50
    assert drawn(0) == drawn(0) != drawn(1)


def test_which_pairs_are_drawn_has_nothing_to_do_with_which_a_shuffle_puts_first() -> None:
    zeros = np.zeros(1000, dtype=np.int16)
    drawn = epoch_order(
        1000, shuffle=False, seed=0, epoch=0, source_indices=zeros, source_weights=np.array([0.5])
    )
    shuffled_first = epoch_order(1000, shuffle=True, seed=0, epoch=0)[:500]
    # of two independent halves a quarter is in both: 250, standard deviation 8
    assert 200 < len(np.intersect1d(drawn, shuffled_first)) < 300


def test_seeds_and_epochs_give_different_permutations_and_the_same_arguments_the_same_one() -> None:
    orders = {
        tuple(epoch_order(50, shuffle=True, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(epoch_order(50, shuffle=True, seed=2, epoch=1).tolist()) in orders


def test_the_shuffled_order_is_the_one_older_runs_had() -> None:
    # A resumed run goes on in this order: where it has to change, raise PLAN_VERSION as well.
    assert epoch_order(10, shuffle=True, seed=0, epoch=0).tolist() == [9, 7, 2, 0, 4, 3, 5, 6, 1, 8]


# ---- Plans


@without_deadline
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=50),
    pairs_per_step=st.integers(1, 20),
    algorithm=algorithm_strategy,
    num_ranks=st.integers(1, 9),
)
def test_a_plan_trains_every_pair_once_within_the_budget_in_the_same_steps_on_any_ranks(
    lengths: list[int], pairs_per_step: int, algorithm: str, num_ranks: int
) -> None:
    plan = shuffled_plan(lengths, pairs_per_step=pairs_per_step, algorithm=algorithm, num_ranks=num_ranks)
    steps = list(plan)
    assert len(steps) == len(plan) == -(-len(lengths) // pairs_per_step)
    alone = shuffled_plan(lengths, pairs_per_step=pairs_per_step, algorithm=algorithm, num_ranks=1)
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


def test_padded_rows_count_their_padding_in_tokens_and_cost() -> None:
    plan = make_plan(
        ints([40, 44]), order=ints([0, 1]), token_budget=BUDGET, pairs_per_step=2, algorithm=PADDED
    )
    (((row,),),) = plan
    assert plan.sizes.of_row(row).tokens == plan.sizes.of_row(row).cost == 2 * 44


def test_the_plan_names_the_pairs_of_the_epoch_that_exceed_the_budget() -> None:
    plan = make_plan(
        ints([101, 100, 300, 101]),
        order=ints([2, 1, 0, 2]),
        token_budget=BUDGET,
        pairs_per_step=2,
        algorithm="best_fit_decreasing",
    )
    assert plan.oversize_pairs.tolist() == [0, 2]


def test_the_fingerprint_tells_apart_whatever_changes_steps_or_rows() -> None:
    def fingerprint(
        lengths: tuple[int, ...] = (10, 20, 30),
        order: tuple[int, ...] = (0, 1, 2),
        token_budget: int = 100,
        pairs_per_step: int = 2,
        algorithm: str = "best_fit_decreasing",
    ) -> str:
        return make_plan(
            np.array(lengths, dtype=np.int32),
            order=np.array(order, dtype=np.int32),
            token_budget=token_budget,
            pairs_per_step=pairs_per_step,
            algorithm=algorithm,
        ).fingerprint

    variants = [
        fingerprint(),
        fingerprint(lengths=(10, 20, 31)),
        fingerprint(order=(0, 2, 1)),
        fingerprint(order=(0, 1)),
        fingerprint(token_budget=101),
        fingerprint(pairs_per_step=3),
        fingerprint(algorithm="next_fit"),
    ]
    assert len(set(variants)) == len(variants)
    assert fingerprint() == fingerprint()


def test_the_fingerprint_tells_apart_the_rows_of_scope_epoch_and_merged_prompts() -> None:
    def plan(**changes: Any) -> PackingPlan:
        options: dict[str, Any] = {"window_pairs": 4, "rows_per_step": 2, "merging": None} | changes
        order = np.arange(4, dtype=np.int64)
        return make_plan(np.full(4, 10), order=order, token_budget=100, algorithm="next_fit", **options)

    # Rows [0, 1] and [2, 3], or [0, 1, 2] and [3]: the same order and the same step.
    two, three = plan(window_pairs=2), plan(window_pairs=3)
    assert two.order.tolist() == three.order.tolist() and two.step_begins.tolist() == [0, 4]
    assert two.fingerprint != three.fingerprint
    merged = [SimpleNamespace(prompts=np.array(prompts)) for prompts in ([0, 0, 1, 1], [0, 1, 1, 0])]
    steps = [plan(rows_per_step=None, merging=merging).fingerprint for merging in (None, *merged)]
    assert len(set(steps)) == 3
