"""Layers that compute with liger-kernel; the context in which layers are as transformers has them.

liger-kernel (Hsu et al. 2024, arXiv 2410.10989) computes RMSNorm, rotary positions and gated MLPs in one pass
each: memory limits their speed. We do not use its losses, because we need log-probs of tokens.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from dpo_pack.system.errors import RecipeError, UnsupportedModelError

# For each family: the options of liger-kernel that we switch on.
LIGER_FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("rope", "rms_norm", "geglu")),
    **dict.fromkeys(
        ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"),
        ("rope", "rms_norm", "swiglu"),
    ),
}

# By module of transformers: the original functions that liger-kernel has replaced for all models of a family.
_replaced: dict[str, dict[str, Callable[..., Any]]] = {}


def check_kernels(kernels: str, config: PretrainedConfig, device: torch.device) -> None:
    """Checks `model.kernels`. Raises RecipeError (wrong device) or UnsupportedModelError (wrong family)."""
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
    """Makes the layers of `model` compute with liger-kernel, in place; other models keep their own layers.

    But functions, such as the rotation of queries and keys, are replaced for all models of a family. Raises
    UnsupportedModelError when the package does not fit the installed transformers.
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
        for key, plain in before.items():
            if vars(code)[key] is plain:
                continue
            if isinstance(plain, type):  # classes are restored, because fingerprints use their source files
                setattr(code, key, plain)
            else:
                _replaced.setdefault(code.__name__, {}).setdefault(key, plain)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


@contextlib.contextmanager
def stock_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which every module runs its class's own forward; only `times_transposed` still acts."""
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
