"""What a run minimises: a weighted sum of losses over the pairs of a step, and its pairs' weights.

Legend: P pairs, of a row or of a whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpo_pack.losses.interface import CoupledLoss, Loss, LossOptions, PairLogps


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of a run: its terms, each with its factor, and what modifies all of them."""

    terms: tuple[tuple[Loss | CoupledLoss, float], ...]
    options: LossOptions
    weighting: str | None = None  # "wpo": pairs are weighted by `wpo_weights` as well
    ld_alpha: float | None = None  # LD-DPO: factor of log-probs past the shorter completion's length

    @property
    def needs_reference(self) -> bool:
        return any(loss.needs_reference for loss, _ in self.terms)

    @property
    def couples_pairs(self) -> bool:
        """Whether a pair's value depends on the other pairs of the global step."""
        return any(isinstance(loss, CoupledLoss) for loss, _ in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPairs:
    """All that an objective asks of P pairs."""

    policy: PairLogps
    reference: PairLogps
    weights: Tensor  # [P] float64, detached

    def __len__(self) -> int:
        return len(self.weights)


def weighted_losses(objective: Objective, pairs: ScoredPairs, *, mean_chosen_tokens: float) -> Tensor:
    """[P]: each pair's part of the step's loss, which is their sum over the step / its number of pairs.

    `mean_chosen_tokens` is the global step's. An objective that couples pairs must be given all of them.
    """
    options = replace(objective.options, mean_chosen_tokens=mean_chosen_tokens)
    total = torch.zeros_like(pairs.weights)
    for loss, factor in objective.terms:
        match loss:
            case Loss():
                values = loss.function(pairs.policy, pairs.reference, options) * pairs.weights
            case CoupledLoss():
                values = loss.function(pairs.policy, pairs.reference, options, pairs.weights)
        total = total + factor * values
    return total


def wpo_weights(alignment: Tensor, num_tokens: Tensor) -> Tensor:
    """WPO, Zhou et al. 2024 (arXiv 2406.11827), eq. 2: how likely completions are to be the policy's own.

    [P, 2] sums over a completion's tokens of log p(y_t) - log sum_v p(v)^2, [P, 2] tokens -> [P] detached
    weights w(y_w|x) * w(y_l|x), w(y|x) = exp(mean over tokens of the former).
    """
    return torch.exp((alignment.detach() / num_tokens).sum(dim=1))


def length_desensitized_sums(token_logps: Tensor, num_tokens: Tensor, alpha: float) -> Tensor:
    """LD-DPO, Liu et al. 2024 (arXiv 2409.06411), sec. 3.2: log-probs past the common length count alpha.

    [N] per-token log-probs, chosen and rejected completions in turn, [P, 2] tokens of each -> [P, 2] float64
    sums: the first min(|y_w|, |y_l|) tokens of a completion in full, the others times alpha.
    """
    upto = torch.nn.functional.pad(token_logps.double().cumsum(0), (1, 0))  # [N + 1]
    ends = num_tokens.flatten().cumsum(0).view(-1, 2)
    starts = ends - num_tokens
    turns = starts + num_tokens.amin(dim=1, keepdim=True)
    return upto[turns] - upto[starts] + alpha * (upto[ends] - upto[turns])


def concatenate_pairs(parts: Sequence[ScoredPairs]) -> ScoredPairs:
    """The pairs of several rows, one after another."""
    return ScoredPairs(
        policy=_concatenate_logps([part.policy for part in parts]),
        reference=_concatenate_logps([part.reference for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
    )


def _concatenate_logps(parts: Sequence[PairLogps]) -> PairLogps:
    return PairLogps(
        chosen=torch.cat([part.chosen for part in parts]),
        rejected=torch.cat([part.rejected for part in parts]),
        chosen_tokens=torch.cat([part.chosen_tokens for part in parts]),
        rejected_tokens=torch.cat([part.rejected_tokens for part in parts]),
    )
