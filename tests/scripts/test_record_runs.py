"""tests/record_runs.py: what a run computed is recorded, and another number is found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_run_is_recorded_and_one_other_number_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("record_runs", ROOT / "tests" / "record_runs.py")
    assert spec is not None and spec.loader is not None
    record_runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record_runs)
    recorded = record_runs.record(["lora"], ROOT)
    found = recorded["lora"]
    kinds = [
        sum(key.startswith(kind) for key in found) for kind in ("metrics", "pairs", "reference", "weights")
    ]
    assert min(kinds) > 10 and not any("seconds" in key for key in found)
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(recorded))
    found["metrics 001 loss"] += 1e-15
    other.write_text(json.dumps(recorded))
    assert record_runs.compare(one, one) == 0
    assert "equal: lora" in capsys.readouterr().out
    assert record_runs.compare(one, other) == 1
    assert "1 of" in (told := capsys.readouterr().out) and "first 'metrics 001 loss'" in told
