"""What of a model decides the memory that a row's activations take, read off it without its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dpo_pack.model_config import attention_needs, count_experts

# Activations written out in Python keep so many inner results for their backward pass; torch's own keep one.
_KEPT_BY_ACTIVATION = {"gelu_new": 4, "gelu_fast": 5, "gelu_python": 3, "gelu_pytorch_tanh": 1, "relu2": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShape:
    """Widths in features a token, each the mean over layers, and counts of parameters."""

    num_layers: int
    hidden: int
    queries: float  # of all query heads
    keys: float  # of all key heads; repeated for every query head they are as wide as the queries
    values: float
    attended: float  # what attention puts out
    norms: float  # features that go through norms
    keeps_wide_norms: bool  # norms written in Python keep an fp32 copy and the normalised input
    num_readers: float  # linear layers that read a norm's output
    linear_inputs: float  # of all linear layers together
    linear_outputs: float
    inner: float  # the feed-forward part's widest: what its last linear layer reads
    kept_inner: float  # what its activation keeps besides
    experts: float  # what the active experts keep
    layer_parameters: float  # of one layer
    head_parameters: int  # vocabulary x hidden
    other_parameters: int  # embeddings that are not the head, final norm
    vocabulary: int

    @property
    def num_parameters(self) -> int:
        return round(self.num_layers * self.layer_parameters) + self.head_parameters + self.other_parameters

    def num_adapter_parameters(self, rank: int) -> int:
        """Of a LoRA adapter on every linear layer but the head; one on fewer of them is smaller."""
        return round(rank * self.num_layers * (self.linear_inputs + self.linear_outputs))


def memory_shape(model: PreTrainedModel) -> MemoryShape:
    """The shape of a model, on whatever device, the meta device included. Adapters are not looked at.

    Exact for stacks of attention and a plain or gated feed-forward part; an estimate for the rest.
    """
    text = model.config.get_text_config()
    num_layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    layers = [module for name, module in model.named_modules() if _is_layer(name)]
    heads = int(text.num_attention_heads)
    needs = attention_needs(model.config)
    key_heads = int(text.to_dict().get("num_key_value_heads") or heads)
    queries, keys = heads * needs.head_dim, key_heads * needs.head_dim
    attended, values = heads * needs.value_head_dim, key_heads * needs.value_head_dim
    linears = [linear for layer in layers for linear in _linears(layer)]
    feed_forward = [linear for linear in linears if not linear.is_attention and not linear.is_expert]
    inner = sum(linear.inputs for linear in feed_forward if linear.inputs != hidden)
    inner_outputs = sum(linear.outputs for linear in feed_forward if linear.outputs != hidden)
    kept_by_activation = _KEPT_BY_ACTIVATION.get(_activation(text), 1)
    is_gated = inner_outputs >= 2 * inner
    norms = [norm for layer in layers for norm in _norms(layer, queries=queries, keys=keys)]
    layer_parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    head = model.get_output_embeddings().weight
    num_parameters = sum(p.numel() for p in model.parameters())
    return MemoryShape(
        num_layers=num_layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        values=values,
        attended=attended,
        norms=sum(width for width, _ in norms) / num_layers,
        keeps_wide_norms=any(is_wide for _, is_wide in norms),
        num_readers=sum(linear.inputs == hidden and not linear.is_output for linear in linears) / num_layers,
        linear_inputs=sum(linear.inputs for linear in linears) / num_layers,
        linear_outputs=sum(linear.outputs for linear in linears) / num_layers,
        inner=inner / num_layers,
        kept_inner=inner * (2 * is_gated + kept_by_activation) / num_layers,
        experts=sum(_experts(layer, text.to_dict(), hidden) for layer in layers) / num_layers,
        layer_parameters=layer_parameters / num_layers,
        head_parameters=head.numel(),
        other_parameters=num_parameters - layer_parameters - head.numel(),
        vocabulary=head.shape[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    inputs: int
    outputs: int
    is_attention: bool
    is_expert: bool
    is_output: bool  # of attention


def _is_layer(name: str) -> bool:
    """Whether a module's name is that of a layer in the stack: the first number in it is its last part."""
    parts = name.split(".")
    return parts[-1].isdigit() and not any(part.isdigit() for part in parts[:-1])


def _linears(layer: nn.Module) -> Iterable[_Linear]:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            inputs, outputs = module.weight.shape
            if isinstance(module, nn.Linear):  # GPT-2's Conv1D holds its weight the other way around
                inputs, outputs = outputs, inputs
            yield _Linear(
                inputs=inputs,
                outputs=outputs,
                is_attention="attn" in name or "attention" in name,
                is_expert=".experts." in name,
                is_output=name.rpartition(".")[2] in _OUTPUT_NAMES,
            )


# What attention's last linear layer is called, beside names that GPT-2 gives to the feed-forward part's too:
# there the layer reads something wider than the hidden size.
_OUTPUT_NAMES = frozenset({"o_proj", "out_proj", "dense", "c_proj", "wo"})


def _norms(layer: nn.Module, *, queries: int, keys: int) -> Iterable[tuple[int, bool]]:
    """(features, whether it is written in Python) of each norm."""
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.ndim != 1 or not ("norm" in last or last.startswith("ln_")):
            continue
        is_wide = not isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if last.startswith(("q_", "query_")):
            yield queries, is_wide
        elif last.startswith(("k_", "key_")):
            yield keys, is_wide
        else:
            yield weight.numel(), is_wide


def _experts(layer: nn.Module, values: dict[str, Any], hidden: int) -> float:
    """Of one layer: each active expert's own copy of the token and its weighted output, and inside it."""
    num_experts, num_active = count_experts(values)
    weights = [
        parameter.numel()
        for name, parameter in layer.named_parameters()
        if ".experts." in f".{name}" and not name.endswith("bias")
    ]
    if not weights:
        return 0.0
    # Three matrices of an expert keep four of their widths: gate and up, their product, gate activated.
    inner = 4 / 3 * math.fsum(weights) / num_experts / hidden
    return num_active * (inner + 2 * hidden)


def _activation(text: PretrainedConfig) -> str:
    values = text.to_dict()
    names = ("hidden_act", "hidden_activation", "activation_function", "afn")
    return str(next((values[name] for name in names if values.get(name)), ""))
