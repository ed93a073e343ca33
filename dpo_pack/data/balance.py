"""Items -> ranks, so that the slowest rank is as near the mean as possible.

Legend: n items (pairs, groups of pairs, or whole rows), R ranks. A cost is in any unit.
"""

from bisect import bisect_left, insort
from heapq import heapreplace

import numpy as np

from dpo_pack.data.lengths import FloatArray, IntArray

# The slowest rank may be so much above the mean: less is not worth looking for.
BALANCE_TOLERANCE = 1.01


def split_over_ranks(costs: FloatArray, num_ranks: int, *, equal_counts: bool = False) -> list[IntArray]:
    """Positions of [n] for each rank, ascending.

    Costliest first, each to the rank with the least so far (longest processing time, Graham 1969). Then
    single moves and swaps between the slowest rank and another, until it is within BALANCE_TOLERANCE of the
    mean or none of them helps. Every rank has an item where there are enough. With `equal_counts` ranks get
    n / R items each, rounded up or down, and items are only swapped.
    """
    if num_ranks == 1:
        return [np.arange(len(costs))]
    values = costs.tolist()
    order = np.argsort(-costs, kind="stable").tolist()
    most = -(-len(values) // num_ranks) if equal_counts else len(values)
    members: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]  # (cost, position), ascending
    loads = [(0.0, rank) for rank in range(num_ranks)]  # equal keys in rank order: already a heap
    for position in order:
        while len(members[loads[0][1]]) >= most:
            heapreplace(loads, (float("inf"), loads[0][1]))
        load, rank = loads[0]
        members[rank].append((values[position], position))
        heapreplace(loads, (load + values[position], rank))
    for of_rank in members:
        of_rank.sort()
    _even_out(members, may_move=not equal_counts)
    return [np.array(sorted(position for _, position in of_rank), dtype=np.int64) for of_rank in members]


def _even_out(members: list[list[tuple[float, int]]], *, may_move: bool) -> None:
    """Repair in place. Each change lowers the slowest rank and lifts another to less than it was: it ends."""
    loads = [sum(cost for cost, _ in of_rank) for of_rank in members]
    target = BALANCE_TOLERANCE * sum(loads) / len(loads)
    while True:
        slow = max(range(len(loads)), key=loads.__getitem__)
        if loads[slow] <= target:
            return
        change = _best_change(members, loads, slow, target, may_move=may_move)
        if change is None:
            return
        fast, given, taken = change
        members[slow].remove(given)
        insort(members[fast], given)
        if taken is not None:
            members[fast].remove(taken)
            insort(members[slow], taken)
        for rank in (slow, fast):
            loads[rank] = sum(cost for cost, _ in members[rank])


_Change = tuple[int, tuple[float, int], tuple[float, int] | None]  # other rank, item given, item taken


def _best_change(
    members: list[list[tuple[float, int]]], loads: list[float], slow: int, target: float, *, may_move: bool
) -> _Change | None:
    """The move or swap after which the slower of the two ranks is fastest; None where none helps.

    To even out a gap, half of it has to go over. Ranks are tried from the fastest on, and the first change
    that brings both below `target` is taken.
    """
    best: _Change | None = None
    least = loads[slow] * (1 - 1e-9)  # what rounding alone could gain is none
    for fast in sorted(range(len(loads)), key=loads.__getitem__):
        gap = loads[slow] - loads[fast]
        if loads[slow] - gap / 2 >= least:  # the best imaginable change with this rank or a slower one
            break
        theirs = members[fast]
        for given in reversed(members[slow]):
            cost = given[0]
            if may_move and max(loads[slow] - cost, loads[fast] + cost) < least:
                least, best = max(loads[slow] - cost, loads[fast] + cost), (fast, given, None)
            place = bisect_left(theirs, (cost - gap / 2, -1))
            for taken in theirs[max(place - 1, 0) : place + 1]:
                over = cost - taken[0]
                if max(loads[slow] - over, loads[fast] + over) < least:
                    least, best = max(loads[slow] - over, loads[fast] + over), (fast, given, taken)
        if best is not None and least <= target:
            break
    return best
