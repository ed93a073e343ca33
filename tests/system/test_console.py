"""What a command prints, and the copy that a run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table
from support.full_disk import no_file_beyond

from dpo_pack.system.console import (
    format_seconds,
    keep_log,
    log_only,
    make_console,
    print_detail,
    progress_bar,
)
from dpo_pack.system.errors import CacheError


def test_brackets_in_names_and_paths_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    table = Table("[held] out")
    table.add_row("[/INST]")
    console.print("Model: runs/[dpo]-v2/model [/INST]")
    console.print(table)
    told = capsys.readouterr().out
    assert "runs/[dpo]-v2/model [/INST]" in told and "[held] out" in told and told.count("[/INST]") == 2


def test_seconds_are_told_in_the_unit_that_fits() -> None:
    told = {0: "0.0 s", 0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 99: "99 s"}
    told |= {100: "2 min", 150: "2 min", 6000: "1.7 h"}
    assert {seconds: format_seconds(seconds) for seconds in told} == told


def test_a_quiet_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(quiet=True).print("nothing")
    make_console().print("[1, 2] a line that is longer than any terminal is wide " + "." * 300)
    out = capsys.readouterr().out
    assert "nothing" not in out and out.count("\n") == 1


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


def test_a_run_that_goes_on_adds_to_its_console_log(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    for part in ("begun", "gone on"):
        console = make_console()
        keep_log(console, path)
        console.print(part)
    assert path.read_text(encoding="utf-8") == "begun\ngone on\n"


def test_lines_that_move_are_not_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert console.is_terminal
    keep_log(console, tmp_path / "console.log")
    with progress_bar(console, "Evaluating", 2, "pairs") as advance:
        console.print("in between")
        advance(2)
    assert (tmp_path / "console.log").read_text(encoding="utf-8") == "in between\n"


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    console = make_console()
    keep_log(console, tmp_path / "console.log")
    with pytest.raises(CacheError, match=r"cannot write .*console\.log: File too large"), no_file_beyond(10):
        console.print("x" * 20)


def test_a_quiet_console_keeps_no_log(tmp_path: Path) -> None:
    console = make_console(quiet=True)
    keep_log(console, tmp_path / "console.log")
    console.print("nothing")
    assert not (tmp_path / "console.log").exists()


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


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_in_the_log_and_on_the_terminal_if_asked_for(
    verbose: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    console = make_console(verbose=verbose)
    keep_log(console, tmp_path / "console.log")
    print_detail(console, "  passed now: wiring, isolation")
    assert ("wiring" in capsys.readouterr().out) == verbose
    assert "wiring" in (tmp_path / "console.log").read_text(encoding="utf-8")
