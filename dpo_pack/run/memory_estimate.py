"""The memory that a run needs on a device: an estimate without weights, what would fit, the peak on CUDA.

A run holds parameters, gradients and optimizer state all the time. A step computes one row at a time, so it
adds the activations that the largest row keeps for its backward pass, and the buffers of the output head or
those of one layer's backward pass, whichever are larger.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.optim import Optimizer
from transformers import PretrainedConfig

from dpo_pack.data.store import longest_sequence, pair_lengths
from dpo_pack.model.attention import select_backend
from dpo_pack.model.attention.segments import MAX_MASK_BYTES
from dpo_pack.model.config import attention_needs, count_experts, routes_tokens
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import HEAD_BOUNDS
from dpo_pack.model.lora import bits_per_weight, read_adapter
from dpo_pack.model.parallel import DistributedPolicy
from dpo_pack.model.scorer import Precision
from dpo_pack.packing.lengths import IntArray, ModelShape
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.recipe.schema import DistributedRecipe, ModelRecipe, why_not_sharded
from dpo_pack.run.models import Setup, StateBytes, available_memory, by_size, num_gradients, training_bytes
from dpo_pack.system import ranks
from dpo_pack.system.files import Json
from dpo_pack.system.machine import AvailableMemory, release_memory

GIB = 2**30
# Memory that the allocator holds but cannot use; on CUDA also the device's context and cuBLAS workspaces.
OVERHEAD_BYTES = {"cpu": GIB // 4, "cuda": 3 * GIB // 2}
# Most families have seven linear layers: three before attention, one after attention, three in a gated
# feed-forward block. Five of the seven read the result of a norm.
_NUM_LINEARS, _NUM_NORM_READERS = 7, 5
_STEPS_SEARCHED = 500  # `largest_row` searches these first steps; packed rows are nearly full in all steps
# The part of free memory for a step with gathered shards: an estimate of activations can be 1/4 too low.
_GATHERED_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """A model's numbers of parameters, and widths (numbers a token) of tensors, as means over its layers."""

    num_layers: int
    hidden: int
    num_parameters: int  # without towers
    head_parameters: int  # vocabulary x hidden size
    layer_parameters: float
    attention: float  # width of the queries plus width of attention's result
    feed_forward: float  # widths that its linear layers read and write, without the hidden size
    linear: float  # the same sum for all linear layers, not only feed-forward
    key_share: float  # heads of keys / heads of queries
    active_experts: float  # experts that each token uses; 0 if the model has none
    recurrent: float = 0.0  # fp32 numbers that recurrent layers keep of a token; 0 if the model has none

    def num_adapter_parameters(self, rank: int) -> int:
        """Returns the parameters of a LoRA adapter on all linear layers except the head."""
        return round(rank * self.num_layers * (self.linear + _NUM_LINEARS * self.hidden))


def memory_shape(config: PretrainedConfig, shape: ModelShape, num_parameters: int) -> MemoryShape:
    """Returns the memory shape of a model; `num_parameters`: without towers."""
    text = config.get_text_config()
    num_layers, hidden, values = text.num_hidden_layers, text.hidden_size, text.to_dict()
    num_experts, num_active = count_experts(values)
    is_tied = values.get("tie_word_embeddings", config.to_dict().get("tie_word_embeddings"))
    num_tables = 1 if is_tied else 2  # tables of vocabulary x hidden size
    attention = sum(kind.num_layers * kind.width for kind in shape.attention) / num_layers
    num_heads = values.get("num_attention_heads") or 1
    key_share = (values.get("num_key_value_heads") or num_heads) / num_heads
    linear = shape.token_weights / num_layers / hidden  # such a layer has hidden size x width weights
    return MemoryShape(
        num_layers=num_layers,
        hidden=hidden,
        num_parameters=num_parameters,
        head_parameters=shape.head_weights,
        layer_parameters=(num_parameters - num_tables * shape.head_weights) / num_layers,
        attention=attention,
        feed_forward=linear - attention * (1 + key_share),
        linear=linear,
        key_share=key_share,
        active_experts=num_active if num_experts > 1 else 0.0,
        recurrent=shape.kept_numbers / num_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What the estimate needs to know of a run. `row_`: of the largest row; padding counts as tokens."""

    shape: MemoryShape  # of the policy
    row_tokens: int
    row_keys: int  # that attention reads; what sequences share counts once for each of them
    backend: str = "torch_varlen"  # of attention; "cpu": sdpa by its kernel; "padded": the model's own
    row_scored: int  # completion tokens
    mask_bytes: float = 0.0  # of the masks of `sdpa`, which all layers use
    tower_parameters: int = 0  # frozen
    device: torch.device
    precision: Precision
    model: ModelRecipe
    distributed: DistributedRecipe = field(default_factory=DistributedRecipe)
    optimizer: str = "adamw"
    lora_rank: int | None = None  # rank of the policy's adapter; None if the whole model is trained
    bits: float | None = None  # bits of a parameter in the layers of a quantised base, with its scale
    has_second_model: bool = False  # whether a reference that follows the policy is loaded too
    num_shards: int = 1
    stays_gathered: bool = False  # whether all shards are gathered once a step, and not a layer at a time
    num_gradients: int = 1  # copies of the gradient: 2 if rows add up outside DDP's buffers

    def changed(self, **model: Any) -> MemoryFacts:
        """Returns the facts with other values of keys in the recipe's section `model`."""
        return replace(self, model=self.model.model_copy(update=model))


def step_bytes(facts: MemoryFacts) -> float:
    """Returns the bytes on one device at the peak of a step."""
    return sum(estimate_memory(facts).values())


def estimate_memory(facts: MemoryFacts) -> dict[str, float]:
    """Returns the bytes of each part on one device at the peak of a step; the peak is their sum."""
    shape, precision, settings = facts.shape, facts.precision, facts.model
    state, gathered = state_bytes(facts), 0.0
    if facts.num_shards > 1:
        whole_gradients = state.gradients * facts.num_shards
        if facts.distributed.cpu_offload:
            state = StateBytes(parameters=0.0, gradients=0.0, optimizer=0.0)
        if facts.distributed.accumulate_unsharded:
            state = state._replace(gradients=whole_gradients)
        gathered = _gathered_bytes(facts)
    towers = facts.tower_parameters * precision.parameters.itemsize * (1 + facts.has_second_model)
    layer, width, share = layer_bytes(facts), precision.activations.itemsize, shape.key_share
    # Bytes for each key and value that attention reads, while a layer runs backward; see docs/memory.md.
    each = {"cpu": 4 * share, "flex": 0.0, "padded": 0.0, "sdpa": 2 * width * (1 + share)}
    copies = facts.row_keys * shape.attention * each.get(facts.backend, width * (1 + 2 * share))
    activations = shape.num_layers * layer  # `selective` counts as if layers kept everything: an upper limit
    if settings.gradient_checkpointing is True:  # layers keep their input; the last norm input and result
        num_kept = 3 if settings.activation_offload and facts.device.type == "cuda" else shape.num_layers + 2
        number = 4 if precision.casts_weights else precision.activations.itemsize
        activations = layer + num_kept * facts.row_tokens * shape.hidden * float(number)
    # A quantised layer is restored for one product at a time; autocast keeps no copies of all layers.
    num_cast = 1 if settings.gradient_checkpointing or facts.bits is not None else shape.num_layers
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "gathered weights": gathered,
        "weights cast": num_cast * shape.layer_parameters * 2.0 if precision.casts_weights else 0.0,
        "activations": activations,
        "masks": facts.mask_bytes,
        # Every device has whole towers if they read images, and not a shard.
        "towers": towers / (1 if settings.images else facts.num_shards),
        # The gradients of a layer's activations are about as large as the activations.
        "working memory": max(_head_bytes(facts), layer + copies),
        "overhead": float(OVERHEAD_BYTES[facts.device.type]),
    }


def state_bytes(facts: MemoryFacts) -> StateBytes:
    """Returns the bytes that a run holds all the time: on the device, or in host memory with cpu_offload."""
    shape, rank = facts.shape, facts.lora_rank
    trained_bytes = facts.precision.parameters.itemsize
    frozen_bytes = float(trained_bytes)
    if facts.bits is not None:  # bitsandbytes quantises layers only
        part = shape.num_layers * shape.layer_parameters / shape.num_parameters
        frozen_bytes += part * (facts.bits / 8 - frozen_bytes)
    state = training_bytes(
        num_trained=shape.num_parameters if rank is None else shape.num_adapter_parameters(rank),
        num_frozen=shape.num_parameters * ((rank is not None) + facts.has_second_model),
        trained_bytes=trained_bytes if rank is None else 4,
        frozen_bytes=frozen_bytes,
        optimizer=facts.optimizer,
        num_shards=facts.num_shards,
    )
    num_gradients = facts.num_gradients if facts.num_shards == 1 else 1
    return state._replace(gradients=num_gradients * state.gradients)


def _gathered_bytes(facts: MemoryFacts) -> float:
    shape, precision = facts.shape, facts.precision
    wide = (precision.gathered or precision.parameters).itemsize
    num_layers = shape.num_layers if facts.stays_gathered else 2
    num_outside = shape.num_parameters - shape.num_layers * shape.layer_parameters
    # torch's buffers: the weights sent of two layers, or in the backward pass of a whole model the gradient
    # of one layer and the fp32 copy from which that of another is reduced
    sent = 2 * (2 if precision.casts_weights else wide)
    reduced = wide + 4 if facts.lora_rank is None else 0
    gathered = (num_layers * shape.layer_parameters + num_outside) * wide
    return gathered + shape.layer_parameters * max(sent, reduced)


def layer_bytes(facts: MemoryFacts) -> float:
    """Returns the bytes that one layer keeps of the largest row without checkpointing; see docs/memory.md."""
    shape, precision, tokens = facts.shape, facts.precision, facts.row_tokens
    product = precision.activations.itemsize
    residual = 4 if precision.casts_weights else product  # autocast leaves the residual stream in fp32
    trains_model = facts.lora_rank is None
    norms = 2 * shape.hidden * (4 + (residual if trains_model else 0))  # inputs in fp32, results
    inputs = 2.0 * shape.hidden * product  # linear layers that read the same norm keep one input together
    if precision.casts_weights:  # autocast makes a copy for each
        inputs = _NUM_NORM_READERS * shape.hidden * product
    elif not trains_model and product == 2 and precision.autocast is None:  # so does an fp32 adapter
        inputs = 4 * (_NUM_NORM_READERS * shape.hidden + shape.attention / 2 + shape.feed_forward / 3)
    # A gated block keeps four vectors; linear layers read or write three of them.
    feed_forward = 4 / 3 * shape.feed_forward * product
    if shape.active_experts:  # copies of the token, weighted results; autocast does not change experts' type
        feed_forward = (4 / 3 * shape.feed_forward + 2 * shape.active_experts * shape.hidden) * residual
    # Where a row shares nothing, sdpa keeps keys and values repeated for all query heads: an upper limit.
    keys = 1.0 if facts.backend in ("sdpa", "padded") else shape.key_share
    attention = tokens * (1 + keys) * shape.attention * product
    in_block = min(tokens, facts.model.mlp_tile_tokens or tokens)
    return tokens * (norms + inputs + 4 * shape.recurrent) + in_block * feed_forward + attention


def _head_bytes(facts: MemoryFacts) -> float:
    precision, bounds, scored = facts.precision, HEAD_BOUNDS[facts.device.type], facts.row_scored
    is_low = precision.activations.itemsize == 2
    logits = 4.0 * scored * facts.shape.head_parameters / facts.shape.hidden
    # Two fp32 buffers of logits; with 16-bit products also the product itself.
    chunk = min(float(bounds.chunk_bytes), 2 * logits) * (1.25 if is_low else 1.0)
    hidden = 3.0 * scored * facts.shape.hidden * precision.activations.itemsize
    weight_bytes, kept = 2.0 if precision.casts_weights else 0.0, 0.0  # bytes of a weight's cast
    if facts.lora_rank is None:  # the head's gradient in fp32, and its 16-bit copy if any
        weight_bytes += 6.0 if is_low else 4.0
        kept = min(float(bounds.kept_bytes), logits)  # softmax weights
    return chunk + hidden + kept + facts.shape.head_parameters * weight_bytes


# ---- The facts of a run


def memory_facts(setup: Setup, plan: PackingPlan | None) -> tuple[MemoryFacts, int]:
    """Returns the facts of a run for the estimate, and the tokens of its longest pair. Reads no weights.
    `plan`: of the first epoch; None: of the largest row possible. All ranks must call it."""
    recipe, policy, mesh, backend = setup.recipe, setup.policy_facts, setup.strategy.mesh, _backend(setup)
    if plan is None:  # the pairs do not exist yet, or are not planned
        most_new = 0 if recipe.online is None else recipe.online.max_new_tokens
        longest_pair = 2 * (longest_sequence(setup.tables) + most_new)
        tokens = max(setup.token_budget, longest_pair)
        keys = longest_pair * min(recipe.packing.pairs_per_step, tokens // 2)  # all pairs begin alike
        row: Json = {"row_tokens": tokens, "row_keys": keys, "row_scored": tokens}
    else:
        longest_pair = int(plan.sizes.tokens[np.unique(plan.order)].max())  # on any rank
        row = _sizes_of_row(setup, plan, backend)
    lora_rank = None if recipe.model.lora is None else recipe.model.lora.r
    if lora_rank is None and policy.adapter is not None:
        lora_rank = read_adapter(policy.adapter, policy.recipe_key).rank
    quantised = policy.quantization
    facts = MemoryFacts(
        shape=memory_shape(policy.config, policy.shape, policy.num_parameters - policy.tower_parameters),
        **row,
        backend=backend,
        tower_parameters=policy.tower_parameters,
        device=setup.device,
        precision=policy.precision,
        model=recipe.model,
        distributed=recipe.distributed,
        optimizer=recipe.optim.name,
        lora_rank=lora_rank,
        # Experts are not linear layers of torch, so bitsandbytes leaves them as they are: an upper limit.
        bits=None if quantised is None or routes_tokens(policy.config) else bits_per_weight(quantised),
        has_second_model=setup.objective.needs_reference and recipe.reference.sync is not None,
        num_shards=1 if mesh is None else mesh.size(mesh.ndim - 1),
        num_gradients=num_gradients(policy.config) if setup.strategy.name == "ddp" else 1,
    )
    if facts.num_shards > 1:  # all weights are gathered for a whole step if every device has memory for them
        gathered = replace(facts, stays_gathered=True)
        lacking = step_bytes(gathered) - _GATHERED_SHARE * available_memory(facts.device).free
        facts = gathered if max(ranks.every_rank_says(lacking)) <= 0 else facts
    return facts, longest_pair


def _backend(setup: Setup) -> str:
    policy, device = setup.policy_facts, setup.device
    needs, name = attention_needs(policy.config), str(policy.settings.attention)
    is_plain = not needs.has_softcap and not needs.has_sinks and needs.head_dim == needs.value_head_dim
    if policy.is_packed and name == "auto":
        name = select_backend(name, needs, device=device, dtype=policy.precision.activations).name
    return "padded" if not policy.is_packed else "cpu" if is_plain and device.type == "cpu" else name


def _sizes_of_row(setup: Setup, plan: PackingPlan, backend: str) -> Json:
    policy, lengths, rank = setup.policy_facts, pair_lengths(setup.data.train), ranks.rank()
    pairs, keys = largest_row(plan, rank=rank), lengths.row_tokens()
    # Two upper limits: the keys of the row that has the most of them, and masks for its longest sequence.
    most = largest_row(plan, rank=rank, by=lambda row: keys[row].sum())
    mask = (int(lengths.select(most).row_tokens(pads=True).max()) // 2) ** 2
    windows = {kind.window for kind in policy.shape.attention}  # each has masks: numbers on a CPU, and bools
    has_masks = backend in ("cpu", "sdpa") and (setup.recipe.shares_prompts or windows != {None})
    width = policy.precision.activations.itemsize if setup.device.type == "cpu" else 1
    return {
        "row_tokens": plan.sizes.of_row(pairs).tokens,
        "row_keys": int(keys[most].sum()),
        "row_scored": int(lengths.completion_tokens()[pairs].sum()),
        "mask_bytes": has_masks * len(windows) * min(mask * width, MAX_MASK_BYTES) * (1 + 1 / width),
    }


def largest_row(plan: PackingPlan, *, rank: int, by: Callable[[IntArray], int] | None = None) -> IntArray:
    """Returns the pairs of the first steps' row with most tokens, or most by `by`, or the longest pair."""
    rows = [row for ranked in islice(plan, _STEPS_SEARCHED) for row in ranked[rank]]
    oversize = plan.oversize_pairs
    if len(oversize):
        rows.append(oversize[[int(plan.sizes.tokens[oversize].argmax())]])
    return max(rows, key=by or (lambda row: plan.sizes.of_row(row).tokens), default=plan.pairs(0)[:1])


def stays_gathered(setup: Setup, plan: PackingPlan | None) -> bool:
    """Returns whether a run with shards gathers them once a step, and prints it. All ranks must call it."""
    facts, _ = memory_facts(setup, plan)
    how = "all for the whole step" if facts.stays_gathered else "layer by layer"
    setup.console.print(f"Shards: gathered {how} (the devices' free memory decides)")
    return facts.stays_gathered


# ---- What is printed


def memory_report(
    setup: Setup, plan: PackingPlan | None, *, device_bytes: int | None = None, num_devices: int = 1
) -> Json:
    """Returns the memory that the run needs on one device, in bytes, and what would fit if it does not.
    `device_bytes`: of each of `num_devices` other GPUs; None: of this machine. All ranks must call it."""
    facts, longest_pair = memory_facts(setup, plan)
    if device_bytes is None:
        memory, num_devices = available_memory(setup.device), ranks.num_ranks()
    else:
        memory = AvailableMemory(free=device_bytes, total=device_bytes)
        strategy = setup.recipe.distributed.strategy
        if num_devices > 1 and strategy == "auto" and why_not_sharded(setup.recipe) is None:
            policy, has_second = setup.policy_facts, facts.has_second_model
            strategy, _ = by_size(policy, device_bytes, optimizer=facts.optimizer, has_second=has_second)
        facts = replace(facts, num_shards=num_devices if strategy == "fsdp2" else 1)
    needed = step_bytes(facts)
    fits = needed <= memory.free
    changes = {} if fits else dict(fitting_changes(facts, longest_pair, memory.free, num_devices))
    return {
        "device": facts.device.type,
        "num_devices": num_devices,
        "num_shards": facts.num_shards,
        "row_tokens": facts.row_tokens,
        "parts": estimate_memory(facts),
        "step": needed,
        "free": memory.free,
        "total": memory.total,
        "fits": fits,
        "would_fit": changes,
    }


def print_memory_report(report: Json, console: Console) -> None:
    """Prints what `memory_report` returns."""
    number, free, total = report["num_devices"], report["free"], report["total"]
    which = f"each of {number} {report['device']} devices" if number > 1 else f"one {report['device']} device"
    shards = f", {report['num_shards']} shards" if report["num_shards"] > 1 else ""
    console.print(
        f"Memory on {which}{shards}, estimated (docs/memory.md), of {report['row_tokens']:,} tokens, the "
        "largest row:"
    )
    for name, num_bytes in (report["parts"] | {"a step": report["step"]}).items():
        if num_bytes:
            console.print(f"  {name:<17}{format_bytes(num_bytes):>11}")
    has = f"{format_bytes(free)} of {format_bytes(total)} are free"
    if report["fits"]:
        console.print(f"It fits: {has}")
        return
    console.print(f"It does not fit: {has}. What would fit, the cheapest change first:")
    for change, num_bytes in report["would_fit"].items():
        console.print(f"  {change}: {format_bytes(num_bytes)}")
    if not report["would_fit"]:
        console.print("  nothing that a recipe can change; take larger devices, or lower data.max_length")


def fitting_changes(
    facts: MemoryFacts, longest_pair: int, available_bytes: float, num_devices: int
) -> Iterator[tuple[str, float]]:
    """Yields changes of the recipe with which the run fits, and the bytes that it then needs: the largest
    token budget, and the first two of the others. A budget below the longest pair saves nothing."""
    whole = facts.row_tokens

    def needed(tokens: int) -> float:
        keys, scored = (round(tokens / whole * size) for size in (facts.row_keys, facts.row_scored))
        return step_bytes(replace(facts, row_tokens=tokens, row_keys=keys, row_scored=scored))

    budgets = range(min(longest_pair, whole), whole)
    if num_fitting := bisect_right(budgets, available_bytes, key=needed):
        yield f"packing.token_budget={budgets[num_fitting - 1]}", needed(budgets[num_fitting - 1])
    others = ((change, step_bytes(changed)) for change, changed in _changes(facts, num_devices))
    yield from islice((one for one in others if one[1] <= available_bytes), 2)


def _changes(facts: MemoryFacts, num_devices: int) -> Iterator[tuple[str, MemoryFacts]]:
    """Yields changes that save memory, the cheapest first. All have checkpointing."""
    recompute, shards = "model.gradient_checkpointing=true", "distributed.strategy=fsdp2"
    recomputed = facts.changed(gradient_checkpointing=True)
    low = replace(recomputed, precision=Precision(parameters=torch.bfloat16, autocast=None))
    trains_whole = facts.lora_rank is None
    takes_shards = facts.optimizer == "adamw" and facts.bits is None
    yield recompute, recomputed
    if facts.device.type == "cuda":  # on a CPU the host's memory is the device's
        offloaded = recomputed.changed(activation_offload=True)
        yield f"{recompute} model.activation_offload=true", offloaded
        if not facts.shape.active_experts:
            tiled = offloaded.changed(mlp_tile_tokens=8192)
            yield f"{recompute} model.activation_offload=true model.mlp_tile_tokens=8192", tiled
    if takes_shards:
        yield f"{recompute} {shards}", replace(recomputed, num_shards=num_devices)
        yield f"{recompute} model.dtype=bfloat16", low
    if trains_whole:
        yield f"{recompute} model.dtype=bfloat16 model.lora={{r: 16}}", replace(low, lora_rank=16)
    for number in (2, 4, 8, 16, 32, 64, 128) if takes_shards else ():
        if number > num_devices:
            yield f"{recompute} {shards}, {number} devices", replace(recomputed, num_shards=number)


def print_measured_memory(
    policy: DistributedPolicy, optimizer: Optimizer, row: Row, device: torch.device, console: Console
) -> dict[str, int]:
    """Runs the largest row forward and backward on CUDA, beside optimizer state; prints and returns the peak.
    Every rank must call it. Afterwards nobody may train: the optimizer has taken a step."""
    release_memory()
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is None:  # an existing gradient is zero, see model/parallel.py
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats(device)
    with policy.step([row]), policy.accumulating(is_last=True):
        policy.idle(row)
    torch.cuda.synchronize(device)
    used, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    console.print(
        f"Measured on the largest row, {row.num_tokens:,} tokens: {format_bytes(used)} at the peak; torch "
        f"held {format_bytes(held)}, and {format_bytes(total - free)} of {format_bytes(total)} are in use"
    )
    return {"row_tokens": row.num_tokens, "peak": used, "held": held, "in_use": total - free, "total": total}


def format_bytes(num_bytes: float) -> str:
    """Returns a text such as 12 MiB, 0.31 GiB or 104.60 GiB."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < GIB / 10 else f"{num_bytes / GIB:.2f} GiB"
