"""The console of a command: it prints, shows progress, and copies what it prints into a run's console.log.

In a terminal, progress is a moving line by rich.progress; in a log, a plain line every ten seconds.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, NewLine
from rich.control import Control
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import writing
from dpo_pack.system.process import printable, wrapped


def make_console(*, quiet: bool = False, verbose: bool = False) -> Console:
    """Returns the console of a command. Only rank 0 prints; all other ranks are `quiet`."""
    copy = _Console(file=io.StringIO(), width=120, color_system=None, force_terminal=False)
    return _Console(file=sys.stdout, quiet=quiet, verbose=verbose, copy=copy)


def print_detail(console: Console, text: str) -> None:
    """Prints a text in a terminal only with --verbose, in console.log always."""
    if not isinstance(console, _Console) or console.verbose:
        console.print(text)
    else:
        console.keep(text)


def keep_log(console: Console, path: Path) -> None:
    """Makes the console copy to the file `path` all that it prints. A quiet console writes no file."""
    if isinstance(console, _Console):
        console.log_path = path


def log_only(console: Console, text: str) -> None:
    """Writes a text only into the file of `keep_log`: an error that other code prints in the terminal."""
    if isinstance(console, _Console) and console.log_path is not None:
        with contextlib.suppress(CacheError):  # a full disk must not hide the error that ended the run
            console.keep(text)


class _Console(Console):
    """Prints names and paths as they are: no markup, and escapes for control characters.

    Also prints into `copy`, which has no colours and no progress lines.
    """

    def __init__(self, *, verbose: bool = False, copy: Console | None = None, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, **options)
        self.verbose, self._copy = verbose, copy
        self.log_path: Path | None = None

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        fitted, how = objects, options
        if self.is_terminal:  # rich's soft_wrap leaves texts to the terminal, which breaks words
            fitted = tuple(Text(wrapped(x, self.width)) if isinstance(x, str) else x for x in objects)
            how = {"soft_wrap": not any(isinstance(x, Text) for x in objects), **options}
        super().print(*fitted, **how)
        if not any(isinstance(item, Control | NewLine) for item in objects):  # of a progress line
            self.keep(*objects, **options)

    def keep(self, *objects: Any, **options: Any) -> None:
        """Prints only into the copy, and appends the copy to the log file, if any. Raises CacheError."""
        if self.quiet or self._copy is None:
            return
        self._copy.print(*objects, **options)
        if self.log_path is not None:
            with writing(self.log_path), self.log_path.open("a", encoding="utf-8") as file:
                file.write(self._copy.file.getvalue())  # type: ignore[attr-defined]
            self._copy.file = io.StringIO()


def format_count(count: int) -> str:
    """812, 40.1K, 7.0M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 1000)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """4.3 s, 43 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_rate(rate: float, *, digits: int = 1) -> str:
    """1,234.5, or without digits 1,234; below 10 (or 1) two figures, as 0.6 or 0.041."""
    return f"{rate:,.{digits}f}" if rate >= 10 ** (1 - digits) else f"{rate:.2g}"


def _fitting(facts: Sequence[str], width: int) -> str:
    texts = ["  ".join(facts[:number]) for number in range(len(facts) + 1)]
    return [text for text in texts if len(text) <= width][-1]


@contextlib.contextmanager
def shown(console: Console, work: str, unit: str = "", total: int | None = None) -> Iterator[Shown]:
    """Shows work, its seconds and what the yielded object is told, while the `with` block runs. In a log,
    work without a unit is one line, before it."""
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
    bar.add_task(printable(work), total=None, facts="")
    now = time.monotonic()
    if bar.disable and not unit:
        console.print(f"{work} ...")
    with bar:
        yield Shown(bar=bar, bar_width=bar_width, work=work, unit=unit, total=total, begun=now, printed=now)


@dataclass(slots=True, kw_only=True)
class Shown:
    """Work that `shown` shows."""

    bar: Progress
    bar_width: int
    work: str
    unit: str
    total: int | None
    begun: float
    printed: float
    done: int = 0

    def advance(self, count: int) -> None:
        """Shows that `count` more units are done, with rate and time left."""
        self.done += count
        self(self.work, self.done, self.total)

    def __call__(self, what: str, done: int, total: int | None, facts: Sequence[str] | None = None) -> None:
        """Shows the work `what`: the units done of all (None: unknown), and `facts`, the most important
        first (None: units, rate and time left)."""
        now, console = time.monotonic(), self.bar.console
        if what != self.work and facts is None:
            self.begun, self.work = now, what
        if facts is None:
            seconds = now - self.begun
            left = [f"{format_seconds(seconds * (total - done) / done)} left"] if total and done else []
            units = f"{done:,}{f' of {total:,}' if total else ''} {self.unit}"
            rate = [f"{format_rate(done / seconds, digits=0)} {self.unit}/s"] if seconds > 0.1 else []
            facts = [*left, units, *rate]
        what = printable(what)
        width = max(0, console.width - self.bar_width - len(f"{what}  0:00:00  "))
        fitting = _fitting([*([f"{done / total:.0%}"] if total else []), *facts], width)
        task = self.bar.task_ids[0]
        self.bar.update(task, description=what, completed=done, total=total or None, facts=fitting)
        if self.bar.disable and now - self.printed >= 10.0 and done != total:
            console.print(f"{what}: {', '.join(facts)}")
            self.printed = now


@dataclass(slots=True)
class TrainingLines:
    """Shows training: a line for logged steps, and below them, in a terminal, a progress line."""

    console: Console
    num_steps: int
    _facts: list[str] = field(default_factory=list)  # of the newest line
    _left: list[str] = field(default_factory=list)
    _printed: float = 0.0
    _tell: Shown | None = None

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """In a terminal, shows the progress line while the `with` block runs."""
        with shown(self.console, self._label(0), "steps") as self._tell:
            yield

    def _label(self, step: int) -> str:
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def advance(self, step: int, seconds: float) -> None:
        """Sets the progress line's number of steps done, and the seconds that all of them took."""
        self._left = [f"{format_seconds(seconds / step * (self.num_steps - step))} left"]
        if self._tell is not None and self.console.is_terminal:  # else the lines of logged steps suffice
            self._tell(self._label(step), step, self.num_steps, self._left + self._facts)

    def show(self, record: Mapping[str, Any]) -> None:
        """Prints a line of metrics.jsonl: the first, the last, and of others at most one a second."""
        self._facts = [
            f"loss {record['loss']:z.4f}",
            f"margin {record['rewards/margins']:+z.4f}",
            f"accuracy {record['rewards/accuracies']:.3f}",
            f"{format_rate(record['pairs_per_second'])} pairs/s",
            f"grad norm {record['grad_norm']:.3g}",
            f"lr {record['learning_rate']:.2e}",
        ]
        now = time.monotonic()
        if now - self._printed >= 1.0 or record["step"] in (1, self.num_steps):
            self._printed = now
            line = [f"  {self._label(record['step'])}", *self._facts[:3], *self._left, *self._facts[3:]]
            self.console.print(_fitting(line, self.console.width if self.console.is_terminal else 1000))
