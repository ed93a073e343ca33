"""Writes what each pair said each time it was trained on: the directory `pairs.parquet` of a run.

A step only keeps the table of numbers that it has anyway, see training/metrics.py. The tables of many steps
become one Parquet file, so that neither the device nor the disk waits for a step. Each file is complete or
absent, and ends at the latest where a checkpoint begins. A resumed run first cuts off what came later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dpo_pack.data.store import PairTable
from dpo_pack.system import ranks
from dpo_pack.system.files import writing, written_aside
from dpo_pack.system.ranks import gather_over_ranks
from dpo_pack.training.metrics import PairValues

_MOST_WAITING = 16_384  # pairs, of all ranks, that are not on disk
_LOGPS = {
    "chosen_logps": "policy_chosen",
    "rejected_logps": "policy_rejected",
    "reference_chosen_logps": "reference_chosen",
    "reference_rejected_logps": "reference_rejected",
}
_PART = re.compile(r"part-(\d+)-(\d+)\.parquet")


@dataclass(slots=True, kw_only=True)
class PairLog:
    """Writes a line for each time a pair was trained on; rank 0 writes the lines of all ranks.

    `source`, `row`: where the pair came from. `margin`: beta x (policy - reference), chosen minus rejected.
    `loss`: with the pair's weight. Log-probs are sums in nats. Without a reference, its columns are null and
    `margin` is the policy's.
    """

    directory: Path
    table: PairTable  # the training pairs
    source_names: Sequence[str]
    beta: float
    has_reference: bool
    _waiting: list[tuple[int, float, npt.NDArray[np.int64], Tensor]] = field(default_factory=list)
    _num_waiting: int = 0

    def cut_after(self, step: int) -> None:
        """Removes what was written of later steps; only rank 0 may call it. Raises CacheError."""
        for path in self.directory.glob("part-*.parquet"):
            steps = _PART.fullmatch(path.name)
            if steps is None or int(steps[2]) <= step:
                continue
            with writing(path):
                if int(steps[1]) <= step:  # a run resumes from a step at which it did not save before
                    kept = pq.read_table(path)
                    self._write(kept.filter(pc.field("step") <= step))
                path.unlink()

    def add(
        self,
        step: int,
        epoch: float,
        pairs: npt.NDArray[np.int64],
        values: PairValues,
        *,
        num_pairs: int,
    ) -> None:
        """Takes the values of this rank's [P] pairs in a step; all ranks have `num_pairs`. Collective."""
        self._waiting.append((step, epoch, pairs, values.table))
        self._num_waiting += num_pairs
        if self._num_waiting >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes what is not on disk. Waits for the device. Collective. Raises CacheError."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return
        numbers = torch.cat([values for _, _, _, values in waiting])
        counts = [len(pairs) for _, _, pairs, _ in waiting]
        facts = np.stack(
            [
                np.repeat([step for step, *_ in waiting], counts).astype(np.float64),
                np.repeat([epoch for _, epoch, *_ in waiting], counts),
                np.concatenate([pairs for _, _, pairs, _ in waiting]),
            ],
            axis=1,
        )
        together = torch.cat([torch.from_numpy(facts).to(numbers.device), numbers], dim=1)  # float64: exact
        every = gather_over_ranks(together).cpu()
        if ranks.is_first():
            self._write(self._lines(every[:, :3].numpy(), PairValues(table=every[:, 3:])))

    def _lines(self, facts: npt.NDArray[np.float64], values: PairValues) -> pa.Table:
        """Returns the lines of steps, in an order that does not depend on the number of ranks."""
        order = np.lexsort((facts[:, 2], facts[:, 0]))
        step, epoch, pair = facts[order].T
        values = values.select(torch.from_numpy(order))
        pair_indices = pair.astype(np.int64)
        columns = {name: values.column(kept).numpy() for name, kept in _LOGPS.items()}
        margins = columns["chosen_logps"] - columns["rejected_logps"]
        if self.has_reference:
            margins = margins - (columns["reference_chosen_logps"] - columns["reference_rejected_logps"])
        numbers = {"margin": self.beta * margins, **columns, "loss": values.losses.numpy()}
        names = pa.DictionaryArray.from_arrays(
            pa.array(self.table.source_indices[pair_indices].astype(np.int32)), pa.array(self.source_names)
        )
        return pa.table(
            {
                "source": names,
                "row": pa.array(self.table.row_numbers[pair_indices].astype(np.int64)),
                "step": pa.array(step.astype(np.int64)),
                "epoch": pa.array(epoch),
                **{
                    name: pa.nulls(len(column), pa.float32())
                    if name.startswith("reference") and not self.has_reference
                    else pa.array(column.astype(np.float32))
                    for name, column in numbers.items()
                },
            }
        )

    def _write(self, lines: pa.Table) -> None:
        steps = pc.min_max(lines["step"])
        name = f"part-{steps['min'].as_py():06d}-{steps['max'].as_py():06d}.parquet"
        with written_aside(self.directory / name) as temporary:
            pq.write_table(lines, temporary, write_page_checksum=True)
