"""The attention segments of one row on a device, and the gather that copies shared keys and values for them.

A row holds several sequences, and tokens that sequences share (a prompt) only once. A *segment* is the
attention of one sequence: its queries are the tokens that the sequence adds to the row, its keys are all of
the sequence's tokens. So each segment gets its own copy of shared keys: the *gathered* keys are the keys of
all segments, one segment after another. model/layout.py has an example.

Legend: T tokens of the row, K gathered keys, G segments, H heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


# No code assigns to these fields. But the class is not frozen, because torch.compile of torch 2.10 takes the
# fields of a frozen dataclass as constants: it would compile each layer again for each number of segments.
@dataclass(eq=False, slots=True, kw_only=True)
class RowSegments:
    """Lengths and indices for the attention of one row; `model(...)` takes them as a keyword argument.

    Segment g attends from `query_lengths[g]` consecutive row positions to `key_lengths[g]` consecutive
    gathered keys. Its attention is causal, and its last query stands at its last key (bottom-right).
    """

    query_lengths: tuple[int, ...]  # [G]
    key_lengths: tuple[int, ...]  # [G]
    cu_seqlens_q: Tensor  # [G+1] int32
    cu_seqlens_k: Tensor  # [G+1] int32
    kv_index: Tensor | None  # [K] int64, row position of each gathered key; None: nothing is shared (K = T)
    kv_first: Tensor | None  # [T] int64, the first index of each row position in `kv_index`
    kv_repeats: tuple[tuple[Tensor, Tensor], ...]  # (row positions, indices of further copies in `kv_index`)
    # [G]: how many first tokens the sequence shares with the others of its group (a pair). In a group's first
    # segment they are queries and keys, in the other segments only keys. Only recurrent layers need it.
    shared_lengths: tuple[int, ...] = ()
    # [U] int64, ascending: row positions whose last hidden states are used; None: all positions
    scored_positions: Tensor | None = None
    # Filled at the first use and kept for all layers. Keys: (number of queries, number of keys, window), and
    # for `biases` also the dtype.
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)
    biases: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # of FlexAttention; key: window
    # For recurrent layers, see recurrence/pieces.py. The key of `pieces` is the number of tokens in a chunk
    # (or a word), the key of `histories` the number of tokens that a convolution covers.
    pieces: dict[int | str, Any] = field(default_factory=dict)
    histories: dict[int, Any] = field(default_factory=dict)

    def gather(self, states: Tensor) -> Tensor:
        """Copies the keys or values that each segment needs: [T, H, D] of the row -> [K, H, D]."""
        if self.kv_index is None:
            return states
        gathered: Tensor = _GatherSegments.apply(states, self)  # type: ignore[no-untyped-call]
        return gathered

    def mask(self, num_queries: int, num_keys: int, window: int | None) -> Tensor:
        """Returns a bool mask [num_queries, num_keys], True where attention is allowed: causal, bottom-right.

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
        """Returns the mask as numbers to add to attention logits: 0 if attention is allowed, -inf if not."""
        key = (num_queries, num_keys, window, dtype)
        if key not in self.biases:
            allowed = self.mask(num_queries, num_keys, window)
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self.biases[key] = zeros.masked_fill_(~allowed, float("-inf"))
        return self.biases[key]


class _GatherSegments(torch.autograd.Function):
    """`index_select` whose backward adds the gradients of copies in a fixed order and in at least fp32.

    On CUDA the backward of torch's `index_select` adds atomically, in any order. So the rounding differs from
    run to run, and in bf16 a sum over many copies loses small terms. Here each call of `index_add_` writes at
    most once to a position, so the order is fixed.
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


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts to autocast's dtype if autocast is on, for kernels for which torch has no autocast rule.

    Under autocast linear layers return this dtype, but rotary embeddings and norms turn queries and keys back
    into fp32. Backends cast after the copying of shared keys, so that the copies' gradients add up in fp32.
    """
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)
