"""Matrix products on the CPU through oneDNN, where they are faster than torch's own.

Legend: T tokens of the row, D features in, O features out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpo_pack.system.machine import is_intel

# torch computes fp32 products with MKL. On AMD processors with AVX-512 oneDNN computes `x @ weight.T` and
# `grad @ weight` faster, on Intel's only the head's products; `grad.T @ x` is slower on both
# (`scripts/measure_settings.py products`). Both compute in plain fp32: they differ by rounding.


def times_transposed(features: Tensor, weight: Tensor) -> Tensor:
    """Computes `features @ weight.T` without gradients: [..., D], [O, D] -> [..., O]."""
    product = _onednn_product()
    if product is None or not _is_cpu_float32(features):
        return features @ weight.T
    return product(features, weight, None, "none", [], "")


def speed_up_linears(model: nn.Module) -> None:
    """Makes the model's linear layers call oneDNN, in place, where it is faster: not on Intel's CPUs.

    If a layer's input is not fp32 on the CPU, or if autocast is on, the layer computes as before.
    """
    if _onednn_product() is None or is_intel():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, features: Tensor) -> Tensor:
    if features.ndim < 2 or not _is_cpu_float32(features) or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(features, module.weight, module.bias)
    # We flatten to two dimensions: for more, oneDNN returns a view, which a model could not change in place.
    product: Tensor = _Linear.apply(features.flatten(0, -2), module.weight, module.bias)  # type: ignore[no-untyped-call]
    unflattened: Tensor = product.unflatten(0, features.shape[:-1])
    return unflattened


class _Linear(torch.autograd.Function):
    """`features @ weight.T + bias`: [T, D], [O, D], [O] or None -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = _onednn_product()
        assert product is not None
        needs_features, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(features if needs_weight else None, weight if needs_features else None)
        return product(features, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        features, weight = ctx.saved_tensors
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            times_transposed(grad, weight.T) if needs_features else None,
            grad.T @ features if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )


def _is_cpu_float32(features: Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """Returns torch's binding of oneDNN's product, which is not public (inductor calls it); None if missing.

    Also None on a CPU without AVX-512: we measured nothing on such CPUs.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return None
    return product
