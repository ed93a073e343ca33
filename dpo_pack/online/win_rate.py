"""Evaluation of an online run: the policy against itself as it started, on held-out prompts.

Both write one completion a prompt, with the same random numbers; the judge scores the two together. So a
policy that has not changed wins exactly half, and differences are of the same prompts, pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpo_pack.bootstrap import mean_intervals
from dpo_pack.data.prompts import Prompt
from dpo_pack.online.interface import Completion, Draw, Failure, Generator, Judge, Rollout

# Draws of an evaluation are numbered from here, so that none shares its random numbers with training.
FIRST_DRAW = 2**40


class WinRate:
    """Held-out prompts by set, with what the starting policy says to them."""

    def __init__(
        self, sets: Mapping[str, Sequence[Prompt]], generator: Generator, judge: Judge, *, seed: int
    ) -> None:
        """To be made while the policy is the starting one. `generator` writes one completion a prompt."""
        self.generator = generator
        self.judge = judge
        self.seed = seed  # of the intervals
        self.draws: dict[str, list[Draw]] = {}
        number = FIRST_DRAW
        for name, prompts in sets.items():
            self.draws[name] = [
                Draw(number=number + place, prompt_index=place, prompt=prompt)
                for place, prompt in enumerate(prompts)
            ]
            number += len(prompts)
        self.first = {name: self._answers(draws) for name, draws in self.draws.items()}

    def evaluate(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and metrics of each set, for the policy as it is."""
        for name, draws in self.draws.items():
            answers = zip(draws, self.first[name], self._answers(draws), strict=True)
            rollouts = [
                Rollout(draw=draw, completions=(first, now))
                for draw, first, now in answers
                if first is not None and now is not None
            ]
            yield name, self._record(rollouts, num_prompts=len(draws))

    def _answers(self, draws: Sequence[Draw]) -> list[Completion | None]:
        results = self.generator.generate(draws)
        return [None if isinstance(result, Failure) else result[0] for result in results]

    def _record(self, rollouts: Sequence[Rollout], *, num_prompts: int) -> dict[str, Any]:
        scored = [s for s in self.judge.score(rollouts) if not isinstance(s, Failure)] if rollouts else []
        record: dict[str, Any] = {"prompts": num_prompts, "failures": num_prompts - len(scored)}
        if not scored:
            return record
        first, now = np.stack(scored).T  # [prompts that were scored] each
        metrics = {
            "online/win_rate": (now > first) + 0.5 * (now == first),
            "online/scores": now,
            "online/scores_start": first,
            "online/score_gain": now - first,
        }
        intervals = mean_intervals(np.stack(list(metrics.values()), axis=1), seed=self.seed)
        latest = [rollout.completions[1] for rollout in rollouts]
        return {
            **record,
            **{name: float(values.mean()) for name, values in metrics.items()},
            "online/completion_tokens": float(np.mean([len(c.ids) for c in latest])),
            "online/eos_rate": float(np.mean([c.is_finished for c in latest])),
            "intervals": dict(zip(metrics, intervals.tolist(), strict=True)),
        }


def win_rate_sentence(record: Mapping[str, Any]) -> str:
    """An evaluation's record as the console shows it."""
    if "online/win_rate" not in record:
        return f"no score for any of {record['prompts']:,} prompts"
    low, high = record["intervals"]["online/win_rate"]
    least, most = record["intervals"]["online/score_gain"]
    failures = f", {record['failures']:,} prompts failed" if record["failures"] else ""
    return (
        f"wins {record['online/win_rate']:.3f} ({low:.3f} to {high:.3f}) against the starting policy, score "
        f"{record['online/scores']:.3f}, gain {record['online/score_gain']:+.3f} ({least:+.3f} to "
        f"{most:+.3f}){failures}"
    )
