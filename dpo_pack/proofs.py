"""Proofs that packed rows are exact on this model, kernel and machine, from a few small random rows.

Why: in DPO the first loss is log 2 even when attention leaks, because policy and reference leak alike. Each
proof runs the real model through the real seam and returns what it measured, the bound it had to keep and,
when it failed, what to do.

Legend: T tokens of a row, S sequences, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.attention import AttentionBackend
from dpo_pack.attention.segments import RowSegments
from dpo_pack.layout import Group, Row, layout_row, packed_row
from dpo_pack.logps import sequence_sums
from dpo_pack.models import CompletionLogps

# Raised whenever a proof changes, so that what was remembered of an earlier one is proved again.
PROOF_VERSION = 1

PADDED_REMEDY = "use packing.mode: padded, and report the model's family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome of one proof."""

    name: str
    passed: bool
    numbers: dict[str, float]  # what was measured, by name; log-probs in nats
    bound: str  # what the numbers had to keep
    remedy: str  # what to do when it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamCall:
    """What one attention layer asked of the kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


def prove(scorer: CompletionLogps, device: torch.device) -> list[Proof]:
    """All proofs, in the order in which a failure explains later ones."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
        with torch.no_grad():
            calls, wiring = prove_wiring(scorer, _row(groups, device))
        proofs = [wiring]
        if wiring.passed:
            proofs.append(prove_kernel(scorer, calls, device))
            with torch.no_grad():
                proofs += [
                    prove_isolation(scorer, groups, device),
                    prove_equivalence(scorer, groups, device),
                    prove_head(scorer, _row(groups, device)),
                ]
    return proofs


def proof_groups(vocabulary: int) -> list[Group]:
    """Three pairs: an ordinary one, one whose completions begin alike, one with one-token completions."""

    def ids(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,))

    alike = ids(3)
    contents = [
        (ids(24), ids(11), ids(8)),
        (ids(9), torch.cat((alike, ids(6))), torch.cat((alike, ids(13)))),
        (ids(5), ids(1), ids(1)),
    ]
    return [
        Group(context=context.numpy(), completions=(chosen.numpy(), rejected.numpy()))
        for context, chosen, rejected in contents
    ]


def prove_wiring(scorer: CompletionLogps, row: Row) -> tuple[list[SeamCall], Proof]:
    """The seam is called once per layer, with the window that the config says.

    Log-probs of short rows cannot show a window that is missing, so it is read off the calls.
    """
    calls: list[SeamCall] = []
    backend = scorer.backend
    assert backend is not None

    def recording(query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, **options: Any) -> Tensor:
        calls.append(_seam_call(query, key, value, options))
        return backend(query, key, value, segments, **options)

    scorer.backend = recording
    try:
        scorer(row)
    finally:
        scorer.backend = backend
    expected = expected_windows(scorer.model.config)
    windows = [_effective_window(call.window, scorer.model.config) for call in calls]
    numbers = {
        "layers": float(scorer.num_attention_layers),
        "seam calls": float(len(calls)),
        "windows as configured": float(sum(a == b for a, b in zip(windows, expected, strict=False))),
    }
    passed = len(calls) == scorer.num_attention_layers and windows == expected
    bound = "as many seam calls, and windows as configured, as layers"
    return calls, Proof(name="wiring", passed=passed, numbers=numbers, bound=bound, remedy=PADDED_REMEDY)


def expected_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer by the model's config, None for full attention.

    Chunked layers (Llama 4) are full here: `check_positions` refuses sequences longer than a chunk.
    """
    text = config.get_text_config()
    values = text.to_dict()
    # Not from `values`: Gemma 3 writes another window to its file than it computes with.
    window = _effective_window(
        text.sliding_window if values.get("sliding_window") is not None else None, config
    )
    kinds = values.get("layer_types") or ["sliding_attention"] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _effective_window(window: int | None, config: PretrainedConfig) -> int | None:
    """None for a window wider than any sequence; Phi 3.5 MoE has one and does not even pass it on."""
    known = config.get_text_config().to_dict().get("max_position_embeddings")
    return None if window is None or (known is not None and window >= int(known)) else window


def prove_kernel(scorer: CompletionLogps, calls: Sequence[SeamCall], device: torch.device) -> Proof:
    """The kernel on random inputs of the model's shapes, forward and gradients, against fp32 by definition.

    Segments of all kinds: one token, queries only at the end of longer keys, longer than the window (which is
    cut to `_PROOF_WINDOW` where the model's is longer). A low-precision kernel may err twice as much as the
    plain computation in its dtype does; in fp32 the bound is absolute.
    """
    backend = scorer.backend
    assert backend is not None
    dtype = scorer.autocast or next(scorer.model.parameters()).dtype
    worst, bound = 0.0, 0.0
    for call in set(calls):
        error, allowed = _kernel_error(backend, call, dtype, device)
        if error - allowed > worst - bound or bound == 0.0:
            worst, bound = error, allowed
    return Proof(
        name="kernel",
        passed=worst <= bound,
        numbers={"max error": worst},
        bound=f"<= {bound:.1e} on outputs and gradients of random inputs",
        remedy="set model.attention: sdpa, and report GPU, torch and kernel versions",
    )


# What can change in a pair -> which of its (chosen, rejected) must then change.
_PARTS = {"chosen": [0], "rejected": [1], "context": [0, 1]}


def prove_isolation(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """A pair's log-probs depend on its own tokens only; and they do depend on those."""
    before = _pair_sums(scorer, groups, device)
    leaks, moves = 0.0, {part: torch.zeros(2, device=device) for part in _PARTS}
    for pair in range(len(groups)):
        for part, own in _PARTS.items():
            change = (_pair_sums(scorer, _with_change(groups, pair, part), device) - before).abs()
            # In one pair at least: bf16 gives two tokens of one place the same logit now and then.
            moves[part] = torch.maximum(moves[part], change[pair])
            change[pair, own] = 0.0
            leaks = max(leaks, float(change.max()))
    moved = min(float(moves[part][own].min()) for part, own in _PARTS.items())
    noise = _order_noise(scorer, groups, device) if routes_tokens(scorer.model.config) else 0.0
    return Proof(
        name="isolation",
        passed=leaks <= noise and moved > 0.0,
        numbers={"change of others": leaks, "change of its own": moved},
        bound=f"others change by {'nothing' if noise == 0.0 else f'<= {noise:.0e}'}, its own by more than 0",
        remedy=PADDED_REMEDY,
    )


def prove_equivalence(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """A shared row's log-probs are those of each sequence alone under the model's stock eager attention.

    In fp32 the bound is absolute. In low precision the mean error a token may be three times what rounding
    does to the stock computation; in a mixture of experts without the worst sequence, which may have met
    another expert at a near tie.
    """
    packed = _pair_sums(scorer, groups, device).flatten()
    sequences = [(group.context, completion) for group in groups for completion in group.completions]
    tokens = torch.tensor([len(completion) for _, completion in sequences], device=device)
    alone = _stock_sums(scorer, sequences, "eager", device)
    errors = (packed - alone).abs()
    by_token = (errors / tokens).sort().values
    if routes_tokens(scorer.model.config):
        by_token = by_token[:-1]
    numbers = {"max error": float(errors.max()), "mean error a token": float(by_token.mean())}
    remedy = f"{PADDED_REMEDY}; with model.attention: sdpa it may hold"
    if _dtype(scorer) == torch.float32:
        passed = numbers["max error"] <= 1e-4
        return Proof(name="equivalence", passed=passed, numbers=numbers, bound="max <= 1e-4", remedy=remedy)
    noise = _rounding_noise(scorer, sequences, alone, device)
    return Proof(
        name="equivalence",
        passed=math.isfinite(numbers["max error"]) and numbers["mean error a token"] <= 3 * noise,
        numbers={**numbers, "rounding a token": noise},
        bound="mean a token <= 3 x rounding",
        remedy=remedy,
    )


def prove_head(scorer: CompletionLogps, row: Row) -> Proof:
    """Chunked log-probs are those of the model's own logits for the same row.

    In low precision the model rounds its logits, so the mean error a token may be the rounding of its
    largest logits.
    """
    ours = scorer(row).sums
    with scorer.autocasting(row.input_ids.device):
        logits = scorer.model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,
            row_segments=row.segments,
            row_backend=scorer.backend,
        ).logits
    logits = logits.flatten(0, 1)[row.logit_index].float()  # [N, V]
    logps = logits.log_softmax(dim=-1).gather(1, row.targets[:, None]).squeeze(1)
    errors = (ours - sequence_sums(logps, row.completion_lengths)).abs()
    mean = float((errors / row.completion_lengths).mean())
    numbers = {"max error": float(errors.max()), "mean error a token": mean}
    remedy = "the family transforms its logits in a way we do not know: report it"
    if _dtype(scorer) == torch.float32:
        passed, bound = numbers["max error"] <= 1e-4, "max <= 1e-4"
    else:
        rounding = torch.finfo(_dtype(scorer)).eps * float(logits.abs().amax(dim=1).mean())
        passed, bound = mean <= rounding, f"mean a token <= {rounding:.1e}, the rounding of logits"
    return Proof(name="head", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def routes_tokens(config: PretrainedConfig) -> bool:
    """Whether the model is a mixture of experts, whose grouped products depend on which tokens meet."""
    values = config.get_text_config().to_dict()
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((values.get(key) or 0) > 1 for key in keys)


# A model's real window may be longer than a proof's segments; the kernel's meaning of it is the same.
_PROOF_WINDOW = 24
# (queries, keys): alone, one token after others, a tail, longer than the window.
_PROOF_SEGMENTS = ((1, 1), (7, 7), (1, 30), (20, 45), (64, 64))


def _kernel_error(
    backend: AttentionBackend, call: SeamCall, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """(largest error of outputs and gradients against fp32, what it may be)."""
    segments = _segments(device)
    kv_heads = min(2, call.num_kv_heads)
    heads = kv_heads * (call.num_heads // call.num_kv_heads)
    num_queries, num_keys = sum(segments.query_lengths), sum(segments.key_lengths)
    shapes = (
        (num_queries, heads, call.head_dim),
        (num_keys, kv_heads, call.head_dim),
        (num_keys, kv_heads, call.value_head_dim),
    )
    exact = [torch.randn(shape, device=device).to(dtype).float() for shape in shapes]
    weights = torch.randn(num_queries, heads, call.value_head_dim, device=device)
    window = None if call.window is None else min(call.window, _PROOF_WINDOW)
    options: dict[str, Any] = {"scale": call.scale, "window": window, "softcap": call.softcap}
    options["sinks"] = torch.randn(heads, device=device) if call.has_sinks else None

    def run(attention: AttentionBackend, of: torch.dtype) -> list[Tensor]:
        inputs = [states.to(of).requires_grad_() for states in exact]
        with torch.enable_grad():
            out = attention(*inputs, segments, **options)
            grads = torch.autograd.grad(out, inputs, weights.to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    reference = run(_plain_attention, torch.float32)
    largest = max(float(result.abs().max()) for result in reference)
    error = _largest_difference(run(backend, dtype), reference)
    if dtype == torch.float32:
        return error, 1e-5 * largest
    return error, 2 * _largest_difference(run(_plain_attention, dtype), reference)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: RowSegments,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by definition: scores, caps, the causal window, softmax in fp32, values."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    lengths = (segments.query_lengths, segments.key_lengths, segments.key_lengths)
    parts = [states.split(sizes) for states, sizes in zip((query, key, value), lengths, strict=True)]
    for q, k, v in zip(*parts, strict=True):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (
            torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
            - torch.arange(len(k), device=q.device)[None, :]
        )
        visible = (distance >= 0) & (distance < (len(k) if window is None else window))
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)].to(v.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def _segments(device: torch.device) -> RowSegments:
    def cumulative(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device=device)

    query_lengths, key_lengths = zip(*_PROOF_SEGMENTS, strict=True)
    return RowSegments(
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        cu_seqlens_q=cumulative(query_lengths),
        cu_seqlens_k=cumulative(key_lengths),
        kv_index=None,
        kv_first=None,
        kv_repeats=(),
    )


def _seam_call(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> SeamCall:
    return SeamCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        value_head_dim=value.shape[2],
        scale=options["scale"],
        window=options["window"],
        softcap=options["softcap"],
        has_sinks=options["sinks"] is not None,
    )


def _largest_difference(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """NaN counts as infinitely far."""
    differences = [(a - b).abs().nan_to_num(float("inf")).max() for a, b in zip(ours, reference, strict=True)]
    return max(float(difference) for difference in differences)


def _pair_sums(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Tensor:
    """[pairs, 2]: log-probs of chosen and rejected, all pairs in one shared row."""
    sums: Tensor = scorer(_row(groups, device)).sums
    return sums.view(-1, 2)


def _row(groups: Sequence[Group], device: torch.device) -> Row:
    return packed_row(layout_row(groups, share_prompt=True), device)


def _with_change(groups: Sequence[Group], pair: int, part: str) -> list[Group]:
    """The same groups with one token of one pair changed, the last of a completion or of a context.

    Lengths and common prefixes stay, so the row keeps its shape and bits may be compared.
    """
    context, (chosen, rejected) = groups[pair].context.copy(), groups[pair].completions
    chosen, rejected = chosen.copy(), rejected.copy()
    if part == "context":
        context[-1] = _another(context[-1], context[-1])  # within the shortest sliding window
    else:
        changed, other = (chosen, rejected) if part == "chosen" else (rejected, chosen)
        place = len(changed) - 1
        changed[place] = _another(changed[place], other[min(place, len(other) - 1)])
    group = Group(context=context, completions=(chosen, rejected))
    return [*groups[:pair], group, *groups[pair + 1 :]]


def _another(token: int, avoided: int) -> int:
    """A token id near 0, which every vocabulary has, that is neither of the two."""
    return next(candidate for candidate in range(3) if candidate not in (int(token), int(avoided)))


def _order_noise(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> float:
    """What another order of the pairs in the row changes: experts group their products by it."""
    turned = _pair_sums(scorer, groups[::-1], device).flip(0)
    change = float((turned - _pair_sums(scorer, groups, device)).abs().max())
    return 3 * max(change, 10 * torch.finfo(_dtype(scorer)).eps)


def _stock_sums(
    scorer: CompletionLogps, sequences: Sequence[tuple[Any, Any]], attention: str, device: torch.device
) -> Tensor:
    """[S]: each sequence alone, in a batch of one, under one of the model's own attention implementations."""
    sums = []
    with _stock_attention(scorer.model, attention), scorer.autocasting(device):
        for context, completion in sequences:
            ids = torch.from_numpy(np.concatenate((context, completion)))[None].to(device)
            logits = scorer.model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].float()
            logps = logits.log_softmax(dim=-1).gather(1, ids[0, len(context) :, None])
            sums.append(logps.double().sum())
    return torch.stack(sums)


def _rounding_noise(
    scorer: CompletionLogps, sequences: Sequence[tuple[Any, Any]], alone: Tensor, device: torch.device
) -> float:
    """Mean change a token of `alone` when the residual stream is rounded another way, the largest of a few.

    Two kernels of the same thing differ by their rounding, which in a mixture of experts now and then picks
    another expert. Comparing the stock eager attention with the stock sdpa would show it too, but families
    with softcaps or sinks have no sdpa, and one comparison may happen to meet no near tie.
    """
    tokens = torch.tensor([len(completion) for _, completion in sequences], device=device)
    changes = []
    for _ in range(4):
        with _rounded_otherwise(scorer.model, torch.finfo(_dtype(scorer)).eps):
            changes.append((_stock_sums(scorer, sequences, "eager", device) - alone).abs() / tokens)
    return max(float(change.mean()) for change in changes)


@contextlib.contextmanager
def _rounded_otherwise(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """Embeddings and each layer's output, off by up to half a unit in the last place of a dtype."""

    def perturb(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (perturb(_module, _inputs, output[0]), *output[1:])
        return output * (1 + eps * (torch.rand_like(output) - 0.5))

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [module.register_forward_hook(perturb) for module in (model.get_input_embeddings(), *layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _stock_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def _dtype(scorer: CompletionLogps) -> torch.dtype:
    return scorer.autocast or next(scorer.model.parameters()).dtype
