"""The `loss`, `optim`, `train` and `checkpoint` sections of a recipe."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt, MinLen
from pydantic import BeforeValidator, Discriminator, Strict, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from dpo_pack.recipe import types

POLYNOMIAL_LR_END = 1e-7  # transformers' default lr_end
# Metrics that can decide which evaluation is the best: the lowest of LOWER_IS_BETTER, the highest of others.
EvalMetric = Literal[
    "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen",
    "logps/chosen_per_token", "mean_token_accuracy", "online/win_rate", "online/scores", "online/score_gain",
]  # fmt: skip
LOWER_IS_BETTER = frozenset({"loss"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a loss reads and needs. Its function, of the same name, is in dpo_pack/losses/preference.py."""

    options: tuple[str, ...] = ()  # keys of section `loss` that it reads, besides beta
    needs_reference: bool = True  # False: the reference log-probs are zeros, and no model computes them
    has_likelihood: bool = False  # the loss has the likelihood of the chosen completion as a term
    # True: the loss takes every f_divergence. False: it takes reverse_kl only, because each reward under an
    # f-divergence has a term beta x log Z(prompt), and this term would not cancel in the loss.
    takes_divergences: bool = False


LOSSES: dict[str, Loss] = {
    "sigmoid": Loss(options=("label_smoothing",), takes_divergences=True),
    "robust": Loss(options=("label_smoothing",), takes_divergences=True),
    "hinge": Loss(takes_divergences=True),
    "ipo": Loss(takes_divergences=True),
    "exo_pair": Loss(options=("label_smoothing",), takes_divergences=True),
    "nca_pair": Loss(),
    "bco_pair": Loss(),
    "sppo_hard": Loss(),
    "apo_zero": Loss(),
    "apo_down": Loss(),
    "discopop": Loss(options=("discopop_tau",), takes_divergences=True),
    "sigmoid_norm": Loss(takes_divergences=True),
    # sft has no rewards, so a divergence changes nothing.
    "sft": Loss(needs_reference=False, has_likelihood=True, takes_divergences=True),
    "simpo": Loss(options=("simpo_gamma", "label_smoothing"), needs_reference=False),
    "orpo": Loss(needs_reference=False, has_likelihood=True),
    "cpo": Loss(options=("cpo_alpha", "label_smoothing"), needs_reference=False, has_likelihood=True),
}


def _loss_name(value: object) -> object:
    if isinstance(value, str) and (value in LOSSES or types.MODULE_FUNCTION.fullmatch(value)):
        return value
    raise PydanticCustomError("loss_name", "neither a loss type nor module:function")


_LOSS_NAMES = f"one of {', '.join(LOSSES)}, module:function of your own (DPO's loss is sigmoid)"
LossName = Annotated[
    str,
    BeforeValidator(_loss_name),
    WithJsonSchema({"anyOf": [{"enum": list(LOSSES)}, {"pattern": f"^{types.MODULE_FUNCTION.pattern}$"}]}),
    _LOSS_NAMES,
]


class LossTerm(types.Section):
    """One term of a weighted sum of losses."""

    type: LossName
    """A loss type."""
    weight: types.PositiveNumber = 1.0
    """The loss of this term is multiplied by it."""


class LossRecipe(types.Section):
    """The objective."""

    type: Annotated[
        Annotated[LossName, Tag("(name)")]
        | Annotated[tuple[LossTerm, ...], Strict(False), MinLen(1), Tag("(terms)")],
        Discriminator(lambda value: "(terms)" if isinstance(value, (list, tuple)) else "(name)"),
        f"{_LOSS_NAMES}, or a list as [{{type: sigmoid, weight: 1.0}}]",
    ] = "sigmoid"
    """A loss, or a weighted sum of several; see docs/losses.md."""
    beta: types.PositiveNumber = 0.1
    """How strongly the loss keeps the policy near the reference; larger: nearer."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed part of swapped labels; docs/losses.md says for which losses."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Which divergence keeps the policy near the reference (arXiv 2309.16240)."""
    f_alpha: types.Fraction = 0.5
    """The alpha of f_divergence alpha_divergence: near 1 it is close to reverse_kl, near 0 to forward_kl."""
    weighting: Literal["wpo"] | None = None
    """wpo: weight pairs by their probability under the policy; null: off."""
    discopop_tau: types.PositiveNumber = 0.05
    """Temperature of discopop."""
    simpo_gamma: types.NonNegativeNumber = 0.5
    """Target reward margin of simpo."""
    cpo_alpha: types.NonNegativeNumber = 1.0
    """Factor of the likelihood of chosen completions in cpo; TRL's name."""
    router_aux_coef: types.NonNegativeNumber | None = None
    """Factor of the load-balancing loss of a mixture of experts; null: as in the model's config; 0: none."""

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """The (type, factor) of each term. If `type` is a single name, it is one term with factor 1."""
        if isinstance(self.type, str):
            return ((self.type, 1.0),)
        return tuple((term.type, term.weight) for term in self.type)

    @property
    def options(self) -> dict[str, Any]:
        """The values of the keys that loss functions read. Other code reads the keys in `around`."""
        around = ("type", "weighting", "router_aux_coef")
        return {name: value for name, value in self if name not in around}

    def terms_that(self, holds: Callable[[Loss], bool]) -> str:
        """Returns the names of the built-in losses in `type` for which `holds` is true, with commas."""
        declared = [(name, LOSSES[name]) for name, _ in self.terms if name in LOSSES]
        return ", ".join(name for name, loss in declared if holds(loss))

    @property
    def needs_reference(self) -> bool:
        """Whether a loss in `type` uses the reference. Losses that the user wrote are assumed to use it."""
        return any(LOSSES.get(name, Loss()).needs_reference for name, _ in self.terms)

    def broken_rules(self) -> Iterator[types.Problem]:
        names = [name for name, _ in self.terms]
        losses = ", ".join(names)
        has_own = any(types.MODULE_FUNCTION.fullmatch(name) for name in names)  # it may use all options
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "type", f"'{name}' is given twice; add up their weights"
        for option in dict.fromkeys(option for loss in LOSSES.values() for option in loss.options):
            users = [name for name, loss in LOSSES.items() if option in loss.options]
            if self.is_changed(option) and not has_own and not set(users).intersection(names):
                yield option, f"not used by loss.type {losses}, only by {', '.join(users)}; leave it out"
        if "exo_pair" in names and self.label_smoothing == 0:
            yield "label_smoothing", "must be > 0 for loss.type exo_pair, which takes its logarithm"
        if self.is_changed("f_alpha") and self.f_divergence != "alpha_divergence":
            yield "f_alpha", "only used by loss.f_divergence: alpha_divergence; leave it out"
        if self.f_divergence != "reverse_kl":
            if refusing := self.terms_that(lambda loss: not loss.takes_divergences):
                yield "f_divergence", f"loss.type {refusing} is defined for reverse_kl only; leave it out"
            elif not self.needs_reference:
                yield "f_divergence", f"loss.type {losses} uses no reference; leave it out"
        if self.weighting and (other := self.terms_that(lambda loss: loss.has_likelihood)):
            yield "weighting", f"weights preferences, not the likelihood in loss.type {other}; leave it out"


class OptimRecipe(types.Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw_8bit: moments in 8 bits, on CUDA. adafactor: factored second moments; lr is the plain rate."""
    lr: types.PositiveNumber = 5e-7
    """Peak learning rate."""
    schedule: Literal[
        "linear", "cosine", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup"
    ] = "linear"
    """A schedule of transformers' get_scheduler; constant has no warm-up."""
    warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Warm-up as a part of all steps (0 for schedule constant)."""
    warmup_steps: types.CountOrZero | None = None
    """Steps of warm-up, used instead of warmup_ratio, even if 0; null: warmup_ratio is used."""
    min_lr_ratio: types.PartBelowOne = 0.0
    """The learning rate of the last step, divided by lr (linear and cosine only)."""
    weight_decay: types.NonNegativeNumber = 0.0
    """Weight decay; biases, norms and other vectors are not decayed."""
    betas: Annotated[
        tuple[types.PartBelowOne, types.PartBelowOne],
        Strict(False),
        "a list of two numbers, each >= 0 and < 1",
    ] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: types.PositiveNumber = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: types.PositiveNumber | None = 1.0
    """Larger gradients are scaled down to this norm; null: never."""

    def num_warmup_steps(self, num_steps: int) -> int:
        """Returns the steps of warm-up in a run of so many steps; a part of a step counts as one."""
        return math.ceil(self.warmup_ratio * num_steps) if self.warmup_steps is None else self.warmup_steps

    @model_validator(mode="before")
    @classmethod
    def _constant_has_no_warmup(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("schedule") == "constant":
            return {"warmup_ratio": 0.0, **value}
        return value

    def broken_rules(self) -> Iterator[types.Problem]:
        for key, value in (("warmup_ratio", self.warmup_ratio), ("warmup_steps", self.warmup_steps)):
            if self.schedule == "constant" and value:
                yield key, "schedule constant has no warm-up; use constant_with_warmup, or set it to 0"
        if self.min_lr_ratio and self.schedule not in ("linear", "cosine"):
            yield "min_lr_ratio", f"schedule {self.schedule} has no lowest rate; linear and cosine have one"
        for key in ("betas", "eps"):
            if self.name == "adafactor" and self.is_changed(key):
                yield key, "not used by optim.name adafactor; leave it out"
        if self.schedule == "polynomial" and self.lr <= POLYNOMIAL_LR_END:
            yield "lr", f"must be > {POLYNOMIAL_LR_END}, where schedule polynomial ends, not {self.lr}"


class EarlyStoppingRecipe(types.Section):
    """Stop when evaluations no longer get better by checkpoint.metric."""

    patience: types.Count = 3
    """Stop after this many evaluations in a row without an improvement."""
    min_delta: types.NonNegativeNumber = 0.0
    """An evaluation is an improvement if the metric gets better by more than this."""


class TrainRecipe(types.Section):
    """How long to train, and when to evaluate."""

    epochs: Annotated[types.Count, "a whole number >= 1 (a part of an epoch: train.max_steps)"] = 1
    """Passes over the training pairs."""
    max_steps: types.Count | None = None
    """Stop after this many steps, even before the end of the epochs; null: no limit."""
    eval_every_steps: types.Count | None = None
    """Steps between two evaluations; null: evaluate only before the first step and after the last."""
    eval_precision: Literal["auto", "float32", "training"] = "auto"
    """Of held-out pairs; auto: float32, for as many as add a tenth to the run. See docs/numerics.md."""
    early_stopping: EarlyStoppingRecipe | None = None
    """Stop when evaluations no longer get better, e.g. {patience: 3}; null: never. See docs/running.md."""
    stop_on_nonfinite: bool = True
    """Stop when a loss or gradient is not finite; false: skip the step. output_dir lists its pairs."""


class CheckpointRecipe(types.Section):
    """Checkpoints: what is saved during training, and what a run starts from."""

    every_steps: types.Count | None = None
    """Steps between two; null: only if interrupted, and the last until the exported model is verified."""
    keep: types.Count = 2
    """How many of the newest checkpoints to keep."""
    keep_best: types.CountOrZero = 0
    """How many checkpoints to keep besides: those with the best metric, which are saved at once."""
    metric: EvalMetric | None = None
    """Says which evaluation is best: lowest for loss, else highest; null: loss, in an online run win_rate."""
    eval_set: types.Name | None = None
    """Name of the held-out set whose metric is compared; null: the first set."""
    load_best: bool = False
    """Write the weights with the best evaluation to output_dir/model; false: the last weights."""
    export: bool = False
    """Write into every checkpoint also a directory model/ that from_pretrained can load."""
    asynchronous: Literal["auto"] | bool = "auto"
    """Write the state while training goes on; auto: on CUDA, if half of the free CPU memory holds it."""
    resume: Annotated[str, *types.IsPath, "auto, never or a path"] = "auto"
    """What a run goes on from. auto: output_dir's newest valid checkpoint, if it has one; never: nothing."""
