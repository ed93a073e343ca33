"""The search of the longest row of the reference pass, with a tenth of a GPU's memory.

    python -m benchmarking.search DIRECTORY DEVICE SHAPE

On a CPU, where nothing is searched, a stand-in: rows of more than a few tokens are said not to fit.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarking.process import save_model
from benchmarking.shapes import SHAPES
from benchmarking.workloads import make_workload
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.reference import fill
from dpo_pack.run import reference_stage
from dpo_pack.run.prepare import prepare
from dpo_pack.system.console import make_console

MEMORY_SHARE = 0.1
STAND_IN_TOKENS = 20_000  # rows of more tokens are said not to fit


def main(directory: Path, device: str, shape: str) -> None:
    """Search, compute the reference of some pairs, and print what was found."""
    pairs = make_workload(
        "tulu3",
        directory / f"search-{shape}",
        num_pairs=64,
        vocabulary=SHAPES[shape]["vocab_size"],
        hh_pairs=None,
    )
    model = directory / f"model-{shape}-float32"
    save_model(shape, model, parameters="float32", device=device)
    cache = directory / f"search-cache-{time.time_ns()}"  # new, so it has no result of an earlier search
    recipe = parse_recipe(
        {
            "output_dir": str(directory / "search-run"),
            "model": {"path": str(model), "compile": False},
            "reference": {"cache_dir": str(cache)},
            "data": {
                "train": {"path": str(pairs.pairs), "format": "tokenized"},
                "max_length": pairs.max_length,
            },
        },
        [],
    )
    with _little_memory() if device == "cuda" else _stand_in(cache):
        begun = time.monotonic()
        filled = reference_stage.prepare_reference(prepare(recipe, make_console()), None)
    print(f"{filled.num_computed} sequences in {time.monotonic() - begun:.1f} s")


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def row_fits(*arguments: Any) -> bool:
    """In place of `probe_row`, whose last argument is the tokens of the row."""
    return bool(arguments[-1] <= STAND_IN_TOKENS)


@contextlib.contextmanager
def _stand_in(cache: Path) -> Iterator[None]:
    """The whole search, but for the two places that ask a GPU: whether to search, and whether a row fits."""
    search = fill.BudgetSearch(memo_path=cache / "memo.json", key="cpu", is_exact=lambda _: True)
    with (
        patch.object(reference_stage, "_budget_search", lambda *_: search),
        patch.object(fill, "probe_row", row_fits),
    ):
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
