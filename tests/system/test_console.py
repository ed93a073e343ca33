"""Progress with a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

import dpo_pack.system.console as console_module
from dpo_pack.system.console import TrainingLines, format_seconds, make_console, progress_bar


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    return clock


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_brackets_in_names_and_paths_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    table = Table("[held] out")
    table.add_row("[/INST]")
    console.print("Model: runs/[dpo]-v2/model [/INST]")
    console.print(table)
    told = capsys.readouterr().out
    assert "runs/[dpo]-v2/model [/INST]" in told and "[held] out" in told and told.count("[/INST]") == 2


def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(
    console: Console, clock: Clock
) -> None:
    with progress_bar(console, "Reference pass", 4000, "sequences") as advance:
        for _ in range(8):  # 500 units every 4 seconds
            clock.now += 4
            advance(500)
    assert text_of(console).splitlines() == [
        "Reference pass: 1,500 of 4,000 sequences, 125/s, 20 s left",
        "Reference pass: 3,000 of 4,000 sequences, 125/s, 8.0 s left",
    ]


def test_without_a_terminal_quick_work_prints_nothing(console: Console) -> None:
    with progress_bar(console, "Reference pass", 3, "sequences") as advance:
        advance(3)
    assert text_of(console) == ""


def test_with_a_terminal_progress_is_a_bar_that_is_gone_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with progress_bar(console, "Reference pass", 4, "sequences") as advance:
        advance(1)
        advance(3)
    text = text_of(console)
    for shown in ("Reference pass", "━", "4/4", "sequences, ", "/s"):
        assert shown in text
    erase_line = "\x1b[2K"
    assert text.rstrip().endswith(erase_line)


def test_progress_on_a_quiet_console_is_silent() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, quiet=True)
    with progress_bar(console, "Reference pass", 1, "sequences") as advance:
        advance(1)
    assert text_of(console) == ""


def test_progress_ends_with_an_error_that_passes_through(console: Console) -> None:
    with pytest.raises(KeyError), progress_bar(console, "Reference pass", 2, "sequences"):
        raise KeyError


def _record(step: int) -> dict[str, float]:
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
        lines.show(_record(step), seconds_left=0.4 * (20 - step))
        clock.now += 0.4
    shown = text_of(console).splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [1, 4, 7, 10, 13, 16, 19, 20]
    assert shown[0] == (
        "  step  1/20  loss 0.5000  margin +0.2500  accuracy 0.750  grad norm 12  lr 5.00e-07  "
        "1,234.5 pairs/s  7.6 s left"
    )
    assert len({len(line) for line in shown}) == 1  # columns stay in place


def test_seconds_are_told_in_the_unit_that_fits() -> None:
    told = {0: "0.0 s", 0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 99: "99 s", 150: "2 min", 6000: "1.7 h"}
    assert {seconds: format_seconds(seconds) for seconds in told} == told


def test_a_quiet_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(quiet=True).print("nothing")
    make_console().print("[1, 2] a line that is longer than any terminal is wide " + "." * 300)
    out = capsys.readouterr().out
    assert "nothing" not in out and out.count("\n") == 1
