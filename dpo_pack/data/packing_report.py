"""What packing and sharing will compute, and what they save: the content of packing_report.json.

Lengths are in tokens.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dpo_pack.data.budget_advice import BudgetOutcome, Recommendation, recommend, sweep_budgets
from dpo_pack.data.epoch_order import NO_PAIR
from dpo_pack.data.flops import ModelShape, pair_flops
from dpo_pack.data.lengths import IntArray, PairLengths
from dpo_pack.data.merging import PromptMerging
from dpo_pack.data.packing import PackingPlan, PlanSettings
from dpo_pack.data.packing_numbers import (
    LengthSummary,
    PackingStatistics,
    RankBalance,
    packing_statistics,
    rank_balance,
    summarize_lengths,
)
from dpo_pack.data.step_rows import PADDED
from dpo_pack.errors import DataError

# Rows of the first step that are drawn.
DRAWN_ROWS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a row to draw."""

    kind: str  # prompt (whatever is shared), chosen, rejected, merged (a group of several pairs), padding
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRow:
    """One row of the first step, from left to right."""

    num_pairs: int
    tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """Everything `inspect-packing` shows, and the content of packing_report.json."""

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
    sweep: tuple[BudgetOutcome, ...]  # empty where no budgets were asked for
    recommendation: Recommendation | None
    drawn_rows: tuple[DrawnRow, ...]
    removed_pairs: Mapping[str, int]  # dropped before packing, by reason
    truncated: Mapping[str, int]  # kept, but shortened before packing, by what was cut


def inspect_packing(
    lengths: PairLengths,
    shape: ModelShape,
    settings: PlanSettings,
    *,
    order: IntArray,
    share_prompt: bool,
    merging: PromptMerging | None = None,
    ranks: Sequence[int] = (1,),
    budgets: Sequence[int] = (),
    model: str = "",
    removed_pairs: Mapping[str, int] | None = None,
    truncated: Mapping[str, int] | None = None,
    describe_pair: Callable[[int], str] = "pair {}".format,
) -> PackingReport:
    """Plan the epoch `order` ([E] pairs, from `epoch_order`) and measure it.

    The algorithm PADDED measures padded rows, which share nothing. `budgets` are compared with each other
    and the one of `settings`. removed_pairs, truncated: counts by reason. describe_pair: where the user finds
    a pair, "pairs.jsonl row 17". Raises DataError without pairs.
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
    is_padded = settings.algorithm == PADDED
    share_prompt = share_prompt and not is_padded
    tokens = lengths.padded_tokens() if is_padded else lengths.row_tokens(share_prompt=share_prompt)
    costs = tokens.astype(float) if is_padded else pair_flops(shape, lengths, share_prompt=share_prompt)

    @functools.cache
    def plan_on_one_rank(token_budget: int) -> PackingPlan:
        cut = replace(settings, token_budget=token_budget)
        if settings.rows_per_step is not None:  # so that a step has about as many pairs
            rows = round(settings.rows_per_step * settings.token_budget / token_budget)
            cut = replace(cut, rows_per_step=max(rows, 1))
        return cut.plan(tokens, order=order, row_costs=costs, merging=merging)

    def make_plan(token_budget: int, num_ranks: int) -> PackingPlan:
        return replace(plan_on_one_rank(token_budget), num_ranks=num_ranks)

    plan = make_plan(settings.token_budget, 1)
    sweep = sweep_budgets(make_plan, [settings.token_budget, *budgets], ranks) if budgets else ()
    return PackingReport(
        model=model,
        algorithm=settings.algorithm,
        token_budget=settings.token_budget,
        pairs_per_step=settings.pairs_per_step if settings.rows_per_step is None else None,
        rows_per_step=settings.rows_per_step,
        share_prompt=share_prompt,
        merge_prompts=merging is not None,
        plan_fingerprint=plan.fingerprint,
        statistics=packing_statistics(
            plan, lengths, shape, order=order, share_prompt=share_prompt, describe_pair=describe_pair
        ),
        lengths=(
            summarize_lengths("prompt", lengths.prompt[order]),
            summarize_lengths("chosen", lengths.chosen[order]),
            summarize_lengths("rejected", lengths.rejected[order]),
            summarize_lengths("pair", tokens[order]),
        ),
        balance=tuple(rank_balance(make_plan(settings.token_budget, number)) for number in ranks),
        sweep=sweep,
        recommendation=recommend(sweep) if sweep else None,
        drawn_rows=tuple(_draw(plan, lengths, row, share_prompt) for row in plan[0][0][:DRAWN_ROWS]),
        removed_pairs=removed_pairs,
        truncated=dict(truncated or {}),
    )


def _draw(plan: PackingPlan, lengths: PairLengths, row: IntArray, share_prompt: bool) -> DrawnRow:
    segments = []
    for group in plan.sizes.groups_in(row):
        pair = int(group[0])
        if len(group) > 1:
            segments.append(Segment(kind="merged", tokens=plan.sizes.measure(group)[0]))
            continue
        prompt, shared = int(lengths.prompt[pair]), int(lengths.shared[pair])
        ends = (prompt + int(lengths.chosen[pair]), prompt + int(lengths.rejected[pair]))
        begins = (shared, shared) if share_prompt else (prompt, prompt)
        repeats = 0 if share_prompt else prompt
        padding = int(plan.row_tokens[row].max()) - sum(ends) if plan.algorithm == PADDED else 0
        segments += [
            Segment(kind="prompt", tokens=begins[0]),
            Segment(kind="chosen", tokens=ends[0] - begins[0]),
            Segment(kind="prompt", tokens=repeats),
            Segment(kind="rejected", tokens=ends[1] - begins[1]),
            Segment(kind="padding", tokens=padding),
        ]
    drawn = tuple(segment for segment in segments if segment.tokens)
    return DrawnRow(num_pairs=len(row), tokens=plan.tokens_in(row), segments=drawn)


def to_json(report: PackingReport) -> str:
    """The report as JSON text; names and nesting are those of the dataclasses."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
