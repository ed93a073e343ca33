"""Attention on CUDA, one call for a row: with FlashAttention's kernel or torch's FlexAttention.

torch has FlashAttention's kernel, and so has the optional package flash-attn, which supports more models. It
takes bf16 or fp16. FlexAttention is for logit softcaps (Gemma 2) and sinks (gpt-oss); it computes only those
blocks of 128 x 128 logits in which a query sees a key.

Legend: T tokens of the row, K keys of all segments (see segments.py), H heads, D head dimension. All take
[T, H, D] queries, [K, H_kv, D] keys, [K, H_kv, D_v] values, and return [T, H, D_v].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, as_autocast, numbered, on_device
from dpo_pack.system.errors import first_line

_memory: Any = deterministic  # torch's module has this setting as a property, which mypy does not see
_operators: Any = torch.ops.aten
_BLOCK = 128  # of FlexAttention


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
    if segments.kv_gather is not None:  # has no zeros; this operator has its own backward pass
        key, value = (states.index_select(0, segments.kv_gather.index) for states in (key, value))
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


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "flex"."""
    from torch.nn.attention.flex_attention import AuxRequest

    def score(logit: Tensor, batch: Tensor, head: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(logit / softcap)

    softcap, window = options.softcap, options.window
    if segments.kv_gather is not None:
        key, value = map(segments.kv_gather, (key, value))
    query, key, value = as_autocast(query, key, value)
    block_mask = segments.once(("flex", window), lambda: _block_mask(segments, window, query.device))
    out, aux = _kernel(query.device.type)(
        *(states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)),
        score_mod=None if softcap is None else score,
        block_mask=block_mask,
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out = out.squeeze(0).transpose(0, 1)  # [T, H, D_v]
    if options.sinks is not None:
        # A sink is one more logit of the softmax, without a value. So it multiplies the weights of all keys
        # by Z / (Z + exp(sink)), where Z is the sum of exp(logit) over the keys.
        share = torch.sigmoid(aux.lse.squeeze(0).transpose(0, 1) - options.sinks.float())  # [T, H]
        out = (out.float() * share.unsqueeze(-1)).to(out.dtype)
    return out  # type: ignore[no-any-return]


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Returns FlexAttention, compiled on CUDA. Elsewhere torch computes it without a fused kernel."""
    from torch.nn.attention import flex_attention as torch_flex

    plain: Callable[..., Any] = torch_flex.flex_attention
    if device_type != "cuda":
        return plain
    # Without `fullgraph`, torch may compute all T x K logits of attention and say nothing. A softcap must be
    # a constant of the code: torch cannot compile a backward pass with a symbolic number in a score.
    constants = torch._dynamo.config.patch(specialize_float=True)
    compiled: Callable[..., Any] = constants(torch.compile(plain, dynamic=True, fullgraph=True))
    return compiled


def _block_mask(segments: RowSegments, window: int | None, device: torch.device) -> Any:
    """Returns torch's BlockMask of the row: in each segment causal, with the last query at the last key."""
    from torch.nn.attention.flex_attention import BlockMask

    first_keys, last_keys = [], []  # that each query sees
    starts = pairwise(accumulate(segments.key_lengths, initial=0))
    for num_queries, (start, end) in zip(segments.query_lengths, starts, strict=True):
        own = np.arange(end - num_queries, end, dtype=np.int32)
        last_keys.append(own)
        first_keys.append(np.full_like(own, start) if window is None else np.maximum(start, own - window + 1))
    first, last = np.concatenate(first_keys), np.concatenate(last_keys)  # [T] each
    # [query blocks, key blocks]: whether a query of the one sees a key of the other
    num_blocks = [-(-count // _BLOCK) for count in (len(first), sum(segments.key_lengths))]
    edges = np.zeros((num_blocks[0], num_blocks[1] + 1), dtype=np.int32)
    block = np.arange(len(first)) // _BLOCK
    np.add.at(edges, (block, first // _BLOCK), 1)
    np.add.at(edges, (block, last // _BLOCK + 1), -1)
    touched = edges.cumsum(axis=1)[:, :-1] > 0
    first_key, last_key = on_device(first, device), on_device(last, device)

    def mask(batch: Tensor, head: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        return (first_key[at] <= key_at) & (key_at <= last_key[at])

    # In each line (a block of queries), BlockMask wants the key blocks that the queries see first.
    order = np.argsort(~touched, axis=1, kind="stable").astype(np.int32)
    counts = touched.sum(axis=1, dtype=np.int32)
    return BlockMask.from_kv_blocks(
        on_device(counts, device)[None, None],
        on_device(order, device)[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(len(first), sum(segments.key_lengths)),
    )
