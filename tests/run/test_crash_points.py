"""A small run that is killed, or that the disk refuses, at some of its file operations.

`scripts/crash_points.py` tries every operation; docs/dev/crash-points.md has its last result.
"""

from __future__ import annotations

import pytest
from support.crash_points import EIO, FULL, HALF, KILL, Bench, Finding, points, record, spread, try_point
from support.file_operations import IS_POSSIBLE, in_forks

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="file operations are traced on Linux on x86-64 only")

TRIED = {KILL: 8, HALF: 4, EIO: 4, FULL: 4}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    """What came of some faults of each kind, spread evenly over the run."""
    directory = tmp_path_factory.mktemp("bench")

    def find() -> list[Finding]:
        bench = Bench(directory)
        recording = record(bench)
        every = list(points(recording.steps))
        chosen = [
            point
            for kind, number in TRIED.items()
            for point in spread((p for p in every if p[1] == kind), number)
        ]
        return [try_point(bench, recording, *point) for point in chosen]

    return in_forks([find])[0]


@pytest.mark.slow
def test_a_run_killed_before_an_operation_or_in_the_middle_of_a_write_ends_bitwise_right(
    findings: list[Finding],
) -> None:
    found = [finding for finding in findings if finding.what in (KILL, HALF)]
    assert len(found) == TRIED[KILL] + TRIED[HALF]
    assert not [finding for finding in found if finding.wrong]


@pytest.mark.slow
def test_a_run_whose_disk_refuses_says_so_in_one_line_and_then_ends_bitwise_right(
    findings: list[Finding],
) -> None:
    found = [finding for finding in findings if finding.what in (EIO, FULL)]
    assert len(found) == TRIED[EIO] + TRIED[FULL]
    assert not [finding for finding in found if finding.wrong]
    assert any(finding.endings[0].status == 2 for finding in found)
