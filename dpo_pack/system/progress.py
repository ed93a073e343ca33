"""Shows progress: in a terminal by rich.progress, in a log by a plain line every ten seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from dpo_pack.system.console import format_seconds
from dpo_pack.system.output import printable

_LINE_EVERY_SECONDS = 10.0
_NARROWEST_WITH_BAR = 72  # columns of a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A progress line: the name of the work, the fraction done, and facts, the most important first."""

    label: str
    fraction: float | None  # None: unknown
    facts: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        facts = [*([] if self.fraction is None else [f"{self.fraction:.0%}"]), *self.facts]
        yield Text(_fitting(facts, options.max_width), no_wrap=True)


def _fitting(facts: Sequence[str], width: int | None) -> str:
    """Returns the facts before the first that does not fit."""
    texts = ["  ".join(facts[:number]) for number in range(len(facts) + 1)]
    return [text for text in texts if width is None or len(text) <= width][-1]


class _Facts(ProgressColumn):
    def render(self, task: Task) -> Line:
        line: Line = task.fields["line"]
        return line


@contextlib.contextmanager
def live(
    console: Console, line: Callable[[], Line], clock: Callable[[], float] | None = None
) -> Iterator[Callable[[], None]]:
    """Shows `line()` while the `with` block runs. Yields a function to call when work has proceeded."""
    one_line = Column(no_wrap=True)  # so that facts are left out first
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *([BarColumn(20, table_column=one_line)] if console.width >= _NARROWEST_WITH_BAR else []),
        TimeElapsedColumn(one_line),
        _Facts(),
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    )
    clock = clock or time.monotonic
    task, printed = bar.add_task("", total=None), clock()

    def tell() -> None:
        nonlocal printed
        now, current = clock(), line()
        total = None if current.fraction is None else 1.0
        bar.update(task, description=current.label, completed=current.fraction, total=total, line=current)
        if bar.disable and now - printed >= _LINE_EVERY_SECONDS and current.fraction != 1:
            console.print(printable(f"{current.label}: {', '.join(current.facts)}"))
            printed = now

    tell()
    with bar:
        yield tell


@contextlib.contextmanager
def progress_bar(
    console: Console, description: str, total: int, unit: str
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of units done since its last call. Shows rate and time left."""
    done = 0
    with reading_progress(console, description, total, unit) as progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(description, done, total)

        yield advance


@contextlib.contextmanager
def waiting_line(console: Console, what: str) -> Iterator[None]:
    """In a terminal, shows what is being done, and for how long, while the `with` block runs."""
    with live(console, lambda: Line(label=printable(what), fraction=None, facts=())):
        yield


@contextlib.contextmanager
def reading_progress(
    console: Console, task: str = "Reading data", total: int | None = None, unit: str = "rows"
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields a function that takes the task's name, the units done, and all its units (None: unknown)."""
    begun, done = time.monotonic(), 0

    def line() -> Line:
        seconds = time.monotonic() - begun
        rate = f"{done / max(seconds, 1e-9):,.0f}/s"
        if not total:
            return Line(label=printable(task), fraction=None, facts=(f"{done:,} {unit}", rate))
        left = f"{format_seconds(seconds * (total - done) / done)} left" if done else "beginning"
        facts = (left, f"{done:,} of {total:,} {unit}", rate)
        return Line(label=printable(task), fraction=done / total, facts=facts)

    with live(console, line) as tell:

        def progress(what: str, num_done: int, num_all: int | None) -> None:
            nonlocal begun, task, done, total
            if what != task:
                begun, task = time.monotonic(), what
            done, total = num_done, num_all
            tell()

        yield progress


class TrainingLines:
    """Shows training: a line for logged steps, and below them, in a terminal, a progress line."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self._step = 0
        self._left: list[str] = []
        self._newest: list[str] = []
        self._printed, self._has_left_out = 0.0, False
        self._tell: Callable[[], None] = lambda: None  # redraws the progress line

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """In a terminal, shows the progress line while the `with` block runs."""
        if not self.console.is_terminal:  # the lines of logged steps suffice
            yield
            return
        with live(self.console, self._line) as self._tell:
            yield

    def _line(self) -> Line:
        label = f"step {self._step:>{len(str(self.num_steps))}}/{self.num_steps}"
        return Line(label=label, fraction=self._step / self.num_steps, facts=self._left + self._newest)

    def advance(self, step: int, seconds: float) -> None:
        """Sets the progress line's number of steps done, and the seconds that all of them took."""
        self._step, self._left = step, [f"{format_seconds(seconds / step * (self.num_steps - step))} left"]
        self._tell()

    def show(self, record: Mapping[str, Any]) -> None:
        """Prints a train line of metrics.jsonl: the first, the last, and of others at most one a second.

        `record` is of the newest step that `advance` was told of.
        """
        self._newest = [
            f"loss {record['loss']:.4f}",
            f"margin {record['rewards/margins']:+.4f}",
            f"accuracy {record['rewards/accuracies']:.3f}",
            f"{record['pairs_per_second']:,.1f} pairs/s",
            f"grad norm {record['grad_norm']:.3g}",
            f"lr {record['learning_rate']:.2e}",
        ]
        self._tell()
        now = time.monotonic()
        if now - self._printed >= 1.0 or record["step"] in (1, self.num_steps):
            self._printed = now
            facts = [f"  {self._line().label}", *self._newest[:3], *self._left, *self._newest[3:]]
            self.console.print(_fitting(facts, self.console.width if self.console.is_terminal else None))
        elif not self._has_left_out:
            self._has_left_out = True
            self.console.print("  At most one step a second is printed; metrics.jsonl has all of them.")
