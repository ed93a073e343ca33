"""The packing report: how many tokens packed rows (forward passes) compute, and how many packing saves.

A report is a dict, as packing_report.json has it. Lengths are in tokens; FLOPs are those of training. Rows
and balance are measured on steps that are spread evenly over the epoch, the first and the last included; what
is counted on them (rows, tokens, FLOPs) is scaled to the epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dpo_pack.packing.bin_packing import ROW_OVERHEAD_TOKENS
from dpo_pack.packing.lengths import ModelShape, PairLengths, padded_flops
from dpo_pack.packing.plan import PackingPlan

# Pairs in a micro-batch of padded training, which pads to the longest sequence of the micro-batch.
PADDED_MICROBATCH_PAIRS = (1, 2, 4, 8, 16)
MAX_BALANCE_STEPS, MAX_BUDGET_STEPS = 1000, 300  # that are measured
# A budget is good enough when a step takes at most this many times as long as under the fastest budget.
GOOD_ENOUGH = 1.02


def inspect_packing(
    planned: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    *,
    share_prompt: bool,
    ranks: Sequence[int],
    budgets: Sequence[int],
    model: str,
    removed_pairs: Mapping[str, int],
    truncated: Mapping[str, int],
    describe_pair: Callable[[int], str],
) -> dict[str, Any]:
    """Measures the plan of an epoch, whose costs must be FLOPs unless its rows are padded.

    `budgets` and the plan's own are compared on ranks[0] ranks. removed_pairs, truncated: counts by reason.
    describe_pair: returns where the user finds a pair.
    """
    plan = replace(planned, num_ranks=1, equal_rows=False)
    return {
        "model": model,
        "token_budget": plan.token_budget,
        "pairs_per_step": plan.pairs_per_step,
        "share_prompt": share_prompt and not plan.sizes.pads,
        "plan_fingerprint": plan.fingerprint,
        "statistics": _statistics(plan, lengths, shape, describe_pair),
        "balance": [rank_balance(replace(plan, num_ranks=number)) for number in ranks],
        "sweep": _compare_budgets(plan, budgets, ranks[0]),
        "removed_pairs": dict(removed_pairs),
        "truncated": dict(truncated),
    }


def _statistics(
    plan: PackingPlan, lengths: PairLengths, shape: ModelShape, describe_pair: Callable[[int], str]
) -> dict[str, Any]:
    steps, oversize = _spread_steps(plan, MAX_BALANCE_STEPS), plan.oversize_pairs.tolist()
    rows = [row for step in steps for row in plan.pack_step(step)[0]]
    scale = len(plan.order) / sum(map(len, rows))
    tokens, costs = np.array([plan.sizes.of_row(row) for row in rows]).T
    computed = round(tokens.sum() * scale)
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    flops = costs.sum() * scale
    towers = 2 * np.broadcast_to(lengths.tower, lengths.prompt.shape)  # both sequences of a batch have them
    if plan.sizes.pads:  # no shared prompts: what is computed beyond `unshared` is padding
        longest = np.array([plan.sizes.tokens[row].max() // 2 for row in rows])
        scored = np.array([lengths.completion_tokens()[row].sum() for row in rows])
        num_sequences = np.array([2 * len(row) for row in rows])
        flops = padded_flops(shape, longest, num_sequences, scored_tokens=scored) * scale
        flops += float(towers[np.concatenate(rows)].sum()) * scale
    by_sharing = 0 if plan.sizes.pads else unshared - computed
    padded, alone = [], lengths.padded_tokens()[plan.order]
    for microbatch_pairs in PADDED_MICROBATCH_PAIRS:
        begins = np.arange(0, len(alone), microbatch_pairs)
        num_pairs = np.diff(np.append(begins, len(alone)))
        longest = np.maximum.reduceat(alone, begins)  # of two sequences
        padded_tokens = int(longest @ num_pairs)
        of_layers = padded_flops(shape, longest // 2, 2 * num_pairs)  # every position runs through the head
        comparison = {
            "microbatch_pairs": microbatch_pairs,
            "tokens": padded_tokens,  # the plan's + saved by packing + saved by sharing
            "saved_by_packing_tokens": padded_tokens - computed - by_sharing,
            "times_computed_tokens": padded_tokens / computed,
            # The speed-up if both run at the same utilisation.
            "times_flops": float((of_layers + towers[plan.order].sum()) / flops),
        }
        padded.append(comparison)
    return {
        "num_pairs": len(plan.order),  # a pair counts as often as it is trained on
        "num_steps": len(plan),
        "steps_measured": len(steps),
        "num_rows": round(len(rows) * scale),
        "max_row_tokens": int(max(tokens.max(), plan.sizes.tokens[oversize].max(initial=0))),
        "budget_fill": _fill(tokens, plan.token_budget),
        "computed_tokens": computed,  # that the rows run through the model
        "unshared_tokens": unshared,  # both sequences of every pair, without padding
        "saved_by_sharing_tokens": by_sharing,
        "flops": float(flops),
        "padded": padded,
        "oversize_pairs": {describe_pair(pair): int(plan.sizes.tokens[pair]) for pair in oversize},
    }


def rank_balance(plan: PackingPlan, *, max_steps: int = MAX_BALANCE_STEPS) -> dict[str, Any]:
    """Measures how evenly the costs of a plan are spread over its ranks, in at most `max_steps` steps."""
    steps, of_row = _spread_steps(plan, max_steps), plan.sizes.of_row
    planned = [plan.pack_step(step) for step in steps]
    costs = np.array([[sum(of_row(row).cost for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], like costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    is_full = np.diff(plan.step_begins)[steps] == plan.pairs_per_step
    counted = is_full if is_full.any() else ~is_full
    return {
        "num_ranks": plan.num_ranks,
        "steps_measured": len(planned),
        "rows_per_step": float(num_rows.sum(axis=1).mean()),
        "max_rows_per_rank": int(num_rows.max()),
        "mean_rows_of_fullest_rank": float(num_rows.max(axis=1).mean()),
        "slowest_over_mean": float(slowest.sum() / mean.sum()),  # time / time with perfect balance
        "worst_full_step_slowest_over_mean": float((slowest / mean)[counted].max()),
        "steps_with_idle_ranks": int((num_rows.min(axis=1) == 0).sum()),
    }


def _compare_budgets(plan: PackingPlan, budgets: Sequence[int], num_ranks: int) -> list[dict[str, Any]]:
    """Returns the outcome of each budget, and of that of `plan`, ascending. Steps have the same pairs under
    each. The time of a step, in tokens, is its tokens / `num_ranks`, plus ROW_OVERHEAD_TOKENS for each row of
    the rank with the most rows. The best is the smallest good one, if possible one that no pair exceeds."""
    sizes, steps, outcomes = plan.sizes, _spread_steps(plan, MAX_BUDGET_STEPS), []
    drawn = sizes.tokens[np.unique(plan.order)]
    for budget in sorted({plan.token_budget, *budgets}):
        under = replace(plan, token_budget=budget)
        tokens = np.array([sizes.of_row(row).tokens for step in steps for row in under.pack_step(step)[0]])
        balance = rank_balance(replace(under, num_ranks=num_ranks), max_steps=MAX_BUDGET_STEPS)
        rows_of_fullest = balance["mean_rows_of_fullest_rank"]
        outcome = {
            "token_budget": budget,
            "rows_per_step": len(tokens) / len(steps),  # on one rank
            "budget_fill": _fill(tokens, budget),
            "max_row_tokens": int(tokens.max()),  # which memory has to hold
            "num_oversize_pairs": int((drawn > budget).sum()),
            "relative_time": float(
                tokens.sum() / len(steps) / num_ranks + ROW_OVERHEAD_TOKENS * rows_of_fullest
            ),
        }
        outcomes.append(outcome)
    fastest = min(outcome["relative_time"] for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome["relative_time"] <= GOOD_ENOUGH * fastest]
    best = next((outcome for outcome in good if outcome["num_oversize_pairs"] == 0), good[0])
    for outcome in outcomes:
        outcome.update(relative_time=outcome["relative_time"] / fastest, is_best=outcome is best)
    return outcomes


def _fill(tokens: np.ndarray[Any, Any], budget: int) -> float:
    """Returns the mean over rows of tokens / budget; an oversize row counts as full."""
    return float(np.minimum(tokens / budget, 1.0).mean())


def _spread_steps(plan: PackingPlan, max_steps: int) -> list[int]:
    steps = np.linspace(0, len(plan) - 1, min(len(plan), max_steps)).round()
    return [int(step) for step in np.unique(steps)]
