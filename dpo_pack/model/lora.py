"""LoRA through peft: low-rank adapters on a frozen base (Hu et al. 2021, arXiv 2106.09685).

An adapted layer computes `W x + (alpha / r) B A x`; only A [r, in] and B [out, r] are trained. A new adapter
starts with B = 0, so the reference is the base model. Only the functions that need peft import it.

The base may be quantised while it is loaded (`model.quantize`). nf4 is the 4-bit type of QLoRA, with
quantised scales (Dettmers et al. 2023, arXiv 2305.14314); int8 has a scale for each row of a weight.
bitsandbytes stores the weights; its products are not exact in packed rows, so a layer restores its weight.

Legend: V vocabulary, D hidden size or features in, O features out.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import os
import pickle
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import BitsAndBytesConfig, PreTrainedModel

from dpo_pack.model.fast_layers import tower_parameters
from dpo_pack.recipe.load import is_adapter
from dpo_pack.recipe.schema import LoraRecipe
from dpo_pack.system.errors import ModelError, first_line
from dpo_pack.system.files import read_json
from dpo_pack.system.machine import install_command, package_versions

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModelForCausalLM

# Families in which peft refuses adapters of the projection behind the recurrence (`out_proj`), because
# kernels of mamba-ssm read its weight directly.
_MAMBA_FAMILIES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_UNSET: tuple[Any, ...] = (None, False, "", [], {})  # values of a setting that change nothing
_NAME = "default"  # peft's default; peft saves an adapter of another name in a subfolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter's directory and the model it was trained on."""

    directory: Path
    base: str  # hub id or local directory
    base_revision: str | None
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that is attached to a model."""

    peft_model: PeftModelForCausalLM
    base: str
    is_new: bool  # not loaded from files; then the policy starts equal to the base
    dropouts: tuple[nn.Dropout, ...]
    notes: tuple[str, ...]  # for the user: what gets no adapter, and what is odd in a saved one
    # Whole tensors of a saved adapter's file that differ from the base's, by their names in the file: the
    # model has them, and every later adapter must.
    whole: Mapping[str, Tensor]

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
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        if isinstance(head, TrainableTokensWrapper):  # without bias, see `_check_embeddings`
            tokens: Any = head.token_adapter
            return tokens.get_merged_weights([] if tokens.disable_adapters else [_NAME]), None
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
        if self.whole:
            file = directory / "adapter_model.safetensors"
            save_file({**load_file(file), **self.whole}, file, metadata={"format": "pt"})

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
    """Reads an adapter's config. Raises ModelError, which names `key`, if the adapter cannot be used."""
    file = directory / "adapter_config.json"
    config: dict[str, Any] = read_json(file) or {}
    kind, base, drawn = config.get("peft_type"), config.get("base_model_name_or_path"), "pissa_niter"
    kind = next((name for name in ("alora_invocation_tokens", "layer_replication") if config.get(name)), kind)
    if not config:
        what = f"{file} cannot be read; save the adapter again"
    elif kind != "LORA":
        what = (
            f"{directory} is a {kind} adapter, and only LoRA of the base's own layers can be used; merge it"
        )
    elif str(given := config.get("init_lora_weights")).startswith(drawn):
        what = (
            f"{file} has init_lora_weights: {given}, so each load changes the base in another random way; "
            "save it as plain LoRA, or write pissa, the exact decomposition"
        )
    elif not isinstance(base, str) or not base:
        what = f"{file} does not name the model it belongs to; set its base_model_name_or_path"
    elif is_adapter(base):
        what = f"{directory} is an adapter of another adapter, {base}; merge that one first"
    else:
        rank = config.get("r", 8)  # peft's default
        return SavedAdapter(directory=directory, base=base, base_revision=config.get("revision"), rank=rank)
    raise ModelError(f"{key}: {what}")


def unknown_settings(directory: Path) -> Iterator[str]:
    """Yields a line about the settings of a saved adapter that peft does not know, and so ignores."""
    from peft import LoraConfig

    file, known = directory / "adapter_config.json", inspect.signature(LoraConfig).parameters
    given: dict[str, Any] = read_json(file) or {}
    unknown = [f"{key} ({value})" for key, value in given.items() if key not in known and value not in _UNSET]
    if unknown:
        yield (
            f"Warning: peft {package_versions().get('peft')} ignores settings of {file}: "
            f"{', '.join(unknown)}; so the model may compute something else than the one that was trained; "
            f"install the peft that wrote it ({given.get('peft_version', 'a newer one')})"
        )


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
    adapter: LoraRecipe | Path,
    *,
    base: str,
    revision: str | None,
    recipe_key: str,
    reads_weights: bool,
    seed: int = 0,
) -> Adapter:
    """Puts a new or a saved adapter into `model`, in place; after that, only the adapter is trained. `base`
    and `revision`: the source of the model. Without `reads_weights`, the adapter's parameters have no values.
    `seed` decides the values of a new one's A. Raises ModelError when the adapter does not fit or would not
    be exact."""
    from peft.tuners.lora import LoraLayer

    is_new, whole = isinstance(adapter, LoraRecipe), dict[str, Tensor]()
    key = "model.lora" if is_new else recipe_key
    with _one_line(f"{key}: the adapter does not fit {base}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our own checks follow
        if isinstance(adapter, LoraRecipe):
            peft_model, notes = _attach_new(model, adapter, seed)
        else:
            peft_model, whole = _attach_saved(model, adapter, reads_weights=reads_weights)
            notes = [*unknown_settings(adapter)]
            if whole:
                names = ", ".join(name.removeprefix("base_model.model.") for name in whole)
                notes.append(
                    f"Note: {adapter} also holds {names}, which differ from the base's; they are used, not "
                    "trained, and written into the trained adapter"
                )
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        for plain in (layer.get_base_layer() for layer in layers):
            if isinstance(plain, nn.Linear) and not _is_plain(plain):
                raise ValueError(
                    f"a {type(plain).__name__} is no plain linear layer, so it cannot have an adapter; leave "
                    "it out of target_modules"
                )
    config: Any = peft_model.peft_config[_NAME]
    config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    config.revision = revision
    _check_embeddings(model, key, is_new=is_new)
    dropouts = [part for layer in layers for part in layer.lora_dropout.values()]
    return Adapter(
        peft_model=peft_model,
        base=base,
        is_new=is_new,
        # A saved adapter trains without dropout.
        dropouts=tuple(part for part in dropouts if is_new and isinstance(part, nn.Dropout)),
        notes=tuple(notes),
        whole=whole,
    )


def _attach_new(
    model: PreTrainedModel, settings: LoraRecipe, seed: int
) -> tuple[PeftModelForCausalLM, list[str]]:
    """Returns also lines about what gets no adapter."""
    from peft import LoraConfig, PeftModelForCausalLM

    targets, towers = settings.target_modules, list[str]()
    frozen = tower_parameters(model)
    for name, module in model.named_modules():  # a module comes before its parts
        own = set(module.parameters())
        if own and own <= frozen and not _is_in(towers, name):
            towers.append(name)
    excluded = {tower: "outside of the language model" for tower in towers}
    if targets == "all-linear":
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and not _is_plain(module):
                excluded[name] = f"{type(module).__name__} is no plain linear layer"
            elif model.config.model_type in _MAMBA_FAMILIES and name.endswith(".out_proj"):
                excluded[name] = "peft refuses it here"
    else:
        inside = [name for name, _ in model.named_modules() if not _is_in(towers, name)]
        for target in targets:  # peft only checks that one name matches
            if not any(f".{name}".endswith(f".{target}") for name in inside):
                raise ValueError(
                    f"the language model has no linear module named {target}; correct target_modules"
                )
    ends = {name.rpartition(".")[2]: why for name, why in excluded.items()}
    what = "all-linear leaves out" if targets == "all-linear" else "target_modules leave out"
    notes = [f"  {what} {', '.join(f'{end} ({why})' for end, why in ends.items())}"] if ends else []
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor; peft's annotation is too narrow
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules="|".join(rf"{re.escape(name)}(\..*)?" for name in excluded) or None,
        task_type="CAUSAL_LM",
    )
    # peft draws A on the CPU, so that the seed alone decides the adapter, not the device.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PeftModelForCausalLM(model, config, adapter_name=_NAME), notes


def _is_in(modules: Sequence[str], name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def _is_plain(layer: nn.Linear) -> bool:
    """Whether the layer returns a product and nothing else. Some routers, which choose experts, do not."""
    if type(layer) is nn.Linear or any(k.__module__.startswith("bitsandbytes.") for k in type(layer).__mro__):
        return True
    try:
        with torch.no_grad():
            product: Any = layer(layer.weight.new_zeros(1, layer.in_features))
    except Exception:  # of code that we do not know
        return False
    return isinstance(product, Tensor) and product.shape == (1, layer.out_features)


def _attach_saved(
    model: PreTrainedModel, directory: Path, *, reads_weights: bool
) -> tuple[PeftModelForCausalLM, dict[str, Tensor]]:
    """Returns also the whole tensors of the adapter's file that differ from the base's."""
    from peft import PeftConfig, PeftModelForCausalLM, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    config: LoraConfig = PeftConfig.from_pretrained(str(directory))
    config.inference_mode = False
    peft_model, whole = PeftModelForCausalLM(model, config, adapter_name=_NAME), dict[str, Tensor]()
    if not reads_weights:
        return peft_model, whole
    state: dict[str, Tensor] = peft_model.state_dict()
    # The adapter's own tensors by their names in files; there the base's tensors have the names of `state`.
    own: dict[str, Tensor] = get_peft_model_state_dict(peft_model, state, save_embedding_layers=False)
    for name, tensor in load_peft_weights(str(directory), device="cpu").items():
        if not tensor.isfinite().all():
            raise ValueError(f"its {name} has values that are not finite")
        ours = own.get(name, state.get(name))
        if ours is not None and tensor.shape != ours.shape:
            raise ValueError(
                f"its {name} has the shape {[*tensor.shape]}, and the model's has {[*ours.shape]}; name the "
                "base that it was trained on in adapter_config.json (base_model_name_or_path), with "
                "embeddings of as many tokens"
            )
        if ours is not None and name not in own and not torch.equal(tensor.to(ours), ours):
            whole[name] = tensor
    # By default peft reads the weights onto the first GPU, in every process.
    device = str(next(model.parameters()).device)
    try:
        loading: Any = peft_model.load_adapter(str(directory), _NAME, is_trainable=True, torch_device=device)
        missing = [key for key in loading.missing_keys if _NAME in key.split(".")]
    except KeyError as error:  # of modules that are trained whole, or in single rows
        missing = [error.args[0]]
    if missing:
        raise ValueError(f"its weights lack {missing[0]}")
    if loading.unexpected_keys:
        raise ValueError(f"the model has no layer for its weight {loading.unexpected_keys[0]}")
    return peft_model, whole


def _check_embeddings(model: PreTrainedModel, key: str, *, is_new: bool) -> None:
    """Refuses adapters of tied embeddings that peft merges into something else, and those of the head that
    `head_weights` cannot compute."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    adapted = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    changes_head = isinstance(head, adapted)
    stays_tied = False
    if isinstance(head, ModulesToSaveWrapper) and isinstance(embeddings, ModulesToSaveWrapper):
        stays_tied = head.modules_to_save[_NAME].weight is embeddings.modules_to_save[_NAME].weight
    elif isinstance(head, TrainableTokensWrapper) and isinstance(embeddings, TrainableTokensWrapper):
        stays_tied = head.token_adapter.tied_adapter is embeddings.token_adapter
    configs = (model.config, model.config.get_text_config())  # Qwen2.5-VL's text config does not say it
    is_tied = any(config.to_dict().get("tie_word_embeddings") for config in configs)
    if (changes_head or isinstance(embeddings, adapted)) and is_tied and not stays_tied:
        raise ModelError(
            f"{key}: the adapter changes the embeddings or the output head, which are one tensor in this "
            "model, so a merged model would compute something else; leave embed_tokens and lm_head out, or "
            "train them with trainable_token_indices, or with modules_to_save and ensure_weight_tying"
        )
    is_plain = isinstance(head, ModulesToSaveWrapper)
    if isinstance(head, TrainableTokensWrapper):
        is_plain = head.original_module.bias is None  # with a bias peft's own forward leaves it out
    if isinstance(head, LoraLinear) and not head.lora_variant and not head.lora_bias[_NAME]:
        is_plain = not (is_new and isinstance(head.lora_dropout[_NAME], nn.Dropout))
    if changes_head and not is_plain:
        raise ModelError(
            f"{key}: the adapter changes the output head in a way that is not supported here (supported: "
            "modules_to_save, trainable_token_indices, and plain LoRA without dropout); leave the head out "
            "of target_modules"
        )


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns peft's errors into a ModelError of one line; some list all modules of a model."""
    try:
        yield
    except Exception as error:  # the adapter's files decide the error's class
        text = first_line(error) if isinstance(error, pickle.UnpicklingError) else str(error)
        reason = textwrap.shorten(text, 350, placeholder=" ...").rstrip(".")
        raise ModelError(f"{what}: {reason or type(error).__name__}") from error


# --------------------------------------------------------------------------------------- quantised bases


def quantization_settings(kind: str) -> BitsAndBytesConfig:
    """Returns transformers' settings of a base that is quantised while it is loaded."""
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def bits_per_weight(settings: Mapping[str, Any]) -> float:
    """Returns the bits that a weight takes in bitsandbytes' format, with its part of the scales."""
    if not settings.get("load_in_4bit"):
        return 8.0  # a scale for each row is too little to count
    return 4.0 + (8 if settings.get("bnb_4bit_use_double_quant") else 32) / 64


def compute_restored(model: nn.Module) -> None:
    """Makes each quantised layer restore its weight for each product, as a linear layer has it; in place."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    # Their class changes, not their `forward`: proofs compare a module's `forward` with that of its class.
    ours = {
        kind: type(kind.__name__, (kind,), {"forward": _restoring}) for kind in (Linear4bit, Linear8bitLt)
    }
    for module in model.modules():
        if type(module) in ours:
            module.__class__ = ours[type(module)]


def _restoring(module: Any, features: Tensor) -> Tensor:
    """[..., D] -> [..., O], in the type in which a linear layer computes here."""
    device, dtype = features.device.type, features.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    product: Tensor = _RestoringProduct.apply(features.to(dtype), module)  # type: ignore[no-untyped-call]
    return product if module.bias is None else product + module.bias.to(dtype)


class _RestoringProduct(torch.autograd.Function):
    """`features @ weight.T`. It keeps nothing for the backward pass, which restores the weight again."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return nn.functional.linear(features, _restored(module, features.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ _restored(ctx.module, grad.dtype), None


def _restored(module: Any, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    weight = module.weight
    if isinstance(module, Linear4bit):
        state = copy.copy(weight.quant_state)
        shape, state.dtype = state.shape, dtype  # else the result would be in fp32 first
        if shape[-1] % state.blocksize:  # then bitsandbytes' CPU code takes other blocks' scales for rows
            state.shape = torch.Size((1, shape.numel()))
        whole: Tensor = dequantize_4bit(weight.data, state)
        return whole.view(shape)
    scaled: Tensor = weight.data * (weight.SCB / 127)[:, None]
    return scaled.to(dtype)
