"""Metrics: hand-computed values, exact over rows of unequal size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.device_reads import no_reads
from torch import Tensor

from dpo_pack.model.scorer import RowLogps
from dpo_pack.training.batches import PairRow
from dpo_pack.training.metrics import averages, join_values, pair_values, rate_interval

BETA, CPU = 0.5, torch.device("cpu")


def values_of(
    *,
    policy: tuple[list[float], list[float]],
    reference: tuple[list[float], list[float]],
    tokens: tuple[list[int], list[int]],
    losses: list[float],
    entropy: tuple[list[float], list[float]],
    top1: tuple[list[float], list[float]],
    mean_logit: tuple[list[float], list[float]],
    variance: float = 0.0,
) -> Tensor:
    """Of a row given as (chosen, rejected) lists; entropy, top1, mean_logit summed over tokens."""

    def completions(sides: Any) -> Tensor:
        return torch.tensor(sides, dtype=torch.float64).T.flatten()

    statistics = [completions(sides) for sides in (entropy, top1, mean_logit)]
    nans = torch.full_like(statistics[0], torch.nan)
    nothing = torch.zeros(0)
    output = RowLogps(
        sums=completions(policy),
        num_tokens=completions(tokens).long(),
        token_logps=nothing,
        statistics=torch.stack([*statistics, nans, torch.full_like(nans, variance)], dim=1),
        expert_counts=nothing,
        expert_probs=nothing,
    )
    row = PairRow(
        row=None,  # type: ignore[arg-type]
        reference=completions(reference).view(-1, 2),
        pair_weights=torch.ones(len(losses)),
        pair_indices=np.arange(len(losses)),
        score_margins=np.zeros(len(losses)),
    )
    return pair_values(output, row, torch.tensor(losses, dtype=torch.float64))


def margins_only(margins: list[float]) -> Tensor:
    """Pairs of one token a side that have these reward margins and nothing else."""
    zeros = [0.0] * len(margins)
    return values_of(
        policy=([margin / BETA for margin in margins], zeros),
        reference=(zeros, zeros),
        tokens=([1] * len(margins), [1] * len(margins)),
        losses=zeros,
        entropy=(zeros, zeros),
        top1=(zeros, zeros),
        mean_logit=(zeros, zeros),
    )


def test_averages_of_two_pairs_by_hand() -> None:
    values = values_of(
        policy=([-10.0, -3.0], [-8.0, -9.0]),
        reference=([-12.0, -4.0], [-7.0, -5.0]),
        tokens=([4, 1], [2, 3]),
        losses=[0.25, 0.75],
        entropy=([4.0, 1.0], [3.0, 2.0]),
        top1=([3.0, 1.0], [0.0, 1.0]),
        mean_logit=([2.0, 0.5], [-1.0, -4.0]),
    )
    # Logratios: chosen 2 and 1, rejected -1 and -4; margins 1.5 and 2.5; 5 chosen and 5 rejected tokens.
    expected = {
        "loss": 0.5,
        "rewards/chosen": 0.75,
        "rewards/rejected": -1.25,
        "rewards/margins": 2.0,
        "rewards/margins_p10": 1.6,
        "rewards/margins_p50": 2.0,
        "rewards/margins_p90": 2.4,
        "rewards/accuracies": 1.0,
        "rewards/ties": 0.0,
        "rewards/saturated": 0.0,
        "rewards/chosen_per_token": (1 / 4 + 0.5 / 1) / 2,
        "rewards/rejected_per_token": (-0.5 / 2 - 2 / 3) / 2,
        "logps/chosen": -6.5,
        "logps/rejected": -8.5,
        "logps/chosen_per_token": (-10 / 4 - 3 / 1) / 2,
        "logps/rejected_per_token": (-8 / 2 - 9 / 3) / 2,
        **{"logratio/chosen": 1.5, "logratio/rejected": -2.5, "kl/chosen": 1.5, "kl/rejected": -2.5},
        "entropy": 1.0,
        "mean_token_accuracy": 0.8,
        "logits/chosen": 0.5,
        "logits/rejected": -1.0,
    }
    found = averages(values, beta=BETA)
    added = found.keys() - expected.keys()
    assert not added, f"averages() also has {added}: add its value here and a row to docs/metrics.md"
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_only_a_margin_within_its_rounding_is_a_tie(sign: int) -> None:
    """A sum of variance 0.04 rounds by 0.2 nats, a margin by root(2) of that."""
    bound = math.sqrt(2) * 0.2
    for part, expected in ((0.0, 0.5), (0.99, 0.5), (1.01, 1.0 if sign > 0 else 0.0)):
        values = values_of(
            policy=([-384.0], [-384.0]),
            reference=([-384.0 - sign * part * bound], [-384.0]),
            tokens=([256], [256]), variance=0.04,
            losses=[0.0], entropy=([0.0], [0.0]), top1=([0.0], [0.0]), mean_logit=([0.0], [0.0]),
        )  # fmt: skip
        assert averages(values, beta=BETA)["rewards/accuracies"] == expected


def test_rows_of_unequal_size_make_the_mean_over_all_pairs_and_tokens() -> None:
    random = np.random.default_rng(0)
    names = ("policy", "reference", "entropy", "top1", "mean_logit")
    every: dict[str, Any] = {name: random.normal(size=(2, 8)) for name in names}
    every |= {"tokens": random.integers(1, 30, (2, 8)), "losses": random.normal(size=8)}
    rows = [
        values_of(**{name: values[..., part].tolist() for name, values in every.items()})
        for part in (slice(0, 1), slice(1, 6), slice(6, 8))
    ]
    got = averages(join_values(rows, CPU), beta=BETA)
    chosen, rejected = BETA * (every["policy"] - every["reference"])
    chosen_tokens, rejected_tokens = every["tokens"]
    expected = {
        "loss": every["losses"].mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "rewards/chosen_per_token": (chosen / chosen_tokens).mean(),
        "logps/rejected": every["policy"][1].mean(),
        "entropy": every["entropy"].sum() / every["tokens"].sum(),
        "mean_token_accuracy": every["top1"][0].sum() / chosen_tokens.sum(),
        "logits/rejected": every["mean_logit"][1].sum() / rejected_tokens.sum(),
        **{f"rewards/margins_p{p}": np.percentile(chosen - rejected, p) for p in (10, 50, 90)},
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected, abs=1e-14)


def test_keeping_values_reads_nothing_from_the_device() -> None:
    with no_reads():
        margins_only([1.0, 2.0])
    with pytest.raises(AssertionError, match="waits"), no_reads():
        float(torch.ones(()))


@pytest.mark.parametrize(
    ("values", "prompts", "interval", "number"),
    [
        ([1.0] * 9 + [0.0], range(10), (0.5958, 0.9821), 10),  # 9 of 10, as in tables of Wilson's interval
        ([1.0] * 10, range(10), (0.7225, 1.0), 10),
        ([0.0] * 10, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], (0.0, 0.4345), 5),  # of 0 of 5 prompts
        ([1.0, 1.0, 0.0, 0.0], [7, 7, 3, 3], (0.0945, 0.9055), 2),  # pairs of a prompt are alike
        ([1.0, 0.0, 1.0, 0.0], [7, 7, 3, 3], (0.1500, 0.8500), 4),  # and here they are not
        ([0.5] * 4, range(4), None, 4),
        ([0.5] * 3 + [1.0], range(4), (0.2194, 0.9081), 4),
    ],
)
def test_the_interval_of_a_rate_is_wilson_s_of_as_many_pairs_as_are_independent(
    values: list[float], prompts: Any, interval: tuple[float, float] | None, number: float
) -> None:
    found, independent = rate_interval(np.array(values), np.array(prompts))
    assert found == (None if interval is None else pytest.approx(interval, abs=1e-4))
    assert independent == pytest.approx(number)
