"""What generators, judges and pairing hand to each other.

A generator answers prompts, a judge scores the answers. Each returns one result a prompt, in order; where it
could not do its work that result is a `Failure`, and the prompt is set aside and counted.

Legend: n completions of a prompt, L tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpo_pack.data.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """A prompt to answer. `number` counts all draws of a run from 0 and seeds what is random about it."""

    number: int
    prompt_index: int  # into the training prompts
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One answer of the policy."""

    ids: npt.NDArray[np.int32]  # [L] as the policy wrote it, the token that ended it included
    text: str  # what judges read: without special tokens and stop strings
    is_finished: bool  # ended by itself; else cut at max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A prompt and its completions, n of them."""

    draw: Draw
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a prompt has no completions or no scores, in one line."""

    reason: str


Scores = npt.NDArray[np.float64]  # [n] finite, the higher the better


class Generator(Protocol):
    """Answers prompts."""

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        """The completions of each draw. What is random follows from each draw's number and the seed."""
        ...

    def weights_step(self, step: int) -> int:
        """The optimizer step after which the weights were taken that answer at `step`."""
        ...


class Judge(Protocol):
    """Scores completions; only differences between completions of the same prompt matter."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores | Failure]:
        """The scores of each rollout's completions."""
        ...
