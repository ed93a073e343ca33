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
from support.reference_pairs import NAMESPACE, Pair, load_scorer, make_table, run_pass

from dpo_pack.data.store import PairTable, join_pairs, pair_lengths
from dpo_pack.packing.lengths import AttentionKind, FloatArray, Group, ModelShape, pair_flops
from dpo_pack.reference.cache import FrozenReference, ReferenceCache
from dpo_pack.reference.compute import PassPlan, PassSettings, ReferenceWork, find_work, plan_pass

CPU = torch.device("cpu")
# b's first pair is a's first with the sides exchanged, its second has a's first prompt and a new chosen.
TABLE_A: list[Pair] = [((5, 6, 7), (8, 9), (8, 10, 11)), ((5,), (6, 7), (6,))]
TABLE_B: list[Pair] = [((5, 6, 7), (8, 10, 11), (8, 9)), ((5, 6, 7), (12,), (8, 9))]


def test_equal_sequences_are_missing_once_over_pairs_and_tables(tmp_path: Path) -> None:
    tables = [make_table(TABLE_A), make_table(TABLE_B)]
    work = find_work(ReferenceCache(tmp_path, NAMESPACE), tables)
    assert (work.sides.sum(), work.missing.sum()) == (5, 5)
    groups = [work.table.group(number, work.missing[number]) for number in range(3)]
    contents = [(g.context.tolist(), [c.tolist() for c in g.completions]) for g in groups]
    assert contents == [([5, 6, 7], [[8, 9], [8, 10, 11]]), ([5], [[6, 7], [6]]), ([5, 6, 7], [[12]])]
    assert work.table.row_numbers.tolist() == [1, 2, 2]
    # Shared: 3 + 1 (8 is common) + 1 + 2; 1 + 1 + 1 + 0; 3 + 1.
    assert pair_lengths(work.table).row_tokens(share_prompt=True, sides=work.sides).tolist() == [7, 3, 4]
    assert pair_lengths(work.table).row_tokens(share_prompt=False, sides=work.sides).tolist() == [11, 5, 4]


# ---- Rows

SHAPE = ModelShape(
    token_weights=1000.0, head_weights=500, attention=(AttentionKind(num_layers=2, width=64, window=None),)
)


def forward_flops(work: ReferenceWork) -> FloatArray:
    return pair_flops(SHAPE, pair_lengths(work.table), share_prompt=True, passes=1.0, sides=work.missing)


def random_work(num_pairs: int, missing: npt.NDArray[np.bool_] | None = None, seed: int = 0) -> ReferenceWork:
    """Pairs whose sequences are all different, of which at first all are missing."""
    random = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        drawn: list[int] = random.integers(3, 90, random.integers(least, most)).tolist()
        return drawn

    def pair(number: int) -> Pair:
        common = ids(0, 10)
        return [100 + number, *ids(0, 39)], [*common, 1, *ids(0, 9)], [*common, 2, *ids(0, 9)]

    every = np.ones((num_pairs, 2), dtype=np.bool_)
    table = make_table([pair(number) for number in range(num_pairs)])
    return ReferenceWork(table=table, sides=every, missing=every if missing is None else missing)


def plan(
    work: ReferenceWork,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    is_packed: bool = True,
    in_lockstep: bool = False,
) -> PassPlan:
    settings = PassSettings(
        token_budget=100,
        share_prompt=True,
        device=CPU,
        rank=rank,
        num_ranks=num_ranks,
        in_lockstep=in_lockstep,
    )
    return plan_pass(work, SHAPE, settings, is_packed=is_packed)


@pytest.mark.parametrize("is_packed", [True, False])
@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 60), num_ranks=st.integers(1, 4), data=st.data())
def test_a_pass_that_goes_on_has_the_rows_it_would_have_had_on_any_number_of_ranks(
    is_packed: bool, seed: int, num_groups: int, num_ranks: int, data: st.DataObject
) -> None:
    missing = np.random.default_rng(seed).random((num_groups, 2)) < 0.7  # some was cached before
    work = random_work(num_groups, missing, seed)
    whole = {tuple(row.tolist()) for row in plan(work, is_packed=is_packed).rows}
    finished = data.draw(st.sets(st.sampled_from(sorted(whole)))) if whole else set()
    for row in finished:
        missing[list(row)] = False
    rows: list[tuple[int, ...]] = []
    for rank in range(num_ranks):
        planned = plan(work, rank=rank, num_ranks=num_ranks, is_packed=is_packed)
        rows += [tuple(row.tolist()) for row in planned.rows]
        assert not planned.idle_rows
    assert sorted(rows) == sorted(whole - finished)


def test_rows_stay_within_the_budget_and_hold_every_missing_group_once() -> None:
    work = random_work(200)
    rows = plan(work).rows
    tokens = pair_lengths(work.table).row_tokens(share_prompt=True, sides=work.missing)
    assert sorted(np.concatenate(rows).tolist()) == list(range(200))
    assert max(tokens[row].sum() for row in rows) <= 100
    for row in plan(work, is_packed=False).rows:
        longest = pair_lengths(work.table).row_tokens(pads=True, sides=work.missing)[row].max()
        assert len(row) * longest <= max(100, longest)


def test_the_costliest_row_comes_first_on_every_rank_and_ranks_are_even() -> None:
    work = random_work(400)
    flops = forward_flops(work)
    loads = []
    for rank in range(4):
        costs = [float(flops[row].sum()) for row in plan(work, rank=rank, num_ranks=4).rows]
        assert costs == sorted(costs, reverse=True)
        loads.append(sum(costs))
    assert max(loads) <= 1.02 * float(np.mean(loads))


@given(seed=st.integers(0, 1000), num_groups=st.integers(1, 40), num_ranks=st.integers(1, 4))
def test_ranks_in_lockstep_compute_equal_rows_each_once(seed: int, num_groups: int, num_ranks: int) -> None:
    work = random_work(num_groups, seed=seed)
    ranks = range(num_ranks)
    plans = [plan(work, rank=rank, num_ranks=num_ranks, in_lockstep=True) for rank in ranks]
    assert len({len(of_rank.rows) + len(of_rank.idle_rows) for of_rank in plans}) == 1
    assert all(len(of_rank.idle_rows) <= 1 for of_rank in plans)
    together = [tuple(row) for of_rank in plans for row in of_rank.rows]
    free = [tuple(row) for rank in ranks for row in plan(work, rank=rank, num_ranks=num_ranks).rows]
    assert sorted(together) == sorted(free)


PROMPT = [5, 9, 12]
# (chosen, scored, rejected, scored); the first two pairs have one completion, of which other tokens count.
ROWS = [
    ([7, 8, 30, 31, 9], [1, 1, 0, 0, 1], [7, 8, 40, 11], [1, 1, 0, 1]),
    ([7, 8, 30, 31, 9], [0, 0, 1, 1, 0], [13, 14], [1, 1]),
    ([21, 22, 23], [1, 1, 1], [21, 24, 25, 26], [1, 1, 1, 1]),
]
ALL_SCORED = [(c, [1] * len(c), r, [1] * len(r)) for c, _, r, _ in ROWS]


def table_of(rows: Sequence[tuple[list[int], list[int], list[int], list[int]]]) -> PairTable:
    def group(chosen: list[int], cs: list[int], rejected: list[int], rs: list[int]) -> Group:
        return Group(
            context=np.array(PROMPT, dtype=np.int32),
            completions=(np.array(chosen, dtype=np.int32), np.array(rejected, dtype=np.int32)),
            scored=(np.array(cs, dtype=np.bool_), np.array(rs, dtype=np.bool_)),
        )

    return PairTable.of([join_pairs([group(*row) for row in rows], [1.0] * len(rows), range(len(rows)))])


def test_the_key_of_a_sequence_knows_which_tokens_are_scored(model_path: Path, tmp_path: Path) -> None:
    table, plain = table_of(ROWS), table_of(ALL_SCORED)
    assert plain.parts[0].scored is None and plain.group(0).scored is None
    assert len({keys.tobytes() for keys in (*table.chosen_keys[:2], *plain.chosen_keys[:1])}) == 3
    assert np.array_equal(table.rejected_keys[1:], plain.rejected_keys[1:])
    assert table.fingerprint != plain.fingerprint
    assert table.chosen_scored.tolist() == [3, 2, 3] and table.rejected_scored.tolist() == [3, 2, 4]
    cache, scorer = ReferenceCache(tmp_path, NAMESPACE), load_scorer(model_path)
    run_pass(cache, [plain], scorer)
    assert find_work(cache, [table]).missing.sum() == 3  # the third pair and one completion are scored whole
    run_pass(cache, [table], scorer)
    assert find_work(cache, [table, plain]).missing.sum() == 0
    assert FrozenReference.find(cache, [plain]).lacking(table).num_pairs == 2
