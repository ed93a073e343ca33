"""The `optim`, `train` and `checkpoint` sections of a recipe: optimizer, length of training, checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict, model_validator

from dpo_pack.recipe.types import (
    Allowed,
    Count,
    CountOrZero,
    Name,
    NonNegativeNumber,
    PartBelowOne,
    PositiveNumber,
    Problem,
    Section,
    expand_path,
    is_changed,
)

POLYNOMIAL_LR_END = 1e-7  # transformers' default lr_end
# Metrics that compare evaluations. For metrics in LOWER_IS_BETTER lower is better, for others higher.
EvalMetric = Literal[
    "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen",
    "logps/chosen_per_token", "mean_token_accuracy", "online/win_rate", "online/scores", "online/score_gain",
]  # fmt: skip
LOWER_IS_BETTER = frozenset({"loss"})


class OptimRecipe(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """adamw_8bit: moments in 8 bits, by bitsandbytes, on CUDA. adafactor: factored second moments; lr is
    relative to each tensor's size."""
    lr: PositiveNumber = 5e-7
    """Peak learning rate."""
    schedule: Literal[
        "linear", "cosine", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup"
    ] = "linear"
    """A schedule of transformers' get_scheduler; constant has no warm-up."""
    warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Warm-up as a part of all steps (0 for schedule constant)."""
    warmup_steps: CountOrZero | None = None
    """Warm-up in steps, 0 included, instead of warmup_ratio; null: the ratio."""
    min_lr_ratio: PartBelowOne = 0.0
    """Learning rate at the end as a part of lr (linear and cosine)."""
    weight_decay: NonNegativeNumber = 0.0
    """Weight decay; biases, norms and other vectors are not decayed."""
    betas: Annotated[
        tuple[PartBelowOne, PartBelowOne], Strict(False), Allowed("a list of two numbers, each >= 0 and < 1")
    ] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: PositiveNumber = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradients are scaled down to this norm; null: never."""

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
    """An improvement is more than this, in units of the metric."""


class TrainRecipe(Section):
    """How long to train, and when to evaluate."""

    epochs: Count = 1
    """Passes over the training pairs."""
    max_steps: Count | None = None
    """Stop after this many steps, though epochs would go on; null: no limit."""
    eval_every_steps: Count | None = None
    """Steps between two evaluations; null: evaluate only before the first step and after the last."""
    early_stopping: EarlyStoppingRecipe | None = None
    """Stop when evaluations no longer get better, e.g. {patience: 3}; null: never. See docs/running.md."""
    stop_on_nonfinite: bool = True
    """Stop when a loss or gradient is not finite; false: skip the step. Its pairs are listed in output_dir
    either way."""


class CheckpointRecipe(Section):
    """What is kept to go on from."""

    every_steps: Count | None = None
    """Steps between two checkpoints; null: save only when interrupted."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    keep_best: CountOrZero = 0
    """Further checkpoints to keep: those of the evaluations with the best metric; above 0, such an evaluation
    is saved at once."""
    metric: EvalMetric | None = None
    """The metric that compares evaluations: the lowest loss, the highest of others; null: loss, in an online
    run online/win_rate."""
    eval_set: Name | None = None
    """The held-out set whose metric counts, by name; null: the first."""
    load_best: bool = False
    """Leave the weights of the best evaluation in output_dir/model; false: the last weights."""
    export: bool = False
    """Put model/ into every checkpoint as well, for from_pretrained."""
    asynchronous: Literal["auto"] | bool = "auto"
    """Write from a copy in the memory of the CPU while training goes on; auto: on CUDA, if the copy takes at
    most half of what is free of that memory."""
    resume: Annotated[str, BeforeValidator(expand_path), Allowed("auto, never or a path")] = "auto"
    """auto: from the newest valid checkpoint in output_dir; never; or a checkpoint's path."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.load_best and not self.keep_best:
            yield "load_best", "needs checkpoint.keep_best: 1 or more, or the best weights are gone"
