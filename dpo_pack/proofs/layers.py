"""Proofs of our functions that layers call, attention and recurrences: each is called as the config says, and
computes what the plain function gives, outputs and gradients, on random inputs. Legend: T tokens of a row.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from dpo_pack import proofs
from dpo_pack.model.attention import AttentionBackend
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, make_segments
from dpo_pack.model.config import attention_needs, effective_window, layer_windows, num_recurrent_calls
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.recurrence import RecurrentCall, RowFunction
from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import PADDED_REMEDY, Proof, proof_row, random_groups
from dpo_pack.system.errors import first_line

# A window longer than all _ATTENTION_SEGMENTS would hide no key, so the proof uses at most this window.
_PROOF_WINDOW = 24
# (queries, keys): one token; a short sequence; 1 query after 29 keys; 20 after 25; more than the window.
_ATTENTION_SEGMENTS = ((1, 1), (7, 7), (1, 30), (20, 45), (64, 64))
# (tokens of the shared prefix, tokens of each completion after it): some are longer than a kernel's chunk,
# some shorter than a convolution; some completions have one token or none; the last prefix stands alone.
_RECURRENT_LENGTHS = ((70, (40, 33)), (2, (5, 1)), (3, (0, 6)), (1, (1, 2)), (9, (4, 0, 3)), (20, (0,)))
# transformers' functions that compute the same token by token. They round less: where all heads forget fast,
# the gradient of the decays is wrong by up to 1e-4 in its function on chunks of 64 tokens.
_BY_TOKEN = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}


@torch.no_grad()
def prove_layers(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> list[Proof]:
    """Proves that layers call our functions (the first proof; if it fails, the only one), and that these are
    right. Raises UnsupportedModelError where a layer uses attention in a way that a row does not allow."""
    calls = Recorded(scorer, proof_row(scorer, groups, device))
    wiring, dtype = prove_wiring(calls, scorer.model.config), scorer.compute_dtype
    if not wiring.passed:
        return [wiring]
    # Each kind of call once, in order of layers: the same random inputs in every process.
    kinds, recurrent = dict.fromkeys(calls.attention), calls.recurrent.values()
    of_attention = [attention_error(calls.backend, call, dtype, device) for call in kinds]
    of_recurrences = [recurrence_error(call, calls.recurrence, device) for call in recurrent]
    sdpa = "set model.attention: sdpa, and report GPU, torch and kernel versions"
    results = [wiring]
    for name, measured, where, remedy in (
        ("kernel", of_attention, "on random inputs", sdpa),
        ("recurrence", of_recurrences, "of recurrent layers", PADDED_REMEDY),
    ):
        if measured:
            _, error, bound = max(measured)
            proof = Proof(
                name=name,
                passed=error <= bound < math.inf,
                numbers={"relative error": error},
                bound=f"relative error of outputs and gradients {where} <= {bound:.1e}",
                remedy=remedy,
            )
            results.append(proof)
    return results


@torch.no_grad()
def take_kernels(scorer: CompletionLogps, device: torch.device) -> list[str]:
    """Lets the scorer's recurrent layers use the kernels of `KERNELS` that are installed and right, as
    compared with the family's own functions. Returns a line for each function that the layers call: the
    kernel, or why not."""
    if scorer.backend is None or not num_recurrent_calls(scorer.model.config):
        return []
    lines = []
    with random_groups(scorer, device) as groups:
        calls = Recorded(scorer, proof_row(scorer, groups, device)).recurrent.values()
        for name in dict.fromkeys(call.name for call in calls):
            kernel = KERNELS[name]
            obstacle = _take_kernel(scorer, [call for call in calls if call.name == name], device)
            reason = "" if obstacle is None else f" is not used: {obstacle}"
            lines.append(f"{kernel.name} of {kernel.package}{reason}")
    return lines


def _take_kernel(scorer: CompletionLogps, calls: Sequence[RecurrentCall], device: torch.device) -> str | None:
    """Lets the scorer use the kernel of these calls if it computes them exactly; else returns why not."""
    function = import_kernel(KERNELS[calls[0].name])
    if isinstance(function, str):
        return function
    try:
        errors = [recurrence_error(replace(c, kernel=function), RecurrentCall.run, device) for c in calls]
    except Exception as raised:  # a kernel for another GPU, dtype or size can raise anything
        return first_line(raised) or type(raised).__name__
    _, error, bound = max(errors)
    if not error <= bound < math.inf:
        return f"its relative error is {error:.1e}, and {bound:.1e} is allowed"
    scorer.recurrent_kernels[calls[0].name] = function
    return None


# ----------------------------------------------------------------------------------- what layers call


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamCall:
    """How one attention layer called the kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    options: AttentionOptions  # without the values of sinks
    has_sinks: bool


class Recorded:
    """The calls of our functions by the layers of a model while it computes a row."""

    def __init__(self, scorer: CompletionLogps, row: Row) -> None:
        assert scorer.backend is not None
        self.backend, self.recurrence = scorer.backend, scorer.recurrence
        self.attention: list[SeamCall] = []
        self.recurrent: dict[Hashable, RecurrentCall] = {}  # the first of each kind
        self.num_recurrent = 0
        with scorer.replaced(backend=self._attend, recurrence=self._recur):
            scorer(row)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
    ) -> Tensor:
        call = SeamCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_head_dim=value.shape[2],
            options=replace(options, sinks=None),
            has_sinks=options.sinks is not None,
        )
        self.attention.append(call)
        return self.backend(query, key, value, segments, options)

    def _recur(self, call: RecurrentCall) -> Any:
        self.num_recurrent += 1
        shapes = tuple(part.shape for part in call.arguments if isinstance(part, Tensor))
        self.recurrent.setdefault((call.name, shapes), call)
        return self.recurrence(call)


def prove_wiring(calls: Recorded, config: PretrainedConfig) -> Proof:
    """Proves that each layer calls our attention once, with the window, softcap and sinks of the config:
    log-probs of short rows cannot show that a window is missing, and rounding may hide a sink."""
    attention, needs, expected = calls.attention, attention_needs(config), layer_windows(config)
    windows = [effective_window(call.options.window, config) for call in attention]
    measured = {
        "calls of our attention": len(attention),
        "windows as in the config": sum(a == b for a, b in zip(windows, expected, strict=False)),
        "softcaps": sum(call.options.softcap is not None for call in attention),
        "calls of our recurrent functions": calls.num_recurrent,
    }
    softcaps, num_recurrent = len(expected) * needs.has_softcap, num_recurrent_calls(config)
    required = dict(zip(measured, (len(expected), len(expected), softcaps, num_recurrent), strict=True))
    if needs.has_sinks:  # in some layers
        measured["sinks"], required["sinks"] = int(any(call.has_sinks for call in attention)), 1
    remedy = PADDED_REMEDY
    if num_recurrent != calls.num_recurrent:
        own = f"this is {transformers.__version__}"
        remedy = f"install the transformers release that docs/families.md names ({own}), or {remedy}"
    return Proof(
        name="wiring",
        passed=measured == required,
        numbers={name: float(number) for name, number in measured.items()},
        bound=", ".join(f"{name} {number}" for name, number in required.items()),
        remedy=remedy,
    )


# -------------------------------------------------------------------------- what the functions compute


def _trial(
    given: Sequence[Tensor],
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    *,
    least: float,
) -> tuple[float, float, float]:
    """Returns (error / bound, error, bound) of the output or the gradient in which the first is largest. An
    error is relative to the norm of what `exact` gives in fp32. The bound is `least`, and if the inputs are
    in low precision at least `PLAIN_ERRORS` times the error of `plain` on them."""
    weights: list[Tensor] = []

    def run(compute: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in given]
            out = compute(*inputs)
            weights.extend([] if weights else [torch.randn(out.shape, device=out.device)])
            grads = torch.autograd.grad(out, inputs, weights[0].to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    right, errors = run(exact, torch.float32), list[list[float]]()
    is_low = any(tensor.dtype != torch.float32 for tensor in given)
    for compute in (ours, plain) if is_low else (ours,):
        ratios = [(one - other).norm() / other.norm() for one, other in zip(run(compute), right, strict=True)]
        errors.append([math.inf if math.isnan(ratio) else ratio for ratio in map(float, ratios)])
    bounds = [max(least, proofs.PLAIN_ERRORS * error) if is_low else least for error in errors[-1]]
    return max(  # a bound that is not finite proves nothing
        (error / bound if math.isfinite(bound) else math.inf, error, bound)
        for error, bound in zip(errors[0], bounds, strict=True)
    )


def attention_error(
    backend: AttentionBackend, call: SeamCall, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Returns the `_trial` of an attention backend: inputs as in `call`, in `dtype`."""
    query_lengths, key_lengths = zip(*_ATTENTION_SEGMENTS, strict=True)
    kv_heads = min(2, call.num_kv_heads)
    heads = kv_heads * (call.num_heads // call.num_kv_heads)
    shapes = (
        (sum(query_lengths), heads, call.head_dim),
        (sum(key_lengths), kv_heads, call.head_dim),
        (sum(key_lengths), kv_heads, call.value_head_dim),
    )
    given = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    window = call.options.window
    options = replace(
        call.options,
        window=None if window is None else min(window, _PROOF_WINDOW),
        sinks=torch.randn(heads, device=device) if call.has_sinks else None,
    )
    segments = make_segments(query_lengths, key_lengths, device)
    plain = functools.partial(plain_attention, segments=segments, options=options)
    least = proofs.ATTENTION_BOUND if dtype == torch.float32 else 0.0
    return _trial(given, lambda *states: backend(*states, segments, options), plain, plain, least=least)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """Attention by definition, in the dtype of its inputs; only softmax is in fp32, as in eager attention."""
    device, groups = query.device, query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # In each segment the last query is at the last key, and a query sees `window` keys up to itself.
    visible = [
        torch.ones(q, k, device=device).tril(k - q).triu(k - q - (options.window or k) + 1)
        for q, k in zip(segments.query_lengths, segments.key_lengths, strict=True)
    ]
    scores = scores.masked_fill(torch.block_diag(*visible) == 0, float("-inf"))
    if options.sinks is not None:
        column = options.sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : len(key)].to(value.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)


def recurrence_error(
    call: RecurrentCall, run: Callable[[RecurrentCall], Any], device: torch.device
) -> tuple[float, float, float]:
    """Returns the `_trial` of a recurrent function on a row, against the family's own on each sequence alone,
    token by token if it can. A kernel of another package may err by `KERNEL_EPSILONS`."""
    row = _row_of_lengths(device)
    segments = row.segments
    assert segments is not None and segments.kv_gather is not None
    tokens = segments.kv_gather.index.split(list(segments.key_lengths))  # of each sequence
    # By position of an argument or name of an option; our own options are left out.
    values: dict[int | str, Any] = dict(enumerate(call.arguments))
    values |= {name: value for name, value in call.options.items() if not name.startswith("row_")}
    # The convolution has its tokens in the last dimension, [1, D, T], the others in [1, T, ...].
    dim = 2 if call.name == "causal_conv1d_fn" else 1
    length = values[0].shape[dim]  # is repeated or cut to the row's
    again = torch.arange(row.num_tokens, device=device) % length
    tensors = {p: v.detach() for p, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    of_tokens = {p for p, v in tensors.items() if v.ndim > dim and v.shape[dim] == length and len(v) == 1}
    given = {p: v.index_select(dim, again) if p in of_tokens else v for p, v in tensors.items()}

    def output(function: Callable[..., Any], inputs: dict[int | str, Tensor], **options: Any) -> Tensor:
        named = values | inputs
        arguments = [named.pop(number) for number in range(len(call.arguments))]
        result = function(*arguments, **{str(name): value for name, value in named.items()}, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def in_row(*inputs: Tensor) -> Tensor:
        def function(*arguments: Any, **options: Any) -> Any:
            return run(replace(call, arguments=arguments, options=options))

        return output(function, dict(zip(given, inputs, strict=True)), row_segments=segments)

    def one_by_one(*inputs: Tensor, function: RowFunction = call.stock) -> Tensor:
        """Calls the family's own function on each sequence alone; keeps the outputs of its segment."""
        named, parts = dict(zip(given, inputs, strict=True)), []
        for positions, count in zip(tokens, segments.query_lengths, strict=True):
            own = {place: named[place].index_select(dim, positions) for place in of_tokens}
            parts.append(output(function, named | own).narrow(dim, len(positions) - count, count))
        return torch.cat(parts, dim=dim)

    code = vars(sys.modules[call.stock.__module__])
    by_token = inspect.unwrap(code.get(_BY_TOKEN.get(call.name, ""), call.stock))
    exact, least = functools.partial(one_by_one, function=by_token), proofs.RECURRENCE_BOUND
    if call.kernel is not None:
        least = max(least, proofs.KERNEL_EPSILONS * torch.finfo(call.arguments[0].dtype).eps)
    return _trial(list(given.values()), in_row, one_by_one, exact, least=least)


def _row_of_lengths(device: torch.device) -> Row:
    """Returns a row whose shared parts and tails have _RECURRENT_LENGTHS."""
    groups = []
    for shared, tails in _RECURRENT_LENGTHS:
        sequences = [np.repeat((1, number), (shared, tail)) for number, tail in enumerate(tails, start=2)]
        groups.append(Group(context=np.zeros(1, dtype=np.int64), completions=tuple(sequences)))
    return packed_row(groups, device, share_prompt=True)
