"""What is computed otherwise on a CPU: attention segment by segment, and products through oneDNN."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.groups import random_groups, segments_of
from torch import Tensor, nn

import dpo_pack.model.attention.sdpa as sdpa
import dpo_pack.model.attention.segments as of_segments
import dpo_pack.model.fast_layers as fast_layers
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments
from dpo_pack.model.fast_layers import speed_up_linears, times_transposed

NUM_HEADS, HEAD_DIM = 4, 8


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Whatever a test sets is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_segments(*lengths: tuple[int, int, int]) -> RowSegments:
    """One group of each (prompt, chosen, rejected)."""
    return replace(segments_of(random_groups(*lengths)), kv_gather=None)  # keys are gathered


def states(
    segments: RowSegments, dtype: torch.dtype = torch.float32, kv_heads: int = NUM_HEADS
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = sum(segments.query_lengths), sum(segments.key_lengths)
    num_keys = num_keys if segments.kv_gather is None else num_queries
    shapes = ((num_queries, NUM_HEADS), (num_keys, kv_heads), (num_keys, kv_heads))
    return [
        torch.randn(*shape, HEAD_DIM, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def attend(segments: RowSegments, inputs: list[Tensor], window: int | None = None) -> list[Tensor]:
    """The output and the gradients of a weighted sum of it."""
    query, key, value = inputs
    options = AttentionOptions(scale=0.3, window=window, softcap=None, sinks=None)
    out = sdpa.sdpa_attention(query, key, value, segments, options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


MANY = ((5, 9, 4), (12, 1, 30), (20, 6, 6), (3, 17, 2), (8, 8, 8))


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_second_completion_needs_no_mask_of_its_length_squared(window: int | None) -> None:
    segments = make_segments((5, 3, 9000))
    attend(segments, states(segments), window)
    kept = sum(mask.numel() * mask.element_size() for mask in segments.kept.values())
    assert 0 < kept <= 1.25 * of_segments.MAX_MASK_BYTES  # as numbers and as bools


def agents(num_pairs: int) -> RowSegments:
    """Pairs with 300 tokens in common, and answers of 20."""
    first, *others = random_groups(*[(310, 20, 20)] * num_pairs)
    begun = [replace(one, context=np.append(first.context[:300], one.context[300:])) for one in others]
    return segments_of([replace(one, beginning=300) for one in (first, *begun)])


def test_a_layer_keeps_the_keys_of_the_row_and_not_those_of_each_segment() -> None:
    segments, kept = agents(8), dict[int, int]()
    tokens = sum(segments.query_lengths)
    assert tokens == 300 + 8 * 50 and sum(segments.key_lengths) == 16 * 330
    inputs = [torch.randn(tokens, heads, HEAD_DIM, requires_grad=True) for heads in (NUM_HEADS, 2, 2)]

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(segments, inputs)
    # queries, results, keys, values, and a log-normalizer for each query and head
    assert sum(kept.values()) == tokens * (2 * NUM_HEADS * HEAD_DIM + 2 * 2 * HEAD_DIM + NUM_HEADS)
    masks = [mask for name, mask in segments.kept.items() if isinstance(name, tuple)]
    assert sum(mask.numel() for mask in masks) == 30 * 330  # one for all


@pytest.mark.parametrize("has_beginning", [False, True])
def test_the_number_of_threads_does_not_change_a_bit(num_threads: None, has_beginning: bool) -> None:
    segments = agents(5) if has_beginning else make_segments(*MANY)
    torch.set_num_threads(1)
    alone = attend(segments, states(segments))
    for count in (2, 3):
        torch.set_num_threads(count)
        for one, many in zip(alone, attend(segments, states(segments)), strict=True):
            assert torch.equal(one, many)
        assert torch.get_num_threads() == count


def test_an_error_in_a_thread_reaches_the_caller(num_threads: None) -> None:
    torch.set_num_threads(2)

    def fail(number: int) -> None:
        raise ValueError(f"segment {number}")

    with pytest.raises(ValueError, match="segment"):
        sdpa._on_threads(fail, make_segments(*MANY))


def test_a_forked_process_starts_threads_of_its_own(num_threads: None) -> None:
    """Without them it would wait for its parent's, which it does not have."""
    torch.set_num_threads(2)
    segments = make_segments(*MANY)

    def every_segment() -> list[int]:
        seen: list[int] = []
        list(sdpa._on_threads(seen.append, segments))
        return sorted(seen)

    expected = every_segment()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # the kernel ends a child that waits for ever
        os._exit(0 if every_segment() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


# --------------------------------------------------------------------------------------------------- Products


needs_kernel = pytest.mark.skipif(
    fast_layers._onednn_product() is None, reason="no AVX-512, or a torch without the oneDNN binding"
)


@pytest.fixture(autouse=True)
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are sped up whoever made this machine's processor."""
    monkeypatch.setattr(fast_layers, "is_intel", lambda: False)


def run(layer: nn.Linear, features: Tensor, weights: Tensor) -> list[Tensor]:
    """Output, and gradients of features, weight and bias where they have one."""
    inputs = [features, *layer.parameters()]
    inputs = [values for values in inputs if values.requires_grad]
    output = layer(features)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def errors(exact: list[Tensor], computed: list[Tensor]) -> list[float]:
    pairs = zip(exact, computed, strict=True)
    return [float((a - b).detach().norm() / a.detach().norm()) for a, b in pairs]


@needs_kernel
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 33), (3, 5)])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "features"])
def test_a_linear_layer_by_onednn_gives_the_values_and_gradients_of_float64(
    bias: bool, shape: tuple[int, ...], frozen: str
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    layer.weight.requires_grad_(frozen != "weight")
    features = torch.randn(*shape, 24, requires_grad=frozen != "features")
    weights = torch.randn(*shape, 40)
    exact = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    exact.weight.requires_grad_(frozen != "weight")
    expected = run(exact, features.detach().double().requires_grad_(features.requires_grad), weights.double())
    speed_up_linears(layer)
    computed = run(layer, features, weights)
    assert max(errors(expected, [values.double() for values in computed])) < 1e-6
    assert "forward" in vars(layer)
    output = layer(features)
    output.clamp_(max=0.5)  # as OLMo does
    if output.requires_grad:
        output.sum().backward()


@needs_kernel
def test_a_product_by_onednn_takes_views_as_they_lie() -> None:
    torch.manual_seed(0)
    grad, weight = torch.randn(2, 9, 40), torch.randn(40, 24)
    torch.testing.assert_close(times_transposed(grad, weight.T), grad @ weight)
    torch.testing.assert_close(times_transposed(grad[:, ::2], weight.T), grad[:, ::2] @ weight)


@needs_kernel
def test_linear_layers_are_as_before_under_autocast_and_in_another_dtype() -> None:
    torch.manual_seed(0)
    plain, sped_up = nn.Linear(24, 40), nn.Linear(24, 40)
    sped_up.load_state_dict(plain.state_dict())
    speed_up_linears(sped_up)
    features = torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(features), sped_up(features))
    doubled = features.double()
    assert torch.equal(plain.double()(doubled), sped_up.double()(doubled))


@pytest.mark.parametrize("is_intel", [False, True])
def test_without_onednn_and_on_intel_nothing_changes(is_intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_layers, "_onednn_product", lambda: pytest.fail if is_intel else None)
    monkeypatch.setattr(fast_layers, "is_intel", lambda: is_intel)
    model = nn.Sequential(nn.Linear(3, 4))
    speed_up_linears(model)
    assert "forward" not in vars(model[0])
    if not is_intel:
        features, weight = torch.randn(5, 3), torch.randn(4, 3)
        assert torch.equal(times_transposed(features, weight), features @ weight.T)
