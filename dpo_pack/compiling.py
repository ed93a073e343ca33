"""torch.compile, a layer at a time.

All layers of a kind share one compiled function, so compiling takes as long for 80 layers as for two. It is
compiled for rows of any length: rows are not padded to a few lengths, and a new length compiles nothing anew.

The attention seam stays outside. Its kernels gain nothing, and what describes a row (its segments, lengths as
Python numbers) would be compiled into the code. So a layer is compiled in parts, before and behind the seam.

Activation checkpointing goes around the compiled function: compiled with it, a layer could not be cut.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.errors import RecipeError, UnsupportedModelError
from dpo_pack.head_logits import HeadPasses

# Variants of one function: with and without gradients, autocast or an adapter, and layers of several kinds.
# torch's own limit is 8, beyond which it goes on uncompiled.
_MOST_VARIANTS = 64
_CPP_COMPILERS = ("g++", "clang++")


def check_compiler() -> None:
    """Raises RecipeError where torch.compile has no compiler: it makes C++ on the CPU, launchers on CUDA."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _CPP_COMPILERS
    if not any(shutil.which(name) for name in names):
        raise RecipeError(
            f"model.compile: torch.compile needs a C++ compiler, and there is no {' or '.join(names)}; "
            "install one, or set model.compile: false"
        )


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile the model's layers, in place; each part when it is first used.

    Raises UnsupportedModelError for a model that does not say what its layers are.
    """
    layers = _outermost_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"model.compile: {type(model).__name__} does not say what its layers are, so they cannot be "
            "compiled one by one; set model.compile: false"
        )
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    # DDP reduces gradients layer by layer as it is; cutting a layer's code at its buckets gains nothing.
    torch._dynamo.config.optimize_ddp = False
    # On CUDA inductor advises TF32: with it proofs in fp32 would fail, and autocast's products are in bf16.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).pop("forward", None)  # of cpu_products.py: compiled code has products of its own
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in layers:
        plain = _without_checkpointing(type(layer))
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, backend=backend, dynamic=True)
        layer.forward = functools.partial(_compute, layer, compiled[plain])


def compile_head(*, backend: str = "inductor") -> HeadPasses:
    """The head's passes over logits, compiled: they read a chunk's logits twice forward, once backward."""
    plain = HeadPasses()
    return HeadPasses(
        forward=torch.compile(plain.forward, backend=backend, fullgraph=True),
        backward=torch.compile(plain.backward, backend=backend, fullgraph=True),
    )


def _outermost_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    layers: list[GradientCheckpointingLayer] = []
    inner: set[Any] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    return layers


def _without_checkpointing(kind: type[GradientCheckpointingLayer]) -> Callable[..., Any]:
    """The forward that the family's code defines: transformers wraps it, once for each class below."""
    forward: Any = kind.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    plain: Callable[..., Any] = forward
    return plain


def _compute(layer: Any, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """What transformers' wrapper does, around the compiled forward."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(functools.partial(compiled, layer, **options), *arguments)
    return compiled(layer, *arguments, **options)
