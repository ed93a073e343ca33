"""fp32 matrix products on the CPU through oneDNN, which torch itself uses there for bf16 only.

torch hands fp32 products to MKL. On AMD processors with AVX-512 oneDNN computes `x @ weight.T` and
`grad @ weight` faster; on Intel's only the head's, whose chunks have few tokens: the layers' are faster
through MKL. So is `grad.T @ x` on both (`scripts/measure_settings.py products`).
Both are plain fp32: they differ by rounding.

Legend: T tokens, D features in, O features out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpo_pack.cpu_features import is_intel


def times_transposed(features: Tensor, weight: Tensor) -> Tensor:
    """[..., D], [O, D] -> features @ weight.T, [..., O]. Knows no gradients."""
    kernel = _kernel()
    if kernel is None or not _fits(features):
        return features @ weight.T
    return kernel(features, weight, None, "none", [], "")


def speed_up_linears(model: nn.Module) -> None:
    """Let the model's linear layers compute through oneDNN where it is the faster: not on Intel's CPUs.

    Changes them in place. Layers whose inputs turn out not to be fp32 on the CPU, as under autocast, compute
    as they always did.
    """
    if _kernel() is None or is_intel():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, features: Tensor) -> Tensor:
    if features.ndim < 2 or not _fits(features) or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(features, module.weight, module.bias)
    # Flat, because for more dimensions the kernel gives a view, which a model could not change in place.
    product: Tensor = _Linear.apply(features.flatten(0, -2), module.weight, module.bias)  # type: ignore[no-untyped-call]
    unflattened: Tensor = product.unflatten(0, features.shape[:-1])
    return unflattened


class _Linear(torch.autograd.Function):
    """`features @ weight.T + bias`: [T, D], [O, D], [O] or None -> [T, O]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel = _kernel()
        assert kernel is not None
        needs_features, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(features if needs_weight else None, weight if needs_features else None)
        return kernel(features, weight, bias, "none", [], "")

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


def _fits(features: Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32


@functools.cache
def _kernel() -> Callable[..., Tensor] | None:
    """torch's binding, None where there is none: it is not public, inductor calls it.

    Without AVX-512 nothing was measured, so there everything stays as it is.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    try:
        kernel: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return None
    return kernel
