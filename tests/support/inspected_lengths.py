"""Four pairs whose packing report is counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpo_pack.packing.lengths import IntArray, ModelShape, PairLengths, pair_flops
from dpo_pack.reports.packing import inspect_packing
from support.plans import make_plan


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
    is_packed: bool = True,
    token_budget: int = 50,
    pairs_per_step: int = 3,
    order: IntArray | None = None,
    **changes: Any,
) -> dict[str, Any]:
    tokens, costs = lengths.row_tokens(pads=True), lengths.row_tokens(pads=True).astype(np.float64)
    if is_packed:
        tokens = lengths.row_tokens(share_prompt=share_prompt)
        costs = pair_flops(shape, lengths, share_prompt=share_prompt)
    plan = make_plan(
        tokens,
        order=order,
        token_budget=token_budget,
        pairs_per_step=pairs_per_step,
        is_packed=is_packed,
        row_costs=costs,
    )
    options: dict[str, Any] = {"ranks": (1,), "budgets": (), "describe_pair": "pair {}".format} | changes
    described = {"model": "org/model", "share_prompt": share_prompt, "removed_pairs": {}, "truncated": {}}
    described |= {name: options.pop(name) for name in described if name in options}
    return described | inspect_packing(plan, lengths, shape, **options)
