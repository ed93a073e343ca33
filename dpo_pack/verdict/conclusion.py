"""Sources of evidence -> a conclusion: the new model is better, worse, mixed, or one cannot tell.

Legend: n items (prompts, documents of a task), each answered by both models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpo_pack.system.files import Json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One source of evidence: the same items, answered by the new model and by the start."""

    name: str  # unique, as shown: "judge 1 (llm)", "ifeval", "command"
    kind: Literal["function", "reward_model", "llm", "task", "command"]
    # [n] judges: the new model's value of a game, 0 to 1, a half for a tie; tasks, commands: new minus start
    values: NDArray[np.float64]
    more_characters: NDArray[np.float64] | None = None  # [n] of the new answer; llm and reward_model
    num_failed: int = 0  # items without a result, not in `values`
    failure: str | None = None  # why the source has no result at all; `values` is empty then


def conclude(
    sources: Sequence[Source],
    *,
    earlier: Sequence[float],
    number: int,
    primary: str | None = None,
    seed: int = 0,
) -> Json:
    """Returns `conclusion` ("better", "worse", "mixed", "cannot tell"), `sentence`, and `sources`: for each
    name, kind, n, num_failed, ties; `rate` (judges) or `difference`, `interval` [low, high], `p`, `p_holm`,
    all None without a result; says ("above", "below", "neither", "no result"); `length_controlled` (llm,
    reward_model): {rate, interval}, or {reason} why it is not possible (`p` is 1 then); if one cannot tell,
    `prompts_needed` {"2", "5", "10": prompts that would show so many points}, None without a result.

    earlier: `p` of every source in earlier verdicts against this start. number: this is the how-manieth.
    """
    raise NotImplementedError
