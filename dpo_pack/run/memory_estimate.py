"""The memory that a run needs on a device: an estimate without weights, what would fit, the peak on CUDA.

A run holds parameters, gradients and optimizer state all the time. A step computes one row at a time, so it
adds the activations that the largest row keeps for its backward pass, and the buffers of the output head or
those of one layer's backward pass, whichever are larger.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.data.store import pair_lengths
from dpo_pack.model.attention.segments import MAX_MASK_BYTES
from dpo_pack.model.compiling import tower_parameters
from dpo_pack.model.config import attention_needs, count_experts, routes_tokens
from dpo_pack.model.facts import tower_weights
from dpo_pack.model.fast_layers import tileable_feed_forwards
from dpo_pack.model.layout import Row
from dpo_pack.model.logps import HEAD_BOUNDS
from dpo_pack.model.lora import read_adapter
from dpo_pack.model.parallel import DistributedPolicy
from dpo_pack.model.quantize import bits_per_weight
from dpo_pack.model.scorer import Precision
from dpo_pack.packing.lengths import IntArray, ModelShape
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.recipe.schema import why_not_sharded
from dpo_pack.run.models import StateBytes, available_memory, by_size, num_gradients, training_bytes
from dpo_pack.run.setup import Setup, longest_sequence
from dpo_pack.system import ranks
from dpo_pack.system.console import format_count
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
_TILE_TOKENS = 8192  # that is offered as model.mlp_tile_tokens
_GATHERING = {True: "all for the whole step", False: "layer by layer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """A model's numbers of parameters, and widths (numbers a token) of tensors, as means over its layers.

    Towers do not count, which are frozen.
    """

    num_layers: int
    hidden: int
    num_parameters: int
    head_parameters: int  # vocabulary x hidden size
    layer_parameters: float
    attention: float  # width of the queries plus width of attention's result
    feed_forward: float  # widths that its linear layers read and write, without the hidden size
    linear: float  # the same sum for all linear layers, not only feed-forward
    active_experts: float  # experts that each token uses; 0 if the model has none
    recurrent: float = 0.0  # fp32 numbers that recurrent layers keep of a token; 0 if the model has none

    def num_adapter_parameters(self, rank: int) -> int:
        """Returns the parameters of a LoRA adapter on all linear layers except the head."""
        return round(rank * self.num_layers * (self.linear + _NUM_LINEARS * self.hidden))


def memory_shape(config: PretrainedConfig, shape: ModelShape, num_parameters: int) -> MemoryShape:
    """Returns the memory shape of a model from its config, its `ModelShape` and its number of parameters
    without towers."""
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
        active_experts=num_active if num_experts > 1 else 0.0,
        recurrent=shape.kept_numbers / num_layers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The facts about a run and the settings of its recipe that the estimate needs."""

    shape: MemoryShape  # of the policy
    row_tokens: int  # of the largest row; padding counts as tokens
    row_keys: int  # keys that attention reads; a shared prompt counts once for each of its completions
    row_scored: int  # completion tokens
    mask_bytes: float = 0.0  # of the masks of `sdpa`, which all layers use
    tower_parameters: int = 0  # frozen
    tower_linear: int = 0  # of these, weights that a quantised base has in `bits`
    reads_images: bool = False  # every device then has whole towers, and not a shard
    tower_pass: float = 0.0  # bytes that the tower needs for the images of the largest row
    device: torch.device
    precision: Precision
    optimizer: str = "adamw"
    gradient_checkpointing: bool | Literal["selective"] = False
    activation_offload: bool = False
    mlp_tile_tokens: int | None = None
    can_tile: bool = True  # whether the model's code allows `mlp_tile_tokens`
    cpu_offload: bool = False
    accumulate_unsharded: bool = False
    lora_rank: int | None = None  # rank of the policy's adapter; None if the whole model is trained
    bits: float | None = None  # bits of a parameter in the layers of a quantised base, with its scale
    has_second_model: bool = False  # whether a reference that follows the policy is loaded too
    num_shards: int = 1
    stays_gathered: bool = False  # whether all shards are gathered once a step, and not a layer at a time
    num_gradients: int = 1  # copies of the gradient: 2 if rows add up outside DDP's buffers


def estimate_memory(facts: MemoryFacts) -> dict[str, float]:
    """Returns the bytes of each part on one device at the peak of a step; the peak is their sum."""
    shape, precision = facts.shape, facts.precision
    state, gathered = state_bytes(facts), 0.0
    if facts.num_shards > 1:
        whole_gradients = state.gradients * facts.num_shards
        if facts.cpu_offload:
            state = StateBytes(parameters=0.0, gradients=0.0, optimizer=0.0)
        if facts.accumulate_unsharded:
            state = state._replace(gradients=whole_gradients)
        gathered = _gathered_bytes(facts)
    width = precision.parameters.itemsize
    spared = 0.0 if facts.bits is None else facts.tower_linear * (width - facts.bits / 8)
    towers = (facts.tower_parameters * width - spared) * (1 + facts.has_second_model)
    layer = layer_bytes(facts)
    activations = shape.num_layers * layer  # `selective` counts as if layers kept everything: an upper limit
    if facts.gradient_checkpointing is True:  # layers keep their input; the last norm input and result
        num_kept = 1 if facts.activation_offload else shape.num_layers
        activations = layer + (num_kept + 2.0) * _residual_bytes(facts)
    # A quantised layer is restored for one product at a time; autocast keeps no copies of all layers.
    num_cast = 1 if facts.gradient_checkpointing or facts.bits is not None else shape.num_layers
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "gathered weights": gathered,
        "weights cast": num_cast * shape.layer_parameters * 2.0 if precision.casts_weights else 0.0,
        "activations": activations,
        "masks": facts.mask_bytes,
        "towers": towers * (1.0 if facts.reads_images else 1 / facts.num_shards),
        # The gradients of a layer's activations are about as large as the activations. The tower has run
        # before the other layers.
        "working memory": max(_head_bytes(facts), layer, facts.tower_pass),
        "overhead": float(OVERHEAD_BYTES[facts.device.type]),
    }


def state_bytes(facts: MemoryFacts) -> StateBytes:
    """Returns the bytes that a run holds all the time: on the device, or in host RAM with cpu_offload."""
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


def host_bytes(facts: MemoryFacts) -> dict[str, float]:
    """Returns the bytes of host memory for one device, by the key of the recipe that moves them there."""
    found = {}
    if facts.num_shards > 1 and facts.cpu_offload:
        found["distributed.cpu_offload"] = sum(state_bytes(facts))
    if facts.activation_offload:  # torch reserves a power of two for each tensor in pinned memory
        each = 1 << (_residual_bytes(facts) - 1).bit_length()
        found["model.activation_offload"] = float(facts.shape.num_layers * each)
    return found


def _residual_bytes(facts: MemoryFacts) -> int:
    number = 4 if facts.precision.casts_weights else facts.precision.activations.itemsize
    return facts.row_tokens * facts.shape.hidden * number


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
    shape, precision = facts.shape, facts.precision
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
    # Keys and values are repeated for all query heads.
    attention = (facts.row_tokens + facts.row_keys) * shape.attention * product
    in_block = min(facts.row_tokens, facts.mlp_tile_tokens or facts.row_tokens)
    return facts.row_tokens * (norms + inputs + 4 * shape.recurrent) + in_block * feed_forward + attention


def _head_bytes(facts: MemoryFacts) -> float:
    precision, bounds = facts.precision, HEAD_BOUNDS[facts.device.type]
    is_low = precision.activations.itemsize == 2
    logits = 4.0 * facts.row_scored * facts.shape.head_parameters / facts.shape.hidden
    # Two fp32 buffers of logits; with 16-bit products also the product itself.
    chunk = min(float(bounds.chunk_bytes), 2 * logits) * (1.25 if is_low else 1.0)
    hidden = 3.0 * facts.row_scored * facts.shape.hidden * precision.activations.itemsize
    weight_bytes, kept = 2.0 if precision.casts_weights else 0.0, 0.0  # bytes of a weight's cast
    if facts.lora_rank is None:  # the head's gradient in fp32, and its 16-bit copy if any
        weight_bytes += 6.0 if is_low else 4.0
        kept = min(float(bounds.kept_bytes), logits)  # softmax weights
    return chunk + hidden + kept + facts.shape.head_parameters * weight_bytes


# ---- The facts of a run


def memory_facts(setup: Setup, plan: PackingPlan | None) -> tuple[MemoryFacts, int]:
    """Returns the facts of a run for the estimate, and the tokens of its longest pair. Reads no weights.

    `plan` is the plan of the first epoch; None if the run is online. All ranks must call it.
    """
    recipe, policy, mesh = setup.recipe, setup.policy_facts, setup.strategy.mesh
    mask_bytes = tower_pass = 0.0
    if plan is None:  # the pairs do not exist yet: the largest row possible
        assert recipe.online is not None
        longest_pair = 2 * (longest_sequence(setup.tables) + recipe.online.max_new_tokens)
        tokens = keys = scored = max(recipe.packing.token_budget, longest_pair)
    else:
        longest_pair = int(plan.sizes.tokens[np.unique(plan.order)].max())  # on any rank
        pairs = largest_row(plan, rank=ranks.rank())
        lengths = pair_lengths(setup.data.train).select(pairs)
        tokens = keys = plan.sizes.of_row(pairs).tokens
        if policy.is_packed and recipe.shares_prompts:
            keys = int(lengths.row_tokens(share_prompt=False).sum())
            if setup.device.type == "cpu" or policy.attention == "sdpa":  # numbers on a CPU, and bools
                own = lengths.row_tokens(share_prompt=True) - lengths.prompt - lengths.chosen
                masks = np.unique(own * (lengths.prompt + lengths.rejected))  # of rejected completions
                width = policy.precision.activations.itemsize if setup.device.type == "cpu" else 1
                mask_bytes = float(np.minimum(masks * width, MAX_MASK_BYTES).sum()) * (1 + 1 / width)
        scored = int(lengths.completion_tokens().sum())
        if policy.processor is not None:
            num_pixels = _num_pixels(setup, pairs)
            tower_pass = tower_pass_bytes(policy.architecture, num_pixels, policy.precision)
    lora_rank = None if recipe.model.lora is None else recipe.model.lora.r
    if lora_rank is None and policy.adapter is not None:
        lora_rank = read_adapter(policy.adapter, policy.recipe_key).rank
    quantised = policy.quantization
    facts = MemoryFacts(
        shape=memory_shape(policy.config, policy.shape, policy.num_parameters - policy.tower_parameters),
        row_tokens=tokens,
        row_keys=keys,
        row_scored=scored,
        mask_bytes=mask_bytes,
        tower_parameters=policy.tower_parameters,
        tower_linear=0 if quantised is None else quantised_tower_weights(policy.architecture, quantised),
        reads_images=policy.processor is not None,
        tower_pass=tower_pass,
        device=setup.device,
        precision=policy.precision,
        optimizer=recipe.optim.name,
        gradient_checkpointing=policy.gradient_checkpointing,
        activation_offload=policy.activation_offload and setup.device.type == "cuda",
        mlp_tile_tokens=policy.mlp_tile_tokens,
        can_tile=bool(tileable_feed_forwards(policy.architecture, has_experts=routes_tokens(policy.config))),
        cpu_offload=recipe.distributed.cpu_offload,
        accumulate_unsharded=recipe.distributed.accumulate_unsharded,
        lora_rank=lora_rank,
        # Experts are not linear layers of torch, so bitsandbytes leaves them as they are: an upper limit.
        bits=None if quantised is None or routes_tokens(policy.config) else bits_per_weight(quantised),
        has_second_model=setup.objective.needs_reference and recipe.reference.sync is not None,
        num_shards=1 if mesh is None else mesh.size(mesh.ndim - 1),
        num_gradients=num_gradients(policy.config) if setup.strategy.name == "ddp" else 1,
    )
    return replace(facts, stays_gathered=_can_stay_gathered(facts)), longest_pair


def quantised_tower_weights(model: PreTrainedModel, settings: Mapping[str, Any]) -> int:
    """Returns the number of the towers' weights that bitsandbytes quantises: those of linear layers that its
    settings do not skip."""
    towers, skipped = tower_parameters(model), settings.get("llm_int8_skip_modules") or ()
    return sum(
        part.weight.numel()
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part.weight in towers
        if not any(re.match(rf"(?:{one})(?:\.|$)", name) or name.endswith(one) for one in skipped)
    )


def _num_pixels(setup: Setup, row: IntArray) -> int:
    """Reads the images of a row's pairs, and returns the number of pixel values that the tower gets."""
    recipe, policy, table = setup.recipe, setup.policy_facts, setup.data.train
    assert policy.processor is not None
    if recipe.packing.merge_prompts:  # pairs of one prompt are one group
        row = row[np.unique(table.prompt_keys[row], axis=0, return_index=True)[1]]
    total = 0
    for group in map(table.group, row.tolist()):
        if group.images:
            made = policy.processor.pixel_inputs([read() for read in group.images])
            total += made["pixel_values"].numel()
    return total * (1 if policy.is_packed and recipe.shares_prompts else 2)


def tower_pass_bytes(model: PreTrainedModel, num_pixels: int, precision: Precision) -> float:
    """Returns the bytes of `num_pixels` values, and of what one layer of the tower computes from them: it
    keeps nothing for a backward pass."""
    first, *in_layers = tower_weights(model)[0]
    width = max(sum(weight.shape) for weight in in_layers)
    return num_pixels * (4.0 + 3 * width * precision.parameters.itemsize / first[0].numel())


def largest_row(plan: PackingPlan, *, rank: int) -> IntArray:
    """Returns the pairs of the row with the most tokens in the first steps, or the longest pair if longer."""
    rows = [row for ranked in islice(plan, _STEPS_SEARCHED) for row in ranked[rank]]
    oversize = plan.oversize_pairs
    if len(oversize):
        rows.append(oversize[[int(plan.sizes.tokens[oversize].argmax())]])
    return max(rows, key=lambda row: plan.sizes.of_row(row).tokens, default=plan.pairs(0)[:1])


def _can_stay_gathered(facts: MemoryFacts) -> bool:
    """Whether every device has memory for all gathered weights during a step. All ranks must call it."""
    if facts.num_shards == 1:
        return False
    needed = sum(estimate_memory(replace(facts, stays_gathered=True)).values())
    lacking = needed - _GATHERED_SHARE * available_memory(facts.device).free
    return max(ranks.every_rank_says(lacking)) <= 0


def stays_gathered(setup: Setup, plan: PackingPlan | None) -> bool:
    """Returns whether a run with shards gathers them once a step, and prints it. All ranks must call it."""
    facts, _ = memory_facts(setup, plan)
    how = _GATHERING[facts.stays_gathered]
    setup.console.print(f"Shards: gathered {how} (the devices' free memory decides)")
    return facts.stays_gathered


# ---- What is printed


def print_memory_estimate(
    setup: Setup, plan: PackingPlan | None, *, device_bytes: int | None = None, num_devices: int = 1
) -> None:
    """Prints the memory that the run needs on one device, the free memory, and what would fit.

    `device_bytes`: of each of `num_devices` GPUs of a machine that is not here; None: of this machine.
    """
    console, here = setup.console, device_bytes is None
    facts, longest_pair = memory_facts(setup, plan)
    memory = AvailableMemory(free=device_bytes or 0, total=device_bytes or 0)
    if here:
        memory, num_devices = available_memory(setup.device), ranks.num_ranks()
    elif num_devices > 1 and (strategy := setup.recipe.distributed.strategy) != "ddp":
        if strategy == "auto" and why_not_sharded(setup.recipe) is None:
            policy, has_second = setup.policy_facts, facts.has_second_model
            strategy, _ = by_size(policy, memory.total, optimizer=facts.optimizer, has_second=has_second)
        if strategy == "fsdp2":
            facts = replace(facts, num_shards=num_devices)
    estimate = estimate_memory(facts)
    needed = sum(estimate.values())
    moved = host_bytes(facts)
    in_host = sum(moved.values())
    texts = {
        "parameters": f"the model has {format_count(facts.shape.num_parameters)}",
        "gathered weights": f"of {facts.num_shards} shards, {_GATHERING[facts.stays_gathered]}",
        "activations": f"of {facts.row_tokens:,} tokens, the largest row",
        "towers": f"{format_count(facts.tower_parameters)} more parameters, frozen",
        "working memory": f"of the head on {facts.row_scored:,} scored tokens, or a layer"
        + (", or the tower" if facts.tower_pass else ""),
    }
    which = f"each of {num_devices}" if num_devices > 1 else "one"
    devices = f"device{'s' if num_devices > 1 else ''}"
    console.print(f"Memory on {which} {facts.device.type} {devices}, estimated, see docs/memory.md:")
    for name, num_bytes in (estimate | {"a step": needed, "in host memory": in_host}).items():
        if num_bytes:
            console.print(f"  {name:<17}{format_bytes(num_bytes):>11}  {texts.get(name, '')}".rstrip())
    if setup.recipe.online is not None:
        console.print("  not counted: the completions' keys and values, judges, and models of a server")
    needs = attention_needs(setup.policy_facts.config)
    if needs.has_softcap or needs.has_sinks:
        console.print("  not counted: scores that sdpa keeps for softcaps and sinks, up to 3 x activations")
    free = _what_is_free(memory) if here else f"a device has {format_bytes(memory.total)}"
    if needed <= memory.free:
        console.print(f"It fits: {free}")
    else:
        rows = setup.recipe.packing.rows_per_step
        changes = [*fitting_rows(facts, longest_pair, memory.free, rows_per_step=rows)]
        changes = changes or [*_fitting_states(facts, longest_pair, memory.free, num_devices)]
        fits = "What would fit, the cheapest change first" if changes else "No single change is enough"
        console.print(f"It does not fit: {free}. {fits}:")
        for overrides, num_bytes in changes:
            console.print(f"  {overrides}: {format_bytes(num_bytes)}")
        console.print(
            "  smaller weights and moments: model.dtype=bfloat16, model.lora, or fsdp2 on more devices"
        )
    host = available_memory(torch.device("cpu"))
    if here and in_host > host.free:  # a process's part
        console.print(f"It does not fit the host: {_what_is_free(host)}. Leave {' or '.join(moved)} out")


def _fitting_states(
    facts: MemoryFacts, longest_pair: int, available_bytes: float, num_devices: int
) -> Iterator[tuple[str, float]]:
    """Yields like `fitting_rows`, for a run whose state is too large: changes that make the state smaller."""
    low = replace(facts, precision=Precision(parameters=torch.bfloat16, autocast=None))
    shards = {number: replace(facts, num_shards=number) for number in (num_devices, 2, 4, 8, 16, 32, 64, 128)}
    can_shard = facts.optimizer == "adamw" and facts.bits is None
    tried = {}
    if can_shard and facts.num_shards < num_devices:
        tried["distributed.strategy=fsdp2"] = shards[num_devices]
    if facts.optimizer == "adamw" and facts.precision.parameters.itemsize > 2:
        tried["model.dtype=bfloat16"] = low
    if facts.lora_rank is None:
        tried["model.lora={r: 16} model.dtype=bfloat16"] = replace(low, lora_rank=16)
    for number in sorted(shards) if can_shard else ():
        if number > num_devices:
            tried[f"{number} devices, distributed.strategy=fsdp2"] = shards[number]
    for name, changed in tried.items():
        for rows, num_bytes in islice(fitting_rows(changed, longest_pair, available_bytes), 1):
            yield f"{name} {rows}".strip(), num_bytes
            if "devices" in name:  # more devices would do, too
                return


def fitting_rows(
    facts: MemoryFacts, longest_pair: int, available_bytes: float, *, rows_per_step: int | None = None
) -> Iterator[tuple[str, float]]:
    """Yields recipe overrides with which the run fits, and the bytes that it then needs: the largest token
    budget, and gradient checkpointing; if neither is enough, what else makes activations smaller. A budget
    below the longest pair saves nothing: a pair is never cut."""
    whole = facts.row_tokens
    budgets = range(min(longest_pair, whole), whole + 1)
    recompute: dict[str, Any] = {"gradient_checkpointing": True}
    tiles = facts.can_tile and facts.mlp_tile_tokens is None
    tile: dict[str, Any] = {"mlp_tile_tokens": _TILE_TOKENS} if tiles else {}
    # On a CPU the host's memory is the device's.
    offload = recompute | ({"activation_offload": True} if facts.device.type == "cuda" else {})

    def needed(changed: MemoryFacts, tokens: int) -> float:
        keys, scored = (round(tokens / whole * size) for size in (facts.row_keys, facts.row_scored))
        shorter = replace(changed, row_tokens=tokens, row_keys=keys, row_scored=scored)
        return sum(estimate_memory(shorter).values())

    tried: list[MemoryFacts] = []
    fits = False
    for changes in ({}, recompute, offload, recompute | tile, offload | tile):
        changed = replace(facts, **changes)
        if changed in tried or (fits and len(changes) > 1):
            continue
        tried.append(changed)
        if num_fitting := bisect_right(budgets, available_bytes, key=partial(needed, changed)):
            fits = True
            new = {key: value for key, value in changes.items() if getattr(facts, key) != value}
            overrides = " ".join(f"model.{key}={str(value).lower()}" for key, value in new.items())
            tokens = budgets[num_fitting - 1]
            if tokens < whole:
                overrides += f" packing.token_budget={tokens}"
            if tokens < whole and rows_per_step is not None:  # a step then has about as many pairs as before
                overrides += f" packing.rows_per_step={round(rows_per_step * whole / tokens)}"
            yield overrides.strip(), needed(changed, tokens)


def _what_is_free(memory: AvailableMemory) -> str:
    return f"{format_bytes(memory.free)} of {format_bytes(memory.total)} are free"


def print_measured_memory(
    policy: DistributedPolicy, optimizer: Optimizer, row: Row, device: torch.device, console: Console
) -> None:
    """Runs the largest row forward and backward on CUDA, beside optimizer state; prints the peak. Changes no
    weights, because the gradient and the learning rate are zero. Every rank must call it."""
    release_memory()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is None:  # an existing gradient is zero, see model/parallel.py
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    torch.cuda.reset_peak_memory_stats(device)
    with policy.gathered(), policy.accumulating(is_last=True):
        policy.idle(row)
    torch.cuda.synchronize(device)
    used, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    peak = f"{format_bytes(used)} at the peak; torch held {format_bytes(held)}"
    in_use = f"{format_bytes(total - free)} of {format_bytes(total)} are in use"
    console.print(f"Measured on the largest row, {row.num_tokens:,} tokens: {peak}, and {in_use}")


def format_bytes(num_bytes: float) -> str:
    """Returns a text such as 12 MiB, 0.31 GiB or 104.60 GiB."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < GIB / 10 else f"{num_bytes / GIB:.2f} GiB"
