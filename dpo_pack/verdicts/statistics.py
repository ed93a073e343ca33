"""What paired comparisons show: p values, and rates at equal lengths of answers. numpy only.

Legend: n items, which both models answered; R resamples; C columns of a regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from dpo_pack.packing.lengths import FloatArray

NUM_RESAMPLES, NUM_FLIPS = 2000, 20_000
_BLOCK = 100  # resamples that are in memory at the same time
FEWEST_PROMPTS, _FEWEST_ON_A_SIDE = 50, 5  # for length control


def sign_flip_p(differences: FloatArray, *, seed: int) -> float:
    """Returns how often the sum of [n] differences is as far from 0 if each one's sign is random: of all
    signs, if fewer than 16 are not 0, else of random ones and those seen (Phipson & Smyth 2010)."""
    moved = differences[differences != 0]
    as_far = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()
    if len(moved) < 16:
        signs = 1 - 2 * (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1)
        return float((np.abs(signs @ moved) >= as_far).mean())
    rng, found = np.random.default_rng(seed), 1
    for _ in range(NUM_FLIPS // _BLOCK):
        signs = 2 * rng.integers(0, 2, (_BLOCK, len(moved)), dtype=np.int8) - 1
        found += int((np.abs(signs @ moved) >= as_far).sum())
    return found / (1 + NUM_FLIPS)


def holm(p_values: Sequence[float], earlier: Sequence[float]) -> list[float]:
    """Returns the p values as they count among these and earlier ones (Holm 1979)."""
    every = np.array([*p_values, *earlier])
    order = np.argsort(every)
    every[order] = np.minimum(1, np.maximum.accumulate(every[order] * np.arange(len(every), 0, -1)))
    return [float(p) for p in every[: len(p_values)]]


def prompts_needed(effect: float, spread: float, largest: float, level: float) -> int:
    """Returns how many differences of this spread show a mean of `effect` at this level in 8 of 10 cases, at
    least as many as a sign-flip test needs that are all of one sign and of the largest size."""
    sides = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(0.8)
    return math.ceil(max((sides * spread / effect) ** 2, math.log2(2 / level) * largest / effect))


def no_length_control(values: FloatArray, more_characters: FloatArray) -> str | None:
    """Returns why nobody can say how a judge decides between answers of the same length, None: one can."""
    if len(values) < FEWEST_PROMPTS:
        return f"only {len(values)} prompts; at least {FEWEST_PROMPTS} are needed"
    for side, on_side in (("longer", more_characters > 0), ("shorter", more_characters < 0)):
        if (number := int(on_side.sum())) < _FEWEST_ON_A_SIDE:
            least = f"at least {_FEWEST_ON_A_SIDE} are needed"
            return f"only {number} of the new answers are {side}; {least}"
        if (values[on_side] == 0.5).all():  # then the shape of the curve alone decides
            return f"where the new answer is {side}, every game is a tie"
    return None


def length_controlled(values: FloatArray, longer: FloatArray, *, seed: int) -> tuple[float, list[float]]:
    """Returns the new model's rate at equal lengths, and its 95 % interval by the bootstrap: logistic
    regression of [n] values on the model (the intercept) and on how much longer its answer is (Dubois et al.
    2024, arXiv 2404.04475). Not centred: exchanging the models gives 1 - rate. Resamples
    are of the items and two more of equal lengths, one of them won: see `widened` in conclusion.py."""
    rng, n = np.random.default_rng(seed), len(values) + 2
    columns = np.stack([np.ones(n), np.append(longer, (0.0, 0.0))], axis=1)
    once, draws = np.array([[1.0] * (n - 2) + [0.0] * 2]), NUM_RESAMPLES // _BLOCK
    weights = [once, *(rng.multinomial(n, np.full(n, 1 / n), _BLOCK) for _ in range(draws))]
    fits = [_fitted(np.append(values, (1.0, 0.0)), columns, each)[:, 0] for each in weights]
    rate, *resampled = 0.5 + 0.5 * np.tanh(np.concatenate(fits) / 2)
    return float(rate), np.quantile(resampled, (0.025, 0.975)).tolist()


def length_controlled_p(values: FloatArray, longer: FloatArray, *, seed: int) -> float:
    """Returns the p value of a rate of 0.5 at equal lengths: the sign-flip test of each item's part of the
    intercept's efficient score, where length alone explains the values (Kline & Santos 2012)."""
    slope = _fitted(values, longer[:, None], np.ones((1, len(values))))[0, 0]
    expected = 0.5 + 0.5 * np.tanh(slope * longer / 2)
    spread = expected * (1 - expected)
    by_lengths = longer * (spread @ longer) / (spread @ longer**2)  # what they explain of the intercept
    return sign_flip_p((values - expected) * (1 - by_lengths), seed=seed)


def _fitted(values: FloatArray, columns: FloatArray, weights: FloatArray) -> FloatArray:
    """Returns coefficients [R, C] of logistic regressions of [n] values on [n, C] columns, weights [R, n], by
    Newton's steps. Firth's penalty (1993) keeps them finite."""
    n, size = columns.shape
    squares = (columns[:, :, None] * columns[:, None, :]).reshape(n, -1)  # [n, C * C]
    found = np.zeros((len(weights), size))
    for _ in range(50):
        expected = 0.5 + 0.5 * np.tanh(found @ columns.T / 2)  # [R, n]
        spread = weights * expected * (1 - expected)
        inverse = np.linalg.inv((spread @ squares).reshape(-1, size, size) + 1e-9 * np.eye(size))
        leverage = spread * (inverse.reshape(-1, size * size) @ squares.T)
        score = (weights * (values - expected) + leverage * (0.5 - expected)) @ columns
        step = np.clip(np.einsum("rij,rj->ri", inverse, score), -1, 1)
        found += step
        if np.abs(step).max() < 1e-9:
            break
    return found
