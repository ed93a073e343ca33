"""Bootstrap 95 % intervals of means. Uses numpy only, because report.html is written without torch."""

from __future__ import annotations

import numpy as np

from dpo_pack.packing.lengths import FloatArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
# With many pairs, a resample takes long, and fewer resamples are enough. So their number is reduced until
# together they draw at most this many pairs, but never below _MIN_RESAMPLES.
_MAX_DRAWS = 50_000_000
_MIN_RESAMPLES = 200
_VALUES_AT_A_TIME = 4_000_000  # 32 MB of float64


def mean_intervals(values: FloatArray, *, seed: int, num_resamples: int = NUM_RESAMPLES) -> FloatArray:
    """Returns 95 % intervals of means: [P, M] values of P pairs -> [M, 2], lower and upper bound.

    This is the bootstrap's percentile interval (Efron & Tibshirani 1993, An Introduction to the Bootstrap,
    chapter 13). A resample draws P pairs with replacement, the same pairs for all columns. The interval holds
    the middle 95 % of the resamples' means. The same values and seed give the same bounds.
    """
    num_pairs, num_metrics = values.shape
    num_resamples = max(_MIN_RESAMPLES, min(num_resamples, _MAX_DRAWS // num_pairs))
    rng = np.random.default_rng(seed)
    means = np.empty((num_resamples, num_metrics))
    at_a_time = max(1, _VALUES_AT_A_TIME // (num_pairs * num_metrics))
    for start in range(0, num_resamples, at_a_time):
        stop = min(start + at_a_time, num_resamples)
        drawn = rng.integers(0, num_pairs, (stop - start, num_pairs))
        means[start:stop] = values[drawn].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    bounds: FloatArray = np.quantile(means, (tail, 1 - tail), axis=0).T
    return bounds
