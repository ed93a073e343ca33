"""Shows progress: in a terminal by rich.progress, in a log by a plain line every ten seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dpo_pack.system.console import format_seconds
from dpo_pack.system.output import printable

# Takes the name of the work, the part done, all (None: unknown), and facts, the most important first.
Tell = Callable[[str, float, float | None, Sequence[str]], None]


def _fitting(facts: Sequence[str], width: int) -> str:
    """Returns the facts before the first that does not fit into `width` columns."""
    texts = ["  ".join(facts[:number]) for number in range(len(facts) + 1)]
    return [text for text in texts if len(text) <= width][-1]


@contextlib.contextmanager
def _shown(console: Console, what: str) -> Iterator[Tell]:
    """Shows work, its seconds and what the yielded function is told, while the `with` block runs."""
    bar_width = 20 if console.width >= 72 else 0
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *([BarColumn(bar_width)] if bar_width else []),
        TimeElapsedColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        console=console,
        transient=True,
        refresh_per_second=2,
        disable=not console.is_terminal,
    )
    task, printed = bar.add_task(printable(what), total=None, facts=""), time.monotonic()

    def tell(what: str, done: float, total: float | None, facts: Sequence[str]) -> None:
        nonlocal printed
        what, now = printable(what), time.monotonic()
        width = max(0, console.width - bar_width - len(f"{what}  0:00:00  "))
        fitting = _fitting([*([f"{done / total:.0%}"] if total else []), *facts], width)
        bar.update(task, description=what, completed=done, total=total, facts=fitting)
        if bar.disable and now - printed >= 10.0 and done != total:
            console.print(f"{what}: {', '.join(facts)}")
            printed = now

    with bar:
        yield tell


def waiting_line(console: Console, what: str) -> contextlib.AbstractContextManager[Any]:
    """In a terminal, shows what is being done, and for how long, while the `with` block runs."""
    return _shown(console, what)


@contextlib.contextmanager
def reading_progress(
    console: Console, task: str = "Reading data", unit: str = "rows"
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields a function that takes the task's name, the units done, and all its units (None: unknown)."""
    begun = time.monotonic()
    with _shown(console, task) as tell:

        def progress(what: str, done: int, total: int | None) -> None:
            nonlocal begun, task
            if what != task:
                begun, task = time.monotonic(), what
            seconds = time.monotonic() - begun
            facts = [
                f"{done:,}{f' of {total:,}' if total else ''} {unit}",
                f"{done / max(seconds, 1e-9):,.0f}/s",
            ]
            if total and done:
                facts.insert(0, f"{format_seconds(seconds * (total - done) / done)} left")
            tell(what, done, total or None, facts)

        yield progress


@contextlib.contextmanager
def progress_bar(
    console: Console, description: str, total: int, unit: str
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of units done since its last call. Shows rate and time left."""
    done = 0
    with reading_progress(console, description, unit) as progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(description, done, total)

        yield advance


class TrainingLines:
    """Shows training: a line for logged steps, and below them, in a terminal, a progress line."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self._facts: list[str] = []  # of the newest line
        self._left: list[str] = []
        self._printed, self._has_left_out = 0.0, False
        self._tell: Tell | None = None

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """In a terminal, shows the progress line while the `with` block runs."""
        if not self.console.is_terminal:  # the lines of logged steps suffice
            yield
            return
        with _shown(self.console, self._label(0)) as self._tell:
            yield

    def _label(self, step: int) -> str:
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def advance(self, step: int, seconds: float) -> None:
        """Sets the progress line's number of steps done, and the seconds that all of them took."""
        self._left = [f"{format_seconds(seconds / step * (self.num_steps - step))} left"]
        if self._tell is not None:
            self._tell(self._label(step), step, self.num_steps, self._left + self._facts)

    def show(self, record: Mapping[str, Any]) -> None:
        """Prints a train line of metrics.jsonl: the first, the last, and of others at most one a second.

        `record` is of the newest step that `advance` was told of.
        """
        self._facts = [
            f"loss {record['loss']:.4f}",
            f"margin {record['rewards/margins']:+.4f}",
            f"accuracy {record['rewards/accuracies']:.3f}",
            f"{record['pairs_per_second']:,.1f} pairs/s",
            f"grad norm {record['grad_norm']:.3g}",
            f"lr {record['learning_rate']:.2e}",
        ]
        now = time.monotonic()
        if now - self._printed >= 1.0 or record["step"] in (1, self.num_steps):
            self._printed = now
            line = [f"  {self._label(record['step'])}", *self._facts[:3], *self._left, *self._facts[3:]]
            width = self.console.width if self.console.is_terminal else 1000
            self.console.print(_fitting(line, width))
        elif not self._has_left_out:
            self._has_left_out = True
            self.console.print("  At most one step a second is printed; metrics.jsonl has all of them.")
