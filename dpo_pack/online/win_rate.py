"""Evaluation of an online run: the policy against itself as it started, on held-out prompts.

Both write one completion a prompt, with the same random numbers; the judge scores the two together. So a
policy that has not changed wins exactly half, and differences are of the same prompts, pair by pair. Ranks
share out the prompts, and every rank has the metrics over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpo_pack import ranks
from dpo_pack.bootstrap import mean_intervals
from dpo_pack.data.prompts import Prompt
from dpo_pack.online.interface import Completion, Draw, Failure, Generator, Judge, Rollout

# Draws of an evaluation are numbered from here, so that none shares its random numbers with training.
FIRST_DRAW = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A prompt that both have answered and the judge has scored."""

    first_score: float  # of the policy as it started
    score: float  # of the policy as it is, whose answer the following describe
    completion_tokens: int
    is_finished: bool


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
        self.first = {name: ranks.share_out(draws, self._answers) for name, draws in self.draws.items()}

    def evaluate(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and metrics of each set, for the policy as it is."""
        for name, draws in self.draws.items():
            openings = list(zip(draws, self.first[name], strict=True))
            yield name, self._record(ranks.share_out(openings, self._play))

    def _answers(self, draws: Sequence[Draw]) -> list[Completion | None]:
        results = self.generator.generate(draws)
        return [None if isinstance(result, Failure) else result[0] for result in results]

    def _play(self, openings: Sequence[tuple[Draw, Completion | None]]) -> list[Game | None]:
        """The game of each prompt, which has its first answer already; None where something failed."""
        answers = self._answers([draw for draw, _ in openings])
        rollouts = {
            place: Rollout(draw=draw, completions=(first, now))
            for place, ((draw, first), now) in enumerate(zip(openings, answers, strict=True))
            if first is not None and now is not None
        }
        scored = self.judge.score(list(rollouts.values())) if rollouts else []
        games: list[Game | None] = [None] * len(openings)
        for (place, rollout), scores in zip(rollouts.items(), scored, strict=True):
            if isinstance(scores, Failure):
                continue
            first_score, score = scores.tolist()
            now = rollout.completions[1]
            games[place] = Game(
                first_score=first_score,
                score=score,
                completion_tokens=len(now.ids),
                is_finished=now.is_finished,
            )
        return games

    def _record(self, games: Sequence[Game | None]) -> dict[str, Any]:
        played = [game for game in games if game is not None]
        record: dict[str, Any] = {"prompts": len(games), "failures": len(games) - len(played)}
        if not played:
            return record
        first = np.array([game.first_score for game in played])
        now = np.array([game.score for game in played])
        metrics = {
            "online/win_rate": (now > first) + 0.5 * (now == first),
            "online/scores": now,
            "online/scores_start": first,
            "online/score_gain": now - first,
        }
        intervals = mean_intervals(np.stack(list(metrics.values()), axis=1), seed=self.seed)
        return {
            **record,
            **{name: float(values.mean()) for name, values in metrics.items()},
            "online/completion_tokens": float(np.mean([game.completion_tokens for game in played])),
            "online/eos_rate": float(np.mean([game.is_finished for game in played])),
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
