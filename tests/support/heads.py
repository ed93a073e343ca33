"""Small output heads, and their log-probs with a chunk given in tokens.

Legend: N scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpo_pack.model.logps import HeadBounds, HeadPasses, HeadTransform, WantedStatistics, token_logps

N, D, V = 23, 8, 37
CHUNK_TOKENS = 5  # 23 tokens: four full chunks and one of three
PLAIN = HeadTransform()
ALL = WantedStatistics(metrics=True, squares=True)
TRANSFORMS = {
    "plain": PLAIN,
    "scaled": HeadTransform(scale=0.3),
    "softcapped": HeadTransform(softcap=0.8),
    "scaled and softcapped": HeadTransform(scale=2.0, softcap=1.5),
}


@dataclass(slots=True, kw_only=True)
class Head:
    """A head's inputs, all of one dtype, and the weight of each token's log-prob in a scalar."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    token_weights: Tensor  # [N]

    def leaves(self) -> list[Tensor]:
        inputs = (self.hidden, self.weight, self.bias)
        return [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]


def make_head(
    *,
    num_tokens: int = N,
    dtype: torch.dtype = torch.float64,
    has_bias: bool = True,
    is_frozen: bool = False,
    width: int = D,
) -> Head:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Head(
        hidden=normal(num_tokens, width).to(dtype).requires_grad_(),
        weight=normal(V, width).to(dtype).requires_grad_(not is_frozen),
        bias=normal(V).to(dtype).requires_grad_(not is_frozen) if has_bias else None,
        targets=torch.randint(V, (num_tokens,), generator=generator),
        token_weights=normal(num_tokens),
    )


def chunked(
    head: Head,
    transform: HeadTransform,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    kept_chunks: int = 0,
    compute_dtype: torch.dtype | None = None,
    wanted: WantedStatistics = ALL,
    passes: HeadPasses | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logps` with a memory bound given in tokens and chunks instead of bytes."""
    compute_dtype = compute_dtype or head.weight.dtype
    row_bytes = buffer_bytes = V * max(4, head.weight.element_size())
    if passes is not None and passes.are_compiled:
        buffer_bytes = V * compute_dtype.itemsize
    return token_logps(
        head.hidden,
        head.weight,
        head.bias,
        head.targets,
        transform=transform,
        compute_dtype=compute_dtype,
        bounds=HeadBounds(
            chunk_tokens=V * chunk_tokens,  # bytes decide
            chunk_bytes=2 * chunk_tokens * buffer_bytes,
            kept_bytes=kept_chunks * chunk_tokens * row_bytes,
        ),
        wanted=wanted,
        passes=passes or HeadPasses(),
    )


def gradients(head: Head, logps: Tensor) -> tuple[Tensor, ...]:
    """Of the token-weighted sum, for whatever of hidden, weight and bias is trained."""
    return torch.autograd.grad((logps * head.token_weights).sum(), head.leaves())
