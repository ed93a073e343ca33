"""Global batches, their rows, and the source of batches from pairs on disk (online/source.py is the other).

Legend: P pairs of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.model.attention.segments import on_device
from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.packing.lengths import FloatArray, IntArray, ModelShape, PairSizes, pair_sizes
from dpo_pack.packing.plan import PackingPlan, epoch_order, plan_epoch
from dpo_pack.system import ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """The pairs of one row, ready for the policy."""

    row: Row  # its sequences are chosen, rejected of the first pair, chosen, rejected of the second, ...
    reference: Tensor  # [P, (chosen, rejected)] float64, summed log-probs, nats
    pair_weights: Tensor  # [P] float64, the weights in the data
    pair_indices: IntArray  # [P] positions in the source's pairs or, online, prompts
    score_margins: FloatArray  # [P] score of chosen - score of rejected; NaN: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The pairs of one optimizer step: those of this rank, in rows, and counts over all ranks."""

    epoch: float  # epochs finished after this step
    num_pairs: int  # over all ranks, as the two following values are
    num_tokens: int  # without padding; what a row shares counts once
    mean_chosen_tokens: float  # of a pair of any rank
    rows: Sequence[PairRow]  # the rows of this rank
    row_pairs: Sequence[IntArray]  # the pairs of each row of all ranks
    common_passes: int  # every rank has at least this many passes
    # This rank computes these after `rows`, with a gradient of zero, while other ranks still have rows.
    idle_rows: Sequence[Row] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics that the source adds to the step

    @property
    def passes(self) -> list[Row]:
        """The rows of this rank in the order in which it computes them."""
        return [*(pair_row.row for pair_row in self.rows), *self.idle_rows]

    @property
    def pair_indices(self) -> IntArray:
        """The pair indices of this rank's rows, one row after another."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row.pair_indices for row in self.rows)])


class BatchSource(Protocol):
    """A source of global batches. It can stop at any step and continue there in another process."""

    @property
    def num_steps(self) -> int: ...

    @property
    def steps_fingerprint(self) -> str: ...

    def __iter__(self) -> Iterator[GlobalBatch]: ...

    def prepare_next(self) -> None:
        """Makes the next batch while the device computes a step, unless the batch needs that result."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder:
    """Makes rows of a table's pairs on one device: packed or padded, with shared prompts or without."""

    table: PairTable
    # [pairs, (chosen, rejected)] summed reference log-probs, nats; None: rows get zeros. NaN: of no step
    reference: FloatArray | None
    is_packed: bool
    share_prompt: bool
    device: torch.device
    counts_copies: bool = False  # True: rows get `token_copies`, which the loss of a router needs

    def sizes(self, shape: ModelShape | None = None) -> PairSizes:
        """Returns the sizes of all pairs of the table, see `pair_sizes`; plans use these."""
        lengths = pair_lengths(self.table, shape)
        return pair_sizes(lengths, shape, share_prompt=self.share_prompt, pads=not self.is_packed)

    def build(self, pairs: IntArray) -> PairRow:
        """Builds the row of `pairs`, [P] positions in the table."""
        groups = [self.table.group(pair) for pair in pairs.tolist()]
        if self.is_packed:
            row = packed_row(
                groups, self.device, share_prompt=self.share_prompt, counts_copies=self.counts_copies
            )
        else:
            row = padded_row(groups, device=self.device, counts_copies=self.counts_copies)
        sums = np.zeros((len(pairs), 2)) if self.reference is None else self.reference[pairs]
        assert not np.isnan(sums).any(), pairs
        return PairRow(
            row=row,
            reference=on_device(sums, self.device),
            pair_weights=on_device(self.table.weights[pairs].astype(np.float64), self.device),
            pair_indices=pairs,
            score_margins=self.table.score_margins[pairs],
        )


def global_batch(builder: RowBuilder, plan: PackingPlan, step: int, *, epoch: float) -> GlobalBatch:
    """Returns this rank's batch of a step of the plan."""
    of_ranks, pairs = plan.pack_step(step), plan.pairs(step)
    shortest = pairs[[int(plan.sizes.tokens[pairs].argmin())]]
    if builder.is_packed:
        num_tokens = sum(plan.sizes.of_row(row).tokens for rows in of_ranks for row in rows)
    else:  # padding does not count
        num_tokens = int(pair_lengths(builder.table).select(pairs).row_tokens().sum())
    least_passes = max(map(len, of_ranks)) if plan.equal_rows else 1
    # A smaller row fits into the previous row's memory. Ranks that compute rows together wait less.
    own = of_ranks[ranks.rank()]
    largest_first = sorted(own, key=lambda row: plan.sizes.of_row(row).tokens, reverse=True)
    idle_rows: list[Row] = []
    if len(largest_first) < least_passes:
        row = builder.build(shortest).row
        if row.token_copies is not None:  # its tokens are counted in another row
            row = replace(row, token_copies=torch.zeros_like(row.token_copies))
        idle_rows = [row] * (least_passes - len(largest_first))
    return GlobalBatch(
        epoch=epoch,
        num_pairs=len(pairs),
        num_tokens=num_tokens,
        mean_chosen_tokens=float(builder.table.chosen_scored[pairs].sum()) / len(pairs),
        rows=[builder.build(row) for row in largest_first],
        row_pairs=[row for rows in of_ranks for row in rows],
        idle_rows=idle_rows,
        common_passes=max(least_passes, min(map(len, of_ranks))),
    )


@dataclass(kw_only=True, eq=False)
class OfflineSource:
    """Hands out global batches of a table, epoch after epoch. Its state is the number of those handed out."""

    builder: RowBuilder
    token_budget: int
    pairs_per_step: int
    sizes: PairSizes  # of all pairs; the plan balances costs over ranks
    source_weights: FloatArray  # [sources]
    epochs: int
    max_steps: int | None
    shuffle: bool
    seed: int
    equal_rows: bool = False  # whether all ranks compute equally many rows, if need be idle ones

    def __post_init__(self) -> None:
        self.first_plan = ranks.of_node(lambda: self.plan(0))
        self.sizes = self.first_plan.sizes  # in memory that all ranks of the node share
        self._planned = (0, self.first_plan)  # the newest epoch and its plan
        self._ahead: GlobalBatch | None = None  # of `next_step`, if it is made
        self.next_step = 0
        self.num_steps = self.epochs * len(self.first_plan)  # every epoch has as many pairs
        if self.max_steps is not None:
            self.num_steps = min(self.num_steps, self.max_steps)
        self.needed_pairs = self.pairs_of_steps(self.num_steps)

    def plan(self, epoch: int) -> PackingPlan:
        """Returns the plan of an epoch, from 0."""
        sources = self.builder.table.source_indices
        order = epoch_order(sources, self.source_weights, shuffle=self.shuffle, seed=self.seed, epoch=epoch)
        return plan_epoch(
            self.sizes,
            order=order,
            token_budget=self.token_budget,
            pairs_per_step=self.pairs_per_step,
            num_ranks=ranks.num_ranks(),
            equal_rows=self.equal_rows,
        )

    def __iter__(self) -> Iterator[GlobalBatch]:
        while self.next_step < self.num_steps:
            self.prepare_next()
            batch, self._ahead = self._ahead, None
            assert batch is not None
            self.next_step += 1
            yield batch

    def prepare_next(self) -> None:
        if self._ahead is not None or self.next_step >= self.num_steps:
            return
        epoch, step = divmod(self.next_step, len(self.first_plan))
        if self._planned[0] != epoch:
            self._planned = (epoch, self.plan(epoch))
        plan = self._planned[1]
        self._ahead = global_batch(self.builder, plan, step, epoch=epoch + (step + 1) / len(plan))

    def pairs_of_steps(self, num_steps: int | None) -> IntArray | slice:
        """Returns the pairs of the first steps, ascending; all if these are an epoch or more (None: all)."""
        if num_steps is None or num_steps >= len(self.first_plan):
            return slice(None)
        return np.unique(self.first_plan.order[: num_steps * self.pairs_per_step])

    @property
    def steps_fingerprint(self) -> str:
        """A hash of the pairs of each step of the first epoch, whatever rows they are in."""
        plan = self.first_plan
        digest = hashlib.blake2b(plan.step_begins.astype("<i8").tobytes(), digest_size=16)
        digest.update(plan.order.astype("<i8").tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step, self._ahead = int(state["next_step"]), None
