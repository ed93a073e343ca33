"""Warnings about a run that goes wrong. Each warning is given once and names a remedy.

A step of few pairs is noisy, so the rules use running means: a fast mean over about the newest 5 lines, and a
slow mean over about the newest 20. A checkpoint holds the `Health`, so a resumed run neither repeats nor
forgets a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# The weight of a new line in the fast (slow) running mean, after the first 5 (20) lines.
_FAST, _SLOW = 1 / 5, 1 / 20
_WATCHED = (
    "rewards/accuracies",
    "rewards/saturated",
    "rewards/chosen_per_token",
    "rewards/rejected_per_token",
    "kl/chosen",
    "kl/rejected",
    "experts/unused",
)
# The limits at which the rules warn.
INITIAL_LOSS_FACTOR = 1.25  # times the loss at zero margin
MIN_LINES = 20  # the rules that use running means begin after this many lines
FALLEN_NATS = 5.0  # a completion is exp(5) = 150 times less probable than under the reference
STUCK_SHARE = 0.2  # after this part of all steps, accuracy should be above 0.5
STUCK_ACCURACY = 0.53  # a rule warns if accuracy is below it by this many standard errors:
STUCK_SIGMAS = 2.0
SATURATED_SHARE = 0.75  # of pairs
KL_NATS_PER_TOKEN = 1.0
GRADIENT_FACTOR = 10.0  # times the usual gradient norm
GRADIENT_LINES = 3  # successive lines
DEAD_SHARE = 0.05  # of all experts, more than at the start of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of the run that rules use."""

    num_steps: int
    beta: float
    initial_loss: float | None = None  # at zero margin; None: it is unknown, or there is no reference
    router_aux_coef: float = 0.0  # factor of `aux_loss` in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the rules remember of the lines so far, in plain values that a checkpoint can hold."""

    num_lines: int = 0
    fast: Mapping[str, float] = field(default_factory=dict)  # running means by metric
    slow: Mapping[str, float] = field(default_factory=dict)
    log_grad_norm: float | None = None  # running mean of log(gradient norm), without outliers
    first_unused: float = 0.0  # mean of `experts/unused` over the first lines
    num_large_gradients: int = 0  # successive lines with a large norm, up to now
    warned: tuple[str, ...] = ()  # names of the rules that have warned
    warnings: tuple[str, ...] = ()  # the warnings, with their steps


def examine(health: Health, record: Mapping[str, Any], run: RunFacts) -> tuple[Health, tuple[str, ...]]:
    """Returns the `Health` after a train line of metrics.jsonl, and the warnings that are due. A line with a
    number that is not finite is left to `NonfiniteGuard`."""
    numbers = [value for value in record.values() if isinstance(value, (int, float))]
    if not all(math.isfinite(value) for value in numbers):
        return health, ()
    health = _after(health, record)
    due = {name: rule(health, record, run) for name, rule in RULES.items() if name not in health.warned}
    warnings = {name: warning for name, warning in due.items() if warning is not None}
    dated = tuple(f"after step {record['step']}: {warning}" for warning in warnings.values())
    health = replace(health, warned=(*health.warned, *warnings), warnings=(*health.warnings, *dated))
    return health, tuple(warnings.values())


def _after(health: Health, record: Mapping[str, Any]) -> Health:
    watched = {name: float(record[name]) for name in _WATCHED if name in record}
    usual = health.log_grad_norm
    log_norm = math.log(max(float(record["grad_norm"]), 1e-30))
    is_large = usual is not None and log_norm > usual + math.log(GRADIENT_FACTOR)
    if usual is None:
        usual = log_norm
    elif not is_large:  # an outlier does not change the usual norm
        usual += max(_SLOW, 1 / (health.num_lines + 1)) * (log_norm - usual)
    fast = _mean(health.fast, watched, part=max(_FAST, 1 / (health.num_lines + 1)))
    return replace(
        health,
        num_lines=health.num_lines + 1,
        fast=fast,
        slow=_mean(health.slow, watched, part=max(_SLOW, 1 / (health.num_lines + 1))),
        log_grad_norm=usual,
        first_unused=fast.get("experts/unused", 0.0) if health.num_lines < 1 / _FAST else health.first_unused,
        num_large_gradients=health.num_large_gradients + 1 if is_large else 0,
    )


def _mean(before: Mapping[str, float], values: Mapping[str, float], *, part: float) -> dict[str, float]:
    return {name: before.get(name, 0.0) * (1 - part) + value * part for name, value in values.items()}


# ------------------------------------------------------------------------------------------------- rules


def _high_initial_loss(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    expected = run.initial_loss
    loss = record["loss"] - run.router_aux_coef * record.get("aux_loss", 0.0)
    if health.num_lines > 1 or expected is None or loss <= INITIAL_LOSS_FACTOR * expected:
        return None
    return (
        f"the first loss is {loss:.3g}; a policy that equals its reference has {expected:.3g}. So "
        "the policy starts far from the reference. If both should be the same model, compare model.path and "
        "reference.path; reference.path: null takes the policy as it starts"
    )


def _both_rewards_falling(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or "kl/chosen" not in health.fast:
        return None
    sides = ("kl/chosen", "kl/rejected")
    if not all(health.fast[s] < -FALLEN_NATS and health.fast[s] < health.slow[s] for s in sides):
        return None
    return (
        f"both rewards are falling: a chosen completion is now {-health.fast['kl/chosen']:.1f} nats less "
        f"probable than under the reference, a rejected one {-health.fast['kl/rejected']:.1f}. So the policy "
        "moves to completions that the data does not have. Lower optim.lr, raise loss.beta, or add an sft "
        "term to loss.type"
    )


def _accuracy_stuck(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or record["step"] < STUCK_SHARE * run.num_steps:
        return None
    accuracy = health.slow["rewards/accuracies"]
    # A running mean of independent lines varies as much as the plain mean of 2 / part - 1 lines.
    num_pairs = record["pairs"] * min(health.num_lines, 2 / _SLOW - 1)
    if accuracy > STUCK_ACCURACY - STUCK_SIGMAS * 0.5 / math.sqrt(num_pairs):
        return None  # the policy learns, or there are too few pairs to know
    # If the policy has moved far and learned nothing, the learning rate was not too small.
    has_moved = max(abs(health.fast.get(side, 0.0)) for side in ("kl/chosen", "kl/rejected")) > FALLEN_NATS
    remedy = "Lower" if has_moved else "Raise"
    return (
        f"after step {record['step']} the policy prefers the chosen completion in only {accuracy:.1%} of "
        f"pairs; a coin would in 50 %. {remedy} optim.lr (now {record['learning_rate']:.2g}), and check "
        "that chosen and rejected completions differ and are not swapped"
    )


def _saturation(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    share = health.fast["rewards/saturated"]
    if health.num_lines < MIN_LINES or share < SATURATED_SHARE:
        return None
    return (
        f"{share:.0%} of pairs have a reward margin so large that the loss has almost no gradient for them, "
        f"so steps after it teach little. Set train.max_steps to about {record['step']:,}, or lower optim.lr"
    )


def _kl_blow_up(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES or "kl/chosen" not in health.fast:
        return None
    sides = ("rewards/chosen_per_token", "rewards/rejected_per_token")
    moved = max(abs(health.fast[side]) for side in sides) / run.beta
    if moved < KL_NATS_PER_TOKEN:
        return None
    return (
        f"the policy is {moved:.1f} nats a token away from the reference: so far that the text it writes may "
        "be broken. Lower optim.lr, raise loss.beta, or stop earlier with train.max_steps"
    )


def _exploding_gradients(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    if health.num_lines < MIN_LINES // 2 or health.num_large_gradients < GRADIENT_LINES:
        return None
    assert health.log_grad_norm is not None
    return (
        f"the gradient norm is {record['grad_norm']:.3g}; before it was "
        f"{math.exp(health.log_grad_norm):.3g}. Lower optim.lr or optim.max_grad_norm, or warm up for longer "
        "with optim.warmup_ratio"
    )


def _dying_experts(health: Health, record: Mapping[str, Any], run: RunFacts) -> str | None:
    unused = health.fast.get("experts/unused", 0.0)
    if health.num_lines < MIN_LINES or unused < health.first_unused + DEAD_SHARE:
        return None
    return (
        f"experts die: {unused:.0%} of the experts, counted in each layer, get no token of a step; at the "
        f"start it was {health.first_unused:.0%}. Raise loss.router_aux_coef (now {run.router_aux_coef:g}), "
        "or lower optim.lr"
    )


Rule = Callable[[Health, Mapping[str, Any], RunFacts], str | None]

RULES: dict[str, Rule] = {
    "high_initial_loss": _high_initial_loss,
    "both_rewards_falling": _both_rewards_falling,
    "accuracy_stuck": _accuracy_stuck,
    "saturation": _saturation,
    "kl_blow_up": _kl_blow_up,
    "exploding_gradients": _exploding_gradients,
    "dying_experts": _dying_experts,
}


# --------------------------------------------------------------------------------- held-out pairs

_SMALL_GAIN = 0.05  # of reward accuracy


def what_can_be_told(record: Mapping[str, Any], *, without_effect: float = 0.5) -> str:
    """Returns what the held-out set can show at all, and what rounding hides; "" without an interval of the
    reward accuracy. If nothing is learned, the accuracy is `without_effect`."""
    low, high = record.get("intervals", {}).get("rewards/accuracies") or (None, None)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    # If all pairs are alike the interval has no width; then 3 / pairs bounds the others (the rule of three).
    pairs = record["pairs"]
    least = math.ceil(max(100 * (high - low) / 2, 150 / pairs) - 1e-6) / 100
    sentence = f"with {pairs:,} pairs, differences in reward accuracy below {least:.2f} may be chance"
    if least > _SMALL_GAIN:
        needed = pairs * (least / _SMALL_GAIN) ** 2
        unit = 10 ** (math.floor(math.log10(needed)) - 1)
        sentence += f"; {math.ceil(needed / unit) * unit:,.0f} pairs would show one of {_SMALL_GAIN}"
    if low <= without_effect <= high:
        sentence += f"; the true value may be {without_effect:g}"
    noise, margin = record.get("margin_noise"), record.get("rewards/margins")
    if record.get("eval_precision", "float32") != "float32" and noise is not None and margin is not None:
        sentence += f". {record['eval_precision']} rounds a margin by {noise:.2g}, "
        sentence += (
            "which the intervals count" if "measured_pairs" in record else "an estimate that nothing corrects"
        )
        sentence += f"; the mean margin is {margin:.2g}"
    return sentence
