"""Bin packers: functions (tokens of each item [n], token budget) -> rows. A row is one forward pass.

A row is given as an array of positions in [n]. An item is a pair, or several pairs of one
prompt merged into a group. Each position is in exactly one row. An item that exceeds the budget alone is the
only item of its row; no other row exceeds the budget.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappush, heapreplace

import numpy as np

from dpo_pack.packing.lengths import IntArray

Row = IntArray
BinPacker = Callable[[IntArray, int], list[Row]]

# The algorithm of `packing.mode: padded`; the size of a pair is then `PairLengths.padded_tokens`.
PADDED = "padded"
# A row costs the time of its tokens plus the time of this many tokens, because each row launches all layers
# again and shorter matrix products are less efficient. The number is small against a row of thousands of
# tokens, but large enough that `padded_rows` puts sequences of nearly equal length into one row.
ROW_OVERHEAD_TOKENS = 256
# `packing.scope: epoch`: item lengths in one class, at most 6 % apart (a factor of 2^(1/12)), count as equal.
# The shuffled order then decides which of these items share a row, so each epoch makes different rows.
_CLASSES_PER_OCTAVE = 12
# `packing.scope: epoch`: `_evenly_filled` may use max(1, n // this) rows more than n, the fewest possible.
_FEW_ROWS = 200


def best_fit_decreasing(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Puts each item, longest first, into the fullest row that has room for the item; O(n log n).

    The number of rows is at most 11/9 x the fewest possible, plus 4 (Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms"). Of equally long items the earlier one
    comes first; of equally full rows the earlier one is taken.
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
        insort(open_rows, (free - tokens, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def first_fit_decreasing(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Puts each item, longest first, into the earliest row that has room for the item; O(n x rows)."""
    order = np.argsort(-row_tokens, kind="stable")
    rows: list[list[int]] = [[] for _ in order]  # enough for one item in each
    free = np.full(len(order), token_budget, dtype=np.int64)  # tokens of each row
    for position, tokens in zip(order.tolist(), row_tokens[order].tolist(), strict=True):
        row = int(np.argmax(free >= min(tokens, token_budget)))  # an item above the budget takes an empty row
        free[row] -= tokens
        rows[row].append(position)
    return [np.array(row, dtype=np.int64) for row in rows if row]


def next_fit(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Fills rows in the given order; the first item that does not fit begins the next row; O(rows log n)."""
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
    """Cuts pairs into right-padded batches that together compute the fewest tokens; O(n x pairs in a row).

    padded_tokens: [n], from `PairLengths.padded_tokens`. A row of k pairs costs k x the largest of their
    values, plus ROW_OVERHEAD_TOKENS. Only a row of a single pair may exceed `token_budget`.

    The result is the best possible. Two rows can swap pairs so that one row takes the longer pairs and the
    other row the shorter pairs; such a swap never adds padding. So some best solution cuts the list
    of pairs, sorted by length, into pieces. Dynamic programming tries every such cut.
    """
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
    rows: list[Row] = []
    end = num_pairs
    while end > 0:
        begin = int(begins[end])
        rows.append(order[begin:end])
        end = begin
    return rows[::-1]


def pack_sequences_longest_first(row_tokens: IntArray, token_budget: int) -> list[Row]:
    """Packs n items for a pass without gradients: similar lengths share a row, the largest row comes first.

    row_tokens: [n]. This is next fit over decreasing lengths. The free part of a row is smaller than the
    longest item of the row, so rows are nearly full if items are small against the budget. The row with the
    most tokens comes first: if memory is too small, the pass fails at its start.
    """
    order = np.argsort(-row_tokens, kind="stable")
    rows = [order[positions] for positions in next_fit(row_tokens[order], token_budget)]
    tokens = np.array([row_tokens[row].sum() for row in rows], dtype=np.int64)
    return [rows[i] for i in np.argsort(-tokens, kind="stable")]


def fewest_rows_possible(row_tokens: IntArray, token_budget: int) -> int:
    """Returns a lower bound: tokens / budget, rounded up; an item above the budget counts as one row."""
    is_oversize = row_tokens > token_budget
    return int(is_oversize.sum()) - int(-row_tokens[~is_oversize].sum() // token_budget)


def pack_window(tokens: IntArray, order: IntArray, token_budget: int, algorithm: str) -> list[Row]:
    """Packs a window (part of an epoch, for `packing.scope: epoch`); returns rows in their training order.

    tokens: [n] of the window's items, in the order of the epoch. order: the window's pairs in that order, [n]
    or more. algorithm: a name in BIN_PACKERS.

    Most packers make the rows of long items first. In that order an epoch would train on long pairs first.
    So rows are sorted by their first item, and then shuffled by the argsort of the first numbers of `order`.
    No random numbers are drawn, because `order` is already random. If instead `order` is the order of the
    files, rows stay near that order. Rows of next fit are in order already and are returned as they are.
    """
    if algorithm != "best_fit_decreasing":
        rows = BIN_PACKERS[algorithm](tokens, token_budget)
    else:
        rows = _evenly_filled(tokens, token_budget)
    rows.sort(key=lambda row: int(row[0]))
    if algorithm == "next_fit":
        return rows
    return [rows[i] for i in np.argsort(order[: len(rows)], kind="stable").tolist()]


def _evenly_filled(tokens: IntArray, token_budget: int) -> list[Row]:
    """Packs items into about `fewest_rows_possible` rows with similar token counts and lengths.

    At first there are as many empty rows as the items within the budget need at least. Each item, longest
    first, goes to the emptiest row. So every row gets long and short items, and all rows become equally
    full. Ranks with equally many rows are then balanced, and no step has only long or only short pairs. If
    this needs too many more rows, best fit decreasing packs the items too, and the packing with fewer rows
    is returned.
    """
    is_oversize = tokens > token_budget
    bound = fewest_rows_possible(tokens, token_budget)
    num_rows = bound - int(is_oversize.sum())
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [(0, row) for row in range(num_rows)]  # (tokens, row), ascending: already a heap
    classes = (np.log2(tokens) * _CLASSES_PER_OCTAVE).astype(np.int64)
    order = np.argsort(-classes, kind="stable")
    fitting = order[~is_oversize[order]]
    for position, length in zip(fitting.tolist(), tokens[fitting].tolist(), strict=True):
        row_tokens, row = filled[0]
        if row_tokens + length <= token_budget:
            rows[row].append(position)
            heapreplace(filled, (row_tokens + length, row))
        else:  # if the emptiest row has no room for the item, no row has
            heappush(filled, (length, len(rows)))
            rows.append([position])
    rows += [[position] for position in np.flatnonzero(is_oversize).tolist()]
    packed = [np.array(row, dtype=np.int64) for row in rows if row]
    if len(packed) > bound + max(1, bound // _FEW_ROWS):
        fuller = best_fit_decreasing(tokens, token_budget)
        return fuller if len(fuller) < len(packed) else packed
    return packed


BIN_PACKERS: dict[str, BinPacker] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "next_fit": next_fit,
}
