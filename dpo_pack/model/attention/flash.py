"""Attention on CUDA with FlashAttention's kernel for segments of any length.

torch has this kernel, and so has the optional package flash-attn, which supports more models. Both take
[T, H, D] queries, [K, H_kv, D] keys and values in bf16 or fp16, and return [T, H, D].

Legend: T tokens of the row, K keys of all segments (see segments.py), H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, as_autocast, numbered
from dpo_pack.system.errors import first_line

_memory: Any = deterministic  # torch's module has this setting as a property, which mypy does not see
_operators: Any = torch.ops.aten


def flash_attn_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "flash_attn", which calls the kernel of the flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    assert options.sinks is None  # select_backend refuses these models
    if segments.kv_gather is not None:
        key, value = map(segments.kv_gather, (key, value))
    out: Tensor = flash_attn_varlen_func(
        *as_autocast(query, key, _as_wide(value, query)),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        max(segments.query_lengths),
        max(segments.key_lengths),
        softmax_scale=options.scale,
        causal=True,
        window_size=_neighbours(options.window),
        softcap=options.softcap or 0.0,
        deterministic=True,
    )
    return out[..., : value.shape[-1]]


def torch_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "torch_varlen", which calls torch's own kernel. For torch.compile it is one operator, which
    also gathers."""
    assert options.softcap is None and options.sinks is None  # select_backend refuses these models
    states = as_autocast(query, key, _as_wide(value, query))
    out, _ = _attend(*states, segments.number, options.scale, _neighbours(options.window)[0])
    attended: Tensor = out[..., : value.shape[-1]]
    return attended


def _as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Pads values with zeros to the width of queries, which the kernels want: latent attention has less."""
    missing = query.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing else value


# `row` is the number of the RowSegments, `left` how many keys before its own a query sees (-1: all). The
# results are the output, and for the backward pass the log-normalizers.
@torch.library.custom_op("dpo_pack::attend", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, row: int, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    segments = numbered(row)
    states, arguments, options = _kernel_arguments(segments, query, key, value, scale, left)
    out, normalizers, *_ = _operators._flash_attention_forward(*states, *arguments, False, **options)
    return out, normalizers


@torch.library.custom_op("dpo_pack::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizers: Tensor,
    row: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = numbered(row)
    states, arguments, options = _kernel_arguments(segments, query, key, value, scale, left)
    state = grad.new_empty(2, dtype=torch.uint64)  # which only dropout needs
    # The kernel reads torch's global mode, which is on only here: others could raise errors in it.
    before, fills = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("error")
        _memory.fill_uninitialized_memory = False  # the kernel writes all that it allocates
        of_query, of_key, of_value = _operators._flash_attention_backward(
            grad, *states, out, normalizers, *arguments, state, state, **options
        )
    finally:
        torch.set_deterministic_debug_mode(before)
        _memory.fill_uninitialized_memory = fills
    if segments.kv_gather is not None:
        of_key, of_value = map(segments.kv_gather.gradient, (of_key, of_value))
    return of_query, of_key.contiguous(), of_value.contiguous()  # whether gathered or not


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@_attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]
    ctx.set_materialize_grads(False)  # else torch fills zeros for the normalizers


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    return (*_attend_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 3)


_attend.register_autograd(_differentiate, setup_context=_save)


def _kernel_arguments(
    segments: RowSegments, query: Tensor, key: Tensor, value: Tensor, scale: float, left: int
) -> tuple[tuple[Tensor, ...], list[Any], dict[str, Any]]:
    if segments.kv_gather is not None:
        key, value = map(segments.kv_gather.take, (key, value))
    longest = max(segments.query_lengths), max(segments.key_lengths)
    is_causal, dropout = left < 0, 0.0  # with `is_causal` the kernel takes no window
    arguments = [segments.cu_seqlens_q, segments.cu_seqlens_k, *longest, dropout, is_causal]
    return (query, key, value), arguments, {"scale": scale, "window_size_left": left, "window_size_right": 0}


def flash_attn_obstacle() -> str | None:
    """Returns why the flash-attn package's kernel cannot be called, or None when it can."""
    try:  # the wheel `flash-attn-4` installs a package of this name without the function
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # also if a CUDA library is missing or was built for another torch
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return "package flash-attn is not installed"
        return f"package flash-attn cannot be used ({first_line(error)})"
    return None


def _neighbours(window: int | None) -> tuple[int, int]:
    """Returns how many keys a query sees to its (left, right), -1 for all. `window` counts its own, too."""
    return (-1 if window is None else window - 1, 0)
