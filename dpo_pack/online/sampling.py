"""Drawing tokens from logits with numbers that are given, so that nothing random hides in the device.

Every token of every completion has a uniform number of its own, a function of (seed, draw, completion); the
token is the one at which the cumulative distribution passes it. What a completion becomes then depends on
neither the batch it is in, nor the rank, nor what was drawn before.

Legend: B sequences of a batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn."""

    completions_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def draws_from_all_tokens(self) -> bool:
        return self.top_p == 1.0 and self.top_k is None and self.min_p == 0.0


def completion_uniforms(
    seed: int, draw_number: int, completion: int, num_tokens: int
) -> npt.NDArray[np.float64]:
    """[num_tokens] in [0, 1), a pure function of its arguments; fewer tokens are the first of more."""
    # Raw bits of PCG64 are the same in all versions of numpy.
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)))
    return (stream.random_raw(num_tokens) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def completion_seed(seed: int, draw_number: int, completion: int) -> int:
    """In [0, 2^63), a pure function of its arguments: for an engine that draws its own numbers."""
    state = np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def draw_tokens(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> Tensor:
    """[B, V] logits, [B] float64 in [0, 1) -> [B] int64 tokens.

    Filters come in transformers' order: temperature, top_k, top_p (Holtzman et al. 2020, arXiv 1904.09751),
    min_p (Nguyen et al. 2024, arXiv 2407.01082).
    """
    probabilities = torch.softmax(logits.float() / settings.temperature, dim=-1).double()
    if settings.draws_from_all_tokens:
        return _pass(probabilities, uniforms)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if settings.top_k is not None:
        ordered[:, settings.top_k :] = 0.0
    ordered /= ordered.sum(dim=-1, keepdim=True)
    # A token stays while those before it do not reach top_p; the likeliest always stays.
    ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= settings.top_p, 0.0)
    ordered = ordered.masked_fill(ordered < settings.min_p * ordered[:, :1], 0.0)
    places = _pass(ordered, uniforms)
    return tokens.gather(1, places[:, None]).squeeze(1)


def _pass(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Where the cumulative sum of each row passes its uniform: [B, V], [B] -> [B], never at a zero weight."""
    cumulative = weights.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Rounding may put the target at the very end, beyond which there is nothing.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(places, last)
