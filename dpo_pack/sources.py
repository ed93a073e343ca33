"""Where global batches come from. Offline: pairs on disk and their cached reference log-probs.

`train_step` asks a source for nothing but batches; anything with this file's `BatchSource` methods can
stand in, online rollouts among them.

Legend: P pairs of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.data.packing import PADDED, PackingPlan, epoch_order, plan_epoch
from dpo_pack.data.store import PairTable
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.losses import PairLogps
from dpo_pack.models import RowLogps
from dpo_pack.reference import PairReference, pair_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """The pairs of one row, ready for the policy. Sequences alternate: chosen, rejected, chosen, ..."""

    row: Row
    reference_chosen: Tensor  # [P] float64, summed log-probs, nats
    reference_rejected: Tensor  # [P] float64
    weights: Tensor  # [P] float64, each pair's own loss weight
    pair_indices: npt.NDArray[np.int64]  # [P], into the source's table


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """One optimizer step: this rank's rows, and the counts over all ranks that the loss is divided by."""

    epoch: float  # epochs finished after this step
    num_pairs: int
    num_rows: int
    num_tokens: int
    rows: Sequence[PairRow]


class BatchSource(Protocol):
    """A source of global batches that can stop at any step and go on there in another process."""

    @property
    def num_steps(self) -> int: ...

    def __iter__(self) -> Iterator[GlobalBatch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder:
    """Makes the rows of a table's pairs: packed or padded, with or without sharing, on one device."""

    table: PairTable
    reference: PairReference | None
    is_packed: bool
    share_prompt: bool
    pad_token_id: int
    device: torch.device

    def row_tokens(self) -> npt.NDArray[np.int64]:
        """[P]: tokens each pair takes in a row, as the planner of this mode counts them."""
        lengths = pair_lengths(self.table)
        if not self.is_packed:
            return lengths.padded_tokens()
        return lengths.row_tokens(share_prompt=self.share_prompt)

    def build(self, pairs: npt.NDArray[np.int64]) -> PairRow:
        """The row of `pairs`, [P] positions in the table."""
        groups = [self._group(int(pair)) for pair in pairs]
        if self.is_packed:
            row = packed_row(layout_row(groups, share_prompt=self.share_prompt), self.device)
        else:
            row = padded_row(groups, pad_token_id=self.pad_token_id, device=self.device)
        zeros = np.zeros(len(pairs))
        chosen = zeros if self.reference is None else self.reference.chosen[pairs]
        rejected = zeros if self.reference is None else self.reference.rejected[pairs]
        return PairRow(
            row=row,
            reference_chosen=self._put(chosen),
            reference_rejected=self._put(rejected),
            weights=self._put(self.table.weights[pairs]),
            pair_indices=pairs,
        )

    def _group(self, pair: int) -> Group:
        completions = (self.table.chosen(pair), self.table.rejected(pair))
        return Group(context=self.table.prompt(pair), completions=completions)

    def _put(self, values: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(values.astype(np.float64)).to(self.device, non_blocking=True)


def split_pairs(output: RowLogps, row: PairRow) -> tuple[PairLogps, PairLogps]:
    """(policy, reference) log-probs of a row's pairs, from what the policy computed for it."""
    sums, tokens = output.sums.view(-1, 2), output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    chosen_tokens, rejected_tokens = tokens[:, 0], tokens[:, 1]
    policy = PairLogps(
        chosen=sums[:, 0], rejected=sums[:, 1], chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens
    )
    reference = PairLogps(
        chosen=row.reference_chosen,
        rejected=row.reference_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    return policy, reference


class OfflineSource:
    """Global batches of a table, epoch after epoch. State: the number of batches handed out."""

    def __init__(
        self,
        builder: RowBuilder,
        *,
        source_weights: npt.NDArray[np.float64],
        epochs: int,
        max_steps: int | None,
        token_budget: int,
        pairs_per_step: int,
        algorithm: str,
        shuffle: bool,
        seed: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.builder = builder
        self.source_weights = source_weights
        self.token_budget = token_budget
        self.pairs_per_step = pairs_per_step
        self.algorithm = algorithm if builder.is_packed else PADDED
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        shares = builder.is_packed and builder.share_prompt
        self.real_tokens = pair_lengths(builder.table).row_tokens(share_prompt=shares)  # [all pairs]
        self.first_plan = self.plan(0)
        # An epoch's length does not depend on its number: the mixture draws other pairs, not more of them.
        self.steps_per_epoch = len(self.first_plan)
        self._num_steps = epochs * self.steps_per_epoch
        if max_steps is not None:
            self._num_steps = min(self._num_steps, max_steps)
        self.next_step = 0

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def plan(self, epoch: int) -> PackingPlan:
        """The plan of an epoch, counted from 0. Pure, and cheap enough to recompute on resume."""
        table = self.builder.table
        order = epoch_order(
            table.num_pairs,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            source_indices=table.source_indices,
            source_weights=self.source_weights,
        )
        return plan_epoch(
            self.builder.row_tokens(),
            order=order,
            token_budget=self.token_budget,
            pairs_per_step=self.pairs_per_step,
            algorithm=self.algorithm,
            num_ranks=self.num_ranks,
        )

    def __iter__(self) -> Iterator[GlobalBatch]:
        plan, planned_epoch = self.first_plan, 0
        while self.next_step < self._num_steps:
            epoch, step = divmod(self.next_step, self.steps_per_epoch)
            if epoch != planned_epoch:
                plan, planned_epoch = self.plan(epoch), epoch
            self.next_step += 1
            yield self._batch(plan, step, epoch)

    def _batch(self, plan: PackingPlan, step: int, epoch: int) -> GlobalBatch:
        ranks = plan[step]
        pairs = plan.pairs(step)
        return GlobalBatch(
            epoch=epoch + (step + 1) / len(plan),
            num_pairs=len(pairs),
            num_rows=sum(len(rows) for rows in ranks),
            num_tokens=int(self.real_tokens[pairs].sum()),
            rows=[self.builder.build(row) for row in ranks[self.rank]],
        )

    @property
    def steps_fingerprint(self) -> str:
        """Names which pairs are in which step; how they are packed there does not change training."""
        order = self.first_plan.order.astype("<i8").tobytes()
        return hashlib.blake2b(order + str(self.pairs_per_step).encode(), digest_size=16).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch handed out."""
        self.next_step = int(state["next_step"])
