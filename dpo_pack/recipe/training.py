"""The `optim`, `train` and `checkpoint` sections of a recipe: optimizer, length of training, checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Strict, model_validator

from dpo_pack.recipe.types import (
    Allowed,
    Count,
    CountOrZero,
    IsPath,
    Name,
    NonNegativeNumber,
    PartBelowOne,
    PositiveNumber,
    Problem,
    Section,
    is_changed,
)

POLYNOMIAL_LR_END = 1e-7  # transformers' default lr_end
# Metrics that can decide which evaluation is the best: that with the lowest value for a metric in
# LOWER_IS_BETTER, that with the highest value for any other metric.
EvalMetric = Literal[
    "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen",
    "logps/chosen_per_token", "mean_token_accuracy", "online/win_rate", "online/scores", "online/score_gain",
]  # fmt: skip
LOWER_IS_BETTER = frozenset({"loss"})


class OptimRecipe(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw_8bit: moments in 8 bits, by bitsandbytes, on CUDA. adafactor: factored second moments; lr is
    relative to the size (root mean square) of each tensor."""
    lr: PositiveNumber = 5e-7
    """Peak learning rate."""
    schedule: Literal[
        "linear", "cosine", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup"
    ] = "linear"
    """A schedule of transformers' get_scheduler; constant has no warm-up."""
    warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Warm-up as a part of all steps (0 for schedule constant)."""
    warmup_steps: CountOrZero | None = None
    """Steps of warm-up, used instead of warmup_ratio, even if 0; null: warmup_ratio is used."""
    min_lr_ratio: PartBelowOne = 0.0
    """The learning rate of the last step, divided by lr (linear and cosine only)."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay; biases, norms and other vectors are not decayed."""
    betas: Annotated[
        tuple[PartBelowOne, PartBelowOne], Strict(False), Allowed("a list of two numbers, each >= 0 and < 1")
    ] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: PositiveNumber = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Larger gradients are scaled down to this norm; null: never."""

    @model_validator(mode="before")
    @classmethod
    def _constant_has_no_warmup(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("schedule") == "constant":
            return {"warmup_ratio": 0.0, **value}
        return value

    def broken_rules(self) -> Iterator[Problem]:
        for key, value in (("warmup_ratio", self.warmup_ratio), ("warmup_steps", self.warmup_steps)):
            if self.schedule == "constant" and value:
                yield key, "schedule constant has no warm-up; use constant_with_warmup, or set it to 0"
        if self.min_lr_ratio and self.schedule not in ("linear", "cosine"):
            yield (
                "min_lr_ratio",
                f"schedule {self.schedule} has no lowest rate, only linear and cosine have one",
            )
        for key in ("betas", "eps"):
            if self.name == "adafactor" and is_changed(self, key):
                yield key, "not used by optim.name adafactor"
        if self.schedule == "polynomial" and self.lr <= POLYNOMIAL_LR_END:
            yield "lr", f"must be > {POLYNOMIAL_LR_END}, where schedule polynomial ends, not {self.lr}"


class EarlyStoppingRecipe(Section):
    """Stop when evaluations no longer get better by checkpoint.metric."""

    patience: Count = 3
    """Stop after this many evaluations in a row without an improvement."""
    min_delta: NonNegativeNumber = 0.0
    """An evaluation is an improvement if the metric gets better by more than this."""


class TrainRecipe(Section):
    """How long to train, and when to evaluate."""

    epochs: Count = 1
    """Passes over the training pairs."""
    max_steps: Count | None = None
    """Stop after this many steps, even before the end of the epochs; null: no limit."""
    eval_every_steps: Count | None = None
    """Steps between two evaluations; null: evaluate only before the first step and after the last."""
    early_stopping: EarlyStoppingRecipe | None = None
    """Stop when evaluations no longer get better, e.g. {patience: 3}; null: never. See docs/running.md."""
    stop_on_nonfinite: bool = True
    """Stop when a loss or gradient is not finite; false: skip the step. In both cases its pairs
    are listed in output_dir."""


class CheckpointRecipe(Section):
    """Checkpoints: what is saved during training, and what a run starts from."""

    every_steps: Count | None = None
    """Steps between two checkpoints; null: save only when interrupted."""
    keep: Count = 2
    """How many of the newest checkpoints to keep."""
    keep_best: CountOrZero = 0
    """How many checkpoints to keep besides: those with the best metric. Above 0, an evaluation that is
    among the best is saved at once."""
    metric: EvalMetric | None = None
    """The metric that decides which evaluation is the best. For loss the lowest value is the best, for all
    other metrics the highest. null: loss, in an online run online/win_rate."""
    eval_set: Name | None = None
    """Name of the held-out set whose metric is compared; null: the first set."""
    load_best: bool = False
    """Write the weights with the best evaluation to output_dir/model; false: the last weights."""
    export: bool = False
    """Write into every checkpoint also a directory model/ that from_pretrained can load."""
    asynchronous: Literal["auto"] | bool = "auto"
    """Copy the state to CPU memory and write it while training goes on; auto: on CUDA, if the copy takes at
    most half of the free CPU memory."""
    resume: Annotated[str, *IsPath, Allowed("auto, never or a path")] = "auto"
    """What a run goes on from. auto: the newest valid checkpoint in output_dir, if there is one; never:
    nothing, the run starts anew; else the path of a checkpoint."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.load_best and not self.keep_best:
            yield "load_best", "needs checkpoint.keep_best: 1 or more; with 0, the best weights are deleted"
