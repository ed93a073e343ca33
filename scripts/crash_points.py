"""Tries every crash point of a small run.

    python scripts/crash_points.py [--every N] [--jobs N] [--page FILE]

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
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]  # the small run is in tests/

import torch  # noqa: E402
import transformers  # noqa: E402
from support.crash_points import (  # noqa: E402
    EIO,
    END,
    END_BEGINS,
    FULL,
    HALF,
    KILL,
    Bench,
    Finding,
    Step,
    points,
    record,
    try_point,
)
from support.file_operations import in_forks  # noqa: E402

import dpo_pack  # noqa: E402

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

dpo-pack {version}, Python {python}, torch {torch}, transformers {transformers}; `python
scripts/crash_points.py{arguments}`, {minutes:.0f} minutes.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="Try every Nth crash point.")
    parser.add_argument("--end", action="store_true", help="Try the end of a run that keeps no checkpoint.")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="Run N processes side by side.")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="Where to write the result.")
    options = parser.parse_args()
    begun = time.monotonic()
    with TemporaryDirectory(dir=_fast_directory()) as directory:
        jobs = [
            functools.partial(_try_part, Path(directory).resolve() / str(job), job, options)
            for job in range(options.jobs)
        ]
        parts = in_forks(jobs)
    steps = parts[0][0]
    crashes = [finding for _, found in parts for finding in found]
    introduction = INTRODUCTION.format(
        num_steps=len(steps),
        calls=", ".join(f"{n} {call}" for call, n in Counter(step.call for step in steps).most_common()),
        kill=KILL,
        half=HALF,
        eio=EIO,
        full=FULL,
        version=dpo_pack.__version__,
        python=sys.version.partition(" ")[0],
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        arguments="".join(f" {argument}" for argument in sys.argv[1:]),
        minutes=(time.monotonic() - begun) / 60,
    )
    options.page.parent.mkdir(exist_ok=True)
    options.page.write_text(introduction + tables(crashes), encoding="utf-8")
    wrong = [finding for finding in crashes if finding.wrong]
    for finding in wrong:
        print(f"{finding.where}, {finding.what}: {finding.wrong}")
    print(f"{len(crashes)} crash points, {len(wrong)} not as promised")
    return 1 if wrong else 0


def _fast_directory() -> str | None:
    """Thousands of fsyncs on a disk would take most of the time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _try_part(directory: Path, job: int, options: argparse.Namespace) -> tuple[Sequence[Step], list[Finding]]:
    directory.mkdir()
    bench = Bench(directory, END if options.end else ())
    recording = record(bench)
    steps = recording.steps
    if options.end:
        first = next(number for number, step in enumerate(steps) if step.path.startswith(END_BEGINS))
        steps = steps[first:]
    crash_points = list(points(steps))[:: options.every][job :: options.jobs]
    findings = []
    for number, point in enumerate(crash_points, start=1):
        last = try_point(bench, recording, *point)
        findings.append(last)
        if last.wrong or number % 50 == 0:
            told = f"{number} of {len(crash_points)}: {last.where}, {last.what}: {last.wrong or 'right'}"
            print(told, flush=True)
    return steps, findings


def tables(crashes: Sequence[Finding]) -> str:
    """The results as Markdown: crash points by fault, and what went wrong."""
    text = "| fault | tried | went on, right | refused in one line, then right | not as promised |\n"
    text += "|---|---|---|---|---|\n"
    for kind in (KILL, HALF, EIO, FULL):
        text += _line(kind, [finding for finding in crashes if finding.what == kind])
    text += _line("all", crashes)
    wrong = [finding for finding in crashes if finding.wrong]
    if wrong:
        text += "\n## Not as promised\n\n"
        text += "".join(f"- `{finding.where}`, {finding.what}: {finding.wrong}\n" for finding in wrong)
    return text


def _line(name: str, findings: Sequence[Finding]) -> str:
    right = [finding for finding in findings if not finding.wrong]
    refused = [finding for finding in right if any(ending.status == 2 for ending in finding.endings)]
    cells = (len(findings), len(right) - len(refused), len(refused), len(findings) - len(right))
    return f"| {name} | {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
