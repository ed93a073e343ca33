"""Other code for a model's layers, computing the same: liger-kernel's fused kernels.

RMSNorm, rotary positions and gated MLPs are bound by memory; liger-kernel (Hsu et al. 2024, arXiv 2410.10989)
computes each in one pass. Its losses are not used: what our head returns is per token, see logps.py.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.errors import RecipeError, UnsupportedModelError

_GATED_BY_SILU = ("rope", "rms_norm", "swiglu")
_GATED_BY_GELU = ("rope", "rms_norm", "geglu")
# Which of liger-kernel's kernels a family's layers take, by the names of its options.
LIGER_FAMILIES: dict[str, tuple[str, ...]] = {
    "gemma": _GATED_BY_GELU,
    "gemma2": _GATED_BY_GELU,
    "gemma3_text": _GATED_BY_GELU,
    "granite": _GATED_BY_SILU,
    "llama": _GATED_BY_SILU,
    "mistral": _GATED_BY_SILU,
    "olmo2": _GATED_BY_SILU,
    "phi3": _GATED_BY_SILU,
    "qwen2": _GATED_BY_SILU,
    "qwen3": _GATED_BY_SILU,
    "smollm3": _GATED_BY_SILU,
}

# Functions of transformers' modules that liger-kernel has replaced, which no instance has for itself.
_replaced: dict[str, dict[str, Callable[..., Any]]] = {}


def check_kernels(kernels: str, config: PretrainedConfig, device: torch.device) -> None:
    """Refuse a recipe's `model.kernels` where they do not run. Raises RecipeError, UnsupportedModelError."""
    if kernels == "none":
        return
    if device.type != "cuda":
        raise RecipeError(
            f"model.kernels: liger's kernels run on CUDA devices, and this is {device.type}; set "
            "model.kernels: none"
        )
    family = config.get_text_config().model_type
    if family not in LIGER_FAMILIES:
        raise UnsupportedModelError(
            f"model.kernels: liger has no kernels that we use for {family}, only for "
            f"{', '.join(LIGER_FAMILIES)}; set model.kernels: none"
        )


def apply_liger(model: PreTrainedModel) -> None:
    """Make the layers of `model` compute with liger-kernel, in place; other models keep their own code.

    But for functions, such as the one that turns queries and keys by their positions: they are replaced for
    all models of the family in this process. Raises UnsupportedModelError when the package does not know the
    family as this transformers has it.
    """
    family = model.config.get_text_config().model_type
    code = sys.modules[type(model).__module__]
    before = dict(vars(code))
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        MODEL_TYPE_TO_APPLY_LIGER_FN[family](
            model=model,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            **dict.fromkeys(LIGER_FAMILIES[family], True),
        )
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise UnsupportedModelError(
            f"model.kernels: liger-kernel {_version('liger-kernel')} does not fit {family} of transformers "
            f"{_version('transformers')} ({error}); install another, or set model.kernels: none"
        ) from error
    finally:
        _keep_classes(code.__name__, before)


def _keep_classes(name: str, before: dict[str, Any]) -> None:
    """Who builds a model of the family later gets its own classes: fingerprints are made of their files."""
    code = vars(sys.modules[name])
    for key, plain in before.items():
        if code[key] is plain:
            continue
        if isinstance(plain, type):
            code[key] = plain
        else:
            _replaced.setdefault(name, {}).setdefault(key, plain)


@contextlib.contextmanager
def stock_layers(model: PreTrainedModel) -> Iterator[None]:
    """Every module computes as its class says: no compiled layer, and no kernel but the family's own code."""
    own = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    code = vars(sys.modules[type(model).__module__])
    plain = _replaced.get(type(model).__module__, {})
    other = {key: code[key] for key in plain}
    code.update(plain)
    try:
        yield
    finally:
        code.update(other)
        for module, forward in own.items():
            module.forward = forward


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
