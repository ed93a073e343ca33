"""A reference pass that is killed at random moments, in processes of its own; prints a JSON report.

    PYTHONPATH=tests python -m support.killed_pass DIRECTORY NUM_KILLS

The model and the pairs are loaded once; every pass is a fork, killed with SIGKILL. Each pass announces the
sequences it has written on a pipe, right after each part is renamed into place.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dpo_pack.data.store import PairTable
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import Amount
from dpo_pack.reference.work import find_work
from support.reference_pairs import (
    NAMESPACE,
    SETTINGS,
    all_sums,
    load_scorer,
    make_table,
    random_pairs,
    run_pass,
)
from support.tiny_models import tiny_model

# Written after every row, so that many kills come while a part is being written.
WRITING_ALWAYS = replace(SETTINGS, write_every_seconds=0.0)


def pass_until_killed(
    cache: ReferenceCache, tables: list[PairTable], scorer: CompletionLogps, seconds: float | None
) -> int:
    """Sequences that a forked pass announced as written before it was killed, or ended."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        computed = 0

        def announce(row: Amount) -> None:
            # Called when a row is computed: all rows before it are written.
            nonlocal computed
            os.write(write_end, f"{computed}\n".encode())
            computed += row.num_sequences

        run_pass(cache, tables, scorer, WRITING_ALWAYS, progress=announce)
        os.write(write_end, f"{computed}\n".encode())
        os._exit(0)
    os.close(write_end)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(read_end) as pipe:
        announced = [int(line) for line in pipe.read().split("\n")[:-1]]
    return announced[-1] if announced else 0


def main(directory: Path, num_kills: int) -> None:
    torch.set_num_threads(1)
    tiny_model("llama").save_pretrained(directory / "model")
    scorer = load_scorer(directory / "model")
    tables = [make_table(random_pairs(60)), make_table(random_pairs(10, seed=1))]
    straight = ReferenceCache(directory / "straight", NAMESPACE)
    begun = time.monotonic()
    pass_until_killed(straight, tables, scorer, None)
    whole_seconds = time.monotonic() - begun
    expected = all_sums(straight, tables)
    draw = random.Random(0)
    report = []
    for number in range(num_kills):
        cache = ReferenceCache(directory / f"killed-{number}", NAMESPACE)
        announced = pass_until_killed(cache, tables, scorer, draw.uniform(0.0, whole_seconds))
        sums = all_sums(cache, tables)
        work = find_work(cache, tables)
        resumed: list[int] = []
        run_pass(cache, tables, scorer, progress=lambda row, to=resumed: to.append(row.num_sequences))  # type: ignore[misc]
        ended = all_sums(cache, tables)
        report.append(
            {
                "announced": announced,
                "kept": work.num_cached,
                "missing": work.num_missing,
                "resumed": sum(resumed),
                "has_wrong_value": bool((np.isfinite(sums) & (sums != expected)).any()),
                "ends_bitwise_equal": ended.tobytes() == expected.tobytes(),
                "damaged": len(list(cache.directory.glob("*.damaged"))),
            }
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
