"""Measurements of a packing plan: rows, tokens, FLOPs, balance, and padded training to compare with.

Lengths are in tokens. FLOPs are of training, see flops.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.data.flops import (
    TRAINING_PASSES,
    ModelShape,
    padded_flops,
    pair_flops,
    sequence_flops,
    unread_positions,
)
from dpo_pack.data.lengths import AnyIntArray, IntArray, PairLengths
from dpo_pack.data.packing import PackingPlan
from dpo_pack.data.step_rows import PADDED

# Micro-batches of the padded training to compare with: pairs padded to the longest of their sequences.
PADDED_MICROBATCH_PAIRS = (1, 2, 4, 8, 16)
HISTOGRAM_BINS = 24
# Balance is measured on at most so many steps, evenly spread over the epoch; the report says how many.
MAX_BALANCE_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """One length over the pairs of an epoch. The last bin of the histogram also holds all that is longer."""

    name: str
    mean: float
    median: int
    p90: int
    p99: int
    max: int
    histogram_edges: tuple[float, ...]  # bins + 1, evenly from 0 to p99
    histogram_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, least and most of a quantity over the steps of an epoch."""

    mean: float
    min: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedComparison:
    """The same epoch in padded micro-batches: tokens = computed here + saved by packing + by sharing.

    Its output head sees every position, ours the completions.
    """

    microbatch_pairs: int
    tokens: int
    saved_by_packing_tokens: int
    times_computed_tokens: float  # tokens / the tokens computed here
    flops: float  # of the epoch
    times_flops: float  # flops / the FLOPs here: the speed-up where both run at the same utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsSummary:
    """Estimated FLOPs of the epoch's training steps, all ranks together, and which part goes where."""

    total: float
    per_pair: float
    token_part: float  # weights that multiply every token; the three parts add up to 1
    head_part: float
    attention_part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OversizePair:
    """A pair that exceeds the token budget and gets a row of its own."""

    pair: int
    tokens: int
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStatistics:
    """One epoch on one rank."""

    num_pairs: int  # copies included
    num_steps: int
    num_rows: int
    rows_per_step: Spread
    pairs_per_step: Spread
    tokens_per_step: Spread
    max_row_tokens: int
    budget_fill: float  # mean over rows of tokens / budget; an oversize row counts as full
    computed_tokens: int  # what the rows run through the model
    head_tokens: int  # of those, the positions that meet the output head
    unshared_tokens: int  # both sequences of every pair, prompts twice, no padding
    saved_by_sharing_tokens: int  # of prompts, merged ones included
    merged_pairs: int  # pairs that lie in a group with another pair of their prompt
    flops: FlopsSummary
    padded: tuple[PaddedComparison, ...]
    oversize_pairs: tuple[OversizePair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """How evenly the steps of an epoch load a number of ranks, by the plan's costs."""

    num_ranks: int
    steps_measured: int
    rows_per_step: Spread
    max_rows_per_rank: int
    mean_rows_of_fullest_rank: float
    slowest_over_mean: float  # time of all steps against perfectly balanced ones
    worst_full_step_slowest_over_mean: float  # of any step, where none is full
    steps_with_idle_ranks: int  # fewer pairs than ranks


def packing_statistics(
    plan: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    *,
    order: IntArray,
    share_prompt: bool,
    describe_pair: Callable[[int], str] = "pair {}".format,
) -> PackingStatistics:
    """Measure every row of a plan, on one rank, made from `lengths` and `order`; at least one pair.

    Padded micro-batches are cut from `order`: scope epoch has put `plan.order` into that of its rows.
    """
    steps = [[row for rows in step for row in rows] for step in plan]
    row_tokens = [[plan.tokens_in(row) for row in rows] for rows in steps]
    tokens = np.array([count for step in row_tokens for count in step])
    computed = int(tokens.sum())
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    # A padded plan shares nothing: there, what separates the two is padding.
    by_sharing = 0 if plan.algorithm == PADDED else unshared - computed
    groups = [] if plan.sizes.merging is None else _merged_groups(plan, steps)
    head_tokens = _head_tokens(plan, lengths, groups)
    flops = _flops(plan, lengths, shape, steps, groups, share_prompt)
    parts = [
        TRAINING_PASSES
        * 2
        * (
            shape.token_weights * computed
            - shape.last_block_weights * _unread(plan, lengths, groups, share_prompt)
        ),
        TRAINING_PASSES * 2 * shape.head_weights * head_tokens,
    ]
    return PackingStatistics(
        num_pairs=len(plan.order),
        num_steps=len(plan),
        num_rows=len(tokens),
        rows_per_step=_spread([len(step) for step in row_tokens]),
        pairs_per_step=_spread(np.diff(plan.step_begins).tolist()),
        tokens_per_step=_spread([sum(step) for step in row_tokens]),
        max_row_tokens=int(tokens.max()),
        budget_fill=float(np.minimum(tokens / plan.token_budget, 1.0).mean()),
        computed_tokens=computed,
        head_tokens=head_tokens,
        unshared_tokens=unshared,
        saved_by_sharing_tokens=by_sharing,
        merged_pairs=sum(map(len, groups)),
        flops=FlopsSummary(
            total=flops,
            per_pair=flops / len(plan.order),
            token_part=parts[0] / flops,
            head_part=parts[1] / flops,
            attention_part=1.0 - sum(parts) / flops,
        ),
        padded=tuple(
            _padded_comparison(lengths, order, pairs, shape, computed, by_sharing, flops)
            for pairs in PADDED_MICROBATCH_PAIRS
        ),
        oversize_pairs=tuple(
            OversizePair(pair=pair, tokens=int(plan.row_tokens[pair]), place=describe_pair(pair))
            for pair in plan.oversize_pairs.tolist()
        ),
    )


def _merged_groups(plan: PackingPlan, steps: Sequence[Sequence[IntArray]]) -> list[IntArray]:
    """Groups of at least two pairs, in all rows."""
    rows = (row for rows in steps for row in rows)
    return [group for row in rows for group in plan.sizes.groups_in(row) if len(group) > 1]


def _head_tokens(plan: PackingPlan, lengths: PairLengths, groups: Sequence[IntArray]) -> int:
    """Completion tokens, those of merged pairs once."""
    each = lengths.completion_tokens()
    total = int(each[plan.order].sum())
    for group in groups:
        assert plan.sizes.merging is not None
        total += plan.sizes.merging.measure(group).scored_tokens - int(each[group].sum())
    return total


def _unread(plan: PackingPlan, lengths: PairLengths, groups: Sequence[IntArray], share_prompt: bool) -> float:
    """Tokens that predict no scored one, as far as the last layer leaves them out."""
    if plan.algorithm == PADDED:
        return 0.0
    each = unread_positions(lengths, share_prompt=share_prompt)
    total = float(each[plan.order].sum())
    for group in groups:
        assert plan.sizes.merging is not None
        total += plan.sizes.merging.measure(group).unread_positions - float(each[group].sum())
    return total


def _flops(
    plan: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    steps: Sequence[Sequence[IntArray]],
    groups: Sequence[IntArray],
    share_prompt: bool,
) -> float:
    if plan.algorithm == PADDED:
        rows = [row for rows in steps for row in rows]
        longest = np.array([int(plan.row_tokens[row].max()) // 2 for row in rows])
        scored = np.array([int(lengths.completion_tokens()[row].sum()) for row in rows], dtype=np.float64)
        sequences = 2 * np.array([len(row) for row in rows])
        body = ModelShape(token_weights=shape.token_weights, head_weights=0, attention=shape.attention)
        no_area = [np.zeros(len(rows))] * len(shape.attention)
        head = sequence_flops(shape, tokens=np.zeros(len(rows)), scored_tokens=scored, areas=no_area)
        return padded_flops(body, longest, sequences) + TRAINING_PASSES * float(head.sum())
    each = pair_flops(shape, lengths, share_prompt=share_prompt)
    total = float(each[plan.order].sum())
    for group in groups:
        total += plan.sizes.measure(group)[1] - float(each[group].sum())
    return total


def _padded_comparison(
    lengths: PairLengths,
    order: IntArray,
    microbatch_pairs: int,
    shape: ModelShape,
    computed: int,
    by_sharing: int,
    flops: float,
) -> PaddedComparison:
    """Padded DPO: each micro-batch is 2 sequences a pair, all as long as the longest."""
    begins = np.arange(0, len(order), microbatch_pairs)
    num_pairs = np.diff(np.append(begins, len(order)))
    longest = np.maximum.reduceat(lengths.padded_tokens()[order], begins)  # of two sequences
    tokens = int((longest * num_pairs).sum())
    theirs = padded_flops(shape, longest // 2, 2 * num_pairs)
    return PaddedComparison(
        microbatch_pairs=microbatch_pairs,
        tokens=tokens,
        saved_by_packing_tokens=tokens - computed - by_sharing,
        times_computed_tokens=tokens / computed,
        flops=theirs,
        times_flops=theirs / flops,
    )


def rank_balance(plan: PackingPlan, *, max_steps: int = MAX_BALANCE_STEPS) -> RankBalance:
    """Measure the ranks' loads over at most `max_steps` steps, the first and the last among them."""
    steps = np.unique(np.linspace(0, len(plan) - 1, min(len(plan), max_steps)).round().astype(np.int64))
    planned = [plan[step] for step in steps.tolist()]
    costs = np.array([[sum(plan.cost_of(row) for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], as costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    is_full = np.array([plan.is_full(step) for step in steps.tolist()])
    counted = is_full if is_full.any() else ~is_full
    return RankBalance(
        num_ranks=plan.num_ranks,
        steps_measured=len(planned),
        rows_per_step=_spread(num_rows.sum(axis=1).tolist()),
        max_rows_per_rank=int(num_rows.max()),
        mean_rows_of_fullest_rank=float(num_rows.max(axis=1).mean()),
        slowest_over_mean=float(slowest.sum() / mean.sum()),
        worst_full_step_slowest_over_mean=float((slowest / mean)[counted].max()),
        steps_with_idle_ranks=int((num_rows.min(axis=1) == 0).sum()),
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(mean=sum(values) / len(values), min=min(values), max=max(values))


def summarize_lengths(name: str, lengths: AnyIntArray) -> LengthSummary:
    """Percentiles (lengths that occur, not interpolated) and histogram of [n] lengths, n > 0."""
    median, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(np.int64).tolist()
    longest_bin = max(p99, 1)
    counts, edges = np.histogram(np.minimum(lengths, longest_bin), HISTOGRAM_BINS, range=(0, longest_bin))
    return LengthSummary(
        name=name,
        mean=float(np.mean(lengths)),
        median=median,
        p90=p90,
        p99=p99,
        max=int(np.max(lengths)),
        histogram_edges=tuple(edges.tolist()),
        histogram_counts=tuple(counts.tolist()),
    )
