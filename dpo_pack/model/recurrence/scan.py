"""What all recurrences have in common: states move from chunk to chunk, and from a shared part to its tails.

A state S [K, V] maps keys to values. A chunk of tokens has keys k, values v, corrections w and a decay d. It
changes S into S':

    u = v - w S          the values that the chunk writes: v less the values that S already has for its keys
    S' = d S + k^T u     the state decays, and u is added

Mamba 2 has no corrections (w = 0, so u = v). d, k, v and w already contain the decays inside the chunk.

Legend: N chunks, H heads, C tokens of a chunk, K and V key and value dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpo_pack.model.recurrence.pieces import RowPieces


def in_float32(recurrence: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: runs a recurrence without autocast, because a state's rounding errors add up over tokens."""

    @functools.wraps(recurrence)
    def without_autocast(states: Tensor, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(states.device.type, enabled=False):
            return recurrence(states, *arguments, **options)

    return without_autocast


def decay(logarithm: Tensor) -> Tensor:
    """Returns exp(logarithm), but 0 where less than exp(-30) = 1e-13 of a value would be left.

    Products of several such decays are below 1e-38. A CPU is up to a hundred times slower with such numbers.
    Gated delta nets, whose heads decay by up to exp(-20) a token, would take three times as long.
    """
    return logarithm.masked_fill(logarithm < -30, -torch.inf).exp()


def carry_states(
    pieces: RowPieces, *, keys: Tensor, values: Tensor, corrections: Tensor | None, decays: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves states through all pieces of a row (see pieces.py).

    The state of a root starts from zero, the state of a tail from its root's final state.
    keys [N, H, C, K], values [N, H, C, V], corrections [N, H, C, K] or None, decays [N, H, K or 1, 1].
    Returns (the state before each chunk [N, H, K, V], the written values u [N, H, C, V]).
    """
    sizes = [*pieces.root_steps, *pieces.tail_steps]
    corrected: Sequence[Tensor | None] = [None] * len(sizes)
    if corrections is not None:
        corrected = corrections.split(sizes)
    chunks = list(zip(keys.mT.split(sizes), values.split(sizes), corrected, decays.split(sizes), strict=True))
    num_roots, num_steps = pieces.root_steps[0], len(pieces.root_steps)
    zero = keys.new_zeros(num_roots, keys.shape[1], keys.shape[3], values.shape[3])
    before, written, final = _carry(chunks[:num_steps], zero)
    if pieces.to_tails is not None:
        more_before, more_written, _ = _carry(chunks[num_steps:], pieces.to_tails(final))
        before, written = before + more_before, written + more_written
    return torch.cat(before), torch.cat(written)


def _carry(
    steps: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor]], state: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Moves states, one for each piece, through the steps: step i computes the i-th chunk of all pieces.

    A step is (keys^T, values, corrections, decays) of the pieces that have an i-th chunk; these are the first
    ones. Returns (the states before each step, the written values of each step, all final states).
    """
    before: list[Tensor] = []
    written: list[Tensor] = []
    ended: list[Tensor] = []  # final states of pieces that have no further chunk, the last pieces first
    for keys, values, corrections, decays in steps:
        if len(values) < len(state):
            ended.append(state[len(values) :])
            state = state[: len(values)]
        before.append(state)
        new = values if corrections is None else values - corrections @ state
        written.append(new)
        state = state * decays + keys @ new
    return before, written, torch.cat((state, *reversed(ended)))
