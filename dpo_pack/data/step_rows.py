"""The items of one step -> the rows of each rank: packing and balance together.

An item is a pair, or pairs of one prompt merged into a group. A row costs the sum over its items, so what a
rank costs does not depend on how its items lie in rows: items go to ranks by cost, each rank packs its
own, and then what misfortune in packing left over is repaired across ranks.

Legend: n items, R ranks. Lengths are in tokens.
"""

from collections.abc import Sequence

import numpy as np

from dpo_pack.data.balance import BALANCE_TOLERANCE, split_over_ranks
from dpo_pack.data.bin_packing import BIN_PACKERS, BinPacker, fewest_rows, fewest_rows_possible, padded_rows
from dpo_pack.data.lengths import FloatArray, IntArray

# The algorithm of `packing.mode: padded`; it measures pairs by `PairLengths.padded_tokens`.
PADDED = "padded"
# What makes rows: the bin packers as they are, but the default looks further where it misses the bound.
ROW_BUILDERS: dict[str, BinPacker] = {
    **BIN_PACKERS,
    "best_fit_decreasing": fewest_rows,
    PADDED: padded_rows,
}

RankRows = list[list[int]]  # the rows of one rank, each of positions in [n]


def plan_step_rows(
    tokens: IntArray,
    costs: FloatArray,
    *,
    token_budget: int,
    algorithm: str,
    num_ranks: int,
    equal_rows: bool,
) -> list[RankRows]:
    """Rows of each rank. tokens: [n] in a row; costs: [n] in any unit.

    `equal_rows` gives all ranks as many rows as the rank with the most, where there are items enough, by
    splitting rows: sharded models need as many forwards on each rank.
    """
    build_rows = ROW_BUILDERS[algorithm]
    if num_ranks == 1:
        return [[row.tolist() for row in build_rows(tokens, token_budget)]]
    ranks: list[RankRows] = []
    for positions in split_over_ranks(costs, num_ranks):
        rows = build_rows(tokens[positions], token_budget)
        ranks.append([positions[row].tolist() for row in rows])
    if algorithm not in (PADDED, "next_fit"):
        _close_rows(ranks, tokens, costs, token_budget)
    if equal_rows:
        equalize_rows(ranks, costs.tolist())
    return ranks


def _close_rows(ranks: list[RankRows], tokens: IntArray, costs: FloatArray, token_budget: int) -> None:
    """Empty a rank's least filled row into free places of other rows, while that keeps ranks balanced."""
    if sum(map(len, ranks)) <= max(len(ranks), fewest_rows_possible(tokens, token_budget)):
        return
    step = _OpenStep(ranks, tokens.tolist(), costs.tolist(), token_budget)
    while step.close_one_row():
        pass


class _OpenStep:
    """Rows of a step while items still move between them."""

    def __init__(
        self, ranks: list[RankRows], tokens: Sequence[int], costs: Sequence[float], token_budget: int
    ) -> None:
        self.ranks, self.tokens, self.costs, self.token_budget = ranks, tokens, costs, token_budget
        loads = self._loads()
        self.most_load = max(max(loads), BALANCE_TOLERANCE * sum(loads) / len(loads))

    def close_one_row(self) -> bool:
        """Whether a row could be emptied; the least filled of ranks with several rows is tried first."""
        closable = [
            (self._tokens_in(row), rank, number)
            for rank, rows in enumerate(self.ranks)
            if len(rows) > 1
            for number, row in enumerate(rows)
        ]
        free = sum(max(self.token_budget - self._tokens_in(row), 0) for rows in self.ranks for row in rows)
        for row_tokens, rank, number in sorted(closable):
            if row_tokens > free - (self.token_budget - row_tokens):
                return False
            places = self._places_elsewhere(rank, number)
            if places is not None:
                for position, target in places:
                    target.append(position)
                del self.ranks[rank][number]
                return True
        return False

    def _places_elsewhere(self, rank: int, number: int) -> list[tuple[int, list[int]]] | None:
        """A row for each item of a row, the fullest that holds it; None when one finds no place."""
        loads = self._loads()
        rows = [
            (r, row, self.token_budget - self._tokens_in(row))
            for r, of_rank in enumerate(self.ranks)
            for i, row in enumerate(of_rank)
            if (r, i) != (rank, number)
        ]
        free = [room for _, _, room in rows]
        places = []
        for position in sorted(self.ranks[rank][number], key=lambda position: -self.tokens[position]):
            tokens, cost = self.tokens[position], self.costs[position]
            fits = [
                (free[i], i)
                for i, (r, _, _) in enumerate(rows)
                if free[i] >= tokens and (r == rank or loads[r] + cost <= self.most_load)
            ]
            if not fits:
                return None
            _, target = min(fits)
            free[target] -= tokens
            loads[rank] -= cost
            loads[rows[target][0]] += cost
            places.append((position, rows[target][1]))
        return places

    def _tokens_in(self, row: Sequence[int]) -> int:
        return sum(self.tokens[position] for position in row)

    def _loads(self) -> list[float]:
        return [sum(self.costs[position] for row in rows for position in row) for rows in self.ranks]


def equalize_rows(ranks: list[RankRows], costs: Sequence[float]) -> None:
    """Give every rank as many rows as the one with the most, in place, where there are items enough.

    A rank splits its costliest row of several items; one that has single items only is given the cheapest
    item of the costliest rank that can spare one. A step of too few items keeps ranks with fewer rows.
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
    donors = [other for other in ranks if other is not rows and sum(map(len, other)) > num_rows]
    if not donors:
        return False
    donor = max(donors, key=lambda other: sum(costs[position] for row in other for position in row))
    sparable = [(position, row) for row in donor if len(row) > 1 for position in row]
    position, row = min(sparable, key=lambda spared: costs[spared[0]])
    row.remove(position)
    rows.append([position])
    return True
