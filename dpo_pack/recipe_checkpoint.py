"""The recipe's keys of checkpoints and early stopping; `recipe_schema.py` has the rest."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, Field

from dpo_pack.recipe_types import Allowed, Count, Name, NonNegativeNumber, Section, expand_path

# What an evaluation can be judged by, and which way is better.
EvalMetric = Literal[
    "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen",
    "logps/chosen_per_token", "mean_token_accuracy", "online/win_rate", "online/scores", "online/score_gain",
]  # fmt: skip
LOWER_IS_BETTER = frozenset({"loss"})


class CheckpointRecipe(Section):
    """What is kept to go on from."""

    every_steps: Count | None = Field(default=None, description="Save so often; null: only when interrupted.")
    keep: Count = Field(default=2, description="Newest checkpoints to keep.")
    keep_best: Annotated[int, Ge(0)] = Field(
        default=0,
        description="Checkpoints to keep besides, of the evaluations with the best metric; above 0, such an "
        "evaluation is saved at once.",
    )
    metric: EvalMetric | None = Field(
        default=None,
        description="What evaluations are compared by: the lowest loss, the highest of others; null: loss, "
        "in an online run online/win_rate.",
    )
    eval_set: Name | None = Field(
        default=None, description="The held-out set whose metric counts, by name; null: the first."
    )
    load_best: bool = Field(
        default=False,
        description="Leave the weights of the best evaluation in output_dir/model; false: the last ones.",
    )
    export: bool = Field(
        default=False, description="Put model/ into every checkpoint as well, for from_pretrained."
    )
    asynchronous: Literal["auto"] | bool = Field(
        default="auto",
        description="Write from a copy in the memory of the CPU while training goes on; auto: on CUDA, if "
        "the copy takes at most half of what is free of that memory.",
    )
    resume: Annotated[str, BeforeValidator(expand_path), Allowed("auto, never or a path")] = Field(
        default="auto",
        description="auto: from the newest valid checkpoint in output_dir; never; or a checkpoint's path.",
    )


class EarlyStoppingRecipe(Section):
    """Stop when evaluations no longer get better by checkpoint.metric."""

    patience: Count = Field(
        default=3, description="Stop after so many evaluations in a row without an improvement."
    )
    min_delta: NonNegativeNumber = Field(
        default=0.0, description="An improvement is more than this, in units of the metric."
    )
