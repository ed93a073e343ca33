"""Which token budget to train with: what each of several would do, and a recommendation with its reasons.

The budget changes neither what is trained on nor the FLOPs; in scope epoch it does change which pairs a step
has, since steps are cut from rows. A larger one makes fewer and longer rows, whose matrix products are more
efficient, and takes more memory, because memory grows with the longest row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.data.bin_packing import ROW_OVERHEAD_TOKENS
from dpo_pack.data.packing import PackingPlan
from dpo_pack.data.packing_numbers import RankBalance, rank_balance

# A budget is good enough when the estimated time of a pair is within this of the best of the sweep.
GOOD_ENOUGH = 1.02
# A sweep looks at so many steps spread over the epoch.
MAX_SWEEP_STEPS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOutcome:
    """One epoch under one token budget."""

    token_budget: int
    rows_per_step: float  # mean, on one rank
    full_step_rows: int | None  # scope epoch: rows of all steps but the last
    budget_fill: float
    max_row_tokens: int  # what memory has to hold; over the steps measured
    num_oversize_pairs: int
    # Of a step's estimated time, on the first number of ranks: each row costs ROW_OVERHEAD_TOKENS more.
    row_overhead: float
    relative_time: float  # a pair's, against the best of the sweep
    balance: tuple[RankBalance, ...]  # a number of ranks each


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The token budget to take, and why."""

    token_budget: int
    rows_per_step: int | None  # scope epoch: with which steps have about as many pairs as the recipe's
    num_ranks: int  # it is for
    reasons: tuple[str, ...]

    @property
    def overrides(self) -> str:
        """As on the command line."""
        rows = "" if self.rows_per_step is None else f" packing.rows_per_step={self.rows_per_step}"
        return f"packing.token_budget={self.token_budget}{rows}"


def sweep_budgets(
    make_plan: Callable[[int, int], PackingPlan], budgets: Sequence[int], ranks: Sequence[int]
) -> tuple[BudgetOutcome, ...]:
    """What each of `budgets` would do, ascending. make_plan: (token budget, ranks) -> plan of the epoch."""
    seconds: list[tuple[float, float]] = []  # (tokens, overhead) a pair, of a step on the fullest rank
    measured = []
    for budget in sorted(set(budgets)):
        plan = make_plan(budget, 1)
        balance = tuple(rank_balance(make_plan(budget, r), max_steps=MAX_SWEEP_STEPS) for r in ranks)
        steps = np.unique(np.linspace(0, len(plan) - 1, min(len(plan), MAX_SWEEP_STEPS)).round().astype(int))
        rows = [[plan.tokens_in(row) for (rows,) in [plan[step]] for row in rows] for step in steps.tolist()]
        tokens = np.array([count for step in rows for count in step])
        per_rank = tokens.sum() / len(steps) / ranks[0]
        overhead = ROW_OVERHEAD_TOKENS * balance[0].mean_rows_of_fullest_rank
        pairs = np.diff(plan.step_begins)[steps].mean()  # in scope epoch another number for each budget
        seconds.append((per_rank / pairs, overhead / pairs))
        measured.append((plan, balance, len(tokens) / len(steps), tokens))
    best = min(sum(step) for step in seconds)
    return tuple(
        BudgetOutcome(
            token_budget=plan.token_budget,
            rows_per_step=rows_per_step,
            full_step_rows=None if plan.row_begins is None else plan.full_step,
            budget_fill=float(np.minimum(tokens / plan.token_budget, 1.0).mean()),
            max_row_tokens=int(tokens.max()),
            num_oversize_pairs=len(plan.oversize_pairs),
            row_overhead=step[1] / sum(step),
            relative_time=sum(step) / best,
            balance=balance,
        )
        for (plan, balance, rows_per_step, tokens), step in zip(measured, seconds, strict=True)
    )


def recommend(sweep: Sequence[BudgetOutcome]) -> Recommendation:
    """The smallest budget that is good enough; of those, one that holds every pair if there is one."""
    good = [outcome for outcome in sweep if outcome.relative_time <= GOOD_ENOUGH]
    holding = [outcome for outcome in good if outcome.num_oversize_pairs == 0]
    choice = (holding or good)[0]
    ranks = choice.balance[0]
    overhead = f"launching rows costs about {choice.row_overhead:.1%} of its time"
    reasons = [f"a step is {choice.rows_per_step:,.1f} rows on one rank; {overhead}"]
    if ranks.num_ranks > 1:
        rows = ranks.mean_rows_of_fullest_rank
        reasons = [f"a step is {rows:,.1f} rows on the fullest of {ranks.num_ranks:,} ranks; {overhead}"]
    smaller = [outcome for outcome in sweep if outcome.token_budget < choice.token_budget]
    larger = [outcome for outcome in sweep if outcome.token_budget > choice.token_budget]
    if smaller:
        reasons.append(_against_smaller(choice, smaller[-1]))
    if larger:
        gain = 1 - larger[0].relative_time / choice.relative_time
        reasons.append(
            f"{larger[0].token_budget:,} would save {max(gain, 0.0):.1%} of the time and need memory for "
            f"rows of {larger[0].max_row_tokens:,} tokens instead of {choice.max_row_tokens:,}"
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
