"""Evaluates on held-out pairs: a forward pass over all pairs, then means, 95 % intervals and groups of pairs:
also by length, because a policy can raise its accuracy by learning only that the longer completion wins.

An evaluation in 16 bits rounds margins, perhaps by more than training has moved them. So M of the pairs are
computed in fp32, too, and correct the means: docs/numerics.md says how.

Legend: P pairs of the held-out set, M of them measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dpo_pack.data.store import PairTable, distinct_keys
from dpo_pack.losses import Objective, ScoredPairs, weighted_losses
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.system import ranks
from dpo_pack.system.files import written_aside
from dpo_pack.system.ranks import gather_over_ranks
from dpo_pack.training.batches import PairRow, RowBuilder
from dpo_pack.training.metrics import (
    averages,
    column,
    join_values,
    logps,
    margin_rounding,
    pair_metrics,
    pair_values,
)
from dpo_pack.training.step_loss import score_pairs

Positions = npt.NDArray[np.int64]  # of pairs in the set's table

# The metrics that get intervals and groups.
METRICS_WITH_INTERVALS = ("loss", "rewards/accuracies", "rewards/margins", "kl/chosen", "kl/rejected")
# Groups by the ratio chosen tokens / rejected tokens: the lowest ratio of each group, in rising order.
LENGTH_BUCKETS: dict[str, float] = {
    "chosen_under_half": 0.0,
    "chosen_shorter": 0.5,
    "similar_length": 1 / 1.1,
    "chosen_longer": 1.1,
    "chosen_over_twice": 2.0,
}
CONFIDENCE = 0.95  # of intervals
NUM_RESAMPLES = 1000
# With many prompts fewer resamples are enough: together they draw at most this many prompts.
_MAX_DRAWS = 50_000_000
_MIN_RESAMPLES = 200
_VALUES_AT_A_TIME = 4_000_000  # 32 MB of float64
MOST_MEASURED = 64  # pairs of a set that are computed in fp32, too
# The part of signs that rounding may turn so that accuracies are extrapolated, and how much further rounding
# they are extrapolated from, in its variance.
_FEW_TURNED, _FURTHER = 0.1, 2.25
MOST_CANDIDATES = 256  # pairs of which these are drawn: the reference's fp32 log-probs are computed for all


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTraits:
    """The properties by which held-out pairs are grouped."""

    chosen_tokens: npt.NDArray[np.floating]  # [P] sums of token weights: tokens, where all weights are 1
    rejected_tokens: npt.NDArray[np.floating]  # [P]
    prompts: Positions  # [P] of the first pair with the same prompt
    source_indices: npt.NDArray[np.integer]  # [P] positions in `source_names`
    source_names: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """The result of a policy on one held-out set."""

    name: str
    table: PairTable  # the pairs
    metrics: dict[str, FloatArray]  # METRICS_WITH_INTERVALS, [P] each in the order of the set's table
    estimates: dict[str, FloatArray]  # the same, corrected: their means estimate those of fp32
    traits: PairTraits
    record: dict[str, Any]  # averages, intervals, groups: the line of metrics.jsonl

    @property
    def compared(self) -> dict[str, Any]:
        """The record by which evaluations of a run are compared: without corrections if only some pairs are
        measured, because the noise of a correction by 64 pairs exceeds that of the rounding of all."""
        if self.record.get("measured_pairs", self.table.num_pairs) == self.table.num_pairs:
            return self.record
        return self.record | {metric: float(values.mean()) for metric, values in self.metrics.items()}


@torch.no_grad()
def evaluate_pairs(
    policy: CompletionLogps,
    builder: RowBuilder,
    objective: Objective,
    *,
    token_budget: int,
    mean_chosen_tokens: float | None = None,
    score: Callable[[PairRow], PairRow] = lambda row: row,
    progress: Callable[[int], None] = lambda num_pairs: None,
    between_rows: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns the `pair_values` of all pairs of the builder's table, in the table's order, on every rank.

    A loss that couples pairs couples all pairs of the table. `token_budget` limits the rows.
    `mean_chosen_tokens`: of the set, if the table is a part of it. `score` puts the reference's log-probs
    into a row. `progress` gets the number of pairs of each row that this rank has computed. `between_rows` is
    called before each row, equally often on every rank."""
    build_rows = pack_sequences_longest_first if builder.is_packed else padded_rows
    parts: list[Tensor] = []
    positions = [np.zeros(0, dtype=np.int64)]
    rows = build_rows(builder.row_tokens(), token_budget)
    # The ranks of a sharded model compute only together. So all ranks get equally many rows: a rank that has
    # no row left computes the last row again, and that result is not used.
    for first in range(0, len(rows), ranks.num_ranks()):
        number = first + ranks.rank()
        pairs = rows[min(number, len(rows) - 1)]
        between_rows()
        row = score(builder.build(pairs))
        scored = score_pairs(objective, policy(row.row), row)
        if number < len(rows):
            # The loss can need all pairs, so the column of losses holds weights until then.
            parts.append(pair_values(scored, scored.pair_weights))
            positions.append(pairs)
            progress(len(pairs))
    everywhere = gather_over_ranks(torch.from_numpy(np.concatenate(positions)).to(builder.device))
    order = everywhere.argsort()
    assert torch.equal(everywhere[order].cpu(), torch.arange(builder.table.num_pairs)), "each pair once"
    values = gather_over_ranks(join_values(parts, builder.device))[order]
    losses = column(values, "loss")
    scored = ScoredPairs(
        policy=logps(values, "policy"), reference=logps(values, "reference"), pair_weights=losses
    )
    if mean_chosen_tokens is None:
        mean_chosen_tokens = float(builder.table.chosen_scored.mean())
    losses.copy_(weighted_losses(objective, scored, mean_chosen_tokens=mean_chosen_tokens))
    return values


def candidates(num_pairs: int, *, seed: int) -> Positions:
    """Returns the positions of the pairs of which `draw_measured` draws, [at most MOST_CANDIDATES]."""
    return np.sort(np.random.default_rng(seed).permutation(num_pairs)[:MOST_CANDIDATES])


def draw_measured(margins: FloatArray, rounding: FloatArray, *, seed: int) -> tuple[Positions, FloatArray]:
    """Draws the pairs to compute in fp32, too; returns their positions, [M], and chances to be drawn, [M].

    margins, rounding: [P] of the pairs, and an estimate of the margins' rounding errors. All pairs are drawn
    if they are at most MOST_MEASURED. Else a margin near zero has more chance, because its sign may be wrong.
    """
    pool, rng = candidates(len(margins), seed=seed), np.random.default_rng(seed)
    margins, rounding, num_pairs, share = margins[pool], rounding[pool], len(pool), len(pool) / len(margins)
    near_zero = np.nan_to_num(1 / (1 + (margins / (2 * rounding)) ** 2), nan=1.0)
    weights = near_zero / near_zero.sum() + 1 / num_pairs  # so no chance is below half of M / P
    chances = np.ones(num_pairs)
    is_free = np.full(num_pairs, num_pairs > MOST_MEASURED)
    while is_free.any():
        chances[is_free] = weights[is_free] * (MOST_MEASURED - (~is_free).sum()) / weights[is_free].sum()
        if (chances <= 1).all():
            break
        is_free &= chances < 1
        chances[~is_free] = 1
    # Systematic sampling in random order: exactly M pairs, each with its own chance.
    order = rng.permutation(num_pairs)
    ends = np.floor(np.cumsum(chances[order]) + rng.random())
    drawn = np.sort(order[np.diff(ends, prepend=0.0) > 0])
    return pool[drawn], chances[drawn] * share


def estimate_exact(
    metrics: Mapping[str, FloatArray], exact: Mapping[str, FloatArray], pairs: Positions, chances: FloatArray
) -> tuple[dict[str, FloatArray], float]:
    """Returns [P] numbers for each metric, whose mean estimates that in fp32, and margins' rounding (its
    standard deviation). metrics: [P] in training's precision; exact: [M] in fp32, of the measured `pairs`.

    Each measured pair adds its error / its chance to be measured (Horvitz & Thompson 1952): so the mean has
    no bias whatever the margins are, and the bootstrap counts the noise of the correction. An accuracy is
    first the probability that the margin is positive in fp32, if rounding is normal: errors are then small.

    If rounding turns few signs, most of these cancel. The rest is known from what further rounding would do:
    an accuracy a and b with 1 + _FURTHER times the variance are extrapolated, a + (a - b) / _FURTHER
    (SIMEX, Cook & Stefanski 1994). That is taken where it is less noisy, and changes the mean by less than a
    standard error. If all pairs are measured, nothing is estimated.
    """
    margins, accuracy = metrics["rewards/margins"], "rewards/accuracies"
    errors = margins[pairs] - exact["rewards/margins"]
    is_finite = np.isfinite(errors)
    noise = float(np.sqrt((errors**2 / chances)[is_finite].sum() / max((1 / chances)[is_finite].sum(), 1.0)))
    estimates = {metric: values.copy() for metric, values in metrics.items()}
    is_sure = (metrics[accuracy] != 0.5) & (noise > 0)
    scaled = torch.from_numpy(margins[is_sure] / (noise or 1.0))
    likely = torch.special.ndtr(scaled).numpy()
    estimates[accuracy][is_sure] = likely
    for metric, values in exact.items():
        estimates[metric][pairs] += (values - estimates[metric][pairs]) / chances
    num_pairs, signs = len(margins), metrics[accuracy].copy()
    if len(pairs) < num_pairs and np.minimum(likely, 1 - likely).sum() < _FEW_TURNED * num_pairs:
        further = torch.special.ndtr(scaled / math.sqrt(_FURTHER)).numpy()
        signs[is_sure] += (signs[is_sure] - further) / _FURTHER
        change = signs.mean() - metrics[accuracy].mean()
        if estimates[accuracy].var() > signs.var() > num_pairs * change**2:
            estimates[accuracy] = signs
    return estimates, noise


def held_out_result(
    name: str, values: Tensor, builder: RowBuilder, objective: Objective, *, source_names: Sequence[str],
    dtype: torch.dtype, seed: int, measured: tuple[Positions, FloatArray, Tensor] | None = None,
) -> HeldOutResult:  # fmt: skip
    """Returns averages, intervals and groups of `evaluate_pairs`' values.

    `dtype` is that of the policy's matrix products. With `measured` pairs (what `draw_measured` returns, and
    their values in fp32) the metrics with intervals are estimates of fp32's."""
    beta, has_reference = objective.options.beta, objective.needs_reference
    columns = pair_metrics(values, beta=beta, dtype=dtype)
    judged = [m for m in METRICS_WITH_INTERVALS if has_reference or not m.startswith("kl/")]
    metrics = {metric: columns[metric].cpu().numpy() for metric in judged}
    if measured is None:
        estimates = metrics
        noise = float(margin_rounding(values, beta=beta, dtype=dtype).square().mean().sqrt())
    else:
        pairs, chances, exact_values = measured
        columns = pair_metrics(exact_values, beta=beta, dtype=torch.float32)
        # A loss that couples pairs is another one on a part of them.
        is_other = objective.couples_pairs and len(pairs) < len(values)
        exact = {m: columns[m].cpu().numpy() for m in judged if not (m == "loss" and is_other)}
        estimates, noise = estimate_exact(metrics, exact, pairs, chances)
    table = builder.table
    first, prompts = distinct_keys(table.whole_prompt_keys)
    traits = PairTraits(
        prompts=first[prompts],
        chosen_tokens=table.chosen_scored,
        rejected_tokens=table.rejected_scored,
        source_indices=table.source_indices,
        source_names=source_names,
    )
    means = means_by_group(estimates, traits, seed=seed)
    record = {
        **means,
        # These replace its means: another order of summation may change the lowest bit.
        **averages(values, beta=beta, dtype=dtype, has_reference=has_reference),
        **length_preference(estimates["rewards/accuracies"], traits),
        "eval_precision": str(dtype).removeprefix("torch."),
        "margin_noise": noise,
    }
    if measured is not None:
        record |= {metric: means[metric] for metric in judged} | {"measured_pairs": len(pairs)}
    return HeldOutResult(
        name=name,
        table=table,
        metrics=metrics,
        estimates=estimates,
        traits=traits,
        record=record,
    )


def write_held_out_pairs(results: Sequence[HeldOutResult], path: Path, *, step: int) -> None:
    """Writes the metrics of each pair of all held-out sets to a Parquet file: `row` is the pair's row in the
    source `row_source`, `source` the name of the set. Raises CacheError."""
    tables = []
    for result in results:
        table, traits = result.table, result.traits
        keys = np.concatenate([table.chosen_keys, table.rejected_keys], axis=1)  # [P, bytes of both]
        columns: dict[str, Any] = {
            "step": [step] * table.num_pairs,
            "source": [result.name] * table.num_pairs,
            "pair": [key.tobytes() for key in keys],
            "prompt": traits.prompts,
            "row_source": [traits.source_names[number] for number in traits.source_indices],
            "row": table.row_numbers.astype(np.int64),
        }
        tables.append(pa.table(columns | result.metrics))
    with written_aside(path) as temporary:
        pq.write_table(pa.concat_tables(tables), temporary, write_page_checksum=True)


def compare_results(one: HeldOutResult, other: HeldOutResult, *, seed: int) -> dict[str, Any]:
    """Returns means, intervals and groups of `other` - `one`, pair by pair, for each metric. Both must have
    the same pairs."""
    differences = {metric: other.estimates[metric] - one.estimates[metric] for metric in one.estimates}
    return means_by_group(differences, one.traits, seed=seed, lowest_accuracy=-1.0)


# ------------------------------------------------------------------------------- means, intervals, groups


def means_by_group(
    metrics: Mapping[str, FloatArray], traits: PairTraits, *, seed: int, lowest_accuracy: float = 0.0
) -> dict[str, Any]:
    """Returns means of `metrics`, [P] each, with intervals: over all pairs, `by_source` if the pairs have
    several sources, and `by_length`, by LENGTH_BUCKETS. Empty groups are left out."""
    ratios = traits.chosen_tokens / traits.rejected_tokens
    buckets = np.searchsorted(list(LENGTH_BUCKETS.values()), ratios, side="right") - 1
    kinds: dict[str, tuple[npt.NDArray[np.integer], Sequence[str]]] = {}
    if len(np.unique(traits.source_indices)) > 1:
        kinds["by_source"] = (traits.source_indices, traits.source_names)
    kinds["by_length"] = (buckets, tuple(LENGTH_BUCKETS))
    means = partial(_means, metrics, traits, seed=seed, lowest_accuracy=lowest_accuracy)
    described = means(np.arange(len(traits.prompts)))
    for kind, (numbers, names) in kinds.items():
        groups = {name: np.flatnonzero(numbers == number) for number, name in enumerate(names)}
        described[kind] = {name: means(pairs) for name, pairs in groups.items() if len(pairs)}
    return described


def _means(
    metrics: Mapping[str, FloatArray], traits: PairTraits, pairs: Positions, *, seed: int,
    lowest_accuracy: float,
) -> dict[str, Any]:  # fmt: skip
    values = np.stack([of_pairs[pairs] for of_pairs in metrics.values()], axis=1)
    prompts = traits.prompts[pairs]
    intervals = dict(zip(metrics, mean_intervals(values, seed=seed, prompts=prompts).tolist(), strict=True))
    means = dict(zip(metrics, values.mean(axis=0).tolist(), strict=True))
    if (name := "rewards/accuracies") in metrics:  # a correction can lead beyond what is possible
        bounds = (lowest_accuracy, 1.0)
        means[name], *intervals[name] = np.clip([means[name], *intervals[name]], *bounds).tolist()
    return {"pairs": len(pairs), "prompts": len(np.unique(prompts)), **means, "intervals": intervals}


def mean_intervals(values: FloatArray, *, seed: int, prompts: IntArray | None = None) -> FloatArray:
    """Returns 95 % intervals of means: [P, M] values of P pairs -> [M, 2], lower and upper bound.

    The bootstrap's percentile interval (Efron & Tibshirani 1993, chapter 13). A resample draws prompts, each
    with all its pairs, because these resemble each other. prompts: [P] numbers; None: each pair has its own.
    """
    prompts = np.arange(len(values)) if prompts is None else prompts
    _, prompts, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), values.shape[1]))
    np.add.at(sums, prompts, values)
    num_prompts, num_metrics = sums.shape
    num_resamples = max(_MIN_RESAMPLES, min(NUM_RESAMPLES, _MAX_DRAWS // num_prompts))
    rng = np.random.default_rng(seed)
    means = np.empty((num_resamples, num_metrics))
    at_a_time = max(1, _VALUES_AT_A_TIME // (num_prompts * num_metrics))
    for start in range(0, num_resamples, at_a_time):
        stop = min(start + at_a_time, num_resamples)
        drawn = rng.integers(0, num_prompts, (stop - start, num_prompts))
        means[start:stop] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1, keepdims=True)
    tail = (1 - CONFIDENCE) / 2
    bounds: FloatArray = np.quantile(means, (tail, 1 - tail), axis=0).T
    return bounds


def length_preference(accuracies: FloatArray, traits: PairTraits) -> dict[str, float]:
    """Measures whether data and policy prefer the longer completion: the part of pairs whose chosen
    completion is longer, and the part whose longer completion has the larger reward (a tie counts half), of
    pairs that have a longer one. accuracies: [P] those of `pair_metrics`."""
    difference = traits.chosen_tokens - traits.rejected_tokens
    differs = difference != 0
    if not differs.any():
        return {}
    prefers_longer = np.where(difference > 0, accuracies, 1 - accuracies)[differs]
    return {
        "length/chosen_longer": float((difference[differs] > 0).mean()),
        "length/prefers_longer": float(np.clip(prefers_longer.mean(), 0.0, 1.0)),
    }
