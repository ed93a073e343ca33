"""Four pairs whose packing report is counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpo_pack.packing.bin_packing import PADDED
from dpo_pack.packing.lengths import IntArray, ModelShape, PairLengths, pair_flops
from dpo_pack.packing.plan import PlanSettings
from dpo_pack.packing.report import inspect_packing


def ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


# Four pairs; sequences (chosen, rejected) of 14, 12 / 25, 25 / 7, 9 / 50, 40 tokens, prompts 10, 20, 5, 30.
# The second pair's completions have 2 tokens in common.
LENGTHS = PairLengths(
    prompt=ints([10, 20, 5, 30]),
    chosen=ints([4, 5, 2, 20]),
    rejected=ints([2, 5, 4, 10]),
    shared=ints([10, 22, 5, 30]),
)


# Layers only, so that FLOPs are 6 x tokens and costs are counted by hand as easily as tokens.
ONE_WEIGHT = ModelShape(token_weights=1.0, head_weights=0, attention=())


def inspect(
    lengths: PairLengths = LENGTHS,
    *,
    shape: ModelShape = ONE_WEIGHT,
    share_prompt: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    keys = ("token_budget", "pairs_per_step", "algorithm")
    settings: dict[str, Any] = {
        "token_budget": 50,
        "pairs_per_step": 3,
        "algorithm": "best_fit_decreasing",
    }
    settings |= {key: changes.pop(key) for key in keys if key in changes}
    order = changes.pop("order", np.arange(len(lengths.prompt)))
    tokens, costs = lengths.padded_tokens(), lengths.padded_tokens().astype(np.float64)
    if settings["algorithm"] != PADDED:
        tokens = lengths.row_tokens(share_prompt=share_prompt)
        costs = pair_flops(shape, lengths, share_prompt=share_prompt)
    plan = PlanSettings(**settings).plan(tokens, order=order, row_costs=costs)
    options: dict[str, Any] = {
        "ranks": (1,),
        "budgets": (),
        "model": "org/model",
        "removed_pairs": {},
        "truncated": {},
        "describe_pair": "pair {}".format,
    }
    return inspect_packing(plan, lengths, shape, share_prompt=share_prompt, **(options | changes))
