"""How many tokens a row of the reference pass may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpo_pack.files import read_json, write_json_atomically

# On CPU: longer rows gain nothing, and their activations, each too large for the allocator to keep, are
# mapped anew by every operation: a row of 32,768 tokens takes 1.25 times as long a token as one of 4,096.
CPU_TOKEN_BUDGET = 4096
# The search stops here, whatever fits. FlashAttention numbers segments in a dimension of CUDA's grid that has
# 65,535: a row of so many tokens has more segments only if its pairs have fewer than 16 tokens on average.
# Rows that long have nothing left to gain.
LARGEST_TOKEN_BUDGET = 2**19
# On an accelerator, before anything is measured: without gradients no activation outlives its layer, so a
# row may be this much longer than in training.
START_FACTOR = 4


def largest_token_budget(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """The largest of start x 2^k tokens that fits in memory: doubled on success, halved on failure.

    `most` is as many as there is use for. Where not even one token fits, the answer is 1.
    """
    budget = min(start, most)
    if fits(budget):
        while budget < most and fits(min(2 * budget, most)):
            budget = min(2 * budget, most)
        return budget
    while budget > 1:
        budget //= 2
        if fits(budget):
            break
    return budget


def remembered_budget(memo_path: Path, key: str) -> int | None:
    """The budget that was measured for the same model and device; None when there is none."""
    budget = (read_json(memo_path) or {}).get(key)
    return budget if isinstance(budget, int) and budget >= 1 else None


def remember_budget(memo_path: Path, key: str, budget: int) -> None:
    """Raises CacheError when the disk refuses."""
    # Read again before writing: other processes add to the same file. A lost entry costs one measurement.
    write_json_atomically(memo_path, {**(read_json(memo_path) or {}), key: budget})
