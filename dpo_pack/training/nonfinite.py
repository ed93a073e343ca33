"""Keeps losses and gradients that are not finite away from the parameters, without waiting for the device.

A fused optimizer takes a flag as a tensor on the device (`found_inf`, which torch made for gradient scalers).
If the flag is 1, the kernel does not change parameters, moments and step counts, not even by one bit. The
host reads the flag when it next logs, evaluates or saves. In a training step:

    must_skip = guard.check(step, values, grad_norm, pairs)
    skip_update_if(must_skip, optimizer)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from dpo_pack.data.store import PairTable
from dpo_pack.system import ranks
from dpo_pack.system.files import write_json_atomically
from dpo_pack.system.ranks import gather_over_ranks, sum_over_ranks
from dpo_pack.training.metrics import PairValues


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """The values that `NonfiniteGuard` keeps of a step until the host reads whether the step was finite."""

    step: int
    is_nonfinite: Tensor  # [] float32, 0 or 1, on the device
    grad_norm: Tensor  # []
    pair_indices: npt.NDArray[np.int64]  # [P] positions in the source's table
    losses: Tensor  # [P]


class NonfiniteGuard:
    """Decides for each step whether to skip its update, and later reports the steps that were not finite.

    With `stops` (`train.stop_on_nonfinite`) the first non-finite step also blocks all later updates, until
    the host reads about it and stops the run.
    """

    def __init__(self, *, stops: bool, device: torch.device) -> None:
        self.stops = stops
        self._is_blocked = torch.zeros((), dtype=torch.float32, device=device)
        self._unread: list[CheckedStep] = []

    def check(self, step: int, values: PairValues, grad_norm: Tensor, pairs: npt.NDArray[np.int64]) -> Tensor:
        """Returns [] float32 on the device: 1 if all ranks must skip the update of `step`. Does not wait.

        values: metrics of this rank's pairs. pairs: [P] positions of these pairs in the source's table.
        """
        # Gradients may be offloaded to the CPU; their norm is then on the CPU too.
        is_finite = torch.isfinite(values.losses.sum()) & torch.isfinite(grad_norm).to(values.losses.device)
        is_nonfinite = sum_over_ranks((~is_finite).float()).clamp(max=1)  # all ranks update, or all skip
        self._unread.append(
            CheckedStep(
                step=step,
                is_nonfinite=is_nonfinite,
                grad_norm=grad_norm,
                pair_indices=pairs,
                losses=values.losses,
            )
        )
        if not self.stops:
            return is_nonfinite
        self._is_blocked = torch.maximum(self._is_blocked, is_nonfinite)
        return self._is_blocked

    def report(self, directory: Path, table: PairTable, source_names: Sequence[str]) -> Iterator[str]:
        """Yields a sentence for each non-finite step since the previous call; lists its pairs in `directory`.

        Waits for the device; every rank must call this method.
        """
        for found in self.read():
            path = directory / f"nonfinite-step-{found.step:06d}.json"
            if ranks.is_first():
                write_json_atomically(path, describe_nonfinite(found, table, source_names))
            rows = sorted(table.row_numbers[found.pair_indices].tolist())
            yield (
                f"step {found.step}: loss or gradient is not finite, and no update was made; lower optim.lr, "
                f"or look at the step's rows of data.train ({', '.join(map(str, rows[:10]))}"
                f"{', ...' if len(rows) > 10 else ''}), listed in {path}"
            )

    def read(self) -> list[CheckedStep]:
        """Returns the non-finite steps since the previous call, each with the pairs of all ranks.

        Waits for the device; every rank must call this method.
        """
        unread, self._unread = self._unread, []
        flags = torch.stack([step.is_nonfinite for step in unread]).tolist() if unread else []
        return [
            replace(
                step,
                pair_indices=gather_over_ranks(torch.from_numpy(step.pair_indices).to(step.losses.device))
                .cpu()
                .numpy(),
                losses=gather_over_ranks(step.losses).cpu(),
            )
            for step, flag in zip(unread, flags, strict=True)
            if flag
        ]


def skip_update_if(must_skip: Tensor, optimizer: Optimizer) -> None:
    """Makes the next `optimizer.step()` change nothing if `must_skip`, [] on the device, is 1.

    Fused optimizers read `must_skip` on the device. For any other optimizer, the host waits for it here.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = must_skip.to(device)  # type: ignore[attr-defined]
    elif bool(must_skip):
        optimizer.zero_grad(set_to_none=True)  # without gradients a step changes nothing


def describe_nonfinite(found: CheckedStep, table: PairTable, source_names: Sequence[str]) -> dict[str, Any]:
    """Returns the step's pairs of `table` for JSON; pairs whose own loss is not finite come first."""
    losses = found.losses.numpy()
    order = np.lexsort((found.pair_indices, np.isfinite(losses)))
    pairs = [
        {
            "source": source_names[table.source_indices[pair]],
            "row": int(table.row_numbers[pair]),
            "pair": int(pair),
            "loss": _json_number(loss),
        }
        for pair, loss in zip(found.pair_indices[order], losses[order], strict=True)
    ]
    return {"step": found.step, "grad_norm": _json_number(float(found.grad_norm)), "pairs": pairs}


def _json_number(value: float) -> float | str:
    """Returns nan and inf as strings, because JSON has no such numbers."""
    return float(value) if np.isfinite(value) else str(float(value))
