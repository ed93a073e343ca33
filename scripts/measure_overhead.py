"""Measure what the live line, console.log, metrics.jsonl and pairs.parquet cost, in CPU seconds of the steps.

    script -qec "python scripts/measure_overhead.py DIRECTORY" /dev/null

Trains steps of the quickstart's pairs with the benchmark's 25M model, on a CPU with one thread, and adds up
the CPU time of the thread in each function that only reports. `script` gives a terminal, so that the live
line moves. Writes nothing outside of DIRECTORY.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarking.shapes import save_model
from rich.live import Live

from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.log import RunLog
from dpo_pack.system.console import make_console
from dpo_pack.trainer import Trainer, train

ROOT = Path(__file__).resolve().parent.parent


_STEPS = 41
_seconds: dict[str, float] = defaultdict(float)


def timed(owner: Any, name: str) -> None:
    """Adds up the CPU time of the thread in the method `name` of `owner`."""
    plain: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(plain)
    def method(*arguments: Any, **options: Any) -> Any:
        begun = time.thread_time()
        try:
            return plain(*arguments, **options)
        finally:
            _seconds[f"{owner.__name__}.{name}"] += time.thread_time() - begun

    setattr(owner, name, method)


def main(directory: Path) -> None:
    assets, model = directory / "assets", directory / "model"
    if not model.exists():
        subprocess.run([sys.executable, ROOT / "scripts" / "make_quickstart.py", assets], check=True)
        save_model("25m", model, parameters="float32", device="cpu")
    recipe = load_recipe(
        ROOT / "configs" / "quickstart.yaml",
        [
            f"output_dir={directory / 'run'}", f"model.path={model}", f"tokenizer.path={assets / 'model'}",
            f"data.train={assets / 'train.jsonl'}", "data.train.0.max_pairs=384", "data.eval=[]",
            f"reference.cache_dir={directory / 'cache'}", "train.eval_every_steps=null",
            "logging.samples=null", f"train.max_steps={_STEPS}", "logging.every_steps=1",
            "checkpoint.resume=never", "train.epochs=4",
        ],
    )  # fmt: skip
    for name in ("end_step", "write_step", "flush_pairs"):
        timed(RunLog, name)
    timed(Live, "refresh")  # its own thread calls it, and so do lines printed above it: those count twice
    begun: list[float] = []  # CPU seconds of the process after each step
    wall: list[float] = []

    def look(trainer: Trainer) -> None:
        if not begun:
            _seconds.clear()  # drops start-up, the reference pass and the first step
            wall.append(time.monotonic())
        begun.append(time.process_time())
        wall.append(time.monotonic())

    train(recipe, make_console(), overwrite=True, after_step=look)
    steps = begun[-1] - begun[0]
    for name, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        print(f"{name}: {seconds:.3f} CPU seconds, {seconds / steps:.2%} of the steps'")
    total = sum(_seconds.values())
    print(f"together {total:.3f} of {steps:.1f} CPU seconds in {_STEPS - 1} steps: {total / steps:.2%}")
    print(f"The steps took {wall[-1] - wall[0]:.1f} seconds; the live line costs the same each second.")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
