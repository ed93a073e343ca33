"""Plans an epoch from the lengths of pairs: each step's pairs, their rows (forward passes), and their ranks.

Legend: P pairs of the data set, E pairs of an epoch (copies included), R ranks. Lengths are in tokens; the
number of a pair is its position in the [P] arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpo_pack.packing.bin_packing import (
    BALANCE_TOLERANCE,
    BIN_PACKERS,
    PADDED,
    ROW_OVERHEAD_TOKENS,
    equalize_rows,
    pack_window,
    padded_rows,
    split_over_ranks,
)
from dpo_pack.packing.lengths import AnyIntArray, FloatArray, IntArray, PairSizes, PromptMerging

# A part of every plan's fingerprint. Raise it if a change of code gives other steps or rows.
PLAN_VERSION = 4

StepRows = tuple[tuple[IntArray, ...], ...]  # the rows of each rank; a row is an array of pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan:
    """The plan of one epoch. In scope step `pack_step` packs the rows of its step, so a plan is made in
    almost no time; in scope epoch the plan has all rows."""

    order: IntArray  # [E] pairs in the order they are trained on
    step_begins: IntArray  # [steps + 1] into `order`
    row_begins: IntArray | None  # scope epoch: [rows + 1] into `order`; scope step: None
    sizes: PairSizes  # tokens and cost of every pair
    settings: PlanSettings
    num_ranks: int
    equal_rows: bool  # for sharded models: all ranks get equally many rows
    fingerprint: str  # hexadecimal; see `PlanSettings.plan`

    def __len__(self) -> int:
        return len(self.step_begins) - 1

    def pairs(self, step: int) -> IntArray:
        """Returns the pairs of a step on all ranks together. The last step can have fewer pairs."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a plan of {len(self)} steps")
        return self.order[self.step_begins[step] : self.step_begins[step + 1]]

    def pack_step(self, step: int) -> StepRows:
        """Returns the rows of each rank in a step, arrays of pairs. Every rank has a row if there are enough
        items.

        In scope epoch each finished row goes to one rank. But if the ranks are uneven and packing the step's
        pairs again makes the slowest rank faster, they are packed again. This can only cost more rows."""
        pairs = self.pairs(step)
        return self._pack(pairs) if self.row_begins is None else self._deal(pairs, self._finished_rows(step))

    def _deal(self, pairs: IntArray, rows: list[IntArray]) -> StepRows:
        if len(rows) < self.num_ranks or (self.equal_rows and len(rows) % self.num_ranks > 0):
            return self._pack(pairs)
        costs = np.array([self.sizes.of_row(row).cost for row in rows])
        parts = split_over_ranks(costs, self.num_ranks, equal_counts=self.equal_rows)
        dealt = tuple(tuple(rows[i] for i in part.tolist()) for part in parts)
        times = self._rank_times(dealt)
        if max(times) <= BALANCE_TOLERANCE * sum(times) / len(times):
            return dealt
        packed = self._pack(pairs)
        return packed if max(self._rank_times(packed)) < max(times) else dealt

    def __iter__(self) -> Iterator[StepRows]:
        """Yields `pack_step` of every step."""
        return (self.pack_step(step) for step in range(len(self)))

    @property
    def oversize_pairs(self) -> IntArray:
        """The pairs of the epoch that exceed the token budget, ascending. Each is alone in its row."""
        return np.unique(self.order[self.sizes.tokens[self.order] > self.settings.token_budget])

    def _rank_times(self, ranks: StepRows) -> list[float]:
        """Returns each rank's costs and those of ROW_OVERHEAD_TOKENS tokens for each of its rows, [R]."""
        sizes = [[self.sizes.of_row(row) for row in rows] for rows in ranks]
        costs = [sum(size.cost for size in of_rank) for of_rank in sizes]
        tokens = sum(size.tokens for of_rank in sizes for size in of_rank)
        overhead = ROW_OVERHEAD_TOKENS * sum(costs) / tokens
        return [cost + overhead * len(rows) for cost, rows in zip(costs, ranks, strict=True)]

    def _finished_rows(self, step: int) -> list[IntArray]:
        assert self.row_begins is not None
        first, end = np.searchsorted(self.row_begins, self.step_begins[step : step + 2]).tolist()
        begins = self.row_begins[first : end + 1].tolist()
        return [self.order[begin:end] for begin, end in zip(begins, begins[1:], strict=False)]

    def _pack(self, pairs: IntArray) -> StepRows:
        token_budget, algorithm = self.settings.token_budget, self.settings.algorithm
        items = self.sizes.items_of(pairs, token_budget)
        build_rows = padded_rows if algorithm == PADDED else BIN_PACKERS[algorithm]
        ranks = []
        for positions in split_over_ranks(items.costs, self.num_ranks):
            rows = build_rows(items.tokens[positions], token_budget)
            ranks.append([positions[row].tolist() for row in rows])
        if self.equal_rows:
            equalize_rows(ranks, items.costs.tolist())
        return tuple(tuple(items.row(row) for row in rows) for rows in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How an epoch is cut: in scope step, `pairs_per_step` pairs of the order, packed inside the step; in
    scope epoch `rows_per_step` rows, of windows of `window_pairs` pairs."""

    token_budget: int
    pairs_per_step: int
    rows_per_step: int | None = None  # None: scope step
    window_pairs: int = 16384  # scope epoch
    algorithm: str  # a name in BIN_PACKERS, or PADDED in scope step

    def plan(
        self,
        row_tokens: AnyIntArray,
        *,
        order: AnyIntArray,
        num_ranks: int = 1,
        row_costs: FloatArray | None = None,
        equal_rows: bool = False,
        merging: PromptMerging | None = None,
    ) -> PackingPlan:
        """Makes the plan of an epoch: every entry of `order`, [E] from `epoch_order`, is in one step and in
        one row.

        row_tokens: [P] from `PairLengths.row_tokens`, or `padded_tokens` if `algorithm` is PADDED. row_costs:
        [P] positive, from `pair_flops`; default: `row_tokens`. equal_rows: all ranks have equally many rows.
        merging: pairs of one prompt in a row become one group. A resumed run may have another number of
        ranks: neither the pairs of a step nor `fingerprint`, a hash of all that decides steps and rows,
        depends on it."""
        assert self.algorithm in (*BIN_PACKERS, PADDED), f"unknown packing algorithm {self.algorithm}"
        assert min(self.token_budget, self.pairs_per_step, self.window_pairs, num_ranks) >= 1
        tokens = np.ascontiguousarray(row_tokens, dtype=np.int64)
        costs = np.ascontiguousarray(tokens if row_costs is None else row_costs, dtype=np.float64)
        assert costs.shape == tokens.shape and np.all(tokens > 0) and np.all(costs > 0)
        sizes = PairSizes(tokens=tokens, costs=costs, merging=merging, pads=self.algorithm == PADDED)
        epoch_pairs = np.ascontiguousarray(order, dtype=np.int64)
        row_begins = None
        if self.rows_per_step is None:
            step_begins = np.append(np.arange(0, len(order), self.pairs_per_step), len(order))
        else:
            epoch_pairs, row_begins = self._rows_of_epoch(sizes, epoch_pairs)
            step_begins = np.append(row_begins[: -1 : self.rows_per_step], row_begins[-1])
        full_step = self.pairs_per_step if self.rows_per_step is None else self.rows_per_step
        settings = f"{PLAN_VERSION} {self.token_budget} {full_step} {self.algorithm} {len(epoch_pairs)}"
        digest = hashlib.blake2b(settings.encode(), digest_size=16)
        prompts = None if merging is None else merging.prompts
        for array in (epoch_pairs, step_begins, tokens, row_begins, prompts):
            digest.update(b"" if array is None else np.ascontiguousarray(array, dtype="<i8").data)
        return PackingPlan(
            order=epoch_pairs,
            step_begins=step_begins,
            row_begins=row_begins,
            sizes=sizes,
            settings=self,
            num_ranks=num_ranks,
            equal_rows=equal_rows,
            fingerprint=digest.hexdigest(),
        )

    def _rows_of_epoch(self, sizes: PairSizes, order: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the pairs in the order of their rows, [E], and the row begins, [rows + 1]."""
        assert self.rows_per_step is not None and self.rows_per_step >= 1 and self.algorithm != PADDED
        rows: list[IntArray] = []
        for begin in range(0, len(order), self.window_pairs):
            window = order[begin : begin + self.window_pairs]
            items = sizes.items_of(window, self.token_budget)
            packed = pack_window(items.tokens, window, self.token_budget, self.algorithm)
            rows += [items.row(row) for row in packed]
        row_begins = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        return np.concatenate(rows) if rows else order, row_begins


# ---- The order of an epoch


def epoch_order(
    num_pairs: int,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    source_indices: AnyIntArray | None = None,
    source_weights: FloatArray | None = None,
) -> IntArray:
    """Returns the pairs of one epoch in the order in which they are trained, [E].

    source_indices: [P] the source of each pair; source_weights: one number per source, not negative. Every
    pair occurs floor(weight) times. Of a source with n pairs, n x (weight - floor(weight)) pairs, rounded,
    occur once more, drawn anew each epoch. The raw output of PCG64 is the same in all versions of numpy."""
    shuffle_stream, mixture_stream = (  # different for the same seed and epoch
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, epoch))) for stream in (0, 1)
    )
    order = np.arange(num_pairs, dtype=np.int64)
    if source_indices is not None and source_weights is not None and np.any(np.asarray(source_weights) != 1):
        keys = mixture_stream.random_raw(num_pairs)
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
