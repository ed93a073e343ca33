"""The load-balancing loss of a mixture of experts, taken over all tokens of a step.

For each expert the loss multiplies two sums over all tokens of the step (model/facts.py): the times that it
is chosen, which has no gradient, and its probabilities. So the counts of all rows and ranks must be known
before the first backward pass, and each row adds its own part. The training forward pass of a rank's first
row counts this row's choices, a pass without gradients at the start of the step those of all later rows.

Legend: E experts, R layers with a router.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpo_pack.model.facts import RouterBalance
from dpo_pack.model.scorer import RowLogps
from dpo_pack.system import ranks


@dataclass(slots=True, kw_only=True)
class StepBalance:
    """Collects the expert counts and the load-balancing loss of one step."""

    settings: RouterBalance
    counts: Tensor | None = None  # [R, E] float64: times each expert is chosen so far
    is_complete: bool = False  # whether `counts` are those of the whole step
    aux_loss: Tensor | None = None  # [] float64: of this rank's rows so far, without coefficient

    def add(self, counts: Tensor) -> None:
        """Adds a row's counts of chosen experts, [R, E]."""
        self.counts = counts if self.counts is None else self.counts + counts

    def complete(self, output: RowLogps) -> None:
        """Adds the counts of this rank's first row, then sums over ranks. All ranks call it once a step."""
        self.add(output.expert_counts)
        assert self.counts is not None
        self.counts, self.is_complete = ranks.sum_over_ranks(self.counts), True

    def row_loss(self, output: RowLogps) -> Tensor:
        """Returns [] float64: this row's part of coefficient x aux loss x number of ranks, which average."""
        assert self.is_complete and self.counts is not None
        num_tokens = self.counts.sum() / self.settings.top_k  # tokens of the step x layers
        fractions = self.counts.sum(dim=0) / num_tokens  # [E]
        part = len(fractions) * (fractions * output.expert_probs).sum() / num_tokens
        self.aux_loss = part.detach() if self.aux_loss is None else self.aux_loss + part.detach()
        return self.settings.coefficient * ranks.num_ranks() * part

    def metrics(self) -> dict[str, float]:
        """Returns the step's metrics of expert load. Waits for the device; every rank must call it."""
        assert self.counts is not None
        shares = self.counts / self.counts.mean(dim=1, keepdim=True)
        own = self.counts.new_zeros(()) if self.aux_loss is None else self.aux_loss
        names = ("aux_loss", "experts/max_load", "experts/min_load", "experts/unused")
        unused = (self.counts == 0).double().mean()
        values = torch.stack((ranks.sum_over_ranks(own), shares.max(), shares.min(), unused))
        return dict(zip(names, values.tolist(), strict=True))
