"""Compiled layers and kinds of checkpointing.

All layers of one class use the same compiled function, which takes rows of any length. A row's segments
(lengths as Python numbers) would become constants of the code. So torch's own attention kernel is an
operator that gets the segments' number, and a layer is one graph. Of `row_attention` with another kernel
torch compiles nothing, and so it compiles a layer in parts, before and after it. Activation checkpointing
wraps the compiled function: if torch compiled it too, it could not split the layer there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.system.errors import UnsupportedModelError

# Selective checkpointing. A layer keeps what takes long to compute and recomputes the rest: norms, activation
# functions, rotary positions, casts. The kernels have other names on the CPU and in the package flash-attn.
_KEPT_OPERATIONS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"),
    *("mkldnn::_linear_pointwise", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
    *("aten::_scaled_dot_product_cudnn_attention", "dpo_pack::attend"),
    *("flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"),
)


def keep_products() -> tuple[Any, Any]:
    """Returns the contexts of torch's checkpointing for a layer's forward and for its recomputation."""

    def policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        is_kept = operation.name().partition(".")[0] in _KEPT_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def keep_inputs_on_host(
    checkpoint: Callable[..., Any], layer: Callable[..., Any], /, *inputs: Any, **options: Any
) -> Any:
    """Runs `checkpoint(layer, *inputs, **options)`. Until the backward pass, the host keeps the inputs."""

    def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
        # Copies wait in the device's queue, and the host waits for none, because its memory is pinned.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def back(kept: tuple[torch.device, Tensor]) -> Tensor:
        return kept[1].to(kept[0], non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        return checkpoint(layer, *inputs, **options)


def compiler_obstacle(device: torch.device) -> str | None:
    """Returns why torch.compile cannot be used on `device`, or None when it can."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "clang++")
    if not any(shutil.which(name) for name in names):
        return f"torch.compile needs a C++ compiler, and there is no {' or '.join(names)}"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton on CUDA, and it is not installed"
    return None


def compile_layers(
    model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False
) -> None:
    """Compiles the model's layers, in place. torch compiles each part of a layer at its first use.

    With `falls_back`, torch runs code uncompiled where it cannot compile it, and raises no error. Raises
    UnsupportedModelError if the model's code does not mark its layers.
    """
    layers: list[Any] = outermost_layers(text_model(model))
    if not layers:
        raise UnsupportedModelError(
            f"model.compile: {type(model).__name__} does not say what its layers are, so they cannot be "
            "compiled one by one; set model.compile: false"
        )
    # torch compiles variants of one function: with and without gradients, autocast or an adapter, and for
    # several kinds of layers. By default it compiles 8 at most, and runs further variants uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = falls_back
    # On CUDA this fusion puts guards on the number of tokens, so rows of other lengths would compile again.
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):  # not in torch 2.10
        torch._inductor.config.triton.mix_order_reduction = False
    # DDP reduces gradients layer by layer anyway, so to cut a layer's code at DDP's buckets gains nothing.
    torch._dynamo.config.optimize_ddp = False
    # On CUDA inductor recommends TF32, but proofs in fp32 would fail with TF32, and autocast is in bf16.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # torch itself reads this attribute where it compiles a layer in parts, for example a recurrent layer.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).pop("forward", None)  # of `speed_up_linears`; compiled code calls other products
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
    for layer in layers:
        plain = type(layer).forward
        while plain.__code__.co_name == "forward_with_checkpointing":  # transformers' wrapper
            plain = plain.__wrapped__
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, backend=backend, dynamic=True)
        layer.forward = functools.partial(_run_compiled, layer, compiled[plain])


def text_model(model: PreTrainedModel) -> nn.Module:
    """Returns the part of a model that reads text: all of it, or what is beside the towers and the head."""
    return model if model.config.get_text_config() is model.config else model.get_decoder()


def tower_parameters(model: PreTrainedModel) -> set[nn.Parameter]:
    """Returns the parameters outside of the language model and the head, which are never trained."""
    own = [*text_model(model).parameters(), *model.get_output_embeddings().parameters()]
    return set(model.parameters()).difference(own)


def outermost_layers(model: nn.Module, class_names: frozenset[str] = frozenset()) -> list[nn.Module]:
    """Returns the modules that are layers of the library transformers or of a class in `class_names`.

    A module inside another such module is left out."""
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in class_names
        if is_layer and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    return layers


def _run_compiled(layer: Any, compiled: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    # As transformers' checkpointing wrapper, but with the compiled forward.
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(functools.partial(compiled, layer, **options), *arguments)
    return compiled(layer, *arguments, **options)
