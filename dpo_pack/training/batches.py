"""Global batches, the rows of a batch, and the interface of a source of batches.

There are two sources: pairs on disk (offline.py) and online rollouts (online/source.py).

Legend: P pairs of a row, S sequences, N scored tokens (tokens of completions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.data.merging import merge_group
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.losses import (
    Objective,
    PairLogps,
    ScoredPairs,
    length_desensitized_sums,
    length_desensitized_weights,
    wpo_weights,
)
from dpo_pack.model.attention.segments import on_device
from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.model.logps import sequence_sums
from dpo_pack.model.scorer import RowLogps
from dpo_pack.packing.lengths import FloatArray, Group, IntArray, PromptMerging, common_prefix_length
from dpo_pack.packing.plan import PackingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """The pairs of one row, ready for the policy.

    A pair is two of the row's S sequences. Usually they lie pair by pair (chosen, rejected, chosen, ...). If
    one sequence belongs to several pairs, `sequence_index` tells `score_pairs` which sequences each pair has.
    """

    row: Row
    sequence_index: Tensor | None  # [2 P] int64, chosen and rejected of each pair; None: 0, 1, 2, ...
    token_index: Tensor | None  # [N] int64, scored tokens of those sequences; None: 0, 1, 2, ...
    token_weights: Tensor | None  # [N] float64, pair by pair: the factor of each token; None: all are 1
    reference: Tensor  # [P, (chosen, rejected)] float64, summed log-probs, nats
    reference_tokens: Tensor | None  # [N] per-token log-probs, pair by pair, for LD-DPO
    pair_weights: Tensor  # [P] float64, the weights in the data
    pair_indices: npt.NDArray[np.int64]  # [P] positions in the source's table


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The pairs of one optimizer step: those of this rank, in rows, and counts over all ranks."""

    epoch: float  # epochs finished after this step
    num_pairs: int  # over all ranks, like the three following counts
    num_chosen_tokens: float  # the sum of the tokens' weights, which is their number where all count 1
    num_rows: int
    num_tokens: int  # without padding; a shared prompt counts once
    rows: Sequence[PairRow]  # the rows of this rank
    row_pairs: Sequence[npt.NDArray[np.int64]]  # the pairs of each row of all ranks
    # This rank computes these after `rows`, with a gradient of zero, while other ranks still have rows.
    idle_rows: Sequence[Row] = ()
    common_passes: int | None = None  # every rank has at least this many passes; None: there is one rank
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics that the source adds to the step

    @property
    def mean_chosen_tokens(self) -> float:
        """The number of chosen tokens of a pair, as a mean over pairs."""
        return self.num_chosen_tokens / self.num_pairs

    @property
    def pair_indices(self) -> npt.NDArray[np.int64]:
        """The pair indices of this rank's rows, one row after another."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(row.pair_indices for row in self.rows)])

    @property
    def num_passes(self) -> int:
        """The number of forward and backward passes of this rank."""
        return len(self.rows) + len(self.idle_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs."""

    sums: FloatArray  # [P, (chosen, rejected)] sums over tokens, in nats; weighted, if tokens have weights
    # Per-token values of all sequences, if the loss or weights of tokens need them; and where those of each
    # pair begin and end.
    tokens: npt.NDArray[np.float32] | None = None
    spans: IntArray | None = None  # [P, (chosen, rejected), (begin, end)]

    def token_logps(self, pairs: IntArray) -> npt.NDArray[np.float32] | None:
        """Returns [N] per-token log-probs, pair by pair, chosen first; None if there are no such values."""
        if self.tokens is None or self.spans is None:
            return None
        spans = self.spans[pairs].reshape(-1, 2).tolist()
        return np.concatenate([self.tokens[begin:end] for begin, end in spans])


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
        if not self.is_packed:
            return lengths.padded_tokens()
        return lengths.row_tokens(share_prompt=self.share_prompt)

    def build(self, pairs: npt.NDArray[np.int64]) -> PairRow:
        """Builds the row of `pairs`, [P] positions in the table."""
        groups, sequences = self._groups(pairs)
        if self.is_packed:
            row = packed_row(groups, self.device, share_prompt=self.share_prompt)
        else:
            row = padded_row(groups, device=self.device)
        if self.counts_copies:
            copies = token_copies(groups, sequences, is_packed=self.is_packed, share_prompt=self.share_prompt)
            row = replace(row, token_copies=on_device(copies, self.device))
        sums, tokens = np.zeros((len(pairs), 2)), None
        if self.reference is not None:
            sums, tokens = self.reference.sums[pairs], self.reference.token_logps(pairs)
        sequence_index = token_index = None
        if not np.array_equal(sequences, np.arange(2 * len(pairs))):
            lengths = np.array([len(completion) for group in groups for completion in group.completions])
            begins = np.cumsum(lengths) - lengths
            tokens_of = [np.arange(begins[s], begins[s] + lengths[s]) for s in sequences.tolist()]
            sequence_index = on_device(sequences, self.device)
            token_index = on_device(np.concatenate(tokens_of), self.device)
        token_weights = None
        if self.table.has_token_weights[pairs].any():
            weights = [of_side for pair in pairs.tolist() for of_side in self.table.token_weights(pair)]
            token_weights = self._put(np.concatenate(weights))
        return PairRow(
            row=row,
            sequence_index=sequence_index,
            token_index=token_index,
            token_weights=token_weights,
            reference=self._put(sums),
            reference_tokens=None if tokens is None else self._put(tokens),
            pair_weights=self._put(self.table.weights[pairs]),
            pair_indices=pairs,
        )

    def _groups(self, pairs: npt.NDArray[np.int64]) -> tuple[list[Group], npt.NDArray[np.int64]]:
        """Returns the row's groups, and [2 P] positions of each pair's chosen and rejected sequence."""
        groups: list[Group] = []
        if self.merging is None:
            for pair in pairs.tolist():
                groups.append(self.table.group(pair))
            return groups, np.arange(2 * len(pairs))
        sequences = np.zeros((len(pairs), 2), dtype=np.int64)
        num_sequences = 0
        for positions in self.merging.groups_of(pairs):
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
    """Returns for each token of a row in how many of the pairs' sequences it is; 0 for padding.

    [T] of a packed row, in the order of `packed_row`; [B * L] of a padded batch. A completion that belongs to
    several pairs counts for each of them, as if each pair was computed alone.
    """
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


def score_pairs(objective: Objective, output: RowLogps, row: PairRow) -> ScoredPairs:
    """Returns log-probs of policy and reference, weights and statistics, [P] each, of a row's pairs.

    `output` is what the policy computed. That of a sequence that belongs to several pairs is repeated.
    """
    output = _by_pair(output, row)
    num_tokens = output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    policy, reference = output.sums.view(-1, 2), row.reference
    pair_weights = row.pair_weights
    if objective.weighting == "wpo":
        pair_weights = pair_weights * wpo_weights(policy - output.log_square_sums.view(-1, 2), num_tokens)
    if objective.ld_alpha is not None:
        assert row.reference_tokens is not None, "the reference was frozen without per-token values"
        both = (output.token_logps, row.reference_tokens)
        if row.token_weights is None:
            policy, reference = (
                length_desensitized_sums(values, num_tokens, objective.ld_alpha) for values in both
            )
        else:
            lengths = row.row.completion_lengths
            lengths = lengths if row.sequence_index is None else lengths.index_select(0, row.sequence_index)
            weights = length_desensitized_weights(row.token_weights, lengths, objective.ld_alpha)
            policy, reference = (weighted_sums(values, weights, lengths).view(-1, 2) for values in both)
    statistics = (output.entropy_sums, output.top1_sums, output.mean_logit_sums)
    return ScoredPairs(
        policy=_pair_logps(policy, num_tokens),
        reference=_pair_logps(reference, num_tokens),
        pair_weights=pair_weights,
        statistics=torch.stack(statistics, dim=1).view(-1, 2, len(statistics)),
    )


def with_reference(row: PairRow, output: RowLogps) -> PairRow:
    """Returns the row with the reference's log-probs in it. `output` is what the reference computed."""
    output = _by_pair(output, row)
    return replace(row, reference=output.sums.view(-1, 2), reference_tokens=output.token_logps)


def _by_pair(output: RowLogps, row: PairRow) -> RowLogps:
    """Returns a row's outputs pair by pair: [2 P] chosen, rejected, ...; weighted if tokens have weights."""
    if row.sequence_index is not None and row.token_index is not None:
        sequences = {
            name: values.index_select(0, row.sequence_index)
            for name, values in output._asdict().items()
            if name not in ("token_logps", "token_statistics", "expert_counts", "expert_probs")
        }
        output = output._replace(
            **sequences,
            token_logps=output.token_logps.index_select(0, row.token_index),
            token_statistics=tuple(
                values.index_select(0, row.token_index) for values in output.token_statistics
            ),
        )
    if row.token_weights is None:
        return output
    lengths, weights = output.num_tokens, row.token_weights
    entropy, top1, mean_logit, log_squares = (
        weighted_sums(values, weights, lengths) for values in output.token_statistics
    )
    return output._replace(
        sums=weighted_sums(output.token_logps, weights, lengths),
        num_tokens=sequence_sums(weights, lengths),
        entropy_sums=entropy,
        top1_sums=top1,
        mean_logit_sums=mean_logit,
        log_square_sums=log_squares,
    )


def weighted_sums(token_values: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """Returns the weighted sum of each sequence's tokens, [S] float64, of [N] values and [N] weights.

    A token of weight zero adds nothing, also if its value is not finite.
    """
    return sequence_sums(token_values.double().masked_fill(weights == 0, 0.0) * weights, lengths)


def _pair_logps(sums: Tensor, num_tokens: Tensor) -> PairLogps:
    num_tokens = num_tokens.double()
    return PairLogps(
        chosen=sums[:, 0],
        rejected=sums[:, 1],
        chosen_tokens=num_tokens[:, 0],
        rejected_tokens=num_tokens[:, 1],
    )


def global_batch(
    builder: RowBuilder, plan: PackingPlan, step: int, *, rank: int, real_tokens: IntArray, epoch: float
) -> GlobalBatch:
    """Returns the batch of number `step` of the plan for one `rank`.

    real_tokens: [all pairs] tokens of each pair in a row, without padding.
    """
    of_ranks, pairs = plan.pack_step(step), plan.pairs(step)
    num_tokens = int(real_tokens[pairs].sum())
    if builder.merging is not None:
        num_tokens = sum(plan.tokens_in(row) for rows in of_ranks for row in rows)
    least_passes = max(map(len, of_ranks)) if plan.equal_rows else 1
    # A smaller row fits into the previous row's memory. Ranks that compute rows together wait less.
    largest_first = sorted(of_ranks[rank], key=plan.tokens_in, reverse=True)
    return GlobalBatch(
        epoch=epoch,
        num_pairs=len(pairs),
        num_chosen_tokens=float(builder.table.chosen_scored[pairs].sum()),
        num_rows=sum(map(len, of_ranks)),
        num_tokens=num_tokens,
        rows=[builder.build(row) for row in largest_first],
        row_pairs=[row for rows in of_ranks for row in rows],
        idle_rows=_idle_rows(builder, pairs[real_tokens[pairs].argmin()], least_passes - len(of_ranks[rank])),
        common_passes=max(least_passes, min(map(len, of_ranks))),
    )


def _idle_rows(builder: RowBuilder, shortest_pair: np.int64, num_rows: int) -> list[Row]:
    """Returns a row of the step's shortest pair, `num_rows` times; no row if `num_rows` is below 1."""
    if num_rows <= 0:
        return []
    row = builder.build(np.array([shortest_pair])).row
    if row.token_copies is not None:  # its tokens are counted in another row
        row = replace(row, token_copies=torch.zeros_like(row.token_copies))
    return [row] * num_rows
