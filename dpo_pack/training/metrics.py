"""Metrics of a step or an evaluation: numbers that are kept for each pair, and averages over all pairs.

While a step runs, `pair_values` keeps numbers that the step computes anyway, one table line for each pair,
and does not wait for the device. When a metrics line is logged, the tables of all rows and ranks are joined:
no average depends on how the pairs were divided among rows and ranks.

A metric has TRL's name if TRL has the metric. For every loss, a reward is beta x (policy - reference) summed
log-probs, never divided by the length. Legend: P pairs of a table, [2 P] completions in the order chosen,
rejected, chosen, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.attention.segments import on_device
from dpo_pack.model.scorer import RowLogps
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.training.batches import PairRow
from dpo_pack.training.health import SIDES_95

# A pair is saturated if sigmoid(-margin), the factor in the sigmoid loss's gradient, is below this.
SATURATED_SLOPE = 0.01
SATURATED_MARGIN = math.log(1 / SATURATED_SLOPE - 1)  # 4.595
# Metric -> level; torch interpolates a quantile linearly between the two nearest pairs.
MARGIN_QUANTILES = {"rewards/margins_p10": 0.1, "rewards/margins_p50": 0.5, "rewards/margins_p90": 0.9}

# Metrics of a policy with a reference
LOGRATIOS = ("logratio/chosen", "logratio/rejected", "kl/chosen", "kl/rejected")

# Resamples of an interval: the most, and with many prompts at least so many, which draw at most _MAX_DRAWS.
NUM_RESAMPLES, _MIN_RESAMPLES, _MAX_DRAWS = 1000, 200, 50_000_000

# The numbers that are kept for each pair: its loss x weight, log-probs in nats, sums over tokens; `_variance`
# is that of a log-prob's rounding, in nats^2.
NAMES = (
    "loss", "policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected", "chosen_tokens",
    "rejected_tokens", "chosen_entropy", "rejected_entropy", "chosen_top1", "chosen_mean_logit",
    "rejected_mean_logit", "chosen_variance", "rejected_variance",
)  # fmt: skip


@torch.no_grad()
def pair_values(output: RowLogps, row: PairRow, losses: Tensor) -> Tensor:
    """Returns NAMES of each pair, [P, numbers kept] float64, detached. losses: [P] loss x weight."""
    of_pairs = output.statistics.view(-1, 2, 5)
    entropy, top1, mean_logit, _, variance = of_pairs.unbind(dim=2)  # [P, (chosen, rejected)]
    sums = (output.sums.view(-1, 2), row.reference, output.num_tokens.view(-1, 2).double())
    return torch.cat((losses[:, None], *sums, entropy, top1[:, :1], mean_logit, variance), dim=1)


def join_values(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Joins tables of `pair_values`, in the order of `parts`; without parts the table has no pairs."""
    return torch.cat([torch.zeros((0, len(NAMES)), dtype=torch.float64, device=device), *parts])


def column(values: Tensor, name: str) -> Tensor:
    """Returns [P] values of one of NAMES."""
    return values[:, NAMES.index(name)]


def margin_rounding(values: Tensor, *, beta: float) -> Tensor:
    """Returns an estimate of the rounding of each pair's reward margin, [P] standard deviations: errors of
    tokens are independent."""
    return beta * (column(values, "chosen_variance") + column(values, "rejected_variance")).sqrt()


def pair_metrics(values: Tensor, *, beta: float) -> dict[str, Tensor]:
    """Returns by name, for each metric that is a mean over pairs, the value of each pair, [P]."""
    loss, chosen, rejected, reference_chosen, reference_rejected, *tokens = values.unbind(dim=1)[:7]
    chosen_logratios, rejected_logratios = chosen - reference_chosen, rejected - reference_rejected
    chosen_rewards, rejected_rewards = beta * chosen_logratios, beta * rejected_logratios
    margins = chosen_rewards - rejected_rewards
    chosen_tokens, rejected_tokens = tokens
    # A tie counts as 0.5: a policy that equals its reference prefers neither completion. If policy and
    # reference were computed in different rows, its margin is only as near to zero as rounding allows.
    is_tie = margins.abs() <= margin_rounding(values, beta=beta)
    return {
        "loss": loss,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margins": margins,
        "rewards/accuracies": torch.where(is_tie, 0.5, (margins > 0).double()),
        "rewards/ties": is_tie.double(),
        "rewards/saturated": (margins > SATURATED_MARGIN).double(),
        "rewards/chosen_per_token": chosen_rewards / chosen_tokens,
        "rewards/rejected_per_token": rejected_rewards / rejected_tokens,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "logps/chosen_per_token": chosen / chosen_tokens,
        "logps/rejected_per_token": rejected / rejected_tokens,
        # Means of log pi - log pi_ref over completions, in nats; `kl/` are their names in the first preview.
        **dict(zip(LOGRATIOS, (chosen_logratios, rejected_logratios) * 2, strict=True)),
    }


def averages(values: Tensor, *, beta: float, has_reference: bool = True) -> dict[str, float]:
    """Returns all metrics by name, over all pairs of `values`. Waits for the device, once. Without a
    reference there are no log-ratios to it."""
    columns = pair_metrics(values, beta=beta)
    metrics = {name: of_pairs.mean() for name, of_pairs in columns.items()}
    margins = columns["rewards/margins"]
    levels = on_device(np.asarray(list(MARGIN_QUANTILES.values())), margins.device).to(margins.dtype)
    metrics |= zip(MARGIN_QUANTILES, torch.quantile(margins, levels).unbind(), strict=True)
    # Means over the completion tokens of all pairs together: a long completion counts more.
    totals = dict(zip(NAMES, values.sum(dim=0).unbind(), strict=True))
    chosen_tokens, rejected_tokens = totals["chosen_tokens"], totals["rejected_tokens"]
    entropy = totals["chosen_entropy"] + totals["rejected_entropy"]
    metrics |= {
        "entropy": entropy / (chosen_tokens + rejected_tokens),
        "mean_token_accuracy": totals["chosen_top1"] / chosen_tokens,
        "logits/chosen": totals["chosen_mean_logit"] / chosen_tokens,
        "logits/rejected": totals["rejected_mean_logit"] / rejected_tokens,
    }
    if not has_reference:
        metrics = {name: value for name, value in metrics.items() if name not in LOGRATIOS}
    numbers = torch.stack(list(metrics.values())).tolist()
    return dict(zip(metrics, numbers, strict=True))


def mean_intervals(
    values: FloatArray, *, seed: int, prompts: IntArray | None = None, num_resamples: int = NUM_RESAMPLES
) -> FloatArray:
    """Returns 95 % intervals of means: [P, M] values of P pairs -> [M, 2], lower and upper bound, by the
    bootstrap (percentiles; Efron & Tibshirani 1993, chapter 13). A resample draws prompts, [P] numbers (None:
    each pair has its own), each with all its pairs, because these resemble each other. Of very many prompts
    there are fewer resamples."""
    prompts = np.arange(len(values)) if prompts is None else prompts
    _, prompts, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    num_prompts, rng = len(sizes), np.random.default_rng(seed)
    sums = np.zeros((num_prompts, values.shape[1]))
    np.add.at(sums, prompts, values)
    means = np.empty((max(_MIN_RESAMPLES, min(num_resamples, _MAX_DRAWS // num_prompts)), values.shape[1]))
    for resample in means:
        drawn = rng.integers(0, num_prompts, num_prompts)
        resample[:] = sums[drawn].sum(axis=0) / sizes[drawn].sum()
    bounds: FloatArray = np.quantile(means, (0.025, 0.975), axis=0).T
    return bounds


def rate_interval(values: FloatArray, prompts: IntArray) -> tuple[list[float] | None, float]:
    """Returns the 95 % interval of the mean of [P] values 0, 0.5 (a tie) and 1, by Wilson (1927), None if all
    are ties; and as how many pairs of different prompts the P pairs count (design effect, Kish 1965)."""
    mean, (_, same) = float(values.mean()), np.unique(prompts, return_inverse=True)
    spread, together = (float((x**2).sum()) for x in (values - mean, np.bincount(same, values - mean)))
    number = len(values) * spread / max(spread, together) if spread else same.max() + 1.0
    return None if (values == 0.5).all() else wilson_interval(mean, number), round(float(number), 6)


def wilson_interval(mean: float, number: float) -> list[float]:
    """Returns the 95 % interval of the mean of so many independent values from 0 to 1, by Wilson (1927)."""
    over = SIDES_95**2 / number
    middle, half = mean + over / 2, math.sqrt(mean * (1 - mean) * over + over**2 / 4)
    return [max(0.0, (middle - half) / (1 + over)), min(1.0, (middle + half) / (1 + over))]
