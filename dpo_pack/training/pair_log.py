"""Writes loss and log-probs of each pair each time it is trained on: the directory `pairs.parquet` of a run.

A step only keeps the table of numbers that it computes anyway, see training/metrics.py. The tables of many
steps are written as one Parquet file, complete or absent. A checkpoint first writes what is in memory, and a
resumed run first removes the lines of steps after its checkpoint.
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

_MOST_WAITING = 16_384  # with this many pairs of all ranks in memory, they are written
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
    `loss`: with the pair's weight. Log-probs are sums in nats. Without a reference, the columns of the
    reference are null, and `margin` is beta x the policy's log-probs, chosen minus rejected.
    """

    directory: Path
    table: PairTable  # the training pairs
    source_names: Sequence[str]
    beta: float
    has_reference: bool
    # Of each step in memory: [P, 3] step, epoch and pair of each line, and [P, numbers kept] their values.
    _waiting: list[tuple[npt.NDArray[np.float64], Tensor]] = field(default_factory=list)
    _num_waiting: int = 0

    def cut_after(self, step: int) -> None:
        """Removes the lines of the steps after `step`; only rank 0 must call this. Raises CacheError."""
        for path in self.directory.glob("part-*.parquet"):
            steps = _PART.fullmatch(path.name)
            if steps is None or int(steps[2]) <= step:
                continue
            with writing(path):
                if int(steps[1]) <= step:  # this file also has lines that must stay
                    kept = pq.read_table(path)
                    self._write(kept.filter(pc.field("step") <= step))
                path.unlink()

    def add(
        self, step: int, epoch: float, pairs: npt.NDArray[np.int64], values: PairValues, *, num_pairs: int
    ) -> None:
        """Keeps the values of this rank's [P] `pairs` in a step; all ranks together have `num_pairs`.

        Every rank must call this: when enough pairs are in memory, it writes them with `flush`.
        """
        facts = np.column_stack((np.full(len(pairs), step), np.full(len(pairs), epoch), pairs))
        self._waiting.append((facts, values.table))
        self._num_waiting += num_pairs
        if self._num_waiting >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes the values in memory to disk; waits for the device. Every rank must call it.

        Raises CacheError.
        """
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return
        facts = torch.from_numpy(np.concatenate([facts for facts, _ in waiting]))
        numbers = torch.cat([values for _, values in waiting])
        together = torch.cat([facts.to(numbers.device), numbers], dim=1)  # float64: exact
        every = gather_over_ranks(together).cpu()
        if ranks.is_first():
            self._write(self._lines(every[:, :3].numpy(), PairValues(table=every[:, 3:])))

    def _lines(self, facts: npt.NDArray[np.float64], values: PairValues) -> pa.Table:
        """Returns the lines to write, in an order that does not depend on the number of ranks.

        facts: [P, 3] step, epoch and pair of each line.
        """
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
