"""Chunked log-probs against plain log_softmax: values, gradients, statistics, memory.

Legend: N scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dpo_pack.logps import HeadTransform, TokenStatistics, sequence_sums, token_logps

N, D, V = 23, 8, 37
CHUNK_TOKENS = 5  # 23 tokens: four full chunks and one of three
PLAIN = HeadTransform()
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
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None and leaf.requires_grad]


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
) -> tuple[Tensor, TokenStatistics]:
    """`token_logps` with a memory bound given in tokens and chunks instead of bytes."""
    row_bytes = V * max(4, head.weight.element_size())
    return token_logps(
        head.hidden,
        head.weight,
        head.bias,
        head.targets,
        transform=transform,
        compute_dtype=compute_dtype or head.weight.dtype,
        chunk_bytes=2 * chunk_tokens * row_bytes,
        kept_bytes=kept_chunks * chunk_tokens * row_bytes,
    )


def plain_logits(head: Head, transform: HeadTransform) -> Tensor:
    """[N, V], with torch's own operations only."""
    logits = head.hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = transform.scale * logits
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits


def plain_logps(head: Head, transform: HeadTransform) -> Tensor:
    return plain_logits(head, transform).log_softmax(dim=1).gather(1, head.targets[:, None]).squeeze(1)


def gradients(head: Head, logps: Tensor) -> tuple[Tensor, ...]:
    """Of the token-weighted sum, for whatever of hidden, weight and bias is trained."""
    return torch.autograd.grad((logps * head.token_weights).sum(), head.leaves())


@pytest.mark.parametrize("kept_chunks", [0, 2, 99])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_logps_and_gradients_equal_a_plain_log_softmax(
    transform: HeadTransform, has_bias: bool, is_frozen: bool, kept_chunks: int
) -> None:
    head = make_head(has_bias=has_bias, is_frozen=is_frozen)
    expected = plain_logps(head, transform)
    logps, _ = chunked(head, transform, kept_chunks=kept_chunks)
    torch.testing.assert_close(logps, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(head, logps), gradients(head, expected)
    assert len(ours) == 1 + (not is_frozen) * (1 + has_bias)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_head_that_is_trained_in_part_gets_that_part_s_gradient(trained: str) -> None:
    head = make_head()
    for name, leaf in (("hidden", head.hidden), ("weight", head.weight), ("bias", head.bias)):
        assert leaf is not None
        leaf.requires_grad_(name == trained)
    (ours,) = gradients(head, chunked(head, PLAIN)[0])
    (theirs,) = gradients(head, plain_logps(head, PLAIN))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS])
@pytest.mark.parametrize("chunk_tokens", [0, 1, CHUNK_TOKENS, 10_000])
def test_chunk_boundaries_change_nothing(num_tokens: int, chunk_tokens: int) -> None:
    """A bound below one token's logits (0) still computes one token at a time."""
    head = make_head(num_tokens=num_tokens)
    logps, _ = chunked(head, PLAIN, chunk_tokens=chunk_tokens)
    expected = plain_logps(head, PLAIN)
    assert logps.shape == (num_tokens,)
    torch.testing.assert_close(logps, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(head, logps), gradients(head, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_kept_and_recomputed_chunks_give_the_same_gradients_in_fp32(transform: HeadTransform) -> None:
    stored = []
    for kept_chunks in (0, 3, 99):
        head = make_head(dtype=torch.float32)
        stored.append(gradients(head, chunked(head, transform, kept_chunks=kept_chunks)[0]))
    for others in stored[1:]:
        for ours, theirs in zip(stored[0], others, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_gradcheck(transform: HeadTransform, is_frozen: bool) -> None:
    head = make_head(num_tokens=7, is_frozen=is_frozen, width=3)

    def logps(*leaves: Tensor) -> Tensor:
        return chunked(head, transform, chunk_tokens=3, kept_chunks=1)[0]

    assert torch.autograd.gradcheck(logps, head.leaves())


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("kept_chunks", [0, 2])
def test_bf16_products_of_fp32_weights_err_no_more_than_plain_bf16_and_give_fp32_gradients(
    is_frozen: bool, kept_chunks: int
) -> None:
    """Errors in the mean over elements, against float64; plain: what autocast computes."""
    exact, head = make_head(num_tokens=200, width=64), make_head(num_tokens=200, width=64, dtype=torch.float32)
    head.weight.requires_grad_(not is_frozen)
    head.bias.requires_grad_(not is_frozen) if head.bias is not None else None
    exact.weight.requires_grad_(not is_frozen)
    exact.bias.requires_grad_(not is_frozen) if exact.bias is not None else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = plain_logps(head, PLAIN)
        ours, statistics = chunked(head, PLAIN, kept_chunks=kept_chunks, compute_dtype=torch.bfloat16)
    assert ours.dtype == torch.float32 and statistics.entropy.dtype == torch.float32
    expected = plain_logps(exact, PLAIN)

    def mean_error(values: Tensor, truth: Tensor) -> float:
        return float((values.double() - truth).abs().mean())

    assert 0 < mean_error(ours, expected) <= 1.1 * mean_error(plain, expected)
    for mine, other, truth in zip(
        gradients(head, ours), gradients(head, plain), gradients(exact, expected), strict=True
    ):
        assert mine.dtype == torch.float32
        assert mean_error(mine, truth) <= 1.5 * mean_error(other, truth)
