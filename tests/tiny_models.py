"""Tiny random models of several families, built in code."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITHOUT_HEAD_DIM = {key: value for key, value in _COMMON.items() if key != "head_dim"}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen3": _COMMON,
    # A window shorter than the test sequences, so that it matters.
    "mistral": {**_COMMON, "sliding_window": 7},
    # Softcaps low enough to bend, and alternating local and global layers.
    "gemma2": {
        **_COMMON,
        "sliding_window": 7,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "granite": {**_WITHOUT_HEAD_DIM, "logits_scaling": 4.0, "attention_multiplier": 0.3},
    "cohere": {**_WITHOUT_HEAD_DIM, "logit_scale": 0.3},
    "phi": {**_WITHOUT_HEAD_DIM, "partial_rotary_factor": 0.5},
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    config = CONFIG_MAPPING[family](**{**FAMILIES[family], **changes})
    assert isinstance(config, PretrainedConfig)
    return config


def tiny_model(family: str, *, seed: int = 0, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """Weights wide enough that attention and softcaps are far from uniform."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model
