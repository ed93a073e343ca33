"""Writes lines of metrics to metrics.jsonl, and sends them to the trackers that the recipe names."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from dpo_pack.system import ranks
from dpo_pack.system.errors import RunError, first_line
from dpo_pack.system.files import leaves, writing

logger = logging.getLogger(__name__)


class MetricsLog:
    """Writes `metrics.jsonl`: one JSON object a line. Only the first rank writes.

    `offset` is the length of the file in bytes, `crc32` the CRC-32 of these bytes; a checkpoint holds both. A
    resumed run opens the log at its checkpoint's offset; this removes the lines that were written later.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        """Opens the file, which has at least `offset` bytes; cuts off the bytes after `offset`."""
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
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()
        self.offset += len(line.encode())
        self.crc32 = zlib.crc32(line.encode(), self.crc32)

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path):  # `close` writes what is still in memory
                self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_trackers(
    accelerator: Accelerator,
    settings: Mapping[str, Any],
    *,
    trackers: Sequence[str],
    directory: Path,
    name: str,
    run_id: str,
    goes_on: bool = False,
    mlflow_run: str | None = None,
) -> str | None:
    """Starts accelerate's `trackers`; they must be the same as in `Accelerator(log_with=...)`.

    `settings`: the recipe as plain values; trackers show these. The trackers' files go to `directory`. For
    a resumed run (`goes_on`), pass the same `run_id` as before, and as `mlflow_run` the id that this function
    returned before: MLflow makes the id of a run itself. Raises RunError if a tracker does not start.
    """
    directory.mkdir(exist_ok=True)
    key = hashlib.sha256(run_id.encode()).hexdigest()  # comet_ml and swanlab get parts of it as id
    # Without these options, accelerate would name the project after the run, and a resumed run would be new.
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "id": run_id, "resume": "allow", "dir": str(directory)},
        "trackio": {"name": name, "resume": "allow" if goes_on else "never"},
        "mlflow": {"run_name": name, "run_id": mlflow_run},
        "comet_ml": {"experiment_key": key[:32]},
        "swanlab": {"name": name, "id": key[:21], "resume": "allow", "log_dir": str(directory)},
    }
    for place, kind in enumerate(map(str, accelerator.log_with)):
        if kind in options:
            variable = "COMET_PROJECT_NAME" if kind == "comet_ml" else f"{kind.upper()}_PROJECT"
            project = os.environ.get(variable, "dpo-pack")
            accelerator.log_with[place] = LOGGER_TYPE_TO_CLASS[kind](project, **options[kind])
    config = {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in leaves(settings, separator=".")
    }
    try:
        # A resumed run does not send its settings again, because MLflow refuses a second value.
        accelerator.init_trackers(name, config=None if goes_on else config)
    except Exception as error:  # each tracker raises its own errors: no login, no server
        raise RunError(
            f"logging.trackers: {', '.join(trackers)} cannot be started ({first_line(error)}); log in to the "
            "tracker, or remove it from logging.trackers"
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


def tracked_prefix(record: Mapping[str, Any], held_out_names: Sequence[str]) -> str:
    """Returns the prefix of a line's metric names in trackers: that of transformers' Trainer and of TRL."""
    if record["split"] == "train":
        return "train/"
    return "eval/" if len(held_out_names) == 1 else f"eval/{record['source']}_"


def track(accelerator: Accelerator, record: dict[str, Any], *, prefix: str, breakdowns: bool = False) -> None:
    """Sends the numbers of a metrics line to the trackers, under names that begin with `prefix`.

    Trackers get numbers by source and by length only with `breakdowns`. A tracker's error does not end
    training, because metrics.jsonl has every line.
    """
    numbers = {  # not intervals: these are lists
        prefix + name: value
        for name, value in (leaves(record, separator="/") if breakdowns else record.items())
        if isinstance(value, int | float) and name != "step"
    }
    # transformers' Trainer sends the step under this name, so W&B can show both runs over one x-axis.
    numbers["train/global_step"] = record["step"]
    try:
        accelerator.log(numbers, step=record["step"])
    except Exception as error:
        _warn_once(first_line(error))


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "logging.trackers: a tracker failed (%s); training continues, and metrics.jsonl has all metrics",
        reason,
    )
