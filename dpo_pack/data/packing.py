"""Pair lengths -> the pairs of each step, the rows they share, and the rank of each row.

Legend: P pairs of the data set, E pairs of an epoch (copies included), n pairs of one call, R ranks.
Lengths are in tokens; a pair is named by its position in the [P] arrays.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpo_pack.data.balance import BALANCE_TOLERANCE, split_over_ranks
from dpo_pack.data.bin_packing import ROW_OVERHEAD_TOKENS, Row
from dpo_pack.data.epoch_rows import pack_window
from dpo_pack.data.lengths import AnyIntArray, FloatArray, IntArray
from dpo_pack.data.merging import PairSizes, PromptMerging
from dpo_pack.data.step_rows import PADDED, ROW_BUILDERS, plan_step_rows

# Part of every plan's fingerprint: raise it whenever the same arguments give other steps or rows.
PLAN_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingPlan:
    """One epoch: `len(plan)` steps, `plan.pairs(step)`, and `plan[step][rank][row]`, arrays of pairs.

    Steps are packed, or finished rows dealt to ranks, when they are asked for: a plan of scope step costs
    nothing to make and little to recompute. Build it with `plan_epoch` or `plan_epoch_rows`.
    """

    order: IntArray  # [E] pairs in the order they are trained on
    step_begins: IntArray  # [steps + 1] into `order`
    row_begins: IntArray | None  # scope epoch: [rows + 1] into `order`; None: packed inside each step
    full_step: int  # pairs in a full step of scope step, rows in one of scope epoch
    sizes: PairSizes  # tokens in a row and cost of every pair
    token_budget: int
    algorithm: str
    num_ranks: int
    equal_rows: bool
    fingerprint: str  # hex; see `plan_epoch`

    def __len__(self) -> int:
        return len(self.step_begins) - 1

    @property
    def row_tokens(self) -> IntArray:
        """Tokens each pair takes in a row when it is alone there, [P]."""
        return self.sizes.tokens

    def pairs(self, step: int) -> IntArray:
        """The pairs of a step, whatever the number of ranks; the last step may have fewer."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a plan of {len(self)} steps")
        return self.order[self.step_begins[step] : self.step_begins[step + 1]]

    def __getitem__(self, step: int) -> tuple[tuple[Row, ...], ...]:
        """Rows of each rank: R tuples of arrays of pairs. Every rank has one where there are items enough."""
        pairs = self.pairs(step)
        dealt = None if self.row_begins is None else self._deal(self._finished_rows(step))
        if dealt is None:
            return self._pack(pairs)
        times = self._rank_times(dealt)
        if max(times) <= BALANCE_TOLERANCE * sum(times) / len(times):
            return dealt
        packed = self._pack(pairs)  # rows are not padded, so pairs may lie otherwise at no cost but more rows
        return packed if max(self._rank_times(packed)) < max(times) else dealt

    def __iter__(self) -> Iterator[tuple[tuple[Row, ...], ...]]:
        return (self[step] for step in range(len(self)))

    def is_full(self, step: int) -> bool:
        """Whether the step is as large as all but the last of an epoch."""
        if self.row_begins is None:
            return len(self.pairs(step)) == self.full_step
        return len(self._finished_rows(step)) == self.full_step

    @property
    def oversize_pairs(self) -> IntArray:
        """Pairs of the epoch that exceed the token budget and so get a row of their own, ascending."""
        pairs = np.unique(self.order)
        return pairs[self.row_tokens[pairs] > self.token_budget]

    def tokens_in(self, row: Row) -> int:
        """Tokens a forward pass over the row computes, padding included where the plan pads."""
        if self.sizes.merging is not None:
            return sum(self.sizes.measure(group)[0] for group in self.sizes.groups_in(row))
        tokens = self.sizes.tokens[row]
        return int(len(row) * tokens.max() if self.algorithm == PADDED else tokens.sum())

    def cost_of(self, row: Row) -> float:
        """Estimated cost of the row in the unit of the pairs' costs."""
        if self.sizes.merging is not None:
            return sum(self.sizes.measure(group)[1] for group in self.sizes.groups_in(row))
        costs = self.sizes.costs[row]
        return float(len(row) * costs.max() if self.algorithm == PADDED else costs.sum())

    def _deal(self, rows: list[Row]) -> tuple[tuple[Row, ...], ...] | None:
        """Whole rows to ranks; None where ranks would be idle, or differ in rows and may not."""
        is_uneven = len(rows) % self.num_ranks > 0
        if len(rows) < self.num_ranks or (is_uneven and self.equal_rows):
            return None
        costs = np.array([self.cost_of(row) for row in rows])
        dealt = split_over_ranks(costs, self.num_ranks, equal_counts=self.equal_rows)
        return tuple(tuple(rows[i] for i in of_rank.tolist()) for of_rank in dealt)

    def _rank_times(self, ranks: tuple[tuple[Row, ...], ...]) -> list[float]:
        """[R] estimated times of a step: costs, and for each row that of ROW_OVERHEAD_TOKENS more tokens."""
        tokens = sum(self.tokens_in(row) for rows in ranks for row in rows)
        costs = [sum(self.cost_of(row) for row in rows) for rows in ranks]
        overhead = ROW_OVERHEAD_TOKENS * sum(costs) / tokens
        return [cost + overhead * len(rows) for cost, rows in zip(costs, ranks, strict=True)]

    def _finished_rows(self, step: int) -> list[Row]:
        assert self.row_begins is not None
        first, end = np.searchsorted(self.row_begins, self.step_begins[step : step + 2])
        return [
            self.order[self.row_begins[row] : self.row_begins[row + 1]] for row in range(int(first), int(end))
        ]

    def _pack(self, pairs: IntArray) -> tuple[tuple[Row, ...], ...]:
        is_merged = self.sizes.merging is not None
        if is_merged:
            items, tokens, costs = self.sizes.items_of(pairs, self.token_budget)
        else:
            items, tokens, costs = [], self.sizes.tokens[pairs], self.sizes.costs[pairs]
        ranks = plan_step_rows(
            tokens,
            costs,
            token_budget=self.token_budget,
            algorithm=self.algorithm,
            num_ranks=self.num_ranks,
            equal_rows=self.equal_rows,
        )
        if is_merged:
            return tuple(tuple(np.concatenate([items[i] for i in row]) for row in rows) for rows in ranks)
        return tuple(tuple(pairs[row] for row in rows) for rows in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How an epoch is cut into steps and rows."""

    token_budget: int
    pairs_per_step: int
    rows_per_step: int | None = None  # scope epoch; None is scope step
    window_pairs: int = 16384  # scope epoch
    algorithm: str

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
        """The plan of an epoch, by `plan_epoch` or `plan_epoch_rows`, which define the arguments."""
        if self.rows_per_step is None:
            return plan_epoch(
                row_tokens,
                order=order,
                token_budget=self.token_budget,
                pairs_per_step=self.pairs_per_step,
                algorithm=self.algorithm,
                num_ranks=num_ranks,
                row_costs=row_costs,
                equal_rows=equal_rows,
                merging=merging,
            )
        return plan_epoch_rows(
            row_tokens,
            order=order,
            token_budget=self.token_budget,
            rows_per_step=self.rows_per_step,
            window_pairs=self.window_pairs,
            algorithm=self.algorithm,
            num_ranks=num_ranks,
            row_costs=row_costs,
            equal_rows=equal_rows,
            merging=merging,
        )


def plan_epoch(
    row_tokens: AnyIntArray,
    *,
    order: AnyIntArray,
    token_budget: int,
    pairs_per_step: int,
    algorithm: str,
    num_ranks: int = 1,
    row_costs: FloatArray | None = None,
    equal_rows: bool = False,
    merging: PromptMerging | None = None,
) -> PackingPlan:
    """Scope step: every entry of `order` in exactly one step of `pairs_per_step` pairs, and one row.

    row_tokens: [P] from `PairLengths.row_tokens`, or `padded_tokens` where `algorithm` is PADDED.
    order: [E] from `epoch_order`. row_costs: [P] positive, from `pair_flops`; by default the tokens.
    equal_rows: as many rows on each rank. merging: pairs of a step with one prompt are laid out as one group.

    `fingerprint` names what is trained in which step and how it is packed: order, lengths, budget, steps,
    algorithm, merging. Ranks and costs are left out: a resumed run may have another number of processes.
    """
    assert algorithm in ROW_BUILDERS, f"unknown packing algorithm {algorithm}"
    assert pairs_per_step >= 1
    return _plan(
        _sizes(row_tokens, row_costs, merging),
        order=order,
        step_begins=np.append(np.arange(0, len(order), pairs_per_step), len(order)),
        row_begins=None,
        full_step=pairs_per_step,
        token_budget=token_budget,
        algorithm=algorithm,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
    )


def plan_epoch_rows(
    row_tokens: AnyIntArray,
    *,
    order: AnyIntArray,
    token_budget: int,
    rows_per_step: int,
    window_pairs: int,
    algorithm: str,
    num_ranks: int = 1,
    row_costs: FloatArray | None = None,
    equal_rows: bool = False,
    merging: PromptMerging | None = None,
) -> PackingPlan:
    """Scope epoch: windows of `window_pairs` of `order` are packed into rows; a step is `rows_per_step` rows.

    Arguments as for `plan_epoch`. The last step has the rows that are left. Which pairs are in a step depends
    on their lengths, never on ranks; which rows they form does where whole rows cannot be dealt evenly.
    """
    assert rows_per_step >= 1 and window_pairs >= 1 and algorithm != PADDED
    sizes = _sizes(row_tokens, row_costs, merging)
    rows: list[IntArray] = []
    for begin in range(0, len(order), window_pairs):
        window = np.asarray(order[begin : begin + window_pairs], dtype=np.int64)
        if merging is None:
            packed = pack_window(sizes.tokens[window], window, token_budget, algorithm)
            rows += [window[row] for row in packed]
        else:
            items, tokens, _ = sizes.items_of(window, token_budget)
            packed = pack_window(tokens, window, token_budget, algorithm)
            rows += [np.concatenate([items[i] for i in row.tolist()]) for row in packed]
    row_begins = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return _plan(
        sizes,
        order=np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64),
        step_begins=np.append(row_begins[:-1:rows_per_step], row_begins[-1]),
        row_begins=row_begins,
        full_step=rows_per_step,
        token_budget=token_budget,
        algorithm=algorithm,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
    )


def _sizes(row_tokens: AnyIntArray, row_costs: FloatArray | None, merging: PromptMerging | None) -> PairSizes:
    tokens = np.ascontiguousarray(row_tokens, dtype=np.int64)
    costs = np.ascontiguousarray(tokens if row_costs is None else row_costs, dtype=np.float64)
    assert costs.shape == tokens.shape and np.all(tokens > 0) and np.all(costs > 0)
    return PairSizes(tokens=tokens, costs=costs, merging=merging)


def _plan(
    sizes: PairSizes,
    *,
    order: AnyIntArray,
    step_begins: IntArray,
    row_begins: IntArray | None,
    full_step: int,
    token_budget: int,
    algorithm: str,
    num_ranks: int,
    equal_rows: bool,
) -> PackingPlan:
    assert token_budget >= 1 and num_ranks >= 1
    epoch_pairs = np.ascontiguousarray(order, dtype=np.int64)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{PLAN_VERSION} {token_budget} {full_step} {algorithm} {len(epoch_pairs)}".encode())
    arrays = [epoch_pairs, step_begins, sizes.tokens]
    arrays += [] if row_begins is None else [row_begins]
    arrays += [] if sizes.merging is None else [sizes.merging.prompts]
    for array in arrays:
        digest.update(array.astype("<i8").tobytes())
    return PackingPlan(
        order=epoch_pairs,
        step_begins=step_begins,
        row_begins=row_begins,
        full_step=full_step,
        sizes=sizes,
        token_budget=token_budget,
        algorithm=algorithm,
        num_ranks=num_ranks,
        equal_rows=equal_rows,
        fingerprint=digest.hexdigest(),
    )
