"""What a run records of its steps: metrics.jsonl, the trackers that the recipe names, and pairs.parquet.

pairs.parquet is a directory: the tables of many steps are one file of it, complete or absent. A checkpoint
first writes what is in memory, and a resumed run first removes the lines of steps after its checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch import Tensor

from dpo_pack.data.store import PairTable
from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import leaves, writing, written_aside
from dpo_pack.system.ranks import gather_over_ranks
from dpo_pack.training.metrics import NAMES

logger = logging.getLogger(__name__)

_MOST_WAITING = 16_384  # with this many pairs of all ranks in memory, they are written
_LOGPS = {
    "chosen_logps": "policy_chosen",
    "rejected_logps": "policy_rejected",
    "reference_chosen_logps": "reference_chosen",
    "reference_rejected_logps": "reference_rejected",
}
_PART = re.compile(r"part-(\d+)-(\d+)\.parquet")


class MetricsLog:
    """Writes `metrics.jsonl`: one JSON object a line. Only the first rank writes.

    A checkpoint holds `offset`, the length of the file in bytes, and `crc32` of these bytes. A resumed run
    opens the log at its checkpoint's offset; this removes later lines."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.offset, self.crc32 = offset, 0
        self._file = None
        if ranks.is_first():
            self.path = path
            with writing(path):
                self._file = path.open("a", encoding="utf-8")
                assert self._file.tell() >= offset
                self._file.truncate(offset)
                self.crc32 = zlib.crc32(path.read_bytes())

    def write(self, record: dict[str, Any]) -> None:
        """Writes a line. Numbers that are not finite become null, because JSON has no such numbers."""
        if self._file is None:
            return
        finite = json.loads(json.dumps(record), parse_constant=lambda constant: None)
        line = json.dumps(finite, allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()
        self.offset += len(line.encode())
        self.crc32 = zlib.crc32(line.encode(), self.crc32)

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path):  # `close` writes what is still in memory
                self._file.close()


def start_trackers(
    accelerator: Accelerator,
    settings: Mapping[str, Any],
    directory: Path,
    *,
    name: str,
    run_id: str,
    mlflow_run: str | None = None,
    resumed_after: int | None = None,
) -> str | None:
    """Starts the trackers of `Accelerator(log_with=...)`, which show `settings`; returns the id of an MLflow
    run, which MLflow makes itself. A run that is `resumed_after` a step passes the same ids again, and is the
    same run there. Raises RunError if a tracker fails."""
    directory.mkdir(exist_ok=True)
    resumes, key = resumed_after is not None, hashlib.sha256(run_id.encode()).hexdigest()
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "id": run_id, "resume": "allow", "dir": str(directory)},
        "trackio": {"name": name, "resume": "allow" if resumes else "never"},
        "mlflow": {"run_name": name, "run_id": mlflow_run},
        "comet_ml": {"experiment_key": key[:32]},
        "swanlab": {"name": name, "id": key[:21], "resume": "allow", "log_dir": str(directory)},
    }
    for number, kind in enumerate(map(str, accelerator.log_with)):
        if kind in options:  # else accelerate would name the project after the run
            variable = "COMET_PROJECT_NAME" if kind == "comet_ml" else f"{kind.upper()}_PROJECT"
            project = os.environ.get(variable, "dpo-pack")
            accelerator.log_with[number] = LOGGER_TYPE_TO_CLASS[kind](project, **options[kind])
    # MLflow refuses a second value of a setting. TensorBoard hides what was sent of later steps.
    config = {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in leaves(settings, separator=".")
    }
    purge = {} if resumed_after is None else {"tensorboard": {"purge_step": resumed_after + 1}}
    try:
        accelerator.init_trackers(name, None if resumes else config, purge)
    except Exception as error:  # each tracker raises its own errors: no login, no server
        raise RunError(
            f"logging.trackers: one cannot be started ({first_line(error)}); log in to it"
        ) from error
    begun = {tracker.name: tracker.tracker for tracker in accelerator.trackers} if ranks.is_first() else {}
    if "comet_ml" in begun:
        begun["comet_ml"].set_name(name)
    return begun["mlflow"].info.run_id if "mlflow" in begun else None


def end_trackers(accelerator: Accelerator) -> None:
    """Sends unsent lines, closes trackers; accelerate's `end_training` would also end the process group."""
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:  # the model is saved, so the run must not fail
            _warn_once(first_line(error))


def track(accelerator: Accelerator, record: dict[str, Any], held_out_names: Sequence[str] = ()) -> None:
    """Sends the numbers of a metrics line to the trackers, under the names of transformers' Trainer and TRL.
    A tracker's error does not end training."""
    prefix = "train/"
    if record["split"] != "train":
        prefix = "eval/" if len(held_out_names) == 1 else f"eval/{record['source']}_"
    numbers = {prefix + name: value for name, value in record.items() if isinstance(value, int | float)}
    # transformers' Trainer sends the step under this name, so W&B can show both runs over one x-axis.
    numbers = {name: value for name, value in numbers.items() if name != f"{prefix}step"}
    try:
        accelerator.log(numbers | {"train/global_step": record["step"]}, step=record["step"])
    except Exception as error:
        _warn_once(first_line(error))


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "logging.trackers: a tracker failed (%s); training continues, and metrics.jsonl has all metrics",
        reason,
    )


@dataclass(slots=True, kw_only=True)
class PairLog:
    """Writes a line for each time a pair was trained on; rank 0 writes the lines of all ranks.

    `source`, `row`: where the pair came from. `margin`: beta x (policy - reference), chosen minus rejected.
    `loss`: with the pair's weight. Log-probs are sums in nats. Without a reference, its columns are null, and
    `margin` leaves it out."""

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
        self, step: int, epoch: float, pairs: npt.NDArray[np.int64], values: Tensor, *, num_pairs: int
    ) -> None:
        """Keeps the `pair_values` of this rank's [P] `pairs` in a step of `num_pairs` on all ranks. Every
        rank must call it: it writes when enough pairs are in memory."""
        facts = np.column_stack((np.full(len(pairs), step), np.full(len(pairs), epoch), pairs))
        self._waiting.append((facts, values))
        self._num_waiting += num_pairs
        if self._num_waiting >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Writes the values in memory to disk; waits for the device. Every rank must call it. Raises
        CacheError."""
        if not self._waiting:
            return
        facts = torch.from_numpy(np.concatenate([facts for facts, _ in self._waiting]))
        numbers = torch.cat([values for _, values in self._waiting])
        every = gather_over_ranks(torch.cat([facts.to(numbers.device), numbers], dim=1)).cpu().numpy()
        ranks.first_does_for_all(lambda: self._write_values(every))
        self._waiting, self._num_waiting = [], 0  # a disk that was full may have room later

    def _write_values(self, every: npt.NDArray[np.float64]) -> None:
        # By step, then by pair: this order does not depend on the number of ranks.
        every = every[np.lexsort((every[:, 2], every[:, 0]))]
        step, epoch, pair = every[:, :3].T
        pairs = pair.astype(np.int64)
        columns = {name: every[:, 3 + NAMES.index(kept)] for name, kept in _LOGPS.items()}
        margins = columns["chosen_logps"] - columns["rejected_logps"]
        if self.has_reference:
            margins = margins - (columns["reference_chosen_logps"] - columns["reference_rejected_logps"])
        columns = {"margin": self.beta * margins, **columns, "loss": every[:, 3 + NAMES.index("loss")]}
        arrays = {name: pa.array(column.astype(np.float32)) for name, column in columns.items()}
        if not self.has_reference:
            arrays |= {name: pa.nulls(len(pairs), pa.float32()) for name in _LOGPS if "reference" in name}
        sources = pa.array(self.table.source_indices[pairs].astype(np.int32))
        lines = {
            "source": pa.DictionaryArray.from_arrays(sources, pa.array(self.source_names)),
            "row": pa.array(self.table.row_numbers[pairs].astype(np.int64)),
            "step": pa.array(step.astype(np.int64)),
            "epoch": pa.array(epoch),
            **arrays,
        }
        self._write(pa.table(lines))

    def _write(self, lines: pa.Table) -> None:
        steps = pc.min_max(lines["step"])
        name = f"part-{steps['min'].as_py():06d}-{steps['max'].as_py():06d}.parquet"
        with written_aside(self.directory / name) as temporary:
            pq.write_table(lines, temporary, write_page_checksum=True)
