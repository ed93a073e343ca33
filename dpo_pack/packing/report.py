"""The packing report: how many tokens packed rows (forward passes) compute, and how many packing saves.

packing_report.json has the fields of the dataclasses. Lengths are in tokens; FLOPs are those of training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpo_pack.packing.bin_packing import PADDED, ROW_OVERHEAD_TOKENS
from dpo_pack.packing.lengths import IntArray, ModelShape, PairLengths, padded_flops
from dpo_pack.packing.plan import PackingPlan

# Pairs in a micro-batch of padded training, which pads to the longest sequence of the micro-batch.
PADDED_MICROBATCH_PAIRS = (1, 2, 4, 8, 16)
# Rows and balance are measured on at most this many steps, spread evenly over the epoch; budgets on fewer.
MAX_BALANCE_STEPS, MAX_BUDGET_STEPS = 1000, 300
# A budget is good enough when a pair takes at most this many times as long as under the fastest budget.
GOOD_ENOUGH = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedComparison:
    """The epoch in padded micro-batches, with every position through the output head; their tokens = the
    plan's + saved by packing + saved by sharing."""

    microbatch_pairs: int
    tokens: int
    saved_by_packing_tokens: int
    times_computed_tokens: float  # `tokens` / the tokens that the plan computes
    times_flops: float  # FLOPs / FLOPs of the plan: the speed-up if both run at the same utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStatistics:
    """Measurements of the plan of one epoch on one rank; rows, tokens, FLOPs and merged pairs are estimates
    if only `steps_measured` steps are measured."""

    num_pairs: int  # a pair counts as often as it is trained on
    num_steps: int
    steps_measured: int
    num_rows: int
    max_row_tokens: int  # of the measured steps and of the pairs that exceed the budget
    budget_fill: float  # mean over rows of tokens / budget; an oversize row counts as full
    computed_tokens: int  # tokens that the rows run through the model
    unshared_tokens: int  # both sequences of every pair, with prompts twice and without padding
    saved_by_sharing_tokens: int  # by sharing common prefixes, and by merging pairs of one prompt
    merged_pairs: int  # pairs that are in a group with another pair of the same prompt
    flops: float  # of the epoch
    padded: tuple[PaddedComparison, ...]
    oversize_pairs: Mapping[str, int]  # tokens of each pair that exceeds the budget, by its place in the data


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """How evenly the plan's estimated costs of an epoch are spread over `num_ranks` ranks (processes)."""

    num_ranks: int
    steps_measured: int
    rows_per_step: float  # mean
    max_rows_per_rank: int
    mean_rows_of_fullest_rank: float
    slowest_over_mean: float  # time of all steps / their time with perfect balance
    worst_full_step_slowest_over_mean: float  # if no step is full: of all measured steps
    steps_with_idle_ranks: int  # steps in which a rank has no row


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOutcome:
    """Measurements of one epoch under one token budget."""

    token_budget: int
    rows_per_step: float  # mean, on one rank
    full_step_rows: int | None  # scope epoch: rows of each step but the last; scope step: None
    budget_fill: float
    max_row_tokens: int  # the longest row of the measured steps, which memory has to hold
    num_oversize_pairs: int
    relative_time: float  # time per pair / time per pair under the fastest budget compared
    is_best: bool  # the smallest within GOOD_ENOUGH, if possible one that no pair exceeds


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """Settings and measurements of the plan of one epoch."""

    model: str
    algorithm: str
    token_budget: int
    pairs_per_step: int | None  # scope step
    rows_per_step: int | None  # scope epoch
    share_prompt: bool
    merge_prompts: bool
    plan_fingerprint: str
    statistics: PackingStatistics
    balance: tuple[RankBalance, ...]
    sweep: tuple[BudgetOutcome, ...]  # by token budget, ascending
    removed_pairs: Mapping[str, int]  # pairs dropped before packing, by reason
    truncated: Mapping[str, int]  # pairs shortened before packing, by the part that was cut

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [asdict(outcome) for outcome in self.sweep]

    def __repr__(self) -> str:
        ours = self.statistics
        return (
            f"PackingReport({ours.num_pairs:,} pairs in {ours.num_steps:,} steps, {ours.num_rows:,} rows of "
            f"up to {self.token_budget:,} tokens, {ours.budget_fill:.1%} full)"
        )


def inspect_packing(
    planned: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    *,
    order: IntArray,
    share_prompt: bool,
    ranks: Sequence[int],
    budgets: Sequence[int],
    model: str,
    removed_pairs: Mapping[str, int],
    truncated: Mapping[str, int],
    describe_pair: Callable[[int], str],
) -> PackingReport:
    """Measures the plan of the epoch `order` ([E] pairs, E > 0, from `epoch_order`), whose costs must be
    FLOPs unless the algorithm is PADDED. `budgets` and the plan's own are compared on ranks[0] ranks.
    describe_pair: returns where the user finds a pair."""
    plan, settings = replace(planned, num_ranks=1, equal_rows=False), planned.settings
    return PackingReport(
        model=model,
        algorithm=settings.algorithm,
        token_budget=settings.token_budget,
        pairs_per_step=settings.pairs_per_step if settings.rows_per_step is None else None,
        rows_per_step=settings.rows_per_step,
        share_prompt=share_prompt and settings.algorithm != PADDED,
        merge_prompts=plan.sizes.merging is not None,
        plan_fingerprint=plan.fingerprint,
        statistics=_statistics(plan, lengths, shape, order, describe_pair),
        balance=tuple(rank_balance(replace(plan, num_ranks=number)) for number in ranks),
        sweep=_compare_budgets(plan, order, budgets, ranks[0]),
        removed_pairs=dict(removed_pairs),
        truncated=dict(truncated),
    )


def _statistics(
    plan: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    order: IntArray,
    describe_pair: Callable[[int], str],
) -> PackingStatistics:
    steps, oversize = _spread_steps(plan, MAX_BALANCE_STEPS), plan.oversize_pairs.tolist()
    rows = [row for step in steps for row in plan.pack_step(step)[0]]
    scale = len(plan.order) / sum(map(len, rows))  # 1 if all steps are measured
    sizes = [plan.sizes.of_row(row) for row in rows]
    tokens = np.array([size.tokens for size in sizes])
    computed = round(int(tokens.sum()) * scale)
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    towers = 2 * np.broadcast_to(lengths.tower, lengths.prompt.shape)  # both sequences of a batch have them
    if plan.settings.algorithm == PADDED:  # it shares no prompts: its tokens beyond `unshared` are padding
        longest = np.array([plan.sizes.tokens[row].max() // 2 for row in rows])
        scored = np.array([lengths.completion_tokens()[row].sum() for row in rows])
        num_sequences = np.array([2 * len(row) for row in rows])
        by_sharing, flops = 0, padded_flops(shape, longest, num_sequences, scored_tokens=scored)
        flops += float(towers[np.concatenate(rows)].sum())
    else:
        by_sharing, flops = unshared - computed, sum(size.cost for size in sizes)
    flops *= scale
    padded, merging, alone = [], plan.sizes.merging, lengths.padded_tokens()[order]
    for microbatch_pairs in PADDED_MICROBATCH_PAIRS:  # of the epoch's order; `plan.order` can be that of rows
        begins = np.arange(0, len(order), microbatch_pairs)
        num_pairs = np.diff(np.append(begins, len(order)))
        longest = np.maximum.reduceat(alone, begins)  # of two sequences
        padded_tokens = int(longest @ num_pairs)
        of_layers = padded_flops(shape, longest // 2, 2 * num_pairs)
        comparison = PaddedComparison(
            microbatch_pairs=microbatch_pairs,
            tokens=padded_tokens,
            saved_by_packing_tokens=padded_tokens - computed - by_sharing,
            times_computed_tokens=padded_tokens / computed,
            times_flops=(of_layers + towers[order].sum()) / flops,
        )
        padded.append(comparison)
    groups = [] if merging is None else [group for row in rows for group in merging.groups_of(row)]
    return PackingStatistics(
        num_pairs=len(plan.order),
        num_steps=len(plan),
        steps_measured=len(steps),
        num_rows=round(len(rows) * scale),
        max_row_tokens=int(max(tokens.max(), plan.sizes.tokens[oversize].max(initial=0))),
        budget_fill=float(np.minimum(tokens / plan.settings.token_budget, 1.0).mean()),
        computed_tokens=computed,
        unshared_tokens=unshared,
        saved_by_sharing_tokens=by_sharing,
        merged_pairs=round(sum(len(group) for group in groups if len(group) > 1) * scale),
        flops=flops,
        padded=tuple(padded),
        oversize_pairs={describe_pair(pair): int(plan.sizes.tokens[pair]) for pair in oversize},
    )


def rank_balance(plan: PackingPlan, *, max_steps: int = MAX_BALANCE_STEPS) -> RankBalance:
    """Measures the loads of ranks in at most `max_steps` steps, the first and the last step included."""
    steps = _spread_steps(plan, max_steps)
    planned = [plan.pack_step(step) for step in steps]
    of_row = plan.sizes.of_row
    costs = np.array([[sum(of_row(row).cost for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], like costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    begins, full = plan.step_begins, plan.settings.pairs_per_step
    if plan.settings.rows_per_step is not None and plan.row_begins is not None:  # scope epoch counts rows
        begins, full = np.searchsorted(plan.row_begins, begins), plan.settings.rows_per_step
    is_full = np.diff(begins)[steps] == full
    counted = is_full if is_full.any() else ~is_full
    return RankBalance(
        num_ranks=plan.num_ranks,
        steps_measured=len(planned),
        rows_per_step=float(num_rows.sum(axis=1).mean()),
        max_rows_per_rank=int(num_rows.max()),
        mean_rows_of_fullest_rank=float(num_rows.max(axis=1).mean()),
        slowest_over_mean=float(slowest.sum() / mean.sum()),
        worst_full_step_slowest_over_mean=float((slowest / mean)[counted].max()),
        steps_with_idle_ranks=int((num_rows.min(axis=1) == 0).sum()),
    )


def _compare_budgets(
    plan: PackingPlan, order: IntArray, budgets: Sequence[int], num_ranks: int
) -> tuple[BudgetOutcome, ...]:
    """Returns the outcome of each budget, and of that of `plan`, which is for one rank.

    The time of a step, in tokens, is its tokens / `num_ranks`, plus ROW_OVERHEAD_TOKENS for each row of the
    rank with the most rows. That of a pair counts: in scope epoch a step has any number of pairs."""
    sizes, settings, outcomes = plan.sizes, plan.settings, []
    is_drawn = np.bincount(order, minlength=len(sizes.tokens)) > 0
    for budget in sorted({settings.token_budget, *budgets}):
        rows = settings.rows_per_step
        if rows is not None:  # so that a step has about as many pairs under each budget
            rows = max(round(rows * settings.token_budget / budget), 1)
        # Scope epoch packs all pairs that it gets, so it gets those of the measured steps only.
        measured = order[: plan.step_begins[min(len(plan), MAX_BUDGET_STEPS)]] if rows is not None else order
        changed = replace(settings, token_budget=budget, rows_per_step=rows)
        under = replace(plan, settings=changed)  # in scope step, steps have the same pairs
        if rows is not None and changed != settings:
            under = changed.plan(sizes.tokens, order=measured, row_costs=sizes.costs, merging=sizes.merging)
        steps = _spread_steps(under, MAX_BUDGET_STEPS)
        packed = (row for step in steps for row in under.pack_step(step)[0])
        tokens = np.array([under.sizes.of_row(row).tokens for row in packed])
        balance = rank_balance(replace(under, num_ranks=num_ranks), max_steps=MAX_BUDGET_STEPS)
        time = tokens.sum() / len(steps) / num_ranks
        time += ROW_OVERHEAD_TOKENS * balance.mean_rows_of_fullest_rank
        outcome = BudgetOutcome(
            token_budget=budget,
            rows_per_step=len(tokens) / len(steps),
            full_step_rows=rows,
            budget_fill=float(np.minimum(tokens / budget, 1.0).mean()),
            max_row_tokens=int(tokens.max()),
            num_oversize_pairs=int((is_drawn & (sizes.tokens > budget)).sum()),
            relative_time=float(time / np.diff(under.step_begins)[steps].mean()),
            is_best=False,
        )
        outcomes.append(outcome)
    fastest = min(outcome.relative_time for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.relative_time <= GOOD_ENOUGH * fastest]
    best = next((outcome for outcome in good if outcome.num_oversize_pairs == 0), good[0])
    return tuple(
        replace(outcome, relative_time=outcome.relative_time / fastest, is_best=outcome is best)
        for outcome in outcomes
    )


def _spread_steps(plan: PackingPlan, max_steps: int) -> list[int]:
    steps = np.linspace(0, len(plan) - 1, min(len(plan), max_steps)).round()
    return [int(step) for step in np.unique(steps)]
