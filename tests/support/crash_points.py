"""Crash points of a small run: it is killed, or the disk refuses, at each of its file operations in turn.

The run: data -> token stores -> reference pass -> five steps, checkpoints, evaluations -> export. After each
fault the same command runs again and must end as the run that nothing disturbed, bit by bit.

What SIGKILL leaves is what is on the disk at that moment. So one run is stopped before each operation, and in
the middle of each write; its files are copied; later a run begins from each copy.
"""

from __future__ import annotations

import errno
import gc
import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from dpo_pack.recipe.load import Recipe
from dpo_pack.system.endings import ending_of
from dpo_pack.trainer import train
from dpo_pack.training.throughput import device_peak
from support.file_operations import Half, Operation, Refusal, traced
from support.tiny_run import tiny_run
from support.whole_runs import lines, whole_run

SETTINGS = (
    "train.max_steps=5",
    "checkpoint.every_steps=2",
    "checkpoint.keep=2",
    "checkpoint.keep_best=1",
    "logging.samples={num: 1, max_new_tokens: 1}",
)
# A run that keeps no checkpoint, and whose model goes elsewhere: its end, from its last checkpoint on.
END = ("checkpoint.every_steps=null", "checkpoint.keep_best=0", "export.path={work}/elsewhere/model")
END_BEGINS = "run/checkpoints"
KILL, HALF, EIO, FULL = "killed before it", "killed in the middle", "EIO", "disk full from here"
_RANDOM_NAME = re.compile(r"(?<=\.)[0-9a-f]{8}(?=\.tmp)|[0-9a-f]{32,64}|(?<=/\.tmp)\w{6}$")

Value = TypeVar("Value")
# A tree of files by relative path: their bytes, a link's path, or None for a directory.
Files = Mapping[str, bytes | Path | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Consecutive operations of one kind on one file: one numbered operation of the run."""

    number: int  # from 1
    call: str
    path: str  # without random parts
    changes: bool
    needs_space: bool
    num_calls: int  # system calls; more than one only for writes and reads
    size: int  # bytes of all its writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: its exit status and all that it said."""

    status: int
    message: str  # the error, or ""
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of a fault."""

    where: str  # the operation
    what: str  # the fault
    endings: tuple[Ending, ...]  # of the disturbed run if it was not killed, and of the run after it
    wrong: str  # what is not as it should be; "" if all is well


@dataclass(slots=True)
class Bench:
    """A directory in which the small run runs again and again: inputs in assets/, all it writes in work/."""

    directory: Path
    overrides: Sequence[str] = ()
    expected: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        device_peak(torch.device("cpu"), torch.float32)  # measured once: all runs are forks of this process
        tiny_run(self.assets)
        self.begin({})
        train(self._recipe(), Console(quiet=True))  # here and not in a fork: what it imports, all forks have
        gc.freeze()  # else the collector touches, and so copies, each fork's memory
        self.expected = self.results()

    @property
    def assets(self) -> Path:
        return self.directory / "assets"

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @property
    def run_dir(self) -> Path:
        return self.work / "run"

    def begin(self, files: Files) -> None:
        """Makes `work` hold these files and nothing else."""
        write_files(self.work, files)

    def run(self, decide: Callable[[Operation], Refusal | Half | None] | None = None) -> Ending:
        """Runs the command to its end in a fork; `decide` may disturb its operations in `work`."""
        said = self.directory / "said"
        said.write_text("")

        def command() -> int:
            output = io.StringIO()
            status, message = 0, ""
            try:
                train(self._recipe(), Console(file=output, width=500))
            except BaseException as error:
                ending = ending_of(error)
                status, message = ending.exit_status, ending.message or f"{type(error).__name__}: {error}"
            said.write_text(f"{message}\0{output.getvalue()}")
            return status

        status = traced(command, [self.work] if decide else [], decide or (lambda operation: None))
        message, _, output = said.read_text().partition("\0")
        return Ending(status=status, message=message, output=output)

    def _recipe(self) -> Recipe:
        overrides = [override.format(work=self.work) for override in self.overrides]
        cache = f"reference.cache_dir={self.work}/cache"
        return whole_run(self.assets, self.run_dir, cache, *SETTINGS, *overrides)

    def results(self) -> dict[str, Any]:
        """What must be the same, bit by bit, however the run came to its end."""
        model = {path.name: path.read_bytes() for path in (self.run_dir / "model").iterdir()}
        del model["README.md"]  # it names times
        return {
            "metrics.jsonl": lines(self.run_dir),
            "weights": model.pop("model.safetensors"),
            "model": model,
            "reference.parquet": (self.run_dir / "reference.parquet").read_bytes(),
        }

    def fault_of_results(self, *, may_leave: bool = False) -> str:
        """Which results differ, or what a killed run has left in the run's directory; "" if all is well."""
        try:
            found = self.results()
        except (OSError, KeyError, ValueError) as error:
            return f"no results: {error!r}"
        wrong = [name for name in self.expected if found[name] != self.expected[name]]
        if wrong:
            return f"other {', '.join(wrong)}"
        places = (self.run_dir, self.work / "elsewhere")
        left = [path.relative_to(self.work).as_posix() for d in places for path in d.rglob(".*.tmp")]
        return f"left over: {', '.join(left)}" if left and not may_leave else ""


# ------------------------------------------------------------------------------------------- file operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The numbered operations of a whole run, and the files as a kill would leave them."""

    steps: Sequence[Step]
    before: Mapping[int, Files]  # by number: of the operations that change something
    halfway: Mapping[int, Files]  # by number: of the writes


def record(bench: Bench) -> Recording:
    """Runs once and copies the files before each operation and in the middle of each write."""
    steps = number_steps(bench)
    known: dict[bytes, bytes] = {}  # equal contents are kept once
    before, halfway = {}, {}
    counter = _Counter(bench.work)

    def copy(operation: Operation) -> Half | None:
        number, call = counter.count(operation)
        if call == 1 and operation.changes:
            before[number] = read_files(bench.work, known)
        if number > len(steps):  # a slower run prints more lines, and so writes more often
            return None
        middle = steps[number - 1].num_calls // 2 + 1
        if operation.call != "write" or operation.size < 2 or call != middle:
            return None

        def copy_half() -> None:
            halfway[number] = read_files(bench.work, known)

        return Half(then=copy_half)

    bench.begin({})
    ending = bench.run(copy)
    assert ending.status == 0, ending.message
    assert bench.fault_of_results() == ""
    return Recording(steps=steps, before=before, halfway=halfway)


def number_steps(bench: Bench) -> list[Step]:
    """Returns all file operations of an undisturbed run."""
    found: list[list[Operation]] = []
    counter = _Counter(bench.work)

    def note(operation: Operation) -> None:
        number, _ = counter.count(operation)
        if number > len(found):
            found.append([])
        found[-1].append(operation)

    bench.begin({})
    ending = bench.run(note)
    assert ending.status == 0, ending.message
    return [
        Step(
            number=number,
            call=calls[0].call,
            path=plain_name(calls[0].path, bench.work),
            changes=calls[0].changes,
            needs_space=calls[0].needs_space,
            num_calls=len(calls),
            size=sum(call.size for call in calls),
        )
        for number, calls in enumerate(found, start=1)
    ]


class _Counter:
    """Numbers operations. Consecutive writes to one file, or reads of it, are one operation."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number, self.calls = 0, 0
        self.last: tuple[str, Path] | None = None

    def count(self, operation: Operation) -> tuple[int, int]:
        """Returns the number of the operation, and the number of the call in it; both from 1."""
        this = (operation.call, operation.path)
        if this == self.last and operation.call in ("read", "write", "writev"):
            self.calls += 1
        else:
            self.number, self.calls, self.last = self.number + 1, 1, this
        return self.number, self.calls


def refuse(bench: Bench, step: Step, what: str) -> Callable[[Operation], Refusal | Half | None]:
    """Returns the decisions for a run in which an operation fails: only this one with EIO, or, if the disk is
    full, all from this one that need space. A write into a full disk writes its first half."""
    counter = _Counter(bench.work)

    def decide(operation: Operation) -> Refusal | Half | None:
        number, call = counter.count(operation)
        if what == EIO:
            return Refusal(errno=errno.EIO) if (number, call) == (step.number, 1) else None
        if number < step.number or not operation.needs_space:
            return None
        if (number, call) == (step.number, 1) and operation.call == "write" and operation.size > 1:
            return Half(then=lambda: None)
        return Refusal(errno=errno.ENOSPC)

    return decide


def spread(items: Iterable[Value], number: int) -> list[Value]:
    """Returns so many of the items, evenly spread."""
    items = list(items)
    return [items[(2 * i + 1) * len(items) // (2 * number)] for i in range(min(number, len(items)))]


def points(steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Yields every operation with every fault that can happen at it."""
    for step in steps:
        if step.changes:
            yield step, KILL
        if step.call == "write" and step.size > 1:
            yield step, HALF
        yield step, EIO
        if step.needs_space:
            yield step, FULL


def try_point(bench: Bench, recording: Recording, step: Step, what: str) -> Finding:
    """Lets one fault happen, runs the command again, and compares."""
    if what in (KILL, HALF):
        bench.begin((recording.before if what == KILL else recording.halfway)[step.number])
        endings: tuple[Ending, ...] = ()
    else:
        bench.begin({})
        endings = (bench.run(refuse(bench, step, what)),)
    last = bench.run()
    return Finding(
        where=f"{step.number}: {step.call} {step.path}",
        what=what,
        endings=(*endings, last),
        wrong=_wrong(bench, endings, last),
    )


def _wrong(bench: Bench, disturbed: Sequence[Ending], last: Ending) -> str:
    for ending in disturbed:
        if ending.status not in (0, 2) or "\n" in ending.message:
            return f"the disturbed run ended with {ending.status}: {ending.message}"
    if last.status != 0:
        return f"the last run ended with {last.status}: {last.message}"
    # What a disk refuses to remove stays until the run goes on, and a finished run does not.
    may_leave = any(ending.status == 0 for ending in disturbed)
    return bench.fault_of_results(may_leave=may_leave)


# --------------------------------------------------------------------------------------------- trees of files


def read_files(directory: Path, known: dict[bytes, bytes] | None = None) -> Files:
    """Reads a tree of files. `known` keeps equal contents of several trees once."""
    known = {} if known is None else known
    files: dict[str, bytes | Path | None] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            files[name] = path.readlink()
        elif path.is_dir():
            files[name] = None
        else:
            content = path.read_bytes()
            files[name] = known.setdefault(content, content)
    return files


def write_files(directory: Path, files: Files) -> None:
    """Makes `directory` hold these files and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        if content is None:
            (directory / name).mkdir(parents=True)
        elif isinstance(content, Path):
            (directory / name).symlink_to(content)
        else:
            (directory / name).write_bytes(content)


def plain_name(path: Path, directory: Path) -> str:
    """Returns the name in `directory` without its random and hashed parts."""
    return _RANDOM_NAME.sub("…", path.relative_to(directory).as_posix())
