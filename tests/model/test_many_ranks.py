"""Shards of 64 ranks, seen from rank 0: torch's fake process group answers for the other 63."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.file_operations import in_forks
from support.groups import CPU, make_row, random_groups
from support.marks import slow
from support.tiny_run import tiny_run
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpo_pack.model.building import load_model
from dpo_pack.model.parallel import distribute_policy
from dpo_pack.model.scorer import Precision
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import choose_strategy, resolve_model
from dpo_pack.system import ranks

NUM_RANKS, A_NODE = 64, 8


@contextmanager
def many_ranks() -> Iterator[None]:
    """This process is rank 0 of 64, on nodes of 8. Collectives return at once and bring nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ, LOCAL_WORLD_SIZE=str(A_NODE)))
        patch.setattr(ranks, "every_rank_says", lambda value, group=None: [value] * NUM_RANKS)
        patch.setattr(ranks, "first_says", lambda value: value)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _shard(recipe_path: Path, autocast: torch.dtype | None, *overrides: str) -> dict[str, Any]:
    with many_ranks():
        recipe = load_recipe(recipe_path, ["distributed.strategy=fsdp2", *overrides])
        facts = replace(
            resolve_model(recipe, CPU), precision=Precision(parameters=torch.float32, autocast=autocast)
        )
        strategy = choose_strategy(recipe, facts, CPU)
        loaded = load_model(facts, device=CPU, strategy=strategy)
        policy = distribute_policy(loaded.scorer, strategy)
        for is_last in (False, True):
            with policy.accumulating(is_last=is_last):
                policy(make_row(random_groups((9, 5, 7)))).sums.sum().backward()
        shards: dict[str, Any] = {}
        for name, parameter in loaded.scorer.named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
            local = parameter.to_local()
            assert parameter.grad.to_local().shape == local.shape, name
            shards[name] = (tuple(parameter.shape), tuple(local.shape))
        assert strategy.mesh is not None
        return {"mesh": tuple(strategy.mesh.shape), "names": strategy.mesh.mesh_dim_names, "shards": shards}


@pytest.mark.multiprocess
@pytest.mark.parametrize("autocast", [None, *slow(torch.bfloat16)])
@pytest.mark.parametrize(
    ("overrides", "mesh", "parts"),
    [
        ((), (NUM_RANKS,), NUM_RANKS),
        (("distributed.accumulate_unsharded=true",), (NUM_RANKS,), NUM_RANKS),
        (("distributed.hybrid=true",), (NUM_RANKS // A_NODE, A_NODE), A_NODE),
    ],
    ids=["sharded", "whole gradients", "hybrid"],
)
def test_a_rank_of_64_holds_its_part_of_every_weight_and_gradient(
    overrides: tuple[str, ...],
    mesh: tuple[int, ...],
    parts: int,
    autocast: torch.dtype | None,
    tmp_path: Path,
) -> None:
    recipe = tiny_run(tmp_path)
    (seen,) = in_forks([lambda: _shard(recipe, autocast, *overrides)])
    assert seen["mesh"] == mesh and seen["names"] == ("replicate", "shard")[-len(mesh) :]
    assert seen["shards"]
    for whole, local in seen["shards"].values():
        assert local == (-(-whole[0] // parts), *whole[1:])  # rank 0 has a full part
