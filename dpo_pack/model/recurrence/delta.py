"""The delta rule in packed rows: gated delta nets (Yang et al. 2024, arXiv 2412.06464) and Kimi's variant.

The state S maps keys to values. For each token S first decays by exp(g). Then S's value for the token's key k
moves towards the token's value v, by the fraction beta. The token's query q reads the output:

    S' = exp(g) S + beta k^T (v - k exp(g) S)        out = q S'

Gated delta nets have one g for each head, Kimi delta attention (Kimi team 2025, arXiv 2510.26692) one for
each channel of k. The values that the tokens of a chunk write are the solution of a triangular system (arXiv
2412.06464, section 3.3). The systems of all chunks are solved at once.

Legend: T tokens of the row, N chunks, C tokens of a chunk, H heads (of values), K and V key and value
dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpo_pack.model.attention.segments import RowSegments
from dpo_pack.model.recurrence.pieces import RowPieces, row_pieces
from dpo_pack.model.recurrence.scan import carry_states, decay, in_float32

DELTA_CHUNK = 32
KIMI_CHUNK = 16  # short, because [N, H, C, C, K] decays are in memory at once


@in_float32
def row_delta_rule(
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
    """Computes the delta rule for each sequence of a row: see the formula at the top of this file.

    query and key [1, T, heads of keys, K], value [1, T, H, V], beta [1, T, H], g [1, T, H] (gated delta nets)
    or [1, T, H, K] (Kimi). Returns ([1, T, H, V], None). transformers' function would return the final state
    in place of None.
    """
    has_channels = g.ndim == key.ndim  # Kimi
    pieces = row_pieces(row_segments, KIMI_CHUNK if has_channels else DELTA_CHUNK)
    q, k, k_beta, v_beta, log_decay = _in_chunks(
        pieces, query, key, value, g, beta, normalize=use_qk_l2norm_in_kernel
    )

    def decays_of(logarithm: Tensor) -> Tensor:  # [..., K or 1]
        return decay(logarithm) if has_channels else decay(logarithm)[..., None]

    total = log_decay.cumsum(dim=2)  # [N, H, C] or [N, H, C, K]: logarithm of the decay in the chunk so far
    between = _decay_between(total)  # [N, H, C, C] or [N, H, C, C, K]
    if has_channels:
        between = between * k[..., None, :, :]
    reads = q * decays_of(total)
    keys = k * decays_of(_after(log_decay))
    corrections = k_beta * decays_of(total)
    if has_channels:
        scores = (between @ q[..., None]).squeeze(-1)
        inverse = invert_unit_triangular((between @ k_beta[..., None]).squeeze(-1))
    else:
        scores = (q @ k.mT) * between
        # An entry of the inverse is a sum of products along paths from one token to another. All these paths
        # decay by the same factor. So we invert the matrix without decays and multiply afterwards.
        inverse = invert_unit_triangular(k_beta @ k.mT) * between
    states, written = carry_states(
        pieces,
        keys=keys,
        values=inverse @ v_beta,
        corrections=inverse @ corrections,
        decays=decays_of(total[:, :, -1])[..., None],
    )
    return in_row(pieces, reads @ states + scores @ written)[None].to(query.dtype), None


def _in_chunks(
    pieces: RowPieces, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, normalize: bool
) -> tuple[Tensor, ...]:
    """Cuts the sequences of a row into N chunks of C tokens, filled up with zeros; H heads; all in fp32.

    Returns queries, keys, beta x keys [N, H, C, K], beta x values [N, H, C, V], and g, the logarithm of the
    decay, [N, H, C] or [N, H, C, K].
    """
    query, key, value, g, beta = (states.squeeze(0).float() for states in (query, key, value, g, beta))
    if normalize:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    if key.shape[1] != value.shape[1]:  # a head of keys serves several heads of values
        repeats = value.shape[1] // key.shape[1]
        query, key = (states.repeat_interleave(repeats, dim=1) for states in (query, key))
    scale = beta[..., None]
    return tuple(in_chunks(pieces, states) for states in (query, key, key * scale, value * scale, g))


def in_chunks(pieces: RowPieces, states: Tensor) -> Tensor:
    """Copies a row's tokens into chunks and fills these up with zeros: [T, H, ...] -> [N, H, C, ...]."""
    chunks: Tensor = pieces.to_chunks(states).unflatten(0, (-1, pieces.chunk))
    return chunks.transpose(1, 2)


def in_row(pieces: RowPieces, states: Tensor) -> Tensor:
    """Copies values from chunks back to the row's positions: [N, H, C, V] -> [T, H, V]."""
    return pieces.to_row(states.transpose(1, 2).flatten(0, 1))


def _decay_between(total: Tensor) -> Tensor:
    """Returns the decay to each token from itself and each earlier token, else 0.

    [N, H, C, ...] -> [N, H, C, C, ...]. From a token to itself the decay is a constant 1. Computed as a
    difference it would add a number to the gradient of the token's g and subtract the number again. Where
    heads forget fast, only the rounding of this number would be left.
    """
    size = total.shape[2]
    apart = total.unsqueeze(3) - total.unsqueeze(2)
    tokens = torch.arange(size, device=total.device).view(size, *[1] * (total.ndim - 3))
    earlier = tokens.unsqueeze(0) < tokens.unsqueeze(1)
    later = tokens.unsqueeze(0) > tokens.unsqueeze(1)
    others = torch.zeros_like(later, dtype=total.dtype).masked_fill(later, -torch.inf)
    return decay(torch.where(earlier, apart, others))


def _after(log_decay: Tensor) -> Tensor:
    """Returns the sum over the chunk's later tokens, for each token: [N, H, C, ...] -> the same shape."""
    later = torch.cat((log_decay[:, :, 1:], torch.zeros_like(log_decay[:, :, :1])), dim=2)
    return later.flip(2).cumsum(dim=2).flip(2)


def invert_unit_triangular(system: Tensor) -> Tensor:
    """Returns the inverses [..., C, C] of I + L; C is a power of two. Computes all of them at once.

    On a CPU `torch.linalg.solve_triangular` solves one small system after the other.
    L is what `system` [..., C, C] has below its diagonal. The rest of `system` is not read. The inverse of a
    matrix of 2b rows is made of those of its diagonal blocks of b rows:

        [A 0]^-1     [   A^-1        0  ]
        [B D]      = [-D^-1 B A^-1  D^-1]

    So the error is about that of forward substitution.
    """
    inverse: Tensor = _Invert.apply(system)  # type: ignore[no-untyped-call]
    return inverse


class _Invert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        size = system.shape[-1]
        inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system).clone()
        block = 1
        while block < size:
            first, second = _blocks(inverse, block, 0, 0), _blocks(inverse, block, 1, 1)
            below = _blocks(system, block, 1, 0)
            _blocks(inverse, block, 1, 0).copy_(-(second @ below @ first))
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        grad: Tensor = -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)
        return grad


def _blocks(matrix: Tensor, size: int, row: int, column: int) -> Tensor:
    """Returns a view of the blocks (row, column) of all diagonal 2 x 2 blocks: [..., blocks, size, size]."""
    shape = (matrix.shape[-1] // size // 2, 2, size)
    parts = matrix.unflatten(-1, shape).unflatten(-4, shape)
    chosen: Tensor = parts.diagonal(dim1=-6, dim2=-3)[..., row, :, column, :, :].movedim(-1, -3)
    return chosen
