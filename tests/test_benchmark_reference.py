"""scripts/benchmark_reference.py: what its report says, and that our side gives the pass's values."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from oracle import completion_logps_one_by_one
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


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
        "workload": {"pairs": 100, "vocabulary": 8192},
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


def test_our_side_measures_the_log_probs_of_each_sequence(benchmark: ModuleType, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "ask red", "chosen": " blue yes", "rejected": " sun no"}] * 2
    rows[1] = {"prompt": "ask one", "chosen": " two", "rejected": " three moon"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds, values = benchmark.run_dpo_pack(0, tmp_path, 2)
    assert seconds > 0
    sequences = []
    for row in rows:
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"])["input_ids"]
            both = [*tokenizer(row["prompt"] + row[side])["input_ids"], tokenizer.eos_token_id]
            sequences.append((ids, both[len(ids) :]))
    expected = completion_logps_one_by_one(model, sequences).detach().numpy().reshape(2, 2)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4)
