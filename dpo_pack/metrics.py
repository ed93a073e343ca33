"""Metrics of a step or an evaluation, made from one table of values of its pairs.

While a step runs, `pair_values` only keeps what was computed anyway; nothing is averaged, and nothing waits
for the device, until a line is logged. Then the rows of all ranks become one table, and every average,
quantile and share is over all pairs of the global step, whatever rows and ranks they lay in.

Names follow TRL where TRL has one. Rewards are beta x (policy - reference) summed log-probs for every loss,
never length-normalised. docs/metrics.md defines each. Legend: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpo_pack.collectives import gather_over_ranks
from dpo_pack.losses import PairLogps
from dpo_pack.models import RowLogps

# What is kept of a pair, one column each. Statistics are sums over a completion's tokens.
_COLUMNS = (
    "loss",  # times the pair's weight
    "policy_chosen",
    "policy_rejected",
    "reference_chosen",
    "reference_rejected",
    "chosen_tokens",
    "rejected_tokens",
    "chosen_entropy",
    "rejected_entropy",
    "chosen_top1",
    "chosen_mean_logit",
    "rejected_mean_logit",
)
# A pair is saturated when the sigmoid loss would scale its gradient by less than this: sigmoid(-margin).
SATURATED_SLOPE = 0.01
SATURATED_MARGIN = math.log(1 / SATURATED_SLOPE - 1)  # 4.595
MARGIN_QUANTILES = {"rewards/margins_p10": 0.1, "rewards/margins_p50": 0.5, "rewards/margins_p90": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValues:
    """What was computed of P pairs: log-probs in nats, token counts, sums of statistics."""

    table: Tensor  # [P, columns] float64, detached

    def column(self, name: str) -> Tensor:
        """[P]: one of `_COLUMNS`."""
        return self.table[:, _COLUMNS.index(name)]

    @property
    def losses(self) -> Tensor:
        """[P]: each pair's loss times its weight."""
        return self.column("loss")

    def policy_logps(self) -> PairLogps:
        return self._logps("policy")

    def reference_logps(self) -> PairLogps:
        return self._logps("reference")

    def _logps(self, model: str) -> PairLogps:
        return PairLogps(
            chosen=self.column(f"{model}_chosen"),
            rejected=self.column(f"{model}_rejected"),
            chosen_tokens=self.column("chosen_tokens").long(),
            rejected_tokens=self.column("rejected_tokens").long(),
        )

    def select(self, indices: Tensor) -> PairValues:
        """The pairs at `indices`, in that order."""
        return PairValues(table=self.table[indices])

    def with_losses(self, losses: Tensor) -> PairValues:
        """The same pairs with other losses, [P]."""
        table = self.table.clone()
        table[:, _COLUMNS.index("loss")] = losses
        return PairValues(table=table)

    @staticmethod
    def join(parts: Sequence[PairValues]) -> PairValues:
        """The pairs of one or more rows, in their order."""
        return PairValues(table=torch.cat([part.table for part in parts]))

    @staticmethod
    def none(device: torch.device) -> PairValues:
        """No pairs yet."""
        return PairValues(table=torch.zeros((0, len(_COLUMNS)), dtype=torch.float64, device=device))

    def over_ranks(self) -> PairValues:
        """The pairs of every rank; on one process the same."""
        return PairValues(table=gather_over_ranks(self.table))


@torch.no_grad()
def pair_values(output: RowLogps, policy: PairLogps, reference: PairLogps, losses: Tensor) -> PairValues:
    """Keep what metrics of a row's pairs are made of. Queues work on the device, and waits for none.

    losses: [P], each pair's loss times its weight.
    """
    statistics = (output.entropy_sums, output.top1_sums, output.mean_logit_sums)
    entropy, top1, mean_logit = (sums.view(-1, 2).unbind(dim=1) for sums in statistics)
    columns = {
        "loss": losses,
        "policy_chosen": policy.chosen,
        "policy_rejected": policy.rejected,
        "reference_chosen": reference.chosen,
        "reference_rejected": reference.rejected,
        "chosen_tokens": policy.chosen_tokens,
        "rejected_tokens": policy.rejected_tokens,
        "chosen_entropy": entropy[0],
        "rejected_entropy": entropy[1],
        "chosen_top1": top1[0],
        "chosen_mean_logit": mean_logit[0],
        "rejected_mean_logit": mean_logit[1],
    }
    return PairValues(table=torch.stack([columns[name].double() for name in _COLUMNS], dim=1))


def pair_metrics(values: PairValues, *, beta: float) -> dict[str, Tensor]:
    """[P] each: the metrics that are means over pairs, before the mean is taken."""
    chosen_ratio = values.column("policy_chosen") - values.column("reference_chosen")
    rejected_ratio = values.column("policy_rejected") - values.column("reference_rejected")
    chosen, rejected = beta * chosen_ratio, beta * rejected_ratio
    chosen_tokens, rejected_tokens = values.column("chosen_tokens"), values.column("rejected_tokens")
    margins = chosen - rejected
    return {
        "loss": values.losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        # A tie counts half: a policy that has not moved yet prefers neither completion.
        "rewards/accuracies": (chosen > rejected).double() + 0.5 * (chosen == rejected),
        "rewards/saturated": (margins > SATURATED_MARGIN).double(),
        "rewards/chosen_per_token": chosen / chosen_tokens,
        "rewards/rejected_per_token": rejected / rejected_tokens,
        "logps/chosen": values.column("policy_chosen"),
        "logps/rejected": values.column("policy_rejected"),
        "logps/chosen_per_token": values.column("policy_chosen") / chosen_tokens,
        "logps/rejected_per_token": values.column("policy_rejected") / rejected_tokens,
        # Mean log pi - log pi_ref of a completion, nats: the k1 estimate of KL(policy || reference), which
        # is honest for completions that the policy itself would write and may be negative for others.
        "kl/chosen": chosen_ratio,
        "kl/rejected": rejected_ratio,
    }


def averages(values: PairValues, *, beta: float, has_reference: bool = True) -> dict[str, float]:
    """Metrics by name over all of the pairs. Waits for the device, once.

    Without a reference there is nothing to diverge from, and so no `kl/*`.
    """
    metrics = {name: column.mean() for name, column in pair_metrics(values, beta=beta).items()}
    metrics |= _margin_quantiles(values, beta=beta)
    metrics |= _token_averages(values)
    if not has_reference:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("kl/")}
    numbers = torch.stack(list(metrics.values())).tolist()
    return dict(zip(metrics, numbers, strict=True))


def _margin_quantiles(values: PairValues, *, beta: float) -> Mapping[str, Tensor]:
    """Linear between the two nearest pairs."""
    margins = pair_metrics(values, beta=beta)["rewards/margins"]
    levels = torch.tensor(list(MARGIN_QUANTILES.values()), dtype=margins.dtype, device=margins.device)
    return dict(zip(MARGIN_QUANTILES, torch.quantile(margins, levels).unbind(), strict=True))


def _token_averages(values: PairValues) -> Mapping[str, Tensor]:
    """Means over all completion tokens of the pairs, however they are spread over them."""
    totals = dict(zip(_COLUMNS, values.table.sum(dim=0).unbind(), strict=True))
    chosen_tokens, rejected_tokens = totals["chosen_tokens"], totals["rejected_tokens"]
    entropy = totals["chosen_entropy"] + totals["rejected_entropy"]
    return {
        "entropy": entropy / (chosen_tokens + rejected_tokens),
        "mean_token_accuracy": totals["chosen_top1"] / chosen_tokens,
        "logits/chosen": totals["chosen_mean_logit"] / chosen_tokens,
        "logits/rejected": totals["rejected_mean_logit"] / rejected_tokens,
    }
