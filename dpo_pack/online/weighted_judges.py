"""Several judges as one: the weighted sum of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.online.interface import Failure, Judge, Rollout, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedJudges:
    """`sum of weight * score` over judges. A prompt that one of them fails on, all fail on."""

    judges: tuple[tuple[Judge, float], ...]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        sums: list[Scores | Failure] = [np.zeros(len(rollout.completions)) for rollout in rollouts]
        for judge, weight in self.judges:
            # What one judge has failed on, the next, which may cost money, is not asked about.
            asked = [place for place, total in enumerate(sums) if not isinstance(total, Failure)]
            if not asked:
                break
            for place, scores in zip(asked, judge.score([rollouts[a] for a in asked]), strict=True):
                total = sums[place]
                assert not isinstance(total, Failure)
                sums[place] = scores if isinstance(scores, Failure) else total + weight * scores
        return sums
