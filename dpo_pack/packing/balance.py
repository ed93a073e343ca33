"""Assigns the items of a step to ranks so that the slowest rank costs little more than the mean.

A row is the tokens of one forward pass. An item is a pair, a group of pairs merged by prompt, or a whole row.
A row costs the sum over its items, so the cost of a rank depends only on which items it has. Items are
therefore first assigned to ranks by cost. Then each rank packs its items into rows (plan.py).

Legend: n items, R ranks. A cost is in any unit.
"""

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from dpo_pack.packing.lengths import FloatArray, IntArray

# A split is good enough when its slowest rank costs at most this many times the mean.
BALANCE_TOLERANCE = 1.01
# No swap is searched among more candidates, to save memory. Ranks of so many items are even without a swap.
MAX_SWAPS = 10_000_000

RankRows = list[list[int]]  # the rows of one rank; a row is a list of positions in [n]


def split_over_ranks(costs: FloatArray, num_ranks: int, *, equal_counts: bool = False) -> list[IntArray]:
    """Assigns n items to ranks; returns the positions in [n] of each rank's items, ascending. costs: [n].

    First each item, costliest first, goes to the rank with the least cost so far (longest processing time,
    Graham 1969). Then items are moved or swapped between the slowest rank and another rank, until the slowest
    rank costs at most BALANCE_TOLERANCE times the mean or no single change helps. Every rank has an item if
    n >= R. With `equal_counts` each rank gets n / R items, rounded up or down, and items are only swapped.
    """
    if num_ranks == 1:
        return [np.arange(len(costs))]
    most = -(-len(costs) // num_ranks) if equal_counts else len(costs)
    rank_of = np.zeros(len(costs), dtype=np.int64)
    counts = [0] * num_ranks
    loads = [(0.0, rank) for rank in range(num_ranks)]  # ascending, so already a heap
    order = np.argsort(-costs, kind="stable")
    for position, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        while counts[loads[0][1]] >= most:
            heapreplace(loads, (float("inf"), loads[0][1]))
        load, rank = loads[0]
        rank_of[position] = rank
        counts[rank] += 1
        heapreplace(loads, (load + cost, rank))
    while _improve(costs, rank_of, num_ranks, may_move=not equal_counts):
        pass
    return [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


def _improve(costs: FloatArray, rank_of: IntArray, num_ranks: int, *, may_move: bool) -> bool:
    """Makes the best move or swap of items between the slowest rank and another rank; False if none is made.

    Changes `rank_of`, [n], in place. The best change makes the slower of its two ranks as fast as possible.
    """
    loads = np.bincount(rank_of, weights=costs, minlength=num_ranks)
    slow = int(loads.argmax())
    given, taken = np.flatnonzero(rank_of == slow), np.flatnonzero(rank_of != slow)
    is_even = loads[slow] <= BALANCE_TOLERANCE * loads.mean()
    if is_even or not 0 < len(given) * len(taken) <= MAX_SWAPS:
        return False
    ranks, taken_costs = rank_of[taken], costs[taken]
    if may_move:  # a move to a rank is a swap for an item that costs nothing
        ranks = np.append(ranks, np.arange(num_ranks))
        taken_costs = np.append(taken_costs, np.zeros(num_ranks))
    shifted = costs[given][:, None] - taken_costs  # the cost that a change takes off the slowest rank
    slower = np.maximum(loads[slow] - shifted, loads[ranks] + shifted)
    best = int(slower.argmin())
    if slower.flat[best] >= loads[slow] * (1 - 1e-9):  # a smaller gain could be rounding
        return False
    ours, theirs = divmod(best, len(ranks))
    rank_of[given[ours]] = ranks[theirs]
    if theirs < len(taken):
        rank_of[taken[theirs]] = slow
    return True


def equalize_rows(ranks: list[RankRows], costs: Sequence[float]) -> None:
    """Gives every rank as many rows as the rank with the most rows; changes `ranks` in place.

    An item is what no row may split: a pair, or several pairs whose common prompt is computed once. A rank
    with too few rows splits its costliest row, which adds no FLOPs. If each row of the rank is a single
    item, the rank takes the cheapest item of the costliest rank that can spare an item. If the step has too
    few items for that, the numbers of rows stay unequal.
    """
    num_rows = max(map(len, ranks))
    for rows in ranks:
        while len(rows) < num_rows:
            splittable = [row for row in rows if len(row) > 1]
            if splittable:
                row = max(splittable, key=lambda row: sum(costs[position] for position in row))
                rows.remove(row)
                rows += _halves(row, costs)
            elif not _take_an_item(rows, ranks, num_rows, costs):
                break


def _halves(row: list[int], costs: Sequence[float]) -> list[list[int]]:
    parts = split_over_ranks(np.array([costs[position] for position in row], dtype=np.float64), 2)
    return [[row[i] for i in part.tolist()] for part in parts]


def _take_an_item(rows: RankRows, ranks: list[RankRows], num_rows: int, costs: Sequence[float]) -> bool:
    donors = [other for other in ranks if sum(map(len, other)) > num_rows]
    if not donors:
        return False
    donor = max(donors, key=lambda other: sum(costs[position] for row in other for position in row))
    sparable = [(position, row) for row in donor if len(row) > 1 for position in row]
    position, row = min(sparable, key=lambda spared: costs[spared[0]])
    row.remove(position)
    rows.append([position])
    return True
