"""Attention with torch's scaled_dot_product_attention (SDPA), one call for each segment. Runs on all devices.

A segment is the attention of one sequence of a row. On the CPU, where heads of queries and values are equally
wide, we call the kernel behind SDPA directly, and each thread computes whole segments: SDPA divides each call
among all threads, and for that calls of one segment are too short. The number of threads does not change the
results.

Legend: T tokens of the row, K keys of all segments (see segments.py), L queries or keys of one segment,
H heads, D head dimension.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, as_autocast

Value = TypeVar("Value")


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "sdpa": queries [T, H, D], keys [T, H_kv, D], values [T, H_kv, D_v] -> [T, H, D_v]."""
    is_plain = options.softcap is None and options.sinks is None
    is_on_cpu, has_one_width = query.device.type == "cpu", query.shape[-1] == value.shape[-1]
    if is_plain and is_on_cpu and has_one_width and _cpu_kernel() is not None:
        states = as_autocast(query, key, value)
        attended: Tensor = _CpuSegments.apply(*states, segments, options)  # type: ignore[no-untyped-call]
        return attended
    # A layer keeps the row's states only: its backward pass gathers, and computes attention, once more.
    again = functools.partial(checkpoint, _segment_by_segment, use_reentrant=False, preserve_rng_state=False)
    attend: Callable[..., Tensor] = _segment_by_segment if segments.kv_gather is None else again
    return attend(query, key, value, segments, options)


def _segment_by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    if segments.kv_gather is not None:
        key, value = map(segments.kv_gather, (key, value))
    if (num_groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (states.repeat_interleave(num_groups, dim=1) for states in (key, value))
    is_plain = options.softcap is None and options.sinks is None
    blocks, outputs = segments.blocks(options.window, has_masks=not is_plain), []
    # We split once and do not slice, because each slice's backward would write a whole [T, H, D] gradient.
    lengths = [queries.stop - queries.start for queries, _, _ in chain.from_iterable(blocks)]
    of_blocks = iter(query.split(lengths))
    of_segments = (states.split(segments.key_lengths) for states in (key, value))
    for of_segment, *keys_values in zip(blocks, *of_segments, strict=True):
        # Several blocks read a key. Their gradients add up in at least fp32.
        dtype = key.dtype if len(of_segment) == 1 else torch.promote_types(key.dtype, torch.float32)
        wide = [states.to(dtype) for states in keys_values]
        for _, keys, mask in of_segment:
            q = _heads_first(next(of_blocks))
            k, v = (_heads_first(states if mask is None else states[keys].to(key.dtype)) for states in wide)
            if mask is None or is_plain:
                choices = {"attn_mask": mask, "is_causal": mask is None, "scale": options.scale}
                outputs.append(F.scaled_dot_product_attention(q, k, v, **choices))
            else:
                outputs.append(_eager_attention(q, k, v, mask, options))
    return torch.cat([out.squeeze(0).transpose(0, 1) for out in outputs])


def _heads_first(states: Tensor) -> Tensor:
    """Returns a view, [L, H, D] -> [1, H, L, D], because torch's fused kernels take only four dimensions."""
    return states.transpose(0, 1).unsqueeze(0)


def _eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """With logit softcaps (Gemma 2) or attention sinks (gpt-oss): queries [1, H, Lq, D], keys [1, H, Lk, D],
    values [1, H, Lk, D_v] -> [1, H, Lq, D_v]."""
    scores = query @ key.transpose(-1, -2) * options.scale  # [1, H, Lq, Lk]
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value


@functools.cache
def _cpu_kernel() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, ...]]] | None:
    """Returns (forward, backward) of SDPA's kernel on the CPU; None if the installed torch lacks them."""
    operators = torch.ops.aten
    try:
        return (
            operators._scaled_dot_product_flash_attention_for_cpu,
            operators._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    except AttributeError:  # these operators are private, so a torch release can rename them
        return None


class _CpuSegments(torch.autograd.Function):
    """Calls the CPU kernel for each segment; for autograd the whole row is one node. It keeps the row's keys
    and values, and copies those of a segment while it computes the segment, forward and again backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
    ) -> Tensor:
        kernel = _cpu_kernel()
        assert kernel is not None
        blocks, runs = segments.blocks(options.window, query.dtype), segments.key_runs()
        out, num_groups = torch.empty_like(query), query.shape[1] // key.shape[1]

        @torch.no_grad()  # each thread has its own grad mode
        def attend(number: int) -> list[Tensor]:
            k, v = (_of_segment(states, runs[number]) for states in (key, value))
            log_normalizers = []
            for queries, keys, mask in blocks[number]:
                states = _by_key_head(num_groups, query[queries], k[keys], v[keys])
                how = {"is_causal": mask is None, "attn_mask": mask, "scale": options.scale}
                attended, log_normalizer = kernel[0](*states, **how)
                _by_key_head(num_groups, out[queries])[0].copy_(attended)
                log_normalizers.append(log_normalizer)
            return log_normalizers

        log_normalizers = list(_on_threads(attend, segments))
        ctx.save_for_backward(query, key, value, out, *chain.from_iterable(log_normalizers))
        ctx.segments, ctx.blocks, ctx.kernel, ctx.scale = segments, blocks, kernel[1], options.scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, *saved = ctx.saved_tensors
        num_groups, runs = query.shape[1] // key.shape[1], ctx.segments.key_runs()
        firsts = list(accumulate(map(len, ctx.blocks), initial=0))  # in `saved`, of each segment
        # Gradients of several segments and blocks add up, in at least fp32.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(states, dtype=wide) for states in (key, value))

        @torch.no_grad()
        def attend(number: int) -> list[Tensor]:
            """Returns the gradients of the segment's keys and values, [K, H_kv, D] each."""
            k, v = (_of_segment(states, runs[number]) for states in (key, value))
            is_whole = len(ctx.blocks[number]) == 1
            totals = [] if is_whole else [torch.zeros_like(states, dtype=wide) for states in (k, v)]
            for place, (queries, keys, mask) in enumerate(ctx.blocks[number]):
                of_block = (grad[queries], query[queries], k[keys], v[keys], out[queries])
                states = (*_by_key_head(num_groups, *of_block), saved[firsts[number] + place])
                parts = ctx.kernel(*states, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
                _by_key_head(num_groups, grad_query[queries])[0].copy_(parts[0])
                of_keys = [  # [H_kv, K, D]
                    part.sum(dim=1, dtype=wide) if num_groups > 1 else part[:, 0] for part in parts[1:]
                ]
                for total, part in zip(totals, of_keys, strict=False):
                    total[keys] += part.transpose(0, 1)
            return totals or [part.transpose(0, 1) for part in of_keys]

        for of_segment, parts in zip(runs, _on_threads(attend, ctx.segments), strict=True):
            for total, part in zip((grad_key, grad_value), parts, strict=True):
                pieces = part.split([end - start for start, end in of_segment])
                for (start, end), piece in zip(of_segment, pieces, strict=True):
                    total[start:end] += piece
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _of_segment(states: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Returns a segment's keys or values: [T, H_kv, D] -> [K, H_kv, D]."""
    parts = [states[start:end] for start, end in runs]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _by_key_head(num_groups: int, *states: Tensor) -> list[Tensor]:
    """Returns views [H_kv, G, L, D] of queries [L, H_kv * G, D], and of keys [L, H_kv, D], each of which G
    heads of queries read. The first state is of queries."""
    heads = states[0].shape[1] // num_groups
    by_head = [one.unflatten(1, (heads, -1)).permute(1, 2, 0, 3) for one in states]
    return [one.expand(-1, num_groups, -1, -1) for one in by_head]


def _on_threads(attend: Callable[[int], Value], segments: RowSegments) -> Iterable[Value]:
    """Returns `attend` of the index of each segment, in order; divides them among threads if that is faster.
    In one thread each is computed when it is asked for."""
    costs = [q * k for q, k in zip(segments.query_lengths, segments.key_lengths, strict=True)]
    num_threads = torch.get_num_threads()
    if num_threads == 1 or 2 * max(costs) * num_threads > 3 * sum(costs):
        # One segment has most of the work. Called in this thread, the kernel uses all threads for it.
        return map(attend, range(len(costs)))
    shares: list[list[int]] = [[] for _ in range(num_threads)]
    loads = [0] * num_threads
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):  # the costliest first
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    results = _pool(num_threads).map(lambda share: [attend(number) for number in share], shares)
    found = dict(zip(chain.from_iterable(shares), chain.from_iterable(results), strict=True))
    return [found[number] for number in range(len(costs))]


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Starts a pool of `num_threads` threads. A kernel called in one of them uses only that thread."""
    all_started = threading.Barrier(num_threads + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread sets the number to torch's default
        torch.set_num_threads(1)  # for OpenMP in this thread, and as torch's default for new threads
        all_started.wait()

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="segments", initializer=start)
    for _ in range(num_threads):
        pool.submit(lambda: None)
    all_started.wait()
    torch.set_num_threads(num_threads)
    return pool


# A forked process has its parent's cached pools, but not their threads. So it must start its own.
os.register_at_fork(after_in_child=_pool.cache_clear)
