"""Tries every crash point of a small run, and a damaged byte in every file that a run reads back.

    python scripts/crash_points.py [--every N] [--places N] [--jobs N] [--page FILE]

tests/support/crash_points.py says what a crash point is. Writes docs/dev/crash-points.md and ends with
status 1 if something is not as promised. Takes about 15 minutes of one core; --every 10 tries one crash
point of ten.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the small run is in tests/

import torch  # noqa: E402
import transformers  # noqa: E402
from support.crash_points import (  # noqa: E402
    EIO,
    FULL,
    HALF,
    KILL,
    Bench,
    Finding,
    Step,
    damages,
    points,
    record,
    stages,
    try_damage,
    try_point,
)
from support.file_operations import in_forks  # noqa: E402

import dpo_pack  # noqa: E402

Item = TypeVar("Item")
PAGE = ROOT / "docs" / "dev" / "crash-points.md"

INTRODUCTION = """\
# Crash points

<!-- Written by scripts/crash_points.py; edit the script instead. -->

A small run (data, token stores, reference pass, five steps with checkpoints and evaluations, export)
makes {num_steps} file operations below its `output_dir` and its cache: {calls}. They are calls of the
kernel, so those of native code are among them. Consecutive writes to one file count as one operation, and
so do reads.

At each operation each fault that can happen there is tried in turn, and then the same command runs again.
It must end with status 0, and with the same weights, `metrics.jsonl` (without times), `reference.parquet`
and configs as the run that nothing disturbed, bit by bit. It must leave no temporary file in
`output_dir`. The disturbed run itself must end with status 0, or with status 2 and one line.

- *{kill}*: SIGKILL. An operation that changes no file, such as an fsync, leaves what the one before it
  left, and is not tried.
- *{half}*: SIGKILL when half of the bytes are written.
- *{eio}*: this operation alone fails with an input/output error.
- *{full}*: this operation, and all later ones that need space, fail with "No space left on device"; a
  write writes its first half.

Then one bit is flipped in a file that an earlier run or the user has left and that a run reads: in each
file, in {places}. The run after it must end with the same results, or with status 2 and one line. The
`cache` is a filled cache without a run, the `stopped run` was killed at its last checkpoint, the
`finished run` has its model. How the user's own files (`assets/`) were before, a new run cannot know; a
resumed run must notice the damage, or not depend on it.

dpo-pack {version}, Python {python}, torch {torch}, transformers {transformers}; `python
scripts/crash_points.py{arguments}`, {minutes:.0f} minutes.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Try every Nth crash point.")
    parser.add_argument("--places", type=int, default=3, metavar="N", help="Flip a bit in N bytes of a file.")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="Run N processes side by side.")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="Where to write the result.")
    options = parser.parse_args()
    begun = time.monotonic()
    with TemporaryDirectory(dir=_fast_directory()) as directory:
        jobs = [
            functools.partial(
                _try_part,
                Path(directory).resolve() / str(job),
                job,
                options.jobs,
                options.every,
                options.places,
            )
            for job in range(options.jobs)
        ]
        parts = in_forks(jobs)
    steps = parts[0][0]
    crashes, damaged = [], []
    for _, *found in parts:
        crashes += found[0]
        damaged += found[1]
    introduction = INTRODUCTION.format(
        num_steps=len(steps),
        calls=", ".join(f"{n} {call}" for call, n in Counter(step.call for step in steps).most_common()),
        kill=KILL,
        half=HALF,
        eio=EIO,
        full=FULL,
        places="one place" if options.places == 1 else f"{options.places} places",
        version=dpo_pack.__version__,
        python=sys.version.partition(" ")[0],
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        arguments="".join(f" {argument}" for argument in sys.argv[1:]),
        minutes=(time.monotonic() - begun) / 60,
    )
    options.page.parent.mkdir(exist_ok=True)
    options.page.write_text(introduction + tables(crashes, damaged), encoding="utf-8")
    wrong = [finding for finding in (*crashes, *damaged) if finding.wrong]
    for finding in wrong:
        print(f"{finding.where}, {finding.what}: {finding.wrong}")
    print(f"{len(crashes)} crash points, {len(damaged)} flipped bits, {len(wrong)} not as promised")
    return 1 if wrong else 0


def _fast_directory() -> str | None:
    """Thousands of fsyncs on a disk would take most of the time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _try_part(
    directory: Path, job: int, num_jobs: int, every: int, num_places: int
) -> tuple[Sequence[Step], list[Finding], list[Finding]]:
    directory.mkdir()
    bench = Bench(directory)
    recording = record(bench)
    crash_points = list(points(recording.steps))[::every][job::num_jobs]
    crashes = _each(crash_points, lambda point: try_point(bench, recording, *point))
    bits = list(damages(bench, stages(recording), num_places=num_places))[job::num_jobs]
    return recording.steps, crashes, _each(bits, lambda damage: try_damage(bench, damage))


def _each(items: Sequence[Item], find: Callable[[Item], Finding]) -> list[Finding]:
    findings = []
    for number, item in enumerate(items, start=1):
        findings.append(find(item))
        if findings[-1].wrong or number % 50 == 0:
            last = findings[-1]
            print(f"{number} of {len(items)}: {last.where}, {last.what}: {last.wrong or 'right'}", flush=True)
    return findings


def tables(crashes: Sequence[Finding], damaged: Sequence[Finding]) -> str:
    """The results as Markdown: crash points by fault, flipped bits by file, and what went wrong."""
    text = _heading("fault", "refused in one line, then right")
    for kind in (KILL, HALF, EIO, FULL):
        text += _line(kind, [finding for finding in crashes if finding.what == kind])
    text += _line("all", crashes) + "\n" + _heading("flipped bits in", "refused in one line")
    for where in dict.fromkeys(finding.where for finding in damaged):
        text += _line(f"`{where}`", [finding for finding in damaged if finding.where == where])
    text += _line("all", damaged)
    wrong = [finding for finding in (*crashes, *damaged) if finding.wrong]
    if wrong:
        text += "\n## Not as promised\n\n"
        text += "".join(f"- `{finding.where}`, {finding.what}: {finding.wrong}\n" for finding in wrong)
    return text


def _heading(first: str, refused: str) -> str:
    return f"| {first} | tried | went on, right | {refused} | not as promised |\n|---|---|---|---|---|\n"


def _line(name: str, findings: Sequence[Finding]) -> str:
    right = [finding for finding in findings if not finding.wrong]
    refused = [finding for finding in right if any(ending.status == 2 for ending in finding.endings)]
    cells = (len(findings), len(right) - len(refused), len(refused), len(findings) - len(right))
    return f"| {name} | {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
