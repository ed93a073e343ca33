"""Plans of pairs of given lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpo_pack.packing.lengths import AnyIntArray, Beginnings, FloatArray, IntArray, PairSizes
from dpo_pack.packing.plan import PackingPlan, plan_epoch


def sizes_of(
    tokens: AnyIntArray,
    costs: FloatArray | None = None,
    *,
    pads: bool = False,
    beginnings: Beginnings | None = None,
) -> PairSizes:
    """By default the costs are the tokens."""
    numbers: IntArray = np.asarray(tokens, dtype=np.int64)
    costs = numbers.astype(np.float64) if costs is None else costs
    return PairSizes(tokens=numbers, costs=costs, pads=pads, beginnings=beginnings)


def make_plan(
    tokens: AnyIntArray,
    *,
    row_costs: FloatArray | None = None,
    is_packed: bool = True,
    beginnings: Beginnings | None = None,
    **settings: Any,
) -> PackingPlan:
    sizes = sizes_of(tokens, row_costs, pads=not is_packed, beginnings=beginnings)
    return plan_epoch(sizes, **settings)
