"""Checks, before the first step, that the cached reference log-probs equal the policy's log-probs.

Legend: P pairs of a row (one forward pass).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import RowLogps
from dpo_pack.system.errors import RunError
from dpo_pack.system.ranks import any_rank
from dpo_pack.training.batches import RowBuilder, with_reference
from dpo_pack.training.metrics import rounding

ALLOWED_ROUNDING = 10.0  # two computations of a sum may differ by its rounding x this


@torch.no_grad()
def check_start(
    policy: Callable[[Row], RowLogps],
    builder: RowBuilder,
    pairs: npt.NDArray[np.int64],
    *,
    dtype: torch.dtype,
) -> None:
    """Compares the policy's log-probs of one row of `pairs`, [P] positions, with the cached reference.

    If they do not agree, the same row is computed again, so that dropout is reported and does not count as
    noise. The allowed noise is ten times the larger of two numbers: the rounding of a sum in `dtype`, and the
    change when the pairs stand in reverse order (routers can then choose other experts). Raises RunError.
    """
    row = builder.build(pairs)
    sums = with_reference(row, policy(row.row)).reference  # [P, (chosen, rejected)]
    table = builder.table
    num_tokens = np.stack((table.chosen_scored[pairs], table.rejected_scored[pairs]), axis=1)
    noise = ALLOWED_ROUNDING * rounding(sums, torch.from_numpy(num_tokens).to(sums.device), dtype)
    # A sharded policy computes on all ranks or on none, so all ranks continue if one finds a difference.
    if not any_rank(_worst_excess(sums - row.reference, noise) is not None):
        return

    again = with_reference(row, policy(row.row)).reference
    reverse_row = builder.build(pairs[::-1].copy())
    in_reverse = with_reference(reverse_row, policy(reverse_row.row)).reference.flip(0)
    if worst := _worst_excess((again - sums).nan_to_num(0.0), noise):  # NaN is not caused by dropout
        raise RunError(
            f"the policy is not repeatable: a log-prob of the first row differs by {worst[0]:.3g} nats when "
            f"it is computed again, and rounding explains only {worst[1]:.2g}; dropout or router noise "
            "is on: set it to zero in the model's config.json"
        )
    noise = torch.maximum(noise, 10 * (in_reverse - sums).abs().max())
    if worst := _worst_excess(sums - row.reference, noise):
        raise RunError(
            f"the policy at step 0 is not its cached reference: a log-prob differs by {worst[0]:.3g} nats, "
            f"and rounding explains only {worst[1]:.2g}; likely causes: the model or its adapter "
            "changed on disk while it was read, policy and reference ran in different dtypes or autocast, "
            "or another release filled the cache (set another reference.cache_dir to compute the "
            "reference again)"
        )


def _worst_excess(differences: Tensor, noise: Tensor) -> tuple[float, float] | None:
    """Returns the (difference, noise) with the largest difference - noise; None if no difference > noise."""
    differences = differences.abs()
    if bool((differences <= noise).all()):
        return None
    worst = int((differences - noise).nan_to_num(torch.inf).argmax())
    return float(differences.flatten()[worst]), float(noise.flatten()[worst])
