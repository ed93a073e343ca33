"""CUDA kernels for recurrent layers: flash-linear-attention, causal-conv1d and mamba-ssm, where installed.

A kernel computes what the function with the same key in `ROW_FUNCTIONS` computes, with two calls for a row:
all roots from the zero state, then all tails from their roots' final states (pieces.py explains the words).
flash-linear-attention takes sequences one after another (`cu_seqlens`) and computes gradients of their
initial states. mamba-ssm computes no gradients of the final states of such sequences, so it gets a batch of
padded sequences. A step of 0 at the padding leaves the state as it is. causal-conv1d takes `seq_idx` or
initial states, but not both, so it gets neither: we put the inputs before a segment in front of the segment.

proofs/recurrence.py compares each kernel with the torch functions before a model uses it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpo_pack.model.attention.segments import RowSegments
from dpo_pack.model.recurrence.mamba2 import step_sizes
from dpo_pack.model.recurrence.pieces import row_history, whole_pieces
from dpo_pack.system.errors import first_line

# Runs a kernel on pieces: (tensors, initial states or None, cu_seqlens or None, whether to return final
# states) -> (outputs, final states or None).
_RunOnPieces = Callable[[list[Tensor], Tensor | None, Tensor | None, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A function of another package, and how to compute a row with it."""

    package: str  # the name in the package index
    module: str
    name: str
    num_positional: int
    keywords: tuple[str, ...]
    compute: Callable[..., Any]  # takes the package's function, then the arguments of our torch function


def by_convolution(
    kernel: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    row_segments: RowSegments,
    **unused: Any,
) -> Tensor:
    """Computes `row_convolution`: [1, D, T], [D, w], [D] or None -> [1, D, T]."""
    with_history, to_row = row_history(row_segments, weight.shape[-1])
    inputs = with_history(hidden_states.squeeze(0).T).T[None]  # [1, D, E], channels are adjacent in memory
    out = kernel(inputs, weight, bias, activation=activation)
    return to_row(out.squeeze(0).T).T[None]


def by_delta_rule(
    kernel: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    row_segments: RowSegments,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Computes `row_delta_rule`, with the same shapes."""

    def run(
        parts: list[Tensor], states: Tensor | None, starts: Tensor | None, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        return kernel(
            *parts,
            initial_state=states,
            output_final_state=wants_states,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=starts,
        )

    repeats = value.shape[-2] // key.shape[-2]
    if repeats > 1:  # older releases take only as many heads of keys as of values
        query, key = (states.repeat_interleave(repeats, dim=-2) for states in (query, key))
    out = _through_pieces(run, (query, key, value, g, beta), row_segments, padded=False)
    return out.to(query.dtype), None


def by_mamba2_scan(
    kernel: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    row_segments: RowSegments,
    **unused: Any,
) -> Tensor:
    """Computes `row_mamba2_scan`, with the same shapes.

    The kernel gets steps after softplus and clamp, because the step of the padding must stay 0.
    """

    def run(
        parts: list[Tensor], states: Tensor | None, starts: Tensor | None, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        inputs, steps, keys, reads = parts
        options = {"initial_states": states, "return_final_states": wants_states}
        result = kernel(inputs, steps, A.float(), keys, reads, chunk_size, **options)
        return result if wants_states else (result, None)

    steps = step_sizes(dt, dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit)
    out = _through_pieces(run, (hidden_states, steps, B, C), row_segments, padded=True).float()
    return out if D is None else out + D[:, None] * hidden_states.float()


def _through_pieces(
    run: _RunOnPieces, tensors: Sequence[Tensor], segments: RowSegments, *, padded: bool
) -> Tensor:
    """Runs a kernel on all roots, then on all tails: tensors [1, T, ...] -> [1, T, ...], without autocast."""
    whole = whole_pieces(segments, padded=padded)
    outputs: list[Tensor] = []
    states: Tensor | None = None
    with torch.autocast(tensors[0].device.type, enabled=False):
        for batch in whole.batches:
            parts = [batch.take(tensor.squeeze(0)) for tensor in tensors]
            parts = [part.unflatten(0, (batch.num_lines, -1)) for part in parts]
            if states is not None and whole.to_tails is not None:
                states = whole.to_tails(states)
            out, states = run(parts, states, batch.starts, batch is not whole.batches[-1])
            outputs.append(out.flatten(0, 1))
        return whole.to_row(torch.cat(outputs))[None]


_delta_kernel = functools.partial(
    Kernel,
    package="flash-linear-attention",
    num_positional=5,
    keywords=("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"),
    compute=by_delta_rule,
)

# By the names in `ROW_FUNCTIONS`.
KERNELS: dict[str, Kernel] = {
    "causal_conv1d_fn": Kernel(
        package="causal-conv1d",
        module="causal_conv1d",
        name="causal_conv1d_fn",
        num_positional=3,
        keywords=("activation",),
        compute=by_convolution,
    ),
    "torch_chunk_gated_delta_rule": _delta_kernel(
        module="fla.ops.gated_delta_rule", name="chunk_gated_delta_rule"
    ),
    "chunk_kimi_delta_attention": _delta_kernel(module="fla.ops.kda", name="chunk_kda"),
    "mamba2_chunk_scan": Kernel(
        package="mamba-ssm",
        module="mamba_ssm.ops.triton.ssd_combined",
        name="mamba_chunk_scan_combined",
        num_positional=6,
        keywords=("initial_states", "return_final_states"),
        compute=by_mamba2_scan,
    ),
}


def import_kernel(kernel: Kernel) -> Callable[..., Any] | str:
    """Returns the package's function, or in words the reason why it cannot be used."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(kernel.module), kernel.name)
        arguments, options = [None] * kernel.num_positional, dict.fromkeys(kernel.keywords)
        inspect.signature(function).bind(*arguments, **options)
    except ModuleNotFoundError as error:
        return f"no module {error.name}"
    except TypeError as error:
        return f"this release of {kernel.name} takes other arguments: {error}"
    except Exception as error:  # a wheel for another torch or another CUDA can raise anything
        return f"it cannot be imported: {first_line(error)}"
    return function
