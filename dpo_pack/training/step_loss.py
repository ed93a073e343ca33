"""The loss of a step: the mean over its pairs of weight * l(pair), and a mixture's load-balancing loss.

For each expert the load-balancing loss multiplies two sums over all tokens of the step (model/facts.py): the
times that it is chosen, which has no gradient, and its probabilities. So the counts of all rows and ranks are
needed before the first backward pass, and each row adds its own part. A rank's first row is counted by its
training forward pass, later rows by a pass without gradients at the start of the step.

The training loop of such a model looks like that of any other: `ExpertBalance.policy` computes what the
policy does, and a backward pass through its log-probs also adds the gradient of the row's part.

Legend: P pairs of a row, E experts, R layers with a router.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpo_pack.losses.preference import Objective, PairLogps, wpo_weights
from dpo_pack.model.facts import RouterBalance
from dpo_pack.model.layout import Row
from dpo_pack.model.parallel import DistributedPolicy
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.system import ranks
from dpo_pack.training.batches import PairRow


def pair_losses(objective: Objective, output: RowLogps, row: PairRow, mean_chosen_tokens: float) -> Tensor:
    """Returns weight * l(pair) of each pair, [P] float64, differentiable in what the policy has computed.
    `mean_chosen_tokens`: of the pairs of the global step."""
    policy, num_tokens = output.sums.view(-1, 2), output.num_tokens.view(-1, 2)  # [P, (chosen, rejected)]
    counts = dict(zip(("chosen_tokens", "rejected_tokens"), num_tokens.double().unbind(dim=1), strict=True))
    losses = objective(
        PairLogps(chosen=policy[:, 0], rejected=policy[:, 1], **counts),
        PairLogps(chosen=row.reference[:, 0], rejected=row.reference[:, 1], **counts),
        mean_chosen_tokens=mean_chosen_tokens,
    )
    weights = row.pair_weights
    if objective.weighting == "wpo":
        log_squares = output.statistics[:, 3].view(-1, 2)
        weights = weights * wpo_weights(policy - log_squares, num_tokens)
    return losses * weights


@dataclass(slots=True, kw_only=True)
class ExpertBalance:
    """Collects the expert counts and the load-balancing loss of one step after the other."""

    settings: RouterBalance
    scorer: CompletionLogps
    alone: DistributedPolicy  # the policy without this loss
    counts: Tensor | None = None  # [R, E] float64: times each expert is chosen so far in the step
    is_complete: bool = False  # whether `counts` are those of the whole step
    aux_loss: Tensor | None = None  # [] float64: of this rank's rows so far, without coefficient

    @property
    def policy(self) -> DistributedPolicy:
        """The policy, whose log-probs carry the gradient of this loss."""
        return replace(self.alone, forward=self._forward, step=self._step)

    @contextlib.contextmanager
    def _step(self, rows: Sequence[Row]) -> Iterator[None]:
        """Context of a step's passes. Begins it with the counts of all `rows` but the first."""
        self.counts, self.is_complete, self.aux_loss = None, False, None
        with self.alone.step(rows):
            for row in rows[1:]:
                self._add(self.scorer.with_own_weights(partial(self.scorer.expert_counts, row)))
            yield

    def _forward(self, row: Row) -> RowLogps:
        output = self.alone.forward(row)
        if not self.is_complete:  # the first pass of the step, which every rank has
            self._add(output.expert_counts)
            assert self.counts is not None
            self.counts, self.is_complete = ranks.sum_over_ranks(self.counts), True
        sums: Tensor = _WithLoss.apply(output.sums, self._row_loss(output))  # type: ignore[no-untyped-call]
        return output._replace(sums=sums)

    def _add(self, counts: Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts

    def _row_loss(self, output: RowLogps) -> Tensor:
        """Returns [] float64: this row's part of coefficient x aux loss x number of ranks, which average."""
        assert self.counts is not None
        num_tokens = self.counts.sum() / self.settings.top_k  # tokens of the step x layers
        fractions = self.counts.sum(dim=0) / num_tokens  # [E]
        part = len(fractions) * (fractions * output.expert_probs).sum() / num_tokens
        self.aux_loss = part.detach() if self.aux_loss is None else self.aux_loss + part.detach()
        return self.settings.coefficient * ranks.num_ranks() * part

    def metrics(self, loss: float) -> dict[str, float]:
        """Returns the step's metrics of expert load, and its `loss` with this one. Waits for the device;
        every rank must call it."""
        assert self.counts is not None
        shares = self.counts / self.counts.mean(dim=1, keepdim=True)
        own = self.counts.new_zeros(()) if self.aux_loss is None else self.aux_loss
        names = ("aux_loss", "experts/max_load", "experts/min_load", "experts/unused")
        unused = (self.counts == 0).double().mean()
        values = torch.stack((ranks.sum_over_ranks(own), shares.max(), shares.min(), unused))
        metrics = dict(zip(names, values.tolist(), strict=True))
        return {"loss": loss + self.settings.coefficient * metrics["aux_loss"], **metrics}


class _WithLoss(torch.autograd.Function):
    """Returns `values`, through which a backward pass also adds the gradient of `loss`, []."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return grads[0], one
