"""Plans an epoch from the lengths of pairs: each step's pairs, their rows (forward passes), and their ranks.

Legend: P pairs of the data set, E pairs of an epoch (copies included), R ranks. Lengths are in tokens; the
number of a pair is its position in the [P] arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dpo_pack.packing.bin_packing import (
    best_fit_decreasing,
    equalize_rows,
    pack_blocks,
    padded_rows,
    split_over_ranks,
)
from dpo_pack.packing.lengths import AnyIntArray, FloatArray, IntArray, PairSizes

# A part of every plan's fingerprint. Raise it if a change of code gives other steps or rows.
PLAN_VERSION = 6

StepRows = tuple[tuple[IntArray, ...], ...]  # the rows of each rank; a row is an array of pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan:
    """The plan of one epoch. `pack_step` packs the rows of its step, so a plan is made in almost no time."""

    order: IntArray  # [E] pairs in the order they are trained on
    sizes: PairSizes  # tokens and cost of every pair
    token_budget: int
    pairs_per_step: int
    num_ranks: int
    equal_rows: bool  # for sharded models: all ranks get equally many rows
    fingerprint: str  # hexadecimal; see `plan_epoch`

    def __len__(self) -> int:
        return -(-len(self.order) // self.pairs_per_step)

    @property
    def step_begins(self) -> IntArray:
        """Where each step begins in `order`, and where the last one ends, [steps + 1]."""
        return np.append(np.arange(0, len(self.order), self.pairs_per_step), len(self.order))

    def pairs(self, step: int) -> IntArray:
        """Returns the pairs of a step on all ranks together. The last step can have fewer pairs."""
        assert 0 <= step < len(self), step
        return self.order[step * self.pairs_per_step : (step + 1) * self.pairs_per_step]

    def pack_step(self, step: int) -> StepRows:
        """Returns the rows of each rank in a step, arrays of pairs; those with a common beginning stand
        together. Every rank has a row if there are enough pairs."""
        pairs, sizes = self.pairs(step), self.sizes
        if sizes.beginnings is not None and sizes.beginnings.keys[pairs].any():
            ranks = pack_blocks(sizes, pairs, self.num_ranks, self.token_budget)
        else:
            packer, ranks = padded_rows if sizes.pads else best_fit_decreasing, []
            for own in split_over_ranks(sizes.costs[pairs], self.num_ranks):
                rows = packer(sizes.tokens[pairs[own]], self.token_budget)
                ranks.append([own[row].tolist() for row in rows])
        if self.equal_rows:
            equalize_rows(ranks, sizes.costs[pairs].tolist())
        return tuple(tuple(pairs[row] for row in rows) for rows in ranks)

    def __iter__(self) -> Iterator[StepRows]:
        """Yields `pack_step` of every step."""
        return (self.pack_step(step) for step in range(len(self)))

    def spread_steps(self, most: int) -> list[int]:
        """Returns at most so many steps, spread evenly over the epoch, the first and the last included."""
        return [round(step) for step in np.linspace(0, len(self) - 1, min(len(self), most)).tolist()]

    def count_tokens(self) -> int:
        """Returns the tokens that the epoch's rows compute, counted on 50 steps if pairs begin alike."""
        alone = int(self.sizes.tokens[self.order].sum())
        if self.sizes.beginnings is None:
            return alone
        steps = map(self.pack_step, self.spread_steps(50))
        rows = [row for of_ranks in steps for of_rank in of_ranks for row in of_rank]
        saved = sum(int(self.sizes.tokens[row].sum()) - self.sizes.of_row(row).tokens for row in rows)
        return alone - round(saved * len(self.order) / sum(map(len, rows)))

    @property
    def oversize_pairs(self) -> IntArray:
        """The pairs of the epoch that exceed the token budget, ascending. Each is alone in its row."""
        return np.unique(self.order[self.sizes.tokens[self.order] > self.token_budget])


def plan_epoch(
    sizes: PairSizes,
    *,
    order: AnyIntArray,
    token_budget: int,
    pairs_per_step: int,
    num_ranks: int = 1,
    equal_rows: bool = False,
) -> PackingPlan:
    """Makes the plan of an epoch: every entry of `order`, [E] from `epoch_order`, is in one step and one row.
    equal_rows: ranks have as many rows each. A resumed run may have other ranks: neither a step's pairs nor
    `fingerprint`, a hash of all that decides steps and rows, depends on their number."""
    assert min(token_budget, pairs_per_step, num_ranks) >= 1
    assert sizes.costs.shape == sizes.tokens.shape and np.all(sizes.tokens > 0) and np.all(sizes.costs > 0)
    plan = PackingPlan(
        order=np.ascontiguousarray(order, dtype=np.int64),
        sizes=sizes,
        token_budget=token_budget,
        pairs_per_step=pairs_per_step,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
        fingerprint="",
    )
    packer = "padded" if sizes.pads else "best_fit_decreasing"
    settings = f"{PLAN_VERSION} {token_budget} {pairs_per_step} {packer} {len(order)}"
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    shared = () if sizes.beginnings is None else sizes.beginnings[:2]
    for array in (plan.order, plan.step_begins, sizes.tokens, *shared):
        digest.update(array.astype("<i8").data)
    return replace(plan, fingerprint=digest.hexdigest())


# ---- The order of an epoch


def epoch_order(
    source_indices: AnyIntArray, source_weights: FloatArray, *, shuffle: bool, seed: int, epoch: int
) -> IntArray:
    """Returns the pairs of one epoch in the order in which they are trained, [E]. Every pair occurs
    floor(weight) times, by the weight of its source. Of a source with n pairs, n x (weight - floor(weight))
    pairs, rounded, occur once more, drawn anew each epoch. source_indices: [P] the source of each pair.
    source_weights: [sources], not negative."""
    # Different for the same seed and epoch. PCG64's raw output is the same in all versions of numpy.
    shuffle_stream, mixture_stream = (
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, epoch))) for stream in (0, 1)
    )
    order = np.arange(len(source_indices), dtype=np.int64)
    if np.any(source_weights != 1):
        keys = mixture_stream.random_raw(len(order))
        order = np.repeat(order, _copies(keys, source_indices, source_weights))
    if shuffle:
        order = order[np.argsort(shuffle_stream.random_raw(len(order)), kind="stable")]
    return order


def _copies(keys: AnyIntArray, sources: AnyIntArray, weights: FloatArray) -> IntArray:
    """Returns how often each pair occurs, [P]: of a source once more if its key is one of the smallest."""
    assert np.all(np.asarray(weights) >= 0), weights
    copies = np.floor(weights).astype(np.int64)[sources]
    for source, weight in enumerate(weights):
        pairs = np.flatnonzero(sources == source)
        num_drawn = int(np.floor(len(pairs) * (weight - np.floor(weight)) + 0.5))
        if num_drawn:
            copies[pairs[np.argsort(keys[pairs], kind="stable")[:num_drawn]]] += 1
    return copies
