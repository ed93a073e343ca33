"""LoRA through peft: low-rank adapters on a frozen base (Hu et al. 2021, arXiv 2106.09685).

An adapted layer computes `W x + (alpha / r) B A x`; only A [r, in] and B [out, r] are trained. A new adapter
starts with B = 0, so the reference is the base model. Only the functions that need peft import it.

Legend: V vocabulary, D hidden size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dpo_pack.system.errors import ModelError, first_line
from dpo_pack.system.files import read_json
from dpo_pack.system.hub import is_adapter
from dpo_pack.system.machine import install_command

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModelForCausalLM

# Families in which peft refuses adapters of the projection behind the recurrence (`out_proj`), because
# kernels of mamba-ssm read its weight directly.
_MAMBA_FAMILIES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_NAME = "default"  # peft's default; peft saves an adapter of another name in a subfolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Settings of a new adapter. `seed` decides the values of A; B is 0."""

    r: int
    alpha: float
    dropout: float
    target_modules: str | tuple[str, ...]  # "all-linear", or modules' names or the ends of such names
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter's directory and the model it was trained on."""

    directory: Path
    base: str  # hub id or local directory
    base_revision: str | None
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdapterConfig:
    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int = 8  # peft's default
    alora_invocation_tokens: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that is attached to a model."""

    peft_model: PeftModelForCausalLM
    base: str
    is_new: bool  # not loaded from files; then the policy starts equal to the base
    dropouts: tuple[nn.Dropout, ...]
    left_out: tuple[str, ...]  # names of linear layers that all-linear leaves out, because peft refuses them

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Context for the reference: switches a new adapter off. A saved adapter is part of the reference."""
        if not self.is_new:
            yield
            return
        trained = [parameter for parameter in self.peft_model.parameters() if parameter.requires_grad]
        with self.peft_model.disable_adapter():
            for parameter in trained:  # peft froze them, but FSDP2's first forward must see them trained
                parameter.requires_grad_(True)
            yield

    def set_dropout(self, is_on: bool) -> None:
        """Switches the adapter's dropout on or off. Other modules always stay in evaluation mode."""
        for dropout in self.dropouts:
            dropout.training = is_on

    def head_weights(self, head: Any) -> tuple[Tensor, Tensor | None]:
        """Returns weight [V, D] and bias [V] of the head with its adapter, differentiable in the adapter."""
        from peft.tuners.lora import Linear as LoraLinear
        from peft.utils import ModulesToSaveWrapper

        if isinstance(head, ModulesToSaveWrapper):
            head = head.original_module if head.disable_adapters else head.modules_to_save[_NAME]
        if not isinstance(head, LoraLinear):
            return head.weight, head.bias
        plain: Any = head.get_base_layer()
        if head.disable_adapters:
            return plain.weight, plain.bias
        return plain.weight + head.get_delta_weight(_NAME), plain.bias

    def save(self, directory: Path, state: dict[str, Tensor] | None = None) -> None:
        """Writes the adapter, without its base. `state` holds the whole tensors of a sharded model."""
        named = None if state is None else {f"base_model.model.{name}": t for name, t in state.items()}
        # By default peft asks the hub whether the vocabulary has grown. Training never changes it.
        self.peft_model.save_pretrained(str(directory), save_embedding_layers=False, state_dict=named)

    def merge(self) -> PreTrainedModel:
        """Adds the adapter to the base's weights and returns the base. Raises ModelError if this fails."""
        with _one_line(f"cannot merge the adapter into {self.base}"):
            merged: PreTrainedModel = self.peft_model.merge_and_unload(safe_merge=True)
        return merged


def require_peft(key: str) -> None:
    """Raises ModelError when peft is not installed; `key` is the recipe key that needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{key}: an adapter needs peft, which is not installed; {install_command('peft')}")


def read_adapter(directory: Path, key: str) -> SavedAdapter:
    """Reads an adapter's config. Raises ModelError if the adapter cannot be used; the error names `key`."""
    file = directory / "adapter_config.json"
    config: _AdapterConfig | None = read_json(file, _AdapterConfig)
    if config is None:
        raise ModelError(f"{key}: {file} cannot be read; save the adapter again")
    if config.peft_type != "LORA" or config.alora_invocation_tokens:
        kind = "aLoRA" if config.alora_invocation_tokens else config.peft_type
        raise ModelError(
            f"{key}: {directory} is a {kind} adapter, and only LoRA adapters can be used; merge it first"
        )
    base = config.base_model_name_or_path
    if not base:
        raise ModelError(
            f"{key}: {file} does not name the model it belongs to; set its base_model_name_or_path"
        )
    if is_adapter(base):
        raise ModelError(f"{key}: {directory} is an adapter of another adapter, {base}; merge that one first")
    return SavedAdapter(directory=directory, base=base, base_revision=config.revision, rank=config.r)


def plain_name(name: str) -> str | None:
    """Returns a tensor's name in the model without adapter; None for LoRA's and for replaced tensors."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
        return None
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        del parts[place : place + 2]  # removes it and the adapter's name behind it
    return ".".join(part for part in parts if part != "base_layer")


def attach_adapter(
    model: PreTrainedModel,
    adapter: LoraSettings | Path,
    *,
    base: str,
    revision: str | None,
    recipe_key: str,
    reads_weights: bool,
) -> Adapter:
    """Puts a new or a saved adapter into `model`, in place; after that, only the adapter is trained.

    `base` and `revision` name the source of the model. Without `reads_weights`, the adapter's parameters have
    no values. Raises ModelError when the adapter does not fit or would not be exact.
    """
    require_peft(recipe_key)
    is_new = isinstance(adapter, LoraSettings)
    key = "model.lora" if is_new else recipe_key
    local = os.path.abspath(base) if os.path.isdir(base) else base
    with _one_line(f"{key}: the adapter does not fit {base}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our own checks follow
        if isinstance(adapter, LoraSettings):
            peft_model = _attach_new(model, adapter)
        else:
            peft_model = _attach_saved(model, adapter, reads_weights=reads_weights)
    config: Any = peft_model.peft_config[_NAME]
    config.base_model_name_or_path, config.revision = local, revision
    _check_embeddings(model, key, is_new=is_new)
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    dropouts = [part for layer in layers for part in layer.lora_dropout.values()]
    return Adapter(
        peft_model=peft_model,
        base=base,
        is_new=is_new,
        # A saved adapter trains without dropout.
        dropouts=tuple(part for part in dropouts if is_new and isinstance(part, nn.Dropout)),
        left_out=tuple(config.exclude_modules or ()) if is_new else (),
    )


def _attach_new(model: PreTrainedModel, settings: LoraSettings) -> PeftModelForCausalLM:
    from peft import LoraConfig, PeftModelForCausalLM

    targets = settings.target_modules
    is_refused = model.config.model_type in _MAMBA_FAMILIES and isinstance(targets, str)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor; peft's annotation is too narrow
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=["out_proj"] if is_refused else None,
        task_type="CAUSAL_LM",
    )
    # peft draws A on the CPU, so that the seed alone decides the adapter, not the device.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        peft_model = PeftModelForCausalLM(model, config, adapter_name=_NAME)
    names: list[str] = vars(peft_model.base_model)["targeted_module_names"]
    for target in () if isinstance(targets, str) else targets:  # peft only checks that one name matches
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(f"the model has no linear module named {target}; correct target_modules")
    return peft_model


def _attach_saved(model: PreTrainedModel, directory: Path, *, reads_weights: bool) -> PeftModelForCausalLM:
    from peft import PeftConfig, PeftModelForCausalLM

    config: LoraConfig = PeftConfig.from_pretrained(str(directory))
    config.inference_mode = False
    peft_model = PeftModelForCausalLM(model, config, adapter_name=_NAME)
    if not reads_weights:
        return peft_model
    # By default peft reads the weights onto the first GPU, in every process.
    device = str(next(model.parameters()).device)
    loading: Any = peft_model.load_adapter(str(directory), _NAME, is_trainable=True, torch_device=device)
    missing = [key for key in loading.missing_keys if _NAME in key.split(".")]
    if missing:
        raise ValueError(f"its weights lack {missing[0]}")
    if loading.unexpected_keys:
        raise ValueError(f"the model has no layer for its weight {loading.unexpected_keys[0]}")
    return peft_model


def _check_embeddings(model: PreTrainedModel, key: str, *, is_new: bool) -> None:
    """Refuses an adapter of tied embeddings, and one of the head that `head_weights` cannot compute."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    head = model.get_output_embeddings()
    adapted = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    changes_head = isinstance(head, adapted)
    changes_any = changes_head or isinstance(model.get_input_embeddings(), adapted)
    if changes_any and model.config.get_text_config().tie_word_embeddings:
        raise ModelError(
            f"{key}: the adapter changes the embeddings or the output head, which are one tensor in this "
            "model, so a merged model would compute something else; leave embed_tokens and lm_head out"
        )
    is_plain = isinstance(head, ModulesToSaveWrapper)
    if isinstance(head, LoraLinear) and not head.lora_variant and not head.lora_bias[_NAME]:
        is_plain = not (is_new and isinstance(head.lora_dropout[_NAME], nn.Dropout))
    if changes_head and not is_plain:
        raise ModelError(
            f"{key}: the adapter changes the output head in a way that is not supported here (supported: "
            "modules_to_save, and plain LoRA without dropout); leave the head out of target_modules"
        )


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns peft's errors, which may be long, into a ModelError of one line."""
    try:
        yield
    except Exception as error:  # the adapter's files decide the error's class
        is_pickle = isinstance(error, pickle.UnpicklingError)
        reason = first_line(error) if is_pickle else " ".join(str(error).split())[:200]
        raise ModelError(f"{what}: {reason.rstrip('.') or type(error).__name__}") from error
