"""scripts/benchmark_reference.py: what its report says, and that our side gives the pass's values."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmarking.contenders import ours
from support.oracle import completion_logps_one_by_one
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_reference")


def test_the_report_has_medians_and_ratios_run_by_run(benchmark: ModuleType) -> None:
    report = {
        "command": "python x",
        "date": "2026-01-01",
        "machine": {
            "versions": {"torch": "2"},
            "devices": [{"name": "cpu"}],
            "git_commit": "abc",
            "processor": "p",
        },
        "workload": {"pairs": 100, "model": "7m", "origin": "made up", "swept": 50},
        "target": 5.0,
        "sweep": {"TRL, batch 1": 20.0, "TRL, batch 8": 10.0},
        "best_of_trl": "TRL, batch 1",
        "default_of_trl": "TRL, batch 8",
        "pairs_per_second": {
            "dpo-pack": [80.0, 90.0, 100.0],
            "TRL, batch 1": [20.0, 20.0, 20.0],
            "TRL, batch 8": [10.0, 10.0, 8.0],
        },
        "largest_difference_nats": 2e-4,
    }
    text = benchmark.markdown(report)
    assert "| TRL, batch 1 | 20.0 | 20.0 to 20.0 | 4.50x (4.00 to 5.00) |" in text
    assert "| TRL, batch 8 | 10.0 | 8.0 to 10.0 | 9.00x (8.00 to 12.50) |" in text
    assert "2.0e-04 nats" in text
    assert "Target: at least 5x TRL's best: 4.50x: **missed**." in text
    assert "- TRL, batch 8: 10.0, 10.0, 8.0\n" in text and "- TRL, batch 1: 20.0\n" in text


def test_an_interrupted_benchmark_goes_on_and_compares_with_the_first_run(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    is_killed = True

    def measure(contender: Any, _: Any, num_pairs: int) -> tuple[float, Any]:
        if is_killed and len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(contender.name)
        off = 2e-3 if "batch 2" in contender.name else 0.0
        return (1.0 if contender.name == "dpo-pack" else 4.0), np.full((num_pairs, 2), -5.0 + off)

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "save_model", lambda *_, **__: None)
    settings: dict[str, Any] = {"num_pairs": 3, "sweep_pairs": 2, "repeats": 3, "batch_sizes": "2,8"}
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(tmp_path / "out", model="tiny", **settings)
    is_killed = False
    with pytest.raises(SystemExit, match="differ by more than 0.001 nats"):
        benchmark.main(tmp_path / "out", model="tiny", **settings)
    entries = json.loads((tmp_path / "out.json").read_text())["entries"]
    assert len(measured) == len(entries) - 1  # nothing twice; the log-probs are an entry of their own
    assert "4.00x (4.00 to 4.00)" in (tmp_path / "out.md").read_text()


@pytest.mark.slow
def test_our_side_measures_the_log_probs_of_each_sequence(benchmark: ModuleType, tmp_path: Path) -> None:
    setting, _ = benchmark.make_setting(tmp_path, None, num_pairs=3, model="tiny")
    (tmp_path / "run").mkdir()
    seconds, values = benchmark.run_dpo_pack(ours(8192), setting, tmp_path / "run")
    assert seconds > 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "pairs.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(setting.model)
    sequences = [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows for side in ("chosen", "rejected")]
    expected = completion_logps_one_by_one(model, sequences).detach().numpy().reshape(3, 2)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-3)
