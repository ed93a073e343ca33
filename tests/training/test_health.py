"""Health: what made-up curves give rise to, once each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpo_pack.data.formats import SIDES
from dpo_pack.system.files import parse_json
from dpo_pack.training.health import RULES, Health, RunFacts, examine, what_can_be_told

RUN = RunFacts(num_steps=100, beta=0.1, initial_loss=math.log(2))


def logps(chosen: float, rejected: float) -> dict[str, float]:
    """Log-probs a token, and of completions of 200 tokens."""
    of_token = {"logps/chosen_per_token": chosen, "logps/rejected_per_token": rejected}
    return of_token | {"logps/chosen": 200 * chosen, "logps/rejected": 200 * rejected}


def line(step: int, **changes: float) -> dict[str, Any]:
    """A line of a run that goes well: margins grow, the chosen reward stays near 0."""
    random = np.random.default_rng(step)
    progress = step / 100
    record = {
        "split": "train",
        "step": step,
        "loss": math.log(2) - 0.3 * progress,
        "rewards/accuracies": 0.5 + 0.3 * progress + random.normal(scale=0.05),
        "rewards/saturated": 0.1 * progress,
        "rewards/chosen_per_token": 0.0005 * progress,
        "rewards/rejected_per_token": -0.002 * progress,
        "logratio/chosen": 0.5 * progress + random.normal(scale=0.5),
        "logratio/rejected": -20.0 * progress,
        **logps(*random.normal(-1.5, 0.05, size=2)),
        "grad_norm": 3.0 * math.exp(random.normal(scale=0.5)),
        "learning_rate": 5e-7,
        "pairs": 64,
    }
    return {**record, **changes}


def noisy(step: int, side: str) -> float:
    return float(line(step)[f"logps/{side}_per_token"])


def examined(
    records: Iterable[dict[str, Any]], *, run: RunFacts = RUN, health: Health | None = None
) -> Health:
    health = health or Health()
    for record in records:
        health, _ = examine(health, record, run)
    return health


def curve(change: Callable[[int], dict[str, float]]) -> list[dict[str, Any]]:
    return [line(step, **change(step)) for step in range(1, 101)]


def warned(change: Callable[[int], dict[str, float]], **options: Any) -> tuple[str, ...]:
    return examined(curve(change), **options).warned


# What a line has in each step of a run with one trouble, and the first and last step at which that is told.
TROUBLES: dict[str, tuple[Callable[[int], dict[str, float]], int, int]] = {
    "high_initial_loss": (lambda step: {"loss": 2.5}, 1, 1),
    "both_rewards_falling": (
        lambda step: {"logratio/chosen": -0.3 * step, "logratio/rejected": -0.6 * step},
        20,
        30,
    ),
    "accuracy_stuck": (lambda step: {"rewards/accuracies": 0.5 + 0.06 * (-1) ** step}, 20, 20),
    "saturation": (lambda step: {"rewards/saturated": min(1.0, step / 60)}, 46, 60),
    "kl_blow_up": (lambda step: {"rewards/rejected_per_token": -0.003 * step}, 34, 45),
    "exploding_gradients": (lambda step: {"grad_norm": 3.0 if step < 50 else 90.0}, 52, 52),
    "dying_experts": (lambda step: {"experts/unused": 0.1 + 0.002 * step}, 28, 36),
}


def test_each_rule_has_a_trouble_here_and_a_row_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("## Health")[2]
    assert TROUBLES.keys() == RULES.keys() == set(re.findall(r"^\| `(\w+)` \|", docs, re.MULTILINE))


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_told_once_when_it_shows(name: str) -> None:
    change, first, last = TROUBLES[name]
    health = examined(curve(change))
    assert health.warned == (name,)
    (told,) = health.warnings
    assert first <= int(told.split()[2].strip(":")) <= last and told.isprintable()


def everything(step: int) -> dict[str, float]:
    changes = (change(step) for name, (change, *_) in TROUBLES.items() if name != "dying_experts")
    return {name: value for change in changes for name, value in change.items()}


@pytest.mark.parametrize("stop_at", [1, 19, 25, 50])
def test_a_run_that_goes_on_from_its_saved_health_warns_as_if_it_had_never_stopped(stop_at: int) -> None:
    records = curve(everything)
    saved = json.dumps(asdict(examined(records[:stop_at])))
    for written in (saved, saved.replace("logratio/", "kl/")):  # by the first preview
        resumed = examined(records[stop_at:], health=parse_json(written.encode(), Health))
        assert replace(resumed, first={}) == replace(examined(records), first={})
        assert len(resumed.warnings) == len(RULES) - 1


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {"grad_norm": 300.0} if step in (40, 42, 60) else {},  # wild steps, one at a time
        lambda step: {"logratio/chosen": -0.3 * step, "logratio/rejected": 5.0},  # only one reward falls
        lambda step: {"logratio/chosen": -6.0 + 0.02 * step, "logratio/rejected": -20.0},  # it falls no more
        lambda step: {"rewards/accuracies": 0.5, "pairs": 4},  # too few pairs to know that it is below 0.53
        lambda step: {"rewards/accuracies": 0.54, "pairs": 256},  # it learns slowly
        lambda step: {"experts/unused": 0.4},  # these had no tokens from the start
        lambda step: {"rewards/accuracies": 0.501, "rewards/ties": 0.97},  # in 16 bits nothing is seen yet
        lambda step: {"rewards/accuracies": 0.51, "rewards/ties": 0.8},  # 0.55 of the others
    ],
)
def test_a_run_without_trouble_is_not_warned(change: Callable[[int], dict[str, float]]) -> None:
    assert warned(change) == ()


def test_a_policy_that_moved_and_learned_nothing_is_not_told_to_move_faster() -> None:
    change = TROUBLES["accuracy_stuck"][0]
    (still,) = examined(curve(lambda step: {**change(step), "logratio/rejected": 0.0})).warnings
    (moved,) = examined(curve(lambda step: {**change(step), "logratio/rejected": -30.0})).warnings
    assert "Raise optim.lr" in still and "Lower optim.lr" in moved


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda step: {"rewards/accuracies": 0.2 + 0.003 * step}, ()),
        (lambda step: {"rewards/accuracies": 0.7, "rewards/saturated": 1.0}, ()),
        (lambda step: {"rewards/accuracies": 0.7 - 0.004 * step}, ("accuracy_stuck",)),
        (lambda step: {"rewards/accuracies": 0.49 - 0.002 * step, "rewards/ties": 0.5}, ("accuracy_stuck",)),
        (lambda step: {"rewards/chosen_per_token": -20.0}, ()),
        (lambda step: logps(-0.3 - 0.01 * step, -0.3 - 0.01 * step), ("both_rewards_falling",)),
        (
            lambda step: logps(*(noisy(step, side) - 0.005 * step for side in SIDES)),
            ("both_rewards_falling",),
        ),
        (lambda step: logps(noisy(step, "chosen"), -1.5 - 0.05 * step), ()),
        (lambda step: {"rewards/chosen_per_token": -20.0 - 3.0 * (step > 30)}, ("kl_blow_up",)),
    ],
)
def test_a_loss_without_reference_is_judged_by_how_it_began(
    change: Callable[[int], dict[str, float]], expected: tuple[str, ...]
) -> None:
    """Its accuracy may be far from 0.5 at the start, and the sum of its margins is not what it trains."""
    records = [
        {name: value for name, value in record.items() if not name.startswith("logratio/")}
        for record in curve(change)
    ]
    run = RunFacts(num_steps=100, beta=2.0, initial_loss=None)
    assert examined(records, run=run).warned == expected


def test_a_line_that_is_not_finite_teaches_nothing() -> None:
    health = examined([line(1)])
    assert examine(health, line(2, grad_norm=math.nan), RUN) == (health, ())


def test_the_load_balancing_loss_is_no_reason_to_suspect_the_first_loss() -> None:
    record = line(1, loss=math.log(2) + 0.9 * 2.2, aux_loss=2.2)
    assert examined([record], run=replace(RUN, router_aux_coef=0.9)).warned == ()
    assert len(examined([record]).warned) == 1


@pytest.mark.parametrize(
    ("low", "high", "changes", "expected"),
    [
        (0.7, 0.79, {"eval_precision": "float32", "margin_noise": 0.01}, "below 0.05 may be chance"),
        # 0.25 (1.96 / 0.05)^2 = 384.1 pairs, of any number of pairs; 4 pairs of a prompt may count as one.
        (
            0.7,
            0.9,
            {"pairs": 100},
            "with 100 pairs, differences in reward accuracy below 0.10 may be chance{}",
        ),
        (0.5, 0.99, {"pairs": 7}, "below 0.37 may be chance{}; the true value may be 0.5"),
        (0.7, 0.9, {"effective_pairs": 100.0}, "may be chance; 1,537 pairs would show one of 0.05"),
        (0.7, 1.0, {"pairs": 1}, "with 1 pair, differences in reward accuracy below 0.98 may be chance{}"),
        (0.7, 0.79, {"eval_precision": "float16", "margin_noise": 0.0123}, "rounds a margin by about 0.012"),
    ],
)
def test_what_held_out_pairs_show(low: float, high: float, changes: dict[str, Any], expected: str) -> None:
    record = {"pairs": 400, "intervals": {"rewards/accuracies": [low, high]}, **changes}
    assert what_can_be_told(record).endswith(expected.format("; 385 pairs would show one of 0.05"))
    for none in ({}, {"rewards/accuracies": None}):
        assert not what_can_be_told({**record, "intervals": none})


def test_what_a_difference_of_two_models_shows_follows_from_its_interval() -> None:
    for (low, high), told in {(-0.1, 0.1): "0.10 may be chance; 400 pairs", (0, 0): "0.01 may be"}.items():
        difference = {"pairs": 100, "intervals": {"rewards/accuracies": [low, high]}}
        assert f"below {told}" in what_can_be_told(difference, without_effect=0.0)
