"""scripts/benchmark.py: that it measures both trainers on the same work, and what its report says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_script"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_made_up_rows_have_hh_s_lengths(benchmark: ModuleType) -> None:
    rows = benchmark._made_up_rows(500)
    words = {
        name: sorted(len(row[name].split()) for row in rows) for name in ("prompt", "chosen", "rejected")
    }
    assert 85 < words["prompt"][250] < 112 and 24 < words["chosen"][250] < 35
    assert words["rejected"][250] > words["chosen"][250]


def test_the_report_gives_medians_spread_and_paired_ratios(benchmark: ModuleType) -> None:
    def runs(*rates: float) -> list[dict[str, float]]:
        return [{"pairs_per_second": r, "reference_seconds": 1.0, "train_seconds": 2.0} for r in rates]

    report: dict[str, Any] = {
        "command": "python scripts/benchmark.py",
        "date": "2026-01-01",
        "machine": {
            "git_commit": "abc", "processor": "cpu", "versions": {"torch": "2"}, "devices": [{"name": "cpu"}],
        },
        "workload": {"pairs": 256, "vocabulary": 8192},
        "sweep": {"TRL, micro-batch 1, live reference": 5.0},
        "best_of_trl": "TRL, micro-batch 1, live reference",
        "runs": {"dpo-pack": runs(20, 30, 10), "TRL, micro-batch 1, live reference": runs(5, 6, 4)},
    }  # fmt: skip
    text = benchmark._markdown(report)
    assert "| dpo-pack | 20.00 | 10.00 to 30.00 | 1.0 | 2.0 | 4.00x |" in text
    assert "median 4.00, 2.50 to 5.00" in text


@pytest.mark.slow
def test_both_trainers_do_the_same_work(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    workload = benchmark._make_workload(tmp_path, None, 32, 8192)
    trl = benchmark.Contender(name="TRL", trainer="trl", microbatch_pairs=4, precompute=True)
    for contender in (benchmark.OURS, trl):
        numbers = benchmark._measure(contender, workload, 32)
        assert numbers["reference_seconds"] > 0 and numbers["train_seconds"] > 0, contender.name
        assert numbers["pairs_per_second"] == pytest.approx(
            32 / (numbers["reference_seconds"] + numbers["train_seconds"])
        )
    rows = [json.loads(line) for line in (workload / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 32
