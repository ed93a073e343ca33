"""Tiny random models of every family in dpo_pack/model/config.py, built in code."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 96

# What every config gets of these, if it knows the key.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
# A window shorter than the test sequences, so that it matters, on one of the two layers.
_LOCAL: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
# Low enough to bend.
_SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
_GRANITE = {
    "logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
_GROUPED_EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": _LINEAR_AND_FULL,
}  # fmt: skip
_KIMI: dict[str, Any] = {
    **_MLA, "num_experts_per_token": 2, "layer_types": _LINEAR_AND_FULL,
    "mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8, "linear_num_heads": 4,
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_LOCAL, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {**_KIMI, "num_expert_group": 2, "topk_group": 1},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**_LOCAL, "logit_scale": 0.3},
    "cohere2_moe": {**_LOCAL, "logit_scale": 0.3},
    "cwm": _LOCAL,
    "deepseek_v2": {**_MLA, **_GROUPED_EXPERTS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_MLA, **_GROUPED_EXPERTS},
    "dots1": {**_GROUPED_EXPERTS, **_LOCAL},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_end_index": 1},
    "exaone4": _LOCAL,
    "exaone_moe": _LOCAL,
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {**_LOCAL, **_SOFTCAPS},
    "gemma3_text": {**_LOCAL, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "final_logit_softcapping": 2.0,
    },
    "gemma4_text": {
        **_LOCAL, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 2.0, "num_experts": None,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_GROUPED_EXPERTS, "use_qk_norm": True},
    "glm4_moe_lite": {**_MLA, **_GROUPED_EXPERTS},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {**_LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE, **_MAMBA2, "shared_intermediate_size": 24, "layer_types": _LINEAR_AND_FULL,
    },
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 24},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "hyperclovax": {**_GRANITE, "logits_scaling": 0.3},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {**_KIMI, "q_lora_rank": None},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        "num_hidden_layers": 3, "sliding_window": 7,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "llama": {},
    # One chunk holds the longest test sequence.
    "llama4_text": {
        "intermediate_size_mlp": 48, "moe_layers": [1],
        "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 64,
        "no_rope_layers": [1, 0],
    },
    "longcat_flash": {
        **_MLA,
        "num_layers": 2,
        "num_hidden_layers": 4,  # two attentions each
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 24,
    },
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "minicpm3": {**_MLA, "dim_model_base": 8, "scale_emb": 3},
    "minimax_m2": {},
    "ministral": _LOCAL,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "mistral": {"sliding_window": 7},
    "mixtral": {"sliding_window": 7},
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron_h": {
        "layer_types": _LINEAR_AND_FULL, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "chunk_size": 16,
    },
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": _LOCAL,
    "olmo_hybrid": _DELTA_NET,
    "olmoe": {"clip_qkv": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 7},
    "phimoe": {"lm_head_bias": True, "attention_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3": {},
    "qwen3_5_moe_text": {**_DELTA_NET, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_moe": {},
    "qwen3_next": {**_DELTA_NET, "shared_expert_intermediate_size": 24},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 7},
    "vaultgemma": {**_LOCAL, **_SOFTCAPS},
    "zamba2": {
        "layers_block_type": ["hybrid", "linear_attention"], "mamba_d_state": 8, "n_mamba_heads": 4,
        "mamba_headdim": 16, "num_mem_blocks": 1, "attention_head_dim": 16, "chunk_size": 16,
    },
    # From here on packing is refused.
    "bloom": {},
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "falcon": {},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "minimax": {"layer_types": _LINEAR_AND_FULL, "block_size": 16},
    "mpt": {},
    "nemotron": {},
    "qwen4_exp_text": {
        **_DELTA_NET, "layer_types": ["linear_attention", "indexed_attention"],
        "shared_expert_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1],
        "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 97, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 7,
        "logits_soft_cap": 2.0,
    },
    "rwkv": {"attention_hidden_size": 32},
    "stablelm": {},
    "xlstm": {"num_heads": 4, "output_logit_soft_cap": 2.0},
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    config_class = CONFIG_MAPPING[family]
    known = config_class().to_dict().keys() | config_class.attribute_map.keys()
    common = {key: value for key, value in _COMMON.items() if key in known}
    config = config_class(**{**common, **FAMILIES[family], **changes})
    assert isinstance(config, PretrainedConfig)
    return config


def tiny_model(
    family: str, *, seed: int = 0, attention: str = "eager", experts: str | None = None, **changes: Any
) -> PreTrainedModel:
    """Weights wide enough that attention and softcaps are far from uniform.

    `experts` is transformers' `experts_implementation`; its own choice takes no float64.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **changes), attn_implementation=attention, experts_implementation=experts
    )
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # A trained model's sinks take much of the attention, random ones next to none.
                mean = 2.0 if name.endswith(".sinks") else 0.0
                parameter.add_(mean + 0.1 * torch.randn_like(parameter))
            elif "A_log" not in name:  # a logarithm of decay: eight times as much would forget everything
                parameter.mul_(8.0)
    model.eval()
    return model
