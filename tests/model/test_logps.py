"""Chunked log-probs against plain log_softmax: values, gradients, statistics, memory.

Legend: N scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from support.heads import CHUNK_TOKENS, PLAIN, TRANSFORMS, Head, N, V, chunked, gradients, make_head
from support.live_bytes import LiveBytes
from torch import Tensor

import dpo_pack.model.logps
from dpo_pack.model.logps import (
    HeadBounds,
    HeadPasses,
    HeadTransform,
    WantedStatistics,
    sequence_sums,
    token_logps,
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


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 10])
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


def mean_error(values: Tensor, truth: Tensor) -> float:
    return float((values.detach().double() - truth.detach()).abs().mean())


@pytest.mark.parametrize("kept_chunks", [0, 2])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_bf16_products_of_fp32_weights_err_no_more_than_autocast(is_frozen: bool, kept_chunks: int) -> None:
    exact = make_head(num_tokens=200, width=64, is_frozen=is_frozen)
    head = make_head(num_tokens=200, width=64, is_frozen=is_frozen, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = plain_logps(head, PLAIN)
        ours, statistics = chunked(head, PLAIN, kept_chunks=kept_chunks, compute_dtype=torch.bfloat16)
    assert ours.dtype == statistics.dtype == torch.float32
    expected = plain_logps(exact, PLAIN)
    assert 1e-3 < mean_error(ours, expected) <= 1.1 * mean_error(plain, expected)
    theirs, truths = gradients(head, plain), gradients(exact, expected)
    for mine, other, truth in zip(gradients(head, ours), theirs, truths, strict=True):
        assert mine.dtype == torch.float32
        assert 1e-4 < mean_error(mine, truth) <= 1.1 * mean_error(other, truth)


def test_bf16_weights_get_bf16_gradients_that_lose_nothing_over_many_chunks() -> None:
    """Each chunk is one token: added up in bf16, their weight gradients would lose most small terms."""
    exact = make_head(num_tokens=400, width=64)
    head = make_head(num_tokens=400, width=64, dtype=torch.bfloat16)
    plain = plain_logits(head, PLAIN).float().log_softmax(dim=1).gather(1, head.targets[:, None]).squeeze(1)
    ours, _ = chunked(head, PLAIN, chunk_tokens=1)
    expected = plain_logps(exact, PLAIN)
    assert ours.dtype == torch.float32
    assert mean_error(ours, expected) <= 1.1 * mean_error(plain, expected)
    theirs, truths = gradients(head, plain), gradients(exact, expected)
    for mine, other, truth in zip(gradients(head, ours), theirs, truths, strict=True):
        assert mine.dtype == torch.bfloat16
        assert mean_error(mine, truth) <= 1.1 * mean_error(other, truth)


def test_the_blocks_in_which_a_bf16_gradient_is_added_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (10, 10_000):  # of 37
        monkeypatch.setattr(dpo_pack.model.logps, "_ADDED_ROWS", rows)
        head = make_head(dtype=torch.bfloat16)
        found.append(gradients(head, chunked(head, PLAIN)[0]))
    assert all(map(torch.equal, *found))


def test_without_scored_tokens_the_head_s_gradient_is_zero() -> None:
    head = make_head(num_tokens=0)
    (_, weight, bias) = gradients(head, chunked(head, PLAIN)[0])
    assert not weight.any() and not bias.any() and weight.shape == head.weight.shape


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("squares", [False, True])
def test_statistics_that_nobody_asked_for_are_nan_and_change_nothing(metrics: bool, squares: bool) -> None:
    head = make_head()
    everything, all_statistics = chunked(head, PLAIN)
    logps, statistics = chunked(head, PLAIN, wanted=WantedStatistics(metrics=metrics, squares=squares))
    assert torch.equal(logps, everything)
    for values, computed, is_wanted in (
        (statistics[:, :3], all_statistics[:, :3], metrics),
        (statistics[:, 3], all_statistics[:, 3], squares),
    ):
        assert torch.equal(values, computed) if is_wanted else values.isnan().all()
    for ours, theirs in zip(gradients(head, logps), gradients(head, everything), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_statistics_are_those_of_the_full_distribution(transform: HeadTransform) -> None:
    head = make_head()
    head.targets[:9] = plain_logits(head, transform).argmax(dim=1)[:9]  # some that are the likeliest token
    _, statistics = chunked(head, transform)
    logits = plain_logits(head, transform).detach()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    ours, is_top1, mean_logit, log_sum_squares, variance = statistics.unbind(dim=1)
    largest = torch.maximum(logits.amax(dim=1).abs(), logits.gather(1, head.targets[:, None])[:, 0].abs())
    rounding = 2 * torch.hypot(largest, logits.logsumexp(dim=1))
    torch.testing.assert_close(variance.sqrt() / torch.finfo(torch.float64).eps, rounding)
    torch.testing.assert_close(ours, entropy)
    torch.testing.assert_close(mean_logit, logits.mean(dim=1))
    squares = logits.softmax(dim=1).square().sum(dim=1)
    torch.testing.assert_close(log_sum_squares, squares.log())
    assert is_top1.tolist() == (logits.argmax(dim=1) == head.targets).tolist()
    assert 9 <= is_top1.sum() < N
    assert not statistics.requires_grad


def peak_bytes(*, num_tokens: int, kept_chunks: int, has_gradients: bool = True) -> int:
    head = make_head(num_tokens=num_tokens, has_bias=False)
    live = LiveBytes()
    with live, torch.set_grad_enabled(has_gradients):
        logps, _ = chunked(head, PLAIN, kept_chunks=kept_chunks)
        assert logps.requires_grad == has_gradients
        if has_gradients:
            gradients(head, logps)
    return live.peak


def test_without_gradients_nothing_is_kept_for_a_backward_pass() -> None:
    logits_bytes = 350 * V * 8
    assert peak_bytes(num_tokens=350, kept_chunks=99) > logits_bytes  # or the next line could not fail
    without = peak_bytes(num_tokens=350, kept_chunks=99, has_gradients=False)
    assert without == peak_bytes(num_tokens=350, kept_chunks=0, has_gradients=False) < 0.6 * logits_bytes


def peak_of_narrow_head(
    num_tokens: int, vocabulary: int, dtype: torch.dtype, *, is_frozen: bool = False, **bounds: int
) -> int:
    """Bytes at the peak of forward and backward pass, of weights in fp32."""
    hidden = torch.randn(num_tokens, 2, requires_grad=True)
    weight = torch.randn(vocabulary, 2, requires_grad=not is_frozen)
    with LiveBytes() as live:
        logps, _ = token_logps(
            hidden,
            weight,
            None,
            torch.zeros(num_tokens, dtype=torch.int64),
            transform=PLAIN,
            compute_dtype=dtype,
            bounds=HeadBounds(chunk_bytes=2**40, **bounds),
            wanted=WantedStatistics(),
            passes=HeadPasses(),
        )
        logps.sum().backward()
    return int(live.peak)


def test_peak_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    """Both numbers of tokens have more chunks than are kept for the backward pass."""
    vocabulary, kept = 3_000, 4 * 16 * 3_000 * 4
    peaks = [
        peak_of_narrow_head(number, vocabulary, torch.float32, chunk_tokens=16, kept_bytes=kept)
        for number in (256, 512)
    ]
    assert peaks[0] > kept  # the chunks that are kept
    assert peaks[1] - peaks[0] < 0.05 * 256 * vocabulary * 4


@pytest.mark.parametrize("is_frozen", [False, True])
def test_in_bf16_a_chunk_s_product_goes_before_its_logits_are_worked_on(is_frozen: bool) -> None:
    bounds = {"chunk_tokens": 100, "kept_bytes": 0}
    peak = peak_of_narrow_head(200, 20_000, torch.bfloat16, is_frozen=is_frozen, **bounds)
    # Two buffers in fp32; a frozen head's gradient is made at once, and cast.
    assert 8 < peak / (100 * 20_000) < (11 if is_frozen else 9)


def test_only_as_many_chunks_are_kept_as_the_bound_allows() -> None:
    chunk_bytes = CHUNK_TOKENS * V * 8
    peaks = [peak_bytes(num_tokens=150, kept_chunks=kept) for kept in (0, 10, 20)]
    assert peaks[1] - peaks[0] == pytest.approx(10 * chunk_bytes, abs=2 * chunk_bytes)
    assert peaks[2] - peaks[1] == 10 * chunk_bytes


def test_sequence_sums_equal_a_loop_in_float64_and_hand_each_token_its_sequence_s_gradient() -> None:
    lengths = torch.tensor([3, 1, 0, 7, 12])
    values = (-20 * torch.rand(23, generator=torch.Generator().manual_seed(0))).requires_grad_()
    sums = sequence_sums(values, lengths)
    expected = torch.stack([part.double().sum() for part in values.split(lengths.tolist())])
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums, expected, rtol=1e-15, atol=0.0)
    factors = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(sums, values, factors)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, factors.repeat_interleave(lengths).float())
