"""DPO as a plain loop in float64, for where float32 is too coarse. Imports nothing from dpo_pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from support.oracle import completion_logps_one_by_one

TokenIds = tuple[Sequence[int], Sequence[int], Sequence[int]]  # prompt, chosen, rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Logratios and token counts of one pair."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: int
    rejected_tokens: int


Loss = Callable[[Pair], Tensor]


def discopop(pair: Pair) -> Tensor:
    x = 0.1 * (pair.chosen - pair.rejected)
    g = torch.sigmoid(x / 0.05)
    return -(1 - g) * logsigmoid(x) + g * torch.exp(-x)


def forward_kl(pair: Pair) -> Tensor:
    return -logsigmoid(0.1 * (torch.exp(-pair.rejected) - torch.exp(-pair.chosen)))


def sigmoid_norm(pair: Pair) -> Tensor:
    return -logsigmoid(5 * (pair.chosen / pair.chosen_tokens - pair.rejected / pair.rejected_tokens))


# Cases in which TRL's float32 may be further from the truth than the tolerance, each with its loss and beta.
COARSE_CASES: dict[str, tuple[Loss, float]] = {
    "discopop": (discopop, 0.1),
    "forward_kl": (forward_kl, 0.1),
    "sigmoid_norm": (sigmoid_norm, 5.0),
}


def plain_loop(directory: Path, pairs: Sequence[TokenIds], case: str) -> Iterator[dict[str, float]]:
    """Metrics of each step of 16 pairs: a sequence at a time, everything in float64."""
    loss, beta = COARSE_CASES[case]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float64)
        for name in ("policy", "reference")
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    for first in range(0, len(pairs), 16):
        total = 0.0
        rewards = np.zeros(2)
        for prompt, *completions in pairs[first : first + 16]:
            sequences = [(prompt, completion) for completion in completions]
            with torch.no_grad():
                reference_logps = completion_logps_one_by_one(reference, sequences)
            chosen, rejected = completion_logps_one_by_one(policy, sequences) - reference_logps
            tokens = [len(completion) for completion in completions]
            pair = Pair(chosen=chosen, rejected=rejected, chosen_tokens=tokens[0], rejected_tokens=tokens[1])
            value = loss(pair) / 16
            value.backward()
            total += value.item()
            rewards += beta * np.array([chosen.item(), rejected.item()]) / 16
        grad_norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        yield {
            "loss": total,
            "grad_norm": grad_norm,
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/margins": rewards[0] - rewards[1],
        }
