"""Health: what made-up curves give rise to, once each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from dpo_pack.system.files import parse_json
from dpo_pack.training.health import RULES, Health, RunFacts, examine, what_can_be_told

RUN = RunFacts(num_steps=100, beta=0.1, initial_loss=math.log(2))


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
        "kl/chosen": 0.5 * progress + random.normal(scale=0.5),
        "kl/rejected": -20.0 * progress,
        "grad_norm": 3.0 * math.exp(random.normal(scale=0.5)),
        "learning_rate": 5e-7,
        "pairs": 64,
    }
    return {**record, **changes}


def warnings_of(
    records: Iterable[dict[str, Any]], *, run: RunFacts = RUN, health: Health | None = None
) -> list[tuple[int, str]]:
    """(step, warning) of all lines."""
    health = health or Health()
    found = []
    for record in records:
        health, warnings = examine(health, record, run)
        found += [(int(record["step"]), warning) for warning in warnings]
    return found


def curve(change: Callable[[int], dict[str, float]]) -> list[dict[str, Any]]:
    return [line(step, **change(step)) for step in range(1, 101)]


def falling(step: int) -> dict[str, float]:
    return {"kl/chosen": -0.3 * step, "kl/rejected": -0.6 * step}


def stuck(step: int) -> dict[str, float]:
    return {"rewards/accuracies": 0.5 + 0.06 * (-1) ** step}


def saturated(step: int) -> dict[str, float]:
    return {"rewards/saturated": min(1.0, step / 60)}


def blown_up(step: int) -> dict[str, float]:
    return {"rewards/rejected_per_token": -0.003 * step}


def exploding(step: int) -> dict[str, float]:
    return {"grad_norm": 3.0 if step < 50 else 90.0}


def dying(step: int) -> dict[str, float]:
    return {"experts/unused": 0.1 + 0.002 * step}


def high(step: int) -> dict[str, float]:
    return {"loss": 2.5}


@pytest.mark.parametrize(
    ("change", "name", "first", "last"),
    [
        (high, "high_initial_loss", 1, 1),
        (falling, "both_rewards_falling", 20, 30),
        (stuck, "accuracy_stuck", 20, 20),
        (saturated, "saturation", 46, 60),
        (blown_up, "kl_blow_up", 34, 45),
        (exploding, "exploding_gradients", 52, 52),
        (dying, "dying_experts", 28, 36),
    ],
)
def test_each_trouble_is_told_once_when_it_shows(
    change: Callable[[int], dict[str, float]], name: str, first: int, last: int
) -> None:
    ((step, warning),) = warnings_of(curve(change))
    assert first <= step <= last and warning.isprintable()
    health = Health()
    for record in curve(change):
        health, _ = examine(health, record, RUN)
    assert health.warned == (name,) and name in RULES


def everything(step: int) -> dict[str, float]:
    return {**high(step), **falling(step), **stuck(step), **saturated(step), **blown_up(step)}


@pytest.mark.parametrize("stop_at", [1, 19, 25, 50])
def test_a_run_that_goes_on_from_its_saved_health_warns_as_if_it_had_never_stopped(stop_at: int) -> None:
    records = curve(everything)
    health = Health()
    found = []
    for record in records:
        if record["step"] == stop_at:
            health = parse_json(json.dumps(asdict(health)).encode(), Health)
        health, warnings = examine(health, record, RUN)
        found += [(int(record["step"]), warning) for warning in warnings]
    assert found == warnings_of(records) and len(found) == 5


def test_one_wild_step_is_not_an_explosion() -> None:
    assert warnings_of(curve(lambda step: {"grad_norm": 300.0} if step in (40, 42, 60) else {})) == []


def test_a_chosen_reward_that_falls_alone_or_has_stopped_falling_is_no_trouble() -> None:
    assert warnings_of(curve(lambda step: {"kl/chosen": -0.3 * step, "kl/rejected": 5.0})) == []
    assert warnings_of(curve(lambda step: {"kl/chosen": -6.0 + 0.02 * step, "kl/rejected": -20.0})) == []


def test_accuracy_is_judged_by_how_many_pairs_were_seen() -> None:
    # 0.5 may be noise of 0.53 for 39 x 4 pairs, and is not for 39 x 256.
    few = warnings_of(curve(lambda step: {"rewards/accuracies": 0.5, "pairs": 4}))
    many = warnings_of(curve(lambda step: {"rewards/accuracies": 0.5, "pairs": 256}))
    slow = warnings_of(curve(lambda step: {"rewards/accuracies": 0.54, "pairs": 256}))
    assert few == [] and len(many) == 1 and slow == []


def test_a_policy_that_moved_and_learned_nothing_is_not_told_to_move_faster() -> None:
    ((_, still),) = warnings_of(curve(lambda step: {**stuck(step), "kl/rejected": 0.0}))
    ((_, moved),) = warnings_of(curve(lambda step: {**stuck(step), "kl/rejected": -30.0}))
    assert "Raise optim.lr" in still and "Lower optim.lr" in moved


def test_a_loss_without_reference_is_judged_by_how_it_began() -> None:
    """Its accuracy may be far from 0.5 at the start, and the sum of its margins is not what it trains."""
    run = RunFacts(num_steps=100, beta=2.0, initial_loss=None)

    def warned(change: Callable[[int], dict[str, float]]) -> tuple[str, ...]:
        health, records = Health(), curve(change)
        for record in records:
            del record["kl/chosen"], record["kl/rejected"]
            health, _ = examine(health, record, run)
        return health.warned

    assert warned(lambda step: {"rewards/accuracies": 0.2 + 0.003 * step}) == ()
    assert warned(lambda step: {"rewards/accuracies": 0.7, "rewards/saturated": 1.0}) == ()
    assert warned(lambda step: {"rewards/accuracies": 0.7 - 0.004 * step}) == ("accuracy_stuck",)
    far = {"rewards/chosen_per_token": -20.0}
    assert warned(lambda step: far) == ()
    assert warned(lambda step: far if step < 30 else {"rewards/chosen_per_token": -23.0}) == ("kl_blow_up",)


def test_a_line_that_is_not_finite_teaches_nothing() -> None:
    health, _ = examine(Health(), line(1), RUN)
    again, warnings = examine(health, line(2, grad_norm=math.nan), RUN)
    assert again == health and warnings == ()


def test_the_load_balancing_loss_is_no_reason_to_suspect_the_first_loss() -> None:
    record = line(1, loss=math.log(2) + 0.9 * 2.2, aux_loss=2.2)
    assert warnings_of([record], run=replace(RUN, router_aux_coef=0.9)) == []
    assert len(warnings_of([record])) == 1


def test_experts_that_had_no_tokens_from_the_start_are_not_dying() -> None:
    assert warnings_of(curve(lambda step: {"experts/unused": 0.4})) == []


MAY_BE_HALF = "; the true value may be 0.5"


@pytest.mark.parametrize(
    ("low", "high", "changes", "expected"),
    [
        (0.7, 0.79, {}, "below 0.05 may be chance"),
        (0.7, 0.79, {"eval_precision": "float32", "margin_noise": 0.01}, "below 0.05 may be chance"),
        # 400 pairs have half the interval of 100; the one of 0.5 to 0.5 is as wide as the rule of three says.
        (0.7, 0.9, {"pairs": 100}, "below 0.10 may be chance; 400 pairs would show one of 0.05"),
        (
            0.5,
            0.7,
            {},
            "below 0.10 may be chance; 1,600 pairs would show one of 0.05" + MAY_BE_HALF,
        ),
        (
            0.5,
            0.5,
            {"pairs": 10},
            "below 0.15 may be chance; 90 pairs would show one of 0.05" + MAY_BE_HALF,
        ),
        (
            0.7,
            0.79,
            {"eval_precision": "bfloat16", "margin_noise": 0.0123},
            "below 0.05 may be chance. bfloat16 rounds a margin by about 0.012",
        ),
    ],
)
def test_what_a_held_out_set_can_show(
    low: float, high: float, changes: dict[str, Any], expected: str
) -> None:
    record = {
        "pairs": 400,
        "rewards/margins": 0.4,
        "intervals": {"rewards/accuracies": [low, high]},
        **changes,
    }
    told = what_can_be_told(record)
    assert told.startswith(f"with {record['pairs']} pairs, differences in reward accuracy below 0.")
    assert told.endswith(expected)
    assert not what_can_be_told({**record, "intervals": {}})
