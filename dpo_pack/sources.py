"""Where global batches come from. Offline: pairs on disk and their cached reference log-probs.

`train_step` asks a source for nothing but batches; anything with this file's `BatchSource` methods can
stand in, online rollouts among them.

Legend: P pairs of a row.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.data.epoch_order import epoch_order
from dpo_pack.data.lengths import FloatArray
from dpo_pack.data.merging import PromptMerging, merge_group
from dpo_pack.data.packing import PackingPlan, PlanSettings
from dpo_pack.data.store import PairTable
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.losses import Objective, PairLogps, ScoredPairs, length_desensitized_sums, wpo_weights
from dpo_pack.models import RowLogps
from dpo_pack.reference import PairReference, pair_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """The pairs of one row, ready for the policy.

    A pair is two of the row's S sequences. As a rule they lie pair by pair: chosen, rejected, chosen, ...;
    where several pairs share sequences, `sequence_index` says which are whose, and `by_pair` repeats them.
    """

    row: Row
    sequence_index: Tensor | None  # [2 P] int64, chosen and rejected of each pair; None: 0, 1, 2, ...
    token_index: Tensor | None  # [N] int64, the scored tokens of those sequences; None with the other
    reference_chosen: Tensor  # [P] float64, summed log-probs, nats
    reference_rejected: Tensor  # [P] float64
    reference_tokens: Tensor | None  # [N] per-token log-probs as they lie in the row, for LD-DPO
    weights: Tensor  # [P] float64, each pair's own loss weight
    pair_indices: npt.NDArray[np.int64]  # [P], into the source's table


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """One optimizer step: this rank's rows, and the counts over all ranks that the loss is divided by."""

    epoch: float  # epochs finished after this step
    num_pairs: int
    num_chosen_tokens: int
    num_rows: int
    num_tokens: int
    rows: Sequence[PairRow]
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the source adds to the step's line

    @property
    def mean_chosen_tokens(self) -> float:
        """What makes a mean over the global step's pairs one over its chosen tokens, see losses."""
        return self.num_chosen_tokens / self.num_pairs

    @property
    def pair_indices(self) -> npt.NDArray[np.int64]:
        """[P] of this rank's rows, one row after another."""
        return np.concatenate([row.pair_indices for row in self.rows])


class BatchSource(Protocol):
    """A source of global batches that can stop at any step and go on there in another process."""

    @property
    def num_steps(self) -> int: ...

    @property
    def steps_fingerprint(self) -> str: ...

    def __iter__(self) -> Iterator[GlobalBatch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuilder:
    """Makes the rows of a table's pairs: packed or padded, with or without sharing, on one device."""

    table: PairTable
    reference: PairReference | None  # None: zeros, for a loss without one
    is_packed: bool
    share_prompt: bool
    pad_token_id: int
    device: torch.device
    merging: PromptMerging | None = None  # pairs of one prompt that meet in a row become one group

    def row_tokens(self) -> npt.NDArray[np.int64]:
        """[P]: tokens each pair takes in a row, as the planner of this mode counts them."""
        lengths = pair_lengths(self.table)
        if not self.is_packed:
            return lengths.padded_tokens()
        return lengths.row_tokens(share_prompt=self.share_prompt)

    def build(self, pairs: npt.NDArray[np.int64]) -> PairRow:
        """The row of `pairs`, [P] positions in the table."""
        groups, sequences = self._groups(pairs)
        if self.is_packed:
            row = packed_row(layout_row(groups, share_prompt=self.share_prompt), self.device)
        else:
            row = padded_row(groups, pad_token_id=self.pad_token_id, device=self.device)
        zeros = np.zeros(len(pairs))
        chosen = zeros if self.reference is None else self.reference.chosen[pairs]
        rejected = zeros if self.reference is None else self.reference.rejected[pairs]
        tokens = None
        if self.reference is not None and self.reference.tokens is not None:
            tokens = self.reference.token_logps(pairs)
        is_as_it_lies = np.array_equal(sequences, np.arange(2 * len(pairs)))
        return PairRow(
            row=row,
            sequence_index=None if is_as_it_lies else torch.from_numpy(sequences).to(self.device),
            token_index=None if is_as_it_lies else _token_index(groups, sequences).to(self.device),
            reference_chosen=self._put(chosen),
            reference_rejected=self._put(rejected),
            reference_tokens=None if tokens is None else self._put(tokens),
            weights=self._put(self.table.weights[pairs]),
            pair_indices=pairs,
        )

    def _groups(self, pairs: npt.NDArray[np.int64]) -> tuple[list[Group], npt.NDArray[np.int64]]:
        """Groups of the row, and [2 P] which of their sequences are each pair's chosen and rejected."""
        if self.merging is None:
            return [self._group(int(pair)) for pair in pairs], np.arange(2 * len(pairs))
        groups: list[Group] = []
        sequences = np.zeros((len(pairs), 2), dtype=np.int64)
        num_sequences = 0
        for positions in self.merging.groups_of(pairs):
            merged = merge_group(self.table, pairs[positions].tolist())
            context = self.table.prompt(int(pairs[positions[0]]))
            groups.append(Group(context=context, completions=merged.completions))
            sequences[positions] = num_sequences + merged.pair_completions
            num_sequences += len(merged.completions)
        return groups, sequences.ravel()

    def _group(self, pair: int) -> Group:
        completions = (self.table.chosen(pair), self.table.rejected(pair))
        return Group(context=self.table.prompt(pair), completions=completions)

    def _put(self, values: npt.NDArray[np.floating]) -> Tensor:
        return torch.from_numpy(values.astype(np.float64)).to(self.device, non_blocking=True)


def _token_index(groups: Sequence[Group], sequences: npt.NDArray[np.int64]) -> Tensor:
    """Where the scored tokens of `sequences` lie among those of the groups' sequences, [N] int64."""
    lengths = np.array([len(completion) for group in groups for completion in group.completions])
    begins = np.cumsum(lengths) - lengths
    return torch.from_numpy(
        np.concatenate([np.arange(begins[s], begins[s] + lengths[s]) for s in sequences.tolist()])
    )


def by_pair(output: RowLogps, row: PairRow) -> RowLogps:
    """What the policy says of a row, sequences repeated for every pair that has them: [2 P], chosen first.

    Gradients of the pairs that share a sequence add up in it, as if it had been computed for each.
    """
    if row.sequence_index is None or row.token_index is None:
        return output
    sequences = {
        name: values.index_select(0, row.sequence_index)
        for name, values in output._asdict().items()
        if name != "token_logps"
    }
    return output._replace(**sequences, token_logps=output.token_logps.index_select(0, row.token_index))


def score_pairs(objective: Objective, output: RowLogps, row: PairRow) -> ScoredPairs:
    """What the objective asks of a row's pairs, from what the policy computed for the row, `by_pair`."""
    assert len(output.sums) == 2 * len(row.pair_indices), "sequences of a merged row: use by_pair"
    num_tokens = output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    policy = output.sums.view(-1, 2)
    reference = torch.stack((row.reference_chosen, row.reference_rejected), dim=1)
    weights = row.weights
    if objective.weighting == "wpo":
        weights = weights * wpo_weights(policy - output.log_square_sums.view(-1, 2), num_tokens)
    if objective.ld_alpha is not None:
        assert row.reference_tokens is not None, "the reference was frozen without per-token values"
        policy = length_desensitized_sums(output.token_logps, num_tokens, objective.ld_alpha)
        reference = length_desensitized_sums(row.reference_tokens, num_tokens, objective.ld_alpha)
    return ScoredPairs(
        policy=_pair_logps(policy, num_tokens),
        reference=_pair_logps(reference, num_tokens),
        weights=weights,
    )


def _pair_logps(sums: Tensor, num_tokens: Tensor) -> PairLogps:
    """Of [P, (chosen, rejected)] sums and token counts."""
    return PairLogps(
        chosen=sums[:, 0],
        rejected=sums[:, 1],
        chosen_tokens=num_tokens[:, 0],
        rejected_tokens=num_tokens[:, 1],
    )


class OfflineSource:
    """Global batches of a table, epoch after epoch. State: the number of batches handed out."""

    def __init__(
        self,
        builder: RowBuilder,
        *,
        settings: PlanSettings,
        row_costs: FloatArray | None,
        source_weights: npt.NDArray[np.float64],
        epochs: int,
        max_steps: int | None,
        shuffle: bool,
        seed: int,
        rank: int,
        num_ranks: int,
        equal_rows: bool = False,
    ) -> None:
        """`row_costs`: [all pairs] what ranks are balanced by. `equal_rows`: as many on each rank."""
        self.builder = builder
        self.settings = settings
        self.row_costs = row_costs
        self.source_weights = source_weights
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.equal_rows = equal_rows
        shares = builder.is_packed and builder.share_prompt
        self.real_tokens = pair_lengths(builder.table).row_tokens(share_prompt=shares)  # [all pairs]
        self.first_plan = self.plan(0)
        self._epoch_ends = self._count_steps(epochs, max_steps)
        self.next_step = 0

    def _count_steps(self, epochs: int, max_steps: int | None) -> list[int]:
        """Steps of the run after each epoch; the last entry is all of them.

        In scope step epochs are equally long: the mixture draws other pairs, not more of them. In scope
        epoch another order may need a row more.
        """
        ends = [0]
        for epoch in range(epochs):
            is_as_long = epoch == 0 or self.settings.rows_per_step is None
            ends.append(ends[-1] + len(self.first_plan if is_as_long else self.plan(epoch)))
            if max_steps is not None and ends[-1] >= max_steps:
                return [*ends[1:-1], max_steps]
        return ends[1:]

    @property
    def num_steps(self) -> int:
        return self._epoch_ends[-1]

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
        return self.settings.plan(
            self.builder.row_tokens(),
            order=order,
            num_ranks=self.num_ranks,
            row_costs=self.row_costs,
            equal_rows=self.equal_rows,
            merging=self.builder.merging,
        )

    def __iter__(self) -> Iterator[GlobalBatch]:
        plan, planned_epoch = self.first_plan, 0
        while self.next_step < self.num_steps:
            epoch = bisect_right(self._epoch_ends, self.next_step)
            step = self.next_step - (self._epoch_ends[epoch - 1] if epoch else 0)
            if epoch != planned_epoch:
                plan, planned_epoch = self.plan(epoch), epoch
            self.next_step += 1
            yield self._batch(plan, step, epoch)

    def _batch(self, plan: PackingPlan, step: int, epoch: int) -> GlobalBatch:
        ranks = plan[step]
        pairs = plan.pairs(step)
        num_tokens = int(self.real_tokens[pairs].sum())
        if self.builder.merging is not None:
            num_tokens = sum(plan.tokens_in(row) for rows in ranks for row in rows)
        return GlobalBatch(
            epoch=epoch + (step + 1) / len(plan),
            num_pairs=len(pairs),
            num_chosen_tokens=int(self.builder.table.chosen_lengths[pairs].sum()),
            num_rows=sum(len(rows) for rows in ranks),
            num_tokens=num_tokens,
            rows=[self.builder.build(row) for row in ranks[self.rank]],
        )

    @property
    def steps_fingerprint(self) -> str:
        """Names which pairs are in which step; how they are packed there does not change training."""
        plan = self.first_plan
        digest = hashlib.blake2b(plan.step_begins.astype("<i8").tobytes(), digest_size=16)
        steps = np.repeat(np.arange(len(plan)), np.diff(plan.step_begins))
        # Scope epoch puts the pairs of a step in the order of its rows, which is no matter here.
        order = plan.order if plan.row_begins is None else plan.order[np.lexsort((plan.order, steps))]
        digest.update(order.astype("<i8").tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch handed out."""
        self.next_step = int(state["next_step"])
