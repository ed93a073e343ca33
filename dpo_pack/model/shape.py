"""Counts parameters and FLOPs of a model that is built without weights, on the meta device.

A build takes time, so a caller builds the model once, with `without_weights`, for all functions.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dpo_pack.model.config import attention_needs, count_experts, layer_windows
from dpo_pack.model.last_layer import last_feed_forward
from dpo_pack.model.loading import quiet_transformers
from dpo_pack.model.recurrence import kept_numbers, state_products
from dpo_pack.packing.lengths import AttentionKind, ModelShape


def without_weights(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds the architecture on the meta device, where it takes no memory. Does not change the config."""
    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    assert isinstance(model, PreTrainedModel)
    return model


def num_parameters(model: PreTrainedModel) -> int:
    """Returns the number of the model's parameters. Tied embeddings count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Counts, from the modules of a model of any family, the numbers that its FLOPs depend on.

    Of routed experts only as many count as one token uses. Embeddings do not count: they multiply nothing.
    """
    head = model.get_output_embeddings().weight
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    skipped = {id(weight) for weight in (*embeddings, head)}
    experts = count_experts(model.config.get_text_config().to_dict())
    block = last_feed_forward(model)
    text = model.config.get_text_config()
    attention: tuple[AttentionKind, ...] = ()
    if "num_attention_heads" in text.to_dict().keys() | text.attribute_map.keys():  # not a state-space model
        needs = attention_needs(model.config)
        width = int(text.num_attention_heads) * (needs.head_dim + needs.value_head_dim)
        counts = Counter(layer_windows(model.config))
        attention = tuple(
            AttentionKind(num_layers=number, width=width, window=window) for window, number in counts.items()
        )
    return ModelShape(
        token_weights=_token_weights(model, experts, skipped),
        head_weights=int(head.numel()),
        attention=attention,
        state_products=sum(state_products(module) for module in model.modules()),
        kept_numbers=sum(kept_numbers(module) for module in model.modules()),
        last_block_weights=0.0 if block is None else _token_weights(block, experts, skipped),
    )


def _token_weights(module: torch.nn.Module, experts: tuple[float, float], skipped: set[int]) -> float:
    """Counts the weights that multiply every token. `skipped`: ids of the embeddings and of the head."""
    num_experts, num_active = experts
    total = 0.0
    for name, weight in module.named_parameters():
        if weight.ndim < 2 or name.endswith("bias") or id(weight) in skipped:
            continue
        # Experts are slices of one tensor, or numbered modules in a module named `experts`.
        is_routed = ".experts." in f".{name}" or (weight.ndim == 3 and weight.shape[0] == num_experts > 1)
        total += weight.numel() * (num_active / num_experts if is_routed else 1.0)
    return total
