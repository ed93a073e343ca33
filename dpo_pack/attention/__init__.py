"""The one seam to attention kernels.

transformers calls `row_attention` in place of its own kernels for every model whose config names
`ATTENTION_NAME`. The layout travels as the keyword argument `row_segments` through `model(...)`, never
through a global: activation checkpointing recomputes layers in the backward pass, when a global would
describe another row.

No mask function is registered under the name, which makes transformers skip mask building and its
packed-sequence detection altogether.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpo_pack.attention.flash_attn import flash_attn_attention
from dpo_pack.attention.sdpa import sdpa_attention
from dpo_pack.attention.segments import RowSegments
from dpo_pack.attention.torch_varlen import torch_varlen_attention
from dpo_pack.errors import UnsupportedModelError

# Names containing "flash", "sdpa", "flex_attention", "/" or "paged|" mean something to transformers.
ATTENTION_NAME = "dpo_pack_rows"

AttentionBackend = Callable[..., Tensor]


@dataclass(slots=True)
class SeamCalls:
    """Counts what reached the seam in one forward; `models.py` compares it with the layer count."""

    count: int = 0


def register_attention() -> None:
    """Make transformers know `ATTENTION_NAME`. Safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _seam())


@functools.cache
def _seam() -> Callable[..., Any]:
    """`row_attention`, outside of what is compiled: see compiling.py. One object, because compiled code
    that met another would be compiled anew."""
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
    """[1, H, T, D] queries, [1, H_kv, T, D] keys and values of one row -> [1, T, H, D_v].

    The signature is transformers' attention interface; `row_*` and `seam_calls` are ours.

    Raises UnsupportedModelError when the model's code did not hand our keyword arguments down to its
    attention layers, or asks for something that no packed row can have.
    """
    if row_segments is None or row_backend is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, so rows cannot "
            "be kept apart; use packing.mode: padded"
        )
    if getattr(module, "is_causal", True) is False:  # not every family's attention says
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens as well, which no packed row can have; use a "
            "causal model"
        )
    if dropout > 0.0:
        raise UnsupportedModelError(
            f"{type(module).__name__} runs with attention dropout {dropout}; packed rows are exact only "
            "without dropout"
        )
    if query.shape[0] != 1 or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} called attention with a batch of {query.shape[0]} rows or a mask of "
            "its own, which a packed row cannot have; use packing.mode: padded"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to {key.shape[2]} keys in a row of {query.shape[2]} tokens; "
            "keys of its own making belong to no sequence; use packing.mode: padded"
        )
    if seam_calls is not None:
        seam_calls.count += 1
    # Not `states[0]`, whose backward pass writes zeros and copies over them; a squeeze's is a view.
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    out = row_backend(
        query,
        row_segments.gather(key),
        row_segments.gather(value),
        row_segments,
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


# Each obeys autocast, by a rule of torch's or by autocast.py.
BACKENDS: dict[str, AttentionBackend] = {
    "flash_attn": flash_attn_attention,
    "torch_varlen": torch_varlen_attention,
    "sdpa": sdpa_attention,
}
