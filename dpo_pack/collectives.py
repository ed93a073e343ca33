"""What ranks tell each other for metrics and health. On one process each function is the identity."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dpo_pack import ranks


def gather_over_ranks(rows: Tensor) -> Tensor:
    """Every rank's `rows` one after another, on every rank. Ranks may have different numbers of them.

    rows: [n, ...] -> [sum of n over ranks, ...]. Waits for the device, to know how many each rank has.
    """
    return gather_and_place(rows)[0]


def gather_and_place(rows: Tensor) -> tuple[Tensor, slice]:
    """`gather_over_ranks`, and where this rank's own rows are in it."""
    if ranks.num_ranks() == 1:
        return rows, slice(0, len(rows))
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(ranks.num_ranks())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes: list[int] = torch.cat(counts).tolist()
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    first = sum(sizes[: ranks.rank()])
    together = torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
    return together, slice(first, first + len(rows))


def largest_over_ranks(values: Tensor) -> Tensor:
    """The largest of all ranks' values, elementwise. Waits for nothing on the host."""
    if ranks.num_ranks() == 1:
        return values
    largest = values.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
