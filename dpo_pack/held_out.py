"""The evaluation pass: every held-out pair once, on any number of ranks, and its metrics.

Legend: P pairs of the held-out set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpo_pack.bootstrap import Floats
from dpo_pack.breakdown import PairTraits, describe, length_preference
from dpo_pack.collectives import gather_over_ranks
from dpo_pack.data.bin_packing import pack_sequences_longest_first, padded_rows
from dpo_pack.layout import on_device
from dpo_pack.losses import Objective, ScoredPairs, weighted_losses
from dpo_pack.metrics import PairValues, averages, pair_metrics, pair_values
from dpo_pack.models import CompletionLogps
from dpo_pack.moving_reference import MovingReference
from dpo_pack.sources import RowBuilder, by_pair, score_pairs

Row = npt.NDArray[np.int64]  # pairs, as positions in a table

# What intervals and breakdowns are given for.
JUDGED_METRICS = ("loss", "rewards/accuracies", "rewards/margins", "kl/chosen", "kl/rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """What a policy does on one held-out set."""

    name: str
    metrics: dict[str, Floats]  # JUDGED_METRICS, [P] each in the order of the set's table
    traits: PairTraits
    record: dict[str, Any]  # averages, intervals, breakdowns: the line of metrics.jsonl


@torch.no_grad()
def evaluate_pairs(
    policy: CompletionLogps,
    builder: RowBuilder,
    objective: Objective,
    *,
    token_budget: int,
    rank: int = 0,
    num_ranks: int = 1,
    moving: MovingReference | None = None,
    progress: Callable[[int], None] = lambda num_pairs: None,
    between_rows: Callable[[], None] = lambda: None,
) -> PairValues:
    """What the policy makes of each pair of the builder's table, in the table's order, on every rank.

    A loss that couples pairs couples those of the whole table. `token_budget` bounds a row of this pass
    without gradients. The reference is `moving` as it is now, if there is one, and else the builder's.
    `progress` is told the pairs of each of this rank's rows; `between_rows` is called before each, by every
    rank as often.
    """
    build_rows = pack_sequences_longest_first if builder.is_packed else padded_rows
    values = [PairValues.none(builder.device)]
    weights_and_pairs = [torch.zeros((0, 2), dtype=torch.float64, device=builder.device)]
    rows = build_rows(builder.row_tokens(), token_budget)
    for pairs, counts in rank_share(rows, rank=rank, num_ranks=num_ranks):
        between_rows()
        row = builder.build(pairs)
        if moving is not None:
            row = moving.score(row)
        output = by_pair(policy(row.row), row)
        scored = score_pairs(objective, output, row)
        if counts:
            values.append(pair_values(output, scored.policy, scored.reference, scored.weights))
            indices = on_device(pairs.astype(np.float64), builder.device)
            weights_and_pairs.append(torch.stack((scored.weights, indices), dim=1))
            progress(len(pairs))
    gathered = gather_over_ranks(torch.cat(weights_and_pairs))
    order = gathered[:, 1].argsort()
    assert torch.equal(gathered[order, 1].cpu(), torch.arange(builder.table.num_pairs).double()), (
        "each pair once"
    )
    joined = PairValues.join(values).over_ranks().select(order)
    scored = ScoredPairs(
        policy=joined.policy_logps(), reference=joined.reference_logps(), weights=gathered[order, 0]
    )
    mean_chosen_tokens = float(builder.table.chosen_lengths.mean())
    return joined.with_losses(weighted_losses(objective, scored, mean_chosen_tokens=mean_chosen_tokens))


def rank_share(rows: Sequence[Row], *, rank: int, num_ranks: int) -> list[tuple[Row, bool]]:
    """This rank's rows, and whether each counts, such that every row counts on exactly one rank.

    All ranks get the same number of rows, as a sharded model computes with all of them or not at all: where
    rows run out, a rank computes the last one once more, for nothing. Neighbouring rows, which are of about
    one size, go to different ranks.
    """
    num_rounds = -(-len(rows) // num_ranks)
    numbers = [turn * num_ranks + rank for turn in range(num_rounds)]
    return [(rows[min(number, len(rows) - 1)], number < len(rows)) for number in numbers]


def held_out_result(
    name: str, values: PairValues, builder: RowBuilder, objective: Objective, *, source_names: Sequence[str],
    seed: int,
) -> HeldOutResult:  # fmt: skip
    """Averages, intervals and breakdowns of what `evaluate_pairs` gave. `seed` is the bootstrap's."""
    beta, has_reference = objective.options.beta, objective.needs_reference
    columns = pair_metrics(values, beta=beta)
    judged = [m for m in JUDGED_METRICS if has_reference or not m.startswith("kl/")]
    metrics = {metric: columns[metric].cpu().numpy() for metric in judged}
    table = builder.table
    traits = PairTraits(
        chosen_tokens=table.chosen_lengths,
        rejected_tokens=table.rejected_lengths,
        source_indices=table.source_indices,
        source_names=source_names,
    )
    record = {
        **averages(values, beta=beta, has_reference=has_reference),
        **length_preference(metrics["rewards/margins"], traits),
    }
    # Sums in another order may differ in the last bit: the averages are those of a training line.
    record = {**describe(metrics, traits, seed=seed), **record}
    return HeldOutResult(name=name, metrics=metrics, traits=traits, record=record)


def compare_results(one: HeldOutResult, other: HeldOutResult, *, seed: int) -> dict[str, Any]:
    """What `other` has more than `one` of each metric, pair by pair: means, intervals, breakdowns.

    Both must be of the same pairs. Pairing takes the pairs' own difficulty out of the difference, so its
    interval is narrower than those of the two models.
    """
    differences = {metric: other.metrics[metric] - one.metrics[metric] for metric in one.metrics}
    return describe(differences, one.traits, seed=seed)
