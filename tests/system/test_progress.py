"""How far work is, with a terminal and without one."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import dpo_pack.system.console as progress_module
from dpo_pack.system.console import TrainingLines, progress_bar, shown


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(
    console: Console, clock: Clock
) -> None:
    with progress_bar(console, "Reference pass", 4000, "sequences") as advance:
        for _ in range(8):  # 500 units every 4 seconds
            clock.now += 4
            advance(500)
    assert text_of(console).splitlines() == [
        "Reference pass: 20 s left, 1,500 of 4,000 sequences, 125/s",
        "Reference pass: 8.0 s left, 3,000 of 4,000 sequences, 125/s",
    ]


def test_without_a_terminal_quick_work_prints_nothing(console: Console) -> None:
    with progress_bar(console, "Reference pass", 3, "sequences") as advance:
        advance(3)
    assert text_of(console) == ""


def test_with_a_terminal_progress_is_a_bar_that_is_gone_at_the_end() -> None:
    console = terminal()
    with progress_bar(console, "Reference pass", 4, "sequences") as advance:
        advance(1)
        advance(3)
    text = text_of(console)
    for part in ("Reference pass", "━", "100%", "4 of 4 sequences", "/s"):
        assert part in text
    erase_line = "\x1b[2K"
    assert text.rstrip().endswith(erase_line)


def test_work_of_unknown_length_shows_its_seconds_in_a_terminal_only(console: Console) -> None:
    seen = terminal()
    for each in (seen, console):
        with shown(each, "Writing the model"):
            pass
    assert "Writing the model" in text_of(seen) and "0:00:00" in text_of(seen)
    assert text_of(console) == ""


def test_progress_on_a_quiet_console_is_silent() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    with progress_bar(console, "Reference pass", 1, "sequences") as advance:
        advance(1)
    assert text_of(console) == ""


def test_progress_ends_with_an_error_that_passes_through(console: Console) -> None:
    with pytest.raises(KeyError), progress_bar(console, "Reference pass", 2, "sequences"):
        raise KeyError


def _record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 0.5,
        "rewards/margins": 0.25,
        "rewards/accuracies": 0.75,
        "grad_norm": 12.0,
        "learning_rate": 5e-7,
        "pairs_per_second": 1234.5,
    }


def test_training_shows_its_first_and_last_step_and_at_most_one_a_second_between(
    console: Console, clock: Clock
) -> None:
    lines = TrainingLines(console, num_steps=20)
    for step in range(1, 21):
        lines.advance(step, 0.4 * step)
        lines.show(_record(step))
        clock.now += 0.4
    first, note, *others = text_of(console).splitlines()
    shown = [first, *others]
    assert "At most one step a second is printed" in note
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [1, 4, 7, 10, 13, 16, 19, 20]
    assert shown[0] == (
        "  step  1/20  loss 0.5000  margin +0.2500  accuracy 0.750  7.6 s left  1,234.5 pairs/s  "
        "grad norm 12  lr 5.00e-07"
    )
    assert "6.4 s left" in shown[1] and "0.0 s left" in shown[-1]
    assert len({len(line) for line in shown}) == 1  # columns stay in place


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_lines_of_training_fit_the_terminal_and_lose_what_matters_least(width: int) -> None:
    console = terminal(width)
    lines = TrainingLines(console, num_steps=2000)
    lines.advance(120, 180.0)
    lines.show(_record(120))
    printed = text_of(console).rstrip("\n")
    with lines.moving():
        lines.advance(120, 180.0)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "\n", text_of(console)).splitlines()
    moving = [line for line in shown if "%" in line][-1]
    assert max(cell_len(printed), cell_len(moving)) <= width
    assert "120/2000" in printed and "loss 0.5000" in printed and ("lr 5.00e-07" in printed) == (width >= 120)
    assert "120/2000" in moving and "6%" in moving and "47 min left" in moving
    assert ("\u2501" in moving) == (width >= 80)  # the bar
    assert ("1,234.5 pairs/s" in moving) == (width > 120)


def test_the_line_of_training_moves_with_steps_and_with_what_they_log() -> None:
    lines = TrainingLines(terminal(), num_steps=4)
    with lines.moving():
        assert "step 0/4" in text_of(lines.console)
        lines.advance(1, 40.0)
        lines.show(_record(1))
        lines.advance(2, 80.0)
    assert "step 2/4" in text_of(lines.console) and "50%  80 s left  loss 0.5000" in text_of(lines.console)


def test_an_evaluation_has_a_line_below_that_of_training_until_it_is_done() -> None:
    lines = TrainingLines(terminal(), num_steps=4)
    with lines.moving():
        with progress_bar(lines.console, "Evaluating", 8, "pairs"):
            time.sleep(0.8)  # it is drawn twice a second
        assert "Evaluating" in text_of(lines.console)
        lines.console.file = io.StringIO()
        time.sleep(0.8)
    assert "step 0/4" in text_of(lines.console) and "Evaluating" not in text_of(lines.console)


def test_reading_tells_each_source_s_rows_and_rate(console: Console, clock: Clock) -> None:
    with shown(console, "Reading data", "rows") as progress:
        for what, done, total in (("Tokenizing a", 500, 4000), ("Tokenizing b", 70, None)):
            clock.now += 1
            progress(what, 0, total)
            clock.now += 10
            progress(what, done, total)
    assert text_of(console).splitlines() == [
        "Tokenizing a: 70 s left, 500 of 4,000 rows, 50/s",
        "Tokenizing b: 70 rows, 7/s",
    ]
