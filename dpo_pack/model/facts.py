"""What is known of a model before its weights are loaded, and all that its log-probs depend on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.model.compiling import tower_parameters
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.fingerprint import (
    NUMERICS_VERSION,
    adapter_fingerprint,
    modelling_source,
    relevant_config,
    weights_fingerprint,
)
from dpo_pack.model.loading import load_errors
from dpo_pack.model.lora import LoraSettings
from dpo_pack.model.quantize import Quantization, quantization_settings
from dpo_pack.model.scorer import Precision
from dpo_pack.model.shape import RouterBalance, model_shape, router_balance, without_weights
from dpo_pack.packing.lengths import ModelShape
from dpo_pack.system import ranks


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What is known about a model without loading its weights. Cached properties take time to compute."""

    path: str  # a hub id or a directory: of the base model, if `adapter` is given
    revision: str | None
    recipe_key: str  # the recipe key that error messages name
    adapter: Path | None  # the directory of a saved LoRA adapter; None also for a new adapter
    config: PretrainedConfig
    trust_remote_code: bool
    precision: Precision
    is_packed: bool
    cache_dir: Path
    router_aux_coef: float | None = 0.0  # of the recipe, for the policy; see `balance`
    quantize: Quantization | None = None  # how the weights are quantised while they are loaded
    processor: Any = None  # `ImageProcessor` of images in prompts; None: the model reads texts only
    new_adapter: LoraSettings | None = None  # the adapter that the policy gets for its training
    # Settings of the recipe for loading the model:
    attention: str = "auto"
    kernels: str = "none"
    compile: bool | Literal["auto"] = False
    gradient_checkpointing: bool | Literal["selective"] = False
    activation_offload: bool = False
    mlp_tile_tokens: int | None = None
    refuses_unused: bool = False  # tensors of the checkpoint
    keeps_squares: bool = False  # the scorer also gives what `loss.weighting: wpo` needs

    @property
    def label(self) -> str:
        """The hub id or path by which the user named the model."""
        return self.path if self.adapter is None else str(self.adapter)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How the weights are quantised, in the files or while they are loaded; None: not at all."""
        settings: dict[str, Any] | None = self.config.to_dict().get("quantization_config")
        if settings is None and self.quantize is not None:
            return quantization_settings(self.quantize).to_dict()
        return settings

    @functools.cached_property
    def architecture(self) -> PreTrainedModel:
        """The model on the meta device, without weights and adapters. Raises ModelError."""
        with load_errors(self.path, self.recipe_key):
            source = f"{self.recipe_key}: {self.path}"
            return without_weights(self.config, trust_remote_code=self.trust_remote_code, source=source)

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
        """All facts besides token ids that the model's log-probs depend on, as a JSON object.

        All ranks must read it together: rank 0 hashes all weights, the others read its file of hashes. Raises
        ModelError when weights are missing or unreadable."""
        memo, precision = self.cache_dir / "model_hashes.json", self.precision
        autocast = None if precision.autocast is None else str(precision.autocast).removeprefix("torch.")
        with ranks.first_goes_first():
            namespace: dict[str, Any] = {
                "numerics_version": NUMERICS_VERSION,
                "weights": weights_fingerprint(self.path, self.revision, memo),
                "config": relevant_config(self.config),
                "parameters": str(precision.parameters).removeprefix("torch."),
                "autocast": autocast,
                "modelling_source": modelling_source(self.architecture),
            }
            if precision.gathered is not None:  # without it no key, so that other namespaces stay the same
                namespace["gathered"] = str(precision.gathered).removeprefix("torch.")
            if autocast is not None and routes_tokens(self.config):
                namespace["experts"] = autocast  # once they were in the parameters' dtype
            if self.quantize is not None:
                namespace["quantized"] = self.quantize
            if self.processor is not None:
                namespace["whole_config"] = relevant_config(self.config, whole=True)
            if self.adapter is not None:
                namespace["adapter"] = adapter_fingerprint(self.adapter, memo)
        return namespace
