"""Plans of pairs of given lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpo_pack.packing.lengths import AnyIntArray, Beginnings, FloatArray, IntArray, PairSizes
from dpo_pack.packing.plan import PackingPlan, plan_epoch


def make_plan(
    tokens: AnyIntArray,
    *,
    row_costs: FloatArray | None = None,
    is_packed: bool = True,
    beginnings: Beginnings | None = None,
    order: AnyIntArray | None = None,
    **settings: Any,
) -> PackingPlan:
    """By default the costs are the tokens, and the order is that of the pairs."""
    numbers: IntArray = np.asarray(tokens, dtype=np.int64)
    sizes = PairSizes(
        tokens=numbers,
        costs=numbers.astype(np.float64) if row_costs is None else row_costs,
        pads=not is_packed,
        beginnings=beginnings,
    )
    return plan_epoch(sizes, order=np.arange(len(numbers)) if order is None else order, **settings)
