"""metrics.jsonl always; TensorBoard, W&B and the others accelerate knows when the recipe asks for them."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import WandBTracker

from dpo_pack import ranks
from dpo_pack.errors import RunError
from dpo_pack.recipe import Recipe

logger = logging.getLogger(__name__)


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, whole lines only. Of several ranks the first one writes.

    `offset` is how many bytes are valid now; a checkpoint remembers it, and opening the log there again
    cuts off what a killed run wrote after the checkpoint.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        """Opens for writing at `offset` bytes; what follows is discarded.

        A run that goes on from a checkpoint of another directory finds less than that here, and appends.
        """
        self.offset = offset
        self._file = None
        if ranks.is_first():
            path.touch()
            self.offset = min(offset, path.stat().st_size)
            os.truncate(path, self.offset)
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Numbers that are not finite become null: JSON has no other name for them."""
        if self._file is None:
            return
        line = json.dumps(_finite(record), allow_nan=False) + "\n"
        self._file.write(line)
        self._file.flush()
        self.offset += len(line.encode())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_trackers(accelerator: Accelerator, recipe: Recipe, run_id: str) -> None:
    """Start the trackers that `Accelerator(log_with=...)` was given, with the recipe as their settings.

    A run that goes on has the same `run_id`. Raises RunError where one of them does not start.
    """
    directory = recipe.output_dir / "trackers"
    directory.mkdir(exist_ok=True)
    name = recipe.logging.run_name or recipe.output_dir.name
    # accelerate would make a project of each run's name, and a new run of each that goes on.
    wandb = WandBTracker(
        os.environ.get("WANDB_PROJECT", "dpo-pack"), name=name, id=run_id, resume="allow", dir=str(directory)
    )
    accelerator.log_with = [wandb if str(kind) == "wandb" else kind for kind in accelerator.log_with]
    try:
        accelerator.init_trackers(name, config=dict(_flatten(recipe.model_dump(mode="json"))))
    except Exception as error:  # each tracker has its own: nobody is logged in, a server is not there
        told = ", ".join(recipe.logging.trackers)
        raise RunError(
            f"logging.trackers: {told} cannot be started ({_first_line(error)}); log in, or leave it out"
        ) from error


def end_trackers(accelerator: Accelerator) -> None:
    """Send what is not sent yet. accelerate's own ending would end the group of processes as well."""
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except Exception as error:  # the model is saved; see `track`
            _warn_once(_first_line(error))


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, tree if isinstance(tree, (bool, int, float, str)) else json.dumps(tree)


def track(accelerator: Accelerator, record: dict[str, Any]) -> None:
    """Send a metrics line to the trackers, eval metrics under `eval/<source>/`.

    What a tracker raises ends no training: metrics.jsonl has every line.
    """
    prefix = "" if record["split"] == "train" else f"eval/{record['source']}/"
    numbers = {name: value for name, value in _numbers(record, prefix) if name != f"{prefix}step"}
    try:
        accelerator.log(numbers, step=record["step"])
    except Exception as error:
        _warn_once(_first_line(error))


@functools.cache
def _warn_once(what: str) -> None:
    logger.warning("logging.trackers: one failed (%s); training goes on, metrics.jsonl has every line", what)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _numbers(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, int | float]]:
    """Numbers by name, of breakdowns as `by_length/<bucket>/<metric>`. Intervals are in the file only."""
    for key, value in record.items():
        if isinstance(value, dict) and key != "intervals":
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value
