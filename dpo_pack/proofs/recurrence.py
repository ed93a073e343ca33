"""Proves that our recurrent functions give a row what the model family's own give each sequence alone.

Legend: T tokens of the proof's row.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpo_pack.model.layout import Group, Row, layout_row, packed_row
from dpo_pack.model.recurrence import RecurrentCall, RowFunction
from dpo_pack.model.recurrence.kernels import KERNELS, import_kernel
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs.kernel import relative_error
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof, proof_groups, proof_row, replaced
from dpo_pack.system.errors import first_line

# (tokens of the shared prefix, tokens of each completion after it): some are longer than a kernel's chunk,
# some shorter than a convolution; some completions have one token or none; the last prefix has no completion.
_PROOF_GROUPS = ((70, (40, 33)), (2, (5, 1)), (3, (0, 6)), (1, (1, 2)), (9, (4, 0, 3)), (20, ()))
# The allowed relative error in fp32. We measured up to 5e-6, where a model's own rounding is as large.
_FLOAT32_BOUND = 1e-4
_BY_TOKEN = {"torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule"}  # of transformers
# The allowed relative error of another package's kernel in bf16 and fp16, in units of the dtype's epsilon.
# Its matrix products round keys, values, scores and states to the dtype; flash-linear-attention's own tests
# allow five units.
_KERNEL_ROUNDINGS = 4.0


@torch.no_grad()
def prove_recurrence(
    scorer: CompletionLogps,
    groups: Sequence[Group],
    device: torch.device,
    *,
    compute: Callable[[Row], object] | None = None,
) -> list[Proof]:
    """Proves output and gradients of each kind of recurrent call on the model's inputs; [] without calls.

    `compute`, if given, runs a row instead of the scorer's own forward.
    """
    if not scorer.num_recurrent_calls:
        return []
    run = scorer.recurrence or RecurrentCall.run
    calls = _kinds_of_calls(scorer, groups, device, compute or scorer)
    measured = [recurrence_error(call, run, device) for call in calls]
    error, bound = max(measured, key=lambda pair: pair[0] / pair[1])
    return [
        Proof(
            name="recurrence",
            passed=error <= bound,
            numbers={"relative error": error},
            bound=f"<= {bound:.1e} of outputs and gradients of recurrent layers",
            remedy=PADDED_REMEDY,
        )
    ]


@torch.no_grad()
def take_kernels(scorer: CompletionLogps, device: torch.device) -> list[str]:
    """Lets the scorer's recurrent layers use the kernels of `KERNELS` that are installed and right.

    Each is compared with the family's own functions, as in `prove_recurrence`. Instead of a kernel that is
    missing, raises an error or is not exact enough, the layers keep our torch functions. Returns a line for
    each function that the layers call: the kernel, or the reason why it is not used.
    """
    if scorer.backend is None or not scorer.num_recurrent_calls:
        return []
    lines = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
        calls = _kinds_of_calls(scorer, groups, device, scorer)
        for name in dict.fromkeys(call.name for call in calls):
            kernel = KERNELS[name]
            obstacle = _take(scorer, name, [call for call in calls if call.name == name], device)
            reason = "" if obstacle is None else f" is not used: {obstacle}"
            lines.append(f"{kernel.name} of {kernel.package}{reason}")
    return lines


def _take(
    scorer: CompletionLogps, name: str, calls: Sequence[RecurrentCall], device: torch.device
) -> str | None:
    """Lets the scorer use a kernel if it computes these calls; otherwise returns why it does not."""
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


def _kinds_of_calls(
    scorer: CompletionLogps,
    groups: Sequence[Group],
    device: torch.device,
    compute: Callable[[Row], object],
) -> list[RecurrentCall]:
    """Runs the proof's row; returns one recurrent call for each function and shape."""
    calls: dict[Any, RecurrentCall] = {}
    run = scorer.recurrence or RecurrentCall.run

    def recording(call: RecurrentCall) -> Any:
        shapes = tuple(part.shape for part in call.arguments if isinstance(part, Tensor))
        calls.setdefault((call.name, shapes), call)
        return run(call)

    with replaced(scorer, recurrence=recording):
        compute(proof_row(scorer, groups, device))
    return list(calls.values())


def recurrence_error(
    call: RecurrentCall, run: Callable[[RecurrentCall], Any], device: torch.device
) -> tuple[float, float]:
    """Returns (error, bound) of the output or the gradient with the largest ratio of error to bound.

    Errors and bounds are as in `kernel_error`. The family's own function in fp32 gives the exact values,
    token by token if it can. In low precision the plain computation is the family's own, on chunks of tokens.
    A kernel of another package may have an error of `_KERNEL_ROUNDINGS`.
    """
    layout = layout_row(_proof_groups(), share_prompt=True)
    segments = packed_row(layout, device).segments
    assert segments is not None
    key_index = np.arange(layout.num_tokens) if layout.kv_index is None else layout.kv_index
    sequences = np.split(key_index, np.cumsum(layout.key_lengths)[:-1])
    tokens = [torch.from_numpy(sequence).to(device) for sequence in sequences]
    counts = layout.query_lengths.tolist()
    given = _Inputs(call, layout.num_tokens)
    options = given.options

    def in_row(tensors: dict[Any, Tensor]) -> Tensor:
        whole = given.arguments(tensors)
        ours = replace(
            call, arguments=whole, options={**options, **given.named(tensors), "row_segments": segments}
        )
        return _output(run(ours))

    def one_by_one(tensors: dict[Any, Tensor], function: RowFunction = call.stock) -> Tensor:
        """A function of the family on each sequence; keeps the tokens that the sequence adds to the row."""
        parts = []
        for positions, count in zip(tokens, counts, strict=True):
            own = {
                place: tensor.index_select(given.dims[place], positions) if place in given.dims else tensor
                for place, tensor in tensors.items()
            }
            out = _output(function(*given.arguments(own), **options, **given.named(own)))
            parts.append(out.narrow(given.out_dim, len(positions) - count, count))
        return torch.cat(parts, dim=given.out_dim)

    weights: list[Tensor] = []

    def results(compute: Callable[[dict[Any, Tensor]], Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        with torch.enable_grad():
            inputs = {
                place: tensor.to(dtype or tensor.dtype).requires_grad_()
                for place, tensor in given.tensors.items()
            }
            out = compute(inputs)
            if not weights:
                weights.append(torch.randn(out.shape, device=device))
            grads = torch.autograd.grad(out, list(inputs.values()), weights[0].to(out.dtype))
        return [result.detach().float() for result in (out, *grads)]

    reference = results(functools.partial(one_by_one, function=_by_token(call)), torch.float32)
    errors = [relative_error(*both) for both in zip(results(in_row, None), reference, strict=True)]
    least = _FLOAT32_BOUND
    if call.kernel is not None:
        least = max(least, _KERNEL_ROUNDINGS * torch.finfo(call.arguments[0].dtype).eps)
    bounds = [least] * len(errors)
    if any(tensor.dtype != torch.float32 for tensor in given.tensors.values()):
        plain = results(one_by_one, None)
        bounds = [max(least, 2 * relative_error(*both)) for both in zip(plain, reference, strict=True)]
    return max(zip(errors, bounds, strict=True), key=lambda pair: pair[0] / pair[1])


def _by_token(call: RecurrentCall) -> RowFunction:
    """Returns the family's function that computes the same token by token; `call.stock` if it has none.

    It rounds less: where all heads forget fast, the gradient of the decays is wrong by up to 6e-3 in
    transformers' function on chunks in fp32, and by 2e-5 in ours.
    """
    code = vars(sys.modules[call.stock.__module__])
    by_token: RowFunction = inspect.unwrap(code.get(_BY_TOKEN.get(call.name, ""), call.stock))
    return by_token


class _Inputs:
    """A recorded call's tensors, repeated or cut to T tokens; keys are argument positions or option names."""

    def __init__(self, call: RecurrentCall, num_tokens: int) -> None:
        values: dict[Any, Any] = {**dict(enumerate(call.arguments)), **call.options}
        found = {
            place: value.detach()
            for place, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        # The convolution has its tokens in the last dimension, [1, D, T], the others in [1, T, ...].
        first = call.arguments[0]
        self.out_dim = 2 if call.name == "causal_conv1d_fn" else 1
        length = first.shape[self.out_dim]
        self.dims = {
            place: self.out_dim
            for place, tensor in found.items()
            if tensor.ndim > self.out_dim and tensor.shape[self.out_dim] == length and tensor.shape[0] == 1
        }
        again = torch.arange(num_tokens, device=first.device) % length
        self.tensors = {
            place: tensor.index_select(self.dims[place], again) if place in self.dims else tensor
            for place, tensor in found.items()
        }
        self.others = {place: value for place, value in values.items() if place not in found}
        self.options = {
            name: value
            for name, value in self.others.items()
            if isinstance(name, str) and not name.startswith("row_")
        }
        self.num_arguments = len(call.arguments)

    def arguments(self, tensors: dict[Any, Tensor]) -> tuple[Any, ...]:
        return tuple((tensors if n in tensors else self.others)[n] for n in range(self.num_arguments))

    def named(self, tensors: dict[Any, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if isinstance(name, str)}


def _output(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _proof_groups() -> list[Group]:
    """Returns groups with the lengths of `_PROOF_GROUPS`; equal ids mark the tokens that are shared."""
    groups = []
    for shared, tails in _PROOF_GROUPS:
        completions = [np.full(tail, number) for number, tail in enumerate(tails, start=2)]
        sequences = [np.concatenate((np.ones(shared, dtype=np.int64), tail)) for tail in completions]
        if not sequences:
            sequences = [np.ones(shared, dtype=np.int64)]
        groups.append(Group(context=np.zeros(1, dtype=np.int64), completions=tuple(sequences)))
    return groups
