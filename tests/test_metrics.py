"""Metrics: hand-computed averages, exact over rows of unequal size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpo_pack.losses import PairLogps
from dpo_pack.metrics import averages, row_sums, zero_sums
from dpo_pack.models import RowLogps

CPU = torch.device("cpu")
BETA = 0.5


def alternate(chosen: list[float], rejected: list[float]) -> Tensor:
    """[P], [P] -> [S] in the order of a row: chosen, rejected, chosen, ..."""
    return torch.tensor([chosen, rejected], dtype=torch.float64).T.reshape(-1)


def sums_of(
    *,
    policy: tuple[list[float], list[float]],
    reference: tuple[list[float], list[float]],
    tokens: tuple[list[int], list[int]],
    losses: list[float],
    entropy: tuple[list[float], list[float]],
    top1: tuple[list[float], list[float]],
    mean_logit: tuple[list[float], list[float]],
) -> Tensor:
    """`row_sums` of a row given as (chosen, rejected) lists; entropy, top1, mean_logit summed over tokens."""
    num_tokens = alternate(*tokens).long()  # type: ignore[arg-type]
    output = RowLogps(
        sums=alternate(*policy),
        num_tokens=num_tokens,
        entropy_sums=alternate(*entropy),
        top1_sums=alternate(*top1),
        mean_logit_sums=alternate(*mean_logit),
    )
    pair_tokens = num_tokens.view(-1, 2)
    ours, theirs = (
        PairLogps(
            chosen=torch.tensor(chosen, dtype=torch.float64),
            rejected=torch.tensor(rejected, dtype=torch.float64),
            chosen_tokens=pair_tokens[:, 0],
            rejected_tokens=pair_tokens[:, 1],
        )
        for chosen, rejected in (policy, reference)
    )
    return row_sums(output, ours, theirs, torch.tensor(losses, dtype=torch.float64), beta=BETA)


def test_averages_of_two_pairs_by_hand() -> None:
    sums = sums_of(
        policy=([-10.0, -3.0], [-8.0, -9.0]),
        reference=([-12.0, -4.0], [-7.0, -5.0]),
        tokens=([4, 1], [2, 3]),
        losses=[0.25, 0.75],
        entropy=([4.0, 1.0], [3.0, 2.0]),
        top1=([3.0, 1.0], [0.0, 1.0]),
        mean_logit=([2.0, 0.5], [-1.0, -4.0]),
    )
    # Logratios: chosen 2 and 1, rejected -1 and -4; 5 chosen and 5 rejected tokens.
    assert averages(sums) == pytest.approx(
        {
            "loss": 0.5,
            "rewards/chosen": 0.75,
            "rewards/rejected": -1.25,
            "rewards/margins": 2.0,
            "rewards/accuracies": 1.0,
            "logps/chosen": -6.5,
            "logps/rejected": -8.5,
            "kl/chosen": 1.5,
            "kl/rejected": -2.5,
            "entropy": 1.0,
            "mean_token_accuracy": 0.8,
            "logits/chosen": 0.5,
            "logits/rejected": -1.0,
        }
    )


def test_a_tie_counts_half() -> None:
    zeros = [0.0, 0.0, 0.0, 0.0]
    sums = sums_of(
        policy=([-1.0, -2.0, -2.0, -2.0], [-2.0, -1.0, -2.0, -2.0]),  # right, wrong, and two ties
        reference=(zeros, zeros),
        tokens=([1, 1, 1, 1], [1, 1, 1, 1]),
        losses=zeros,
        entropy=(zeros, zeros),
        top1=(zeros, zeros),
        mean_logit=(zeros, zeros),
    )
    assert averages(sums)["rewards/accuracies"] == 0.5
    assert sums.dtype == torch.float64


def test_rows_of_unequal_size_add_up_to_the_mean_over_all_pairs_and_tokens() -> None:
    random = np.random.default_rng(0)
    rows = []
    for size in (1, 5, 2):
        draw = {
            name: (random.normal(size=size).tolist(), random.normal(size=size).tolist())
            for name in ("policy", "reference", "entropy", "top1", "mean_logit")
        }
        tokens = (random.integers(1, 30, size).tolist(), random.integers(1, 30, size).tolist())
        rows.append({**draw, "tokens": tokens, "losses": random.normal(size=size).tolist()})
    total = zero_sums(CPU)
    for row in rows:
        total += sums_of(**row)

    def every(name: str, side: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.concatenate([np.asarray(row[name][side], dtype=np.float64) for row in rows])

    chosen = BETA * (every("policy", 0) - every("reference", 0))
    rejected = BETA * (every("policy", 1) - every("reference", 1))
    tokens_of = [every("tokens", side).sum() for side in (0, 1)]
    got = averages(total)
    assert got["loss"] == pytest.approx(np.mean([loss for row in rows for loss in row["losses"]]), abs=1e-14)
    assert got["rewards/chosen"] == pytest.approx(chosen.mean(), abs=1e-14)
    assert got["rewards/margins"] == pytest.approx((chosen - rejected).mean(), abs=1e-14)
    assert got["rewards/accuracies"] == (chosen > rejected).mean()
    assert got["logps/rejected"] == pytest.approx(every("policy", 1).mean(), abs=1e-14)
    entropy = every("entropy", 0).sum() + every("entropy", 1).sum()
    assert got["entropy"] == pytest.approx(entropy / sum(tokens_of), abs=1e-14)
    assert got["mean_token_accuracy"] == pytest.approx(every("top1", 0).sum() / tokens_of[0], abs=1e-14)
    assert got["logits/rejected"] == pytest.approx(every("mean_logit", 1).sum() / tokens_of[1], abs=1e-14)


def test_no_rows_are_zeros_not_nan() -> None:
    assert set(averages(zero_sums(CPU)).values()) == {0.0}


def test_sums_keep_no_graph() -> None:
    chosen = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.int64)
    logps = PairLogps(chosen=chosen, rejected=chosen * 2, chosen_tokens=one, rejected_tokens=one)
    pairs = torch.ones(2, dtype=torch.float64)
    output = RowLogps(pairs, pairs.long(), pairs, pairs, pairs)
    assert not row_sums(output, logps, logps, chosen * 3, beta=BETA).requires_grad
