"""Bootstrap 95 % intervals of means. Uses numpy only, because report.html is written without torch."""

from __future__ import annotations

import numpy as np

from dpo_pack.packing.lengths import FloatArray, IntArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
# With many prompts, a resample takes long, and fewer resamples are enough. So their number is reduced until
# together they draw at most this many prompts, but never below _MIN_RESAMPLES.
_MAX_DRAWS = 50_000_000
_MIN_RESAMPLES = 200
_VALUES_AT_A_TIME = 4_000_000  # 32 MB of float64


def mean_intervals(
    values: FloatArray, *, seed: int, prompts: IntArray | None = None, num_resamples: int = NUM_RESAMPLES
) -> FloatArray:
    """Returns 95 % intervals of means: [P, M] values of P pairs -> [M, 2], lower and upper bound.

    This is the bootstrap's percentile interval (Efron & Tibshirani 1993, An Introduction to the Bootstrap,
    chapter 13). A resample draws G prompts with replacement, each with all its pairs, because pairs of one
    prompt resemble each other. All columns get the same draws. The interval holds the middle 95 % of the
    resamples' means. The same values and seed give the same bounds.

    prompts: [P] pairs of the same prompt have the same number; None: each pair has a prompt of its own.
    """
    sums, sizes = values, np.ones(len(values), dtype=np.int64)
    if prompts is not None:
        _, prompts, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
        sums = np.zeros((len(sizes), values.shape[1]))
        np.add.at(sums, prompts, values)
    num_prompts, num_metrics = sums.shape
    num_resamples = max(_MIN_RESAMPLES, min(num_resamples, _MAX_DRAWS // num_prompts))
    rng = np.random.default_rng(seed)
    means = np.empty((num_resamples, num_metrics))
    at_a_time = max(1, _VALUES_AT_A_TIME // (num_prompts * num_metrics))
    for start in range(0, num_resamples, at_a_time):
        stop = min(start + at_a_time, num_resamples)
        drawn = rng.integers(0, num_prompts, (stop - start, num_prompts))
        means[start:stop] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1, keepdims=True)
    tail = (1 - CONFIDENCE) / 2
    bounds: FloatArray = np.quantile(means, (tail, 1 - tail), axis=0).T
    return bounds
