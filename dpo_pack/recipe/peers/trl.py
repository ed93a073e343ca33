"""Translates the options of TRL 1.16 (`trl dpo`, DPOConfig, DPOTrainer, LoraConfig) to recipe keys."""

from typing import Any

from dpo_pack.recipe.peers.rules import (
    QUANTIZE,
    TRANSFORMERS,
    TRUNCATIONS,
    Absent,
    Known,
    Rule,
    Settings,
    Table,
    Unneeded,
    as_absent,
    as_unneeded,
    choice,
    dtype,
    each,
    file_or_hub,
    if_on,
    lora,
    loss_type,
    part_of,
    reads,
    source,
    to,
)


def _trl_sources(value: Any, settings: Settings) -> Any:
    if settings.get("datasets"):
        return Unneeded("datasets decides")
    files = settings.get("data_files")
    options = {"config": settings.get("dataset_config"), "data_dir": settings.get("data_dir")}
    ours: dict[str, Any] = {
        "data.train": file_or_hub(value, files, split=settings.get("dataset_train_split"), **options)
    }
    is_evaluated = settings.get("eval_strategy", "no") not in ("no", False)
    held_out = settings.get("dataset_test_split")
    if is_evaluated and held_out and (not files or (isinstance(files, dict) and held_out in files)):
        path = settings.get("eval_dataset_name") or value
        ours["data.eval"] = file_or_hub(path, files, split=held_out, **options)
    return Known(ours)


def _trl_mixture(value: Any, settings: Settings) -> Any:
    """Translates `datasets` of TRL's DatasetMixtureConfig, or the alignment handbook's `dataset_mixture`."""
    mixture = value if isinstance(value, dict) else {"datasets": value}
    size = mixture.get("test_split_size", settings.get("test_split_size"))
    sources = []
    for one in mixture.get("datasets") or ():
        found = file_or_hub(
            one.get("path", one.get("id")),
            one.get("data_files"),
            split=one.get("split"),
            config=one.get("name", one.get("config")),
            data_dir=one.get("data_dir"),
        )
        part = one.get("fraction", one.get("weight"))
        weight = {} if part in (None, 1) else {"weight": float(part)}
        sources += [{**source, **weight} for source in found]
    ours: dict[str, Any] = {"data.train": sources}
    if size and settings.get("eval_strategy", "no") != "no":
        if size >= 1:
            text = f"TRL holds out {size} pairs (test_split_size); set data.eval to a fraction"
            return Known({**ours, "data.eval": {"fraction": 0.02}}, text)
        ours["data.eval"] = {"fraction": size}
    is_weighted = any("weight" in source for source in sources)
    return Known(ours, "weight draws a random part of the pairs, anew each epoch" if is_weighted else "")


def _mixer(value: Any, settings: Settings) -> Any:
    """Translates the alignment handbook's `dataset_mixer`, {hub id: fraction}, with its `dataset_splits`."""
    splits = settings.get("dataset_splits") or ["train"]
    train = next((name for name in splits if "train" in name), splits[0])
    tests = [name for name in splits if name != train and "test" in name]
    ours: dict[str, Any] = {
        "data.train": [
            source(path, split=train, weight=None if part == 1 else part) for path, part in value.items()
        ]
    }
    if tests:
        ours["data.eval"] = [source(path, split=tests[0]) for path in value]
    return Known(ours)


def _no_dropout(value: Any, settings: Settings) -> Any:
    what = "dpo-pack trains without the model's own dropout"
    return Unneeded(what) if value else Absent(what)


TRL: Table = {
    **TRANSFORMERS,
    "model_name_or_path": to("model.path"),
    "model_revision": to(
        "model.revision", lambda value, s: Unneeded("the default") if value == "main" else value
    ),
    **each("dtype torch_dtype", to("model.dtype", dtype)),
    "trust_remote_code": to("model.trust_remote_code"),
    "use_peft": to("model.lora", lora),
    **each(
        "lora_r lora_alpha lora_dropout lora_target_modules use_rslora",
        part_of("model.lora", "with use_peft"),
    ),
    "load_in_8bit": to("model.quantize", if_on("int8"), QUANTIZE),
    "load_in_4bit": to("model.quantize", if_on("nf4"), QUANTIZE),
    "dataset_name": to("data.train data.eval", _trl_sources),
    **each("dataset_config dataset_train_split data_dir data_files", part_of("data.train")),
    **each("dataset_test_split eval_dataset_name", part_of("data.eval", "unless eval_strategy is no")),
    "datasets": to("data.train data.eval", _trl_mixture, "fraction: weight"),
    "dataset_mixture": to("data.train data.eval", _trl_mixture),
    "test_split_size": part_of("data.eval", "a fraction"),
    "dataset_mixer": to("data.train data.eval", _mixer),
    "dataset_splits": part_of("data.train"),
    "max_length": to(
        "data.max_length",
        lambda value, s: Known({"data.max_length": 131072}, "no limit in TRL") if value is None else value,
        takes_null=True,
    ),
    "truncation_mode": choice("data.truncation", TRUNCATIONS, "completions are cut at their end"),
    "max_prompt_length": to(
        "data.max_prompt_length",
        comment="pairs with a longer prompt are dropped; older releases of TRL cut the prompt",
    ),
    "beta": to("loss.beta"),
    "loss_type": to("loss.type", lambda value, s: loss_type(s)),
    "loss_weights": part_of("loss.type"),
    "rpo_alpha": part_of("loss.type", "a term sft; its mean is over the tokens of the whole step"),
    "label_smoothing": to("loss.label_smoothing", reads("label_smoothing")),
    "f_divergence_type": to("loss.f_divergence", lambda value, s: str(value).rsplit(".", 1)[-1].lower()),
    "f_alpha_divergence_coef": to(
        "loss.f_alpha",
        lambda value, s: (
            value if s.get("f_divergence_type") == "alpha_divergence" else Unneeded("another divergence")
        ),
    ),
    "ld_alpha": to("loss.ld_alpha"),
    "discopop_tau": to("loss.discopop_tau", reads("discopop_tau")),
    "use_weighting": to("loss.weighting", if_on("wpo"), "true: wpo"),
    "router_aux_loss_coef": to("loss.router_aux_coef"),
    "ref_model": to("reference.path"),
    "sync_ref_model": to(
        "reference.sync",
        lambda value, s: (
            {"every_steps": s.get("ref_model_sync_steps", 512), "mixup": s.get("ref_model_mixup_alpha", 0.6)}
            if value
            else Unneeded("it is off")
        ),
    ),
    **each("ref_model_sync_steps ref_model_mixup_alpha", part_of("reference.sync")),
    "disable_dropout": Rule(remark="there is no dropout in training", is_needed=False, convert=_no_dropout),
    **as_unneeded(
        {
            "model.attention auto takes the first backend that is exact": "attn_implementation",
            "adapters are for causal language models, without biases": """
            lora_task_type lora_bias lora_inference_mode""",
            "quantisation has no options here": "bnb_4bit_* use_bnb_nested_quant",
            "pairs are tokenised once and cached": """
            dataset_streaming streaming dataset_num_proc preprocessing_num_workers tokenize_num_proc""",
            "the reference's log-probs are always computed before and cached": "precompute_ref_log_probs",
            "reference.token_budget auto finds it": "precompute_ref_batch_size reference_model_*",
            "nothing is padded": "padding_free pad_to_multiple_of pad_token padding_value label_pad_token_id",
            "packing.token_budget bounds memory; distributed.strategy auto shards where needed": """
            activation_offloading use_liger_loss device_map low_cpu_mem_usage""",
            "dpo-pack starts its own processes; see docs/distributed.md": "ignore_bias_buffers",
            "dpo-pack reads the tokenizer beside the model": "processing_class tokenizer",
            "dpo-pack finds the parts of the model itself": "base_model_attribute_name",
            "tools come from the column tools of each row": "tools",
            "logging.samples writes completions of held-out prompts": "generate_during_eval",
            "the reference is the starting policy, or the model in reference.path": """
            *_adapter_name force_use_ref_model""",
            "set environment variables in your shell": "env",
        }
    ),
    **as_absent(
        {
            "set these options in sections model, tokenizer and reference": "*_init_kwargs",
            "only adapters are trained": "lora_modules_to_save",
            "adapters are on linear layers only": "lora_target_parameters",
            "plain LoRA is trained": "use_dora",
            "only the sum of prompt and completion is limited, by data.max_length": "max_completion_length",
            "every DPO loss compares with the reference; simpo, orpo and cpo do not": "reference_free",
        }
    ),
}
