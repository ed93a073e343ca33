"""The packing report: how many tokens packed rows (forward passes) compute, and how many packing saves.

`dpopack inspect-packing` prints the report; packing_report.json contains it.

Lengths are in tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dpo_pack.packing.bin_packing import PADDED, Row
from dpo_pack.packing.budget_advice import BudgetOutcome, Recommendation, recommend, sweep_budgets
from dpo_pack.packing.epoch_order import NO_PAIR
from dpo_pack.packing.flops import ModelShape
from dpo_pack.packing.lengths import IntArray, PairLengths
from dpo_pack.packing.plan import PackingPlan, PlanSettings
from dpo_pack.packing.statistics import (
    LengthSummary,
    PackingStatistics,
    RankBalance,
    length_summary,
    packing_statistics,
    rank_balance,
)
from dpo_pack.system.errors import DataError

# The report shows a picture of this many rows of the first step.
DRAWN_ROWS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one kind in a row that the report draws."""

    kind: str  # prompt (the shared prefix), chosen, rejected, merged (a group of several pairs), padding
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRow:
    """A picture of one row of the first step: its segments from left to right."""

    num_pairs: int
    tokens: int
    segments: tuple[Segment, ...]


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
    lengths: tuple[LengthSummary, ...]
    balance: tuple[RankBalance, ...]
    sweep: tuple[BudgetOutcome, ...]  # empty if no budgets are compared
    recommendation: Recommendation | None
    drawn_rows: tuple[DrawnRow, ...]
    removed_pairs: Mapping[str, int]  # pairs dropped before packing, by reason
    truncated: Mapping[str, int]  # pairs shortened before packing, by the part that was cut


def inspect_packing(
    planned: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    settings: PlanSettings,
    *,
    order: IntArray,
    share_prompt: bool,
    ranks: Sequence[int] = (1,),
    budgets: Sequence[int] = (),
    model: str = "",
    removed_pairs: Mapping[str, int] | None = None,
    truncated: Mapping[str, int] | None = None,
    describe_pair: Callable[[int], str] = "pair {}".format,
) -> PackingReport:
    """Measures the plan that `settings` made of the epoch `order` ([E] pairs, from `epoch_order`).

    The algorithm PADDED makes padded rows, which share no prompts. `budgets` are compared with each other and
    with the budget of `settings`; the epoch is planned again for each of them.
    removed_pairs, truncated: counts by reason. describe_pair: returns where the user finds a pair, for
    instance "pairs.jsonl row 17". Raises DataError if there are no pairs.
    """
    removed_pairs = dict(removed_pairs or {})
    if len(order) == 0:
        if len(lengths.prompt):
            raise DataError(NO_PAIR)
        reasons = ", ".join(f"{reason}: {count}" for reason, count in removed_pairs.items())
        raise DataError(
            f"data.train: no pair is left to pack ({reasons or 'none was read'}); "
            "check the files, their format and data.max_length"
        )
    share_prompt = share_prompt and settings.algorithm != PADDED
    plan = replace(planned, num_ranks=1, equal_rows=False)
    sizes = plan.sizes

    def plan_under(token_budget: int) -> PackingPlan:
        if token_budget == settings.token_budget:
            return plan
        changed = replace(settings, token_budget=token_budget)
        if settings.rows_per_step is not None:  # so that a step has about as many pairs under each budget
            rows = round(settings.rows_per_step * settings.token_budget / token_budget)
            changed = replace(changed, rows_per_step=max(rows, 1))
        return changed.plan(sizes.tokens, order=order, row_costs=sizes.costs, merging=sizes.merging)

    sweep = sweep_budgets(plan_under, [settings.token_budget, *budgets], ranks) if budgets else ()
    return PackingReport(
        model=model,
        algorithm=settings.algorithm,
        token_budget=settings.token_budget,
        pairs_per_step=settings.pairs_per_step if settings.rows_per_step is None else None,
        rows_per_step=settings.rows_per_step,
        share_prompt=share_prompt,
        merge_prompts=sizes.merging is not None,
        plan_fingerprint=plan.fingerprint,
        statistics=packing_statistics(
            plan, lengths, shape, order=order, share_prompt=share_prompt, describe_pair=describe_pair
        ),
        lengths=tuple(
            length_summary(name, of_pairs[order])
            for name, of_pairs in (
                ("prompt", lengths.prompt),
                ("chosen", lengths.chosen),
                ("rejected", lengths.rejected),
                ("pair", sizes.tokens),
            )
        ),
        balance=tuple(rank_balance(replace(plan, num_ranks=number)) for number in ranks),
        sweep=sweep,
        recommendation=recommend(sweep) if sweep else None,
        drawn_rows=tuple(
            draw_row(plan, lengths, row, share_prompt) for row in plan.pack_step(0)[0][:DRAWN_ROWS]
        ),
        removed_pairs=removed_pairs,
        truncated=dict(truncated or {}),
    )


def draw_row(plan: PackingPlan, lengths: PairLengths, row: Row, share_prompt: bool) -> DrawnRow:
    """Returns what a picture of one row of the plan shows: its prompts, completions and padding in order."""
    segments: list[tuple[str, int]] = []
    for group in plan.sizes.groups_in(row):
        if len(group) > 1:
            segments.append(("merged", plan.tokens_in(group)))
            continue
        pair = int(group[0])
        prompt, chosen, rejected = (int(a[pair]) for a in (lengths.prompt, lengths.chosen, lengths.rejected))
        if share_prompt:
            shared = int(lengths.shared[pair])
            common = shared - prompt  # number of equal first tokens of both completions
            segments += [("prompt", shared), ("chosen", chosen - common), ("rejected", rejected - common)]
            continue
        segments += [("prompt", prompt), ("chosen", chosen), ("prompt", prompt), ("rejected", rejected)]
        if plan.algorithm == PADDED:
            longest = int(plan.row_tokens[row].max())
            segments.append(("padding", longest - 2 * prompt - chosen - rejected))
    return DrawnRow(
        num_pairs=len(row),
        tokens=plan.tokens_in(row),
        segments=tuple(Segment(kind=kind, tokens=tokens) for kind, tokens in segments if tokens),
    )


def to_json(report: PackingReport) -> str:
    """Returns the report as JSON text with the names and the nesting of the dataclasses."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
