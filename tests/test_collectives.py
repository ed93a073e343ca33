"""What ranks tell each other: nothing on one process, and over two the same on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from dpo_pack.collectives import gather_and_place, gather_over_ranks, largest_over_ranks


def test_on_one_process_each_is_the_identity() -> None:
    values = torch.tensor([[1.0, 2.0]])
    for function in (gather_over_ranks, largest_over_ranks):
        assert torch.equal(function(values), values)
    assert gather_and_place(values) == (values, slice(0, 1))


def _check(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"file://{directory}/rendezvous")
    try:
        own = torch.full((rank, 2), float(rank), dtype=torch.float64)  # 0, 1 and 2 rows
        assert gather_over_ranks(own).tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert gather_over_ranks(torch.tensor([rank])).tolist() == [0, 1, 2]
        everything, place = gather_and_place(own)
        assert torch.equal(everything[place], own)
        one = torch.tensor(float(rank))
        assert float(largest_over_ranks(one)) == 2.0
        assert one == rank  # what was given is left alone
    finally:
        dist.destroy_process_group()


@pytest.mark.multiprocess
def test_over_ranks_with_different_numbers_of_rows_all_get_all(tmp_path: Path) -> None:
    spawn(_check, args=(str(tmp_path),), nprocs=3)
