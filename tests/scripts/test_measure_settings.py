"""scripts/measure_settings.py: every command runs, and prints what the docs quote from it."""

from __future__ import annotations

import re

import measure_settings
import pytest
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["products"], r"\| 8 x 4 x 6 \| grad\.T @ features \| \d+ \| \d+ \| \d+ \|"),
        (["head-chunks", "--num-tokens", "8", "--repeats", "1"], r"\| 4 x 16 (\| \d+ ){5}\|"),
        pytest.param(
            ["head-passes", "--num-tokens", "8", "--repeats", "1", "--backend", "aot_eager"],
            r"\| 4 x 16 \| bfloat16 \| \d+ \| \d+ \| \d+\.\d\d \(",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["gradient-sums", "--num-rows", "1"],
            r"\| 1 (\| \d\.\d\d% ){3}\|",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["checkpoints", "--num-parameters", "2400", "--repeats", "1"],
            r"asynchronous: True: training waits \d+\.\d\d s, next three steps \d+\.\d\d s each",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_setting_is_measured(command: list[str], printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_settings, "SHAPES", ((8, 4, 6),))
    monkeypatch.setattr(measure_settings, "HEADS", ((4, 16),))
    outcome = CliRunner().invoke(measure_settings.app, command, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert re.search(printed, outcome.output)


@pytest.mark.slow
def test_both_trainers_are_measured_alone_and_beside_others_with_and_without_a_bounded_wait() -> None:
    pytest.importorskip("trl")
    command = ["threads", "--num-pairs", "8", "--repeats", "1", "--busy", "1", "--model", "tiny"]
    outcome = CliRunner(env={"GOMP_SPINCOUNT": None}).invoke(
        measure_settings.app, command, catch_exceptions=False
    )
    found = re.findall(r"\| (dpo-pack|TRL).* \| (\d) \| 1 (?:\| [1-9\d.]+, [\d.]+ ){2}\|", outcome.output)
    assert found == [("dpo-pack", "0"), ("TRL", "0"), ("dpo-pack", "1"), ("TRL", "1")]
