"""Global batches, their rows, and the source of batches from pairs on disk (online/source.py is the other).

Legend: P pairs of a row, S sequences, N scored tokens (tokens of completions).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.data.merging import merge_group
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.model.attention.segments import on_device
from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.packing.lengths import FloatArray, Group, IntArray, PromptMerging, common_prefix_length
from dpo_pack.packing.plan import PackingPlan, PlanSettings, epoch_order
from dpo_pack.system import ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """The pairs of one row, ready for the policy. The row's S sequences lie pair by pair (chosen, rejected,
    chosen, ...), unless one belongs to several pairs."""

    row: Row
    sequence_index: Tensor | None  # [2 P] int64, chosen and rejected of each pair; None: 0, 1, 2, ...
    token_index: Tensor | None  # [N] int64, scored tokens of those sequences; None: 0, 1, 2, ...
    token_weights: Tensor | None  # [N] float64, pair by pair: the factor of each token; None: all are 1
    reference: Tensor  # [P, (chosen, rejected)] float64, summed log-probs, nats
    reference_tokens: Tensor | None  # [N] per-token log-probs, pair by pair, where losses weigh tokens
    pair_weights: Tensor  # [P] float64, the weights in the data
    pair_indices: npt.NDArray[np.int64]  # [P] positions in the source's pairs or, online, prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The pairs of one optimizer step: those of this rank, in rows, and counts over all ranks."""

    epoch: float  # epochs finished after this step
    num_pairs: int  # over all ranks, as the two following values are
    num_tokens: int  # without padding; a shared prompt counts once
    mean_chosen_tokens: float  # of a pair of any rank; where tokens have weights, the sum of the weights
    rows: Sequence[PairRow]  # the rows of this rank
    row_pairs: Sequence[npt.NDArray[np.int64]]  # the pairs of each row of all ranks
    common_passes: int  # every rank has at least this many passes
    # This rank computes these after `rows`, with a gradient of zero, while other ranks still have rows.
    idle_rows: Sequence[Row] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics that the source adds to the step

    @property
    def pair_indices(self) -> npt.NDArray[np.int64]:
        """The pair indices of this rank's rows, one row after another."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row.pair_indices for row in self.rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs."""

    sums: FloatArray  # [P, (chosen, rejected)] sums over tokens, in nats; weighted, if tokens have weights
    # Per-token values of all sequences, if the loss or weights of tokens need them; and where those of each
    # pair begin and end.
    tokens: npt.NDArray[np.float32] | None = None
    spans: IntArray | None = None  # [P, (chosen, rejected), (begin, end)]


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
    reference: PairReference | None  # None: rows get zeros instead of log-probs
    is_packed: bool
    share_prompt: bool
    device: torch.device
    merging: PromptMerging | None = None  # merges the pairs of one prompt in a row into one group
    counts_copies: bool = False  # True: rows get `token_copies`, which the loss of a router needs

    def row_tokens(self) -> npt.NDArray[np.int64]:
        """Returns [all pairs of the table] how many tokens each pair takes in a row; plans use these."""
        lengths = pair_lengths(self.table)
        share = self.share_prompt
        return lengths.row_tokens(share_prompt=share) if self.is_packed else lengths.padded_tokens()

    def build(self, pairs: npt.NDArray[np.int64]) -> PairRow:
        """Builds the row of `pairs`, [P] positions in the table."""
        table = self.table
        in_order = sequences = np.arange(2 * len(pairs))
        if self.merging is None:
            groups = [table.group(pair) for pair in pairs.tolist()]
        else:
            groups, sequences = self._merged_groups(pairs, self.merging)
        if self.is_packed:
            row = packed_row(groups, self.device, share_prompt=self.share_prompt)
        else:
            row = padded_row(groups, device=self.device)
        if self.counts_copies:
            copies = token_copies(groups, sequences, is_packed=self.is_packed, share_prompt=self.share_prompt)
            row = replace(row, token_copies=on_device(copies, self.device))
        sums, tokens = np.zeros((len(pairs), 2)), None
        if self.reference is not None:
            sums = self.reference.sums[pairs]
            if self.reference.tokens is not None and self.reference.spans is not None:
                spans = self.reference.spans[pairs].reshape(-1, 2).tolist()  # of chosen, rejected, ...
                tokens = np.concatenate([self.reference.tokens[begin:end] for begin, end in spans])
        sequence_index = token_index = token_weights = None
        if not np.array_equal(sequences, in_order):
            lengths = np.array([len(completion) for group in groups for completion in group.completions])
            begins = np.cumsum(lengths) - lengths
            tokens_of = [np.arange(begins[s], begins[s] + lengths[s]) for s in sequences.tolist()]
            sequence_index = on_device(sequences, self.device)
            token_index = on_device(np.concatenate(tokens_of), self.device)
        if table.has_token_weights[pairs].any():
            weights = [of_side for pair in pairs.tolist() for of_side in table.token_weights(pair)]
            token_weights = self._put(np.concatenate(weights))
        return PairRow(
            row=row,
            sequence_index=sequence_index,
            token_index=token_index,
            token_weights=token_weights,
            reference=self._put(sums),
            reference_tokens=None if tokens is None else self._put(tokens),
            pair_weights=self._put(table.weights[pairs]),
            pair_indices=pairs,
        )

    def _merged_groups(self, pairs: IntArray, merging: PromptMerging) -> tuple[list[Group], IntArray]:
        """Returns the row's groups, and [2 P] positions of each pair's chosen and rejected sequence."""
        groups: list[Group] = []
        sequences = np.zeros((len(pairs), 2), dtype=np.int64)
        num_sequences = 0
        for positions in merging.groups_of(pairs):
            group, pair_completions = merge_group(self.table, pairs[positions].tolist())
            groups.append(group)
            sequences[positions] = num_sequences + pair_completions
            num_sequences += len(group.completions)
        return groups, sequences.ravel()

    def _put(self, values: npt.NDArray[np.floating]) -> Tensor:
        return on_device(values.astype(np.float64), self.device)


def token_copies(
    groups: Sequence[Group], sequences: npt.NDArray[np.int64], *, is_packed: bool, share_prompt: bool
) -> npt.NDArray[np.float32]:
    """Returns for each token of a row in how many of the pairs' sequences it is; 0 for padding: [T] in the
    order of `packed_row`, or [B * L] of a padded batch."""
    copies = iter(np.bincount(sequences).tolist())
    whole = [[np.concatenate((group.context, c)) for c in group.completions] for group in groups]
    longest = max(len(sequence) for of_group in whole for sequence in of_group)
    parts: list[tuple[int, int]] = []  # tokens, copies of each
    for of_group in whole:
        own = [next(copies) for _ in of_group]
        shared = common_prefix_length(of_group) if is_packed and share_prompt and len(own) > 1 else 0
        parts.append((shared, sum(own)))
        for sequence, count in zip(of_group, own, strict=True):
            parts.append((len(sequence) - shared, count))
            if not is_packed:
                parts.append((longest - len(sequence), 0))
    tokens, values = np.asarray(parts, dtype=np.int64).T
    return np.repeat(values, tokens).astype(np.float32)


def global_batch(
    builder: RowBuilder, plan: PackingPlan, step: int, *, rank: int, real_tokens: IntArray, epoch: float
) -> GlobalBatch:
    """Returns the batch of a step of the plan for one `rank`. real_tokens: [all pairs] without padding."""
    of_ranks, pairs = plan.pack_step(step), plan.pairs(step)
    num_tokens = int(real_tokens[pairs].sum())
    if builder.merging is not None:
        num_tokens = sum(plan.sizes.of_row(row).tokens for rows in of_ranks for row in rows)
    least_passes = max(map(len, of_ranks)) if plan.equal_rows else 1
    # A smaller row fits into the previous row's memory. Ranks that compute rows together wait less.
    largest_first = sorted(of_ranks[rank], key=lambda row: plan.sizes.of_row(row).tokens, reverse=True)
    idle_rows: list[Row] = []
    if len(largest_first) < least_passes:
        row = builder.build(pairs[[real_tokens[pairs].argmin()]]).row  # of the step's shortest pair
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

        def arrays() -> PackingPlan:
            plan = self.plan(0)
            return replace(plan, sizes=replace(plan.sizes, merging=None))

        plan = ranks.of_node(arrays)  # each rank merges prompts with its own `merging`
        sizes = replace(plan.sizes, merging=self.builder.merging)
        self.first_plan = replace(plan, sizes=sizes)
        if self.builder.is_packed:
            self.real_tokens = sizes.tokens
        if self.row_costs is not None:
            self.row_costs = sizes.costs
        self._planned = (0, self.first_plan)  # the newest epoch and its plan
        self._ahead: GlobalBatch | None = None  # of `next_step`, if it is made
        self._epoch_ends: list[int] = []  # the steps until the end of each epoch
        self.next_step = self.num_steps = 0
        for epoch in range(self.epochs):
            # With `packing.scope: epoch`, the new order of an epoch's pairs can need one row more.
            is_as_long = epoch == 0 or self.settings.rows_per_step is None
            self.num_steps += len(self.first_plan if is_as_long else self.plan(epoch))
            if self.max_steps is not None:
                self.num_steps = min(self.num_steps, self.max_steps)
            self._epoch_ends.append(self.num_steps)
            if self.num_steps == self.max_steps:
                break

    def order(self, epoch: int) -> IntArray:
        """Returns [E] the pairs of an epoch, from 0, in the order in which they are drawn."""
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
        return self.settings.plan(
            self.real_tokens if self.builder.is_packed else self.builder.row_tokens(),
            order=self.order(epoch),
            num_ranks=self.num_ranks,
            row_costs=self.row_costs,
            equal_rows=self.equal_rows,
            merging=self.builder.merging,
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
        epoch = bisect_right(self._epoch_ends, self.next_step)
        step = self.next_step - (self._epoch_ends[epoch - 1] if epoch else 0)
        if self._planned[0] != epoch:
            self._planned = (epoch, self.plan(epoch))
        _, plan = self._planned
        self._ahead = global_batch(
            self.builder,
            plan,
            step,
            rank=self.rank,
            real_tokens=self.real_tokens,
            epoch=epoch + (step + 1) / len(plan),
        )

    @property
    def steps_fingerprint(self) -> str:
        """A hash of the pairs of each step of the first epoch, whatever rows they are in."""
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
        self.next_step, self._ahead = int(state["next_step"]), None
