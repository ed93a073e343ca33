"""The evaluation of an online run: the current and the starting policy write one completion for each held-out
prompt, with the same random numbers, and the judge scores the two together: a game. So an unchanged policy
wins exactly one half.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from dpo_pack.data.tokenization import Prompt
from dpo_pack.online.interface import Completion, Draw, Failure, Generator, Judge, Scores
from dpo_pack.online.phases import score_answers
from dpo_pack.packing.lengths import FloatArray
from dpo_pack.system import ranks
from dpo_pack.system.files import Json
from dpo_pack.system.process import counted
from dpo_pack.training.health import with_interval
from dpo_pack.training.metrics import mean_intervals, rate_interval

# The draws of evaluations are numbered from here, so no training draw has the same random numbers.
FIRST_DRAW = 2**40
Game = tuple[Scores, Completion]  # [2] scores of the starting and the current answer; the current answer


def points(scores: Sequence[Scores]) -> FloatArray:
    """Returns [n]: 1 for each game that the second answer wins by its score, 0.5 for a tie, 0 for a loss."""
    first, second = np.array(scores).T
    won: FloatArray = (second > first) + 0.5 * (second == first)
    return won


class WinRate:
    """Sets of held-out prompts, with the starting policy's answers to these prompts."""

    def __init__(
        self, sets: Mapping[str, Sequence[Prompt]], generator: Generator, judge: Judge, *, seed: int
    ) -> None:
        self.generator = generator
        self.judge = judge
        self.seed = seed  # for the intervals
        numbers = count(FIRST_DRAW)
        self.draws = {
            name: [Draw(number=next(numbers), prompt_index=n, prompt=p) for n, p in enumerate(prompts)]
            for name, prompts in sets.items()
        }
        self.first: dict[str, list[Completion | None]] = {}  # the starting policy's answers, by set

    def begin(self) -> None:
        """Lets the starting policy answer all prompts; to be called before the first step."""
        self.first = {name: ranks.share_out(draws, self._answers) for name, draws in self.draws.items()}

    def evaluate(self) -> Iterator[tuple[str, Json]]:
        """Yields name and metrics of each set, for the current policy."""
        for name, draws in self.draws.items():
            openings = list(zip(draws, self.first[name], strict=True))
            games = ranks.share_out(openings, self._play)
            played = [game for game in games if game is not None]
            record: Json = {"prompts": len(games), "failures": len(games) - len(played)}
            yield name, {**record, **(self._metrics(played) if played else {})}

    def _answers(self, draws: Sequence[Draw]) -> list[Completion | None]:
        results = self.generator.generate(draws)
        return [None if isinstance(result, Failure) else result[0] for result in results]

    def _play(self, openings: Sequence[tuple[Draw, Completion | None]]) -> list[Game | None]:
        draws = [draw for draw, _ in openings]
        both = [
            Failure(reason="no answer") if first is None or now is None else (first, now)
            for (_, first), now in zip(openings, self._answers(draws), strict=True)
        ]
        return [
            None if isinstance(answers, Failure) or isinstance(scores, Failure) else (scores, answers[1])
            for answers, scores in zip(both, score_answers(draws, both, self.judge), strict=True)
        ]

    def _metrics(self, played: Sequence[Game]) -> Json:
        games = [scores for scores, _ in played]
        first, now = np.array(games).T
        metrics = {
            "online/win_rate": points(games),
            "online/scores": now,
            "online/scores_start": first,
            "online/score_gain": now - first,
        }
        found = mean_intervals(np.stack(list(metrics.values()), axis=1), seed=self.seed)
        intervals = dict(zip(metrics, found.tolist(), strict=True))
        intervals["online/win_rate"], _ = rate_interval(metrics["online/win_rate"], np.arange(len(played)))
        return {
            **{name: float(values.mean()) for name, values in metrics.items()},
            "online/completion_tokens": float(np.mean([len(answer.ids) for _, answer in played])),
            "online/eos_rate": float(np.mean([answer.is_finished for _, answer in played])),
            "intervals": intervals,
        }


def win_rate_sentence(record: Mapping[str, Any]) -> str:
    """Returns the console's sentence about the record of one set."""
    if "online/win_rate" not in record:
        return f"no score for any of {counted(record['prompts'], 'prompt')}"
    rate = with_interval(record["online/win_rate"], record["intervals"]["online/win_rate"])
    least, most = record["intervals"]["online/score_gain"]
    failures = f", {counted(record['failures'], 'prompt')} failed" if record["failures"] else ""
    return (
        f"wins {rate} against the starting policy, score {record['online/scores']:z.3f}, gain "
        f"{record['online/score_gain']:+z.3f} ({least:+z.3f} to {most:+z.3f}){failures}"
    )
