"""Quantises the frozen base of an adapter while it is loaded (`model.quantize`).

nf4 is the 4-bit type of QLoRA, with quantised scales (Dettmers et al. 2023, arXiv 2305.14314); int8 has a
scale for each row of a weight. bitsandbytes stores the weights; its products are not exact in packed rows, so
a layer restores its weight. Legend: D features in, O features out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import BitsAndBytesConfig


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
    ours = {kind: type(kind.__name__, (kind,), {"forward": _linear}) for kind in (Linear4bit, Linear8bitLt)}
    for module in model.modules():
        if type(module) in ours:
            module.__class__ = ours[type(module)]


def _linear(module: Any, features: Tensor) -> Tensor:
    """[..., D] -> [..., O], in the type in which a linear layer computes here."""
    device, dtype = features.device.type, features.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    product: Tensor = _Product.apply(features.to(dtype), module)  # type: ignore[no-untyped-call]
    return product if module.bias is None else product + module.bias.to(dtype)


class _Product(torch.autograd.Function):
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
