"""What a recipe may say: its sections, keys, types, ranges and defaults.

Every key carries its own description, so that the JSON schema, the commented defaults and docs/recipe.md
are generated from here and cannot disagree with what is accepted. Rules that join several keys are
in `recipe_checks.py`, reading and writing in `recipe.py`.
"""

import re
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dpo_pack.recipe_checkpoint import CheckpointRecipe, EarlyStoppingRecipe
from dpo_pack.recipe_online import OnlineRecipe
from dpo_pack.recipe_types import (
    MAX_ROW_TOKENS,
    Allowed,
    Count,
    Fraction,
    LocalPath,
    Name,
    NonNegativeNumber,
    OptionalLocalPath,
    PartBelowOne,
    PathText,
    PositiveNumber,
    Section,
    TokenCount,
)
from dpo_pack.recipe_types import (
    allowed_values as allowed_values,
)

LossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", "simpo", "orpo", "cpo",
]  # fmt: skip
RowField = Literal[
    "prompt", "chosen", "rejected", "weight", "tools", "chat_template_kwargs",
    "prompt_ids", "chosen_ids", "rejected_ids",
]  # fmt: skip
Tracker = Literal[
    "tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"
]


class LoraRecipe(Section):
    """Low-rank adapters instead of full training (Hu et al. 2021, arXiv 2106.09685)."""

    r: Count = Field(default=16, description="Rank of the adapters.")
    alpha: PositiveNumber = Field(default=32.0, description="Adapters are scaled by alpha / r.")
    dropout: PartBelowOne = Field(
        default=0.0,
        description="On the inputs of adapters, in training only. Above 0, prompts are not shared: each of "
        "a pair's sequences draws its own.",
    )
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[tuple[Name, ...], Strict(False)],
        Allowed("all-linear or a list of module names"),
    ] = Field(
        default="all-linear",
        description="Which modules get an adapter, by name or end of name; all-linear: all but the head.",
    )


class ModelRecipe(Section):
    """The policy: the model that is trained."""

    path: PathText = Field(
        description="Hub id or local directory; a directory with a LoRA adapter is trained further.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    revision: Name | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the parameters; auto: float32. bfloat16: AdamW still works in fp32, at 14 bytes "
        "a trained parameter instead of 16; see docs/memory.md.",
    )
    autocast: Literal["auto", "bfloat16", "float16", "none"] = Field(
        default="auto", description="Type matrix products run in; auto: bfloat16 on CUDA, none on CPU."
    )
    attention: Literal["auto", "flash_attn", "torch_varlen", "sdpa"] = Field(
        default="auto",
        description="Attention backend; auto: the first that is exact for this model, type and device.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, more time."
    )
    compile: bool = Field(
        default=False,
        description="torch.compile the layers, for rows of any length, and the passes over logits; every "
        "start takes some seconds to minutes longer.",
    )
    kernels: Literal["none", "liger"] = Field(
        default="none",
        description="liger: norms, rotary positions and gated MLPs by liger-kernel, on CUDA, for families "
        "it fits.",
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")
    lora: LoraRecipe | None = Field(
        default=None,
        description="Train a new low-rank adapter, e.g. {r: 16, alpha: 32}; null: all parameters, or those "
        "of the adapter at model.path. See docs/lora.md.",
    )


class TokenizerRecipe(Section):
    """Text to token ids."""

    path: PathText | None = Field(default=None, description="Hub id or local directory; null: model.path.")
    chat_template: OptionalLocalPath = Field(
        default=None, description="A Jinja file; null: the tokenizer's own template."
    )


class SyncRecipe(Section):
    """A reference that follows the policy: TR-DPO, Gorbatovski et al. 2024 (arXiv 2404.09656)."""

    every_steps: Count = Field(default=512, description="Optimizer steps between two updates.")
    mixup: Annotated[float, Gt(0), Le(1)] = Field(
        default=0.6, description="The policy's part in reference <- mixup x policy + (1 - mixup) x reference."
    )


class ReferenceRecipe(Section):
    """The model the policy is compared with, and the cache of its log-probs."""

    path: PathText | None = Field(
        default=None, description="Hub id or local directory; null: the policy as it starts."
    )
    sync: SyncRecipe | None = Field(
        default=None,
        description="Let the reference follow the policy, e.g. {every_steps: 512, mixup: 0.6}: a second "
        "model then runs live and nothing is cached. null: it is frozen.",
    )
    cache_dir: OptionalLocalPath = Field(
        default=None, description="Where log-probs are kept; null: $DPO_PACK_CACHE, else ~/.cache/dpo_pack."
    )
    token_budget: Literal["auto"] | TokenCount = Field(
        default="auto",
        description="Tokens in a row of the reference pass, which keeps no activations; auto: on CUDA the "
        "most that fit in memory, measured once for each model and device; on CPU 4096, longer rows being "
        "slower.",
    )


class SourceRecipe(Section):
    """One source of pairs; a path alone stands for a source with that path."""

    path: PathText = Field(
        description="A file (.jsonl .json .csv, each also .gz; .parquet .arrow), a directory of such files "
        "or of the datasets library, or a hub id.",
        examples=["pairs.jsonl"],
    )
    name: Name | None = Field(
        default=None, description="What reports and metrics call it; null: derived from the path."
    )
    split: Name = Field(default="train", description="Split of a hub id or datasets directory.")
    format: Literal["auto", "preference", "conversational", "transcript", "tokenized"] = Field(
        default="auto", description="What a row looks like; auto: told from the first row."
    )
    columns: Annotated[
        dict[RowField, Name], Allowed(f"a mapping from {', '.join(get_args(RowField))} to column names")
    ] = Field(
        default_factory=dict,
        description="Columns that are called otherwise, e.g. {prompt: question, chosen: better}.",
    )
    max_pairs: Count | None = Field(default=None, description="Use only so many pairs; null: all.")
    weight: PositiveNumber = Field(
        default=1.0,
        description="Share in the mixture (training only): floor(weight) copies of each pair an epoch, and a "
        "seeded random fraction for the rest, drawn anew each epoch.",
    )


class EvalFraction(Section):
    """Holds out part of the training pairs."""

    fraction: Fraction = Field(description="Part of the training pairs to hold out, e.g. 0.02.")


def as_sources(value: object) -> object:
    """A lone source, or paths in a list of them, as a list of sources; other values as they are."""
    if isinstance(value, (str, dict, SourceRecipe)):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [{"path": source} if isinstance(source, str) else source for source in value]
    return value


def as_eval(value: object) -> object:
    """`as_sources`, but a mapping without any of a source's keys stays one, to hold `fraction`."""
    if isinstance(value, dict) and value.keys().isdisjoint(SourceRecipe.model_fields):
        return value
    return as_sources(value)


def _eval_kind(value: object) -> str:
    return "(fraction)" if isinstance(value, (dict, EvalFraction)) else "(sources)"


class DataRecipe(Section):
    """Which pairs are trained on and how they become tokens."""

    train: Annotated[
        tuple[SourceRecipe, ...],
        Strict(False),
        MinLen(1),
        BeforeValidator(as_sources, json_schema_input_type=str | SourceRecipe | list[str | SourceRecipe]),
        Allowed("a path, a source (a mapping with a path) or a list of these"),
    ] = Field(description="Where the training pairs come from.")
    eval: Annotated[
        Annotated[tuple[SourceRecipe, ...], Strict(False), Tag("(sources)")]
        | Annotated[EvalFraction, Tag("(fraction)")],
        Discriminator(_eval_kind),
        BeforeValidator(
            as_eval, json_schema_input_type=str | SourceRecipe | list[str | SourceRecipe] | EvalFraction
        ),
        Allowed("a path, a source (a mapping with a path), a list of these, or {fraction: 0.02}"),
    ] = Field(default=(), description="Held-out pairs: sources, or a fraction of the training pairs.")
    max_length: Annotated[int, Ge(2), Le(MAX_ROW_TOKENS)] = Field(
        default=2048, description="Most tokens of prompt and one completion together."
    )
    max_prompt_length: TokenCount | None = Field(
        default=None, description="Most tokens of a prompt, below max_length; null: no limit of its own."
    )
    truncation: Literal["drop", "prompt_left", "completion_right", "error"] = Field(
        default="drop",
        description="Pairs that are too long: drop them, cut the oldest prompt tokens (prompt_left), cut the "
        "completion's tail and so its EOS (completion_right), or stop (error). All are counted.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="Rows that are not valid pairs: stop, or skip, count and list them."
    )
    system_prompt: str | None = Field(
        default=None, description="System message for conversations that have none."
    )
    shuffle: bool = Field(default=True, description="Draw a new order each epoch from the seed.")
    num_workers: Literal["auto"] | Annotated[int, Ge(0)] = Field(
        default="auto", description="Processes that tokenise; 0: in the main process."
    )


class PackingRecipe(Section):
    """How many pairs make a step, and how they are laid out in rows."""

    mode: Literal["packed", "padded"] = Field(
        default="packed",
        description="padded: right-padded batches without sharing, for models that cannot be packed.",
    )
    token_budget: TokenCount = Field(
        default=8192,
        description="Tokens in one row, that is, in one forward. A longer pair gets a row of its own.",
    )
    pairs_per_step: Count = Field(
        default=64, description="Pairs in an optimizer step, whatever the number of processes."
    )
    scope: Literal["step", "epoch"] = Field(
        default="step", description="Pack inside each step, or across the shuffled epoch into full rows."
    )
    rows_per_step: Count | None = Field(
        default=None, description="Scope epoch: rows in an optimizer step, over all processes."
    )
    window_pairs: Count = Field(
        default=16384, description="Scope epoch: shuffled pairs are packed in windows of this size."
    )
    algorithm: Literal["best_fit_decreasing", "first_fit_decreasing", "next_fit"] = Field(
        default="best_fit_decreasing", description="Bin packer; next_fit keeps the order of the pairs."
    )
    share_prompt: bool = Field(
        default=True, description="Compute what chosen and rejected begin with once (exact)."
    )
    merge_prompts: bool = Field(
        default=False,
        description="Pairs with the same prompt that meet in a row compute it, and equal completions, once.",
    )


_OWN_LOSS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _loss_name(value: object) -> object:
    if isinstance(value, str) and (value in get_args(LossType) or _OWN_LOSS.fullmatch(value)):
        return value
    raise PydanticCustomError("loss_name", "neither a loss type nor module:function")


LossName = Annotated[
    str,
    BeforeValidator(_loss_name),
    WithJsonSchema({"anyOf": [{"enum": list(get_args(LossType))}, {"pattern": f"^{_OWN_LOSS.pattern}$"}]}),
    Allowed(f"one of {', '.join(get_args(LossType))}, or module:function of your own"),
]


class LossTerm(Section):
    """One term of a weighted sum of losses."""

    type: LossName = Field(description="A loss type.")
    weight: PositiveNumber = Field(default=1.0, description="Factor of this term.")


def _loss_kind(value: object) -> str:
    return "(terms)" if isinstance(value, (list, tuple)) else "(name)"


class LossRecipe(Section):
    """The objective."""

    type: Annotated[
        Annotated[LossName, Tag("(name)")]
        | Annotated[tuple[LossTerm, ...], Strict(False), MinLen(1), Tag("(terms)")],
        Discriminator(_loss_kind),
        Allowed(
            f"one of {', '.join(get_args(LossType))}, module:function of your own, "
            "or a list as [{type: sigmoid, weight: 1.0}]"
        ),
    ] = Field(default="sigmoid", description="A loss, or a weighted sum of several; see docs/losses.md.")
    beta: PositiveNumber = Field(default=0.1, description="Strength of the pull towards the reference.")
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = Field(
        default=0.0,
        description="Assumed part of swapped labels (sigmoid, robust, exo_pair, aot, aot_unpaired, simpo, "
        "cpo).",
    )
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = Field(
        default="reverse_kl", description="Divergence from the reference (arXiv 2309.16240)."
    )
    f_alpha: Fraction = Field(
        default=0.5,
        description="The alpha of f_divergence alpha_divergence: towards 1 reverse_kl, towards 0 forward_kl.",
    )
    ld_alpha: Annotated[float, Ge(0), Le(1)] | None = Field(
        default=None, description="LD-DPO: weight of tokens past the shorter completion's length; null: off."
    )
    weighting: Literal["wpo"] | None = Field(
        default=None, description="wpo: weight pairs by their probability under the policy; null: off."
    )
    discopop_tau: PositiveNumber = Field(default=0.05, description="Temperature of discopop.")
    simpo_gamma: NonNegativeNumber = Field(default=0.5, description="Target reward margin of simpo.")
    cpo_alpha: NonNegativeNumber = Field(
        default=1.0, description="Weight of the likelihood of chosen completions in cpo; TRL's name."
    )
    router_aux_coef: NonNegativeNumber = Field(
        default=0.0, description="Weight of a mixture-of-experts model's load-balancing loss."
    )

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """(type, weight) of each term of the loss, whichever way it was written."""
        if isinstance(self.type, str):
            return ((self.type, 1.0),)
        return tuple((term.type, term.weight) for term in self.type)


class OptimRecipe(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        default="adamw",
        description="adamw_8bit: moments in 8 bits, by bitsandbytes, on CUDA. adafactor: factored second "
        "moments; lr is relative to each tensor's size.",
    )
    lr: PositiveNumber = Field(default=5e-7, description="Peak learning rate.")
    schedule: Literal[
        "linear", "cosine", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup"
    ] = Field(default="linear", description="Of transformers' get_scheduler; constant has no warm-up.")
    warmup_ratio: Annotated[float, Ge(0), Le(1)] = Field(
        default=0.1, description="Warm-up as a part of all steps (0 for schedule constant)."
    )
    warmup_steps: Annotated[int, Ge(0)] | None = Field(
        default=None, description="Warm-up in steps, 0 included, instead of warmup_ratio; null: the ratio."
    )
    min_lr_ratio: PartBelowOne = Field(
        default=0.0, description="Learning rate at the end as a part of lr (linear and cosine)."
    )
    weight_decay: NonNegativeNumber = Field(default=0.0, description="Not on biases and norms.")
    betas: Annotated[
        tuple[PartBelowOne, PartBelowOne], Strict(False), Allowed("a list of two numbers, each >= 0 and < 1")
    ] = Field(default=(0.9, 0.999), description="AdamW's decay rates.")
    eps: PositiveNumber = Field(default=1e-8, description="AdamW's epsilon.")
    max_grad_norm: PositiveNumber | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null: never."
    )

    @model_validator(mode="before")
    @classmethod
    def _constant_has_no_warmup(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("schedule") == "constant":
            return {"warmup_ratio": 0.0, **value}
        return value


class TrainRecipe(Section):
    """How long to train, and when to evaluate."""

    epochs: Count = Field(default=1, description="Passes over the training pairs.")
    max_steps: Count | None = Field(
        default=None, description="Stop after so many steps when epochs would go on; null: no limit."
    )
    eval_every_steps: Count | None = Field(
        default=None, description="Evaluate so often; null: only before the first step and after the last."
    )
    early_stopping: EarlyStoppingRecipe | None = Field(
        default=None,
        description="Stop when evaluations no longer get better, e.g. {patience: 3}; null: never. See "
        "docs/running.md.",
    )
    stop_on_nonfinite: bool = Field(
        default=True,
        description="Stop when a loss or gradient is not finite; false: skip the step. Its pairs are listed "
        "in output_dir either way.",
    )


class LoggingRecipe(Section):
    """metrics.jsonl is always written; these come beside it."""

    every_steps: Count = Field(default=1, description="Log so often.")
    trackers: Annotated[
        tuple[Tracker, ...], Strict(False), Allowed(f"a list of {', '.join(get_args(Tracker))}")
    ] = Field(default=(), description="Experiment trackers, by accelerate's names.")
    run_name: Name | None = Field(
        default=None, description="Name of the run in trackers; null: the last part of output_dir."
    )


class DistributedRecipe(Section):
    """Several devices."""

    num_processes: Literal["auto"] | Count = Field(
        default="auto", description="One per device; auto: all visible GPUs, 1 on CPU."
    )
    strategy: Literal["auto", "ddp", "fsdp2"] = Field(
        default="auto",
        description="ddp: a copy of the model on each device; fsdp2: one model in shards; auto: copies where "
        "their weights, gradients and optimizer state fit. See docs/distributed.md.",
    )
    hybrid: bool = Field(
        default=False, description="fsdp2: shards over the devices of a node, copies over nodes."
    )
    cpu_offload: bool = Field(
        default=False,
        description="fsdp2 on CUDA: shards, gradients and optimizer state rest in the memory of the CPU.",
    )
    gather_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="fsdp2: gather shards and compute in this type instead of under autocast; null: weights "
        "are gathered as they are, which gives the numbers of ddp.",
    )
    accumulate_unsharded: bool = Field(
        default=False,
        description="fsdp2: add up the gradients of a step's rows whole and reduce them once, which saves "
        "messages and takes the memory of a whole gradient; false: reduce them after every row.",
    )


class Recipe(Section):
    """A training run. Attribute names are the YAML keys."""

    output_dir: LocalPath = Field(
        description="Directory for everything the run leaves.", examples=["runs/my-run"]
    )
    seed: Annotated[int, Ge(0), Lt(2**32)] = Field(
        default=0, description="Of the order of pairs and everything else random."
    )
    model: ModelRecipe
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe)
    reference: ReferenceRecipe = Field(default_factory=ReferenceRecipe)
    data: DataRecipe
    packing: PackingRecipe = Field(default_factory=PackingRecipe)
    loss: LossRecipe = Field(default_factory=LossRecipe)
    optim: OptimRecipe = Field(default_factory=OptimRecipe)
    train: TrainRecipe = Field(default_factory=TrainRecipe)
    checkpoint: CheckpointRecipe = Field(default_factory=CheckpointRecipe)
    logging: LoggingRecipe = Field(default_factory=LoggingRecipe)
    distributed: DistributedRecipe = Field(default_factory=DistributedRecipe)
    online: OnlineRecipe | None = Field(
        default=None, description="Train on pairs of the policy's own completions; null: on pairs from data."
    )

    @property
    def shares_prompts(self) -> bool:
        """Whether a training row computes what a pair's completions continue once.

        Never under LoRA dropout, which draws for each sequence anew.
        """
        return self.packing.share_prompt and (self.model.lora is None or self.model.lora.dropout == 0.0)
