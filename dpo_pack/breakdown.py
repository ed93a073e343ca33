"""Means of held-out metrics with their intervals: over all pairs, by source, by which completion is longer.

Preference data often prefers the longer completion, and a policy can raise its accuracy by learning that
alone. Then accuracy is high where chosen is the longer one and low where it is the shorter one.

Legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpo_pack.bootstrap import Floats, mean_intervals

# By chosen tokens / rejected tokens: each bucket ends below the next one's edge.
LENGTH_BUCKETS: dict[str, float] = {
    "chosen_under_half": 0.0,
    "chosen_shorter": 0.5,
    "similar_length": 1 / 1.1,
    "chosen_longer": 1.1,
    "chosen_over_twice": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTraits:
    """What held-out pairs are told apart by."""

    chosen_tokens: npt.NDArray[np.integer]  # [P]
    rejected_tokens: npt.NDArray[np.integer]  # [P]
    source_indices: npt.NDArray[np.integer]  # [P] into `source_names`
    source_names: Sequence[str]


def describe(metrics: Mapping[str, Floats], traits: PairTraits, *, seed: int) -> dict[str, Any]:
    """The means of `metrics`, [P] each, with 95 % intervals, and the same by source and by length.

    Sources only where there are several. Intervals are the bootstrap's over pairs, see bootstrap.py.
    """
    everything = summarize(metrics, np.arange(len(traits.chosen_tokens)), seed=seed)
    groups = {"by_source": _sources(traits), "by_length": length_buckets(traits)}
    for name, members in groups.items():
        summaries = {group: summarize(metrics, pairs, seed=seed) for group, pairs in members}
        if len(summaries) > 1 or name == "by_length":
            everything[name] = summaries
    return everything


def summarize(metrics: Mapping[str, Floats], pairs: npt.NDArray[np.integer], *, seed: int) -> dict[str, Any]:
    """The number of `pairs`, positions in the columns, the means over them, and `intervals` of the means."""
    values = np.stack([column[pairs] for column in metrics.values()], axis=1)
    intervals = mean_intervals(values, seed=seed).tolist()
    means = dict(zip(metrics, values.mean(axis=0).tolist(), strict=True))
    return {"pairs": len(pairs), **means, "intervals": dict(zip(metrics, intervals, strict=True))}


def length_preference(margins: Floats, traits: PairTraits) -> dict[str, float]:
    """`length/chosen_longer` and `length/prefers_longer`, of the pairs whose completions differ in length.

    The part of them whose longer completion the data prefers, and the part whose longer one has the larger
    reward; a tie of rewards counts half. Empty where all lengths are equal.
    """
    difference = traits.chosen_tokens.astype(np.int64) - traits.rejected_tokens
    differs = difference != 0
    if not differs.any():
        return {}
    prefers_longer = 0.5 + 0.5 * np.sign(margins[differs]) * np.sign(difference[differs])
    return {
        "length/chosen_longer": float((difference[differs] > 0).mean()),
        "length/prefers_longer": float(prefers_longer.mean()),
    }


def length_buckets(traits: PairTraits) -> Iterator[tuple[str, npt.NDArray[np.integer]]]:
    """(name in LENGTH_BUCKETS, positions of its pairs); every pair is in one, empty buckets are left out."""
    ratios = traits.chosen_tokens / traits.rejected_tokens
    buckets = np.searchsorted(list(LENGTH_BUCKETS.values()), ratios, side="right") - 1
    for number, name in enumerate(LENGTH_BUCKETS):
        pairs = np.flatnonzero(buckets == number)
        if len(pairs):
            yield name, pairs


def _sources(traits: PairTraits) -> Iterator[tuple[str, npt.NDArray[np.integer]]]:
    for number, name in enumerate(traits.source_names):
        pairs = np.flatnonzero(traits.source_indices == number)
        if len(pairs):
            yield name, pairs
