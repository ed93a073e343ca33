"""Pair lengths -> the pairs of each step, the rows they share, and the rank of each row.

Legend: P pairs of the data set, E pairs of an epoch (copies included), n pairs of one call, R ranks.
Lengths are in tokens; a pair is named by its position in the [P] arrays.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AnyIntArray = npt.NDArray[np.integer[Any]]
Row = IntArray
BinPacker = Callable[[IntArray, int], list[Row]]

# Part of every plan's fingerprint: raise it whenever the same arguments give other steps or rows.
PLAN_VERSION = 1

# What one more padded row costs beside its tokens, for `padded_rows`: launching the layers again and
# matrix products too short to be efficient. Small against a row of thousands of tokens, large enough
# that sequences of nearly equal length stay together.
ROW_OVERHEAD_TOKENS = 256

# Streams of the epoch's random numbers: one never repeats another, whatever seed and epoch.
_SHUFFLE_STREAM = 0
_MIXTURE_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLengths:
    """Token counts of every pair: four [P] integer arrays.

    `shared` is the longest common prefix of prompt + chosen and prompt + rejected: at least `prompt`.
    """

    prompt: AnyIntArray
    chosen: AnyIntArray
    rejected: AnyIntArray
    shared: AnyIntArray

    def __post_init__(self) -> None:
        shapes = {a.shape for a in (self.prompt, self.chosen, self.rejected, self.shared)}
        assert len(shapes) == 1, f"lengths of different numbers of pairs: {shapes}"

    def row_tokens(self, *, share_prompt: bool) -> IntArray:
        """Tokens each pair takes in a packed row, [P]: both sequences, their common prefix once if shared."""
        both = 2 * self.prompt.astype(np.int64) + self.chosen + self.rejected
        return both - self.shared if share_prompt else both

    def padded_tokens(self) -> IntArray:
        """Tokens each pair takes in a padded row of its own, [P]: twice its longer sequence."""
        return 2 * (self.prompt.astype(np.int64) + np.maximum(self.chosen, self.rejected))


# ---- Bin packers: (tokens of each pair [n], token budget) -> rows of positions in [n]. Each position
# is in exactly one row, and no row exceeds the budget but a pair that alone does, which rides alone.


def best_fit_decreasing(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Put each pair, longest first, into the fullest row that still holds it; O(n log n).

    At most 11/9 of the fewest rows possible plus 4 (Johnson et al. 1974, "Worst-case performance bounds
    for simple one-dimensional packing algorithms"). Ties: earlier pair, earlier row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), ascending: the fullest row first
    order = np.argsort(-row_tokens, kind="stable")
    for position, tokens in zip(order.tolist(), row_tokens[order].tolist(), strict=True):
        slot = bisect_left(open_rows, (tokens, 0))
        if slot < len(open_rows):
            free, row = open_rows.pop(slot)
            rows[row].append(position)
        else:
            free, row = token_budget, len(rows)
            rows.append([position])
        if free > tokens:
            insort(open_rows, (free - tokens, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def first_fit_decreasing(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Put each pair, longest first, into the earliest row that still holds it; O(n x rows), vectorised."""
    order = np.argsort(-row_tokens, kind="stable")
    num_oversize = int(np.count_nonzero(row_tokens > token_budget))
    rows = [[position] for position in order[:num_oversize].tolist()]
    fitting = order[num_oversize:]
    free = np.full(len(fitting), token_budget, dtype=np.int64)  # a row not opened yet is a free one
    packed: list[list[int]] = [[] for _ in range(len(fitting))]
    for position, tokens in zip(fitting.tolist(), row_tokens[fitting].tolist(), strict=True):
        row = int(np.argmax(free >= tokens))
        free[row] -= tokens
        packed[row].append(position)
    rows += [row for row in packed if row]
    return [np.array(row, dtype=np.int64) for row in rows]


def next_fit(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Fill rows in the order given; the first pair that does not fit begins the next row; O(rows log n)."""
    ends = np.cumsum(row_tokens, dtype=np.int64)
    rows: list[Row] = []
    begin = 0
    while begin < len(ends):
        tokens_before = ends[begin] - row_tokens[begin]
        end = max(begin + 1, int(np.searchsorted(ends, tokens_before + token_budget, side="right")))
        rows.append(np.arange(begin, end, dtype=np.int64))
        begin = end
    return rows


def padded_rows(padded_tokens: IntArray, token_budget: int) -> list[Row]:
    """Cut pairs into right-padded batches that together compute the fewest tokens; O(n x pairs in a row).

    padded_tokens: [n], from `PairLengths.padded_tokens`. A row of k pairs computes k x its largest value,
    at most `token_budget`, a pair alone excepted. Each row is charged ROW_OVERHEAD_TOKENS as well.

    Exact: swapping pairs between two rows so that one takes the longer ones never adds padding, so some
    best solution cuts the length order into runs, and dynamic programming tries every such cut.
    """
    order = np.argsort(-padded_tokens, kind="stable")
    tokens = padded_tokens[order]
    num_pairs = len(order)
    least = np.zeros(num_pairs + 1, dtype=np.int64)  # least[i]: best cost of the i longest pairs
    begins = np.zeros(num_pairs + 1, dtype=np.int64)  # where the last row of that best solution begins
    first = 0  # the earliest begin whose row still fits; it only moves on
    for end in range(1, num_pairs + 1):
        while first < end - 1 and (end - first) * tokens[first] > token_budget:
            first += 1
        costs = least[first:end] + np.arange(end - first, 0, -1) * tokens[first:end]
        best = int(np.argmin(costs))
        least[end] = costs[best] + ROW_OVERHEAD_TOKENS
        begins[end] = first + best
    rows: list[Row] = []
    end = num_pairs
    while end > 0:
        begin = int(begins[end])
        rows.append(order[begin:end])
        end = begin
    return rows[::-1]


def pack_sequences_longest_first(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Rows over the whole set for a pass without gradients: similar lengths together, largest row first.

    row_tokens: [n]. Next-fit over decreasing lengths: a row leaves free less than its longest pair takes,
    so it is nearly full where pairs are small against the budget. The row with the most tokens comes
    first, so that running out of memory shows at once.
    """
    order = np.argsort(-row_tokens, kind="stable")
    rows = [order[positions] for positions in next_fit(row_tokens[order], token_budget)]
    tokens = np.array([row_tokens[row].sum() for row in rows], dtype=np.int64)
    return [rows[i] for i in np.argsort(-tokens, kind="stable")]


# ---- Epochs and plans


def epoch_order(
    num_pairs: int,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    source_indices: AnyIntArray | None = None,
    source_weights: FloatArray | None = None,
) -> IntArray:
    """The pairs of one epoch in the order they are trained on, [E].

    source_indices: [P] which source a pair comes from; source_weights: one a source, not negative. Every
    pair comes floor(weight) times; of a source with n pairs, the nearest whole number to
    n x (weight - floor(weight)) come once more, drawn anew each epoch, so every epoch is equally long.
    Without weights every pair comes once. Without `shuffle` the order of the files is kept.

    Drawn from PCG64's raw output, which numpy keeps the same in all versions: a resumed run continues the
    same order. A pure function of its arguments.
    """
    order = np.arange(num_pairs, dtype=np.int64)
    if source_indices is not None and source_weights is not None:
        order = np.repeat(order, _copies(source_indices, source_weights, seed=seed, epoch=epoch))
    if shuffle:
        keys = _random_stream(seed, epoch, _SHUFFLE_STREAM).random_raw(len(order))
        order = order[np.argsort(keys, kind="stable")]
    return order


def _copies(source_indices: AnyIntArray, source_weights: FloatArray, *, seed: int, epoch: int) -> IntArray:
    """How often each pair comes in the epoch, [P]."""
    assert len(source_weights) and np.all(np.asarray(source_weights) >= 0), source_weights
    copies = np.floor(source_weights).astype(np.int64)[source_indices]
    keys = _random_stream(seed, epoch, _MIXTURE_STREAM).random_raw(len(source_indices))
    for source, weight in enumerate(source_weights):
        pairs = np.flatnonzero(source_indices == source)
        num_extra = int(np.floor(len(pairs) * (weight - np.floor(weight)) + 0.5))
        copies[pairs[np.argsort(keys[pairs], kind="stable")[:num_extra]]] += 1
    return copies


def _random_stream(seed: int, epoch: int, stream: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, epoch)))


BIN_PACKERS: dict[str, BinPacker] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "next_fit": next_fit,
}

# The algorithm of `packing.mode: padded`; it measures pairs by `PairLengths.padded_tokens`.
PADDED = "padded"
_ROW_BUILDERS: dict[str, BinPacker] = {**BIN_PACKERS, PADDED: padded_rows}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan:
    """One epoch: `len(plan)` steps, `plan.pairs(step)`, and `plan[step][rank][row]`, arrays of pairs.

    Steps are packed when asked for, so a plan costs nothing to make and little to recompute. Build it
    with `plan_epoch`.
    """

    order: IntArray  # [E] pairs in the order they are trained on
    row_tokens: IntArray  # [P] tokens a pair takes in a row
    row_costs: FloatArray  # [P] what a pair adds to the time of its row, in any unit
    token_budget: int
    pairs_per_step: int
    algorithm: str
    num_ranks: int
    fingerprint: str  # hex; see `plan_epoch`

    def __len__(self) -> int:
        return -(-len(self.order) // self.pairs_per_step)

    def pairs(self, step: int) -> IntArray:
        """The pairs of a step, whatever the number of ranks: [pairs_per_step], fewer in the last step."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a plan of {len(self)} steps")
        return self.order[step * self.pairs_per_step : (step + 1) * self.pairs_per_step]

    def __getitem__(self, step: int) -> tuple[tuple[Row, ...], ...]:
        """Rows of each rank: R tuples of arrays of pairs. Every rank has one where there are pairs enough."""
        pairs = self.pairs(step)
        build_rows = _ROW_BUILDERS[self.algorithm]
        ranks: list[tuple[Row, ...]] = []
        for positions in _split_over_ranks(self.row_costs[pairs], self.num_ranks):
            rank_pairs = pairs[positions]
            rows = build_rows(self.row_tokens[rank_pairs], self.token_budget)
            ranks.append(tuple(rank_pairs[row] for row in rows))
        return tuple(ranks)

    def __iter__(self) -> Iterator[tuple[tuple[Row, ...], ...]]:
        return (self[step] for step in range(len(self)))

    @property
    def oversize_pairs(self) -> IntArray:
        """Pairs of the epoch that exceed the token budget and so get a row of their own, ascending."""
        pairs = np.unique(self.order)
        return pairs[self.row_tokens[pairs] > self.token_budget]

    def tokens_in(self, row: Row) -> int:
        """Tokens a forward pass over the row computes, padding included where the plan pads."""
        tokens = self.row_tokens[row]
        return int(len(row) * tokens.max() if self.algorithm == PADDED else tokens.sum())

    def cost_of(self, row: Row) -> float:
        """Estimated cost of the row in the unit of `row_costs`."""
        costs = self.row_costs[row]
        return float(len(row) * costs.max() if self.algorithm == PADDED else costs.sum())


def plan_epoch(
    row_tokens: AnyIntArray,
    *,
    order: AnyIntArray,
    token_budget: int,
    pairs_per_step: int,
    algorithm: str,
    num_ranks: int = 1,
    row_costs: FloatArray | None = None,
) -> PackingPlan:
    """Plan an epoch: every entry of `order` in exactly one step and one row.

    row_tokens: [P] from `PairLengths.row_tokens`, or `padded_tokens` where `algorithm` is PADDED.
    order: [E] from `epoch_order`. row_costs: [P] positive, by default the tokens.

    A step's pairs first go to ranks by longest processing time on cost (Graham 1969), then each rank
    packs its own. That keeps ranks even where the step has few rows, or not a multiple of R.

    `fingerprint` names what is trained in which step and how it is packed: order, lengths, budget, pairs a
    step, algorithm. Ranks and costs are left out: a resumed run may have another number of processes.
    """
    assert algorithm in _ROW_BUILDERS, f"unknown packing algorithm {algorithm}"
    assert token_budget >= 1 and pairs_per_step >= 1 and num_ranks >= 1
    tokens = np.ascontiguousarray(row_tokens, dtype=np.int64)
    epoch_pairs = np.ascontiguousarray(order, dtype=np.int64)
    costs = np.ascontiguousarray(tokens if row_costs is None else row_costs, dtype=np.float64)
    assert costs.shape == tokens.shape and np.all(tokens > 0) and np.all(costs > 0)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{PLAN_VERSION} {token_budget} {pairs_per_step} {algorithm} {len(epoch_pairs)}".encode())
    digest.update(epoch_pairs.astype("<i8").tobytes())
    digest.update(tokens.astype("<i8").tobytes())
    return PackingPlan(
        order=epoch_pairs,
        row_tokens=tokens,
        row_costs=costs,
        token_budget=token_budget,
        pairs_per_step=pairs_per_step,
        algorithm=algorithm,
        num_ranks=num_ranks,
        fingerprint=digest.hexdigest(),
    )


def _split_over_ranks(costs: FloatArray, num_ranks: int) -> list[IntArray]:
    """Positions of [n] for each rank, ascending: costliest first, each to the rank with the least so far."""
    if num_ranks == 1:
        return [np.arange(len(costs))]
    positions: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # equal keys in rank order: already a heap
    order = np.argsort(-costs, kind="stable")
    for position, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = loads[0]
        positions[rank].append(position)
        heapreplace(loads, (load + cost, rank))
    return [np.array(sorted(of_rank), dtype=np.int64) for of_rank in positions]
