"""What generators, judges and pairing exchange, and the settings that all generators have.

Generators and judges return one result for each prompt, in order: a `Failure` without an answer or a score.
Training counts such a prompt and skips it.

Legend: n completions of a prompt, L tokens of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpo_pack.data.tokenization import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The distribution that completions are drawn from."""

    completions_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0  # 0: the likeliest token, without random numbers
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """A prompt to answer. `number` counts a run's draws from 0; random numbers of sampling depend on it."""

    number: int
    prompt_index: int  # position in the training prompts
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One answer of the policy."""

    ids: npt.NDArray[np.int32]  # [L] the tokens that the policy wrote, with the end token or stop string
    text: str  # for judges: without special tokens and stop strings
    is_finished: bool  # True: the policy ended it; False: max_new_tokens cut it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    draw: Draw
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a prompt has no completions or no scores, in one line."""

    reason: str


Scores = npt.NDArray[np.float64]  # [n] finite; a better completion has a higher score


class Generator(Protocol):
    """Answers prompts."""

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        """Returns each draw's completions. Their random numbers depend only on its number and the seed."""
        ...

    def weights_step(self, step: int) -> int:
        """Returns after how many optimizer steps the weights were taken that answer prompts at `step`."""
        ...


class Judge(Protocol):
    """Scores completions. Only score differences between completions of the same prompt are used."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        """Returns the scores of each rollout's completions."""
        ...
