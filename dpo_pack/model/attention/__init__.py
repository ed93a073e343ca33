"""The *seam*: the one function through which a model's attention layers call our attention kernels.

transformers calls `row_attention` instead of its own attention for every model whose config names
`ATTENTION_NAME`. `model(...)` passes a row's layout on to it as the keyword argument `row_segments`, because
checkpointing recomputes layers when a global variable could already describe another row. No mask function
has this name, so transformers builds no masks and does not search for packed sequences.

Also chooses, for a model and a device, the attention backend: the function that computes attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dpo_pack.model.attention.cuda import (
    flash_attn_attention,
    flash_attn_obstacle,
    flex_attention,
    torch_varlen_attention,
)
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, make_segments
from dpo_pack.model.fast_layers import compiler_obstacle
from dpo_pack.system.errors import UnsupportedModelError, first_line, is_out_of_memory

# Names containing "flash", "sdpa", "flex_attention", "/" or "paged|" have a meaning in transformers.
ATTENTION_NAME = "dpo_pack_rows"

# (queries [T, H, D], keys [T, H_kv, D], values [T, H_kv, D_v], segments, options) -> [T, H, D_v]. It gathers
# keys and values; where segments have no `kv_gather`, it gets them gathered, [K, ...].
AttentionBackend = Callable[..., Tensor]


def register_attention() -> None:
    """Registers `row_attention` with transformers as `ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, _seam())


@functools.cache
def _seam() -> Callable[..., Any]:
    # Cached, because torch would compile the layers again for another object; see model/fast_layers.py.
    uncompiled = torch.compiler.disable(row_attention, reason="a row's layout is not compiled")

    def seam(*arguments: Any, **options: Any) -> Any:
        if options.get("row_backend") is torch_varlen_attention:  # an operator
            return row_attention(*arguments, **options)
        return uncompiled(*arguments, **options)

    return seam


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_segments: RowSegments | None = None,
    row_backend: AttentionBackend | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Computes attention of one row: [1, H, T, D] queries, [1, H_kv, T, D] keys and values -> [1, T, H, D_v].
    H are heads, T the row's tokens. The last two named arguments are ours, the others those of transformers'
    interface. Raises UnsupportedModelError when the model's code uses attention as a row does not allow."""
    obstacle, remedy = None, "use packing.mode: padded"
    if row_segments is None or row_backend is None:
        obstacle = "does not pass keyword arguments on to its attention, so it would mix sequences"
    elif getattr(module, "is_causal", True) is False:  # some families have no such attribute
        obstacle = "attends to later tokens as well, so it would see the next sequence of a row"
        remedy = "use a causal model"
    elif query.shape[0] != 1 or attention_mask is not None:
        obstacle = f"called attention with a batch of {query.shape[0]} rows or with its own mask"
    elif key.shape[2] != query.shape[2]:
        obstacle = f"attends to {key.shape[2]} keys in a row of {query.shape[2]} tokens: it adds keys"
    if obstacle is not None:
        raise UnsupportedModelError(f"{type(module).__name__} {obstacle}; {remedy}")
    assert row_segments is not None and row_backend is not None
    # The backward pass of `squeeze` only makes a view; that of `states[0]` would fill a tensor with zeros.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    options = AttentionOptions(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return row_backend(query, key, value, row_segments, options).unsqueeze(0), None


# The setting `auto` tries the backends in this order. Under autocast each backend computes in autocast's
# dtype, because torch or `as_autocast` casts its inputs.
BACKENDS: dict[str, AttentionBackend] = {
    "flash_attn": flash_attn_attention,
    "torch_varlen": torch_varlen_attention,
    "flex": flex_attention,
    "sdpa": sdpa_attention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The properties of a model's attention that decide which backends can compute it."""

    head_dim: int
    value_head_dim: int
    has_window: bool
    has_softcap: bool
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The chosen backend's name and a one-line reason: for `auto`, why it rejected the backends before."""

    name: str
    reason: str


def select_backend(
    requested: str, needs: AttentionNeeds, *, device: torch.device, dtype: torch.dtype
) -> BackendChoice:
    """Returns the requested backend, or for "auto" the first of `BACKENDS` that computes the model exactly in
    activations of `dtype`. Raises UnsupportedModelError when the requested backend cannot."""
    obstacles: list[str] = []
    for name in BACKENDS if requested == "auto" else (requested,):
        obstacle = backend_obstacle(name, needs, device=device, dtype=dtype)
        if obstacle is None:
            reason = "; ".join(obstacles) or "the fastest backend"
            reason = reason if requested == "auto" else "set by model.attention"
            return BackendChoice(name=name, reason=reason)
        obstacles.append(f"not {name}: {obstacle}")
    raise UnsupportedModelError(
        f"model.attention: {requested} cannot be used here: {obstacle}; use model.attention: auto"
    )


def backend_obstacle(
    name: str, needs: AttentionNeeds, *, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Returns why backend `name` cannot compute this model exactly on `device`, or None when it can."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return "it needs a CUDA device"
    if name != "flex":
        obstacle = _flash_obstacle(name, needs, dtype)
    elif needs.has_softcap or needs.has_sinks:
        obstacle = compiler_obstacle(device)
    else:
        obstacle = "the model has neither softcaps nor sinks, and only models with these need it"
    if obstacle is None and torch.cuda.is_available():
        obstacle = trial_obstacle(name, needs, device, dtype)
    return obstacle


@functools.cache
def trial_obstacle(name: str, needs: AttentionNeeds, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why backend `name` fails on `device`, or None: tried on a small row, forward and backward. A
    build may lack kernels of this GPU, of softcaps or of backward passes; a large head, shared memory."""
    states = torch.ones(8, 1, needs.head_dim, dtype=dtype, device=device, requires_grad=True)
    values = torch.ones(8, 1, needs.value_head_dim, dtype=dtype, device=device, requires_grad=True)
    options = AttentionOptions(
        scale=1.0,
        window=4 if needs.has_window else None,
        softcap=1.0 if needs.has_softcap else None,
        sinks=torch.zeros(1, device=device) if needs.has_sinks else None,
    )
    try:
        with torch.enable_grad():
            segments = make_segments((3, 5), (3, 5), device)
            BACKENDS[name](states, states, values, segments, options).sum().backward()
            values.cpu()  # waits: kernels may fail after their launch
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"its kernel does not run on this device ({first_line(error)})"
    return None


def _flash_obstacle(name: str, needs: AttentionNeeds, dtype: torch.dtype) -> str | None:
    """Returns what the kernel does not refuse by itself in a trial, or what says more than its error."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    if needs.has_sinks:
        return "the model has attention sinks, and its kernel cannot compute them"
    if needs.head_dim < needs.value_head_dim:
        return f"values have a larger head dimension ({needs.value_head_dim}) than keys ({needs.head_dim})"
    if name == "flash_attn":
        return flash_attn_obstacle()
    if torch.version.hip is not None:
        return "on ROCm torch's kernel aligns queries with the first keys, not with the last"
    if needs.has_softcap:
        return "the model caps attention logits, and its kernel cannot do this"
    return None
