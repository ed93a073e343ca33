"""metrics.jsonl always; TensorBoard, W&B and the others accelerate knows when the recipe asks for them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from dpo_pack.recipe import Recipe


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, whole lines only.

    `offset` is how many bytes are valid now; a checkpoint remembers it, and opening the log there again
    cuts off what a killed run wrote after the checkpoint.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        """Opens for writing at `offset` bytes; what follows is discarded.

        A run that goes on from a checkpoint of another directory finds less than that here, and appends.
        """
        path.touch()
        self.offset = min(offset, path.stat().st_size)
        os.truncate(path, self.offset)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        self._file.write(line)
        self._file.flush()
        self.offset += len(line.encode())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def start_trackers(accelerator: Accelerator, recipe: Recipe) -> None:
    """Start the trackers that `Accelerator(log_with=...)` was given, with the recipe as their settings."""
    (recipe.output_dir / "trackers").mkdir(exist_ok=True)
    settings = dict(_flatten(recipe.model_dump(mode="json")))
    accelerator.init_trackers(recipe.logging.run_name or recipe.output_dir.name, config=settings)


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, tree if isinstance(tree, (bool, int, float, str)) else json.dumps(tree)


def track(accelerator: Accelerator, record: dict[str, Any]) -> None:
    """Send a metrics line to the trackers, eval metrics under `eval/<source>/`."""
    prefix = "" if record["split"] == "train" else f"eval/{record['source']}/"
    numbers = {
        f"{prefix}{key}": value
        for key, value in record.items()
        if isinstance(value, (int, float)) and key != "step"
    }
    accelerator.log(numbers, step=record["step"])
