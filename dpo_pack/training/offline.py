"""The offline source of global batches: pairs on disk with cached reference log-probs.

Legend: P pairs of a row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpo_pack.data.store import pair_lengths
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.packing.plan import PackingPlan, PlanSettings, epoch_order
from dpo_pack.training.batches import GlobalBatch, PairReference, RowBuilder, global_batch


@dataclass(kw_only=True, eq=False)
class OfflineSource:
    """Hands out global batches of a table, epoch after epoch. Its state: how many batches it has handed out.

    `prepare_next` makes the next batch while the host would otherwise wait for the device.
    """

    builder: RowBuilder
    settings: PlanSettings
    row_costs: FloatArray | None  # [all pairs] FLOPs or tokens, which the plan balances over ranks
    source_weights: FloatArray  # [sources]
    epochs: int
    max_steps: int | None
    shuffle: bool
    seed: int
    rank: int
    num_ranks: int
    # Whether all ranks get equally many rows. In a step with too few pairs for this, ranks with fewer rows
    # also compute idle rows, whose gradient is zero.
    equal_rows: bool = False

    def __post_init__(self) -> None:
        shares = self.builder.is_packed and self.builder.share_prompt
        self.real_tokens = pair_lengths(self.builder.table).row_tokens(share_prompt=shares)  # [all pairs]
        self.first_plan = self.plan(0)
        self._planned = (0, self.first_plan)  # the newest epoch and its plan
        self._ahead: tuple[int, GlobalBatch] | None = None  # a step and its batch, not handed out yet
        self._epoch_ends: list[int] = []  # the steps until the end of each epoch
        self.next_step = 0
        num_steps = 0
        for epoch in range(self.epochs):
            # With `packing.scope: epoch`, the new order of an epoch's pairs can need one row more.
            is_as_long = epoch == 0 or self.settings.rows_per_step is None
            num_steps += len(self.first_plan if is_as_long else self.plan(epoch))
            if self.max_steps is not None and num_steps >= self.max_steps:
                self._epoch_ends.append(self.max_steps)
                break
            self._epoch_ends.append(num_steps)

    @property
    def num_steps(self) -> int:
        return self._epoch_ends[-1]

    def order(self, epoch: int) -> IntArray:
        """Returns [E] the pairs of an epoch, in the order in which they are drawn. The first epoch is 0."""
        table = self.builder.table
        return epoch_order(
            table.num_pairs,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            source_indices=table.source_indices,
            source_weights=self.source_weights,
        )

    def plan(self, epoch: int) -> PackingPlan:
        """Returns the plan of an epoch: the pairs of each step, rank and row. The first epoch is 0."""
        return self.settings.plan(
            self.builder.row_tokens(),
            order=self.order(epoch),
            num_ranks=self.num_ranks,
            row_costs=self.row_costs,
            equal_rows=self.equal_rows,
            merging=self.builder.merging,
        )

    def use_reference(self, reference: PairReference) -> None:
        """Puts the log-probs of `reference` into all batches from now on."""
        self.builder = replace(self.builder, reference=reference)
        self._ahead = None

    def __iter__(self) -> Iterator[GlobalBatch]:
        while self.next_step < self.num_steps:
            self.prepare_next()
            assert self._ahead is not None
            (_, batch), self._ahead = self._ahead, None
            self.next_step += 1
            yield batch

    def prepare_next(self) -> None:
        """Makes the batch of the next step, unless the batch is ready or no step is left."""
        is_made = self._ahead is not None and self._ahead[0] == self.next_step
        if is_made or self.next_step >= self.num_steps:
            return
        epoch = bisect_right(self._epoch_ends, self.next_step)
        step = self.next_step - (self._epoch_ends[epoch - 1] if epoch else 0)
        if self._planned[0] != epoch:
            self._planned = (epoch, self.plan(epoch))
        _, plan = self._planned
        batch = global_batch(
            self.builder,
            plan,
            step,
            rank=self.rank,
            real_tokens=self.real_tokens,
            epoch=epoch + (step + 1) / len(plan),
        )
        self._ahead = (self.next_step, batch)

    @property
    def steps_fingerprint(self) -> str:
        """A hash of the pairs of each step, whatever rows they are in."""
        plan = self.first_plan
        digest = hashlib.blake2b(plan.step_begins.astype("<i8").tobytes(), digest_size=16)
        steps = np.repeat(np.arange(len(plan)), np.diff(plan.step_begins))
        # Scope epoch puts the pairs of a step in the order of its rows. The hash ignores this order.
        order = plan.order if plan.row_begins is None else plan.order[np.lexsort((plan.order, steps))]
        digest.update(order.astype("<i8").tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batches that were handed out when `state` was taken."""
        self.next_step = int(state["next_step"])
