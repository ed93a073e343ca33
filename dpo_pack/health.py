"""Warnings about a run that is going wrong, each once, in plain words and with what to do about it.

A pure state machine over the lines of metrics.jsonl: `examine(health, record, run)` returns the health after
the line and what to say of it. Steps of few pairs are noisy, so rules look at running means: a fast one of
about the last 5 lines and a slow one of about the last 20. `Health` is in the checkpoint, so a run that goes
on neither repeats nor forgets a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# What a new line weighs in a running mean, once that many lines have been seen.
_FAST, _SLOW = 1 / 5, 1 / 20
_WATCHED = (
    "rewards/accuracies",
    "rewards/saturated",
    "rewards/chosen_per_token",
    "rewards/rejected_per_token",
    "kl/chosen",
    "kl/rejected",
)
# Where a rule begins to speak.
INITIAL_LOSS_FACTOR = 1.25  # of the loss at zero margin
MIN_LINES = 20  # before anything but the first loss is judged
FALLEN_NATS = 5.0  # a completion exp(5) = 150 times less probable than under the reference
STUCK_SHARE = 0.2  # of all steps, after which accuracy should have left 0.5
STUCK_ACCURACY = 0.53  # that the pairs seen rule out, by so many standard errors
STUCK_SIGMAS = 2.0
SATURATED_SHARE = 0.75  # of pairs
KL_NATS_PER_TOKEN = 1.0
GRADIENT_FACTOR = 10.0  # times the usual gradient norm
GRADIENT_LINES = 3  # in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the rules must know of the run."""

    num_steps: int
    beta: float
    initial_loss: float | None = None  # at zero margin; None: not known, or no reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the lines so far have shown; plain values, for a checkpoint."""

    num_lines: int = 0
    fast: Mapping[str, float] = field(default_factory=dict)  # running means by metric
    slow: Mapping[str, float] = field(default_factory=dict)
    log_grad_norm: float | None = None  # running mean of the usual gradient norm's logarithm
    num_large_gradients: int = 0  # lines in a row
    said: tuple[str, ...] = ()  # names of the rules that have spoken

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def load(state: Mapping[str, Any]) -> Health:
        """From `state_dict`, or from a checkpoint that has none."""
        return Health(**{**state, "said": tuple(state.get("said", ()))})


def examine(health: Health, record: Mapping[str, Any], run: RunFacts) -> tuple[Health, tuple[str, ...]]:
    """The health after a train line of metrics.jsonl, and the warnings that it gives rise to.

    A line with a number that is not finite teaches nothing here; the step's own guard speaks of it.
    """
    numbers = [value for value in record.values() if isinstance(value, (int, float))]
    if not all(math.isfinite(value) for value in numbers):
        return health, ()
    health = _after(health, record)
    warnings, said = [], list(health.said)
    for name, rule in RULES.items():
        warning = None if name in said else rule(health, record, run)
        if warning is not None:
            warnings.append(warning)
            said.append(name)
    return replace(health, said=tuple(said)), tuple(warnings)


def _after(health: Health, record: Mapping[str, Any]) -> Health:
    watched = {name: float(record[name]) for name in _WATCHED if name in record}
    usual = health.log_grad_norm
    log_norm = math.log(max(float(record["grad_norm"]), 1e-30))
    is_large = usual is not None and log_norm > usual + math.log(GRADIENT_FACTOR)
    if usual is None:
        usual = log_norm
    elif not is_large:  # what is out of the ordinary does not change what is ordinary
        usual += max(_SLOW, 1 / (health.num_lines + 1)) * (log_norm - usual)
    return replace(
        health,
        num_lines=health.num_lines + 1,
        fast=_mean(health.fast, watched, max(_FAST, 1 / (health.num_lines + 1))),
        slow=_mean(health.slow, watched, max(_SLOW, 1 / (health.num_lines + 1))),
        log_grad_norm=usual,
        num_large_gradients=health.num_large_gradients + 1 if is_large else 0,
    )


def _mean(before: Mapping[str, float], values: Mapping[str, float], weight: float) -> dict[str, float]:
    return {name: before.get(name, 0.0) * (1 - weight) + value * weight for name, value in values.items()}


# ------------------------------------------------------------------------------------------------- rules


def _high_initial_loss(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    expected = run.initial_loss
    if health.num_lines > 1 or expected is None or record["loss"] <= INITIAL_LOSS_FACTOR * expected:
        return None
    return (
        f"the first loss is {record['loss']:.3g}, where a policy that is its reference has {expected:.3g}: "
        "the policy starts far from the reference. If they should be the same model, check model.path "
        "against reference.path; if not, reference.path: null takes the policy as it starts"
    )


def _both_rewards_falling(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or "kl/chosen" not in health.fast:
        return None
    sides = ("kl/chosen", "kl/rejected")
    if not all(health.fast[s] < -FALLEN_NATS and health.fast[s] < health.slow[s] for s in sides):
        return None
    return (
        f"both rewards are falling: a chosen completion is now {-health.fast['kl/chosen']:.1f} nats less "
        f"probable than under the reference, a rejected one {-health.fast['kl/rejected']:.1f}, so the policy "
        "moves to completions that are in neither. Lower optim.lr, raise loss.beta, or add an sft term to "
        "loss.type"
    )


def _accuracy_stuck(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or record["step"] < STUCK_SHARE * run.num_steps:
        return None
    accuracy = health.slow["rewards/accuracies"]
    # The variance of a running mean of independent lines is that of a plain mean of 2 / weight - 1 of them.
    num_pairs = record["pairs"] * min(health.num_lines, 2 / _SLOW - 1)
    if accuracy > STUCK_ACCURACY - STUCK_SIGMAS * 0.5 / math.sqrt(num_pairs):
        return None  # learning, or too few pairs to say that it is not
    # A policy that has moved far and learned nothing was not held back by a small learning rate.
    has_moved = max(abs(health.fast.get(side, 0.0)) for side in ("kl/chosen", "kl/rejected")) > FALLEN_NATS
    remedy = "Lower" if has_moved else "Raise"
    return (
        f"after step {record['step']} the policy prefers the chosen completion in only {accuracy:.1%} of "
        f"pairs, a coin would in 50 %. {remedy} optim.lr (now {record['learning_rate']:.2g}), and check "
        "that chosen and rejected are not swapped and do differ"
    )


def _saturation(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    share = health.fast["rewards/saturated"]
    if health.num_lines < MIN_LINES or share < SATURATED_SHARE:
        return None
    return (
        f"{share:.0%} of pairs have a reward margin so large that the loss has no slope left for them, so "
        f"{run.num_steps - record['step']:,} more steps teach little. Stop here with train.max_steps, use "
        "fewer epochs, or lower optim.lr"
    )


def _kl_blow_up(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or "kl/chosen" not in health.fast:
        return None
    sides = ("rewards/chosen_per_token", "rewards/rejected_per_token")
    moved = max(abs(health.fast[side]) for side in sides) / run.beta
    if moved < KL_NATS_PER_TOKEN:
        return None
    return (
        f"completions are {moved:.1f} nats a token from the reference: the policy has left it, and text it "
        "writes may be broken. Lower optim.lr, raise loss.beta, or stop earlier with train.max_steps"
    )


def _exploding_gradients(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES // 2 or health.num_large_gradients < GRADIENT_LINES:
        return None
    assert health.log_grad_norm is not None
    return (
        f"the gradient norm is {record['grad_norm']:.3g}, and was {math.exp(health.log_grad_norm):.3g} "
        "before. Lower optim.lr or optim.max_grad_norm, or warm up for longer with optim.warmup_ratio"
    )


Rule = Callable[[Health, Mapping[str, Any], RunFacts], str | None]

RULES: dict[str, Rule] = {
    "high_initial_loss": _high_initial_loss,
    "both_rewards_falling": _both_rewards_falling,
    "accuracy_stuck": _accuracy_stuck,
    "saturation": _saturation,
    "kl_blow_up": _kl_blow_up,
    "exploding_gradients": _exploding_gradients,
}
