"""Measures a packing plan: rows, tokens, FLOPs, balance of ranks, and a comparison with padded training.

Lengths are in tokens. FLOPs are those of training, see flops.py. The keys of `packing_report.json` are the
names of the fields below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpo_pack.packing.bin_packing import PADDED, Row
from dpo_pack.packing.flops import TRAINING_PASSES, ModelShape, padded_flops, pair_flops, unread_positions
from dpo_pack.packing.lengths import AnyIntArray, IntArray, PairLengths, length_percentiles
from dpo_pack.packing.plan import PackingPlan

# Pairs in a micro-batch of padded training, which pads to the longest sequence of the micro-batch.
PADDED_MICROBATCH_PAIRS = (1, 2, 4, 8, 16)
HISTOGRAM_BINS = 24
# Balance is measured on at most this many steps, spread evenly over the epoch (see `steps_measured`).
MAX_BALANCE_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Statistics of one kind of length over an epoch's pairs. The last bin also counts lengths above p99."""

    name: str
    mean: float
    median: int
    p90: int
    p99: int
    max: int
    histogram_edges: tuple[float, ...]  # HISTOGRAM_BINS + 1 numbers, evenly from 0 to p99
    histogram_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The mean, the smallest and the largest value of a quantity over the steps of an epoch."""

    mean: float
    min: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedComparison:
    """The epoch in padded micro-batches; their tokens = the plan's + saved by packing + saved by sharing.

    Padded training runs every position through the output head. The plan runs only completions through it.
    """

    microbatch_pairs: int
    tokens: int
    saved_by_packing_tokens: int
    times_computed_tokens: float  # `tokens` / the tokens that the plan computes
    flops: float  # of the epoch
    times_flops: float  # flops / FLOPs of the plan: the speed-up if both run at the same utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsSummary:
    """Estimated FLOPs of the epoch's training steps, all ranks together, and three parts of their sum."""

    total: float
    per_pair: float
    token_part: float  # FLOPs of the weights that multiply every token / total; the three parts add up to 1
    head_part: float
    attention_part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OversizePair:
    """A pair that exceeds the token budget and so is alone in its row."""

    pair: int
    tokens: int
    place: str  # where the user finds the pair, for instance "pairs.jsonl row 17"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStatistics:
    """Measurements of the plan of one epoch on one rank."""

    num_pairs: int  # a pair counts as often as it is trained on
    num_steps: int
    num_rows: int
    rows_per_step: Spread
    pairs_per_step: Spread
    tokens_per_step: Spread
    max_row_tokens: int
    budget_fill: float  # mean over rows of tokens / budget; an oversize row counts as full
    computed_tokens: int  # tokens that the rows run through the model
    head_tokens: int  # computed tokens that also run through the output head
    unshared_tokens: int  # both sequences of every pair, with prompts twice and without padding
    saved_by_sharing_tokens: int  # by sharing common prefixes, and by merging pairs of one prompt
    merged_pairs: int  # pairs that are in a group with another pair of the same prompt
    flops: FlopsSummary
    padded: tuple[PaddedComparison, ...]
    oversize_pairs: tuple[OversizePair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBalance:
    """How evenly the plan's estimated costs of an epoch are spread over `num_ranks` ranks (processes)."""

    num_ranks: int
    steps_measured: int
    rows_per_step: Spread
    max_rows_per_rank: int
    mean_rows_of_fullest_rank: float
    slowest_over_mean: float  # time of all steps / their time with perfect balance
    worst_full_step_slowest_over_mean: float  # if no step is full: of all measured steps
    steps_with_idle_ranks: int  # steps in which a rank has no row


def packing_statistics(
    plan: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    *,
    order: IntArray,
    share_prompt: bool,
    describe_pair: Callable[[int], str] = "pair {}".format,
) -> PackingStatistics:
    """Measures every row of a plan for one rank. The plan was made from `lengths` and a non-empty `order`.

    Padded micro-batches are cut from `order`, and not from `plan.order`: in scope epoch `plan.order` is the
    order of the plan's rows.
    """
    steps = [of_rank for (of_rank,) in plan]
    rows = [row for step in steps for row in step]
    tokens = np.array([plan.tokens_in(row) for row in rows])
    step_tokens = np.add.reduceat(tokens, np.cumsum([0, *map(len, steps[:-1])]))
    computed = int(tokens.sum())
    unshared = int(lengths.row_tokens(share_prompt=False)[plan.order].sum())
    # A padded plan shares no prompts: its tokens beyond `unshared` are padding.
    by_sharing = 0 if plan.algorithm == PADDED else unshared - computed
    merged: list[IntArray] = []
    if plan.sizes.merging is not None:
        merged = [group for row in rows for group in plan.sizes.groups_in(row) if len(group) > 1]
    padded_epochs = {pairs: _padded_epoch(lengths, order, pairs, shape) for pairs in PADDED_MICROBATCH_PAIRS}
    head_tokens, flops = _head_and_flops(plan, lengths, shape, rows, merged, computed, share_prompt)
    return PackingStatistics(
        num_pairs=len(plan.order),
        num_steps=len(plan),
        num_rows=len(rows),
        rows_per_step=_spread([len(step) for step in steps]),
        pairs_per_step=_spread(np.diff(plan.step_begins).tolist()),
        tokens_per_step=_spread(step_tokens.tolist()),
        max_row_tokens=int(tokens.max()),
        budget_fill=float(np.minimum(tokens / plan.token_budget, 1.0).mean()),
        computed_tokens=computed,
        head_tokens=head_tokens,
        unshared_tokens=unshared,
        saved_by_sharing_tokens=by_sharing,
        merged_pairs=sum(map(len, merged)),
        flops=flops,
        padded=tuple(
            PaddedComparison(
                microbatch_pairs=microbatch_pairs,
                tokens=epoch_tokens,
                saved_by_packing_tokens=epoch_tokens - computed - by_sharing,
                times_computed_tokens=epoch_tokens / computed,
                flops=epoch_flops,
                times_flops=epoch_flops / flops.total,
            )
            for microbatch_pairs, (epoch_tokens, epoch_flops) in padded_epochs.items()
        ),
        oversize_pairs=tuple(
            OversizePair(pair=pair, tokens=int(plan.row_tokens[pair]), place=describe_pair(pair))
            for pair in plan.oversize_pairs.tolist()
        ),
    )


def _head_and_flops(
    plan: PackingPlan,
    lengths: PairLengths,
    shape: ModelShape,
    rows: Sequence[Row],
    merged: Sequence[IntArray],
    computed: int,
    share_prompt: bool,
) -> tuple[int, FlopsSummary]:
    """Returns the number of tokens that run through the output head, and the FLOPs.

    merged: the groups of several pairs in all `rows`. computed: the tokens of all `rows`.
    """
    scored = lengths.completion_tokens()
    head_tokens, unread = int(scored[plan.order].sum()), 0.0
    if plan.algorithm == PADDED:
        longest = np.array([plan.row_tokens[row].max() // 2 for row in rows])
        sequences = np.array([2 * len(row) for row in rows])
        scored_tokens = np.array([scored[row].sum() for row in rows])
        total = padded_flops(shape, longest, sequences, scored_tokens=scored_tokens)
    else:
        alone = pair_flops(shape, lengths, share_prompt=share_prompt)
        unread_alone = unread_positions(lengths, share_prompt=share_prompt)
        unread, total = float(unread_alone[plan.order].sum()), float(alone[plan.order].sum())
        for group in merged:
            assert plan.sizes.merging is not None
            size = plan.sizes.merging.measure(group)
            head_tokens += size.scored_tokens - int(scored[group].sum())
            unread += size.unread_positions - float(unread_alone[group].sum())
            total += size.cost - float(alone[group].sum())
    for_layers = TRAINING_PASSES * 2 * (shape.token_weights * computed - shape.last_block_weights * unread)
    for_head = TRAINING_PASSES * 2 * shape.head_weights * head_tokens
    return head_tokens, FlopsSummary(
        total=total,
        per_pair=total / len(plan.order),
        token_part=for_layers / total,
        head_part=for_head / total,
        attention_part=1.0 - (for_layers + for_head) / total,
    )


def _padded_epoch(
    lengths: PairLengths, order: IntArray, microbatch_pairs: int, shape: ModelShape
) -> tuple[int, float]:
    """Returns the tokens and FLOPs of padded DPO; a micro-batch is padded to its longest sequence."""
    begins = np.arange(0, len(order), microbatch_pairs)
    num_pairs = np.diff(np.append(begins, len(order)))
    longest = np.maximum.reduceat(lengths.padded_tokens()[order], begins)  # of two sequences
    return int((longest * num_pairs).sum()), padded_flops(shape, longest // 2, 2 * num_pairs)


def rank_balance(plan: PackingPlan, *, max_steps: int = MAX_BALANCE_STEPS) -> RankBalance:
    """Measures the loads of ranks in at most `max_steps` steps, the first and the last step included."""
    steps = spread_steps(plan, max_steps)
    planned = [plan.pack_step(step) for step in steps]
    costs = np.array([[sum(plan.cost_of(row) for row in rows) for rows in step] for step in planned])
    num_rows = np.array([[len(rows) for rows in step] for step in planned])  # [steps, R], like costs
    slowest, mean = costs.max(axis=1), costs.mean(axis=1)
    is_full = np.array([plan.is_full(step) for step in steps])
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


def spread_steps(plan: PackingPlan, max_steps: int) -> list[int]:
    """Returns at most `max_steps` steps of the plan, spread evenly, the first and the last step included."""
    steps = np.linspace(0, len(plan) - 1, min(len(plan), max_steps)).round()
    return [int(step) for step in np.unique(steps)]


def _spread(values: Sequence[int]) -> Spread:
    return Spread(mean=sum(values) / len(values), min=min(values), max=max(values))


def length_summary(name: str, lengths: AnyIntArray) -> LengthSummary:
    """Returns percentiles, see `length_percentiles`, and a histogram of [n] lengths, n > 0."""
    median, p90, p99 = length_percentiles(lengths)
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
