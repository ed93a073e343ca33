"""The per-step numbers of TRL 1.16 on the same models and pairs, packed, shared and padded.

Tolerances are those of the numbers' own README: loss 5e-5 (relative above 1), grad_norm 3e-4 relative,
rewards 1e-4, logps 1e-3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpo_pack.losses import LOSSES
from dpo_pack.recipe import parse_recipe
from dpo_pack.train import train

# Cases of expected.json in our recipe's words.
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"type": "sigmoid", "beta": 0.1},
    "sigmoid_beta05": {"type": "sigmoid", "beta": 0.5},
    "hinge": {"type": "hinge", "beta": 0.1},
    "ipo": {"type": "ipo", "beta": 0.1},
    "sigmoid_norm": {"type": "sigmoid_norm", "beta": 5.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared, budget 8192": {"share_prompt": True, "token_budget": 8192},
    "shared, budget 512": {"share_prompt": True, "token_budget": 512},
    "unshared, budget 8192": {"share_prompt": False, "token_budget": 8192},
    "unshared, budget 512": {"share_prompt": False, "token_budget": 512},
    "padded, budget 4096": {"mode": "padded", "token_budget": 4096},
}
TOLERANCES = {
    "rewards/chosen": 1e-4,
    "rewards/rejected": 1e-4,
    "rewards/margins": 1e-4,
    "rewards/accuracies": 1e-9,
    "logps/chosen": 1e-3,
    "logps/rejected": 1e-3,
    "learning_rate": 1e-12,
    # Not in the README's list: means over tokens, which agree as closely as a single log-prob does.
    "entropy": 1e-4,
    "mean_token_accuracy": 1e-6,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_trl(case: str, layout: str, shared_dir: Path, tmp_path: Path, console: Console) -> None:
    directory = shared_dir / "conformance" / "llama"
    expected = json.loads((directory / "expected.json").read_text())["cases"][case]
    assert LOSSES[CASES[case]["type"]] and expected["settings"]["beta"] == CASES[case]["beta"]
    recipe = parse_recipe(
        {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(directory / "policy")},
            "reference": {"path": str(directory / "reference"), "cache_dir": str(tmp_path / "cache")},
            "data": {"train": str(directory / "pairs.jsonl"), "shuffle": False, "max_length": 1024},
            "packing": {"pairs_per_step": 16, **LAYOUTS[layout]},
            "loss": CASES[case],
            "optim": {"lr": 5e-4, "schedule": "constant"},
        }
    )
    train(recipe, console)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(expected["steps"]) + 1))
    for ours, theirs in zip(steps, expected["steps"], strict=True):
        where = f"step {ours['step']}"
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5 * max(1.0, abs(theirs["loss"]))), where
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-4), where
        for name, tolerance in TOLERANCES.items():
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), f"{where}: {name}"
