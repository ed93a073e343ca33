"""Bin packers: (tokens of each item [n], token budget) -> rows of positions in [n].

An item is a pair, or pairs of one prompt merged into a group. Each position is in exactly one row, and no
row exceeds the budget but an item that alone does, which rides alone.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from dpo_pack.data.lengths import IntArray

Row = IntArray
BinPacker = Callable[[IntArray, int], list[Row]]

# What one more padded row costs beside its tokens, for `padded_rows`: launching the layers again and
# matrix products too short to be efficient. Small against a row of thousands of tokens, large enough
# that sequences of nearly equal length stay together.
ROW_OVERHEAD_TOKENS = 256


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


def fewest_rows(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Best fit decreasing, and where that misses the volume bound, filling row by row; the fewer rows."""
    rows = best_fit_decreasing(row_tokens, token_budget)
    if len(rows) > fewest_rows_possible(row_tokens, token_budget):
        fuller = _fullest_first(row_tokens, token_budget)
        rows = fuller if len(fuller) < len(rows) else rows
    return rows


def fewest_rows_possible(row_tokens: IntArray, token_budget: int) -> int:
    """The volume bound: no packing has fewer rows. Items above the budget have one each."""
    is_oversize = row_tokens > token_budget
    return int(is_oversize.sum()) - int(-row_tokens[~is_oversize].sum() // token_budget)


def _fullest_first(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Each row: the longest item left and those that fill the rest best, a subset-sum problem.

    Minimum bin slack with a fixed item (Fleszar & Hindi 2002, "New heuristics for one-dimensional
    bin-packing"), the best subset by dynamic programming over a bit a token.
    """
    left = np.argsort(-row_tokens, kind="stable").tolist()
    tokens = row_tokens.tolist()
    rows: list[Row] = []
    while left:
        row = [left[0]]
        row += _best_subset(left[1:], tokens, token_budget - tokens[left[0]])
        rows.append(np.array(row, dtype=np.int64))
        taken = set(row)
        left = [position for position in left if position not in taken]
    return rows


def _best_subset(positions: Sequence[int], tokens: Sequence[int], room: int) -> list[int]:
    """Some of `positions` whose tokens add up to as much as `room` holds."""
    if room <= 0:
        return []
    if sum(tokens[position] for position in positions) <= room:
        return list(positions)
    within = (1 << (room + 1)) - 1
    sums = [1]  # bit s of sums[i]: s tokens can be had from the first i positions
    for position in positions:
        sums.append((sums[-1] | sums[-1] << tokens[position]) & within)
        if sums[-1] >> room:  # filled to the last token
            break
    total = sums[-1].bit_length() - 1
    subset = []
    for number in range(len(sums) - 1, 0, -1):
        if not sums[number - 1] >> total & 1:
            subset.append(positions[number - 1])
            total -= tokens[positions[number - 1]]
    return subset


BIN_PACKERS: dict[str, BinPacker] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "next_fit": next_fit,
}
