"""Losses that couple pairs: whatever rows pairs lie in, the loss and its gradient are the whole step's."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.device_reads import no_reads
from support.loss_options import loss_options
from torch import Tensor

from dpo_pack.losses import LOSSES, Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.training.coupling import row_tangents

OBJECTIVE = Objective(
    terms=((LOSSES["aot"], 1.0), (LOSSES["sigmoid"], 0.5), (LOSSES["sft"], 0.1)),
    options=loss_options(beta=0.3, label_smoothing=0.1),
)
CPU = torch.device("cpu")
SIZES = (3, 1, 4)  # pairs of each row


def step_values() -> Tensor:
    """[8, 5]: policy chosen and rejected, reference chosen and rejected, weight of each pair."""
    generator = torch.Generator().manual_seed(0)
    logps = -20 * torch.rand(sum(SIZES), 4, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1, 1, 2, 0.5, 1, 0, 1, 1], dtype=torch.float64)
    return torch.cat((logps, weights[:, None]), dim=1)


def pairs_of(values: Tensor) -> ScoredPairs:
    tokens = torch.ones(len(values), dtype=torch.int64)
    policy, reference = (
        PairLogps(
            chosen=values[:, side], rejected=values[:, side + 1], chosen_tokens=tokens, rejected_tokens=tokens
        )
        for side in (0, 2)
    )
    return ScoredPairs(policy=policy, reference=reference, pair_weights=values[:, 4])


def whole_step() -> tuple[Tensor, Tensor]:
    """[8] losses and [8, 2] slopes of the step at once."""
    values = step_values().requires_grad_()
    losses = weighted_losses(OBJECTIVE, pairs_of(values), mean_chosen_tokens=2.0)
    (slopes,) = torch.autograd.grad(losses.sum(), values)
    return losses.detach(), slopes[:, :2]


def by_rows(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same through a tangent a row."""
    tangents = row_tangents(OBJECTIVE, [pairs_of(row) for row in rows], mean_chosen_tokens=2.0, device=CPU)
    losses, slopes = [], []
    for row, tangent in zip(rows, tangents, strict=True):
        row = row.clone().requires_grad_()
        value = tangent.losses(pairs_of(row).policy)
        losses.append(value.detach())
        slopes.append(torch.autograd.grad(value.sum(), row)[0][:, :2])
    return torch.cat(losses), torch.cat(slopes)


def test_tangents_of_rows_have_the_value_and_gradient_of_the_whole_step() -> None:
    with torch.no_grad():  # as in training, where the first phase computes no gradients
        rows = list(step_values().split(SIZES))
        pairs = [pairs_of(row) for row in rows]
        tangents = row_tangents(OBJECTIVE, pairs, mean_chosen_tokens=2.0, device=CPU)
    assert len(tangents) == 3 and not tangents[0].values.requires_grad
    for ours, expected in zip(by_rows(rows), whole_step(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_tangents_of_rows_wait_for_nothing() -> None:
    rows = [pairs_of(row) for row in step_values().split(SIZES)]
    with no_reads():
        row_tangents(OBJECTIVE, rows, mean_chosen_tokens=2.0, device=CPU)
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(AssertionError, match="waits"), no_reads():
        mask[mask]


def _on_a_rank(rank: int, port: int, directory: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = step_values().split(SIZES)
    torch.save(by_rows(list(rows[:2]) if rank == 0 else list(rows[2:])), Path(directory) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_pairs_are_coupled_over_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_on_a_rank, args=(port, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for index, expected in enumerate(whole_step()):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected, rtol=0, atol=1e-14)
