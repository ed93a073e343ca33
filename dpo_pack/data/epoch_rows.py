"""Scope epoch: the items of a window of the shuffled epoch -> rows that are all nearly full.

Legend: n items of a window, in the order of the epoch. Lengths are in tokens.
"""

from heapq import heapify, heappush, heapreplace

import numpy as np

from dpo_pack.data.bin_packing import BIN_PACKERS, Row, best_fit_decreasing, fewest_rows_possible
from dpo_pack.data.lengths import IntArray

# Items whose lengths differ by less than a twelfth of an octave, 6 %, count as equally long: which of
# them meet in a row is then left to the shuffled order, and another epoch makes other rows.
_CLASSES_PER_OCTAVE = 12
# One row in so many above the volume bound is a fair price for rows that are alike.
_FEW_ROWS = 200


def pack_window(tokens: IntArray, order: IntArray, token_budget: int, algorithm: str) -> list[Row]:
    """Rows of positions in [n], in the order they are trained. `algorithm`: a name in BIN_PACKERS.

    order: the window's pairs in the order of the epoch, [n] or more. Packers look at lengths, so the order
    they make rows in says something about them; trained in that order, an epoch would go from long pairs
    to short ones. A shuffled `order` shuffles the rows as well, drawing nothing of its own: how the numbers
    of its first pairs compare is a random permutation. In the order of the files rows stay near it.
    """
    if algorithm != "best_fit_decreasing":
        rows = BIN_PACKERS[algorithm](tokens, token_budget)
    else:
        rows = _evenly_filled(tokens, token_budget)
    rows.sort(key=lambda row: int(row[0]))
    if algorithm == "next_fit":  # which keeps the order
        return rows
    return [rows[i] for i in np.argsort(order[: len(rows)], kind="stable").tolist()]


def _evenly_filled(tokens: IntArray, token_budget: int) -> list[Row]:
    """About as few rows as the volume bound, all of them alike.

    Longest first, each item goes to the emptiest of as many rows as the tokens need. So every row gets its
    share of long and short ones and rows end up equally full, which balances ranks that get equally many
    rows, and no step is made of long pairs or of short ones. Where items are left over, best fit
    decreasing is tried as well, and the fewer rows are taken.
    """
    classes = (np.log2(tokens) * _CLASSES_PER_OCTAVE).astype(np.int64)
    rows = _emptiest_first(tokens, np.argsort(-classes, kind="stable"), token_budget)
    bound = fewest_rows_possible(tokens, token_budget)
    if len(rows) > bound + max(1, bound // _FEW_ROWS):
        fuller = best_fit_decreasing(tokens, token_budget)
        rows = fuller if len(fuller) < len(rows) else rows
    return rows


def _emptiest_first(tokens: IntArray, order: IntArray, token_budget: int) -> list[Row]:
    is_oversize = tokens > token_budget
    num_rows = fewest_rows_possible(tokens[~is_oversize], token_budget)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [(0, row) for row in range(num_rows)]
    heapify(filled)
    fitting = order[~is_oversize[order]]
    for position, length in zip(fitting.tolist(), tokens[fitting].tolist(), strict=True):
        row_tokens, row = filled[0]
        if row_tokens + length <= token_budget:
            rows[row].append(position)
            heapreplace(filled, (row_tokens + length, row))
        else:  # it is the emptiest row, so it fits in none
            heappush(filled, (length, len(rows)))
            rows.append([position])
    rows += [[position] for position in np.flatnonzero(is_oversize).tolist()]
    return [np.array(row, dtype=np.int64) for row in rows if row]
