"""Attention backends: masks by hand, choice of backend, and kernels against an fp32 reference."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.flash_stand_ins import use_stand_ins
from support.groups import CPU, make_row, random_groups, segments_of
from support.marks import slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dpo_pack.model.attention.cuda as cuda
import dpo_pack.model.attention.segments as of_segments
from dpo_pack.model import attention
from dpo_pack.model.attention import (
    BACKENDS,
    AttentionNeeds,
    backend_obstacle,
    select_backend,
    trial_obstacle,
)
from dpo_pack.model.attention.segments import MAX_MASK_BYTES, AttentionOptions, RowSegments
from dpo_pack.model.fast_layers import keep_products
from dpo_pack.packing.lengths import Group
from dpo_pack.system.errors import UnsupportedModelError

CUDA = torch.device("cuda")
PLAIN = AttentionNeeds(head_dim=64, value_head_dim=64, has_window=False, has_softcap=False, has_sinks=False)


def make_segments(device: torch.device, *, repeats: int = 1, gathers: bool = False) -> RowSegments:
    """Five groups, so often: a long prompt, a one-token tail, one with three branches, and two with a common
    beginning. Without `gathers`, backends get the keys of all segments."""
    first, *others, one, other = random_groups((37, 5, 20), (3, 8, 1), (12, 4, 9, 6), (21, 2, 3), (9, 7, 1))
    begun = np.concatenate((one.context[:8], other.context[8:]))
    pairs = [replace(one, beginning=8), replace(other, context=begun, beginning=8)]
    segments = segments_of([first, *others, *pairs] * repeats, device=device)
    return segments if gathers else replace(segments, kv_gather=None)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """Softmax over an explicit list of positions, one query and head at a time."""
    window, softcap, sinks = options.window, options.softcap, options.sinks
    groups = query.shape[1] // key.shape[1]
    outputs, key_start, query_start = [], 0, 0
    for num_queries, num_keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        for offset in range(num_queries):
            last = num_keys - num_queries + offset
            first = 0 if window is None else max(0, last - window + 1)
            places = slice(key_start + first, key_start + last + 1)
            heads = []
            for head in range(query.shape[1]):
                scores = key[places, head // groups] @ query[query_start + offset, head] * options.scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1]))
                weights = scores.softmax(0)[: last + 1 - first]
                heads.append(weights @ value[places, head // groups])
            outputs.append(torch.stack(heads))
        query_start, key_start = query_start + num_queries, key_start + num_keys
    return torch.stack(outputs)


def assert_as_written_out(
    backend: str, window: int | None, special: str, *, dtype: torch.dtype, size: int, bound: float
) -> None:
    """Output and gradients, at most `bound` and ten times that from those of `plain_attention`."""
    generator = torch.Generator().manual_seed(0)
    segments = make_segments(CPU)
    tokens, keys = sum(segments.query_lengths), sum(segments.key_lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator, requires_grad=True)

    values = random(keys, 2, 4 if special == "narrow values" else size)
    inputs = random(tokens, 4, size), random(keys, 2, size), values
    sinks = random(4) if special in ("sinks", "both") else None
    softcap = 1.5 if special in ("softcap", "both") else None
    options = AttentionOptions(scale=0.5, window=window, softcap=softcap, sinks=sinks)
    trained = (*inputs, sinks) if sinks is not None else inputs
    ours = BACKENDS[backend](*inputs, segments, options)
    plain = plain_attention(*inputs, segments, options)
    torch.testing.assert_close(ours, plain, atol=bound, rtol=bound)
    weights = torch.randn(ours.shape, dtype=dtype, generator=generator)
    for mine, other in zip(
        torch.autograd.grad(ours, trained, weights), torch.autograd.grad(plain, trained, weights), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=10 * bound, rtol=10 * bound)


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("special", ["", "softcap", "sinks", "narrow values"])
@pytest.mark.parametrize("mask_bytes", [MAX_MASK_BYTES, 20])
def test_attention_by_sdpa_equals_a_softmax_written_out(
    monkeypatch: pytest.MonkeyPatch, window: int | None, special: str, mask_bytes: int
) -> None:
    monkeypatch.setattr("dpo_pack.model.attention.segments.MAX_MASK_BYTES", mask_bytes)
    # Sinks are summed in fp32, as their models do; the rest is float64 throughout.
    bound = 1e-5 if special in ("sinks", "softcap") else 1e-12
    assert_as_written_out("sdpa", window, special, dtype=torch.float64, size=8, bound=bound)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_gathers_keys_that_segments_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    segments, options = (
        make_segments(CPU, gathers=True),
        AttentionOptions(scale=0.5, window=None, softcap=None, sinks=None),
    )
    assert segments.kv_gather is not None
    torch.manual_seed(0)
    has_gradient = name != "flex"  # torch has none of it on a CPU
    states = torch.randn(3, sum(segments.query_lengths), 2, 8).bfloat16().requires_grad_(has_gradient)
    query, key, value = states
    ours = BACKENDS[name](query, key, value, segments, options)
    alone = replace(segments, kv_gather=None)
    gathered = BACKENDS[name](query, *map(segments.kv_gather, (key, value)), alone, options)
    assert torch.equal(ours, gathered)
    if has_gradient:
        weights = torch.randn(ours.shape).bfloat16()
        mine, other = (torch.autograd.grad(out, states, weights)[0] for out in (ours, gathered))
        assert torch.equal(mine, other)


def kept_numbers(name: str, segments: RowSegments, special: str, **checkpointing: Any) -> tuple[int, Tensor]:
    """How many numbers autograd keeps for a layer's backward pass, and the gradient with a second one's."""
    torch.manual_seed(0)
    tokens, dtype = sum(segments.query_lengths), torch.bfloat16 if name != "sdpa" else torch.float32
    query, key, value = (torch.randn(tokens, n, 8, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
    values = value[..., :4] if special == "narrow values" else value
    softcap, sinks = 1.5 if special == "softcap" else None, torch.zeros(4) if special == "sinks" else None
    options = AttentionOptions(scale=0.5, window=None, softcap=softcap, sinks=sinks)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call = functools.partial(checkpoint, BACKENDS[name], use_reentrant=False, **checkpointing)
        attend = call if checkpointing else BACKENDS[name]
        out = attend(query, key, values, segments, options)
    loss = out.float().square().sum()
    grads = torch.autograd.grad(loss, (query, key, value), retain_graph=not checkpointing)
    if not checkpointing:
        again = torch.autograd.grad(loss, (query, key, value))
        assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
    return sum(kept.values()), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize(
    ("name", "special"),
    [
        *(("sdpa", special) for special in ("softcap", "sinks", "narrow values")),
        *(("flash_attn", special) for special in ("", "softcap", "narrow values")),
    ],
)
def test_a_layer_keeps_no_copies_of_shared_keys(
    name: str, special: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs with 60 tokens in common, of which the row has six times as many keys as tokens."""
    use_stand_ins(monkeypatch)
    first, *others = random_groups(*[(64, 4, 4)] * 12)
    contexts = [np.append(first.context[:60], one.context[60:]) for one in others]
    begun = [replace(first, beginning=60, context=context) for context in contexts]
    segments = segments_of([first, *begun])
    tokens, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    assert keys > 6 * tokens
    kept, shared = kept_numbers(name, segments, special)
    widths = 4 * 8 + 2 * 8 + 2 * 8 + 4 * 8  # of queries, keys, values and results
    assert 0 < kept <= tokens * widths
    for how in ({"preserve_rng_state": False}, {"context_fn": keep_products}):  # inside layers that recompute
        kept, recomputed = kept_numbers(name, segments, special, **how)
        assert kept <= tokens * (4 * 8 + 2 * 8 + 2 * 8) and torch.equal(recomputed, shared)
    if name == "flash_attn":  # the kernel's own gradients, to the bit
        monkeypatch.setattr(
            cuda, "attend_gathered", lambda attend, k, v, gather: attend(gather(k), gather(v))
        )
        copied, plain = kept_numbers(name, segments, special)
        assert copied > keys * 2 * 16 and torch.equal(shared, plain)


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_flash_attention_takes_values_narrower_than_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    segments, options = make_segments(CPU), AttentionOptions(scale=0.2, window=None, softcap=None, sinks=None)
    needs = replace(PLAIN, head_dim=24, value_head_dim=16)
    assert backend_obstacle(name, needs, device=CUDA, dtype=torch.bfloat16) is None
    tokens, keys = sum(segments.query_lengths), sum(segments.key_lengths)
    torch.manual_seed(0)
    inputs = [
        torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((tokens, 4, 24), (keys, 2, 24), (keys, 2, 16))
    ]
    results = []
    for attend, states in ((BACKENDS[name], inputs), (plain_attention, [each.float() for each in inputs])):
        query, key, value = states
        out = attend(query, key, value, segments, options)
        assert out.shape == (tokens, 4, 16)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, plain in zip(*results, strict=True):
        assert (ours.float() - plain.float()).norm() <= 1e-2 * plain.float().norm()


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch refuses FlexAttention's backward pass; its definition in plain operations has it."""
    from torch.nn.attention import flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    cuda._kernel.cache_clear()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 6, *slow(1, 1000)])
@pytest.mark.parametrize("special", ["softcap", "sinks", "both", "narrow values"])
def test_attention_by_flex_equals_a_softmax_written_out(
    window: int | None, special: str, flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_BLOCK", 16)  # a row of several blocks
    size = {"softcap": 4, "sinks": 2}.get(special, 8)  # may be as large as a number of heads
    assert_as_written_out("flex", window, special, dtype=torch.float32, size=size, bound=1e-5)


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
def test_flex_visits_the_blocks_that_hold_a_visible_key_and_no_other_ones(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_BLOCK", 8)
    segments = make_segments(CPU)
    parts = [
        segments.mask(*lengths, window)
        for lengths in zip(segments.query_lengths, segments.key_lengths, strict=True)
    ]
    whole = torch.block_diag(*parts)
    blocks = torch.nn.functional.pad(whole, (0, -whole.shape[1] % 8, 0, -whole.shape[0] % 8))
    expected = blocks.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).any(dim=3).any(dim=1)
    found = cuda._block_mask(segments, window, CPU).to_dense()[0, 0].bool()
    assert torch.equal(found, expected) and not expected.all()


def test_flex_is_for_softcaps_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16}
    assert "neither softcaps nor sinks" in str(backend_obstacle("flex", PLAIN, **asked))
    special = [replace(PLAIN, has_softcap=True), replace(PLAIN, has_sinks=True)]
    monkeypatch.setattr(attention, "compiler_obstacle", lambda device: None)
    assert {select_backend("auto", needs, **asked).name for needs in special} == {"flex"}
    assert backend_obstacle("flex", special[0], device=CPU, dtype=torch.bfloat16) == "it needs a CUDA device"


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn", "flex"])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_kernel_that_fails_on_a_small_row_has_an_obstacle(
    name: str, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = replace(PLAIN, has_softcap=name == "flex", has_window=True)
    seen: list[AttentionOptions] = []

    def fail(*grads: Tensor) -> None:
        raise RuntimeError("no kernel image is available\nand so on")

    def kernel(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: AttentionOptions) -> Tensor:
        seen.append(options)
        out = query + key + value
        fail() if fails_in == "forward" else out.register_hook(fail)
        return out

    use_stand_ins(monkeypatch)
    monkeypatch.setattr(attention, "compiler_obstacle", lambda device: None)
    for other in BACKENDS:
        monkeypatch.setitem(BACKENDS, other, kernel)
    trial_obstacle.cache_clear()
    assert trial_obstacle(name, needs, CPU, torch.float32) == (
        "its kernel does not run on this device (no kernel image is available)"
    )
    assert seen[0].window is not None and (seen[0].softcap is not None) == needs.has_softcap
    trial_obstacle.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradients_of_a_shared_key_add_up_in_at_least_fp32(dtype: torch.dtype) -> None:
    # 300 completions read the prompt. A sum in bfloat16 would stay at 256.
    completions = tuple(np.array([1, token % 7]) for token in range(300))
    row = make_row([Group(context=np.array([1, 2]), completions=completions)])
    assert row.segments is not None
    states = torch.zeros(row.num_tokens, 1, 1, dtype=dtype, requires_grad=True)
    assert row.segments.kv_gather is not None
    row.segments.kv_gather(states).sum().backward()
    assert states.grad is not None and states.grad.dtype == dtype
    assert states.grad[0].item() == 300


def test_auto_takes_the_first_backend_without_an_obstacle_and_says_why() -> None:
    choice = select_backend("auto", PLAIN, device=CPU, dtype=torch.float32)
    assert choice.name == "sdpa" and "not torch_varlen: it needs a CUDA device" in choice.reason


@pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
        ({}, torch.float32, "bf16 or fp16, not float32"),
        ({"has_softcap": True}, torch.bfloat16, "caps attention logits"),
        ({"has_sinks": True}, torch.bfloat16, "sinks"),
        ({"value_head_dim": 96}, torch.bfloat16, "values have a larger head dimension (96) than keys (64)"),
    ],
)
def test_a_kernel_that_cannot_be_exact_is_refused_with_the_reason(
    change: dict[str, Any], dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = replace(PLAIN, **change)
    asked: dict[str, Any] = {"device": CUDA, "dtype": dtype}
    assert words in str(backend_obstacle("torch_varlen", needs, **asked))
    with pytest.raises(UnsupportedModelError, match="model.attention: torch_varlen.*auto"):
        select_backend("torch_varlen", needs, **asked)


@pytest.mark.parametrize(
    ("files", "obstacle"),
    [
        ({}, "package flash-attn is not installed"),
        # What the wheel flash-attn-4 installs: a namespace package with another function.
        ({"cute/__init__.py": "def flash_attn_varlen_func(): ..."}, "cannot be used (cannot import name"),
        ({"__init__.py": "import flash_attn_2_cuda"}, "cannot be used (No module named 'flash_attn_2_cuda')"),
        ({"__init__.py": "raise OSError('undefined symbol: x')"}, "cannot be used (undefined symbol: x)"),
        ({"__init__.py": "def flash_attn_varlen_func(): ..."}, None),
    ],
)
def test_flash_attn_is_usable_only_if_its_function_can_be_imported(
    files: dict[str, str], obstacle: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files.items():
        file = tmp_path / "flash_attn" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    found = backend_obstacle("flash_attn", PLAIN, device=CUDA, dtype=torch.bfloat16)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert found is None if obstacle is None else obstacle in str(found)


@pytest.mark.parametrize("fails", [False, True])
def test_the_backward_pass_of_torch_varlen_is_deterministic_and_nothing_else_is(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not what runs after the device had no memory for it."""
    use_stand_ins(monkeypatch)
    modes: dict[str, bool] = {}

    def watched(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            modes[name] = torch.are_deterministic_algorithms_enabled()
            modes["fills"] = of_segments._memory.fill_uninitialized_memory  # all new memory with NaN
            if fails and name == "backward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return kernel(*arguments, **options)

        return call

    kernels = {
        name: watched(name, vars(cuda._operators)[f"_flash_attention_{name}"])
        for name in ("forward", "backward")
    }
    operators = SimpleNamespace(**{f"_flash_attention_{name}": call for name, call in kernels.items()})
    monkeypatch.setattr(cuda, "_operators", operators)
    segments = make_segments(CPU)
    queries, keys = (
        torch.zeros(sum(lengths), 2, 8, dtype=torch.bfloat16, requires_grad=True)
        for lengths in (segments.query_lengths, segments.key_lengths)
    )
    options = AttentionOptions(scale=0.5, window=None, softcap=None, sinks=None)
    before = queries * 1
    before.register_hook(lambda _: modes.update(after=torch.are_deterministic_algorithms_enabled()))
    for _ in range(2):
        out = BACKENDS["torch_varlen"](before, keys, keys, segments, options)
        with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
            out.sum().backward(retain_graph=True)
        if not fails:
            assert not modes.pop("after")
        assert modes == {"forward": False, "backward": True, "fills": False}
        assert of_segments._memory.fill_uninitialized_memory
        assert torch.get_deterministic_debug_mode() == 0
    with torch.no_grad():
        BACKENDS["torch_varlen"](before, keys, keys, segments, options)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_torch_s_operators_take_what_they_are_given_and_return_what_compiled_code_expects(
    window: int | None, heads_first: bool, gathers: bool
) -> None:
    """By their own rules for tensors without values, in each release of torch. Heads may lie before tokens in
    memory, as in latent attention; compiled code checks the order of what it gets."""
    segments = make_segments(torch.device("meta"), gathers=gathers)

    def states(lengths: tuple[int, ...], heads: int) -> Tensor:
        shape = (heads, sum(lengths), 8) if heads_first else (sum(lengths), heads, 8)
        made = torch.zeros(shape, dtype=torch.bfloat16, device="meta")
        return made.transpose(0, 1) if heads_first else made

    keys = states(segments.query_lengths if gathers else segments.key_lengths, 2)
    inputs = states(segments.query_lengths, 4), keys, keys
    asked = (segments.number, 0.5, cuda._neighbours(window)[0])
    out, normalizers = cuda._attend._init_fn(*inputs, *asked)
    grads = cuda._attend_backward._init_fn(out, *inputs, out, normalizers, *asked)
    expected = cuda._attend(*inputs, *asked)
    expected_grads = cuda._attend_backward(out, *inputs, *expected, *asked)
    for ours, theirs in zip((out, normalizers, *grads), (*expected, *expected_grads), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
