"""What a command prints, how far its work is, and the copy that a run keeps."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from support.limits import no_file_beyond
from support.whole_runs import text

import dpo_pack.system.console as progress_module
from dpo_pack.system.console import TrainingLines, keep_log, log_only, make_console, print_detail, shown
from dpo_pack.system.errors import CacheError
from dpo_pack.system.process import complain


def test_a_run_keeps_what_was_printed_before_and_after_its_directory_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "console.log"
    console = make_console()
    console.print("Model: [/INST] \x1b[2J")
    keep_log(console, path)
    table = Table("metric")
    table.add_row("0.5")
    console.print(table)
    log_only(console, "error: the judge is gone")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "Model: [/INST] \\x1b[2J" and "0.5" in path.read_text(encoding="utf-8")
    assert lines[-1] == "error: the judge is gone" and "judge" not in capsys.readouterr().out
    assert all(line.isprintable() for line in lines)
    again = make_console()
    keep_log(again, path)
    again.print("gone on")  # a run that goes on adds to it
    assert path.read_text(encoding="utf-8").splitlines() == [*lines, "gone on"]


def test_tables_in_the_log_are_as_wide_as_ever_whatever_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    console = make_console()
    keep_log(console, tmp_path / "console.log")
    table = Table("a long cell")
    table.add_row("word " * 20)  # 100 columns: too many for a terminal that says nothing of its width
    console.print(table)
    assert ("word " * 20).strip() in (tmp_path / "console.log").read_text(encoding="utf-8")


def test_lines_that_move_are_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert console.is_terminal
    keep_log(console, tmp_path / "console.log")
    with shown(console, "Evaluating", "pairs", 2) as bar:
        console.print("in between")
        bar.advance(2)
    assert (tmp_path / "console.log").read_text(encoding="utf-8") == "in between\n"


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    console = make_console()
    keep_log(console, tmp_path / "console.log")
    with pytest.raises(CacheError, match=r"cannot write .*console\.log: File too large"), no_file_beyond(10):
        console.print("x" * 20)


def test_a_terminal_gets_long_lines_wrapped_at_words_and_paths_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    console = make_console()
    keep_log(console, tmp_path / "console.log")
    sentence = "  held out (tone) after step 12: reward accuracy 1.000, margin 4.8767"
    console.print(sentence)
    console.print("Model: /a/path/that/is/longer/than/any/line/of/this/terminal")
    assert capsys.readouterr().out.splitlines() == [
        "  held out (tone) after step 12: reward",
        "    accuracy 1.000, margin 4.8767",
        "Model:",
        "  /a/path/that/is/longer/than/any/line/of/this/terminal",
    ]
    assert (tmp_path / "console.log").read_text(encoding="utf-8").splitlines()[0] == sentence
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    complain(sentence)
    assert capsys.readouterr().err.splitlines()[1] == "    accuracy 1.000, margin 4.8767"


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_in_the_log_and_on_the_terminal_if_asked_for(
    verbose: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = make_console(verbose=verbose)
    keep_log(console, tmp_path / "console.log")
    print_detail(console, "  passed now: wiring, isolation")
    assert ("wiring" in capsys.readouterr().out) == verbose
    assert "wiring" in (tmp_path / "console.log").read_text(encoding="utf-8")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the module's `time`."""
    stand_in: Any = SimpleNamespace(now=100.0, monotonic=lambda: stand_in.now)
    monkeypatch.setattr(progress_module, "time", stand_in)
    return stand_in


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_without_a_terminal_progress_is_a_plain_line_every_ten_seconds(console: Console, clock: Any) -> None:
    with shown(console, "Loading org/model"):
        assert text(console) == "Loading org/model ...\n"
    with shown(console, "Reference pass", "sequences", 4000) as bar:
        for _ in range(8):  # 500 units every 4 seconds
            clock.now += 4
            bar.advance(500)
    assert text(console).splitlines()[1:] == [
        "Reference pass: 20 s left, 1,500 of 4,000 sequences, 125 sequences/s",
        "Reference pass: 8.0 s left, 3,000 of 4,000 sequences, 125 sequences/s",
    ]


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
    console: Console, clock: Any
) -> None:
    lines = TrainingLines(console, num_steps=20)
    for step in range(1, 21):
        lines.advance(step, 0.4 * step)
        lines.show(_record(step))
        clock.now += 0.4
    shown = text(console).splitlines()
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
    printed = text(console).rstrip("\n")
    with lines.moving():
        lines.advance(120, 180.0)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "\n", text(console)).splitlines()
    moving = [line for line in shown if "%" in line][-1]
    assert max(cell_len(printed), cell_len(moving)) <= width
    assert "120/2000" in printed and "loss 0.5000" in printed and ("lr 5.00e-07" in printed) == (width >= 120)
    assert "120/2000" in moving and "6%" in moving and "47 min left" in moving
    assert ("\u2501" in moving) == (width >= 80)  # the bar
    assert ("1,234.5 pairs/s" in moving) == (width > 120)
