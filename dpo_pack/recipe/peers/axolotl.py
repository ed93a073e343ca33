"""Translates the keys of an axolotl config (`rl`: dpo, ipo, simpo or orpo; commit 067b021) to recipe keys."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dpo_pack.recipe.peers.rules import (
    QUANTIZE,
    TRANSFORMERS,
    Absent,
    Known,
    Rule,
    Settings,
    Table,
    Unneeded,
    as_absent,
    as_unneeded,
    choice,
    each,
    file_or_hub,
    held_out,
    if_on,
    listed,
    lora,
    loss_type,
    part_of,
    reads,
    to,
)
from dpo_pack.system.errors import RecipeError

# For a prompt strategy of axolotl: our field of a pair -> the column of the data that holds it.
_COLUMNS: dict[str, dict[str, str]] = {
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
}


def _label_smoothing(value: Any, settings: Settings) -> Any:
    """Returns the value, or Unneeded: axolotl passes it on for `rl: dpo` alone."""
    return (
        reads("label_smoothing")(value, settings)
        if settings["rl"] == "dpo"
        else Unneeded("only dpo reads it")
    )


def _rl(value: Any, settings: Settings) -> Any:
    """Returns our loss for axolotl's `rl`. Raises RecipeError for a run without preference pairs."""
    beta = {"loss.beta": settings["orpo_alpha"]} if settings.get("orpo_alpha") is not None else {}
    if value == "dpo":
        return Known({"loss.type": loss_type(settings)})
    if value == "ipo":
        return "ipo"
    if value == "orpo":
        return Known({"loss.type": "orpo", **beta})
    if value == "simpo":
        factor = settings.get("cpo_alpha")
        sum_of_two = [
            {"type": "simpo", "weight": 1.0},
            {"type": "sft", "weight": 1.0 if factor is None else factor},
        ]
        remark = "TRL's CPOTrainer adds cpo_alpha (1 by default) x the likelihood of chosen completions"
        return Known({"loss.type": "simpo" if factor == 0 else sum_of_two}, remark)
    raise RecipeError(
        f"rl: {value}: no training on preference pairs; dpo-pack reads dpo, ipo, simpo and orpo"
    )


def _sources(value: Any, settings: Settings) -> list[dict[str, Any]]:
    sources = []
    for each_source in value or ():
        kind = each_source.get("type")
        columns = dict(_COLUMNS.get(str(kind).rsplit(".", 1)[-1], {}))
        fields = {**each_source, **(kind if isinstance(kind, dict) else {})}
        for ours, theirs in (
            ("prompt", "field_messages"), ("prompt", "field_prompt"),
            *(() if isinstance(kind, dict) else (("system", "field_system"),)),
            ("chosen", "field_chosen"), ("rejected", "field_rejected"),
        ):  # fmt: skip
            if fields.get(theirs):
                columns[ours] = fields[theirs]
        sources += file_or_hub(
            each_source.get("path"),
            each_source.get("data_files"),
            split=each_source.get("split"),
            config=each_source.get("name"),
            revision=each_source.get("revision"),
            columns={ours: theirs for ours, theirs in columns.items() if ours != theirs},
        )
    return sources


def _train(value: Any, settings: Settings) -> Any:
    kinds = [source.get("type") for source in value or () if isinstance(source, dict)]
    named = {kind for kind in kinds if isinstance(kind, str)}
    written = sorted(kind for kind in named if kind.startswith(("chatml", "llama3", "zephyr")))
    own = [kind for kind in kinds if isinstance(kind, dict)]
    remark = "rows of text end with the tokenizer's EOS, once" if own else ""
    if any(kind.get("field_system") and "{system}" not in (kind.get("prompt_format") or "") for kind in own):
        remark += "; field_system is not used, because prompt_format has no {system}"
    if written:
        remark = (
            f"type {', '.join(written)} writes the template into the text; here rows of messages get the "
            "tokenizer's chat template, and rows of text stay as they are: look at both with dpopack show"
        )
    formats = tuple(what for kind in own for what in _not_applied(kind))
    return Known({"data.train": _sources(value, settings)}, remark, formats)


def _not_applied(kind: dict[str, Any]) -> Iterator[str]:
    """For a type that the user defines: yields each format that adds text to a column. dpo-pack adds no text.

    A special token behind an answer is no such text: it is EOS, which dpo-pack itself adds if it is missing.
    """
    for name in ("prompt", "chosen", "rejected"):
        text, column = kind.get(f"{name}_format"), kind.get(f"field_{name}") or name
        end = "" if name == "prompt" else r"(<[^<>]+>|\[[^][]+\])?"
        if text and not re.fullmatch(rf"\{{({name}|{re.escape(column)})\}}{end}", text):
            yield (
                f"{name}_format: {text!r} - NOT applied: dpo-pack takes the text of column {column} as it "
                "is; write what the format adds into the data"
            )


def _precision(value: Any, settings: Settings) -> Any:
    if not value:
        return Known({"model.autocast": "none"})
    if settings.get("adapter"):
        return Known({"model.dtype": "bfloat16"}, "the frozen base in bfloat16, adapters in float32")
    remark = "axolotl keeps the weights in bfloat16, dpo-pack in float32: more exact, and takes more memory"
    return Known({"model.autocast": "bfloat16"}, remark)


def _adapter(value: Any, settings: Settings) -> Any:
    if value not in ("lora", "qlora"):
        return Absent("of adapters, dpo-pack trains LoRA only")
    targets = listed(settings.get("lora_target_modules"))
    named = {name: settings[name] for name in ("lora_r", "lora_alpha") if name in settings}
    is_linear = settings.get("lora_target_linear") or targets is None
    return lora(
        True,
        {
            "lora_r": 8,
            "lora_alpha": 16,
            **named,
            "lora_dropout": settings.get("lora_dropout", 0.0),
            "lora_target_modules": "all-linear" if is_linear else targets,
            "use_rslora": settings.get("peft_use_rslora"),
        },
    )


def _per_epoch(key: str) -> Rule:
    what = f"set {key} to the steps of an epoch, which dpopack inspect-packing prints, divided by this"
    return to(
        key,
        lambda value, s: Absent(what) if value else Unneeded("never"),
        "divide the steps of an epoch by it",
    )


_TRACKERS = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "use_tensorboard": "tensorboard",
    "use_comet": "comet_ml", "use_trackio": "trackio", "use_swanlab": "swanlab",
}  # fmt: skip


def _trackers(value: Any, settings: Settings) -> Any:
    used = dict.fromkeys(name for key, name in _TRACKERS.items() if settings.get(key))
    return list(used) if value else Unneeded("it is off")


_WARMUP = "axolotl rounds the number of steps down, dpo-pack up, as transformers does"


def _warmup_ratio(value: Any, settings: Settings) -> Any:
    outcome = TRANSFORMERS["warmup_ratio"].convert(value, settings)
    return replace(outcome, remark=_WARMUP) if isinstance(outcome, Known) else outcome


_TEMPLATE = "the tokenizer's own chat template is used; name another Jinja file in tokenizer.chat_template"

AXOLOTL: Table = {
    **TRANSFORMERS,
    "base_model": to("model.path"),
    "revision_of_model": to("model.revision"),
    "tokenizer_config": to("tokenizer.path"),
    "trust_remote_code": to("model.trust_remote_code"),
    "rl": to("loss.type", _rl, "dpo: sigmoid"),
    **each("dpo_loss_type dpo_loss_weights cpo_alpha orpo_alpha", part_of("loss.type")),
    "rl_beta": to("loss.beta"),
    "trl.beta": to("loss.beta"),
    "dpo_label_smoothing": to("loss.label_smoothing", _label_smoothing),
    "dpo_use_weighting": to("loss.weighting", if_on("wpo"), "true: wpo"),
    "simpo_gamma": to(
        "loss.simpo_gamma", lambda value, s: value if s["rl"] == "simpo" else Unneeded("only simpo reads it")
    ),
    "datasets": to("data.train", _train),
    "test_datasets": to("data.eval", _sources),
    "val_set_size": to("data.eval", held_out, "a fraction"),
    "sequence_len": to("data.max_length"),
    "max_prompt_len": to("data.max_prompt_length"),
    "excess_length_strategy": choice(
        "data.truncation",
        {"drop": "drop", "truncate": "completion_right", "raise": "error"},
        "pairs are dropped",
    ),
    "default_system_message": to("data.system_prompt"),
    "chat_template": Rule(
        remark=_TEMPLATE,
        convert=lambda value, s: (
            Unneeded("dpo-pack uses this template too") if value == "tokenizer_default" else Absent(_TEMPLATE)
        ),
    ),
    "chat_template_jinja": Rule(remark=_TEMPLATE, convert=lambda value, s: Absent(_TEMPLATE)),
    "adapter": to("model.lora", _adapter),
    **each(
        "lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear peft_use_rslora",
        part_of("model.lora", "with adapter"),
    ),
    "load_in_8bit": to("model.quantize", if_on("int8"), QUANTIZE),
    "load_in_4bit": to("model.quantize", if_on("nf4"), QUANTIZE),
    "micro_batch_size": TRANSFORMERS["per_device_train_batch_size"],
    "num_epochs": TRANSFORMERS["num_train_epochs"],
    "optimizer": TRANSFORMERS["optim"],
    "lr_scheduler": TRANSFORMERS["lr_scheduler_type"],
    "warmup_ratio": to("optim.warmup_ratio", _warmup_ratio, _WARMUP),
    "cosine_min_lr_ratio": to("optim.min_lr_ratio"),
    "bf16": to(
        "model.dtype model.autocast", _precision, "with an adapter bfloat16 weights, else bfloat16 products"
    ),
    "torch_compile": to(
        "model.compile", lambda value, s: bool(value) if value != "auto" else Unneeded("off by default")
    ),
    "eval_steps": to("train.eval_every_steps"),
    "evals_per_epoch": _per_epoch("train.eval_every_steps"),
    "saves_per_epoch": _per_epoch("checkpoint.every_steps"),
    "shuffle_merged_datasets": to("data.shuffle"),
    **dict.fromkeys(_TRACKERS, to("logging.trackers", _trackers)),
    **each("wandb_name mlflow_run_name trackio_run_name swanlab_experiment_name", to("logging.run_name")),
    **as_unneeded(
        {
            "the reference's log-probs are always computed before and cached": "precompute_ref_log_probs",
            "found in the model's config": """
            model_type tokenizer_type processor_type is_*_derived_model base_model_config tokenizer_*""",
            "nothing is padded": """
            sample_packing* eval_sample_packing pad_to_* dpo_padding_free batch_flattening multipack_*""",
            "model.attention auto takes the first backend that is exact": """
            attn_implementation *_attention flash_attn_* flash_optimum sdpa_* fused_attn_kernel
            large_head_attention""",
            "dpo-pack has its own ways to compute the same numbers; see docs/performance.md": """
            lora_*_kernel chunked_cross_entropy* tiled_mlp* use_kernels use_scattermoe use_sonicmoe
            cut_cross_entropy*""",
            "pairs are tokenised once and cached": """
            dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory
            dataset_shard_* skip_prepare_dataset push_dataset_to_hub""",
            "only completions are scored": "train_on_inputs",
            "data.shuffle shuffles all sources together": "shuffle_before_merging_datasets",
            "the hub's own login is used": "hf_use_auth_token",
            "logging.samples writes completions of held-out prompts": "generate_samples",
            "evaluations are packed like training, into rows of packing.token_budget tokens": """
            eval_batch_size""",
            "packing.token_budget bounds memory; distributed.strategy auto shards where needed": """
            activation_offloading layer_offloading selective_checkpointing dp_*_size
            tensor_parallel_size context_parallel_size sequence_parallel_degree lora_on_cpu max_memory
            gpu_memory_limit device_map low_cpu_mem_usage experimental_* gc_steps gc_collect_steps""",
            "train.stop_on_nonfinite and warnings watch the loss": "loss_watchdog_*",
            "dpo-pack starts its own processes": "strict debug device ddp world_size vllm",
        }
    ),
    **as_absent(
        {
            "to train an adapter further, name its directory in model.path": "lora_model_dir",
            "only adapters are trained": "lora_modules_to_save",
            "plain LoRA is trained": "peft_use_dora peft_* lora_target_parameters loraplus_* relora* lisa_*",
            "set model.dtype and model.autocast": "bfloat16 float16 float32 fp32_norms",
            "model.kernels: liger uses Liger's kernels, on CUDA": "liger_* dpo_use_liger_kernel",
            "set it in the tracker's own environment variables": """
            wandb_* mlflow_* comet_* trackio_* swanlab_* hf_mlflow_log_artifacts""",
            "the tokenizer's own special tokens are used; change them in its files. Nothing is padded": """
            special_tokens""",
            "the tokenizer is used as it is": """
            tokens added_tokens_overrides eot_tokens resize_token_embeddings_to_32x""",
            "duplicate pairs are counted and reported, not removed": "dataset_exact_deduplication",
            "all parameters are trained, or an adapter": "unfrozen_parameters",
            "set packing.pairs_per_step to it, times the number of devices": "batch_size",
            "dpo-pack does not run other projects' code": "plugins trainer_cls use_onebitllms",
        }
    ),
}
