"""What packing and sharing will compute, and what they save: the numbers behind packing_report.json.

Lengths are in tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dpo_pack.data.packing import PADDED, AnyIntArray, IntArray, PackingPlan, PairLengths, plan_epoch
from dpo_pack.errors import DataError

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
    """The same epoch in padded micro-batches: tokens = computed here + saved by packing + by sharing."""

    microbatch_pairs: int
    tokens: int
    saved_by_packing_tokens: int
    times_computed_tokens: float  # tokens / the tokens computed here


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
    tokens_per_step: Spread
    max_row_tokens: int
    budget_fill: float  # mean over rows of tokens / budget; an oversize row counts as full
    computed_tokens: int  # what the rows run through the model
    unshared_tokens: int  # both sequences of every pair, prompts twice, no padding
    saved_by_sharing_tokens: int
    padded: tuple[PaddedComparison, ...]
    oversize_pairs: tuple[OversizePair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """How evenly the steps of an epoch load a number of ranks; cost is tokens."""

    num_ranks: int
    steps_measured: int
    rows_per_step: Spread
    max_rows_per_rank: int
    slowest_over_mean: float  # time of all steps against perfectly balanced ones
    worst_full_step_slowest_over_mean: float  # of any step, where none is full
    steps_with_idle_ranks: int  # fewer pairs than ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """Everything `inspect-packing` shows, and the content of packing_report.json."""

    algorithm: str
    token_budget: int
    pairs_per_step: int
    share_prompt: bool
    plan_fingerprint: str
    statistics: PackingStatistics
    lengths: tuple[LengthSummary, ...]
    balance: tuple[RankBalance, ...]
    removed_pairs: Mapping[str, int]  # dropped or truncated before packing, by reason


def inspect_packing(
    lengths: PairLengths,
    *,
    order: IntArray,
    token_budget: int,
    pairs_per_step: int,
    algorithm: str,
    share_prompt: bool,
    ranks: Sequence[int] = (1,),
    removed_pairs: Mapping[str, int] | None = None,
    describe_pair: Callable[[int], str] = "pair {}".format,
) -> PackingReport:
    """Plan the epoch `order` ([E] pairs, from `epoch_order`) and measure it.

    `algorithm` PADDED measures padded rows, which share nothing. removed_pairs: counts by reason.
    describe_pair: where the user finds a pair, "pairs.jsonl row 17". Raises DataError without pairs.
    """
    removed_pairs = dict(removed_pairs or {})
    if len(order) == 0:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in removed_pairs.items())
        raise DataError(
            f"data.train: no pair is left to pack ({reasons or 'none was read'}); "
            "check the files, their format and data.max_length"
        )
    share_prompt = share_prompt and algorithm != PADDED
    packed_tokens = lengths.row_tokens(share_prompt=share_prompt)
    row_tokens = lengths.padded_tokens() if algorithm == PADDED else packed_tokens
    plans = [
        plan_epoch(
            row_tokens,
            order=order,
            token_budget=token_budget,
            pairs_per_step=pairs_per_step,
            algorithm=algorithm,
            num_ranks=num_ranks,
        )
        for num_ranks in (1, *ranks)
    ]
    return PackingReport(
        algorithm=algorithm,
        token_budget=token_budget,
        pairs_per_step=pairs_per_step,
        share_prompt=share_prompt,
        plan_fingerprint=plans[0].fingerprint,
        statistics=packing_statistics(plans[0], lengths, describe_pair=describe_pair),
        lengths=(
            summarize_lengths("prompt", lengths.prompt[order]),
            summarize_lengths("chosen", lengths.chosen[order]),
            summarize_lengths("rejected", lengths.rejected[order]),
            summarize_lengths("pair", row_tokens[order]),
        ),
        balance=tuple(rank_balance(plan) for plan in plans[1:]),
        removed_pairs=removed_pairs,
    )


def packing_statistics(
    plan: PackingPlan, lengths: PairLengths, *, describe_pair: Callable[[int], str] = "pair {}".format
) -> PackingStatistics:
    """Measure every row of a plan made from `lengths`; at least one pair."""
    row_tokens = [[plan.tokens_in(row) for rows in step for row in rows] for step in plan]
    tokens = np.array([count for step in row_tokens for count in step])
    computed = int(tokens.sum())
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    # A padded plan shares nothing: there, what separates the two is padding.
    by_sharing = 0 if plan.algorithm == PADDED else unshared - computed
    padded = [(pairs, _padded_tokens(lengths, plan.order, pairs)) for pairs in PADDED_MICROBATCH_PAIRS]
    return PackingStatistics(
        num_pairs=len(plan.order),
        num_steps=len(plan),
        num_rows=len(tokens),
        rows_per_step=_spread([len(step) for step in row_tokens]),
        tokens_per_step=_spread([sum(step) for step in row_tokens]),
        max_row_tokens=int(tokens.max()),
        budget_fill=float(np.minimum(tokens / plan.token_budget, 1.0).mean()),
        computed_tokens=computed,
        unshared_tokens=unshared,
        saved_by_sharing_tokens=by_sharing,
        padded=tuple(
            PaddedComparison(
                microbatch_pairs=pairs,
                tokens=total,
                saved_by_packing_tokens=total - computed - by_sharing,
                times_computed_tokens=total / computed,
            )
            for pairs, total in padded
        ),
        oversize_pairs=tuple(
            OversizePair(pair=pair, tokens=int(plan.row_tokens[pair]), place=describe_pair(pair))
            for pair in plan.oversize_pairs.tolist()
        ),
    )


def _padded_tokens(lengths: PairLengths, order: IntArray, microbatch_pairs: int) -> int:
    """Tokens of padded DPO: each micro-batch is 2 sequences a pair, all as long as the longest."""
    begins = np.arange(0, len(order), microbatch_pairs)
    num_pairs = np.diff(np.append(begins, len(order)))
    return int((np.maximum.reduceat(lengths.padded_tokens()[order], begins) * num_pairs).sum())


def rank_balance(plan: PackingPlan, *, max_steps: int = MAX_BALANCE_STEPS) -> RankBalance:
    """Measure the ranks' loads over at most `max_steps` steps, the first and the last among them."""
    steps = np.unique(np.linspace(0, len(plan) - 1, min(len(plan), max_steps)).round().astype(np.int64))
    planned = [plan[step] for step in steps.tolist()]
    costs = np.array([[sum(plan.cost_of(row) for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], as costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    is_full = np.array([len(plan.pairs(step)) == plan.pairs_per_step for step in steps.tolist()])
    counted = is_full if is_full.any() else ~is_full
    return RankBalance(
        num_ranks=plan.num_ranks,
        steps_measured=len(planned),
        rows_per_step=_spread(num_rows.sum(axis=1).tolist()),
        max_rows_per_rank=int(num_rows.max()),
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


def to_json(report: PackingReport) -> str:
    """The report as JSON text; names and nesting are those of the dataclasses."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
