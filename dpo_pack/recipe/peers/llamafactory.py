"""Translates the keys of a LLaMA-Factory config with `stage: dpo` (commit ff6d4d1) to recipe keys."""

import os
from functools import partial
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
    each,
    file_or_hub,
    held_out,
    if_on,
    lora,
    part_of,
    reads,
    to,
)
from dpo_pack.system.errors import RecipeError

_LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
# "formatting" in dataset_info.json, also the name of our format -> a key of its "columns" -> our name of this
# field of a pair.
_SAME = {name: name for name in ("chosen", "rejected", "system", "tools")}
_COLUMNS = {
    "sharegpt": {"messages": "conversations", **_SAME},
    "alpaca": {"prompt": "instruction", "query": "input", "history": "history", **_SAME},
}


def _stage(value: Any, settings: Settings) -> Any:
    if value != "dpo":
        raise RecipeError(f"stage: {value}: no training on preference pairs; dpo-pack reads stage: dpo")
    return Unneeded("dpo-pack trains on preference pairs only")


def _loss(value: Any, settings: Settings) -> Any:
    """Translates `pref_loss` and adds the loss terms that pref_ftx and pref_bco_weight ask for."""
    if value not in _LOSSES:
        raise RecipeError(f"pref_loss: {value}: dpo-pack has no such loss; it reads {', '.join(_LOSSES)}")
    bco, ftx = settings.get("pref_bco_weight") or 0.0, settings.get("pref_ftx") or 0.0
    terms = [(value, 1.0 / (1.0 + bco)), ("bco_pair", bco / (1.0 + bco)), ("sft", ftx)]
    terms = [(name, weight) for name, weight in terms if weight]
    if len(terms) == 1:
        return value
    remark = "sft: a mean over the tokens of the step; in LLaMA-Factory over its pairs" if ftx else ""
    return Known({"loss.type": [{"type": name, "weight": weight} for name, weight in terms]}, remark)


def _finetuning(value: Any, settings: Settings) -> Any:
    if value == "full":
        return Unneeded("all parameters are trained by default")
    if value != "lora":
        raise RecipeError(
            f"finetuning_type: {value}: dpo-pack trains all parameters (full) or LoRA adapters (lora)"
        )
    rank, targets = settings["lora_rank"], settings.get("lora_target", "all")
    return lora(
        True,
        {
            "lora_r": rank,
            "lora_alpha": settings.get("lora_alpha") or 2 * rank,
            "lora_dropout": settings.get("lora_dropout", 0.0),
            "lora_target_modules": "all-linear" if targets == "all" else targets,
            "use_rslora": settings.get("use_rslora"),
        },
    )


def _sources(key: str, value: Any, settings: Settings) -> Known:
    """Translates the names in `dataset` or `eval_dataset` to sources for the recipe key `key`.

    settings: `#info` is the content of dataset_info.json, `#info_dir` the directory of this file.
    """
    described, sources, remarks = settings["#info"], [], []
    for name in value.split(",") if isinstance(value, str) else value:
        info = described.get(name.strip())
        if info is None:
            raise RecipeError(
                f"dataset {name.strip()}: not in dataset_info.json, which has {', '.join(described)}"
            )
        if not info.get("ranking"):
            raise RecipeError(
                f"dataset {name.strip()}: no preference data (dataset_info.json has no ranking: true)"
            )
        formatting, columns = info.get("formatting") or "alpaca", info.get("columns") or {}
        if formatting not in _COLUMNS:
            raise RecipeError(
                f"dataset {name.strip()}: formatting {formatting} in dataset_info.json; dpo-pack translates "
                f"{' and '.join(_COLUMNS)}"
            )
        file = info.get("file_name")
        if info.get("images") or "images" in columns:
            remarks.append(f"{name} has images, which dpo-pack does not read")
        if info.get("tags"):
            remarks.append(f"{name} has tags: dpo-pack reads from, value, role, content and the usual roles")
        sources += file_or_hub(
            info.get("hf_hub_url") or os.path.join(settings["#info_dir"], file or ""),
            None,
            config=info.get("subset"),
            data_dir=info.get("folder"),
            split=info.get("split"),
            max_pairs=settings.get("max_samples") or info.get("num_samples"),
            format=formatting,
            columns={
                ours: columns[theirs]
                for theirs, ours in _COLUMNS[formatting].items()
                if theirs in columns and columns[theirs] not in (ours, None)
            },
        )
    remarks.append("rows get the tokenizer's chat template: look at some with dpopack show")
    return Known({key: sources}, "; ".join(remarks))


def _quantize(value: Any, settings: Settings) -> Any:
    return {4: "nf4", 8: "int8"}.get(value, Absent("the base is trained on unquantised"))


_CUT = "LLaMA-Factory cuts the ends of prompts too; here a pair whose prompt alone is too long is dropped"
_TEMPLATE = (
    "prompts get the tokenizer's own chat template. To keep another one, write it into a Jinja file and name "
    "the file in tokenizer.chat_template; the tokenizer must have its special tokens. Look at dpopack show"
)

LLAMAFACTORY: Table = {
    **TRANSFORMERS,
    "stage": Rule(remark="dpo-pack trains on preference pairs only", is_needed=False, convert=_stage),
    "model_name_or_path": to("model.path"),
    "model_revision": to(
        "model.revision", lambda value, s: Unneeded("the default") if value == "main" else value
    ),
    "trust_remote_code": to("model.trust_remote_code"),
    "finetuning_type": to("model.lora", _finetuning, "lora, which is LLaMA-Factory's default"),
    **each(
        "lora_rank lora_alpha lora_dropout lora_target use_rslora",
        part_of("model.lora", "with finetuning_type lora"),
    ),
    "pref_loss": to("loss.type", _loss),
    **each("pref_ftx pref_bco_weight", part_of("loss.type", "another term")),
    "pref_beta": to("loss.beta"),
    "dpo_label_smoothing": to("loss.label_smoothing", reads("label_smoothing")),
    "simpo_gamma": to(
        "loss.simpo_gamma",
        lambda value, s: value if s["pref_loss"] == "simpo" else Unneeded("only simpo reads it"),
    ),
    "ld_alpha": to("loss.ld_alpha", comment="it multiplies the reference's log-probs too"),
    "ref_model": to("reference.path"),
    "dataset": to("data.train", partial(_sources, "data.train"), "as dataset_info.json describes it"),
    "eval_dataset": to("data.eval", partial(_sources, "data.eval"), "as dataset_info.json describes it"),
    **each("dataset_dir max_samples", part_of("data.train")),
    "val_size": to("data.eval", held_out, "a fraction"),
    "cutoff_len": to(
        "data.max_length",
        lambda value, s: Known({"data.max_length": value, "data.truncation": "completion_right"}, _CUT),
    ),
    "default_system": to("data.system_prompt"),
    "disable_shuffling": to("data.shuffle", lambda value, s: not value),
    "pure_bf16": to("model.dtype", if_on("bfloat16"), "true: bfloat16"),
    "disable_gradient_checkpointing": to("model.gradient_checkpointing", lambda value, s: not value),
    "enable_liger_kernel": TRANSFORMERS["use_liger_kernel"],
    "moe_aux_loss_coef": to("loss.router_aux_coef"),
    "quantization_bit": to("model.quantize", _quantize, QUANTIZE),
    "early_stopping_steps": to("train.early_stopping", lambda value, s: {"patience": value}),
    "use_swanlab": to("logging.trackers", if_on(["swanlab"]), "swanlab"),
    "swanlab_run_name": to("logging.run_name"),
    **as_unneeded(
        {
            "model.attention auto takes the first backend that is exact": "flash_attn",
            "options of methods that dpo-pack does not have": "galore_* apollo_* badam_* freeze_* oft_*",
            "pairs are tokenised once and cached, and only completions are scored": """
            overwrite_cache preprocessing_* streaming buffer_size cache_dir media_dir
            data_shared_file_system train_on_prompt mask_history""",
            "each held-out set has metrics of its own": "eval_on_each_dataset",
            "quantisation has no options here": "quantization_* double_quantization",
            "nothing is padded": "packing neat_packing ignore_pad_token_for_loss",
            "the tokenizer is used as it is": """
            use_fast_tokenizer resize_vocab split_special_tokens add_tokens add_special_tokens""",
            "packing.token_budget bounds memory; distributed.strategy auto shards where needed": """
            upcast_* use_unsloth* use_reentrant_gc low_cpu_mem_usage use_kv_cache use_v1_kernels kt_* use_kt
            ray_* use_ray offload_folder""",
            "it is not for DPO training": """
            kto_* ppo_* reward_model* use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha
            compute_accuracy infer_* vllm_* sglang_* export_* image_* video_* predict_with_generate
            print_param_status""",
        }
    ),
    **as_absent(
        {
            "to train an adapter further, name its directory in model.path": "adapter_name_or_path",
            "only adapters are trained": "additional_target",
            "plain LoRA is trained": "use_dora loraplus_* pissa_* create_new_adapter",
            "name a merged model in reference.path": "ref_model_adapters ref_model_quantization_bit",
            _TEMPLATE: """
            template tool_format enable_thinking preserve_thinking""",
            "an epoch has each source once; data.train.N.weight changes this": "mix_strategy",
            "data.train.N.weight says how often an epoch has a source's pairs": "interleave_probs",
            "pairs are tokenised once and cached; or give rows of format tokenized": "tokenized_path",
            "dpo-pack has nothing like it": """
            use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro shift_attn
            mixture_of_depths rope_scaling""",
            "set it in the environment variables of the tracker or hub": """
            swanlab_* hf_hub_token ms_hub_token om_hub_token""",
        }
    ),
}
