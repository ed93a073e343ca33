"""The recurrence of Mamba 2 (Dao and Gu 2024, arXiv 2405.21060) in packed rows.

Each token has an input x and a step dt. The state S decays by exp(A dt), then dt x is added to it with the
key B. C reads the output from the state:

    S' = exp(A dt) S + B^T (dt x)        out = C S' + D x

Legend: T tokens of the row, N chunks, C tokens of a chunk, H heads, G groups of heads with the same B and C,
K the state's dimension, V the head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpo_pack.model.attention.segments import RowSegments
from dpo_pack.model.recurrence.delta import in_chunks, in_row
from dpo_pack.model.recurrence.pieces import row_pieces
from dpo_pack.model.recurrence.scan import carry_states, decay, in_float32

# Shorter than the chunks in the families' own code (128 or 256 tokens), because most sequences of a row are
# short and the cost of a chunk grows with C^2.
MAMBA2_CHUNK = 32


@in_float32
def row_mamba2_scan(
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
    """Computes the recurrence for each sequence of a row: see the formula at the top of this file.

    hidden_states (x) [1, T, H, V], dt [1, T, H], A, D and dt_bias [H], B and C [1, T, G, K]. Returns
    [1, T, H, V] in fp32, as transformers' function does. `chunk_size` is not used: it changes no result.
    """
    pieces = row_pieces(row_segments, MAMBA2_CHUNK)
    steps = step_sizes(dt, dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit).squeeze(0)  # [T, H]
    inputs, keys, reads = (states.squeeze(0).float() for states in (hidden_states, B, C))
    # `in_chunks` fills up with zeros. We call it after softplus and clamp, so that the steps of the filling
    # stay 0 and decay nothing.
    log_decay = in_chunks(pieces, A.float() * steps)  # [N, H, C]
    values = in_chunks(pieces, inputs * steps[..., None])
    keys, reads = in_chunks(pieces, keys), in_chunks(pieces, reads)  # [N, G, C, K]
    scores = _by_head(reads @ keys.mT, values) * _decay_between(log_decay)
    total = log_decay.cumsum(dim=2)[..., None]
    keys, reads = _by_head(keys, values), _by_head(reads, values)
    states, _ = carry_states(
        pieces,
        keys=keys * decay(total[..., -1:, :] - total),
        values=values,
        corrections=None,
        decays=decay(total[..., -1:, :]),
    )
    out = in_row(pieces, (reads * decay(total)) @ states + scores @ values)
    if D is not None:
        out = out + D[:, None] * inputs
    return out[None]


def step_sizes(
    dt: Tensor, dt_bias: Tensor | None, *, dt_softplus: bool, dt_limit: tuple[float, float]
) -> Tensor:
    """Returns the steps of all tokens in fp32, from the module's dt: [1, T, H] -> [1, T, H]."""
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = F.softplus(steps) if dt_softplus else steps
    return steps.clamp(*dt_limit).float()


def _by_head(states: Tensor, like: Tensor) -> Tensor:
    """Repeats the values of each group for each head of the group: [N, G, ...] -> [N, H, ...]."""
    return states.repeat_interleave(like.shape[1] // states.shape[1], dim=1)


def _decay_between(log_decay: Tensor) -> Tensor:
    """Returns the decay from each token of a chunk to each later one, 0 to earlier ones: [N, H, C, C].

    As in transformers, its logarithm is a sum over the tokens from one to the other, because the difference
    of two sums since the chunk's beginning would lose digits.
    """
    size = log_decay.shape[-1]
    mask = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    terms = log_decay[..., None].expand(*log_decay.shape, size).masked_fill(~mask.tril(-1), 0.0)
    return decay(terms.cumsum(dim=-2).masked_fill(~mask, -torch.inf))


def no_fused_path(*arguments: Any, **unused: Any) -> None:
    """Replaces a kernel that computes the whole layer, and acts as if this kernel were not installed.

    The kernel would mix the sequences of a row. It also reads the weight of the output projection directly,
    so that it would ignore an adapter of this projection.
    """
