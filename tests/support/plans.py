"""A packing plan in one call, for tests of plans."""

from __future__ import annotations

from typing import Any

from dpo_pack.packing.lengths import AnyIntArray
from dpo_pack.packing.plan import PackingPlan, PlanSettings


def make_plan(
    row_tokens: AnyIntArray,
    *,
    token_budget: int,
    pairs_per_step: int = 64,
    rows_per_step: int | None = None,
    window_pairs: int = 16384,
    algorithm: str = "best_fit_decreasing",
    **arguments: Any,
) -> PackingPlan:
    """Scope epoch with `rows_per_step`, else scope step. arguments: those of `PlanSettings.plan`."""
    settings = PlanSettings(
        token_budget=token_budget,
        pairs_per_step=pairs_per_step,
        rows_per_step=rows_per_step,
        window_pairs=window_pairs,
        algorithm=algorithm,
    )
    return settings.plan(row_tokens, **arguments)
