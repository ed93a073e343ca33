"""How much memory a run takes on each device, from shapes and settings alone, before anything is loaded.

A run holds parameters, gradients and optimizer state all the time. On top come what the largest row's
forward keeps for its backward, and the larger of the buffers of the output head and of one layer's backward.
What a layer keeps is counted tensor by tensor; docs/memory.md says how far that is from what was measured.

Legend: T tokens of a row, K gathered keys, N scored completion tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpo_pack.logps import HEAD_BOUNDS
from dpo_pack.memory_shape import MemoryShape
from dpo_pack.split_adamw import TEMPORARY_BYTES

GIB = 2**30
# Moments a trained parameter, in bytes; bitsandbytes keeps a scale for each 256 of them, Adafactor rows and
# columns only.
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.03, "adafactor": 0.02}
LOW_BITS_BYTES = 2.0  # of AdamW's fp32 master weights, where parameters are bfloat16
# What allocators hold and cannot use; on CUDA its context and cuBLAS's workspaces as well.
OVERHEAD_BYTES = {"cpu": GIB // 4, "cuda": 3 * GIB // 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What a run holds all the time, in bytes on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """The largest row. Padding counts as tokens."""

    tokens: int  # T
    keys: int  # K: a shared prompt once for each of its completions
    scored: int  # N


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """What of a recipe and its model decides the memory of a device."""

    shape: MemoryShape
    num_trained: int
    num_frozen: int  # of the policy's base under an adapter, and of a second model beside the policy
    trained_bytes: int  # of one trained parameter: 4 or 2
    frozen_bytes: float
    activation_bytes: int  # of a number that a matrix product puts out: 4, or 2 in bfloat16
    autocasts: bool  # to `activation_bytes`, from fp32
    lora_rank: int | None  # None: the whole model is trained
    trains_head: bool
    optimizer: str
    checkpoints_activations: bool
    shares_key_heads: bool  # the attention kernel takes grouped heads as they are
    device: str  # "cpu" or "cuda"
    row: RowSize
    reference_row: RowSize | None  # of the reference pass; None: there is none, or it measures for itself
    num_shards: int = 1
    holds_whole_gradients: bool = False  # distributed.accumulate_unsharded
    offloads_state: bool = False  # distributed.cpu_offload
    num_gradients: int = 1  # of a copy: 2 where DDP's buckets hold another one
    # What of the recipe decides which changes it would take.
    rows_per_step: int | None = None  # packing.rows_per_step, of scope epoch
    reference_mixup: float | None = None  # reference.sync.mixup
    can_shard: bool = True  # the optimizer aside
    can_adapt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step."""

    state: StateBytes
    host: float  # of that, what is in the host's memory instead
    gathered: float  # weights of the layers at work, whole, where the model is in shards
    casts: float  # of weights, to the type of matrix products
    activations: float  # of the largest row, kept for its backward
    working: float  # the larger of the head's and one layer's, in the backward
    overhead: float
    reference_pass: float  # everything held in that earlier phase

    @property
    def step(self) -> float:
        """At the peak of a training step."""
        kept = self.gathered + self.casts + self.activations + self.working
        return self.state.total + kept + self.overhead

    @property
    def total(self) -> float:
        return max(self.step, self.reference_pass)


def training_bytes(
    *,
    num_trained: int,
    num_frozen: int = 0,
    trained_bytes: float = 4,
    frozen_bytes: float = 4,
    optimizer: str = "adamw",
    num_shards: int = 1,
) -> StateBytes:
    """Parameters, gradients and optimizer state of a device that holds one of `num_shards` parts of each."""
    moments = OPTIMIZER_BYTES[optimizer]
    if optimizer == "adamw" and trained_bytes == 2:
        moments += LOW_BITS_BYTES
    return StateBytes(
        parameters=(num_trained * trained_bytes + num_frozen * frozen_bytes) / num_shards,
        gradients=num_trained * trained_bytes / num_shards,
        optimizer=num_trained * moments / num_shards,
    )


def estimate_memory(setting: MemorySetting) -> MemoryEstimate:
    """The peak of a training step and of the reference pass before it."""
    state, host = _held(setting)
    gathered = _gathered_bytes(setting)
    overhead = float(OVERHEAD_BYTES[setting.device])
    kept = kept_bytes(setting)
    layers = 1 if setting.checkpoints_activations else setting.shape.num_layers
    casts = layers * setting.shape.layer_parameters * 2.0 if setting.autocasts else 0.0
    working = max(head_bytes(setting), layer_backward_bytes(setting))
    if setting.optimizer == "adamw" and setting.trained_bytes == 2:
        working = max(working, float(TEMPORARY_BYTES[setting.device]))
    reference = 0.0
    if setting.reference_row is not None:
        forward = replace(setting, row=setting.reference_row)
        reference = state.parameters + gathered + overhead + forward_bytes(forward)
    return MemoryEstimate(
        state=state,
        host=host,
        gathered=gathered,
        casts=casts,
        activations=kept,
        working=working,
        overhead=overhead,
        reference_pass=reference,
    )


def _held(setting: MemorySetting) -> tuple[StateBytes, float]:
    """What a run holds all the time: on the device, and in bytes in the host's memory."""
    state = training_bytes(
        num_trained=setting.num_trained,
        num_frozen=setting.num_frozen,
        trained_bytes=setting.trained_bytes,
        frozen_bytes=setting.frozen_bytes,
        optimizer=setting.optimizer,
        num_shards=setting.num_shards,
    )
    host = state.total if setting.offloads_state else 0.0
    gradients = state.gradients
    if setting.num_shards == 1:
        gradients *= setting.num_gradients
    if setting.holds_whole_gradients:
        gradients *= setting.num_shards
    elif setting.offloads_state:
        gradients = 0.0
    if setting.offloads_state:
        return StateBytes(parameters=0.0, gradients=gradients, optimizer=0.0), host
    return replace(state, gradients=gradients), host


def kept_bytes(setting: MemorySetting) -> float:
    """What a row's forward keeps for its backward, the output head's part aside.

    With activation checkpointing each layer keeps its input, and one layer at a time everything.
    """
    shape, row = setting.shape, setting.row
    one_layer = layer_bytes(setting)
    hidden = row.tokens * shape.hidden * _residual_bytes(setting)
    around = hidden * (2 if setting.lora_rank is None else 1)  # the final norm
    if setting.checkpoints_activations:
        return around + shape.num_layers * hidden + one_layer
    return around + shape.num_layers * one_layer


def layer_bytes(setting: MemorySetting) -> float:
    """What one layer keeps of a row without checkpointing.

    Norms keep their input, in fp32 where they are written in Python, and what their weight is multiplied by;
    each linear layer its input, under autocast its own cast copy of it; attention its operands and result;
    the feed-forward part what its activation is differentiated with. The last layer keeps less: there that
    part runs at scored positions alone.
    """
    shape, row = setting.shape, setting.row
    product, residual = setting.activation_bytes, _residual_bytes(setting)
    trains_model = setting.lora_rank is None
    norms = shape.norms * residual
    if shape.keeps_wide_norms:
        norms = shape.norms * (4 + (residual if trains_model else 0))
    if trains_model and not setting.autocasts:
        inputs = (2 * shape.hidden + shape.inner) * product
    elif trains_model:
        inputs = (shape.num_readers * shape.hidden + shape.inner) * product
    else:
        inputs = _adapter_input_bytes(setting)
    is_grouped = setting.shares_key_heads
    keys_values = (shape.keys + shape.values) if is_grouped else (shape.queries + shape.attended)
    attention = (shape.queries + shape.attended) * product
    inner = shape.kept_inner * product + shape.experts * residual
    return row.tokens * (norms + inputs + attention + inner) + row.keys * keys_values * product


def _adapter_input_bytes(setting: MemorySetting) -> float:
    """A token's: adapters are in fp32, and read their layer's input as that, or as autocast casts it."""
    shape, rank = setting.shape, setting.lora_rank or 0
    num_linears = shape.num_readers + 2
    if setting.autocasts:
        return (shape.linear_inputs + num_linears * rank) * setting.activation_bytes
    if setting.activation_bytes == 4:
        return (2 * shape.hidden + shape.inner + num_linears * rank) * 4
    return (shape.linear_inputs + num_linears * rank) * 4


def layer_backward_bytes(setting: MemorySetting) -> float:
    """Gradients of activations and of one weight while a layer's backward is under way."""
    shape, product, residual = setting.shape, setting.activation_bytes, _residual_bytes(setting)
    activations = 3 * shape.inner * product + 3 * shape.hidden * residual + shape.experts * residual
    weight = shape.hidden * max(shape.inner, shape.queries) * setting.trained_bytes
    return setting.row.tokens * activations + (weight if setting.lora_rank is None else 0.0)


def head_bytes(setting: MemorySetting) -> float:
    """The output head's buffers: one chunk of logits and what adds up over the chunks, see logps.py."""
    shape, num_tokens, product = setting.shape, setting.row.scored, setting.activation_bytes
    logits = 4.0 * num_tokens * shape.vocabulary
    bounds = HEAD_BOUNDS[setting.device]
    kept = min(float(bounds.kept_bytes), logits) if setting.trains_head else 0.0
    chunk_tokens = min(bounds.tokens_in_chunk(4 * shape.vocabulary), num_tokens)
    chunk = 8.0 * chunk_tokens * shape.vocabulary * (1.25 if product == 2 else 1.0)
    hidden = 3.0 * num_tokens * shape.hidden * product
    weight = shape.head_parameters * (2.0 if setting.autocasts else 0.0)  # its cast
    if setting.trains_head:
        # The gradient adds up in fp32; in low precision a chunk's product and the result's cast come on top.
        weight += shape.head_parameters * (4.0 + (2.0 if product == 2 else 0.0))
    return chunk + kept + hidden + weight


def forward_bytes(setting: MemorySetting) -> float:
    """A row's forward without gradients: one layer's widest moment, or the head's."""
    shape, row = setting.shape, setting.row
    product, residual = setting.activation_bytes, _residual_bytes(setting)
    token = 4 * shape.hidden * max(residual, 4) + 3 * shape.inner * product + shape.experts * residual
    layer = row.tokens * token + (2.0 * shape.layer_parameters if setting.autocasts else 0.0)
    frozen = replace(setting, trains_head=False)
    return max(layer, head_bytes(frozen) + row.tokens * shape.hidden * residual)


def _residual_bytes(setting: MemorySetting) -> int:
    """Autocast leaves the stream between layers in fp32."""
    return 4 if setting.autocasts else setting.activation_bytes


def _gathered_bytes(setting: MemorySetting) -> float:
    """Shards put together: two layers' weights, the next one fetched early, one's gradient, and what is
    outside the layers, whole from forward to backward."""
    if setting.num_shards == 1:
        return 0.0
    shape = setting.shape
    outside = shape.head_parameters + shape.other_parameters
    trained = setting.trained_bytes if setting.lora_rank is None else setting.frozen_bytes
    gradient = shape.layer_parameters * trained if setting.lora_rank is None else 0.0
    return (2 * shape.layer_parameters + outside) * trained + gradient
