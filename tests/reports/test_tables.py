"""Tables for people: what a terminal shows of texts, lines and evaluations."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dpo_pack.online.win_rate import win_rate_sentence
from dpo_pack.reports.tables import Cells, estimate, pairs_and_prompts, render_completions, terminal_table
from dpo_pack.system.console import make_console


def shown(width: int, monkeypatch: pytest.MonkeyPatch, **completions: list[str]) -> str:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    console = make_console()
    console.width = width
    render_completions([("tone", "first\nask"), ("topic", "x" * 99 + " longish" * 40)], completions, console)
    return stream.getvalue()


def test_lines_of_a_completion_stay_and_control_characters_are_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(80, monkeypatch, model=["one\n\x1b[2Jtwo", "three"])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("one") + 1] == "\\x1b[2Jtwo"
    assert lines[lines.index("tone: first") + 1] == "ask"
    assert set(text.partition("topic: ... ")[2].split()[:30]) == {"longish"}  # it is cut at a word


@pytest.mark.parametrize("no_wrap", [True, False])
def test_a_narrow_screen_wraps_every_column_or_only_the_first_one_and_cuts_nothing(no_wrap: bool) -> None:
    cells = Cells(("", "mean", "interval"), [("a source of long names", "0.125", "0.100 to 0.200")])
    stream = io.StringIO()
    table = terminal_table("held", cells, no_wrap=True) if no_wrap else terminal_table("held", cells)
    Console(file=stream, width=36).print(table)
    shown = stream.getvalue()
    assert all(word in shown for row in cells.rows for cell in row for word in cell.split())
    assert "a source of long names" not in shown and ("0.100 to 0.200" in shown) == no_wrap


def test_a_table_without_titles_of_columns_has_no_lines_for_them() -> None:
    stream = io.StringIO()
    Console(file=stream, width=36).print(terminal_table("held", Cells(("", ""), [("loss", "0.5")])))
    assert [line.split() for line in stream.getvalue().splitlines()] == [["held"], [], ["loss", "0.5"], []]


def test_a_record_of_an_online_evaluation_is_told_with_its_win_rate_or_says_that_there_is_no_score() -> None:
    record: dict[str, Any] = {
        "prompts": 1200, "failures": 3, "online/win_rate": 0.625, "online/scores": 1.5,
        "online/score_gain": 0.25,
        "intervals": {"online/win_rate": (0.5, 0.75), "online/score_gain": (-0.125, 0.625)},
    }  # fmt: skip
    assert "0.625 (0.500 to 0.750)" in (told := win_rate_sentence(record)) and "3 prompts failed" in told
    assert win_rate_sentence({"prompts": 1200}) == "no score for any of 1,200 prompts"
    ties = {**record["intervals"], "online/win_rate": None}
    assert "wins 0.625 (all ties) against" in win_rate_sentence({**record, "intervals": ties})
    assert "gain +0.000 (" in win_rate_sentence({**record, "online/score_gain": -0.0001})


def test_a_number_has_its_interval_or_says_why_not_and_no_sign_before_zero() -> None:
    record: dict[str, Any] = {
        "rewards/accuracies": 0.5,
        "loss": 0.6931,
        "rewards/margins": -0.0004,
        "logps/chosen": None,
    }
    record["intervals"] = {"rewards/accuracies": None, "loss": None, "rewards/margins": [-0.0004, 0.25]}
    cells = [estimate(record, name) for name in record if name != "intervals"]
    assert cells == ["0.500 (all ties)", "0.693", "0.000 (0.000 to 0.250)", ""]
    large = {"loss": 25.4321, "rewards/margins": -10.94, "intervals": {"loss": [25.1, 25.75]}}
    assert [estimate(large, name) for name in ("loss", "rewards/margins")] == ["25.4 (25.1 to 25.8)", "-10.9"]
    shown = [estimate({"loss": loss}, "loss") for loss in (1, 1.25, 9.999, 1234.5)]
    assert shown == ["1.000", "1.25", "10.0", "1,234"]
    assert pairs_and_prompts({"pairs": 1, "prompts": 1}) == "1 pair"
    assert pairs_and_prompts({"pairs": 4, "prompts": 1, "held_out_pairs": 9}) == "4 of 9 pairs, 1 prompt"
