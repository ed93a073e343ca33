"""Metrics of a step or an evaluation: sums over rows and ranks first, one division at the end.

Names follow TRL where TRL has one. Rewards are beta x (policy - reference) summed log-probs for every
loss, never length-normalised. Legend: P pairs of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpo_pack.losses import PairLogps, chosen_logratio, rejected_logratio
from dpo_pack.models import RowLogps

# metric -> what its sum is divided by
_DENOMINATORS = {
    "loss": "pairs",
    "rewards/chosen": "pairs",
    "rewards/rejected": "pairs",
    "rewards/margins": "pairs",
    "rewards/accuracies": "pairs",
    "logps/chosen": "pairs",
    "logps/rejected": "pairs",
    # Mean log pi - log pi_ref of a completion, nats: the k1 estimate of KL(policy || reference), which is
    # honest for completions that the policy itself would write and may be negative for others.
    "kl/chosen": "pairs",
    "kl/rejected": "pairs",
    "entropy": "tokens",
    "mean_token_accuracy": "chosen_tokens",
    "logits/chosen": "chosen_tokens",
    "logits/rejected": "rejected_tokens",
}
_SUM_NAMES = (*_DENOMINATORS, "pairs", "tokens", "chosen_tokens", "rejected_tokens")


@torch.no_grad()
def row_sums(
    output: RowLogps, policy: PairLogps, reference: PairLogps, losses: Tensor, *, beta: float
) -> Tensor:
    """What one row adds to each metric: a float64 vector that rows and ranks add up, on the device.

    losses: [P], each pair's loss times its weight.
    """
    chosen_ratio, rejected_ratio = chosen_logratio(policy, reference), rejected_logratio(policy, reference)
    chosen, rejected = beta * chosen_ratio, beta * rejected_ratio
    statistics = (output.entropy_sums, output.top1_sums, output.mean_logit_sums)
    entropy, top1, mean_logit = (sums.view(-1, 2).sum(dim=0) for sums in statistics)
    values = {
        "loss": losses.sum(),
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": (chosen - rejected).sum(),
        # A tie counts half: a policy that has not moved yet prefers neither completion.
        "rewards/accuracies": (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum(),
        "logps/chosen": policy.chosen.sum(),
        "logps/rejected": policy.rejected.sum(),
        "kl/chosen": chosen_ratio.sum(),
        "kl/rejected": rejected_ratio.sum(),
        "entropy": entropy.sum(),
        "mean_token_accuracy": top1[0],
        "logits/chosen": mean_logit[0],
        "logits/rejected": mean_logit[1],
        "pairs": torch.ones_like(losses).sum(),
        "tokens": output.num_tokens.sum(),
        "chosen_tokens": policy.chosen_tokens.sum(),
        "rejected_tokens": policy.rejected_tokens.sum(),
    }
    return torch.stack([values[name].double() for name in _SUM_NAMES])


def zero_sums(device: torch.device) -> Tensor:
    return torch.zeros(len(_SUM_NAMES), dtype=torch.float64, device=device)


def averages(sums: Tensor) -> dict[str, float]:
    """Sums over all rows and ranks -> metrics by name. Waits for the device."""
    values: Mapping[str, float] = dict(zip(_SUM_NAMES, sums.tolist(), strict=True))
    return {name: values[name] / max(values[unit], 1.0) for name, unit in _DENOMINATORS.items()}
