"""Warnings about a run that goes wrong. Each warning is given once and names a remedy.

A step of few pairs is noisy, so the rules use running means: a fast mean over about the newest 5 lines, and a
slow mean over about the newest 20. A checkpoint holds the `Health`, so a resumed run neither repeats nor
forgets a warning.

Without a reference, no point is known at which nothing is learned. There the rules compare with the first 5
lines instead, and `saturation`, which needs a reference, is silent. The first lines have other pairs, so only
what is more than the noise of lines counts as a fall of log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpo_pack.system.process import counted

# The number of lines of the fast and of the slow mean. The rules that use them begin after the slow one.
_FAST_LINES, _SLOW_LINES = 5, 20
_WATCHED = (
    "rewards/accuracies", "rewards/ties", "rewards/saturated", "rewards/chosen_per_token",
    "rewards/rejected_per_token", "logratio/chosen", "logratio/rejected", "experts/unused",
)  # fmt: skip
_SUMS = ("logps/chosen", "logps/rejected")  # watched, also a token and its square, if there is no reference
# So many spreads of lines are noise in the difference of the first lines' mean and the fast one.
_SURE = 3 * math.sqrt(1 / _FAST_LINES + 1 / (2 * _FAST_LINES - 1))
_GRADIENT_FACTOR = 10.0  # a gradient norm of so many times the usual one is large
_STUCK_SHARE = 0.2  # after this part of all steps, the accuracy should have risen
_FEWEST_DECIDED = 0.1  # of the pairs: with fewer that are no ties, the accuracy is not judged
_GAIN = 0.06  # by this part of what it lacked at the start: from 0.5 to 0.53

# Rule -> the smallest number of `_numbers` at which it warns, and the warning.
RULES: dict[str, tuple[float, str]] = {
    "high_initial_loss": (
        1.25,  # times the loss at zero margin
        "the first loss is {loss:.3g}; a policy that equals its reference has {initial_loss:.3g}. So "
        "the policy starts far from the reference. If both should be the same model, compare model.path and "
        "reference.path; reference.path: null takes the policy as it starts",
    ),
    "both_rewards_falling": (
        5.0,  # nats: exp(5) = 150 times less probable
        "both rewards are falling: compared with {origin}, a chosen completion is now {fallen[0]:.1f} nats "
        "less probable, a rejected one {fallen[1]:.1f}. So the policy moves to completions that the data "
        "does not have. Lower optim.lr, raise loss.beta, or add an sft term to loss.type",
    ),
    "accuracy_stuck": (
        2.0,  # standard errors below what the accuracy should be
        "after step {step} the policy prefers the chosen completion in only {accuracy:.1%} of pairs; at the "
        "start it did in {first_accuracy:.1%}. {change} optim.lr (now {learning_rate:.2g}), and check that "
        "chosen and rejected completions differ and are not swapped",
    ),
    "saturation": (
        0.75,  # part of the pairs
        "{saturation:.0%} of pairs have a reward margin so large that the loss has almost no gradient for "
        "them, so steps after it teach little. Set train.max_steps to about {step:,}, or lower optim.lr",
    ),
    "kl_blow_up": (
        1.0,  # nats a token
        "the policy is {kl_blow_up:.1f} nats a token away from {origin}: so far that the text it writes may "
        "be broken. Lower optim.lr, raise loss.beta, or stop earlier with train.max_steps",
    ),
    "exploding_gradients": (
        3.0,  # successive lines with a large norm
        "the gradient norm is {grad_norm:.3g}; before it was {usual_norm:.3g}. Lower optim.lr or "
        "optim.max_grad_norm, or warm up for longer with optim.warmup_ratio",
    ),
    "dying_experts": (
        0.05,  # part of all experts, more than at the start
        "experts die: {unused:.0%} of the experts, counted in each layer, get no token of a step; at the "
        "start it was {first_unused:.0%}. Raise loss.router_aux_coef (now {router_aux_coef:g}), or lower "
        "optim.lr",
    ),
}


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
    first: Mapping[str, float] = field(default_factory=dict)  # means of the first lines, by metric
    fast: Mapping[str, float] = field(default_factory=dict)  # running means
    slow: Mapping[str, float] = field(default_factory=dict)
    log_grad_norm: float | None = None  # running mean of log(gradient norm), without outliers
    num_large_gradients: int = 0  # successive lines with a large norm, up to now
    warned: tuple[str, ...] = ()  # names of the rules that have warned
    warnings: tuple[str, ...] = ()  # the warnings, with their steps


def examine(health: Health, record: Mapping[str, Any], run: RunFacts) -> tuple[Health, tuple[str, ...]]:
    """Returns the `Health` after a train line of metrics.jsonl, and the warnings that are due. A line with a
    number that is not finite is left to `NonfiniteGuard`."""
    if not all(math.isfinite(value) for value in record.values() if isinstance(value, int | float)):
        return health, ()
    health = _after(health, record)
    numbers = _numbers(health, record, run)
    due = {
        name: sentence.format(**numbers)
        for name, (limit, sentence) in RULES.items()
        if name not in health.warned and numbers.get(name, -math.inf) >= limit
    }
    dated = tuple(f"after step {record['step']}: {warning}" for warning in due.values())
    health = replace(health, warned=(*health.warned, *due), warnings=(*health.warnings, *dated))
    return health, tuple(due.values())


def _after(health: Health, record: Mapping[str, Any]) -> Health:
    num_lines, usual = health.num_lines + 1, health.log_grad_norm
    log_norm = math.log(max(float(record["grad_norm"]), 1e-30))
    is_large = usual is not None and log_norm > usual + math.log(_GRADIENT_FACTOR)
    if not is_large:  # an outlier does not change the usual norm
        usual = log_norm if usual is None else usual + (log_norm - usual) / min(_SLOW_LINES, num_lines)
    values = {name: float(record[name]) for name in _WATCHED if name in record}
    for name in () if "logratio/chosen" in record else _SUMS:
        of_token = float(record[f"{name}_per_token"])
        values |= {name: float(record[name]), f"{name}_per_token": of_token, f"{name} squared": of_token**2}
    fast, slow = (
        {
            name: before.get(name, 0.0) + (value - before.get(name, 0.0)) / min(most, num_lines)
            for name, value in values.items()
        }
        for means, most in ((health.fast, _FAST_LINES), (health.slow, _SLOW_LINES))
        # A checkpoint of the first preview has other names.
        for before in [{name.replace("kl/", "logratio/"): mean for name, mean in means.items()}]
    )
    return replace(
        health,
        num_lines=num_lines,
        first=fast if num_lines <= _FAST_LINES else health.first,
        fast=fast,
        slow=slow,
        log_grad_norm=usual,
        num_large_gradients=health.num_large_gradients + 1 if is_large else 0,
    )


def _numbers(health: Health, record: Mapping[str, Any], run: RunFacts) -> dict[str, Any]:
    """Returns by its name the number of each rule that can judge, and what the sentences of rules tell."""
    first, fast, slow, num_lines = health.first, health.fast, health.slow, health.num_lines
    numbers = {**record, "router_aux_coef": run.router_aux_coef}
    if num_lines == 1 and run.initial_loss is not None:
        loss = record["loss"] - run.router_aux_coef * record.get("aux_loss", 0.0)
        numbers |= {"loss": loss, "initial_loss": run.initial_loss}
        numbers["high_initial_loss"] = loss / run.initial_loss
    if num_lines >= _SLOW_LINES // 2 and health.log_grad_norm is not None:
        numbers |= {"usual_norm": math.exp(health.log_grad_norm)}
        numbers["exploding_gradients"] = health.num_large_gradients
    if num_lines < _SLOW_LINES:
        return numbers
    has_reference = "logratio/chosen" in fast
    fallen = [-fast.get(side, 0.0) for side in ("logratio/chosen", "logratio/rejected")]
    moved = [fast[f"rewards/{side}_per_token"] / run.beta for side in ("chosen", "rejected")]
    has_moved = max(map(abs, fallen)) > RULES["both_rewards_falling"][0]
    first_accuracy = 0.5
    # A running mean of independent lines varies as much as the plain mean of twice as many lines - 1.
    variance = 1 / (record["pairs"] * min(num_lines, 2 * _SLOW_LINES - 1))
    if has_reference:
        numbers["saturation"] = fast["rewards/saturated"]
        if all(fast[side] < slow[side] for side in ("logratio/chosen", "logratio/rejected")):
            numbers["both_rewards_falling"] = min(fallen)
    elif first:
        first_accuracy = first["rewards/accuracies"]
        variance += 1 / (record["pairs"] * _FAST_LINES)
        moved = [min(0.0, moved[0] - first["rewards/chosen_per_token"] / run.beta)]
        fallen, sure = [], list[float]()
        for name, of_token in ((name, f"{name}_per_token") for name in _SUMS):
            num_tokens = slow[name] / min(slow[of_token], -1e-9)
            spread = math.sqrt(max(0.0, slow[f"{name} squared"] - slow[of_token] ** 2))
            fallen.append(num_tokens * (first.get(of_token, -math.inf) - fast[of_token]))
            sure.append(fallen[-1] - num_tokens * _SURE * spread)
        if all(fast[f"{name}_per_token"] < slow[f"{name}_per_token"] for name in _SUMS):
            numbers["both_rewards_falling"] = min(sure)
        has_moved = max(sure) > RULES["both_rewards_falling"][0]
    numbers["kl_blow_up"] = max(map(abs, moved))
    # Ties, margins within their rounding, tell nothing; in 16 bits nearly all pairs may be ties for long.
    decided = 1 - slow.get("rewards/ties", 0.0)
    accuracy = 0.5 + (slow["rewards/accuracies"] - 0.5) / max(decided, _FEWEST_DECIDED)
    if record["step"] >= _STUCK_SHARE * run.num_steps and decided >= _FEWEST_DECIDED:
        lacking = first_accuracy + _GAIN * (1 - first_accuracy) - accuracy
        numbers["accuracy_stuck"] = lacking / (0.5 * math.sqrt(variance / decided))
    unused = fast.get("experts/unused", 0.0)
    numbers["dying_experts"] = unused - first.get("experts/unused", 1.0)
    # If the policy has moved far and learned nothing, the learning rate was not too small.
    change = "Lower" if has_moved else "Raise"
    origin = "the reference" if has_reference else "its start"
    told = {"fallen": fallen, "accuracy": accuracy, "first_accuracy": first_accuracy, "change": change}
    return numbers | told | {"origin": origin, "unused": unused, "first_unused": first.get("experts/unused")}


# --------------------------------------------------------------------------------- held-out pairs

SIDES_95 = 1.959964  # a normal variable is within so many standard deviations in 95 of 100 cases
_SHOWN = 0.05  # a difference in reward accuracy


def what_can_be_told(record: Mapping[str, Any], *, without_effect: float = 0.5) -> str:
    """Returns what the held-out set can show at all, and what rounding hides; "" without an interval of the
    reward accuracy. If nothing is learned, the accuracy is `without_effect`."""
    low, high = record.get("intervals", {}).get("rewards/accuracies") or (None, None)
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    pairs, noise = record["pairs"], record.get("margin_noise")
    # A rate varies most at 0.5; a difference as its interval says, without a width by the rule of three.
    least = SIDES_95 * 0.5 / math.sqrt(record.get("effective_pairs", pairs))
    least = least if without_effect else max((high - low) / 2, 1.5 / pairs)
    with_pairs, needed = f"with {counted(pairs, 'pair')}", math.ceil(pairs * (least / _SHOWN) ** 2)
    sentence = f"{with_pairs}, differences in reward accuracy below {least:.2f} may be chance"
    if least > _SHOWN:
        sentence += f"; {needed:,} pairs would show one of {_SHOWN:g}"
    if low <= without_effect <= high:
        sentence += f"; the true value may be {without_effect:g}"
    if record.get("eval_precision", "float32") != "float32" and noise is not None:
        sentence += f". {record['eval_precision']} rounds a margin by about {noise:.2g}"
    return sentence


def with_interval(mean: float, bounds: Sequence[float] | None) -> str:
    """Returns "0.612 (0.550 to 0.670)", "25.4 (25.1 to 25.8)"; "0.500 (all ties)" if a rate has no bounds;
    with empty bounds the mean alone."""
    decimals = 3 - sum(abs(mean) > limit for limit in (1, 9.995, 99.95))
    shown, *limits = (f"{value:z,.{decimals}f}" for value in (mean, *(bounds or ())))
    told = "all ties" if bounds is None else " to ".join(limits)
    return f"{shown} ({told})" if told else shown
