"""The attention segments of one row on a device, and the gather that lets them share keys and values.

Legend: T tokens of the row, K gathered keys, G segments, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


# Never changed, but not frozen: torch.compile of torch 2.10 takes every field of a frozen dataclass for a
# constant of the code, and would compile each layer anew for each number of segments.
@dataclass(eq=False, slots=True, kw_only=True)
class RowSegments:
    """Variable-length attention metadata of one row; travels as a keyword argument through `model(...)`.

    Segment g attends from `query_lengths[g]` consecutive row positions to `key_lengths[g]` consecutive
    gathered keys, causally, with the last query aligned to the last key (bottom-right).
    """

    query_lengths: tuple[int, ...]  # [G]
    key_lengths: tuple[int, ...]  # [G]
    cu_seqlens_q: Tensor  # [G+1] int32
    cu_seqlens_k: Tensor  # [G+1] int32
    kv_index: Tensor | None  # [K] int64, None when K = T and the gather would be the identity
    kv_first: Tensor | None  # [T] int64
    kv_repeats: tuple[tuple[Tensor, Tensor], ...]
    scored_positions: Tensor | None = None  # [U] int64, ascending: read after the last layer; None: all
    # Masks by (queries, keys, window) and biases by those and dtype: the same in every layer, freed with
    # the row.
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)
    biases: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def max_seqlen_q(self) -> int:
        return max(self.query_lengths)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.key_lengths)

    def gather(self, states: Tensor) -> Tensor:
        """[T, H, D] keys or values of the row -> [K, H, D], each segment's own copy side by side."""
        if self.kv_index is None:
            return states
        gathered: Tensor = _GatherSegments.apply(states, self)  # type: ignore[no-untyped-call]
        return gathered

    def mask(self, num_queries: int, num_keys: int, window: int | None) -> Tensor:
        """[num_queries, num_keys] bool, True where attention is allowed: causal, aligned bottom-right.

        `window` counts the query's own position, as `sliding_window` does in transformers.
        """
        key = (num_queries, num_keys, window)
        if key not in self.masks:
            device = self.cu_seqlens_q.device
            query_at = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
            key_at = torch.arange(num_keys, device=device)[None, :]
            allowed = key_at <= query_at
            if window is not None:
                allowed &= key_at > query_at - window
            self.masks[key] = allowed
        return self.masks[key]

    def bias(self, num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """`mask` as what is added to attention logits: 0 where attention is allowed, -inf elsewhere."""
        key = (num_queries, num_keys, window, dtype)
        if key not in self.biases:
            allowed = self.mask(num_queries, num_keys, window)
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self.biases[key] = zeros.masked_fill_(~allowed, float("-inf"))
        return self.biases[key]


class _GatherSegments(torch.autograd.Function):
    """`index_select` whose backward adds the copies in a fixed order and in at least fp32.

    index_select's own backward is atomic adds on CUDA: another sum every run, and in bf16 with many
    branches a lossy one. Here every addition has unique targets.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, segments: RowSegments) -> Tensor:
        assert segments.kv_index is not None
        ctx.segments = segments
        return states.index_select(0, segments.kv_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        segments: RowSegments = ctx.segments
        assert segments.kv_first is not None
        total = grad.index_select(0, segments.kv_first)  # [T, H, D]
        accumulated = total if total.dtype == torch.float64 else total.float()
        for tokens, places in segments.kv_repeats:
            accumulated.index_add_(0, tokens, grad.index_select(0, places).to(accumulated.dtype))
        return accumulated.to(grad.dtype), None
