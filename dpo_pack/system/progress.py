"""Shows progress: in a terminal, one line that is redrawn; elsewhere, a plain line every ten seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dpo_pack.system.console import format_seconds
from dpo_pack.system.output import printable

# A log cannot redraw a line, so each redraw would add a line. A log gets one line in this time instead.
_LINE_EVERY_SECONDS = 10.0
_REFRESHES_PER_SECOND = 2
_NARROWEST_BAR, _WIDEST_BAR = 8, 40  # columns
_NARROWEST_WITH_BAR = 72  # columns; in fewer, facts come before the bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A progress line: the name of the work, the fraction done, and facts, the most important first."""

    label: str
    fraction: float | None  # None: unknown
    facts: Sequence[str]

    def plain(self) -> str:
        return f"{self.label}: {', '.join(self.facts)}"

    def fitted(self, width: int, *, ascii_only: bool = False) -> Text:
        """Returns the line in at most `width` columns. If they do not suffice, the last facts are left out;
        below 72 columns, the bar is left out first."""
        pieces = [self.label] if self.fraction is None else [self.label, f"{self.fraction:4.0%}"]
        least_bar = 0 if self.fraction is None or width < _NARROWEST_WITH_BAR else _NARROWEST_BAR + 1
        for fact in self.facts:
            if len("  ".join([*pieces, fact])) + least_bar > width:
                break
            pieces.append(fact)
        text = "  ".join(pieces)[:width]
        room = min(_WIDEST_BAR, width - len(text) - 1)
        if self.fraction is None or room < _NARROWEST_BAR:
            return Text(text, no_wrap=True)
        done = round(self.fraction * room)
        full, empty = ("#", "-") if ascii_only else ("━", "─")
        bar = Text.assemble((full * done, "green"), (empty * (room - done), "dim"))
        return Text.assemble(self.label, " ", bar, text[len(self.label) :], no_wrap=True)


_shown: list[Callable[[], Line]] = []  # lines of nested work; the innermost is last


@contextlib.contextmanager
def live(
    console: Console, line: Callable[[], Line], clock: Callable[[], float] | None = None
) -> Iterator[Callable[[], None]]:
    """Shows what `line()` returns while the `with` block runs. Yields a function to call as work proceeds.

    A terminal shows one such line, at the bottom. If blocks are nested, it is the line of the innermost.
    """
    if console.is_terminal:
        _shown.append(line)
        try:
            with _bottom_line(console) if len(_shown) == 1 else contextlib.nullcontext():
                yield lambda: None
        finally:
            _shown.remove(line)
        return
    clock = clock or time.monotonic
    printed = clock()

    def tell() -> None:
        nonlocal printed
        now = clock()
        if now - printed >= _LINE_EVERY_SECONDS and (current := line()).fraction != 1:
            console.print(printable(current.plain()))
            printed = now

    yield tell


def _bottom_line(console: Console) -> Live:
    def current() -> Text:
        return _shown[-1]().fitted(console.width, ascii_only=console.options.ascii_only)

    return Live(
        get_renderable=current, console=console, transient=True, refresh_per_second=_REFRESHES_PER_SECOND
    )


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
    begun = time.monotonic()

    def line() -> Line:
        since = format_seconds(time.monotonic() - begun)
        return Line(label=printable(what), fraction=None, facts=(f"{since} elapsed",))

    with live(console, line):
        yield


@contextlib.contextmanager
def reading_progress(
    console: Console, task: str = "Reading data", total: int | None = None, unit: str = "rows"
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields a function that takes the task's name, the units done, and all its units (None: unknown)."""
    begun, done = time.monotonic(), 0

    def line() -> Line:
        return _work_line(task, time.monotonic() - begun, done, total, unit)

    with live(console, line) as tell:

        def progress(what: str, num_done: int, num_all: int | None) -> None:
            nonlocal begun, task, done, total
            if what != task:
                begun, task = time.monotonic(), what
            done, total = num_done, num_all
            tell()

        yield progress


def _work_line(what: str, seconds: float, done: int, total: int | None, unit: str) -> Line:
    rate = f"{done / max(seconds, 1e-9):,.0f}/s"
    if not total:
        return Line(label=printable(what), fraction=None, facts=(f"{done:,} {unit}", rate))
    left = f"{format_seconds(seconds * (total - done) / done)} left" if done else "beginning"
    facts = (left, f"{done:,} of {total:,} {unit}", rate)
    return Line(label=printable(what), fraction=done / total, facts=facts)


_LEFT_OUT = "  At most one step a second is printed; metrics.jsonl has every logged step."


class TrainingLines:
    """Shows training: a line for logged steps, and below them, in a terminal, a progress line."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self.console = console
        self.num_steps = num_steps
        self._step, self._seconds, self._at = 0, 0.0, time.monotonic()
        self._newest: Mapping[str, Any] | None = None
        self._printed, self._has_left_out = 0.0, False

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """In a terminal, shows the progress line while the `with` block runs."""
        # Elsewhere the lines of logged steps suffice.
        with live(self.console, self._line) if self.console.is_terminal else contextlib.nullcontext():
            yield

    def advance(self, step: int, seconds: float) -> None:
        """Sets the progress line's number of steps done, and the seconds that all of them took."""
        self._step, self._seconds, self._at = step, seconds, time.monotonic()

    def _line(self) -> Line:
        since = time.monotonic() - self._at
        facts = []
        if self._step:
            facts.append(f"{format_seconds(max(self._seconds_left() - since, 0.0))} left")
        if self._newest is not None:
            facts += [
                f"loss {self._newest['loss']:.4f}",
                f"accuracy {self._newest['rewards/accuracies']:.3f}",
                f"margin {self._newest['rewards/margins']:+.4f}",
                f"{self._newest['pairs_per_second']:,.1f} pairs/s",
            ]
        facts.append(f"{format_seconds(self._seconds + since)} elapsed")
        label = f"step {self._step:>{len(str(self.num_steps))}}/{self.num_steps}"
        return Line(label=label, fraction=self._step / self.num_steps, facts=facts)

    def _seconds_left(self) -> float:
        return self._seconds / self._step * (self.num_steps - self._step)

    def show(self, record: Mapping[str, Any]) -> None:
        """Prints a train line of metrics.jsonl: the first, the last, and of others at most one a second.

        `record` is of the newest step that `advance` was told of.
        """
        now = time.monotonic()
        self._newest = record
        if now - self._printed < 1.0 and record["step"] not in (1, self.num_steps):
            if not self._has_left_out:
                self.console.print(_LEFT_OUT)
            self._has_left_out = True
            return
        self._printed = now
        pieces = {
            "step": f"  step {record['step']:>{len(str(self.num_steps))}}/{self.num_steps}",
            "loss": f"loss {record['loss']:.4f}",
            "margin": f"margin {record['rewards/margins']:+.4f}",
            "accuracy": f"accuracy {record['rewards/accuracies']:.3f}",
            "norm": f"grad norm {record['grad_norm']:.3g}",
            "lr": f"lr {record['learning_rate']:.2e}",
            "rate": f"{record['pairs_per_second']:,.1f} pairs/s",
            "left": f"{format_seconds(self._seconds_left())} left",
        }
        for least_important in ("lr", "norm", "rate", "left", "accuracy", "margin"):
            if not self.console.is_terminal or len("  ".join(pieces.values())) <= self.console.width:
                break
            del pieces[least_important]
        self.console.print("  ".join(pieces.values()))
