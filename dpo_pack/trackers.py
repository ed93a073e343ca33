"""metrics.jsonl always; TensorBoard, W&B and the others accelerate knows when the recipe asks for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from dpo_pack import ranks
from dpo_pack.recipe import Recipe


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
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_trackers(accelerator: Accelerator, recipe: Recipe) -> None:
    """Start the trackers that `Accelerator(log_with=...)` was given, with the recipe as their settings."""
    (recipe.output_dir / "trackers").mkdir(exist_ok=True)
    settings = dict(_flatten(recipe.model_dump(mode="json")))
    accelerator.init_trackers(recipe.logging.run_name or recipe.output_dir.name, config=settings)


def end_trackers(accelerator: Accelerator) -> None:
    """Send what is not sent yet. accelerate's own ending would end the group of processes as well."""
    for tracker in accelerator.trackers:
        tracker.finish()


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, tree if isinstance(tree, (bool, int, float, str)) else json.dumps(tree)


def track(accelerator: Accelerator, record: dict[str, Any]) -> None:
    """Send a metrics line to the trackers, eval metrics under `eval/<source>/`."""
    prefix = "" if record["split"] == "train" else f"eval/{record['source']}/"
    numbers = {name: value for name, value in _numbers(record, prefix) if name != f"{prefix}step"}
    accelerator.log(numbers, step=record["step"])


def _numbers(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, int | float]]:
    """Numbers by name, of breakdowns as `by_length/<bucket>/<metric>`. Intervals are in the file only."""
    for key, value in record.items():
        if isinstance(value, dict) and key != "intervals":
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value
