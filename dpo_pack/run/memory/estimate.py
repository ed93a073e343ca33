"""Estimates the memory that a run needs on each device, from the recipe and shapes, without weights.

A run holds parameters, gradients and optimizer state all the time. A step adds the activations that the
largest row's forward pass keeps for its backward pass. A step also adds the buffers of the output head or
those of one layer's backward pass, whichever are larger. docs/memory.md compares estimates with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from dpo_pack.model.config import count_experts
from dpo_pack.model.logps import HEAD_BOUNDS
from dpo_pack.model.scorer import Precision
from dpo_pack.packing.flops import ModelShape
from dpo_pack.recipe.load import Recipe
from dpo_pack.run.models import recipe_precision

GIB = 2**30
# Bytes of an optimizer's moments for each trained parameter. bitsandbytes keeps 8-bit moments and a scale for
# each 256 moments. Adafactor keeps only sums of rows and columns.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03, "adafactor": 0.02}
LOW_BITS_BYTES = 2.0  # the low halves of AdamW's fp32 master weights, if parameters are bfloat16
# Memory that the allocator holds but cannot use; on CUDA also the device's context and cuBLAS workspaces.
OVERHEAD_BYTES = {"cpu": GIB // 4, "cuda": 3 * GIB // 2}
# Most families have seven linear layers: three before attention, one after attention, three in a gated
# feed-forward block. Five of the seven read the result of a norm.
_NUM_LINEARS, _NUM_NORM_READERS = 7, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on one device of parameters, gradients and optimizer state, which a run holds all the time."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """A model's numbers of parameters, and widths (numbers a token) of tensors, as means over its layers."""

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
    """Returns the memory shape of a model from its config, its `ModelShape` and its number of parameters.

    A linear layer that reads or writes the hidden state has hidden size x width weights. So the sum of the
    widths of all linear layers is the number of their weights / hidden size.
    """
    text = config.get_text_config()
    num_layers, hidden, values = text.num_hidden_layers, text.hidden_size, text.to_dict()
    num_experts, num_active = count_experts(values)
    num_tables = 1 if text.tie_word_embeddings else 2  # tables of vocabulary x hidden size
    attention = sum(kind.num_layers * kind.width for kind in shape.attention) / num_layers
    num_heads = values.get("num_attention_heads") or 1
    key_share = (values.get("num_key_value_heads") or num_heads) / num_heads
    linear = shape.token_weights / num_layers / hidden
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
class RowSize:
    """The sizes of the largest row. Padding counts as tokens."""

    tokens: int
    keys: int  # keys that attention reads; a shared prompt counts once for each of its completions
    scored: int  # completion tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The facts about a run that the estimate needs besides the recipe."""

    shape: MemoryShape  # of the policy
    row: RowSize
    device: torch.device
    lora_rank: int | None = None  # rank of the policy's adapter; None if the whole model is trained
    bits: float | None = None  # bits of a parameter in the layers of a quantised base, with its scale
    has_second_model: bool = False  # whether a reference that follows the policy is loaded too
    can_shard: bool = True  # false for quantised weights
    num_shards: int = 1
    stays_gathered: bool = False  # whether all shards are gathered once a step, and not a layer at a time
    num_gradients: int = 1  # copies of the gradient: 2 if rows add up outside DDP's buffers


def estimate_memory(recipe: Recipe, facts: MemoryFacts) -> dict[str, float]:
    """Returns the bytes of each part on one device at the peak of a step; the peak is their sum."""
    shape, precision = facts.shape, recipe_precision(recipe, facts.device)
    state, gathered = state_bytes(recipe, facts), 0.0
    if facts.num_shards > 1:
        whole_gradients = state.gradients * facts.num_shards
        if recipe.distributed.cpu_offload:
            state = StateBytes(parameters=0.0, gradients=0.0, optimizer=0.0)
        if recipe.distributed.accumulate_unsharded:
            state = replace(state, gradients=whole_gradients)
        gathered = _gathered_bytes(facts, precision)
    layer, num_whole, inputs = layer_bytes(recipe, facts), shape.num_layers, 0.0
    # A quantised layer is restored for one product at a time; autocast keeps no copies of all layers.
    num_cast = 1 if recipe.model.gradient_checkpointing or facts.bits is not None else shape.num_layers
    # `selective` counts as if layers kept everything: an upper limit.
    if recipe.model.gradient_checkpointing is True:
        # Each layer keeps its input; the final norm keeps input and result.
        num_whole = 1
        inputs = (shape.num_layers + 2.0) * facts.row.tokens * shape.hidden * _residual_bytes(precision)
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "gathered weights": gathered,
        "weights cast": num_cast * shape.layer_parameters * 2.0 if precision.casts_weights else 0.0,
        "activations": num_whole * layer + inputs,
        # The gradients of a layer's activations are about as large as the activations.
        "working memory": max(_head_bytes(facts, precision), layer),
        "overhead": float(OVERHEAD_BYTES[facts.device.type]),
    }


def state_bytes(recipe: Recipe, facts: MemoryFacts) -> StateBytes:
    """Returns the bytes that a run holds all the time: on the device, or in host RAM with cpu_offload."""
    shape, dtype = facts.shape, recipe_precision(recipe, facts.device).parameters
    num_trained, is_adapter = shape.num_parameters, facts.lora_rank is not None
    if facts.lora_rank is not None:
        num_trained = shape.num_adapter_parameters(facts.lora_rank)
    frozen_bytes = float(dtype.itemsize)
    if facts.bits is not None:  # bitsandbytes quantises layers only
        part = shape.num_layers * shape.layer_parameters / shape.num_parameters
        frozen_bytes += part * (facts.bits / 8 - frozen_bytes)
    state = training_bytes(
        num_trained=num_trained,
        num_frozen=shape.num_parameters * (is_adapter + facts.has_second_model),
        trained_bytes=4 if is_adapter else dtype.itemsize,
        frozen_bytes=frozen_bytes,
        optimizer=recipe.optim.name,
        num_shards=facts.num_shards,
    )
    num_gradients = facts.num_gradients if facts.num_shards == 1 else 1
    return replace(state, gradients=num_gradients * state.gradients)


def _gathered_bytes(facts: MemoryFacts, precision: Precision) -> float:
    """Returns the bytes of gathered weights: those outside of layers and those of two layers, or all.

    Beside them are torch's buffers of two layers: what has been sent of their weights and, in the backward
    pass of a whole model, the gradient of one layer and the fp32 copy from which that of another is reduced.
    """
    shape, wide = facts.shape, (precision.gathered or precision.parameters).itemsize
    num_layers = shape.num_layers if facts.stays_gathered else 2
    num_outside = shape.num_parameters - shape.num_layers * shape.layer_parameters
    sent = 2 * (2 if precision.casts_weights else wide)
    reduced = wide + 4 if facts.lora_rank is None else 0
    return (num_layers * shape.layer_parameters + num_outside) * wide + shape.layer_parameters * max(
        sent, reduced
    )


def layer_bytes(recipe: Recipe, facts: MemoryFacts) -> float:
    """Returns the bytes that one layer keeps of the largest row, without activation checkpointing.

    Each of two norms keeps its input in fp32, and also its result if the norm's weight is trained. A linear
    layer keeps its input. Linear layers that read the same norm keep one input together, unless autocast or
    an fp32 adapter makes a copy for each. Attention keeps its operands and its result; keys and values are
    repeated for all query heads. A gated feed-forward block keeps four vectors; linear layers read or write
    three of them. An expert also keeps its copy of the token and its weighted result. `kept_numbers` of
    model/recurrence says what recurrent layers keep.
    """
    shape, row, precision = facts.shape, facts.row, recipe_precision(recipe, facts.device)
    product, residual = precision.activations.itemsize, _residual_bytes(precision)
    trains_model = facts.lora_rank is None
    norms = 2 * shape.hidden * (4 + (residual if trains_model else 0))
    inputs = 2.0 * shape.hidden * product
    if precision.casts_weights:
        inputs = _NUM_NORM_READERS * shape.hidden * product
    elif not trains_model and product == 2:
        read = _NUM_NORM_READERS * shape.hidden + shape.attention / 2 + shape.feed_forward / 3
        inputs = read * 4
    feed_forward = 4 / 3 * shape.feed_forward * product
    if shape.active_experts:  # autocast does not change the type of experts
        feed_forward = (4 / 3 * shape.feed_forward + 2 * shape.active_experts * shape.hidden) * residual
    attention = (row.tokens + row.keys) * shape.attention * product
    return row.tokens * (norms + inputs + feed_forward + 4 * shape.recurrent) + attention


def _head_bytes(facts: MemoryFacts, precision: Precision) -> float:
    """Returns the bytes that the output head takes: one chunk of logits, and sums over all chunks of a row.

    See model/logps.py.
    """
    bounds, is_low = HEAD_BOUNDS[facts.device.type], precision.activations.itemsize == 2
    logits = 4.0 * facts.row.scored * facts.shape.head_parameters / facts.shape.hidden
    # Two fp32 buffers of logits; with 16-bit products also the product itself.
    chunk = min(float(bounds.chunk_bytes), 2 * logits) * (1.25 if is_low else 1.0)
    hidden = 3.0 * facts.row.scored * facts.shape.hidden * precision.activations.itemsize
    weight_bytes, kept = 2.0 if precision.casts_weights else 0.0, 0.0  # bytes of a weight's cast
    if facts.lora_rank is None:  # the head's gradient in fp32, and its 16-bit copy if any
        weight_bytes += 6.0 if is_low else 4.0
        kept = min(float(bounds.kept_bytes), logits)  # softmax weights
    return chunk + hidden + kept + facts.shape.head_parameters * weight_bytes


def _residual_bytes(precision: Precision) -> int:
    """Returns the bytes of one number in the residual stream: autocast leaves it in fp32, so 4 then."""
    return 4 if precision.casts_weights else precision.activations.itemsize
