"""A judge that asks a server's model which of two completions is better, in both orders.

Models favour the answer that is shown first (Zheng et al. 2023, arXiv 2306.05685). Each two completions are
compared both ways round, and a completion's score is the part of its comparisons it wins, so that a judge
which only looks at the order prefers nothing: both score one half, a tie.

Legend: n completions of a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from dpo_pack.online.endpoint import Endpoint, UnusableAnswer
from dpo_pack.online.interface import Failure, Rollout, Scores

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
_WINS = {"a": 1.0, "b": 0.0, "t": 0.5, "tie": 0.5}  # of the answer shown first


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmJudge:
    """Scores in [0, 1]: 1 wins every comparison."""

    endpoint: Endpoint
    instructions: str = INSTRUCTIONS
    max_tokens: int = 16

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        comparisons = [
            (place, first, second)
            for place, rollout in enumerate(rollouts)
            for one, other in combinations(range(len(rollout.completions)), 2)
            # Equal texts are a tie without asking.
            if rollout.completions[one].text != rollout.completions[other].text
            for first, second in ((one, other), (other, one))
        ]
        bodies = [self._body(rollouts[place], first, second) for place, first, second in comparisons]
        verdicts = self.endpoint.ask_all("/chat/completions", bodies, _read)
        wins = [np.full((len(r.completions), len(r.completions)), 0.5) for r in rollouts]
        failures: dict[int, Failure] = {}
        for (place, first, second), verdict in zip(comparisons, verdicts, strict=True):
            if isinstance(verdict, Failure):
                failures.setdefault(place, verdict)
                continue
            # Half of the comparison: the other half is the other order's.
            wins[place][first, second] += (verdict - 0.5) / 2
            wins[place][second, first] -= (verdict - 0.5) / 2
        return [failures.get(place) or _mean_wins(of_prompt) for place, of_prompt in enumerate(wins)]

    def _body(self, rollout: Rollout, first: int, second: int) -> dict[str, Any]:
        question = _QUESTION.format(
            prompt=_prompt_text(rollout),
            first=rollout.completions[first].text,
            second=rollout.completions[second].text,
        )
        return {
            "messages": [
                {"role": "system", "content": _SYSTEM.format(instructions=self.instructions)},
                {"role": "user", "content": question},
            ],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }


def _mean_wins(wins: Scores) -> Scores:
    """[n, n] part of comparisons won -> [n] means over the n - 1 others."""
    others = ~np.eye(len(wins), dtype=bool)
    means: Scores = np.array([line[other].mean() for line, other in zip(wins, others, strict=True)])
    return means


def _prompt_text(rollout: Rollout) -> str:
    prompt = rollout.draw.prompt
    if prompt.messages is None:
        return prompt.text
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt.messages)


def _read(answer: Any) -> float:
    """How much the answer shown first has won: 1, 0, or one half."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise UnusableAnswer("no message in the answer") from None
    verdict = _VERDICT.match(text) if isinstance(text, str) else None
    if verdict is None:
        raise UnusableAnswer(f"neither A, B nor T: {str(text)[:60]!r}")
    return _WINS[verdict.group(1).lower()]
