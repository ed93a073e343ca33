"""Exact attention over many short segments on the CPU, one thread a segment.

torch's CPU kernel spreads each call over all threads. A row of preference pairs has dozens of calls a layer,
each too short for that to pay: measured on two cores with the segments of 32 HH pairs, a second thread makes
them 1.3 to 1.5 times as fast that way, 1.5 to 1.8 times with one thread a segment. What a segment computes
does not depend on the number of threads.

Legend: T tokens of the row, K gathered keys, G segments, H heads, D head dimension.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpo_pack.attention.autocast import as_autocast
from dpo_pack.attention.segments import RowSegments


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether torch's CPU kernel computes these: on the CPU, queries and values of one head dimension."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and _kernels() is not None


def cpu_segments_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, *, scale: float, window: int | None
) -> Tensor:
    """[T, H, D], [K, H, D], [K, H, D] -> [T, H, D]. Obeys autocast as `scaled_dot_product_attention` does."""
    states = as_autocast(query, key, value)
    out: Tensor = _CpuSegments.apply(*states, segments, scale, window)  # type: ignore[no-untyped-call]
    return out


class _CpuSegments(torch.autograd.Function):
    """The kernel that `scaled_dot_product_attention` calls on the CPU, called for each segment.

    One node for the whole row instead of one a segment; segments read and write disjoint slices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: RowSegments,
        scale: float,
        window: int | None,
    ) -> Tensor:
        kernels = _kernels()
        assert kernels is not None
        slices = _segment_slices(segments)
        options = [_kernel_options(segments, number, scale, window, query) for number in range(len(slices))]
        out = torch.empty_like(query)
        log_normalizers: list[Tensor] = [out] * len(slices)

        def attend(numbers: Sequence[int]) -> None:
            for number in numbers:
                queries, keys = slices[number]
                states = (_heads_first(query[queries]), _heads_first(key[keys]), _heads_first(value[keys]))
                attended, log_normalizers[number] = kernels.forward(*states, **options[number])
                _heads_first(out[queries]).copy_(attended)

        _on_threads(attend, segments)
        ctx.save_for_backward(query, key, value, out, *log_normalizers)
        ctx.segments, ctx.options, ctx.kernels = segments, options, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        query, key, value, out, *log_normalizers = ctx.saved_tensors
        slices, options, kernels = _segment_slices(ctx.segments), ctx.options, ctx.kernels
        grad_query, grad_key, grad_value = (torch.empty_like(states) for states in (query, key, value))

        def attend(numbers: Sequence[int]) -> None:
            for number in numbers:
                queries, keys = slices[number]
                parts = kernels.backward(
                    _heads_first(grad[queries]),
                    _heads_first(query[queries]),
                    _heads_first(key[keys]),
                    _heads_first(value[keys]),
                    _heads_first(out[queries]),
                    log_normalizers[number],
                    **options[number],
                )
                targets = (grad_query[queries], grad_key[keys], grad_value[keys])
                for target, part in zip(targets, parts, strict=True):
                    _heads_first(target).copy_(part)

        _on_threads(attend, ctx.segments)
        return grad_query, grad_key, grad_value, None, None, None


class _Kernels(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@functools.cache
def _kernels() -> _Kernels | None:
    """torch's kernel pair, None in a torch that has renamed it: it is not public, the call around it is."""
    operators = torch.ops.aten
    try:
        return _Kernels(
            operators._scaled_dot_product_flash_attention_for_cpu,
            operators._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    except AttributeError:
        return None


def _heads_first(states: Tensor) -> Tensor:
    """[L, H, D] -> [1, H, L, D], a view: what the kernel takes."""
    return states.transpose(0, 1).unsqueeze(0)


def _segment_slices(segments: RowSegments) -> list[tuple[slice, slice]]:
    """Where each segment's queries and keys lie."""
    query_ends = np.cumsum((0, *segments.query_lengths)).tolist()
    key_ends = np.cumsum((0, *segments.key_lengths)).tolist()
    return [
        (slice(*query_ends[number : number + 2]), slice(*key_ends[number : number + 2]))
        for number in range(len(segments.query_lengths))
    ]


def _kernel_options(
    segments: RowSegments, number: int, scale: float, window: int | None, query: Tensor
) -> dict[str, Any]:
    num_queries, num_keys = segments.query_lengths[number], segments.key_lengths[number]
    short = window if window is not None and window < num_keys else None
    is_causal = num_queries == num_keys and short is None
    bias = None if is_causal else segments.bias(num_queries, num_keys, short, query.dtype)
    return {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": bias, "scale": scale}


def _on_threads(attend: Callable[[Sequence[int]], None], segments: RowSegments) -> None:
    """Call `attend` with the numbers of all segments, shared out over threads where that is faster."""
    costs = [q * k for q, k in zip(segments.query_lengths, segments.key_lengths, strict=True)]
    num_threads = torch.get_num_threads()
    if num_threads == 1 or 2 * max(costs) * num_threads > 3 * sum(costs):
        # One long segment would keep the others waiting; the kernel spreads it over the threads itself.
        with torch.no_grad():
            attend(range(len(costs)))
        return

    def without_gradients(numbers: Sequence[int]) -> None:
        with torch.no_grad():  # a thread has its own grad mode
            attend(numbers)

    list(_pool(num_threads).map(without_gradients, _shares(costs, num_threads)))


def _shares(costs: Sequence[int], num_threads: int) -> list[list[int]]:
    """Longest first, each to the thread with the least so far."""
    shares: list[list[int]] = [[] for _ in range(num_threads)]
    loads = [0] * num_threads
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return [share for share in shares if share]


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """As many threads, in each of which torch's kernels run on that thread alone."""
    all_started = threading.Barrier(num_threads + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes torch's default when it first asks, which would undo this:
        torch.set_num_threads(1)  # OpenMP's setting of this thread, and torch's default for new ones
        all_started.wait()

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="segments", initializer=start)
    for _ in range(num_threads):
        pool.submit(lambda: None)
    all_started.wait()
    torch.set_num_threads(num_threads)
    return pool


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
