"""Assigns items to rows (bin packers), and items or rows to ranks. A row is one forward pass.

An item is a pair, or one sequence of it. A bin packer is a function (tokens of each item [n], token budget)
-> rows, arrays of positions in [n], each position in exactly one row. An item above the budget is alone in
its row; no other row exceeds it. Legend: n items, R ranks.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from itertools import chain, pairwise

import numpy as np

from dpo_pack.packing.lengths import Bools, FloatArray, IntArray, PairSizes

# A row costs the time of its tokens plus that of so many more, because each row launches all layers again.
# Few against a row of thousands, but enough that `padded_rows` puts nearly equal lengths into one row.
ROW_OVERHEAD_TOKENS = 256
# A split is good enough when its slowest rank costs at most this many times the mean.
BALANCE_TOLERANCE = 1.01
# No swap is searched among more candidates, to save memory. Ranks of so many items are even without a swap.
MAX_SWAPS = 10_000_000
# The tokens of a row's pairs, each alone: attention's copies of keys, and what 32-bit kernels count
# (reference/compute.py), grow with them, however many tokens pairs share.
MOST_TOKENS_ALONE = 2**17


def best_fit_decreasing(row_tokens: IntArray, token_budget: int) -> list[IntArray]:
    """Puts each item, longest first, into the fullest row that has room for the item; O(n log n). At most
    11/9 x the fewest possible rows, plus 4 (Johnson et al. 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms"). Of equal items or rows the earlier one is taken."""
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
        insort(open_rows, (free - tokens, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def next_fit(sizes: PairSizes, order: IntArray, token_budget: int) -> list[IntArray]:
    """Fills rows with pairs in the given order; the first one that does not fit begins the next row; O(rows
    log n). Returns positions in `order`. Attention reads what pairs share once for each of them, so a row's
    pairs, each alone, have at most MOST_TOKENS_ALONE tokens, or the budget if it is larger."""
    row_tokens = added = sizes.tokens[order]
    if sizes.beginnings is not None:
        keys, common, _ = (values[order] for values in sizes.beginnings)
        added = row_tokens - common * (np.diff(keys, prepend=0) == 0)  # 0 without a beginning
    limits = ((added, token_budget), (row_tokens, max(token_budget, MOST_TOKENS_ALONE)))
    sums = [(np.cumsum(counts, dtype=np.int64), limit) for counts, limit in limits]
    rows: list[IntArray] = []
    begin = 0
    while begin < len(order):
        fits = [
            np.searchsorted(ends, ends[begin] - row_tokens[begin] + limit, side="right")
            for ends, limit in sums
        ]
        end = max(begin + 1, int(min(fits)))
        rows.append(np.arange(begin, end, dtype=np.int64))
        begin = end
    return rows


def padded_rows(padded_tokens: IntArray, token_budget: int) -> list[IntArray]:
    """Cuts pairs into right-padded batches that together compute the fewest tokens; O(n x pairs in a row).

    padded_tokens: [n], from `PairLengths.row_tokens(pads=True)`. A row of k pairs costs k x the largest of
    their values, plus ROW_OVERHEAD_TOKENS. Some best solution cuts the list of pairs, sorted by length, into
    pieces."""
    order = np.argsort(-padded_tokens, kind="stable")
    tokens = padded_tokens[order]
    num_pairs = len(order)
    least = np.zeros(num_pairs + 1, dtype=np.int64)  # least[i]: the least cost of the i longest pairs
    begins = np.zeros(num_pairs + 1, dtype=np.int64)  # where the last row of that best solution begins
    first = 0  # the earliest begin of a row that fits; it only moves forward
    for end in range(1, num_pairs + 1):
        while first < end - 1 and (end - first) * tokens[first] > token_budget:
            first += 1
        costs = least[first:end] + np.arange(end - first, 0, -1) * tokens[first:end]
        best = int(np.argmin(costs))
        least[end] = costs[best] + ROW_OVERHEAD_TOKENS
        begins[end] = first + best
    rows: list[IntArray] = []
    end = num_pairs
    while end > 0:
        begin = int(begins[end])
        rows.append(order[begin:end])
        end = begin
    return rows[::-1]


def pack_sequences_longest_first(sizes: PairSizes, token_budget: int) -> list[IntArray]:
    """Packs n pairs by next fit over decreasing lengths, for a pass without gradients; pairs with a common
    beginning come first, and stand together. The row with the most tokens comes first, so that a pass for
    which memory is too small fails at once."""
    order = np.argsort(-sizes.tokens, kind="stable")
    if sizes.beginnings is not None:
        keys = sizes.beginnings.keys[order]
        order = order[np.lexsort((keys, keys == 0))]
    rows = [order[positions] for positions in next_fit(sizes, order, token_budget)]
    tokens = np.array([sizes.of_row(row).tokens for row in rows], dtype=np.int64)
    return [rows[i] for i in np.argsort(-tokens, kind="stable")]


# ---- Ranks


def split_over_ranks(costs: FloatArray, num_ranks: int, *, equal_counts: bool = False) -> list[IntArray]:
    """Assigns n items or rows of `costs` [n] to ranks; returns the positions in [n] of each rank's,
    ascending. Each item, costliest first, goes to the rank with the least cost so far (longest processing
    time, Graham 1969). Then items move or swap between the slowest rank and another, until the slowest costs
    at most BALANCE_TOLERANCE x the mean or nothing helps. If n >= R each has one; `equal_counts`: n / R items
    each, rounded up or down."""
    if num_ranks == 1:
        return [np.arange(len(costs))]
    rank_of = _costliest_first(costs, num_ranks, -(-len(costs) // num_ranks) if equal_counts else len(costs))
    while _improve(costs, rank_of, num_ranks, may_move=not equal_counts):
        pass
    return [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


def _costliest_first(
    costs: FloatArray, num_ranks: int, most: int, loads_before: Sequence[float] = ()
) -> IntArray:
    """Returns the rank of each item, [n]; no rank gets more than `most` items."""
    rank_of = np.zeros(len(costs), dtype=np.int64)
    counts = [0] * num_ranks
    loads = sorted((load, rank) for rank, load in enumerate(loads_before or [0.0] * num_ranks))  # a heap
    order = np.argsort(-costs, kind="stable")
    for position, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        while counts[loads[0][1]] >= most:
            heapreplace(loads, (float("inf"), loads[0][1]))
        load, rank = loads[0]
        rank_of[position] = rank
        counts[rank] += 1
        heapreplace(loads, (load + cost, rank))
    return rank_of


def _improve(
    costs: FloatArray, rank_of: IntArray, num_ranks: int, *, may_move: bool, may_go: Bools | None = None
) -> bool:
    """Makes the move or swap of items between the slowest rank and another rank after which the slower of
    the two is fastest. may_go: [n, R]. Changes `rank_of`, [n], in place; False if nothing helps."""
    loads = np.bincount(rank_of, weights=costs, minlength=num_ranks)
    slow = int(loads.argmax())
    if loads[slow] <= BALANCE_TOLERANCE * loads.mean():
        return False
    may_come = rank_of != slow if may_go is None else (rank_of != slow) & may_go[:, slow]
    given, taken = np.flatnonzero(rank_of == slow), np.flatnonzero(may_come)
    ranks, taken_costs = rank_of[taken], costs[taken]
    if may_move:  # a move to a rank is a swap for an item that costs nothing
        ranks = np.append(ranks, np.arange(num_ranks))
        taken_costs = np.append(taken_costs, np.zeros(num_ranks))
    if not 0 < len(given) * len(ranks) <= MAX_SWAPS:
        return False
    shifted = costs[given][:, None] - taken_costs  # the cost that a change takes off the slowest rank
    slower = np.maximum(loads[slow] - shifted, loads[ranks] + shifted)
    if may_go is not None:
        slower[~may_go[given][:, ranks]] = np.inf
    best = int(slower.argmin())
    if slower.flat[best] >= loads[slow] * (1 - 1e-9):  # a smaller gain could be rounding
        return False
    ours, theirs = divmod(best, len(ranks))
    rank_of[given[ours]] = ranks[theirs]
    if theirs < len(taken):
        rank_of[taken[theirs]] = slow
    return True


def pack_blocks(
    sizes: PairSizes, pairs: IntArray, num_ranks: int, token_budget: int
) -> list[list[list[int]]]:
    """Returns each rank's rows, positions in `pairs`, of which some have common beginnings. A rank's pairs of
    one beginning are packed as one item, or as a few that each fill a row."""
    assert sizes.beginnings is not None
    keys, common = (values[pairs] for values in sizes.beginnings[:2])
    rank_of, own = _deal_blocks(sizes, pairs, num_ranks, token_budget), sizes.tokens[pairs] - common
    order, alone = np.lexsort((keys, rank_of)), sizes.tokens[pairs].tolist()
    begins = np.flatnonzero(_differs(keys[order]) | _differs(rank_of[order]) | (keys[order] == 0))
    totals = (np.add.reduceat(own[order], begins) + common[order[begins]]).tolist()
    items: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_ranks)]  # tokens, positions
    bounds, ranks = pairwise([*begins.tolist(), len(order)]), rank_of[order[begins]].tolist()
    for (begin, end), total, rank in zip(bounds, totals, ranks, strict=True):
        block = order[begin:end]
        if total <= token_budget or end == begin + 1:
            items[rank].append((total, block.tolist()))
            continue
        shared = int(common[block[0]])
        for part in best_fit_decreasing(own[block], token_budget - shared):
            items[rank].append((int(own[block[part]].sum()) + shared, block[part].tolist()))
    packed: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for of_rank, rows in zip(items, packed, strict=True):
        tokens = [count for count, _ in of_rank]
        filled: Sequence[Sequence[int]] = [range(len(of_rank))][: len(of_rank)]
        if sum(tokens) > token_budget:
            filled = [row.tolist() for row in best_fit_decreasing(np.array(tokens), token_budget)]
        for row in ([position for item in row for position in of_rank[item][1]] for row in filled):
            cuts = [0, len(row)]
            if sum(alone[position] for position in row) > MOST_TOKENS_ALONE:
                cuts[1:] = [int(part[-1]) + 1 for part in next_fit(sizes, pairs[row], token_budget)]
            rows += [row[begin:end] for begin, end in pairwise(cuts)]
    return packed


def _differs(values: IntArray) -> Bools:
    """Returns whether each value differs from the one before, [n]; the first does."""
    return np.append(True, values[1:] != values[:-1])


def _deal_blocks(sizes: PairSizes, pairs: IntArray, num_ranks: int, token_budget: int) -> IntArray:
    """Returns the rank of each pair, [n]. Few ranks compute a beginning: its pairs stay together or, if the
    largest rank is smaller then, pairs in the order of their beginnings are cut into a part for each rank
    (McNaughton 1959). Pairs without one go to the ranks with the least cost; then pairs move or swap between
    ranks that compute their beginnings anyway."""
    assert sizes.beginnings is not None
    rank_of = np.zeros(len(pairs), dtype=np.int64)
    if num_ranks == 1:
        return rank_of
    keys, common, cheaper = (values[pairs] for values in sizes.beginnings)
    own, costs, alone = sizes.tokens[pairs] - common, sizes.costs[pairs] - cheaper, np.flatnonzero(keys == 0)
    order = np.argsort(keys, kind="stable")
    order = order[keys[order] != 0]
    is_new = _differs(keys[order])
    number, sorted_own, shared = is_new.cumsum() - 1, own[order], common[order]
    is_first = _begin_rows(is_new, sorted_own, token_budget - shared)
    blocks = np.add.reduceat(sorted_own + shared * is_first, np.flatnonzero(is_first))
    ranks_of = _costliest_first(blocks.astype(np.float64), num_ranks, len(blocks))
    ranks, largest = ranks_of[is_first.cumsum() - 1], int(np.bincount(ranks_of, weights=blocks).max())
    tokens = int(own.sum() + shared[is_first].sum())
    if (too_few := len(blocks) + len(alone) < num_ranks) or largest * num_ranks > tokens:
        cuts, most = _cut_for_ranks(sorted_own, shared, is_first, tokens, num_ranks)
        if len(cuts) + len(alone) < num_ranks:
            cuts = list(range(len(order)))
        if too_few or most < largest:
            ranks = (np.searchsorted(cuts, np.arange(len(order)), side="right") - 1) % num_ranks
            is_new[cuts] = True
            is_first = _begin_rows(is_new, sorted_own, token_budget - shared)
    firsts = order[is_first]  # they count the beginning of a row, and stay
    costs[firsts] += cheaper[firsts]
    rank_of[order] = ranks
    computes = np.zeros((number[-1] + 1, num_ranks), dtype=np.bool_)
    computes[number, ranks] = True
    may_go = np.ones((len(pairs), num_ranks), dtype=np.bool_)
    may_go[order] = computes[number]
    may_go[firsts] = False
    is_free = may_go.all(axis=1)
    loads = np.bincount(rank_of, weights=costs * ~is_free, minlength=num_ranks)
    rank_of[is_free] = _costliest_first(costs[is_free], num_ranks, len(pairs), loads.tolist())
    while _improve(costs, rank_of, num_ranks, may_move=True, may_go=may_go):
        pass
    return rank_of


def _begin_rows(is_new: Bools, own: IntArray, room: IntArray) -> Bools:
    """Returns which pairs begin a row, if pairs of a beginning fill `room` tokens of a row in this order."""
    ends, is_first = own.cumsum().tolist(), is_new.copy()
    for begin, end in pairwise([*np.flatnonzero(is_new).tolist(), len(ends)]):
        most, before = int(room[begin]), ends[begin] - int(own[begin])
        while ends[end - 1] > before + most and begin < end - 1:
            begin = max(begin + 1, bisect_right(ends, before + most, begin, end))
            is_first[begin], before = True, ends[begin - 1]
    return is_first


def _cut_for_ranks(
    own: IntArray, common: IntArray, is_new: Bools, all_tokens: int, num_ranks: int
) -> tuple[list[int], int]:
    """Cuts pairs that stand in the order of their beginnings into at most R parts; returns where they begin
    and their most tokens, about the fewest that are no less than the mean of ranks. all_tokens: of all pairs,
    if each beginning is computed once."""
    ends, again = (own + common * is_new).cumsum(), (common * ~is_new).tolist()
    before = (ends - own - common).tolist()  # a part that begins with this pair ends so many tokens later
    ends, least, most, found = ends.tolist(), all_tokens // num_ranks, 0, list[int]()
    while not found or most - least > 1 + least // 64:
        middle = (least + most) // 2 if found else 2 * max(least, most) + 1
        begins, begin = list[int](), 0
        while begin < len(ends) and len(begins) <= num_ranks:
            begins.append(begin)
            begin = max(begin + 1, bisect_right(ends, before[begin] + middle, begin))
        tokens = all_tokens + sum(again[begin] for begin in begins)
        if begin == len(ends) and len(begins) <= num_ranks and tokens <= num_ranks * middle:
            found, most = begins, middle
        else:
            least, most = middle, max(middle, most)
    return found, most


def equalize_rows(ranks: list[list[list[int]]], costs: Sequence[float]) -> None:
    """Gives every rank as many rows as the rank with the most rows; changes `ranks`, rows of positions in
    `costs`, in place. A rank splits its costliest row; if each row is a single item, it takes the cheapest
    item that the costliest rank can spare, if any."""

    def cost(positions: Iterable[int]) -> float:
        return sum(costs[position] for position in positions)

    num_rows = max(map(len, ranks))
    for rows in ranks:
        while len(rows) < num_rows:
            if splittable := [row for row in rows if len(row) > 1]:
                row = max(splittable, key=cost)
                rows.remove(row)
                halves = split_over_ranks(np.array([costs[position] for position in row]), 2)
                rows += [[row[i] for i in half.tolist()] for half in halves]
            elif donors := [other for other in ranks if sum(map(len, other)) > num_rows]:
                donor = max(donors, key=lambda other: cost(chain(*other)))
                sparable = [(position, row) for row in donor if len(row) > 1 for position in row]
                position, row = min(sparable, key=lambda spared: costs[spared[0]])
                row.remove(position)
                rows.append([position])
            else:
                break
