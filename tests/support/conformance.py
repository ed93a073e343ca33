"""The 21 settings of TRL's per-step numbers as recipes, and the comparison with those numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpo_pack.recipe.load import Recipe, parse_recipe

# Cases of expected.json in our recipe's words.
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"type": "sigmoid", "beta": 0.1},
    "sigmoid_beta05": {"type": "sigmoid", "beta": 0.5},
    "hinge": {"type": "hinge", "beta": 0.1},
    "ipo": {"type": "ipo", "beta": 0.1},
    "sigmoid_norm": {"type": "sigmoid_norm", "beta": 5.0},
    "exo_pair": {"type": "exo_pair", "beta": 0.1, "label_smoothing": 0.1},
    "nca_pair": {"type": "nca_pair", "beta": 0.1},
    "robust": {"type": "robust", "beta": 0.1, "label_smoothing": 0.1},
    "bco_pair": {"type": "bco_pair", "beta": 0.1},
    "sppo_hard": {"type": "sppo_hard", "beta": 0.1},
    "apo_zero": {"type": "apo_zero", "beta": 0.1},
    "apo_down": {"type": "apo_down", "beta": 0.1},
    "discopop": {"type": "discopop", "beta": 0.1},
    "aot": {"type": "aot", "beta": 0.1, "label_smoothing": 0.1},
    "aot_unpaired": {"type": "aot_unpaired", "beta": 0.1},
    "sigmoid_plus_sft": {"type": [{"type": "sigmoid"}, {"type": "sft", "weight": 0.5}], "beta": 0.1},
    "ld_alpha": {"type": "sigmoid", "beta": 0.1, "ld_alpha": 0.5},
    "wpo": {"type": "sigmoid", "beta": 0.1, "weighting": "wpo"},
    "forward_kl": {"type": "sigmoid", "beta": 0.1, "f_divergence": "forward_kl"},
    "js_divergence": {"type": "sigmoid", "beta": 0.1, "f_divergence": "js_divergence"},
    "alpha_divergence": {"type": "sigmoid", "beta": 0.1, "f_divergence": "alpha_divergence", "f_alpha": 0.5},
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared, budget 8192": {"share_prompt": True, "token_budget": 8192},
    "shared, budget 512": {"share_prompt": True, "token_budget": 512},
    "unshared, budget 8192": {"share_prompt": False, "token_budget": 8192},
    "unshared, budget 512": {"share_prompt": False, "token_budget": 512},
    "padded, budget 4096": {"mode": "padded", "token_budget": 4096},
}


# (case, step, metric) of a plain loop in float64, where TRL is further from the loop than the tolerance, or
# so near to it that a CPU's rounding decides. TRL sums log-probs and takes logratios in float32, which rounds
# them by 3e-5 nats. discopop and forward_kl multiply that by 1 / tau or exp(-logratio), and AdamW adds to it;
# rewards multiply it by beta.
FLOAT64 = {
    ("discopop", 6, "grad_norm"): 2.23067097,
    ("forward_kl", 6, "grad_norm"): 2.60839998,
    ("sigmoid_norm", 1, "rewards/margins"): -0.41511874,
    ("sigmoid_norm", 5, "rewards/margins"): 4.13766976,
    ("sigmoid_norm", 6, "rewards/margins"): 1.83349812,
    ("sigmoid_norm", 6, "rewards/rejected"): -4.93733487,
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


def conformance_recipe(directory: Path, tmp_path: Path, case: str, layout: str) -> Recipe:
    return parse_recipe(
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


def steps_of(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (recipe.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_steps_equal_trl(case: str, steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Lines of metrics.jsonl and of the case in expected.json."""
    assert [step["step"] for step in steps] == list(range(1, len(expected) + 1))
    for ours, theirs in zip(steps, expected, strict=True):
        where = f"{case}, step {ours['step']}"
        theirs = {name: FLOAT64.get((case, ours["step"], name), value) for name, value in theirs.items()}
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5 * max(1.0, abs(theirs["loss"]))), where
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-4), where
        for name, tolerance in TOLERANCES.items():
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), f"{where}: {name}"
