"""What is known of a model before its weights are loaded: all that its log-probs depend on, parameters,
FLOPs, and the loss of a mixture of experts.

The load-balancing loss is that of transformers and TRL (Fedus et al. 2021, arXiv 2101.03961, equations 4 to
6), over all layers together:

    aux loss = E * sum over experts e of f_e * p_e

f_e is the number of times that tokens choose expert e, and p_e the sum of e's probabilities, both divided by
tokens x layers. A token chooses the `top_k` experts of the largest probabilities.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.model.config import attention_needs, count_experts, layer_windows, routes_tokens
from dpo_pack.model.fast_layers import feed_forwards, outermost_layers, text_model, tower_parameters
from dpo_pack.model.fingerprint import (
    NUMERICS_VERSION,
    adapter_fingerprint,
    modelling_source,
    relevant_config,
    weights_fingerprint,
)
from dpo_pack.model.loading import auto_class, load_errors, quiet_transformers
from dpo_pack.model.lora import quantization_settings
from dpo_pack.model.recurrence import recurrence_sizes
from dpo_pack.model.recurrence.kernels import KERNELS
from dpo_pack.model.scorer import Precision
from dpo_pack.packing.lengths import AttentionKind, ModelShape
from dpo_pack.recipe.schema import ModelRecipe
from dpo_pack.system import ranks
from dpo_pack.system.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBalance:
    """The load-balancing loss of a run."""

    coefficient: float  # > 0
    num_experts: int
    top_k: int  # experts that a token chooses


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What is known about a model without loading its weights. Cached properties take time to compute."""

    # The recipe's `model`, for this model: `path` and `revision` are of the base, if `adapter` is given. Only
    # the policy has `lora`, and only a model that trains or has an adapter has `quantize`.
    settings: ModelRecipe
    recipe_key: str  # the recipe key that error messages name
    adapter: Path | None  # the directory of a saved LoRA adapter; None also for a new adapter
    config: PretrainedConfig
    precision: Precision
    is_packed: bool
    cache_dir: Path
    router_aux_coef: float | None = 0.0  # of the recipe, for the policy; see `balance`
    processor: Any = None  # `ImageProcessor` of images in prompts; None: the model reads texts only
    keeps_squares: bool = False  # the scorer also gives what `loss.weighting: wpo` needs
    seed: int = 0  # of a new adapter's values

    @property
    def label(self) -> str:
        """The hub id or path by which the user named the model."""
        return self.settings.path if self.adapter is None else str(self.adapter)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How the weights are quantised, in the files or while they are loaded; None: not at all."""
        settings: dict[str, Any] | None = self.config.to_dict().get("quantization_config")
        if settings is None and self.settings.quantize is not None:
            return quantization_settings(self.settings.quantize).to_dict()
        return settings

    @functools.cached_property
    def architecture(self) -> PreTrainedModel:
        """The model on the meta device, without weights and adapters. Raises ModelError."""
        with load_errors(self.settings.path, self.recipe_key):
            return without_weights(self.config, trust_remote_code=self.settings.trust_remote_code)

    @functools.cached_property
    def num_parameters(self) -> int:
        return int(self.architecture.num_parameters())

    @functools.cached_property
    def tower_parameters(self) -> int:
        """The number of those outside of the language model, which no run trains."""
        return sum(parameter.numel() for parameter in tower_parameters(self.architecture))

    @functools.cached_property
    def shape(self) -> ModelShape:
        shape = model_shape(self.architecture, self.processor)
        trims_last_block = self.is_packed and self.balance is None
        return shape if trims_last_block else replace(shape, last_block_weights=0.0)

    @functools.cached_property
    def balance(self) -> RouterBalance | None:
        """The load-balancing loss of the policy's training; None: there is none. Raises RecipeError."""
        if not (self.router_aux_coef or routes_tokens(self.config)):
            return None
        return router_balance(self.architecture, self.router_aux_coef)

    @functools.cached_property
    def namespace(self) -> dict[str, Any]:
        """All facts besides token ids that the model's log-probs depend on, as a JSON object. All ranks must
        read it together: rank 0 hashes all weights, the others read its file of hashes. Raises ModelError."""
        precision = self.precision
        autocast = None if precision.autocast is None else str(precision.autocast).removeprefix("torch.")
        with ranks.first_goes_first():
            namespace: dict[str, Any] = {
                "numerics_version": NUMERICS_VERSION,
                **self.read_fingerprints(),
                "config": relevant_config(self.config),
                "parameters": str(precision.parameters).removeprefix("torch."),
                "autocast": autocast,
                "modelling_source": modelling_source(self.architecture),
            }
            if precision.gathered is not None:  # without it no key, so that other namespaces stay the same
                namespace["gathered"] = str(precision.gathered).removeprefix("torch.")
            if autocast is not None and routes_tokens(self.config):
                namespace["experts"] = autocast  # once they were in the parameters' dtype
            if self.settings.quantize is not None:
                namespace["quantized"] = self.settings.quantize
            if self.processor is not None:
                namespace["whole_config"] = relevant_config(self.config, whole=True)
        return namespace

    def read_fingerprints(self) -> dict[str, str]:
        """Returns the part of `namespace` that is in files of weights, as they are now. Raises ModelError."""
        memo = self.cache_dir / "model_hashes.json"
        found = {"weights": weights_fingerprint(self.settings.path, self.settings.revision, memo)}
        if self.adapter is not None:
            found["adapter"] = adapter_fingerprint(self.adapter, memo)
        return found


def without_weights(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Builds the architecture on the meta device."""
    with quiet_transformers(), torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    assert isinstance(model, PreTrainedModel)
    return model


def model_shape(model: PreTrainedModel, processor: Any = None) -> ModelShape:
    """Counts what a model's FLOPs depend on: of routed experts those that a token uses, and no embeddings.
    `processor`: of images, if rows have some."""
    head = model.get_output_embeddings().weight
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    skipped = {id(weight) for weight in (*embeddings, head)}
    text = model.config.get_text_config()
    experts = count_experts(text.to_dict()) if routes_tokens(model.config) else (1.0, 1.0)
    _, last_block = feed_forwards(model)[-1]
    read, recurrent = text_model(model), list[tuple[float, float]]()
    if KERNELS.keys() & vars(sys.modules[type(read).__module__]).keys():  # its code calls such functions
        recurrent = [recurrence_sizes(module) for module in read.modules()]
    attention: tuple[AttentionKind, ...] = ()
    if "num_attention_heads" in text.to_dict().keys() | text.attribute_map.keys():  # not a state-space model
        needs = attention_needs(model.config)
        width = int(text.num_attention_heads) * (needs.head_dim + needs.value_head_dim)
        counts = Counter(layer_windows(model.config)).items()
        attention = tuple(AttentionKind(num_layers=n, width=width, window=window) for window, n in counts)
    return ModelShape(
        token_weights=_token_weights(read, experts, skipped),
        head_weights=int(head.numel()),
        attention=attention,
        state_products=sum(products for products, _ in recurrent),
        kept_numbers=sum(kept for _, kept in recurrent),
        last_block_weights=0.0 if last_block is None else _token_weights(last_block, experts, skipped),
        image_token=-1 if processor is None else model.config.image_token_id,
        image_flops=0.0 if processor is None else image_flops(model, processor),
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


def image_flops(model: PreTrainedModel, processor: Any) -> float:
    """Returns the FLOPs of the tower's weights, without its attention, for each placeholder of an image of
    512 x 512, forward only. Weights in layers, and the first, which makes patches of pixels, multiply each
    patch; the others multiply each token of an image."""
    towers, kinds = tower_parameters(model), (nn.Linear, nn.Conv2d, nn.Conv3d)
    first, *others = (m.weight for m in model.modules() if isinstance(m, kinds) and m.weight in towers)
    in_layers = {weight for layer in outermost_layers(model) for weight in layer.parameters()}
    of_patches = first.numel() + sum(weight.numel() for weight in others if weight in in_layers)
    of_tokens = sum(weight.numel() for weight in others if weight not in in_layers)
    pixels = processor.pixel_inputs([np.zeros((512, 512, 3), dtype=np.uint8)])["pixel_values"]
    num_tokens = processor.image_ids(512, 512).count(model.config.image_token_id)
    patches_of_token: float = pixels.numel() / first[0].numel() / num_tokens
    return 2.0 * (of_patches * patches_of_token + of_tokens)


def router_balance(model: PreTrainedModel, coefficient: float | None) -> RouterBalance | None:
    """Returns the model's load-balancing loss; None if it has none. `coefficient`: `loss.router_aux_coef`;
    None: that of the model's config. Raises RecipeError if it is not 0 but the model has no such loss."""
    # Families whose code computes the loss can return their routers' logits.
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") and all(
        hasattr(model, name) for name in ("num_experts", "num_experts_per_tok")
    )
    if coefficient and not has_loss:
        what = "mixtures" if routes_tokens(model.config) else "models"
        raise RecipeError(
            f"loss.router_aux_coef: {coefficient:g} is set, but {model.config.model_type} {what} of "
            "transformers have no load-balancing loss; set it to 0 or null"
        )
    if coefficient is None:
        coefficient = _own_coefficient(model.config)
    if not coefficient or not has_loss:
        return None
    own: Any = model
    return RouterBalance(coefficient=coefficient, num_experts=own.num_experts, top_k=own.num_experts_per_tok)


def router_sentence(facts: ModelFacts) -> str:
    """Returns a line for the user about the policy's loss of a mixture of experts."""
    given, balance = facts.router_aux_coef, facts.balance
    source = "the model config's own" if given is None else "loss.router_aux_coef"
    if balance is None:
        own = _own_coefficient(facts.config) if given is None else given
        zero = "the model's config has no coefficient" if given is None else "loss.router_aux_coef: 0"
        reason = f"transformers' {facts.config.model_type} models have none" if own else zero
        return f"Router: no load-balancing loss ({reason})"
    return (
        f"Router: load-balancing loss x {balance.coefficient:g} ({source}), "
        f"{balance.num_experts} experts, {balance.top_k} a token"
    )


def _own_coefficient(config: PretrainedConfig) -> float:
    return getattr(config.get_text_config(), "router_aux_loss_coef", None) or 0.0
