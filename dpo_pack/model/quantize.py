"""Quantises the frozen base of an adapter while it is loaded, with bitsandbytes (`model.quantize`).

nf4 is the 4-bit type of QLoRA, with quantised scales (Dettmers et al. 2023, arXiv 2305.14314). int8 rounds
weights and inputs of linear layers (Dettmers et al. 2022, arXiv 2208.07339), without that paper's outliers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig

Quantization = Literal["int8", "nf4"]


def quantization_settings(kind: Quantization, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns transformers' settings of a base that is quantised while it is loaded.

    `compute_dtype` is the type of the products with 4-bit weights. For int8 the threshold is 0: every input
    is rounded. With a threshold, a large value in one token's input changes how all tokens of the row are
    rounded, so a pair's log-probs would depend on the other pairs of its row.
    """
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def bits_per_weight(settings: Mapping[str, Any]) -> float:
    """Returns the bits that a weight takes in bitsandbytes' format, with its part of the scales.

    64 weights of 4 bits have one scale: 32 bits, or 8 bits if scales are quantised as well. int8 has one
    scale for each row of a matrix, which is too little to count.
    """
    if not settings.get("load_in_4bit"):
        return 8.0
    return 4.0 + (8 if settings.get("bnb_4bit_use_double_quant") else 32) / 64


def _layers_of_4_bits(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]


def keep_weights_as_they_are(model: nn.Module) -> None:
    """Stops bitsandbytes from rewriting 4-bit weights on CPUs with bf16 instructions.

    It rewrites them in a forward pass without gradients, for kernels of its own. These kernels round
    differently from the products of a training pass, and a later pass cannot compute gradients.
    """
    for layer in _layers_of_4_bits(model):
        layer.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In this context products with 4-bit weights are computed in `dtype`."""
    layers = [(layer, layer.compute_dtype) for layer in _layers_of_4_bits(model)]
    for layer, _ in layers:
        layer.compute_dtype = dtype
    try:
        yield
    finally:
        for layer, before in layers:
            layer.compute_dtype = before
