"""Evaluates on held-out pairs: a forward pass over all pairs, then means, 95 % intervals and groups of pairs:
also by length, because a policy can raise its accuracy by learning only that the longer completion wins.

Legend: P pairs of the held-out set, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dpo_pack.data.store import PairTable, distinct_keys
from dpo_pack.losses.objective import Objective
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.system import ranks
from dpo_pack.system.files import written_aside
from dpo_pack.system.ranks import gather_over_ranks
from dpo_pack.training.batches import PairRow, RowBuilder
from dpo_pack.training.metrics import averages, join_values, margin_rounding, pair_metrics, pair_values
from dpo_pack.training.step_loss import pair_losses

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
# Resamples of an interval: the most, and with many prompts at least so many, which draw at most _MAX_DRAWS.
NUM_RESAMPLES, _MIN_RESAMPLES, _MAX_DRAWS = 1000, 200, 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """The result of a policy on one held-out set."""

    name: str
    table: PairTable  # the pairs
    source_names: Sequence[str]
    metrics: dict[str, FloatArray]  # METRICS_WITH_INTERVALS, [P] each in the order of the table
    record: dict[str, Any]  # averages, intervals, groups: the line of metrics.jsonl


@torch.no_grad()
def evaluate_pairs(
    policy: CompletionLogps,
    builder: RowBuilder,
    objective: Objective,
    *,
    token_budget: int,
    score: Callable[[PairRow], PairRow] = lambda row: row,
    progress: Callable[[int], None] = lambda num_pairs: None,
    between_rows: Callable[[], None] = lambda: None,
) -> Tensor:
    """Returns the `pair_values` of all pairs of the builder's table, in the table's order, on every rank.

    `token_budget` limits the rows. `score` puts the reference's log-probs into a row. `progress` gets the
    number of pairs of each row that this rank has computed. `between_rows` is called before each row, equally
    often on every rank."""
    build_rows = pack_sequences_longest_first if builder.is_packed else padded_rows
    mean_chosen_tokens = float(builder.table.chosen_scored.mean())
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
        output = policy(row.row)
        if number < len(rows):
            losses = pair_losses(objective, output, row, mean_chosen_tokens)
            parts.append(pair_values(output, row, losses))
            positions.append(pairs)
            progress(len(pairs))
    order = gather_over_ranks(torch.from_numpy(np.concatenate(positions)).to(builder.device)).argsort()
    return gather_over_ranks(join_values(parts, builder.device))[order]


def held_out_result(
    name: str,
    values: Tensor,
    table: PairTable,
    objective: Objective,
    *,
    source_names: Sequence[str],
    dtype: torch.dtype,
    seed: int,
) -> HeldOutResult:
    """Returns averages, intervals and groups of `evaluate_pairs`' values, from matrix products in `dtype`."""
    beta, has_reference = objective.options.beta, objective.needs_reference
    columns = pair_metrics(values, beta=beta, dtype=dtype)
    metrics = {
        metric: columns[metric].cpu().numpy()
        for metric in METRICS_WITH_INTERVALS
        if has_reference or not metric.startswith("kl/")
    }
    noise = margin_rounding(values, beta=beta, dtype=dtype)
    record = {
        **means_by_group(metrics, table, source_names, seed=seed),
        # These replace its means: another order of summation may change the lowest bit.
        **averages(values, beta=beta, dtype=dtype, has_reference=has_reference),
        **length_preference(metrics["rewards/accuracies"], table),
        "eval_precision": str(dtype).removeprefix("torch."),
        "margin_noise": float(noise.square().mean().sqrt()),
    }
    return HeldOutResult(name=name, table=table, source_names=source_names, metrics=metrics, record=record)


def write_held_out_pairs(results: Sequence[HeldOutResult], path: Path, *, step: int) -> None:
    """Writes the metrics of each pair of all held-out sets to a Parquet file: `row` is the pair's row in the
    source `row_source`, `source` the name of the set. Raises CacheError."""
    tables = []
    for result in results:
        table = result.table
        keys = np.concatenate([table.chosen_keys, table.rejected_keys], axis=1)  # [P, bytes of both]
        columns: dict[str, Any] = {
            "step": [step] * table.num_pairs,
            "source": [result.name] * table.num_pairs,
            "pair": [key.tobytes() for key in keys],
            "prompt": _prompts(table),
            "row_source": [result.source_names[number] for number in table.source_indices],
            "row": table.row_numbers.astype(np.int64),
        }
        tables.append(pa.table(columns | result.metrics))
    with written_aside(path) as temporary:
        pq.write_table(pa.concat_tables(tables), temporary, write_page_checksum=True)


def compare_results(one: HeldOutResult, other: HeldOutResult, *, seed: int) -> dict[str, Any]:
    """Returns means, intervals and groups of `other` - `one`, pair by pair, for each metric. Both must have
    the same pairs."""
    differences = {metric: other.metrics[metric] - values for metric, values in one.metrics.items()}
    return means_by_group(differences, one.table, one.source_names, seed=seed)


# ------------------------------------------------------------------------------- means, intervals, groups


def means_by_group(
    metrics: Mapping[str, FloatArray], table: PairTable, source_names: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Returns means of `metrics`, [P] each, with intervals: over all pairs, `by_source` if the pairs have
    several sources, and `by_length`, by LENGTH_BUCKETS. Empty groups are left out."""
    prompts, everything = _prompts(table), np.arange(len(table.source_indices))
    buckets = np.searchsorted(
        list(LENGTH_BUCKETS.values()), table.chosen_scored / table.rejected_scored, side="right"
    )
    kinds: dict[str, tuple[npt.NDArray[np.integer], Sequence[str]]] = {
        "by_source": (table.source_indices, source_names),
        "by_length": (buckets - 1, tuple(LENGTH_BUCKETS)),
    }
    described = _means(metrics, prompts, everything, seed=seed)
    for kind, (numbers, names) in kinds.items():
        groups = {name: np.flatnonzero(numbers == number) for number, name in enumerate(names)}
        found = {name: _means(metrics, prompts, at, seed=seed) for name, at in groups.items() if len(at)}
        if kind != "by_source" or len(found) > 1:
            described[kind] = found
    return described


def _prompts(table: PairTable) -> IntArray:
    """Returns [P] position of the first pair that has the same prompt."""
    first, prompts = distinct_keys(table.whole_prompt_keys)
    return first[prompts]


def _means(
    metrics: Mapping[str, FloatArray], prompts: IntArray, pairs: IntArray, *, seed: int
) -> dict[str, Any]:
    values, prompts = np.stack([column[pairs] for column in metrics.values()], axis=1), prompts[pairs]
    intervals = mean_intervals(values, seed=seed, prompts=prompts).tolist()
    return {
        "pairs": len(pairs),
        "prompts": len(np.unique(prompts)),
        **dict(zip(metrics, values.mean(axis=0).tolist(), strict=True)),
        "intervals": dict(zip(metrics, intervals, strict=True)),
    }


def mean_intervals(values: FloatArray, *, seed: int, prompts: IntArray | None = None) -> FloatArray:
    """Returns 95 % intervals of means: [P, M] values of P pairs -> [M, 2], lower and upper bound.

    The bootstrap's percentile interval (Efron & Tibshirani 1993, chapter 13). A resample draws prompts, each
    with all its pairs, because these resemble each other. prompts: [P] numbers; None: each pair has its own.
    """
    prompts = np.arange(len(values)) if prompts is None else prompts
    _, prompts, sizes = np.unique(prompts, return_inverse=True, return_counts=True)
    num_prompts, rng = len(sizes), np.random.default_rng(seed)
    sums = np.zeros((num_prompts, values.shape[1]))
    np.add.at(sums, prompts, values)
    means = np.empty((max(_MIN_RESAMPLES, min(NUM_RESAMPLES, _MAX_DRAWS // num_prompts)), values.shape[1]))
    for resample in means:
        drawn = rng.integers(0, num_prompts, num_prompts)
        resample[:] = sums[drawn].sum(axis=0) / sizes[drawn].sum()
    bounds: FloatArray = np.quantile(means, (0.025, 0.975), axis=0).T
    return bounds


def length_preference(accuracies: FloatArray, table: PairTable) -> dict[str, float]:
    """Measures whether data and policy prefer the longer completion: the part of pairs whose chosen
    completion is longer, and the part whose longer completion has the larger reward (a tie counts half), of
    pairs that have a longer one. accuracies: [P] those of `pair_metrics`."""
    difference = table.chosen_scored - table.rejected_scored
    differs = difference != 0
    if not differs.any():
        return {}
    prefers_longer = np.where(difference > 0, accuracies, 1 - accuracies)
    return {
        "length/chosen_longer": float((difference > 0)[differs].mean()),
        "length/prefers_longer": float(prefers_longer[differs].mean()),
    }
