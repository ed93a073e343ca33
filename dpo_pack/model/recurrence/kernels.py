"""Computes a row with a function that knows sequences only: transformers' own, or another package's kernel.

A *piece* is a series of consecutive tokens of the row through which one state moves: a node (layout.py), that
is, what several pairs begin with, the rest of what the sequences of a group (a pair) share, the tail of a
sequence (its other tokens), or a whole sequence that shares nothing. A piece without a parent starts from the
zero state, any other from the final state of its parent. The depth of a piece is its *level*. Of a row of one
pair, prompt `1 2`, chosen `7 8 9`, rejected `7 5`:

    row position    0  1  2 | 3  4  | 5
    level           0       | 1     | 1        both tails start from the shared part's final state

So a function runs once for each of at most three levels. transformers' functions in torch and mamba-ssm get a
batch of pieces padded to one length. A pad leaves the final state as it is: where the decay's logarithm g and
the fraction beta, or Mamba 2's step, are 0, nothing decays and nothing is written. flash-linear-attention
takes pieces one after another (`cu_seqlens`). For a convolution we put the inputs before a segment in front
of it. proofs/layers.py compares each package's kernel with the torch functions before a model uses it.

Legend: T tokens of the row, H heads (of values), K and V key and value dimensions, G groups of heads with the
same B and C, D channels and w tokens of a convolution.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.model.attention.segments import Gather, RowSegments, make_gather, node_runs, on_device
from dpo_pack.packing.lengths import IntArray
from dpo_pack.system.errors import first_line

# Tokens of a chunk in transformers' functions. Most pieces of a row are shorter than their own 64 to 256
# tokens. And where heads forget fast, the rounding of the decays' gradient grows with a chunk's length.
DELTA_CHUNK = 16
MAMBA2_CHUNK = 64
# Pieces shorter than twice this are padded together: functions fill them up to a chunk in any case.
_SHORT = 32

# Runs a function on pieces: (tensors, initial states or None, `PieceBatch.starts`, whether to return final
# states) -> (outputs, final states or None).
_Starts = tuple[Tensor, Tensor] | None
_RunOnPieces = Callable[[list[Tensor], Tensor | None, _Starts, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A function of another package, and how to compute a row with it or with transformers' own function."""

    package: str  # the name in the package index
    module: str
    name: str
    # Takes the function, whether it is transformers' own, then the arguments with which a layer calls it.
    # Returns what the function returns, but None in place of a final state.
    compute: Callable[..., Any]


def row_convolution(
    function: Callable[..., Tensor],
    is_torch: bool,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    row_segments: RowSegments,
    **unused: Any,
) -> Tensor:
    """Computes the causal convolution of each sequence of a row: [1, D, T], [D, w], [D] or None -> [1, D, T].
    If a sequence shares its first tokens with another, the convolution of its own also covers these."""
    width = weight.shape[-1]
    with_history, to_row = row_segments.once(("history", width), lambda: row_history(row_segments, width))
    inputs = with_history(hidden_states.squeeze(0).T).T[None]  # channels are adjacent in memory
    out = function(inputs, weight, bias, activation=activation)
    return to_row(out.squeeze(0).T).T[None]


def row_delta_rule(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    is_torch: bool,
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
    """Computes the delta rule of each sequence of a row. Gated delta nets (arXiv 2412.06464) have one decay a
    head, Kimi delta attention (arXiv 2510.26692) one a channel of the keys. query and key [1, T, heads of
    keys, K], value [1, T, H, V], beta [1, T, H], g [1, T, H] or [1, T, H, K] -> ([1, T, H, V], None)."""

    def run(
        parts: list[Tensor], states: Tensor | None, starts: _Starts, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        options: dict[str, Any] = {"chunk_size": DELTA_CHUNK}
        if starts is not None:
            options = {"cu_seqlens": starts[0]}
            if "cu_seqlens_cpu" in inspect.signature(function).parameters:  # else it waits for the device
                options["cu_seqlens_cpu"] = starts[1]
        options |= {"initial_state": states, "output_final_state": wants_states}
        return function(*parts, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)

    repeats = value.shape[-2] // key.shape[-2]
    if repeats > 1:  # older releases of kernels take only as many heads of keys as of values
        query, key = (states.repeat_interleave(repeats, dim=-2) for states in (query, key))
    out = _through_pieces(run, (query, key, value, g, beta), row_segments, padded=is_torch)
    return out.to(query.dtype), None


def row_mamba2_scan(
    function: Callable[..., Any],
    is_torch: bool,
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
    """Computes the recurrence of Mamba 2 (arXiv 2405.21060) of each sequence of a row. hidden_states
    [1, T, H, V], dt [1, T, H], A, D and dt_bias [H], B and C [1, T, G, K] -> [1, T, H, V] in fp32. Softplus
    and clamp come first, because the step of a pad must stay 0."""

    def run(
        parts: list[Tensor], states: Tensor | None, starts: _Starts, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        inputs, steps, keys, reads = parts
        tokens = min(chunk_size, MAMBA2_CHUNK) if is_torch else chunk_size
        options = {"initial_states": states, "return_final_states": wants_states}
        result = function(inputs, steps, A.float(), keys, reads, tokens, **options)
        return result if wants_states else (result, None)

    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).float()
    out = _through_pieces(run, (hidden_states, steps, B, C), row_segments, padded=True).float()
    return out if D is None else out + D[:, None] * hidden_states.float()


def _through_pieces(
    run: _RunOnPieces, tensors: Sequence[Tensor], segments: RowSegments, *, padded: bool
) -> Tensor:
    """Runs a function on all pieces, level by level: tensors [1, T, ...] -> [1, T, ...]. Without autocast,
    because a state's rounding errors add up over tokens."""
    pieces = segments.once(("pieces", padded), lambda: row_pieces(segments, padded=padded))
    outputs: list[Tensor] = []
    with torch.autocast(tensors[0].device.type, enabled=False):
        states: Sequence[Tensor | None] = [None] * len(pieces.levels[0])
        for level, batches in enumerate(pieces.levels):
            finals, is_last = [], level + 1 == len(pieces.levels)
            for batch, state in zip(batches, states, strict=True):
                parts = [batch.take(tensor.squeeze(0)) for tensor in tensors]
                num_lines = batch.num_pieces if padded else 1
                parts = [part.unflatten(0, (num_lines, -1)) for part in parts]
                out, final = run(parts, state, batch.starts, not is_last)
                outputs.append(out.flatten(0, 1))
                finals.append(final)
            if not is_last:
                begun = pieces.to_next[level](torch.cat([final for final in finals if final is not None]))
                states = begun.split([batch.num_pieces for batch in pieces.levels[level + 1]])
        return pieces.to_row(torch.cat(outputs))[None]


# By the names of transformers' functions that layers call.
KERNELS: dict[str, Kernel] = {
    "causal_conv1d_fn": Kernel(
        package="causal-conv1d", module="causal_conv1d", name="causal_conv1d_fn", compute=row_convolution
    ),
    "torch_chunk_gated_delta_rule": Kernel(
        package="flash-linear-attention",
        module="fla.ops.gated_delta_rule",
        name="chunk_gated_delta_rule",
        compute=row_delta_rule,
    ),
    "chunk_kimi_delta_attention": Kernel(
        package="flash-linear-attention", module="fla.ops.kda", name="chunk_kda", compute=row_delta_rule
    ),
    "mamba2_chunk_scan": Kernel(
        package="mamba-ssm",
        module="mamba_ssm.ops.triton.ssd_combined",
        name="mamba_chunk_scan_combined",
        compute=row_mamba2_scan,
    ),
}


def import_kernel(kernel: Kernel) -> Callable[..., Any] | str:
    """Returns the package's function, or in words the reason why it cannot be used."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(kernel.module), kernel.name)
    except ModuleNotFoundError as error:
        return f"no module {error.name}"
    except Exception as error:  # a wheel for another torch or another CUDA can raise anything
        return f"it cannot be imported: {first_line(error)}"
    return function


# ---------------------------------------------------------------------------------------- pieces of a row


@dataclass(eq=False, slots=True, kw_only=True)
class PieceBatch:
    """Some pieces of a level, for one call of a function."""

    take: Gather  # from the row's T tokens to the batch
    num_pieces: int
    # [pieces + 1] int64: where each piece starts, one after another, then where the last ends. None: the
    # pieces are padded to one length with zeros. On the device, and on the host.
    starts: tuple[Tensor, Tensor] | None


@dataclass(eq=False, slots=True, kw_only=True)
class RowPieces:
    """The pieces of a row."""

    levels: list[list[PieceBatch]]
    to_next: list[Gather]  # from the final states of all pieces of a level to the first ones of the next
    to_row: Gather  # from the entries of all batches to the row


def row_pieces(segments: RowSegments, *, padded: bool) -> RowPieces:
    """Returns the row's pieces: padded, or one after another."""
    depths, of_levels = list[int](), list[list[int]]()  # nodes of each level
    for number, (_, _, parent) in enumerate(segments.nodes):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        of_levels += [[] for _ in range(depths[-1] + 1 - len(of_levels))]
        of_levels[depths[-1]].append(number)
    device, entries, num_tokens = segments.cu_seqlens_q.device, list[IntArray](), sum(segments.query_lengths)

    def batches(level: list[int]) -> tuple[list[PieceBatch], IntArray]:
        """Returns batches of a level's nodes, longest first, and the nodes in that order."""
        nodes = np.array(level)
        firsts, lengths, _ = np.array([segments.nodes[number] for number in level], dtype=np.int64).T
        order = np.argsort(-lengths, kind="stable")
        together = [order]
        if padded:  # only pieces whose lengths differ by a factor below two
            doublings = np.log2(lengths[order].clip(_SHORT)).astype(int)
            together = np.split(order, np.flatnonzero(np.diff(doublings)) + 1)
        made = []
        for chosen in together:
            offsets = np.arange(lengths[chosen].max())
            places = np.where(offsets < lengths[chosen, None], firsts[chosen, None] + offsets, -1).ravel()
            starts = None
            if not padded:
                places = places[places >= 0]
                bounds = np.concatenate(([0], lengths[chosen].cumsum()))
                starts = on_device(bounds, device), torch.from_numpy(bounds)
            take = make_gather(places, num_tokens, device)
            made.append(PieceBatch(take=take, num_pieces=len(chosen), starts=starts))
            entries.append(places)
        return made, nodes[order]

    levels, to_next = list[list[PieceBatch]](), list[Gather]()
    place = np.zeros(len(segments.nodes), dtype=np.int64)  # of a node among those of its level
    for level in of_levels:
        made, nodes = batches(level)
        if levels:
            parents = np.array([segments.nodes[number].parent for number in nodes])
            to_next.append(make_gather(place[parents], sum(b.num_pieces for b in levels[-1]), device))
        place[nodes] = np.arange(len(nodes))
        levels.append(made)
    positions = np.concatenate(entries)
    to_row = np.empty(num_tokens, dtype=np.int64)
    to_row[positions[positions >= 0]] = np.flatnonzero(positions >= 0)
    return RowPieces(levels=levels, to_next=to_next, to_row=make_gather(to_row, len(positions), device))


def row_history(segments: RowSegments, width: int) -> tuple[Gather, Gather]:
    """Returns two gathers for a convolution over `width` tokens: from the row to a longer row, and back. In
    front of each segment the longer row has the `width - 1` inputs before its first token on its path: zeros
    where the path has none."""
    inputs: list[IntArray] = []
    outputs: list[IntArray] = []
    first = num_inputs = 0
    for leaf in segments.leaves:
        start, _, parent = segments.nodes[first]  # of the segment
        runs = [np.arange(*run) for run in node_runs(segments.nodes, parent)]
        history = np.concatenate((np.full(width - 1, -1), *runs))[-(width - 1) :][: width - 1]
        own = np.arange(start, segments.nodes[leaf].start + segments.nodes[leaf].length)
        inputs += [history, own]
        outputs.append(num_inputs + width - 1 + np.arange(len(own)))
        num_inputs += width - 1 + len(own)
        first = leaf + 1
    device, num_tokens = segments.cu_seqlens_q.device, sum(segments.query_lengths)
    return (
        make_gather(np.concatenate(inputs), num_tokens, device),
        make_gather(np.concatenate(outputs), num_inputs, device),
    )
