"""Proves that our recurrent functions give a row what the model family's own give each sequence alone.

Legend: T tokens of the proof's row.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.config import num_recurrent_calls
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.recurrence import RecurrentCall, RowFunction
from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs.kernel import (
    Recorded,
    error_proof,
    kernel_error,
    prove_wiring,
    relative_errors,
    worst,
)
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof, proof_row, random_groups
from dpo_pack.system.errors import first_line

# Tensors of a call by the position of an argument or the name of an option.
_Inputs = dict[int | str, Tensor]

# (tokens of the shared prefix, tokens of each completion after it): some are longer than a kernel's chunk,
# some shorter than a convolution; some completions have one token or none; the last prefix stands alone.
_PROOF_LENGTHS = ((70, (40, 33)), (2, (5, 1)), (3, (0, 6)), (1, (1, 2)), (9, (4, 0, 3)), (20, (0,)))
# The allowed relative error in fp32. We measured 1e-6, and 5e-5 where all heads forget fast.
_FLOAT32_BOUND = 1e-4
# transformers' functions that compute the same token by token. They round less: where all heads forget fast,
# the gradient of the decays is wrong by up to 1e-4 in its function on chunks of 64 tokens.
_BY_TOKEN = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}
# The allowed relative error of another package's kernel in bf16 and fp16, in units of the dtype's epsilon.
# Its matrix products round keys, values, scores and states to the dtype; flash-linear-attention's own tests
# allow five units.
_KERNEL_ROUNDINGS = 4.0


@torch.no_grad()
def prove_layers(
    scorer: CompletionLogps,
    groups: Sequence[Group],
    device: torch.device,
    *,
    compute: Callable[[Row], object] | None = None,
) -> list[Proof]:
    """Proves that layers call our functions (the first proof; if it fails, the only one), and that these are
    right. `compute`, if given, runs a row instead of the scorer's own forward."""
    assert scorer.backend is not None
    calls = Recorded(scorer, proof_row(scorer, groups, device), compute or scorer)
    proofs, dtype = [prove_wiring(calls, scorer.model.config)], scorer.compute_dtype
    if proofs[0].passed and calls.attention:
        kinds = dict.fromkeys(calls.attention)  # in order of layers: the same random inputs in every process
        errors = [kernel_error(scorer.backend, call, dtype, device) for call in kinds]
        remedy = "set model.attention: sdpa, and report GPU, torch and kernel versions"
        proofs.append(error_proof("kernel", errors, "on random inputs", remedy))
    if proofs[0].passed and calls.recurrent:
        errors = [recurrence_error(call, scorer.recurrence, device) for call in calls.recurrent.values()]
        proofs.append(error_proof("recurrence", errors, "of recurrent layers", PADDED_REMEDY))
    return proofs


@torch.no_grad()
def take_kernels(scorer: CompletionLogps, device: torch.device) -> list[str]:
    """Lets the scorer's recurrent layers use the kernels of `KERNELS` that are installed and right, as
    compared with the family's own functions. Returns a line for each function that the layers call: the
    kernel, or why not."""
    if scorer.backend is None or not num_recurrent_calls(scorer.model.config):
        return []
    lines = []
    # Without a kernel that they need, layers are slow, but they tell what they call.
    with random_groups(scorer, device) as groups, scorer.replaced(recurrence=RecurrentCall.run):
        calls = Recorded(scorer, proof_row(scorer, groups, device), scorer).recurrent.values()
        for name in dict.fromkeys(call.name for call in calls):
            kernel = KERNELS[name]
            obstacle = _take(scorer, name, [call for call in calls if call.name == name], device)
            reason = "" if obstacle is None else f" is not used: {obstacle}"
            lines.append(f"{kernel.name} of {kernel.package}{reason}")
    return lines


def _take(
    scorer: CompletionLogps, name: str, calls: Sequence[RecurrentCall], device: torch.device
) -> str | None:
    """Lets the scorer use a kernel if the kernel computes these calls exactly; else returns why not."""
    function = import_kernel(KERNELS[name])
    if isinstance(function, str):
        return function
    for call in calls:
        try:
            by_kernel = replace(call, kernel=function)
            error, bound = recurrence_error(by_kernel, RecurrentCall.run, device)
        except Exception as raised:  # a kernel for another GPU, dtype or size can raise anything
            return first_line(raised) or type(raised).__name__
        if not error <= bound:
            return f"its relative error is {error:.1e}, and {bound:.1e} is allowed"
    scorer.recurrent_kernels[name] = function
    return None


def recurrence_error(
    call: RecurrentCall, run: Callable[[RecurrentCall], Any], device: torch.device
) -> tuple[float, float]:
    """Returns (error, bound) of the output or the gradient with the largest ratio of error to bound.

    The family's own function in fp32 gives the exact values, token by token if it can; in the call's
    precision it gives the bound, as in `kernel_error`. A kernel of another package may have
    `_KERNEL_ROUNDINGS`."""
    row = _row_of_lengths(device)
    segments = row.segments
    assert segments is not None and segments.kv_gather is not None
    tokens = segments.kv_gather.index.split(list(segments.key_lengths))  # of each sequence
    # By position of an argument or name of an option; our own options are left out.
    values: dict[int | str, Any] = dict(enumerate(call.arguments))
    values |= {name: value for name, value in call.options.items() if not name.startswith("row_")}
    # The convolution has its tokens in the last dimension, [1, D, T], the others in [1, T, ...].
    dim = 2 if call.name == "causal_conv1d_fn" else 1
    given, of_tokens = _inputs_of_row(values, dim, row.num_tokens)

    def in_row(tensors: _Inputs) -> Tensor:
        arguments, options = _arguments(values | tensors)
        options["row_segments"] = segments
        result = run(replace(call, arguments=arguments, options=options))
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def one_by_one(tensors: _Inputs, function: RowFunction = call.stock) -> Tensor:
        """Calls the family's own function on each sequence alone; keeps the outputs of its segment."""
        parts = []
        for positions, count in zip(tokens, segments.query_lengths, strict=True):
            own = {place: tensors[place].index_select(dim, positions) for place in of_tokens}
            arguments, options = _arguments(values | tensors | own)
            result = function(*arguments, **options)
            out = result[0] if isinstance(result, tuple) else result
            parts.append(out.narrow(dim, len(positions) - count, count))
        return torch.cat(parts, dim=dim)

    weights: list[Tensor] = []

    def results(compute: Callable[[_Inputs], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        with torch.enable_grad():
            inputs = {
                place: tensor.to(dtype or tensor.dtype).requires_grad_() for place, tensor in given.items()
            }
            out = compute(inputs)
            if not weights:
                weights.append(torch.randn(out.shape, device=device))
            grads = torch.autograd.grad(out, list(inputs.values()), weights[0].to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    code = vars(sys.modules[call.stock.__module__])
    by_token = inspect.unwrap(code.get(_BY_TOKEN.get(call.name, ""), call.stock))
    reference = results(functools.partial(one_by_one, function=by_token), torch.float32)
    errors = relative_errors(results(in_row, None), reference)
    least = _FLOAT32_BOUND
    if call.kernel is not None:
        least = max(least, _KERNEL_ROUNDINGS * torch.finfo(call.arguments[0].dtype).eps)
    bounds = [least] * len(errors)
    if any(tensor.dtype != torch.float32 for tensor in given.values()):
        bounds = [max(least, 2 * error) for error in relative_errors(results(one_by_one, None), reference)]
    return worst(zip(errors, bounds, strict=True))


def _row_of_lengths(device: torch.device) -> Row:
    """Returns a row whose shared parts and tails have _PROOF_LENGTHS."""
    groups = []
    for shared, tails in _PROOF_LENGTHS:
        sequences = [np.repeat((1, number), (shared, tail)) for number, tail in enumerate(tails, start=2)]
        groups.append(Group(context=np.zeros(1, dtype=np.int64), completions=tuple(sequences)))
    return packed_row(groups, device, share_prompt=True)


def _inputs_of_row(
    values: Mapping[int | str, Any], dim: int, num_tokens: int
) -> tuple[_Inputs, set[int | str]]:
    """Returns a call's tensors, and the places of those that have tokens, which are repeated or cut to the
    row's `num_tokens` in dimension `dim`."""
    length = values[0].shape[dim]
    again = torch.arange(num_tokens, device=values[0].device) % length
    given: _Inputs = {}
    of_tokens: set[int | str] = set()
    for place, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            given[place] = value.detach()
            if value.ndim > dim and value.shape[dim] == length and value.shape[0] == 1:
                given[place] = given[place].index_select(dim, again)
                of_tokens.add(place)
    return given, of_tokens


def _arguments(values: Mapping[int | str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {name: value for name, value in values.items() if isinstance(name, str)}
    return tuple(values[number] for number in range(len(values) - len(options))), options
