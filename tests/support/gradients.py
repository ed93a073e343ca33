"""Log-probs and gradients of rows, and whether two models have the same."""

from __future__ import annotations

import torch
from torch import Tensor

from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs import proof_groups
from support.groups import make_row
from support.tiny_models import VOCABULARY


def proof_rows(mode: str = "shared") -> list[Row]:
    """Four rows of the groups with which proofs are made."""
    torch.manual_seed(0)
    groups = proof_groups(VOCABULARY)
    return [make_row(part, mode) for part in (groups, groups[:1], groups[:2], groups[1:])]


def gradients(scorer: CompletionLogps, *rows: Row) -> tuple[Tensor, dict[str, Tensor]]:
    """[S] log-probs, and the gradient of a sum that weighs each sequence otherwise.

    All rows go forward before the first goes backward: what one leaves in a global, the next replaces.
    """
    torch.manual_seed(1)  # of dropout
    scorer.zero_grad(set_to_none=True)
    sums = torch.cat([scorer(row).sums for row in rows])
    (sums * torch.linspace(-1.0, 1.0, len(sums), device=sums.device)).sum().backward()
    return sums.detach(), {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads.values()])


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, bound: float = 1e-6) -> None:
    """`bound` of each tensor's norm."""
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= bound * theirs[name].norm() + 1e-9, name
