"""The search of the longest row of the reference pass, with little of a GPU's memory.

    python -m benchmarking.search DIRECTORY DEVICE SHAPE

Ends with an error if no row ran out of memory: then the search has shown nothing. On a CPU, where nothing is
searched, a stand-in: rows of more than a few tokens are said not to fit.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarking.process import save_model
from benchmarking.shapes import SHAPES
from benchmarking.workloads import make_workload
from dpo_pack.recipe.load import parse_recipe
from dpo_pack.reference import compute
from dpo_pack.run import pairs
from dpo_pack.run.setup import prepare
from dpo_pack.system.console import make_console

# Too little for a row of 2^17 tokens, up to which the search goes: 0.5B has 1 or 2 GB of weights, and such a
# row 5 GB of activations (computed).
MEMORY_BYTES = 4 * 2**30
# 2,000 pairs have 2 million tokens: enough for rows that do not fit.
NUM_PAIRS = {"cpu": 64, "cuda": 2000}
STAND_IN_TOKENS = 20_000  # rows of more tokens are said not to fit


def main(directory: Path, device: str, shape: str) -> None:
    """Search, compute the reference of some pairs, and print what was found."""
    workload = make_workload(
        "tulu3",
        directory / f"search-{shape}",
        num_pairs=NUM_PAIRS[device],
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
                "train": {"path": str(workload.pairs), "format": "tokenized"},
                "max_length": workload.max_length,
            },
        },
        [],
    )
    on_cuda = device == "cuda"
    probe = compute.probe_row if on_cuda else row_fits
    with _little_memory() if on_cuda else _stand_in(cache), _noted_probes(probe) as probes:
        begun = time.monotonic()
        filled = pairs.prepare_reference(prepare(recipe, make_console()), None)
    print(f"{filled.num_computed} sequences in {time.monotonic() - begun:.1f} s")
    if all(probes):
        sys.exit("no row ran out of memory: this does not show what happens then")


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    torch.cuda.set_per_process_memory_fraction(min(1.0, MEMORY_BYTES / torch.cuda.mem_get_info()[1]))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def _noted_probes(probe: Callable[..., bool]) -> Iterator[list[bool]]:
    """Prints each row that is tried; whether it fits."""
    found: list[bool] = []

    def noted(*arguments: Any) -> bool:
        found.append(probe(*arguments))
        print(f"a row of {arguments[-1]:,} tokens {'fits' if found[-1] else 'ran out of memory'}", flush=True)
        return found[-1]

    with patch.object(compute, "probe_row", noted):
        yield found


def row_fits(*arguments: Any) -> bool:
    """In place of `probe_row`, whose last argument is the tokens of the row."""
    return bool(arguments[-1] <= STAND_IN_TOKENS)


@contextlib.contextmanager
def _stand_in(cache: Path) -> Iterator[None]:
    """A search also on a CPU, where there is none."""
    search = compute.BudgetSearch(memo_path=cache / "memo.json", key="cpu", is_exact=lambda _: True)

    def fill_and_search(*given: Any, **options: Any) -> None:
        compute.fill_cache(*given, **{**options, "search": search})

    with patch.object(pairs, "fill_cache", fill_and_search):
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
