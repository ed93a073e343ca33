"""18 settings of TRL's per-step numbers as recipes, and the comparison with those numbers.

There are two sets of models, pairs and numbers. `CONFORMANCE` is part of this repository, and
scripts/make_conformance_set.py makes it. A second set may lie beside the repository, in
../shared/conformance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpo_pack.recipe.load import Recipe, parse_recipe
from support.plain_steps import PlainPair, plain_steps

TokenIds = tuple[list[int], list[int], list[int]]  # prompt, chosen, rejected
CONFORMANCE = Path(__file__).resolve().parents[1] / "fixtures" / "conformance"

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
    "sigmoid_plus_sft": {"type": [{"type": "sigmoid"}, {"type": "sft", "weight": 0.5}], "beta": 0.1},
    "wpo": {"type": "sigmoid", "beta": 0.1, "weighting": "wpo"},
    "forward_kl": {"type": "sigmoid", "beta": 0.1, "f_divergence": "forward_kl"},
    "js_divergence": {"type": "sigmoid", "beta": 0.1, "f_divergence": "js_divergence"},
    "alpha_divergence": {"type": "sigmoid", "beta": 0.1, "f_divergence": "alpha_divergence", "f_alpha": 0.5},
}


_PLAIN = "sigmoid hinge ipo nca_pair bco_pair sppo_hard apo_zero apo_down discopop".split()  # noqa: SIM905
# The cases in TRL's words, as expected.json has them.
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"beta": 0.1, **settings}
    for name, settings in {
        **{name: {"loss_type": [name]} for name in _PLAIN},
        **{name: dict[str, Any](loss_type=[name], label_smoothing=0.1) for name in ("exo_pair", "robust")},
        "forward_kl": {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"},
        "js_divergence": {"loss_type": ["sigmoid"], "f_divergence_type": "js_divergence"},
        "sigmoid_beta05": {"loss_type": ["sigmoid"], "beta": 0.5},
        "sigmoid_norm": {"loss_type": ["sigmoid_norm"], "beta": 5.0},
        "sigmoid_plus_sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        "alpha_divergence": {
            **{"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence"},
            "f_alpha_divergence_coef": 0.5,
        },
        "wpo": {"loss_type": ["sigmoid"], "use_weighting": True},
    }.items()
}


def in_our_words(settings: dict[str, Any]) -> dict[str, Any]:
    """TRL's settings of a case as our `loss` section."""
    words = {"f_divergence_type": "f_divergence", "f_alpha_divergence_coef": "f_alpha"}
    loss = {words.get(name, name): value for name, value in settings.items()}
    types, factors = loss.pop("loss_type"), loss.pop("loss_weights", [1.0])
    terms = [{"type": name, "weight": factor} for name, factor in zip(types, factors, strict=True)]
    weighting = {"weighting": "wpo"} if loss.pop("use_weighting", False) else {}
    return {"type": terms if len(terms) > 1 else types[0], **loss, **weighting}


CASES = {case: in_our_words(settings) for case, settings in SETTINGS.items()}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared, budget 8192": {"share_prompt": True, "token_budget": 8192},
    "shared, budget 512": {"share_prompt": True, "token_budget": 512},
    "unshared, budget 8192": {"share_prompt": False, "token_budget": 8192},
    "unshared, budget 512": {"share_prompt": False, "token_budget": 512},
    "padded, budget 4096": {"mode": "padded", "token_budget": 4096},
}


# Cases in which TRL's float32 may be further from the truth than the tolerance.
COARSE_CASES = ("discopop", "forward_kl", "sigmoid_norm")
# (case, step, metric) of a plain loop in float64 on the second set, where TRL is further from the loop than
# the tolerance, or so near to it that a CPU's rounding decides. TRL sums log-probs and takes logratios in
# float32, which rounds them by 3e-5 nats. discopop and forward_kl multiply that by 1 / tau or
# exp(-logratio), and AdamW adds to it; rewards multiply it by beta. The repository's own set has the loop's
# numbers in expected.json.
FLOAT64_OF_SHARED = {
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
    # Means over tokens, which agree as closely as a single log-prob does.
    "entropy": 1e-4,
    "mean_token_accuracy": 1e-6,
}


def conformance_recipe(
    directory: Path, tmp_path: Path, case: str, layout: str, *, cache: Path | None = None
) -> Recipe:
    """The run is in `tmp_path`, and so is its cache, unless runs share one."""
    return parse_recipe(
        {
            "output_dir": str(tmp_path / "run"),
            "model": {"path": str(directory / "policy")},
            "reference": {
                "path": str(directory / "reference"),
                "cache_dir": str(cache or tmp_path / "cache"),
            },
            "data": {"train": str(directory / "pairs.jsonl"), "shuffle": False, "max_length": 1024},
            "packing": {"pairs_per_step": 16, **LAYOUTS[layout]},
            "loss": CASES[case],
            "optim": {"lr": 5e-4, "schedule": "constant"},
            "logging": {"samples": None},
            "export": {"verify": "none"},
        }
    )


def steps_in_float64(recipe: Recipe, token_ids: Sequence[TokenIds]) -> list[dict[str, float]]:
    """What a plain loop in float64 logs of the recipe's steps, on all pairs in their order."""
    pairs = [
        PlainPair(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            weight=1,
            chosen_weights=[1] * len(chosen),
            rejected_weights=[1] * len(rejected),
        )
        for prompt, chosen, rejected in token_ids
    ]
    size = recipe.packing.pairs_per_step
    steps = [range(first, first + size) for first in range(0, len(pairs), size)]
    return [
        {**step, "rewards/margins": step["rewards/chosen"] - step["rewards/rejected"]}
        for step in plain_steps(recipe, pairs, steps)
    ]


def steps_of(recipe: Recipe) -> list[dict[str, Any]]:
    lines = (recipe.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_cases(directory: Path) -> dict[str, Any]:
    """expected.json by case: `settings`, `steps` and, for some, `float64`: the steps of the plain loop."""
    cases: dict[str, Any] = json.loads((directory / "expected.json").read_text())["cases"]
    return cases


def expected_steps(directory: Path, case: str) -> list[dict[str, float]]:
    """TRL's numbers of each step, and those of the float64 loop where float32 is too coarse."""
    entry = read_cases(directory)[case]
    plain: list[dict[str, float]] = entry.get("float64", [{} for _ in entry["steps"]])
    if directory != CONFORMANCE:
        for (of_case, step, name), value in FLOAT64_OF_SHARED.items():
            if of_case == case:
                plain[step - 1][name] = value
    return [{**theirs, **exact} for theirs, exact in zip(entry["steps"], plain, strict=True)]


def assert_steps_equal_trl(directory: Path, case: str, steps: list[dict[str, Any]]) -> None:
    """`steps` are the lines of metrics.jsonl; `directory` has the set that was trained on."""
    tolerances = dict(TOLERANCES)
    if directory == CONFORMANCE:
        # Its models predict half of the tokens, 2,700 a step. Where two logits are nearly equal, a CPU's
        # rounding decides which of them is the largest: room for two tokens.
        tolerances["mean_token_accuracy"] = 8e-4
    expected = expected_steps(directory, case)
    assert [step["step"] for step in steps] == list(range(1, len(expected) + 1))
    for ours, theirs in zip(steps, expected, strict=True):
        where = f"{case}, step {ours['step']}"
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=5e-5 * max(1.0, abs(theirs["loss"]))), where
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-4), where
        for name, tolerance in tolerances.items():
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), f"{where}: {name}"
