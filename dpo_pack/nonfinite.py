"""Keep losses and gradients that are not finite away from the parameters, without waiting for the device.

Whether a step is finite is known on the device only. The host does not ask: it hands the answer to the fused
optimizer as `found_inf`, torch's own way for gradient scalers, and the kernel then leaves parameters, moments
and step counts as they are, bit for bit. The host learns of it when a line is logged anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from dpo_pack import ranks
from dpo_pack.collectives import gather_over_ranks, largest_over_ranks
from dpo_pack.data.store import PairTable
from dpo_pack.files import write_json_atomically
from dpo_pack.metrics import PairValues


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteStep:
    """A step whose loss or gradient was not finite, and so made no update."""

    step: int
    grad_norm: float
    pair_indices: npt.NDArray[np.int64]  # [P] of all ranks, into the source's table
    losses: npt.NDArray[np.float64]  # [P]


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnreadStep:
    """A step the host knows nothing of yet."""

    step: int
    is_nonfinite: Tensor  # [] float32, 0 or 1, on the device
    grad_norm: Tensor  # []
    pair_indices: npt.NDArray[np.int64]  # [P] of this rank
    losses: Tensor  # [P]


class NonfiniteGuard:
    """Takes optimizer steps, but not those that would poison the parameters.

    With `stops`, the first such step also blocks every later update, so that the parameters are still those
    before it when the host learns of it and stops.
    """

    def __init__(self, optimizer: Optimizer, *, stops: bool, device: torch.device) -> None:
        """Of optimizers that are not fused, and so know no `found_inf`, the host waits at each step."""
        self.optimizer = optimizer
        self._is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self._update_device = optimizer.param_groups[0]["params"][0].device
        self.stops = stops
        self._is_blocked = torch.zeros((), dtype=torch.float32, device=device)
        self._unread: list[_UnreadStep] = []

    def step_if_finite(
        self, number: int, values: PairValues, grad_norm: Tensor, pairs: npt.NDArray[np.int64]
    ) -> None:
        """Optimizer step `number`, or none when a loss or the gradient is not finite.

        Waits for nothing where the optimizer is fused.
        values: of this rank's pairs, whose positions in the source's table are `pairs`, [P].
        """
        # Gradients, and so their norm, may be offloaded to the CPU.
        is_finite = torch.isfinite(values.losses.sum()) & torch.isfinite(grad_norm).to(values.losses.device)
        is_nonfinite = largest_over_ranks((~is_finite).float())  # every rank must do the same
        skips = is_nonfinite
        if self.stops:
            self._is_blocked = skips = torch.maximum(self._is_blocked, is_nonfinite)
        if self._is_fused:
            self.optimizer.found_inf = skips.to(self._update_device)  # type: ignore[attr-defined]
        elif bool(skips):
            self.optimizer.zero_grad(set_to_none=True)  # without gradients a step does nothing
        self.optimizer.step()
        self._unread.append(
            _UnreadStep(
                step=number,
                is_nonfinite=is_nonfinite,
                grad_norm=grad_norm,
                pair_indices=pairs,
                losses=values.losses,
            )
        )

    def report(self, directory: Path, table: PairTable, source_names: Sequence[str]) -> Iterator[str]:
        """A sentence for each such step since the last call; its pairs are dumped in `directory`.

        Waits for the device; every rank must call.
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

    def read(self) -> list[NonfiniteStep]:
        """The steps since the last call that were not finite. Waits for the device; every rank must call."""
        unread, self._unread = self._unread, []
        if not unread:
            return []
        flags: list[float] = torch.stack([step.is_nonfinite for step in unread]).tolist()
        return [_gathered(step) for step, flag in zip(unread, flags, strict=True) if flag]


def _gathered(step: _UnreadStep) -> NonfiniteStep:
    indices = torch.from_numpy(step.pair_indices).to(step.losses.device)
    return NonfiniteStep(
        step=step.step,
        grad_norm=float(step.grad_norm),
        pair_indices=gather_over_ranks(indices).cpu().numpy(),
        losses=gather_over_ranks(step.losses).cpu().numpy(),
    )


def describe_nonfinite(found: NonfiniteStep, table: PairTable, source_names: Sequence[str]) -> dict[str, Any]:
    """For JSON: the step's pairs of `table`, those whose own loss is not finite first."""
    order = np.lexsort((found.pair_indices, np.isfinite(found.losses)))
    pairs = [
        {
            "source": source_names[table.source_indices[pair]],
            "row": int(table.row_numbers[pair]),
            "pair": int(pair),
            "loss": _json_number(loss),
        }
        for pair, loss in zip(found.pair_indices[order], found.losses[order], strict=True)
    ]
    return {"step": found.step, "grad_norm": _json_number(found.grad_norm), "pairs": pairs}


def _json_number(value: float) -> float | str:
    """JSON has no nan and no inf."""
    return float(value) if np.isfinite(value) else str(float(value))
