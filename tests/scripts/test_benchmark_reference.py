"""scripts/benchmark_reference.py: what its report says, and that our side gives the pass's values."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
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
        "workload": {"pairs": 100, "model": "7m"},
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


@pytest.mark.slow
def test_our_side_measures_the_log_probs_of_each_sequence(benchmark: ModuleType, tmp_path: Path) -> None:
    setting = benchmark.make_setting(tmp_path, None, num_pairs=3, model="tiny")
    (tmp_path / "run").mkdir()
    seconds, values = benchmark.run_dpo_pack(0, setting, tmp_path / "run")
    assert seconds > 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "pairs.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(setting.model)
    sequences = [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows for side in ("chosen", "rejected")]
    expected = completion_logps_one_by_one(model, sequences).detach().numpy().reshape(3, 2)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-3)
