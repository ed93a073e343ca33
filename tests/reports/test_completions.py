"""Completions in the terminal: side by side where there is room, with nothing that a terminal would obey."""

from __future__ import annotations

import io

import pytest

from dpo_pack.reports.completions import render_completions
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
    wide = shown(80, monkeypatch, before=before, after=after)
    assert max(map(len, wide.split("topic")[0].splitlines())) <= 80
    assert any("red red" in line and "sun sun" in line for line in wide.splitlines())
    narrow = shown(40, monkeypatch, before=before, after=after)
    assert f"  before: {before[0]}\n  after: {after[0]}\n" in narrow
    assert f"topic: ... {'x' * 300}\n" in narrow


def test_lines_of_a_completion_stay_lines_and_control_characters_do_not_act(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(80, monkeypatch, model=["one\n\x1b[2Jtwo", "three"])
    lines = [line.strip() for line in text.splitlines()]
    assert lines[lines.index("one") + 1] == "\\x1b[2Jtwo"
    assert "tone: first\\nask" in lines
