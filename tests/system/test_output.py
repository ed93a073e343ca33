"""No control character in a name reaches a terminal or a log, whoever prints it."""

from __future__ import annotations

import ast
import logging
import sys
import traceback
from pathlib import Path

import pytest
from rich.table import Table

import dpo_pack
from dpo_pack.system.console import make_console, progress_bar
from dpo_pack.system.endings import ending_of
from dpo_pack.system.errors import DataError
from dpo_pack.system.process import complain, guard_output, printable, say

EVIL = "a\x1b[2Jb\rc\x07d\x9be\u202ef\udce9g\nh"
SHOWN = r"a\x1b[2Jb\rc\x07d\x9be\u202ef\udce9g\nh"


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own streams are back afterwards."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)


def test_text_that_can_be_printed_stays_as_it_is() -> None:
    for text in ("pairs-α/日本語 [x].jsonl: 3 × 4 = 12 %", "", "\\x1b"):
        assert printable(text) == text
    assert printable(EVIL) == SHOWN


def test_our_lines_show_control_characters_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    complain(str(ending_of(DataError(f"{EVIL}: no such file")).message))
    told = capsys.readouterr()
    assert told.out == f"{SHOWN}\n"
    assert told.err == r"error: a\x1b[2Jb c\x07d\x9be\u202ef\udce9g h: no such file" + "\n"


def test_the_console_shows_them_as_escapes_in_lines_tables_and_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guard_output()
    console = make_console()
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    console.print(f"Data: {EVIL}")
    console.print(table)
    console.file = sys.stdout
    told = capsys.readouterr().out
    assert told.startswith(f"Data: {SHOWN}\n") and told.count(SHOWN) == 4
    assert all(line.isprintable() for line in told.splitlines())


def test_a_terminal_gets_the_console_s_colours_and_no_one_else_s(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    guard_output()
    console = make_console()
    assert console.is_terminal
    with progress_bar(console, EVIL, 2, "pairs") as advance:
        advance(1)
    told = capsys.readouterr().out
    assert r"a\x1b[2J" in told and "\x1b[2Jb" not in told and "\x1b[?25l" in told


def test_what_other_code_prints_is_guarded_and_bars_of_libraries_still_move(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guard_output()
    guard_output()  # once is enough, and twice changes nothing
    record = logging.makeLogRecord({"msg": "cannot read %s", "args": ("a\x1b[2J.jsonl",)})
    logging.StreamHandler().handle(record)
    try:
        raise ValueError("a bug with \x1b]0;title\x07")
    except ValueError as error:
        traceback.print_exception(error)
    sys.stderr.write("\r 50%|\u2588\u2588  |\x1b[A\n")
    print("two\nlines\tof a library")
    told = capsys.readouterr()
    assert r"cannot read a\x1b[2J.jsonl" in told.err and r"a bug with \x1b]0;title\x07" in told.err
    assert told.err.endswith("\r 50%|\u2588\u2588  |\x1b[A\n")
    assert told.out == "two\nlines\tof a library\n"


def test_the_package_prints_in_one_place_and_elsewhere_only_json_and_recipes() -> None:
    for file in Path(dpo_pack.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and file.name != "process.py":
                made_by = ast.unparse(node.args[0]).partition("(")[0]
                assert made_by in (
                    "json.dumps",
                    "to_json",
                    "recipe_defaults",
                    "recipe_template",
                    "translate",
                ), f"{file.name}:{node.lineno}"
