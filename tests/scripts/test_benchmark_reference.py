"""scripts/benchmark_reference.py: what its report says, and that our side gives the pass's values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmark_reference
import numpy as np
import pytest
from benchmarking.contenders import ours
from support.oracle import completion_logps_one_by_one
from transformers import AutoModelForCausalLM


def test_an_interrupted_benchmark_goes_on_and_compares_with_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    is_killed = True

    def measure(contender: Any, _: Any, num_pairs: int) -> tuple[float, Any]:
        if is_killed and len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(contender.name)
        off = 2e-3 if "batch 2" in contender.name else 0.0
        return (1.0 if contender.name == "dpo-pack" else 4.0), np.full((num_pairs, 2), -5.0 + off)

    monkeypatch.setattr(benchmark_reference, "measure", measure)
    monkeypatch.setattr(benchmark_reference, "save_model", lambda *_, **__: None)
    settings: dict[str, Any] = {
        "num_pairs": 3,
        "sweep_pairs": 2,
        "repeats": 3,
        "batch_sizes": "2,8",
        "target": 5.0,
    }
    with pytest.raises(KeyboardInterrupt):
        benchmark_reference.main(tmp_path / "out", model="tiny", **settings)
    is_killed = False
    with pytest.raises(SystemExit, match="differ by more than 0.001 nats"):
        benchmark_reference.main(tmp_path / "out", model="tiny", **settings)
    entries = json.loads((tmp_path / "out.json").read_text())["entries"]
    assert len(measured) == len(entries) - 1  # nothing twice; the log-probs are an entry of their own
    page = (tmp_path / "out.md").read_text()
    assert "4.00x (4.00 to 4.00)" in page and "Target: at least 5x TRL's best: 4.00x: **missed**." in page


@pytest.mark.slow
def test_our_side_measures_the_log_probs_of_each_sequence(tmp_path: Path) -> None:
    setting, _ = benchmark_reference.make_setting(tmp_path, None, num_pairs=3, model="tiny")
    (tmp_path / "run").mkdir()
    seconds, values = benchmark_reference.run_dpo_pack(ours(8192), setting, tmp_path / "run")
    assert seconds > 0
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "pairs.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(setting.model)
    sequences = [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows for side in ("chosen", "rejected")]
    expected = completion_logps_one_by_one(model, sequences).detach().numpy().reshape(3, 2)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-3)
