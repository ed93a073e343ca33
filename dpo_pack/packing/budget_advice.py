"""Compares several token budgets on one epoch, and recommends one of them with reasons.

The token budget limits the tokens of one row, that is of one forward pass. It changes neither the pairs of
an epoch nor the FLOPs. With `packing.scope: epoch` it changes the pairs of a step, because a step is a fixed
number of rows. A larger budget makes fewer and longer rows, so matrix products are more efficient. A larger
budget also takes more memory, because memory grows with the longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpo_pack.packing.bin_packing import ROW_OVERHEAD_TOKENS
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.packing.statistics import RankBalance, rank_balance, spread_steps

# A budget is good enough when a pair takes at most this many times as long as under the best budget.
GOOD_ENOUGH = 1.02
# For each budget, at most this many steps are measured, spread evenly over the epoch.
MAX_SWEEP_STEPS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOutcome:
    """Measurements of one epoch under one token budget."""

    token_budget: int
    rows_per_step: float  # mean, on one rank
    full_step_rows: int | None  # scope epoch: rows of each step but the last; scope step: None
    budget_fill: float
    max_row_tokens: int  # the longest row of the measured steps, which memory has to hold
    num_oversize_pairs: int
    row_overhead: float  # overhead of rows / estimated time of a step, on ranks[0] ranks
    relative_time: float  # time per pair / time per pair under the best budget compared
    balance: tuple[RankBalance, ...]  # one for each number of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended token budget, and the reasons."""

    token_budget: int
    rows_per_step: int | None  # scope epoch: keeps about as many pairs per step as the recipe
    num_ranks: int  # the recommendation is for this number of ranks
    reasons: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """The recommendation as recipe overrides (key=value ...) for the command line."""
        rows = "" if self.rows_per_step is None else f" packing.rows_per_step={self.rows_per_step}"
        return f"packing.token_budget={self.token_budget}{rows}"


def sweep_budgets(
    plan_under: Callable[[int], PackingPlan], budgets: Sequence[int], ranks: Sequence[int]
) -> tuple[BudgetOutcome, ...]:
    """Returns the outcome of each of `budgets`, ascending. plan_under(budget): the epoch's plan on one rank.

    The time of a step is estimated in tokens, for R = ranks[0] ranks: the tokens of the step / R, plus
    ROW_OVERHEAD_TOKENS for each row of the rank with the most rows. Budgets are compared by the time of a
    pair, because in scope epoch the budget decides how many pairs a step has.
    """
    outcomes = []
    for budget in sorted(set(budgets)):
        plan = plan_under(budget)
        balance = tuple(rank_balance(replace(plan, num_ranks=r), max_steps=MAX_SWEEP_STEPS) for r in ranks)
        steps = spread_steps(plan, MAX_SWEEP_STEPS)
        tokens = np.array([plan.tokens_in(row) for step in steps for row in plan.pack_step(step)[0]])
        overhead = ROW_OVERHEAD_TOKENS * balance[0].mean_rows_of_fullest_rank
        time = tokens.sum() / len(steps) / ranks[0] + overhead
        outcome = BudgetOutcome(
            token_budget=plan.token_budget,
            rows_per_step=len(tokens) / len(steps),
            full_step_rows=None if plan.row_begins is None else plan.full_step,
            budget_fill=float(np.minimum(tokens / plan.token_budget, 1.0).mean()),
            max_row_tokens=int(tokens.max()),
            num_oversize_pairs=len(plan.oversize_pairs),
            row_overhead=float(overhead / time),
            relative_time=float(time / np.diff(plan.step_begins)[steps].mean()),
            balance=balance,
        )
        outcomes.append(outcome)
    best = min(outcome.relative_time for outcome in outcomes)
    return tuple(replace(outcome, relative_time=outcome.relative_time / best) for outcome in outcomes)


def recommend(sweep: Sequence[BudgetOutcome]) -> Recommendation:
    """Recommends the smallest budget within GOOD_ENOUGH, if possible one that no pair exceeds."""
    good = [outcome for outcome in sweep if outcome.relative_time <= GOOD_ENOUGH]
    choice = next((outcome for outcome in good if outcome.num_oversize_pairs == 0), good[0])
    ranks, place = choice.balance[0], list(sweep).index(choice)
    rows, where = choice.rows_per_step, "one rank"
    if ranks.num_ranks > 1:
        rows, where = ranks.mean_rows_of_fullest_rank, f"the fullest of {ranks.num_ranks:,} ranks"
    overhead = f"launching rows costs about {choice.row_overhead:.1%} of its time"
    reasons = [f"a step has {rows:,.1f} rows on {where}; {overhead}"]
    if place > 0:
        reasons.append(_against_smaller(choice, sweep[place - 1]))
    if len(sweep) > 1 and len({(one.rows_per_step, one.max_row_tokens) for one in sweep}) == 1:
        reasons.append("any of these budgets is the same here, because all make the same rows")
    elif place + 1 < len(sweep):
        larger = sweep[place + 1]
        gain = max(1 - larger.relative_time / choice.relative_time, 0.0)
        reasons.append(
            f"{larger.token_budget:,} would save {gain:.1%} of the time and need memory for "
            f"rows of {larger.max_row_tokens:,} tokens instead of {choice.max_row_tokens:,}"
        )
    if choice.num_oversize_pairs:
        reasons.append(f"{_pairs_exceed(choice.num_oversize_pairs)} it; such a pair gets a row of its own")
    else:
        reasons.append("every pair fits")
    if choice.full_step_rows is not None:
        reasons.append("in scope epoch another budget, or other rows_per_step, makes other steps")
    return Recommendation(
        token_budget=choice.token_budget,
        rows_per_step=choice.full_step_rows,
        num_ranks=ranks.num_ranks,
        reasons=tuple(reasons),
    )


def _against_smaller(choice: BudgetOutcome, smaller: BudgetOutcome) -> str:
    if smaller.relative_time > GOOD_ENOUGH:
        slower = smaller.relative_time / choice.relative_time - 1
        rows = f"{smaller.rows_per_step:,.1f} rows a step"
        return f"{smaller.token_budget:,} would take {slower:.1%} longer: {rows}"
    return f"{_pairs_exceed(smaller.num_oversize_pairs)} {smaller.token_budget:,}"


def _pairs_exceed(num_pairs: int) -> str:
    return "1 pair exceeds" if num_pairs == 1 else f"{num_pairs:,} pairs exceed"
