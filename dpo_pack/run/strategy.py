"""Chooses how the ranks hold the model: each rank a copy (ddp) or a shard (fsdp2), and gives the reason."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

from dpo_pack.model.config import routes_tokens
from dpo_pack.model.parallel import ALONE, Strategy
from dpo_pack.model.scorer import Precision
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.schema import why_not_sharded
from dpo_pack.run.models import ModelFacts
from dpo_pack.system import ranks
from dpo_pack.system.console import format_count
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.machine import host_memory
from dpo_pack.system.process import is_set

# `auto` chooses ddp only if weights, gradients and optimizer state take at most this part of the memory.
STATE_SHARE = 0.6
# Bytes of an optimizer's moments for each trained parameter. bitsandbytes keeps 8-bit moments and a scale for
# each 256 moments. Adafactor keeps only sums of rows and columns.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03, "adafactor": 0.02}
LOW_BITS_BYTES = 2.0  # the low halves of AdamW's fp32 master weights, if parameters are bfloat16


def choose_strategy(recipe: Recipe, policy: ModelFacts, device: torch.device) -> Strategy:
    """Returns the recipe's strategy for the ranks of this run. Every rank must call it. Raises RecipeError.

    `auto` shards a model if a whole copy, its gradients and its optimizer state would leave too little memory
    on a device for activations.
    """
    settings = recipe.distributed
    if ranks.num_ranks() == 1:
        if settings.gather_dtype is not None or settings.cpu_offload:
            key = "gather_dtype" if settings.gather_dtype is not None else "cpu_offload"
            raise RecipeError(
                f"distributed.{key}: only a run of several processes has shards, and this run has one; leave "
                "the key out"
            )
        return ALONE
    name, reason = settings.strategy, "distributed.strategy"
    if is_set("ACCELERATE_USE_FSDP"):
        if name == "ddp" or why_not_sharded(recipe) is not None or policy.quantization is not None:
            raise RecipeError(
                "distributed.strategy: accelerate's configuration asks for FSDP2, but this run needs a whole "
                "model in each process; set distributed_type: MULTI_GPU in accelerate's configuration"
            )
        name, reason = "fsdp2", "accelerate's configuration"
    if name == "auto":
        needs_copies = why_not_sharded(recipe)
        name, reason = (
            ("ddp", needs_copies)
            if needs_copies is not None
            else _by_size(
                policy, device, optimizer=recipe.optim.name, has_second=recipe.reference.sync is not None
            )
        )
    if name == "ddp":
        return Strategy(name="ddp", reason=reason)
    if recipe.optim.name != "adamw":
        raise RecipeError(
            f"optim.name: {recipe.optim.name} updates whole weights only, but with fsdp2 ({reason}) each "
            "process has a part of the weights; set optim.name: adamw or distributed.strategy: ddp"
        )
    if settings.cpu_offload and device.type != "cuda":
        raise RecipeError(
            f"distributed.cpu_offload: the device is a {device.type}, so there is nothing to offload; leave "
            "the key out"
        )
    return Strategy(
        name="fsdp2",
        reason=reason,
        mesh=_mesh(device, is_hybrid=settings.hybrid),
        cpu_offload=settings.cpu_offload,
        accumulate_unsharded=settings.accumulate_unsharded,
    )


def check_accelerate_config(recipe: Recipe, precision: Precision) -> None:
    """Raises RecipeError if the file of `accelerate config` asks for what the recipe does not.

    `accelerate launch` writes its configuration into environment variables. dpo-pack takes devices, processes
    and FSDP2 from it; the recipe sets everything else.
    """
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed != "no" and (mixed != "bf16" or precision.activations != torch.bfloat16):
        remedy = "set model.autocast: bfloat16" if mixed == "bf16" else "dpo-pack has no such type"
        raise RecipeError(
            f"model.autocast: accelerate's configuration asks for mixed_precision: {mixed}, but this run "
            f"computes in {str(precision.activations).removeprefix('torch.')}; {remedy}, or set "
            "mixed_precision: 'no' in accelerate's configuration"
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    for key, name, is_asked, is_done in (
        ("model.compile", f"dynamo_backend: {backend}", backend != "no", recipe.model.compile is True),
        (
            "distributed.cpu_offload",
            "fsdp_offload_params: true",
            is_set("FSDP_OFFLOAD_PARAMS"),
            recipe.distributed.cpu_offload,
        ),
        (
            "model.gradient_checkpointing",
            "fsdp_activation_checkpointing: true",
            is_set("FSDP_ACTIVATION_CHECKPOINTING"),
            recipe.model.gradient_checkpointing is not False,
        ),
    ):
        if is_asked and not is_done:
            raise RecipeError(
                f"{key}: accelerate's configuration asks for {name}, but the recipe does not; set "
                f"{key}: true, or remove the setting from accelerate's configuration"
            )


def _by_size(
    policy: ModelFacts, device: torch.device, *, optimizer: str, has_second: bool
) -> tuple[Literal["ddp", "fsdp2"], str]:
    """Returns ddp, or fsdp2 if weights, gradients and optimizer state are too large, and the reason.

    `has_second`: a reference that follows the policy lies beside it, with frozen weights.
    """
    if policy.quantization is not None:
        return "ddp", "quantised weights are not sharded"
    count = policy.num_parameters
    is_adapted = policy.new_adapter is not None or policy.adapter is not None
    precision = policy.precision
    state = training_bytes(
        num_trained=0 if is_adapted else count,  # an adapter is too small to matter
        num_frozen=count * (is_adapted + has_second),
        trained_bytes=precision.parameters.itemsize,
        frozen_bytes=precision.parameters.itemsize,
        optimizer=optimizer,
    )
    needed = sum(state) + state.gradients * (num_gradients(policy.config) - 1)
    if precision.casts_weights and not policy.gradient_checkpointing:
        needed += 2.0 * count
    memory = -ranks.largest_numbers(-device_memory(device))[0]  # the memory of the smallest device
    what = (
        f"{format_count(count)} parameters with gradients and optimizer state take {needed / 1e9:.3g} GB, "
        f"a device has {memory / 1e9:.3g} GB"
    )
    return ("ddp" if needed <= STATE_SHARE * memory else "fsdp2"), what


class StateBytes(NamedTuple):
    """Bytes on one device of what a run holds all the time; their sum is the whole."""

    parameters: float
    gradients: float
    optimizer: float


def training_bytes(
    *,
    num_trained: int,
    num_frozen: int = 0,
    trained_bytes: float = 4,
    frozen_bytes: float = 4,
    optimizer: str = "adamw",
    num_shards: int = 1,
) -> StateBytes:
    """Returns the bytes of weights, gradients and optimizer state on a device with 1/`num_shards` of each.

    `num_trained`, `num_frozen`: numbers of parameters. `trained_bytes`, `frozen_bytes`: the bytes of one.
    """
    moments = OPTIMIZER_BYTES[optimizer]
    if optimizer == "adamw" and trained_bytes == 2:
        moments += LOW_BITS_BYTES
    return StateBytes(
        parameters=(num_trained * trained_bytes + num_frozen * frozen_bytes) / num_shards,
        gradients=num_trained * trained_bytes / num_shards,
        optimizer=num_trained * moments / num_shards,
    )


def num_gradients(config: PretrainedConfig) -> int:
    """Returns how many copies of the gradient a rank holds with ddp: one, or two for a mixture of experts.

    With experts, rows' gradients are added up outside the buffers ("buckets") of DDP.
    """
    return 2 if routes_tokens(config) else 1


def device_memory(device: torch.device) -> int:
    """Returns the bytes of memory for one rank. Ranks on CPUs divide the machine's memory equally."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory().total // num_local_ranks()


def num_local_ranks() -> int:
    """Returns the number of ranks on this machine. If the launcher does not say, all ranks are here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks()))


def _mesh(device: torch.device, *, is_hybrid: bool) -> DeviceMesh:
    num_ranks = ranks.num_ranks()
    if not is_hybrid:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    num_here = num_local_ranks()
    if num_here in (1, num_ranks) or num_ranks % num_here:
        raise RecipeError(
            "distributed.hybrid: each node holds one copy of the model in shards, so the run needs several "
            "nodes, each with the same number of processes (two or more); this node has "
            f"{num_here} of the run's {num_ranks}; leave the key out"
        )
    shape = (num_ranks // num_here, num_here)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
