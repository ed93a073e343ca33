"""The packing report: how many tokens packed rows (forward passes) compute, and how many packing saves.

A report is a dict, as packing_report.json has it; `render_packing` prints it, pages.py makes a page of it.
Lengths are in tokens; FLOPs are those of training. Rows and balance are measured on steps that are spread
evenly over the epoch, the first and the last included; what is counted on them (rows, tokens, FLOPs) is
scaled to the epoch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from dpo_pack.data.sources import Data
from dpo_pack.data.store import pair_lengths
from dpo_pack.packing.bin_packing import ROW_OVERHEAD_TOKENS
from dpo_pack.packing.lengths import ModelShape, PairLengths, padded_flops
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.reports.tables import Cells, cells_of, terminal_table
from dpo_pack.system import ranks as processes
from dpo_pack.system.files import Json
from dpo_pack.system.process import counted
from dpo_pack.training.batches import OfflineSource

# Pairs in a micro-batch of padded training, which pads to the longest sequence of the micro-batch.
PADDED_MICROBATCH_PAIRS = (1, 2, 4, 8, 16)
MAX_STEPS = 500  # that are measured
# A budget is good enough when a step takes at most this many times as long as under the fastest budget.
GOOD_ENOUGH = 1.02
# The counts of shortened pairs in the summary of a source.
TRUNCATION_COUNTS = ("prompt_truncated", "completions_truncated", "eos_lost")


def packing_report(
    source: OfflineSource,
    data: Data,
    shape: ModelShape,
    *,
    model: str,
    num_ranks: Sequence[int] = (),
    budgets: Sequence[int] = (4096, 8192, 16384),
) -> Json:
    """Reports how the first epoch of `source` fills rows, by ranks (none: this run's) and token budgets."""
    table, sources = data.train, data.report["train"]["sources"]
    names = [entry["name"] for entry in sources]
    left_out = {"removed_pairs": Counter[str](), "truncated": Counter[str]()}
    for entry in sources:
        left_out["removed_pairs"].update({why: dropped["rows"] for why, dropped in entry["dropped"].items()})
        left_out["truncated"].update({what: entry[what] for what in TRUNCATION_COUNTS if entry.get(what)})
    report = inspect_packing(
        source.first_plan,
        pair_lengths(table, shape),
        shape,
        ranks=num_ranks or (processes.num_ranks(),),
        budgets=budgets,
        describe_pair=lambda pair: f"{names[table.source_indices[pair]]} row {table.row_numbers[pair]}",
    )
    share_prompt = source.builder.share_prompt and source.builder.is_packed
    return {"model": model, "share_prompt": share_prompt, **report, **left_out}


def inspect_packing(
    planned: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    *,
    ranks: Sequence[int],
    budgets: Sequence[int],
    describe_pair: Callable[[int], str],
) -> Json:
    """Measures the plan of an epoch, whose costs must be FLOPs unless its rows are padded. `budgets` and the
    plan's own are compared on ranks[0] ranks. describe_pair: returns where the user finds a pair."""
    plan = replace(planned, num_ranks=1, equal_rows=False)
    return {
        "token_budget": plan.token_budget,
        "pairs_per_step": plan.pairs_per_step,
        "plan_fingerprint": plan.fingerprint,
        "statistics": _statistics(plan, lengths, shape, describe_pair),
        "balance": [rank_balance(replace(plan, num_ranks=number)) for number in ranks],
        "sweep": _compare_budgets(plan, budgets, ranks[0]),
    }


def _statistics(
    plan: PackingPlan, lengths: PairLengths, shape: ModelShape, describe_pair: Callable[[int], str]
) -> Json:
    steps, sizes, oversize = plan.spread_steps(MAX_STEPS), plan.sizes, plan.oversize_pairs.tolist()
    rows = [row for step in steps for row in plan.pack_step(step)[0]]
    scale = len(plan.order) / sum(map(len, rows))
    tokens, costs = np.array([sizes.of_row(row) for row in rows]).T
    computed, between_pairs = round(tokens.sum() * scale), 0
    if sizes.beginnings is not None:
        between_pairs = round((sizes.tokens[np.concatenate(rows)].sum() - tokens.sum()) * scale)
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    flops = costs.sum() * scale
    towers = 2 * np.broadcast_to(lengths.tower, lengths.prompt.shape)  # both sequences of a batch have them
    if sizes.pads:  # no shared prompts: what is computed beyond `unshared` is padding
        longest = np.array([sizes.tokens[row].max() // 2 for row in rows])
        scored = np.array([lengths.completion_tokens()[row].sum() for row in rows])
        num_sequences = np.array([2 * len(row) for row in rows])
        flops = padded_flops(shape, longest, num_sequences, scored=scored) * scale
        flops += float(towers[np.concatenate(rows)].sum()) * scale
    by_sharing = 0 if sizes.pads else unshared - computed
    padded, alone = [], lengths.row_tokens(pads=True)[plan.order]
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
        "max_row_tokens": int(max(tokens.max(), sizes.tokens[oversize].max(initial=0))),
        "budget_fill": _fill(tokens, plan.token_budget),
        "computed_tokens": computed,  # that the rows run through the model
        "unshared_tokens": unshared,  # both sequences of every pair, without padding
        "saved_by_sharing_tokens": by_sharing,
        "shared_between_pairs_tokens": between_pairs,  # of these; the others are shared within pairs
        "flops": float(flops),
        "padded": padded,
        "oversize_pairs": {describe_pair(pair): int(sizes.tokens[pair]) for pair in oversize},
    }


def rank_balance(plan: PackingPlan) -> Json:
    """Measures how evenly the costs of a plan are spread over its ranks."""
    steps, of_row = plan.spread_steps(MAX_STEPS), plan.sizes.of_row
    planned = [plan.pack_step(step) for step in steps]
    costs = np.array([[sum(of_row(row).cost for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], like costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    is_full = np.array([len(plan.pairs(step)) == plan.pairs_per_step for step in steps])
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


def _compare_budgets(plan: PackingPlan, budgets: Sequence[int], num_ranks: int) -> list[Json]:
    """Returns the outcome of each budget, and of that of `plan`, ascending. Steps have the same pairs under
    each. The time of a step, in tokens, is its tokens / `num_ranks`, plus ROW_OVERHEAD_TOKENS for each row of
    the rank with the most rows. The best is the smallest good one, if possible one that no pair exceeds."""
    sizes, steps, outcomes = plan.sizes, plan.spread_steps(MAX_STEPS), []
    drawn = sizes.tokens[np.unique(plan.order)]
    for budget in sorted({plan.token_budget, *budgets}):
        under = replace(plan, token_budget=budget)
        tokens = np.array([sizes.of_row(row).tokens for step in steps for row in under.pack_step(step)[0]])
        rows_of_fullest = rank_balance(replace(under, num_ranks=num_ranks))["mean_rows_of_fullest_rank"]
        time = tokens.sum() / len(steps) / num_ranks + ROW_OVERHEAD_TOKENS * rows_of_fullest
        outcome = {
            "token_budget": budget,
            "rows_per_step": len(tokens) / len(steps),  # on one rank
            "budget_fill": _fill(tokens, budget),
            "max_row_tokens": int(tokens.max()),  # which memory has to hold
            "num_oversize_pairs": int((drawn > budget).sum()),
            "relative_time": float(time),
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


_OVERSIZE_PAIRS_SHOWN = 5


def render_packing(report: Json, console: Console) -> None:
    """Prints the report as tables for 80 columns."""
    console.print(f"{headline(report)}; {rows_sentence(report)}")
    for title, cells in tables(report).items():
        console.print(terminal_table(title, cells))
    if report["statistics"]["oversize_pairs"]:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


def headline(report: Json) -> str:
    """Returns the numbers of pairs and steps."""
    ours, full = report["statistics"], report["pairs_per_step"]
    last = ours["num_pairs"] - (ours["num_steps"] - 1) * full
    pairs, steps = counted(ours["num_pairs"], "pair"), counted(ours["num_steps"], "step")
    return f"{pairs} in {steps} of {full:,} (the last of {last:,})"


def rows_sentence(report: Json) -> str:
    """Returns the settings that form the rows, and how many and how full they are on one rank."""
    ours, sharing = report["statistics"], "not shared"
    if report["share_prompt"]:
        between = ours.get("shared_between_pairs_tokens", 0)  # a report of an earlier release has none
        sharing = f"shared ({ours['computed_tokens']:,} of {ours['unshared_tokens']:,} tokens are computed; "
        sharing += (
            f"{ours['saved_by_sharing_tokens'] - between:,} are shared within pairs, {between:,} between)"
        )
    num_steps = ours["num_steps"]
    return (
        f"rows of up to {report['token_budget']:,} tokens, prompts {sharing}; on average a step has "
        f"{ours['num_rows'] / num_steps:,.1f} rows and {ours['computed_tokens'] / num_steps:,.1f} tokens; "
        f"rows are {ours['budget_fill']:.1%} full, the longest has {ours['max_row_tokens']:,} tokens "
        f"(measured on {counted(ours['steps_measured'], 'step')})."
    )


def oversize_sentence(report: Json) -> str:
    """Returns sentences about the pairs above the token budget, with advice."""
    oversize = report["statistics"]["oversize_pairs"]
    shown = [f"{place}: {tokens:,} tokens" for place, tokens in oversize.items()][:_OVERSIZE_PAIRS_SHOWN]
    more = f"; and {len(oversize) - len(shown):,} more" if len(oversize) > len(shown) else ""
    return (
        f"Longer than packing.token_budget ({report['token_budget']:,}), so that each is a row of its own: "
        f"{counted(len(oversize), 'pair')}, {'; '.join(shown)}{more}. Raise packing.token_budget to at least "
        f"{max(oversize.values()):,} if memory allows, or lower data.max_length."
    )


def tables(report: Json) -> dict[str, Cells]:
    """Returns the tables of the report by title. The best token budget is highlighted and says so."""
    ours, balance, sweep = report["statistics"], report["balance"], report["sweep"]
    padded = [
        {
            **one,
            "packing": one["saved_by_packing_tokens"] / one["tokens"],
            "sharing": ours["saved_by_sharing_tokens"] / one["tokens"],
        }
        for one in ours["padded"]
    ]
    of_padded = {
        "pairs a micro-batch": "{[microbatch_pairs]}",
        "tokens": "{[tokens]:,}",
        "by packing": "{[packing]:.1%}",
        "by sharing": "{[sharing]:.1%}",
        "x tokens": "{[times_computed_tokens]:.2f}",
        "x FLOPs": "{[times_flops]:.2f}",
    }
    of_balance = {
        "ranks": "{[num_ranks]:,}",
        "rows a step": "{[rows_per_step]:,.1f}",
        "most a rank": "{[max_rows_per_rank]:,}",
        "slowest / mean": "{[slowest_over_mean]:.3f}",
        "worst full step": "{[worst_full_step_slowest_over_mean]:.3f}",
        "idle steps": "{[steps_with_idle_ranks]:,}",
    }
    of_budgets = {
        "budget": "{[token_budget]:,}",
        "rows a step": "{[rows_per_step]:,.1f}",
        "longest row": "{[max_row_tokens]:,}",
        "fill": "{[budget_fill]:.1%}",
        "too long": "{[num_oversize_pairs]:,}",
        "time": "{[relative_time]:.3f}",
        "": "{[mark]}",
    }
    marked = [one | {"mark": "best" if one["is_best"] else ""} for one in sweep]
    best = next(number for number, one in enumerate(sweep) if one["is_best"])
    steps = f"{balance[0]['steps_measured']:,} of {ours['num_steps']:,} steps"
    found = {
        f"{ours['computed_tokens']:,} tokens an epoch, against padded training": cells_of(padded, of_padded),
        f"balance of ranks, by FLOPs, over {steps}": cells_of(balance, of_balance),
        "token budgets": cells_of(marked, of_budgets)._replace(picked=best),
    }
    if left_out := report["removed_pairs"] | report["truncated"]:
        of_sides = ("completions_truncated", "eos_lost")  # a pair has two
        words = {reason: "completion" if reason in of_sides else "pair" for reason in left_out}
        counts = [(reason, counted(count, words[reason])) for reason, count in left_out.items()]
        found["dropped or truncated before packing"] = Cells(("reason", "number"), counts)
    return found
