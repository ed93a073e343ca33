"""Judges that load no model in this process: your own function, a server's model, a weighted sum."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from dpo_pack.online.endpoint import Endpoint
from dpo_pack.online.interface import Failure, Judge, Rollout, Scores
from dpo_pack.system.errors import RunError, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedJudges:
    """Adds up factor x score of several judges. A prompt has no scores if one of the judges fails on it."""

    judges: tuple[tuple[Judge, float], ...]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        sums: list[Scores | Failure] = [np.zeros(len(rollout.completions)) for rollout in rollouts]
        for judge, factor in self.judges:
            # If a judge fails on a prompt, later judges, which may cost money, do not get this prompt.
            places = [place for place, total in enumerate(sums) if not isinstance(total, Failure)]
            if not places:
                break
            for place, scores in zip(places, judge.score([rollouts[p] for p in places]), strict=True):
                total = sums[place]
                assert not isinstance(total, Failure)
                sums[place] = scores if isinstance(scores, Failure) else total + factor * scores
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionJudge:
    """Calls your own function. It returns a number for each completion; a better one has a higher number:

        def score(*, prompts: list[str | list[dict]], completions: list[str]) -> list[float]

    A prompt is text, or a list of messages if the data is conversational. The completions of one prompt
    follow one another. If a number is `None` or not finite, the prompt fails. If a call raises an error, the
    judge repeats it up to `retries` times, then does so for each prompt alone.
    """

    name: str  # module:function
    function: Callable[..., Any]
    retries: int

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        """Raises RunError when the function does not return one number for each completion."""
        batch: dict[str, list[Any]] = {"prompts": [], "completions": []}
        for rollout in rollouts:
            prompt = rollout.draw.prompt
            for completion in rollout.completions:
                batch["prompts"].append(prompt.text if prompt.messages is None else list(prompt.messages))
                batch["completions"].append(completion.text)
        reason = ""
        for _ in range(1 + self.retries):
            try:
                values = self.function(**batch)
                break
            except Exception as error:  # the user's code may raise anything
                reason = f"{self.name}: {one_line(error)}"
        else:
            if len(rollouts) == 1:
                return [Failure(reason=reason)]
            # One bad prompt must not make the other prompts fail.
            return [result for rollout in rollouts for result in self.score([rollout])]
        ends = np.cumsum([len(rollout.completions) for rollout in rollouts])
        try:
            numbers = [math.nan if value is None else float(value) for value in values]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != ends[-1]:
            raise RunError(
                f"online.judges: {self.name} must return a list with one number for each of {ends[-1]} "
                f"completions, not {type(values).__name__} {str(values)[:60]!r}"
            )
        not_finite = Failure(reason=f"{self.name}: a score is not finite")
        by_prompt = np.split(np.array(numbers, dtype=np.float64), ends[:-1])
        return [scores if np.isfinite(scores).all() else not_finite for scores in by_prompt]


INSTRUCTIONS = "The better answer is helpful, honest and to the point."
_SYSTEM = """\
You compare two answers to the same request. {instructions}
Say which answer is better. Reply with one letter and nothing else: A, B, or T for a tie."""
_QUESTION = """\
[Request]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Which answer is better: A, B, or T for a tie?"""
_VERDICT = re.compile(r"\W*(A|B|T|tie)\b", re.IGNORECASE)
_WINS = {"a": 1.0, "b": 0.0, "t": 0.5, "tie": 0.5}  # score of the answer that is shown first


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmJudge:
    """Asks a server's model which of two completions is better. A score is the fraction of comparisons won.

    Models favour the answer that is shown first (Zheng et al. 2023, arXiv 2306.05685). So the judge compares
    each pair of completions in both orders. If a model looks only at the order, both score one half.
    """

    endpoint: Endpoint
    instructions: str = INSTRUCTIONS

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        comparisons = [
            (place, first, second)
            for place, rollout in enumerate(rollouts)
            for one, other in combinations(range(len(rollout.completions)), 2)
            # Equal texts are a tie and need no request.
            if rollout.completions[one].text != rollout.completions[other].text
            for first, second in ((one, other), (other, one))
        ]
        bodies = [self._body(rollouts[place], first, second) for place, first, second in comparisons]
        verdicts = self.endpoint.ask_all("/chat/completions", bodies, _read_verdict)
        wins = [np.full((len(r.completions), len(r.completions)), 0.5) for r in rollouts]  # of i against j
        failures: dict[int, Failure] = {}
        for (place, first, second), verdict in zip(comparisons, verdicts, strict=True):
            if isinstance(verdict, Failure):
                failures.setdefault(place, verdict)
                continue
            # This verdict counts one half; the verdict on the other order counts the other half.
            wins[place][first, second] += (verdict - 0.5) / 2
            wins[place][second, first] -= (verdict - 0.5) / 2
        # Without the diagonal: no completion is compared with itself.
        means = [np.array([np.delete(line, i).mean() for i, line in enumerate(table)]) for table in wins]
        return [failures.get(place) or scores for place, scores in enumerate(means)]

    def _body(self, rollout: Rollout, first: int, second: int) -> dict[str, Any]:
        prompt = rollout.draw.prompt
        text = prompt.text
        if prompt.messages is not None:
            text = "\n\n".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt.messages)
        question = _QUESTION.format(
            prompt=text, first=rollout.completions[first].text, second=rollout.completions[second].text
        )
        return {
            "messages": [
                {"role": "system", "content": _SYSTEM.format(instructions=self.instructions)},
                {"role": "user", "content": question},
            ],
            "temperature": 0.0,
            "max_tokens": 16,
        }


def _read_verdict(answer: Any) -> float:
    """Returns the score of the answer that is shown first: 1, 0, or 0.5 for a tie."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the answer has no message") from None
    verdict = _VERDICT.match(text) if isinstance(text, str) else None
    if verdict is None:
        raise ValueError(f"the answer is neither A, B nor T: {text!r}")
    return _WINS[verdict.group(1).lower()]
