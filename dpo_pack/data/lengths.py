"""Token counts of pairs, as the planner and the cost model see them. P pairs; lengths in tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AnyIntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLengths:
    """Token counts of every pair: four [P] integer arrays.

    `shared` is the longest common prefix of prompt + chosen and prompt + rejected: at least `prompt`.
    """

    prompt: AnyIntArray
    chosen: AnyIntArray
    rejected: AnyIntArray
    shared: AnyIntArray

    def __post_init__(self) -> None:
        shapes = {a.shape for a in (self.prompt, self.chosen, self.rejected, self.shared)}
        assert len(shapes) == 1, f"lengths of different numbers of pairs: {shapes}"

    def select(self, pairs: AnyIntArray) -> "PairLengths":
        """The lengths of `pairs`, in that order."""
        return PairLengths(
            prompt=self.prompt[pairs],
            chosen=self.chosen[pairs],
            rejected=self.rejected[pairs],
            shared=self.shared[pairs],
        )

    def row_tokens(self, *, share_prompt: bool) -> IntArray:
        """Tokens each pair takes in a packed row, [P]: both sequences, their common prefix once if shared."""
        both = 2 * self.prompt.astype(np.int64) + self.chosen + self.rejected
        return both - self.shared if share_prompt else both

    def padded_tokens(self) -> IntArray:
        """Tokens each pair takes in a padded row of its own, [P]: twice its longer sequence."""
        return 2 * (self.prompt.astype(np.int64) + np.maximum(self.chosen, self.rejected))

    def completion_tokens(self) -> IntArray:
        """Scored tokens of each pair, [P]: what the output head has to see."""
        return self.chosen.astype(np.int64) + self.rejected
