"""The schema of a recipe: `Recipe`, and the sections of the models, of logging and of several devices. The
JSON schema, the commented defaults and docs/recipe.md are made from it."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field, PrivateAttr, Strict

from dpo_pack.recipe import types
from dpo_pack.recipe.data import IMAGE_FIELDS, DataRecipe, EvalFraction, PackingRecipe, SourceRecipe
from dpo_pack.recipe.online import OnlineRecipe
from dpo_pack.recipe.training import CheckpointRecipe, EvalMetric, LossRecipe, OptimRecipe, TrainRecipe
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.system.hub import repo_fault

__all__ = ["DataRecipe", "EvalFraction", "LossRecipe", "Recipe", "SourceRecipe", "why_not_sharded"]

Tracker = Literal[
    "tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"
]


UNSHARED = "prompts are not shared, because model.lora.dropout is above 0; model.lora.dropout: 0 shares them"


class LoraRecipe(types.Section):
    """Low-rank adapters instead of full training (Hu et al. 2021, arXiv 2106.09685)."""

    r: types.Count = 16
    """Rank of the adapters."""
    alpha: types.PositiveNumber = 32.0
    """Adapters are scaled by alpha / r."""
    dropout: types.PartBelowOne = 0.0
    """Dropout on the inputs of adapters, in training only. Above 0, a pair's prompt is computed twice."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[tuple[types.Name, ...], Strict(False)],
        "all-linear or a list of module names",
    ] = "all-linear"
    """Modules of the language model, by name or end of name; all-linear: all linear ones but the head."""


class ModelRecipe(types.Section):
    """The policy: the model that is trained."""

    path: types.PathText = Field(examples=["Qwen/Qwen3-0.6B"])
    """Hub id or local directory; a directory with a LoRA adapter is trained further."""
    revision: types.Name | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters; auto: float32. bfloat16: AdamW still works in fp32; see docs/memory.md."""
    autocast: Literal["auto", "bfloat16", "none"] = "auto"
    """Type in which matrix products are computed; none: that of dtype; auto: bfloat16 on CUDA, else none."""
    attention: Literal["auto", "flash_attn", "torch_varlen", "flex", "sdpa"] = "auto"
    """auto: the first that is exact for this model, type and device. flex: CUDA, for softcaps and sinks."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations: less memory, more time; selective: not those of products and attention."""
    activation_offload: bool = False
    """Keep layers' inputs in the host's memory; needs gradient_checkpointing: true. See docs/memory.md."""
    mlp_tile_tokens: types.TokenCount | None = None
    """Tokens at a time in feed-forward blocks, e.g. 8192, for very long pairs; null: all at once."""
    compile: Literal["auto"] | bool = "auto"
    """Compile layers and logits with torch.compile; auto: on CUDA, where a small row compiles."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    unused_tensors: Literal["error", "warn"] = "error"
    """If the checkpoint has tensors that its model does not use; warn: the exported model lacks them."""
    quantize: Literal["int8", "nf4"] | None = None
    """Quantise the frozen base of an adapter with bitsandbytes; nf4: QLoRA. See docs/lora.md."""
    images: bool = False
    """Read the images of prompts, for families that docs/images.md names; their tower stays as it is."""
    lora: LoraRecipe | None = None
    """Train a new adapter, e.g. {r: 16, alpha: 32}; null: all parameters, or those of an adapter at path."""


class TokenizerRecipe(types.Section):
    """The tokenizer, which turns text into token ids."""

    path: types.PathText | None = None
    """Hub id or local directory; null: model.path."""
    chat_template: types.LocalPath | None = None
    """A Jinja file; null: the template of the tokenizer, or of the processor (model.images)."""


class SyncRecipe(types.Section):
    """A reference that follows the policy: TR-DPO, Gorbatovski et al. 2024 (arXiv 2404.09656)."""

    every_steps: types.Count = 512
    """Optimizer steps between two updates."""
    mixup: Annotated[float, Gt(0), Le(1)] = 0.6
    """Part of the policy in an update: new reference = mixup x policy + (1 - mixup) x reference."""


class ReferenceRecipe(types.Section):
    """The model that the policy is compared with, and the cache of this model's log-probs."""

    path: types.PathText | None = None
    """Hub id or local directory; null: the policy as it is before training."""
    sync: SyncRecipe | None = None
    """Move the reference towards the policy, e.g. {every_steps: 512, mixup: 0.6}; null: it stays as it is."""
    cache_dir: types.LocalPath | None = None
    """Where log-probs are kept; null: $DPO_PACK_CACHE, else ~/.cache/dpo_pack."""
    token_budget: Literal["auto"] | types.TokenCount = "auto"
    """Most tokens of a row in the pass before training; auto: what fits on CUDA; on CPU at least 4096."""


class SamplesRecipe(types.Section):
    """Sample completions: what the policy answers to a few prompts, in `samples.jsonl`."""

    num: types.Count = 3
    """How many prompts: from the held-out sets in turn, or from the training data if nothing is held out."""
    max_new_tokens: types.Count = 64
    """Most tokens of a completion."""
    every_evals: types.Count | None = None
    """Write samples at every Nth evaluation too; null: only before the first step and at the end."""


class LoggingRecipe(types.Section):
    """What a run logs: metrics.jsonl always, and what these keys add."""

    every_steps: types.Count = 1
    """Steps between two logged lines; step 1 has one, too."""
    trackers: Annotated[
        tuple[Tracker, ...],
        Strict(False),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        f"one or a list of {', '.join(get_args(Tracker))}",
    ] = ()
    """Experiment trackers that get the metrics too, by accelerate's names."""
    pairs: bool = True
    """Write each pair's loss, margin and log-probs, each time it is trained on, to `pairs.parquet`."""
    samples: SamplesRecipe | None = Field(default_factory=SamplesRecipe)
    """Greedy completions of a few prompts, before the first step and at the end; null: none."""
    run_name: types.Name | None = None
    """Name of the run in trackers; null: the last part of output_dir."""


class PushRecipe(types.Section):
    """Where the exported model goes on the Hugging Face hub. The token comes from HF_TOKEN or a login."""

    repo: Annotated[str, "owner/name"]
    """The repository; it is created if the hub does not have it."""
    private: bool = True
    """Create a private repository, and refuse to upload into a public one."""

    def broken_rules(self) -> Iterator[types.Problem]:
        if (fault := repo_fault(self.repo)) is not None:
            yield "repo", fault


class ExportRecipe(types.Section):
    """The model that a run leaves: the type of its weights, its verification, and where it goes."""

    path: types.LocalPath | None = None
    """Directory for the model, as on another disk: output_dir/model is then a link to it. null: no other."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the exported weights; auto: the checkpoint's, where narrower; an adapter keeps its type."""
    verify: Literal["auto", "full", "tensors", "none"] = "auto"
    """Read the export in a process of its own and compare: tensors: bit for bit; full: log-probs, too."""
    push_to_hub: PushRecipe | None = None
    """Upload the model, its card and report.html, e.g. {repo: owner/name, private: true}; null: no."""


class DistributedRecipe(types.Section):
    """Training on several devices."""

    num_processes: Literal["auto"] | types.Count = "auto"
    """Number of processes, one for each device; auto: all visible GPUs, 1 on CPU."""
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    """ddp: each device has a copy; fsdp2: a shard; auto: ddp if it fits. See docs/distributed.md."""
    hybrid: bool = False
    """fsdp2: divide the model over the devices of each node, so that each node has a whole copy."""
    cpu_offload: bool = False
    """fsdp2 on CUDA: keep shards, gradients and optimizer state in the memory of the CPU."""
    gather_dtype: Literal["bfloat16"] | None = None
    """fsdp2: gather weights and compute in this type, without autocast; null: in their own, as in ddp."""
    accumulate_unsharded: bool = False
    """fsdp2: exchange gradients once a step, not after every row: fewer messages, more memory."""


# Tokens of a row, for auto. Without gradients a layer's activations are freed after it, so rows are longer;
# above 4,096 they are slower on a CPU, where the allocator keeps no blocks as large as their activations.
TRAINED_TOKENS, CPU_REFERENCE_TOKENS, START_FACTOR = {"cpu": 2048, "cuda": 8192}, 4096, 4


class Recipe(types.Section):
    """A training run. Attribute names are the YAML keys."""

    output_dir: types.LocalPath = Field(examples=["runs/my-run"])
    """Directory for everything that the run writes, except caches."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of the order of pairs and of everything else random."""
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
    export: ExportRecipe = Field(default_factory=ExportRecipe)
    distributed: DistributedRecipe = Field(default_factory=DistributedRecipe)
    online: OnlineRecipe | None = None
    """Train on pairs of the policy's own completions; null: on pairs from data."""
    verdict: VerdictRecipe | None = None
    """Say at the end whether the new model is better, as in {tasks: [ifeval]}; null: 'dpopack verdict'."""
    _dropped: list[str] = PrivateAttr(default_factory=list)

    @property
    def dropped(self) -> list[str]:
        """Lines about values of an earlier release that the run had and this recipe lacks."""
        return self._dropped

    @property
    def shares_prompts(self) -> bool:
        """Whether a row computes a pair's common prefix only once; LoRA dropout differs for each sequence."""
        return self.packing.share_prompt and (self.model.lora is None or self.model.lora.dropout == 0.0)

    @property
    def sharing_note(self) -> str:
        """What keeps prompts from being shared although packing.share_prompt is true; "": nothing."""
        return UNSHARED if self.packing.share_prompt and not self.shares_prompts else ""

    def token_budgets(
        self, device_type: str, longest_beginning: int = 0, fits: Callable[[int], bool] = bool
    ) -> tuple[int, int]:
        """Returns `packing.token_budget` and `reference.token_budget`; auto is a number here, on CUDA that
        from which the reference pass searches. On a CPU, rows that share a beginning have the more use of it
        the longer they are; without, 1,024 to 8,192 tokens are equally fast. `fits`: whether memory suffices
        for training with rows of so many tokens."""
        trained, others = self.packing.token_budget, self.reference.token_budget
        usual, longer = TRAINED_TOKENS[device_type], 4 * longest_beginning
        shares = device_type == "cpu" and self.packing.share_prompt and self.packing.mode == "packed"
        longer = longer if shares and longer > usual and fits(longer) else usual
        if trained == "auto":
            trained = longer if self.shares_prompts else usual
        most = max(CPU_REFERENCE_TOKENS, longer) if device_type == "cpu" else START_FACTOR * trained
        return trained, most if others == "auto" else others

    @property
    def inputs(self) -> dict[str, str | None]:
        """The paths and hub ids that the recipe names, by their keys."""
        judges, template = () if self.online is None else self.online.judges, self.tokenizer.chat_template
        kept = [source.keep for source in self.data.train]
        return {
            "model.path": self.model.path,
            "tokenizer.path": self.tokenizer.path,
            "tokenizer.chat_template": None if template is None else str(template),
            "reference.path": self.reference.path,
            **{f"data.train.{number}.path": source.path for number, source in enumerate(self.data.train)},
            **{f"data.train.{n}.keep.from": one.file if one else None for n, one in enumerate(kept)},
            **{f"data.eval.{number}.path": one.path for number, one in enumerate(self.data.eval_sources)},
            **{f"online.judges.{number}.path": judge.path for number, judge in enumerate(judges)},
        }

    def broken_rules(self) -> Iterator[types.Problem]:
        """Yields problems between sections, each of which is valid alone."""
        model, reference, loss, devices = self.model, self.reference, self.loss, self.distributed
        for key, is_on in (("compile", model.compile is True), ("mlp_tile_tokens", model.mlp_tile_tokens)):
            if is_on and model.gradient_checkpointing == "selective":
                yield f"model.{key}", "not with gradient_checkpointing: selective; set that to true"
        place, root = self.export.path, self.output_dir.absolute()
        if place is not None and place.absolute().is_relative_to(root):
            yield "export.path", "is in output_dir; give a path outside, or leave it out"
        if model.activation_offload and model.gradient_checkpointing is not True:
            yield "model.activation_offload", "needs model.gradient_checkpointing: true; set it, too"
        for key in ("path", "sync"):
            if reference.is_changed(key) and not loss.needs_reference:
                yield (
                    f"reference.{key}",
                    f"loss.type {', '.join(dict(loss.terms))} uses no reference; leave it out",
                )
        for key in ("hybrid", "cpu_offload", "gather_dtype", "accumulate_unsharded"):
            if devices.is_changed(key) and devices.strategy != "fsdp2":
                yield f"distributed.{key}", "needs distributed.strategy: fsdp2"
        if model.quantize is not None and devices.strategy == "fsdp2":
            yield "distributed.strategy", "fsdp2 cannot shard quantised weights (model.quantize); set ddp"
        if model.quantize is not None and reference.sync is not None:
            yield "reference.sync", "a model with model.quantize cannot follow the policy; leave it out"
        if devices.gather_dtype and model.autocast not in ("auto", "none"):
            yield "distributed.gather_dtype", "takes the place of model.autocast; leave one of the two out"
        others = {"online": self.online, "model.quantize": model.quantize}
        for key, value in (others | {"loss.router_aux_coef": loss.router_aux_coef}).items():
            if model.images and value:
                yield key, "not with model.images yet; leave it out"
        named = ["data.max_pixels"] if self.data.max_pixels is not None else []
        for part, sources in (("train", self.data.train), ("eval", self.data.eval_sources)):
            for number, source in enumerate(sources):
                keys = [f"columns.{field}" for field in IMAGE_FIELDS if source.columns.get(field) is not None]
                keys += ["image_folder"] if source.image_folder is not None else []
                named += [f"data.{part}.{number}.{key}" for key in keys]
        for key in named if not model.images else ():
            yield key, "needs model.images: true; else no image is read"
        if self.verdict is not None and self.verdict.judges and not (self.verdict.prompts or self.data.eval):
            yield "verdict.prompts", "nothing is held out; name a data source whose prompts judges compare"
        yield from self._broken_evaluation_rules()
        if self.online is not None:
            yield from self._broken_online_rules(self.online)

    def _broken_evaluation_rules(self) -> Iterator[types.Problem]:
        checkpoint, every_steps, samples = self.checkpoint, self.train.eval_every_steps, self.logging.samples
        if every_steps and not self.data.eval:
            yield "train.eval_every_steps", "data.eval is empty; hold pairs out, as in {fraction: 0.02}"
        if checkpoint.load_best and not checkpoint.keep_best:
            yield "checkpoint.load_best", "needs checkpoint.keep_best: 1 or more; else the best are deleted"
        if samples is not None and samples.every_evals is not None and every_steps is None:
            yield "logging.samples.every_evals", "needs evaluations in training: train.eval_every_steps"
        comparing = [f"checkpoint.{key}" for key in ("keep_best", "load_best") if checkpoint.is_changed(key)]
        comparing += ["train.early_stopping"] if self.train.early_stopping is not None else []
        for key in comparing if every_steps is None or not self.data.eval else ():
            yield key, "compares evaluations; set data.eval and train.eval_every_steps"
        if not comparing:
            for key in (key for key in ("metric", "eval_set") if checkpoint.is_changed(key)):
                yield f"checkpoint.{key}", "set checkpoint.keep_best or train.early_stopping, or leave it out"
        known = [n for n in get_args(EvalMetric) if n.startswith("online/") == (self.online is not None)]
        if checkpoint.metric is not None and checkpoint.metric not in known:
            yield "checkpoint.metric", f"this run has no {checkpoint.metric}; it has {', '.join(known)}"

    def _broken_online_rules(self, online: OnlineRecipe) -> Iterator[types.Problem]:
        generator, max_steps, stale = online.generator.type, self.train.max_steps, online.max_staleness_steps
        if self.data.continue_final_message:
            yield "data.continue_final_message", "judges get whole messages; leave it out of an online run"
        for key in (f"{n}.{key}" for n, one in enumerate(self.data.train) for key in one.selecting_keys):
            yield f"data.train.{key}", "online, the policy makes the pairs; leave it out"
        if max_steps is None:
            yield "train.max_steps", "an online run needs it, because the number of its pairs is unknown"
        if self.train.epochs != 1:
            yield "train.epochs", "train.max_steps alone sets the length of an online run; leave it out"
        if self.data.truncation == "completion_right":
            yield "data.truncation", "online, data has no completions to cut; use drop or prompt_left"
        if online.max_new_tokens >= self.data.max_length:
            yield "online.max_new_tokens", f"must be below data.max_length ({self.data.max_length})"
        remedy = "use http with a vLLM server" if generator == "vllm" else "set ddp"
        if self.distributed.strategy == "fsdp2" and (obstacle := why_not_sharded(self)) is not None:
            yield "distributed.strategy", f"{obstacle}, so fsdp2 cannot train this run; {remedy}"
        if generator == "vllm" and self.distributed.num_processes not in ("auto", 1):
            yield "distributed.num_processes", f"generator vllm answers in one process; set 1, or {remedy}"
        # A server never gets new weights, so in step n each pair comes from a policy that is n - 1 steps old.
        if generator == "http" and stale is not None and max_steps is not None and max_steps > stale + 1:
            what = f"every pair is older from step {stale + 2} on, as a server's weights stay"
            yield "online.max_staleness_steps", f"{what}; leave it out, or use another generator"


def why_not_sharded(recipe: Recipe) -> str | None:
    """Returns why an online run needs a whole model in each process; None if a sharded model will do."""
    online = recipe.online
    if online is None:
        return None
    if online.generator.type == "vllm":
        return "online.generator.type vllm takes a whole model's weights in one process"
    if online.generator.type == "transformers" or recipe.data.eval:
        prompts = "the prompts" if online.generator.type == "transformers" else "the prompts of data.eval"
        return f"the policy answers {prompts} itself, and gathering shards for every token takes far too long"
    return "online.offload_reference moves a whole model" if online.offload_reference else None
