"""The trial of our functions that layers call, attention and recurrences: each is called as the config says,
and its outputs and gradients in a row are those of the plain function for each sequence alone.

Legend: T tokens of the row, H heads, D dimensions of a head.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from dpo_pack import proofs
from dpo_pack.model.attention.segments import AttentionOptions, RowSegments
from dpo_pack.model.config import attention_needs, effective_window, layer_windows, num_recurrent_calls
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.recurrence import RecurrentCall
from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import PADDED_REMEDY, Proof, proof_row, random_groups
from dpo_pack.system.errors import first_line

# (tokens of the beginning that neighbours have in common, tokens that the completions then share, tokens of
# each completion after them): some are longer than a kernel's chunk, some shorter than a convolution; some
# completions have one token or none; the last prefix stands alone.
_LENGTHS = (
    *((0, 70, (40, 33)), (0, 2, (5, 1)), (0, 3, (0, 6)), (0, 1, (1, 2))),
    *((18, 11, (4, 0, 1)), (18, 1, (1, 2)), (18, 0, (2, 3)), (0, 20, (0,))),
)
_GROUPS = [
    Group(
        context=np.zeros(max(beginning, 1), dtype=np.int64),
        completions=tuple(np.repeat((1, n), (shared, tail)) for n, tail in enumerate(tails, 2)),
        beginning=beginning,
    )
    for beginning, shared, tails in _LENGTHS
]
# A window that is longer than these sequences would hide no key, so the trial uses at most this window.
_LONGEST_WINDOW = 24
# The logarithms of decays in the second trial: heads that forget at once would hide a wrong state, and the
# gradient of a decay near 0 moves nothing.
_SLOW_DECAYS = (-0.5, -0.05)

_Inputs = dict[str, Tensor]  # the differentiable inputs of a function, by name
_Error = tuple[float, float, float]  # (error / bound, error, bound)


@torch.no_grad()
def prove_layers(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> list[Proof]:
    """Proves that layers call our functions (the first proof; if it fails, the only one), and that these are
    right. Raises UnsupportedModelError where a layer uses attention in a way that a row does not allow."""
    calls = Recorded(scorer, proof_row(scorer, groups, device))
    wiring = prove_wiring(calls, scorer.model.config)
    if not wiring.passed:
        return [wiring]
    # Each kind of call once, in order of layers: the same random inputs in every process.
    errors = [(function_error(call, calls.run, device), call.name) for call in calls.kinds.values()]
    (ratio, error, bound), name = max(errors)
    sdpa = "set model.attention: sdpa, and report GPU, torch and kernel versions"
    functions = Proof(
        name="functions",
        passed=ratio <= 1.0,
        numbers={f"relative error of {name}": error},
        bound=f"relative error of outputs and gradients <= {bound:.1e}",
        remedy=sdpa if name == "attention" else PADDED_REMEDY,
    )
    return [wiring, functions]


@torch.no_grad()
def take_kernels(scorer: CompletionLogps, device: torch.device) -> list[str]:
    """Lets the scorer's recurrent layers use the kernels of `KERNELS` that are installed and right, as
    compared with the family's own functions. Returns a line for each function that the layers call: the
    kernel, or why not."""
    if scorer.backend is None or not num_recurrent_calls(scorer.model.config):
        return []
    lines = []
    with random_groups(scorer, device) as groups:
        calls = Recorded(scorer, proof_row(scorer, groups, device)).kinds.values()
        for name in dict.fromkeys(call.name for call in calls if call.name in KERNELS):
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
        errors = [function_error(replace(c, kernel=function), RecurrentCall.run, device) for c in calls]
    except Exception as raised:  # a kernel for another GPU, dtype or size can raise anything
        return first_line(raised) or type(raised).__name__
    ratio, error, bound = max(errors)
    if ratio > 1.0:
        return f"its relative error is {error:.1e}, and {bound:.1e} is allowed"
    scorer.recurrent_kernels[calls[0].name] = function
    return None


# ----------------------------------------------------------------------------------- what layers call


class Recorded:
    """The calls of our functions by the layers of a model while it computes a row."""

    def __init__(self, scorer: CompletionLogps, row: Row) -> None:
        assert scorer.backend is not None
        self.backend, self.recurrence = scorer.backend, scorer.recurrence
        self.dtype = scorer.compute_dtype
        self.attention: list[AttentionOptions] = []
        self.num_recurrent = 0
        self.kinds: dict[
            Hashable, RecurrentCall
        ] = {}  # the first of each kind; of attention, with random inputs
        with scorer.replaced(backend=self._attend, recurrence=self._recur):
            scorer(row)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
    ) -> Tensor:
        self.attention.append(options)
        call = attention_call((query.shape, key.shape, value.shape), options, self.dtype, query.device)
        kind = (query.shape, key.shape, value.shape, call.options["options"], options.sinks is None)
        self.kinds.setdefault(kind, call)
        return self.backend(query, key, value, segments, options)

    def _recur(self, call: RecurrentCall) -> Any:
        self.num_recurrent += 1
        shapes = tuple(part.shape for part in call.arguments if isinstance(part, Tensor))
        self.kinds.setdefault((call.name, shapes), call)
        return self.recurrence(call)

    def run(self, call: RecurrentCall) -> Any:
        """Computes a call as the scorer does."""
        if call.name != "attention":
            return self.recurrence(call)
        options = replace(call.options["options"], sinks=call.options["sinks"])
        states = (state.squeeze(0) for state in call.arguments)
        return self.backend(*states, call.options["row_segments"], options)[None]


def attention_call(
    shapes: Sequence[Sequence[int]], options: AttentionOptions, dtype: torch.dtype, device: torch.device
) -> RecurrentCall:
    """Returns a call of `plain_attention` with random queries, keys and values [T, H, D] and sinks."""
    states = tuple(torch.randn(1, *shape, device=device).to(dtype) for shape in shapes)
    sinks = None if options.sinks is None else torch.randn(options.sinks.shape, device=device)
    window = None if options.window is None else min(options.window, _LONGEST_WINDOW)
    rest = {"options": replace(options, window=window, sinks=None), "sinks": sinks}
    return RecurrentCall(name="attention", stock=plain_attention, arguments=states, options=rest)


def prove_wiring(calls: Recorded, config: PretrainedConfig) -> Proof:
    """Proves that each layer calls our attention once, with the window, softcap and sinks of the config:
    log-probs of short rows cannot show that a window is missing, and rounding may hide a sink."""
    attention, needs, expected = calls.attention, attention_needs(config), layer_windows(config)
    windows = [effective_window(options.window, config) for options in attention]
    numbers = {  # measured, required
        "calls of our attention": (len(attention), len(expected)),
        "windows as in the config": (sum(map(operator.eq, windows, expected)), len(expected)),
        "softcaps": (sum(o.softcap is not None for o in attention), len(expected) * needs.has_softcap),
        "calls of our recurrent functions": (calls.num_recurrent, num_recurrent_calls(config)),
    }
    if needs.has_sinks:  # in some layers
        numbers["sinks"] = (int(any(options.sinks is not None for options in attention)), 1)
    remedy = PADDED_REMEDY
    if calls.num_recurrent != num_recurrent_calls(config):
        own = f"this is {transformers.__version__}"
        remedy = f"install the transformers release that docs/families.md names ({own}), or {remedy}"
    return Proof(
        name="wiring",
        passed=all(measured == required for measured, required in numbers.values()),
        numbers={name: float(measured) for name, (measured, _) in numbers.items()},
        bound=", ".join(f"{name} {required}" for name, (_, required) in numbers.items()),
        remedy=remedy,
    )


# -------------------------------------------------------------------------- what the functions compute


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Attention of one sequence by definition, [1, T, H, D], in the dtype of its inputs; only softmax is in
    fp32, as in eager attention."""
    length, groups = query.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # A query sees `window` keys up to itself.
    visible = torch.ones(length, length, device=query.device).tril().triu(1 - (options.window or length))
    scores = scores.masked_fill(visible == 0, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(1, -1, length, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., :length].to(value.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def function_error(call: RecurrentCall, run: Callable[[RecurrentCall], Any], device: torch.device) -> _Error:
    """Returns the `_error` of a function on a row, against the plain or the family's own function on each
    sequence alone: the larger one with the call's inputs and with slow decays."""
    row = packed_row(_GROUPS, device, share_prompt=True)
    segments, names = row.segments, list(inspect.signature(call.stock).parameters)
    assert segments is not None and segments.kv_gather is not None
    tokens = segments.kv_gather.index.split(list(segments.key_lengths))  # of each sequence
    values = dict(zip(names, call.arguments, strict=False))
    values |= {name: value for name, value in call.options.items() if not name.startswith("row_")}
    # The convolution has its tokens in the last dimension, [1, D, T], the others in [1, T, ...].
    dim = 2 if call.name == "causal_conv1d_fn" else 1
    length = call.arguments[0].shape[dim]  # is repeated or cut to the row's
    again = torch.arange(row.num_tokens, device=device) % length
    tensors = {n: v.detach() for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
    of_tokens = {n for n, v in tensors.items() if v.ndim > dim and v.shape[dim] == length and len(v) == 1}
    given = {n: v.index_select(dim, again) if n in of_tokens else v for n, v in tensors.items()}

    def output(function: Callable[..., Any], inputs: _Inputs, **options: Any) -> Tensor:
        named = values | inputs | options
        result = function(*[named.pop(name) for name in names[: len(call.arguments)]], **named)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def alone(inputs: _Inputs, **options: Any) -> Tensor:
        """Computes each sequence alone; keeps the outputs of its segment."""
        parts = []
        for positions, count in zip(tokens, segments.query_lengths, strict=True):
            own = {name: inputs[name].index_select(dim, positions) for name in of_tokens}
            out = output(call.stock, inputs | own, **options)
            parts.append(out.narrow(dim, len(positions) - count, count))
        return torch.cat(parts, dim=dim)

    # transformers' functions round least in small chunks. Mamba 2 keeps a state for each: not of 1.
    chunk: dict[str, Any] = {"chunk_size": 16 if "A" in given else 1} if "chunk_size" in names else {}
    in_row = functools.partial(
        output, lambda *a, **options: run(replace(call, arguments=a, options=options)), row_segments=segments
    )
    ways = (in_row, alone, functools.partial(alone, **chunk))
    least = proofs.ATTENTION_BOUND if call.name == "attention" else proofs.RECURRENCE_BOUND
    if call.kernel is not None:
        least = max(least, proofs.KERNEL_EPSILONS * torch.finfo(call.arguments[0].dtype).eps)
    error, slow = _error(given, *ways, least, proofs.PLAIN_BOUND), {}
    if "g" in given:
        slow["g"] = given["g"].clamp(*_SLOW_DECAYS)
    elif "A" in given:  # Mamba 2's decays are A * steps
        steps = F.softplus(given["dt"].float() + given.get("dt_bias", 0.0))
        slow["A"] = (_SLOW_DECAYS[0] / steps.amax(dim=(0, 1))).to(given["A"].dtype)
    return max(error, _error(given | slow, *ways, least, least)) if slow else error


def _error(
    given: _Inputs,
    in_row: Callable[[_Inputs], Tensor],
    alone: Callable[[_Inputs], Tensor],
    exact: Callable[[_Inputs], Tensor],
    least: float,
    most: float,
) -> _Error:
    """Returns (error / bound, error, bound) of the output or the gradient in which the first is largest. The
    truth is what `exact` gives in fp32. A gradient's error counts by what it moves: times the input's norm,
    relative to the largest norm of a gradient times that of its input. The bound is `PLAIN_ERRORS` times the
    error of `alone`, at least `least`, and in fp32 at most `most`."""
    weights: list[Tensor] = []

    def run(compute: Callable[[_Inputs], Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        with torch.enable_grad():
            inputs = {n: v.detach().to(dtype or v.dtype).requires_grad_() for n, v in given.items()}
            out = compute(inputs)
            weights.extend([] if weights else [torch.randn(out.shape, device=out.device)])
            leaves, weighted = list(inputs.values()), weights[0].to(out.dtype)
            grads = torch.autograd.grad(out, leaves, weighted, materialize_grads=True)
        return [result.detach().float() for result in (out, *grads)]

    right, ours, plain = run(exact, torch.float32), run(in_row), run(alone)
    sizes = [value.float().norm() for value in given.values()]
    largest = max(grad.norm() * size for grad, size in zip(right[1:], sizes, strict=True))
    units = [right[0].norm()]  # of errors; zeros, such as a new bias, would move nothing
    units += [largest / size if size else grad.norm() for grad, size in zip(right[1:], sizes, strict=True)]
    is_low, found = any(value.dtype != torch.float32 for value in given.values()), list[_Error]()
    for one, other, truth, unit in zip(ours, plain, right, units, strict=True):
        apart = [(result - truth).norm() for result in (one, other)]
        errors = [float(distance / unit) if distance else 0.0 for distance in apart]  # 0, where all are 0
        error, by_plain = (math.inf if math.isnan(error) else error for error in errors)
        bound = max(least, proofs.PLAIN_ERRORS * by_plain)
        bound = bound if is_low else min(bound, most)
        # A bound that is not finite proves nothing.
        found.append((error / bound if math.isfinite(bound) else math.inf, error, bound))
    return max(found)
