"""What a person sees of the reference pass: pairs, tokens, rate and remaining time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dpo_pack.console import format_count, format_seconds
from dpo_pack.reference_pass import Amount

# The first rows, of which the time of the rest is estimated.
ESTIMATE_AFTER_SECONDS = 3.0
_LINE_EVERY_SECONDS = 10.0


class PassMeter:
    """Adds up finished rows. The remaining time follows estimated FLOPs: the first rows are the longest."""

    def __init__(self, total: Amount, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.clock = clock
        self.begun = clock()
        self.num_pairs = 0
        self.num_tokens = 0
        self.flops = 0.0

    def add(self, row: Amount) -> None:
        self.num_pairs += row.num_pairs
        self.num_tokens += row.num_tokens
        self.flops += row.flops

    @property
    def seconds(self) -> float:
        return self.clock() - self.begun

    @property
    def seconds_left(self) -> float:
        return self.seconds * (self.total.flops - self.flops) / max(self.flops, 1e-9)

    def sentence(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.num_pairs:,} of {self.total.num_pairs:,} pairs, {format_count(self.num_tokens)} of "
            f"{format_count(self.total.num_tokens)} tokens, {self.num_pairs / seconds:,.1f} pairs/s, "
            f"{format_count(int(self.num_tokens / seconds))} tokens/s, "
            f"{format_seconds(self.seconds_left)} left"
        )


@contextlib.contextmanager
def pass_progress(
    console: Console, total: Amount, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Amount], None]]:
    """Yield a function that is told of each finished row.

    After the first rows a line says how long the rest will take; then a bar, or lines without a terminal.
    """
    meter = PassMeter(total, clock)
    with contextlib.ExitStack() as stack:
        show = _bar(console, stack) if console.is_terminal else _lines(console)
        has_estimated = False

        def finish_row(row: Amount) -> None:
            nonlocal has_estimated
            meter.add(row)
            if not has_estimated and meter.seconds > ESTIMATE_AFTER_SECONDS and meter.flops < total.flops:
                has_estimated = True
                console.print(f"  the rest will take about {format_seconds(meter.seconds_left)}")
            show(meter)

        yield finish_row


def _bar(console: Console, stack: contextlib.ExitStack) -> Callable[[PassMeter], None]:
    columns = (TextColumn("Reference pass"), BarColumn(), TextColumn("{task.fields[told]}"))
    progress = stack.enter_context(Progress(*columns, console=console, transient=True))
    task = progress.add_task("", total=1.0, told="")

    def show(meter: PassMeter) -> None:
        progress.update(task, completed=meter.flops / meter.total.flops, told=meter.sentence())

    return show


def _lines(console: Console) -> Callable[[PassMeter], None]:
    shown = 0.0

    def show(meter: PassMeter) -> None:
        nonlocal shown
        if meter.seconds - shown >= _LINE_EVERY_SECONDS and meter.flops < meter.total.flops:
            console.print(f"Reference pass: {meter.sentence()}")
            shown = meter.seconds

    return show
