"""What `train --dry-run` says of memory: an estimate before anything is loaded, and on CUDA a measurement.

Both are of the largest row, which is the most that a step holds at once.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.optim import Optimizer
from transformers import PretrainedConfig

from dpo_pack import ranks
from dpo_pack.attention.select import select_backend
from dpo_pack.console import format_count
from dpo_pack.data.lengths import IntArray
from dpo_pack.data.packing import PackingPlan
from dpo_pack.errors import RunError
from dpo_pack.files import read_json
from dpo_pack.host_memory import AvailableMemory, host_memory
from dpo_pack.layout import Row
from dpo_pack.lora import ADAPTER_CONFIG, LoraSettings
from dpo_pack.losses import Objective
from dpo_pack.memory import MemorySetting, RowSize, estimate_memory
from dpo_pack.memory_advice import Limits, advice, scaled_row
from dpo_pack.memory_shape import MemoryShape, memory_shape
from dpo_pack.model_config import attention_needs
from dpo_pack.model_shape import without_weights
from dpo_pack.prepare import Prepared, longest_sequence
from dpo_pack.prepare_batches import offline_source
from dpo_pack.recipe_models import (
    ModelSource,
    policy_model,
    reference_model,
    reference_token_budget,
    source_config,
)
from dpo_pack.recipe_online_checks import why_not_sharded
from dpo_pack.reference import pair_lengths
from dpo_pack.reference_pass import release_memory
from dpo_pack.strategy import DistributedPolicy, num_gradients

# Rows of a plan are looked at in so many of its steps: packed rows are near the budget in each of them.
_STEPS_SEARCHED = 500


def print_memory_estimate(prepared: Prepared, objective: Objective) -> None:
    """A table of what the run will take on one device, what there is, and what would make it fit."""
    setting, longest_pair = recipe_memory(prepared, objective)
    estimate, available = estimate_memory(setting), available_memory(prepared.device)
    console, row = prepared.console, setting.row
    console.print(f"Memory on one {setting.device} device, estimated, see docs/memory.md:")
    lines = [
        ("parameters", estimate.state.parameters, _parameters_text(setting)),
        ("gradients", estimate.state.gradients, ""),
        ("optimizer", estimate.state.optimizer, setting.optimizer),
        ("gathered weights", estimate.gathered, f"of {setting.num_shards} shards"),
        ("weights cast", estimate.casts, "by autocast"),
        ("activations", estimate.activations, f"of {row.tokens:,} tokens, the largest row"),
        (
            "working memory",
            estimate.working,
            f"of the head on {row.scored:,} scored tokens, or a layer",
        ),
        ("overhead", estimate.overhead, "of the allocator and the device's context"),
        ("a step", estimate.step, ""),
        ("reference pass", estimate.reference_pass, "before the first step, by itself"),
        ("in host memory", estimate.host, "parameters, gradients and optimizer state"),
    ]
    for name, num_bytes, text in lines:
        if num_bytes:
            console.print(f"  {name:<17}{format_bytes(num_bytes):>11}{f'  {text}' if text else ''}")
    if prepared.recipe.online is not None:
        console.print("  not counted: the completions' keys and values, judges, and models of a server")
    if available is None:
        console.print("How much there is cannot be told on this system")
    else:
        _print_verdict(console, setting, longest_pair, available)
    host = available_memory(torch.device("cpu"))
    if host is not None and estimate.host > host.free:
        there = f"{format_bytes(host.free)} of {format_bytes(host.total)} are free for each process"
        console.print(f"It does not fit in the host's memory: {there}. Leave distributed.cpu_offload out")


def _print_verdict(
    console: Console, setting: MemorySetting, longest_pair: int, available: AvailableMemory
) -> None:
    limits = Limits(available_bytes=available.free, longest_pair=longest_pair)
    there = f"{format_bytes(available.free)} of {format_bytes(available.total)} are free"
    if limits.fit(setting):
        console.print(f"It fits: {there}")
        return
    changes = advice(setting, limits)
    console.print(f"It does not fit: {there}. {'This would:' if changes else 'No change would make it fit.'}")
    for change in changes:
        console.print(f"  {change.override}: {format_bytes(change.total_bytes)}")


def recipe_memory(prepared: Prepared, objective: Objective) -> tuple[MemorySetting, int]:
    """What of a run decides its memory, and the tokens of its longest pair.

    Builds the policy without weights, and plans its first epoch.
    """
    recipe, precision, device = prepared.recipe, prepared.precision, prepared.device
    source = policy_model(recipe)
    config = source_config(recipe, source)
    shape = memory_shape(without_weights(config, trust_remote_code=recipe.model.trust_remote_code))
    rank = _lora_rank(source)
    num_second = shape.num_parameters if objective.needs_reference and recipe.reference.sync else 0
    parameter_bytes = (torch.float32 if source.adapter else precision.parameters).itemsize
    num_trained = shape.num_parameters if rank is None else shape.num_adapter_parameters(rank)
    backend = None
    if prepared.is_packed:
        needs = attention_needs(config)
        backend = select_backend(
            recipe.model.attention, needs, device=device, dtype=precision.activations
        ).name
    row, longest_pair = _largest_row(prepared)
    mesh = prepared.strategy.mesh
    budget = reference_token_budget(recipe, device)
    measures_for_itself = mesh is None and device.type == "cuda" and recipe.reference.token_budget == "auto"
    configs = (config, source_config(recipe, reference_model(recipe)))
    is_quantised = any(each.to_dict().get("quantization_config") is not None for each in configs)
    offloads_reference = recipe.online is not None and recipe.online.offload_reference
    caches = objective.needs_reference and not recipe.reference.sync and recipe.online is None
    setting = MemorySetting(
        shape=shape,
        num_trained=num_trained,
        num_frozen=num_second + (0 if rank is None else shape.num_parameters),
        trained_bytes=parameter_bytes,
        frozen_bytes=frozen_bytes(config, shape, precision.parameters),
        activation_bytes=precision.activations.itemsize,
        autocasts=precision.casts_weights,
        lora_rank=rank,
        trains_head=rank is None,
        optimizer=recipe.optim.name,
        checkpoints_activations=recipe.model.gradient_checkpointing,
        shares_key_heads=backend in ("flash_attn", "torch_varlen"),
        device=device.type,
        row=row,
        reference_row=None if measures_for_itself or not caches else _row_of(prepared, budget, like=row),
        num_shards=1 if mesh is None else mesh.size(mesh.ndim - 1),
        holds_whole_gradients=prepared.strategy.accumulate_unsharded,
        offloads_state=prepared.strategy.cpu_offload,
        num_gradients=num_gradients(config) if prepared.strategy.name == "ddp" else 1,
        rows_per_step=recipe.packing.rows_per_step,
        reference_mixup=recipe.reference.sync.mixup if recipe.reference.sync else None,
        can_shard=why_not_sharded(recipe) is None and not is_quantised,
        can_adapt=not offloads_reference or recipe.reference.path is not None,
    )
    return setting, longest_pair


def frozen_bytes(config: PretrainedConfig, shape: MemoryShape, dtype: torch.dtype) -> float:
    """Of one frozen parameter, on average. bitsandbytes quantises layers, not embeddings and head.

    In 4 bits it keeps an fp32 scale for each 64 of them.
    """
    settings = config.to_dict().get("quantization_config")
    if settings is None:
        return dtype.itemsize
    part = shape.num_layers * shape.layer_parameters / shape.num_parameters
    return part * (0.5 + 4 / 64 if settings.get("load_in_4bit") else 1.0) + (1 - part) * dtype.itemsize


def _lora_rank(source: ModelSource) -> int | None:
    match source.adapter:
        case None:
            return None
        case LoraSettings():
            return source.adapter.r
        case Path():
            return int((read_json(source.adapter / ADAPTER_CONFIG) or {}).get("r", 16))


def _largest_row(prepared: Prepared) -> tuple[RowSize, int]:
    """The largest row that this rank will compute, and the tokens of the longest pair in any."""
    recipe = prepared.recipe
    if recipe.online is not None:  # its pairs do not exist yet
        longest = longest_sequence(prepared.tables) + recipe.online.max_new_tokens
        tokens = max(recipe.packing.token_budget, 2 * longest)
        return RowSize(tokens=tokens, keys=tokens, scored=tokens), 2 * longest
    source = offline_source(prepared, None)
    plan = source.first_plan
    pairs = largest_row(plan, rank=source.rank)
    lengths = pair_lengths(prepared.data.train).select(pairs)
    tokens = plan.tokens_in(pairs)
    sequences = int(lengths.row_tokens(share_prompt=False).sum())
    size = RowSize(
        tokens=tokens,
        keys=sequences if prepared.is_packed and recipe.shares_prompts else tokens,
        scored=int(lengths.completion_tokens().sum()),
    )
    return size, int(plan.row_tokens[np.unique(plan.order)].max())


def largest_row(plan: PackingPlan, *, rank: int) -> IntArray:
    """The pairs of the row with the most tokens: in the plan's first steps, or the longest pair's own row."""
    rows = [row for ranked in islice(plan, _STEPS_SEARCHED) for row in ranked[rank]]
    oversize = plan.oversize_pairs
    if len(oversize):
        rows.append(oversize[[int(plan.row_tokens[oversize].argmax())]])
    return max(rows, key=plan.tokens_in, default=plan.pairs(0)[:1])


def _row_of(prepared: Prepared, token_budget: int, *, like: RowSize) -> RowSize:
    """A row of the reference pass: as many of its tokens are scored, and shared, as in `like`."""
    num_tokens = sum(
        int(pair_lengths(table).row_tokens(share_prompt=False).sum()) for table in prepared.tables
    )
    return scaled_row(like, min(token_budget, num_tokens))


def available_memory(device: torch.device) -> AvailableMemory | None:
    """What a rank may use of its device; of a CPU, its share of what the system and its limits leave."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return AvailableMemory(free=free + torch.cuda.memory_reserved(device), total=total)
    machine = host_memory()
    if machine is None:
        return None
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks()))
    return AvailableMemory(free=machine.free // num_here, total=machine.total // num_here)


def print_measured_memory(
    policy: DistributedPolicy, optimizer: Optimizer, row: Row, device: torch.device, console: Console
) -> None:
    """Run the largest row forward and backward on CUDA, beside the optimizer's state, and say the peak.

    Nothing is trained: gradients and learning rate are zero. Collective. Raises RunError out of memory.
    """
    release_memory()
    try:
        hold_optimizer_state(optimizer)
        torch.cuda.reset_peak_memory_stats(device)
        with policy.accumulating(is_last=True):
            policy.idle(row)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the largest row, {row.num_tokens:,} tokens, does not fit in this device's memory; set "
            "model.gradient_checkpointing: true, lower packing.token_budget, or see docs/memory.md"
        ) from error
    used = torch.cuda.max_memory_allocated(device)
    held = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    console.print(
        f"Measured on the largest row, {row.num_tokens:,} tokens: {format_bytes(used)} at the peak; "
        f"torch held {format_bytes(held)}, and {format_bytes(total - free)} of the device's "
        f"{format_bytes(total)} are in use"
    )


def hold_optimizer_state(optimizer: Optimizer) -> None:
    """Make optimizer state and gradients exist, as from the first step on; weights stay as they are.

    Gradients that exist already are zeros, see strategy.py.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _parameters_text(setting: MemorySetting) -> str:
    names = {4.0: "float32", 2.0: "bfloat16"}
    trained = f"{format_count(setting.num_trained)} in {names[setting.trained_bytes]}"
    if not setting.num_frozen:
        return trained
    frozen = names.get(setting.frozen_bytes, "low precision")
    return f"{trained}, and {format_count(setting.num_frozen)} frozen in {frozen}"


def format_bytes(num_bytes: float) -> str:
    """640 KiB, 12 MiB, 0.31 GiB, 104.6 GiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB"
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.{1 if num_bytes >= 10 * 2**30 else 2}f} GiB"
