"""Confidence intervals of means by the bootstrap: seeded, over pairs, vectorised.

Percentile intervals (Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13): pairs are drawn
with replacement, as many as there are, and the interval holds the middle of the means of many such draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
_CHUNK_VALUES = 4_000_000  # drawn at a time: 32 MB of float64
# From so many draws in all on, fewer resamples do: each is then of so many pairs that it costs more than it
# tells.
_MAX_DRAWS = 50_000_000
_MIN_RESAMPLES = 200

Floats = npt.NDArray[np.float64]


def mean_intervals(values: Floats, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> Floats:
    """[P, M] values of P pairs -> [M, 2]: lower and upper bound of each column's mean, at 95 %.

    The columns of a draw are of the same pairs. The same values and seed give the same bounds.
    """
    num_pairs, num_metrics = values.shape
    num_resamples = max(_MIN_RESAMPLES, min(num_resamples, _MAX_DRAWS // num_pairs))
    rng = np.random.default_rng(seed)
    means = np.empty((num_resamples, num_metrics))
    at_a_time = max(1, _CHUNK_VALUES // (num_pairs * num_metrics))
    for start in range(0, num_resamples, at_a_time):
        stop = min(start + at_a_time, num_resamples)
        drawn = rng.integers(0, num_pairs, (stop - start, num_pairs))
        means[start:stop] = values[drawn].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    bounds: Floats = np.quantile(means, (tail, 1 - tail), axis=0).T
    return bounds
