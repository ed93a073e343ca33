"""Attention on CUDA, one call for a row: with FlashAttention's kernel or torch's FlexAttention.

torch has FlashAttention's kernel, and so has the optional package flash-attn, which supports more models. It
takes bf16 or fp16. FlexAttention is for logit softcaps (Gemma 2) and sinks (gpt-oss); it computes only those
blocks of 128 x 128 logits in which a query sees a key, and copies no shared keys.

Legend: T tokens of the row, K keys of all segments (see segments.py), H heads, D head dimension. All take
[T, H, D] queries, [K, H_kv, D] keys, [K, H_kv, D_v] values, and return [T, H, D_v].
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.model.attention.segments import (
    AttentionOptions,
    RowSegments,
    as_autocast,
    attend_gathered,
    deterministic_kernels,
    numbered,
    on_device,
)
from dpo_pack.system.errors import first_line

_operators: Any = torch.ops.aten
_BLOCK = 128  # of FlexAttention


def flash_attn_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "flash_attn", which calls the kernel of the flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    assert options.sinks is None  # select_backend refuses these models
    query, key, padded = as_autocast(query, key, _as_wide(value, query))
    longest = max(segments.query_lengths), max(segments.key_lengths)
    lengths = (segments.cu_seqlens_q, segments.cu_seqlens_k, *longest)
    how = {"window_size": _neighbours(options.window), "softcap": options.softcap or 0.0}
    how |= {"softmax_scale": options.scale, "causal": True, "deterministic": True}
    kernel = functools.partial(flash_attn_varlen_func, query, **how)
    out = attend_gathered(lambda *states: kernel(*states, *lengths), key, padded, segments.kv_gather)
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
    with deterministic_kernels():  # the kernel reads torch's global mode
        of_query, of_key, of_value = _operators._flash_attention_backward(
            grad, *states, out, normalizers, *arguments, state, state, **options
        )
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
    query, key, value = as_autocast(query, key, value)
    kind = ("flex", window, segments.kv_gather is None)
    block_mask = segments.once(kind, lambda: _block_mask(segments, window, query.device))
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
    """Returns torch's BlockMask of the row: in each segment causal, with the last query at the last key. A
    path is where it is in the row: in series of adjacent keys, of which a query sees a part each."""
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens, at = sum(segments.query_lengths), 0
    num_keys = sum(segments.key_lengths) if segments.kv_gather is None else num_tokens
    # Always as many, because torch compiles the kernel again for another number.
    series = range(3 if max(map(len, segments.key_runs())) > 1 else 1)
    first = np.ones((len(series), num_tokens), dtype=np.int32)  # key that each query sees of a series
    last = np.zeros_like(first)
    lengths = zip(segments.query_lengths, segments.key_lengths, segments.key_runs(), strict=True)
    for queries, keys, runs in lengths:
        place, before = np.arange(keys - queries, keys), 0  # of the queries, and of the series, on the path
        for number, (start, end) in enumerate(runs):
            hidden = 0 if window is None else np.maximum(0, place - window + 1 - before)
            first[number, at : at + queries] = start + hidden
            last[number, at : at + queries] = start - 1 + np.minimum(end - start, place + 1 - before)
            before += end - start
        at += queries
    # [query blocks, key blocks]: whether a query of the one sees a key of the other
    num_blocks = [-(-count // _BLOCK) for count in (num_tokens, num_keys)]
    edges = np.zeros((num_blocks[0], num_blocks[1] + 1), dtype=np.int32)
    seen, query = first <= last, np.broadcast_to(np.arange(num_tokens), first.shape)
    np.add.at(edges, (query[seen] // _BLOCK, first[seen] // _BLOCK), 1)
    np.add.at(edges, (query[seen] // _BLOCK, last[seen] // _BLOCK + 1), -1)
    touched = edges.cumsum(axis=1)[:, :-1] > 0
    bounds = [(on_device(first[number], device), on_device(last[number], device)) for number in series]

    def mask(batch: Tensor, head: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        sees = [(first_key[at] <= key_at) & (key_at <= last_key[at]) for first_key, last_key in bounds]
        return functools.reduce(operator.or_, sees)

    # In each line (a block of queries), BlockMask wants the key blocks that the queries see first.
    order = np.argsort(~touched, axis=1, kind="stable").astype(np.int32)
    counts = touched.sum(axis=1, dtype=np.int32)
    return BlockMask.from_kv_blocks(
        on_device(counts, device)[None, None],
        on_device(order, device)[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(num_tokens, num_keys),
    )
