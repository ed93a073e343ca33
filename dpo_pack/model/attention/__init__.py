"""The *seam*: the one function through which a model's attention layers call our attention kernels.

A row is one model input that holds several sequences; its layout says which tokens see which. transformers
calls `row_attention` instead of its own attention for every model whose config names `ATTENTION_NAME`.
`model(...)` passes the layout on to it as the keyword argument `row_segments`, because checkpointing
recomputes layers when a global variable could already describe another row. No mask function has this name,
so transformers builds no masks and does not search for packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dpo_pack.model.attention.flash import flash_attn_attention, torch_varlen_attention
from dpo_pack.model.attention.flex import flex_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments
from dpo_pack.system.errors import UnsupportedModelError

# Names containing "flash", "sdpa", "flex_attention", "/" or "paged|" have a meaning in transformers.
ATTENTION_NAME = "dpo_pack_rows"

# (queries [T, H, D], keys [K, H_kv, D], values [K, H_kv, D_v], segments, options) -> [T, H, D_v]
AttentionBackend = Callable[..., Tensor]


@dataclass(slots=True)
class SeamCalls:
    """Counts how often one forward calls our attention and our functions of recurrent layers.

    `scorer.py` compares the counts with the numbers of such layers, so no layer can compute without them.
    """

    count: int = 0  # calls of `row_attention`
    recurrent: int = 0  # calls of our functions for recurrent layers, see recurrence/__init__.py


def register_attention() -> None:
    """Registers `row_attention` with transformers as `ATTENTION_NAME`. A second call does no harm."""
    AttentionInterface.register(ATTENTION_NAME, _seam())


@functools.cache
def _seam() -> Callable[..., Any]:
    """Returns `row_attention` in a form that torch.compile does not compile, see model/compiling.py.

    Every call returns the same object, because torch would compile the layers again for another object.
    """
    seam: Callable[..., Any] = torch.compiler.disable(row_attention, reason="a row's layout is not compiled")
    return seam


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_segments: RowSegments | None = None,
    row_backend: AttentionBackend | None = None,
    seam_calls: SeamCalls | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Computes attention of one row: [1, H, T, D] queries, [1, H_kv, T, D] keys and values -> [1, T, H, D_v].

    H are heads, T the row's tokens. The arguments are those of transformers' attention interface, and ours:
    `row_segments` (the row's layout), `row_backend` (the function that computes) and `seam_calls` (counters).
    Raises UnsupportedModelError when the model's code does not pass our arguments on to its attention, or
    when it uses attention in a way that a packed row does not allow.
    """
    if row_segments is None or row_backend is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, so the sequences "
            "of a row cannot be kept apart; use packing.mode: padded"
        )
    if getattr(module, "is_causal", True) is False:  # some families have no such attribute
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens as well, so it would see the next "
            "sequence of a row; use a causal model"
        )
    if dropout > 0.0:
        raise UnsupportedModelError(
            f"{type(module).__name__} runs with attention dropout {dropout}, but packed rows are exact only "
            "without dropout; set it to 0 in the model's config.json"
        )
    if query.shape[0] != 1 or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} called attention with a batch of {query.shape[0]} rows or with its own "
            "mask, which a packed row cannot have; use packing.mode: padded"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to {key.shape[2]} keys in a row of {query.shape[2]} tokens; "
            "it adds keys that belong to no sequence of the row; use packing.mode: padded"
        )
    if seam_calls is not None:
        seam_calls.count += 1
    # We do not write `states[0]`, because its backward pass fills a tensor with zeros and copies the gradient
    # into it. The backward pass of `squeeze` only makes a view.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    out = row_backend(
        query,
        row_segments.gather(key),
        row_segments.gather(value),
        row_segments,
        AttentionOptions(
            scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        ),
    )
    return out.unsqueeze(0), None


# The setting `auto` tries the backends in this order. Under autocast each backend computes in autocast's
# dtype, because torch or `as_autocast` casts its inputs.
BACKENDS: dict[str, AttentionBackend] = {
    "flash_attn": flash_attn_attention,
    "torch_varlen": torch_varlen_attention,
    "flex": flex_attention,
    "sdpa": sdpa_attention,
}
