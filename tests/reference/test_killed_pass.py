"""A reference pass that is killed before each of its file operations, and in the middle of each write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.crash_points import Files, read_files, write_files
from support.file_operations import IS_POSSIBLE, Half, Operation, in_forks, traced
from support.reference_pairs import (
    NAMESPACE,
    SETTINGS,
    all_sums,
    load_scorer,
    make_table,
    num_cached,
    random_pairs,
    run_pass,
)

from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import find_work


@pytest.mark.slow
@pytest.mark.skipif(not IS_POSSIBLE, reason="file operations are traced on Linux on x86-64 only")
def test_a_pass_killed_at_any_file_operation_loses_and_falsifies_nothing(
    model_path: Path, tmp_path: Path
) -> None:
    scorer = load_scorer(model_path)
    tables = [make_table(random_pairs(8)), make_table(random_pairs(3, seed=1))]
    settings = replace(SETTINGS, write_every_seconds=0.0)  # a part for each row
    killed = ReferenceCache(tmp_path, NAMESPACE)
    moments: list[Files] = []

    def copy(operation: Operation) -> Half | None:
        if operation.changes:
            moments.append(read_files(tmp_path))
        is_write = operation.call == "write" and operation.size > 1
        return Half(then=lambda: moments.append(read_files(tmp_path))) if is_write else None

    def whole_pass() -> int:
        run_pass(killed, tables, scorer, settings)
        return 0

    def go_on_from_each_moment() -> tuple[list[int], list[str]]:
        """Sequences that each killed pass has kept, and what is wrong after it."""
        assert traced(whole_pass, [tmp_path], copy) == 0
        expected = all_sums(killed, tables)
        kept, wrong = [], []
        for number, files in enumerate(moments):
            write_files(tmp_path, files)
            sums, work = all_sums(killed, tables), find_work(killed, tables)
            resumed: list[int] = []
            kept.append(num_cached(work))
            run_pass(killed, tables, scorer, progress=resumed.append)
            is_false = (np.isfinite(sums) & (sums != expected)).any()
            if is_false or sum(resumed) != work.missing.sum() or (all_sums(killed, tables) != expected).any():
                wrong.append(f"moment {number}")
            wrong += [str(path) for path in killed.directory.glob("*.damaged")]
        return kept, wrong

    ((kept, wrong),) = in_forks([go_on_from_each_moment])
    assert not wrong
    # What one moment has, the next has too.
    assert kept[0] == 0 and kept == sorted(kept) and len(set(kept)) > 3
