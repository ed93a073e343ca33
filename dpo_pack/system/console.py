"""Prints the lines of a command, and its progress bars if there is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dpo_pack.system.output import printable, unguarded

# Without a terminal a progress bar would fill the log. One line in this time shows that work goes on.
_LINE_EVERY_SECONDS = 10.0


def make_console(*, quiet: bool = False) -> Console:
    """Returns the console of a command. Only rank 0 prints; all other ranks are `quiet`."""
    # Names and paths may contain brackets, which rich would read as markup.
    return _Console(file=unguarded(sys.stdout), quiet=quiet, highlight=False, soft_wrap=True, markup=False)


class _Console(Console):
    """Shows strings, also those in tables, without the control characters that names in them may have."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


@contextlib.contextmanager
def progress_bar(
    console: Console, description: str, total: int, unit: str
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of units done since its last call. Shows rate and time left."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"{unit}, {{task.fields[rate]}}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(printable(description), total=total, rate="")
            begun = time.monotonic()

            def advance(count: int) -> None:
                progress.advance(task, count)
                rate = progress.tasks[task].completed / max(time.monotonic() - begun, 1e-9)
                progress.update(task, rate=f"{rate:,.0f}/s")

            yield advance
    else:
        yield _lines(console, description, total, unit)


class TrainingLines:
    """Prints a line for logged steps: at most one line a second, but always the first and the last step."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self.shown = 0.0

    def show(self, record: Mapping[str, Any], *, seconds_left: float) -> None:
        """Prints the line of a step. `record` is a train line of metrics.jsonl."""
        now = time.monotonic()
        if now - self.shown < 1.0 and record["step"] not in (1, self.num_steps):
            return
        self.shown = now
        self.console.print(
            f"  step {record['step']:>{len(str(self.num_steps))}}/{self.num_steps}  "
            f"loss {record['loss']:.4f}  margin {record['rewards/margins']:+.4f}  "
            f"accuracy {record['rewards/accuracies']:.3f}  grad norm {record['grad_norm']:.3g}  "
            f"lr {record['learning_rate']:.2e}  "
            f"{record['pairs_per_second']:,.1f} pairs/s  {format_seconds(seconds_left)} left"
        )


def _lines(console: Console, description: str, total: int, unit: str) -> Callable[[int], None]:
    begun = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown >= _LINE_EVERY_SECONDS and done < total:
            rate = done / (now - begun)
            remaining = format_seconds((total - done) / rate)
            console.print(f"{description}: {done:,} of {total:,} {unit}, {rate:,.0f}/s, {remaining} left")
            shown = now

    return advance


def format_count(count: int) -> str:
    """Returns the count as a short text: 812, 40.1K, 7.0M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 1000)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Returns the time as a short text: 4.3 s, 43 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
