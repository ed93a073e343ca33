"""What only a GPU shows of whole models: gradients of other kernels, determinism, strategies on NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from rich.console import Console
from support.run_files import assert_same_run
from support.tiny_run import tiny_run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dpo_pack.model.building import load_model
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.parallel import ALONE, Strategy, distribute_policy
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.proofs import proof_groups
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.models import resolve_model
from dpo_pack.trainer import train

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def load(recipe_path: Path, *overrides: str, strategy: Strategy = ALONE) -> LoadedModel:
    recipe = load_recipe(recipe_path, ["model.compile=false", *overrides])
    return load_model(resolve_model(recipe, CUDA), device=CUDA, strategy=strategy)


def a_row(loaded: LoadedModel) -> Row:
    torch.manual_seed(0)
    return packed_row(proof_groups(loaded.model.config.vocab_size), CUDA, share_prompt=True)


class PreparesForOneRank:
    """Stands in for an Accelerator, which wraps no model in DDP where there is one process."""

    ddp_handler: DistributedDataParallelKwargs

    def prepare_model(self, model: Any, *, device_placement: bool) -> DistributedDataParallel:
        return DistributedDataParallel(model, **self.ddp_handler.to_kwargs())


def gradient(loaded: LoadedModel, strategy: Strategy = ALONE) -> Tensor:
    accelerator: Any = PreparesForOneRank()
    sums = distribute_policy(loaded.scorer, strategy, accelerator=accelerator).forward(a_row(loaded)).sums
    (sums * torch.linspace(-1.0, 1.0, len(sums), device=CUDA)).sum().backward()
    grads = [p.grad for _, p in sorted(loaded.model.named_parameters()) if p.grad is not None]
    return torch.cat([getattr(grad, "full_tensor", grad.clone)().flatten().cpu() for grad in grads])


def test_compiled_layers_give_the_gradients_of_plain_ones_within_bf16(tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    plain, other = gradient(load(recipe)), gradient(load(recipe, "model.compile=true"))
    assert (other - plain).norm() <= 2e-2 * plain.norm()


def test_a_run_repeated_has_the_same_bits(tmp_path: Path, console: Console) -> None:
    recipe = tiny_run(tmp_path)
    if load(recipe).attention.name == "sdpa":
        pytest.skip("the backward pass of sdpa adds atomically")
    for name in ("one", "two"):
        overrides = ["model.compile=false", f"output_dir={tmp_path / name}", "reference.cache_dir=null"]
        train(load_recipe(recipe, overrides), console)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "offload"])
def test_one_rank_on_nccl_has_the_bits_of_one_process(kind: str, tmp_path: Path) -> None:
    recipe = tiny_run(tmp_path)
    expected = gradient(load(recipe))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        if kind == "ddp":
            strategy = Strategy(name="ddp", reason="a test")
        else:
            mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
            strategy = Strategy(name="fsdp2", reason="a test", mesh=mesh, cpu_offload=kind == "offload")
        assert torch.equal(gradient(load(recipe, strategy=strategy), strategy), expected)
    finally:
        dist.destroy_process_group()
