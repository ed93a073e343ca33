"""A model's shape for the cost model, from its config: the architecture is built without any weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dpo_pack.data.flops import AttentionKind, ModelShape
from dpo_pack.last_layer import last_feed_forward
from dpo_pack.model_config import attention_needs, count_experts, layer_windows

# Layers that cost the same for every token, wherever it stands: no area, only their weights.
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"})


def model_shape(config: PretrainedConfig, *, trust_remote_code: bool = False) -> ModelShape:
    """What of the model decides its FLOPs.

    Weights are counted on a copy of the architecture on the meta device, so every family is counted as it
    is: grouped-query and latent attention, gated or plain feed-forward layers, shared experts. Of routed
    experts the active part counts. Embeddings do not: looking a row up multiplies nothing.
    """
    model = without_weights(config, trust_remote_code=trust_remote_code)
    values, block = config.get_text_config().to_dict(), last_feed_forward(model)
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    skipped = {id(weight) for weight in (*embeddings, model.get_output_embeddings().weight)}
    return ModelShape(
        token_weights=_token_weights(model, values, skipped),
        head_weights=int(model.get_output_embeddings().weight.numel()),
        attention=attention_kinds(config),
        last_block_weights=0.0 if block is None else _token_weights(block, values, skipped),
    )


def num_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> int:
    """How many parameters the model has, those of tied embeddings once."""
    model = without_weights(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def without_weights(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture on the meta device, which takes no memory."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    finally:
        transformers_logging.set_verbosity(verbosity)
    assert isinstance(model, PreTrainedModel)
    return model


def _token_weights(model: torch.nn.Module, values: dict[str, Any], skipped: set[int]) -> float:
    """Weights that multiply every token; `skipped` are embeddings and the head."""
    num_experts, num_active = count_experts(values)
    total = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or name.endswith("bias") or id(weight) in skipped:
            continue
        # Experts are one tensor with an expert a slice, or modules numbered below `experts`.
        is_routed = ".experts." in f".{name}" or (weight.ndim == 3 and weight.shape[0] == num_experts > 1)
        total += weight.numel() * (num_active / num_experts if is_routed else 1.0)
    return total


def attention_kinds(config: PretrainedConfig) -> tuple[AttentionKind, ...]:
    """The model's attention layers, alike ones together, in order of appearance."""
    text = config.get_text_config()
    known = text.to_dict().keys() | text.attribute_map.keys()
    if "num_attention_heads" not in known:  # state-space models
        return ()
    kinds = text.to_dict().get("layer_types")
    windows = layer_windows(config)
    counts = Counter(
        window
        for number, window in enumerate(windows)
        if kinds is None or kinds[number] not in _RECURRENT_LAYERS
    )
    needs = attention_needs(config)
    width = int(text.num_attention_heads) * (needs.head_dim + needs.value_head_dim)
    return tuple(AttentionKind(num_layers=n, width=width, window=window) for window, n in counts.items())
