"""What the reference pass has to do, and how it is split into rows and over processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reference_pairs import NAMESPACE, Pair, make_table

from dpo_pack.packing.flops import AttentionKind, ModelShape
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import PassSettings, plan_pass, split_row
from dpo_pack.reference.parts import TokenLogps, sequence_table
from dpo_pack.reference.work import GroupLengths, ReferenceWork, find_work

CPU = torch.device("cpu")
# b's first pair is a's first with the sides exchanged, its second has a's first prompt and a new chosen.
TABLE_A: list[Pair] = [((5, 6, 7), (8, 9), (8, 10, 11)), ((5,), (6, 7), (6,))]
TABLE_B: list[Pair] = [((5, 6, 7), (8, 10, 11), (8, 9)), ((5, 6, 7), (12,), (8, 9))]


def test_equal_sequences_are_missing_once_over_pairs_and_tables(tmp_path: Path) -> None:
    tables = [make_table(TABLE_A), make_table(TABLE_B)]
    work = find_work(ReferenceCache(tmp_path, NAMESPACE), tables)
    assert (work.num_unique, work.num_cached, work.num_missing) == (5, 0, 5)
    groups = [work.group(number) for number in range(len(work.pair_indices))]
    contents = [(g.context.tolist(), [c.tolist() for c in g.completions]) for g in groups]
    assert contents == [([5, 6, 7], [[8, 9], [8, 10, 11]]), ([5], [[6, 7], [6]]), ([5, 6, 7], [[12]])]
    assert work.table_indices.tolist() == [0, 0, 1] and work.pair_indices.tolist() == [0, 1, 1]
    # Shared: 3 + 1 (8 is common) + 1 + 2; 1 + 1 + 1 + 0; 3 + 1.
    lengths, sides = work.lengths, work.sides
    assert lengths.row_tokens(sides, share_prompt=True).tolist() == [7, 3, 4]
    assert lengths.row_tokens(sides, share_prompt=False).tolist() == [11, 5, 4]
    keys = [tables[0].chosen_keys[0], tables[0].rejected_keys[0]]
    assert all(np.array_equal(a, b) for a, b in zip(work.keys(0), keys, strict=True))


def test_the_same_tokens_with_another_boundary_are_another_sequence(tmp_path: Path) -> None:
    table = make_table([((5, 6), (7, 8), (7,)), ((5, 6, 7), (8,), (9,))])
    assert find_work(ReferenceCache(tmp_path, NAMESPACE), [table]).num_missing == 4


def test_a_pair_that_lacks_one_side_is_a_group_of_one(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    cached = np.stack((table.rejected_keys[0], table.chosen_keys[1]))
    cache.append(sequence_table(cached, np.array([-1.0, -2.0]), np.array([3, 2])))
    work = find_work(cache, [table])
    assert (work.num_unique, work.num_cached, work.num_missing) == (4, 2, 2)
    assert work.missing.tolist() == [[True, False], [False, True]]
    groups = [work.group(number) for number in range(2)]
    assert [[c.tolist() for c in group.completions] for group in groups] == [[[8, 9]], [[6]]]
    assert work.lengths.row_tokens(work.missing, share_prompt=True).tolist() == [5, 2]
    assert np.array_equal(work.keys(1), table.rejected_keys[1:])


def test_nothing_is_missing_once_everything_is_cached(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    keys = np.concatenate((table.chosen_keys, table.rejected_keys))
    cache.append(sequence_table(keys, np.full(4, -1.0), np.ones(4, dtype=np.int64)))
    work = find_work(cache, [table, make_table(TABLE_B[:1])])
    assert (work.num_missing, work.num_cached) == (0, 4) and not work.missing.any()


def test_sums_alone_are_not_enough_for_who_needs_tokens(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    keys = np.concatenate((table.chosen_keys, table.rejected_keys))
    cache.append(sequence_table(keys, np.full(4, -1.0), np.ones(4, dtype=np.int64)))
    assert find_work(cache, [table], per_token=True).num_missing == 4
    tokens = TokenLogps.of_lengths(np.full(1, -1.0, dtype=np.float32), np.ones(1, dtype=np.int64))
    cache.append(sequence_table(keys[:1], np.full(1, -1.0), np.ones(1, dtype=np.int64), tokens))
    assert find_work(cache, [table], per_token=True).num_missing == 3


# ---- Rows

SHAPE = ModelShape(
    token_weights=1000.0, head_weights=500, attention=(AttentionKind(num_layers=2, width=64, window=None),)
)


def random_lengths(num_groups: int, seed: int = 0) -> GroupLengths:
    random = np.random.default_rng(seed)
    prompt = random.integers(1, 40, num_groups)
    completions = random.integers(1, 20, (num_groups, 2))
    shared = prompt + random.integers(0, completions.min(axis=1) + 1)
    return GroupLengths(prompt=prompt, completions=completions, shared=shared)


def work_of(lengths: GroupLengths, missing: npt.NDArray[np.bool_]) -> ReferenceWork:
    """Work of which only lengths and missing sequences are known; no sequence of it is in another group."""
    numbers = np.arange(len(missing))
    return ReferenceWork(
        tables=(),
        table_indices=numbers,
        pair_indices=numbers,
        sides=np.ones_like(missing),
        missing=missing,
        lengths=lengths,
    )


def plan(
    lengths: GroupLengths,
    missing: npt.NDArray[np.bool_],
    *,
    rank: int = 0,
    num_ranks: int = 1,
    token_budget: int = 100,
    is_packed: bool = True,
) -> list[npt.NDArray[np.int64]]:
    settings = PassSettings(
        token_budget=token_budget, share_prompt=True, device=CPU, rank=rank, num_ranks=num_ranks
    )
    planned = plan_pass(work_of(lengths, missing), SHAPE, settings, is_packed=is_packed)
    assert not planned.idle_rows
    return list(planned.rows)


def as_sets(rows: list[npt.NDArray[np.int64]]) -> set[tuple[int, ...]]:
    return {tuple(row.tolist()) for row in rows}


@pytest.mark.parametrize("is_packed", [True, False])
@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 60), num_ranks=st.integers(1, 4), data=st.data())
def test_a_pass_that_goes_on_has_the_rows_it_would_have_had_on_any_number_of_ranks(
    is_packed: bool, seed: int, num_groups: int, num_ranks: int, data: st.DataObject
) -> None:
    lengths = random_lengths(num_groups, seed)
    missing = np.random.default_rng(seed).random((num_groups, 2)) < 0.7  # some was cached before
    whole = as_sets(plan(lengths, missing, is_packed=is_packed))
    finished = data.draw(st.sets(st.sampled_from(sorted(whole)))) if whole else set()
    for row in finished:
        missing[list(row)] = False
    rows: set[tuple[int, ...]] = set()
    for rank in range(num_ranks):
        mine = as_sets(plan(lengths, missing, rank=rank, num_ranks=num_ranks, is_packed=is_packed))
        assert not rows & mine
        rows |= mine
    assert rows == whole - finished


def test_rows_stay_within_the_budget_and_hold_every_missing_group_once() -> None:
    lengths = random_lengths(200)
    missing = np.ones((200, 2), dtype=np.bool_)
    rows = plan(lengths, missing)
    tokens = lengths.row_tokens(missing, share_prompt=True)
    assert sorted(np.concatenate(rows).tolist()) == list(range(200))
    assert max(tokens[row].sum() for row in rows) <= 100
    for row in plan(lengths, missing, is_packed=False):
        longest = lengths.row_tokens(missing, share_prompt=False, is_padded=True)[row].max()
        assert len(row) * longest <= max(100, longest)


def test_the_costliest_row_comes_first_on_every_rank_and_ranks_are_even() -> None:
    lengths = random_lengths(400)
    missing = np.ones((400, 2), dtype=np.bool_)
    flops = lengths.flops(missing, share_prompt=True, shape=SHAPE)
    loads = []
    for rank in range(4):
        costs = [float(flops[row].sum()) for row in plan(lengths, missing, rank=rank, num_ranks=4)]
        assert costs == sorted(costs, reverse=True)
        loads.append(sum(costs))
    assert max(loads) <= 1.02 * float(np.mean(loads))


def test_flops_of_a_group_are_those_of_what_is_computed() -> None:
    lengths = GroupLengths(
        prompt=np.array([3, 3]), completions=np.array([[2, 4], [2, 4]]), shared=np.array([4, 4])
    )
    missing = np.array([[True, True], [False, True]])
    area = 64 * 2 * 2.0  # per query and key
    both = 2000.0 * (5 + 7 - 4) + 1000.0 * 6 + area * (15 + 28 - 10)
    rejected_only = 2000.0 * 7 + 1000.0 * 4 + area * 28
    assert lengths.flops(missing, share_prompt=True, shape=SHAPE).tolist() == [both, rejected_only]


def test_a_split_row_keeps_its_order_and_fits_where_it_can() -> None:
    tokens = np.array([50, 40, 30, 20, 10, 90])
    row = np.array([5, 0, 1, 2, 3])
    assert [part.tolist() for part in split_row(row, tokens, 90)] == [[5], [0, 1], [2, 3]]
    assert [part.tolist() for part in split_row(row, tokens, 60)] == [[5], [0], [1], [2, 3]]


Rows = Sequence[npt.NDArray[np.int64]]


@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 40), num_ranks=st.integers(1, 4))
def test_ranks_in_lockstep_have_as_many_rows_and_compute_each_once(
    seed: int, num_groups: int, num_ranks: int
) -> None:
    lengths, missing = random_lengths(num_groups, seed), np.ones((num_groups, 2), dtype=np.bool_)

    def rows_of(rank: int, *, in_lockstep: bool) -> tuple[Rows, Rows]:
        settings = PassSettings(
            token_budget=100,
            share_prompt=True,
            device=CPU,
            rank=rank,
            num_ranks=num_ranks,
            in_lockstep=in_lockstep,
        )
        planned = plan_pass(work_of(lengths, missing), SHAPE, settings, is_packed=True)
        return planned.rows, planned.idle_rows

    shares = [rows_of(rank, in_lockstep=True) for rank in range(num_ranks)]
    assert len({len(own) + len(idle) for own, idle in shares}) == 1
    assert all(len(idle) <= 1 for _, idle in shares)
    together = [tuple(row) for own, _ in shares for row in own]
    free = [tuple(row) for rank in range(num_ranks) for row in rows_of(rank, in_lockstep=False)[0]]
    assert sorted(together) == sorted(free)
