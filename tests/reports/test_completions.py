"""Completions in the terminal: side by side where there is room, with nothing that a terminal would obey."""

from __future__ import annotations

import io

import pytest

from dpo_pack.online.win_rate import win_rate_sentence
from dpo_pack.reports.completions import render_completions
from dpo_pack.reports.run_views import _flat
from dpo_pack.system.console import make_console


def shown(width: int, monkeypatch: pytest.MonkeyPatch, **completions: list[str]) -> str:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    console = make_console()
    console.width = width
    render_completions([("tone", "first\nask"), ("topic", "x" * 1000)], completions, console)
    return stream.getvalue()


def test_columns_need_room_for_words(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = [f"{'red ' * 20}end", "b"], [f"{'sun ' * 20}end", "d"]
    for width in (80, 48):  # 24 for each
        wide = shown(width, monkeypatch, before=before, after=after)
        assert max(map(len, wide.split("topic")[0].splitlines())) <= width
        assert any("red red" in line and "sun sun" in line for line in wide.splitlines())
    narrow = shown(47, monkeypatch, before=before, after=after)
    assert f"  before: {before[0]}\n  after: {after[0]}\n" in narrow
    assert f"topic: ... {'x' * 300}\n" in narrow


def test_lines_of_a_completion_stay_lines_and_control_characters_do_not_act(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(80, monkeypatch, model=["one\n\x1b[2Jtwo", "three"])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("one") + 1] == "\\x1b[2Jtwo"
    assert "tone: first\\nask" in lines


def test_a_record_of_an_online_evaluation_is_told_with_its_win_rate_or_says_that_there_is_no_score() -> None:
    record = {
        "prompts": 1200, "failures": 3, "online/win_rate": 0.625, "online/scores": 1.5,
        "online/score_gain": 0.25,
        "intervals": {"online/win_rate": (0.5, 0.75), "online/score_gain": (-0.125, 0.625)},
    }  # fmt: skip
    assert win_rate_sentence(record) == (
        "wins 0.625 (0.500 to 0.750) against the starting policy, score 1.500, gain +0.250 (-0.125 to "
        "+0.625), 3 prompts failed"
    )
    assert win_rate_sentence({"prompts": 1200}) == "no score for any of 1,200 prompts"


def test_a_list_in_which_only_some_items_are_mappings_is_told_key_by_key() -> None:
    assert dict(_flat({"judges": ["plain", {"path": "a"}], "betas": [0.9, 0.95]})) == {
        "judges.0": "plain", "judges.1.path": "a", "betas": [0.9, 0.95],
    }  # fmt: skip
