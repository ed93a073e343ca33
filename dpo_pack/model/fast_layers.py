"""Replaces the forwards of a model's layers by faster ones that compute the same; `stock_layers` undoes it.

- On a CPU, oneDNN computes the products of linear layers where it is faster than torch's own.
- The last feed-forward block, after which no position reads another, is computed only at positions whose
  hidden state predicts a scored token.

Legend: T tokens of the row, U scored positions, D features in, O features out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from dpo_pack.model.compiling import text_model
from dpo_pack.system.errors import UnsupportedModelError
from dpo_pack.system.machine import is_intel

# torch computes fp32 products with MKL. On AMD processors with AVX-512 oneDNN computes `x @ weight.T` and
# `grad @ weight` faster, on Intel's only the head's products; `grad.T @ x` is slower on both
# (docs/dev/performance.md). Both compute in plain fp32: they differ by rounding.


def times_transposed(features: Tensor, weight: Tensor) -> Tensor:
    """Computes `features @ weight.T` without gradients: [..., D], [O, D] -> [..., O]."""
    product = _onednn_product()
    if product is None or features.device.type != "cpu" or features.dtype != torch.float32:
        return features @ weight.T
    return product(features, weight, None, "none", [], "")


def speed_up_linears(model: nn.Module) -> None:
    """Makes linear layers call oneDNN on fp32, in place, where it is faster: not on Intel's CPUs."""
    if _onednn_product() is None or is_intel():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, features: Tensor) -> Tensor:
    is_float32 = features.device.type == "cpu" and features.dtype == torch.float32
    if features.ndim < 2 or not is_float32 or torch.is_autocast_enabled("cpu"):
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


@functools.cache
def _onednn_product() -> Callable[..., Tensor] | None:
    """Returns torch's binding of oneDNN's product, which is not public; None if missing or not measured."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return None
    return product


class _CastExperts:
    """Experts whose weights are in another dtype; all else is theirs."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self.experts = experts
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to(self.dtype) if name.endswith("_proj") else value


def _experts(module: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        module = _CastExperts(module, torch.get_autocast_dtype(device))
    out: Tensor = grouped_mm_experts_forward(module, hidden, *routing)
    return out


def cast_experts() -> None:
    """Makes experts compute in autocast's dtype. Autocast has no rule for transformers' grouped product, and
    on CUDA torch computes it in fp32 one expert after another, and waits for the device each time."""
    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = _experts


def feed_forwards(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module | None]]:
    """Returns (decoder layer, its feed-forward block), at least one; None if the block is not one module."""
    text, num_layers = text_model(model), model.config.get_text_config().num_hidden_layers
    lists = [m for m in text.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    found = []
    for layer in lists[0] if lists else ():
        blocks = [block for name, block in layer.named_children() if name in ("mlp", "feed_forward", "ffn")]
        found.append((layer, blocks[0] if len(blocks) == 1 else None))
    return found or [(text, None)]


def tile_feed_forwards(model: PreTrainedModel, num_tokens: int, *, has_experts: bool) -> None:
    """Makes feed-forward blocks compute at most `num_tokens` tokens at a time, in place; the backward pass
    computes each tile once more. Raises UnsupportedModelError."""
    blocks = [block for _, block in feed_forwards(model) if block is not None]
    # Each must read hidden states and nothing else.
    are_plain = all(len(inspect.signature(block.forward).parameters) == 1 for block in blocks)
    if has_experts or not are_plain or len(blocks) < len(feed_forwards(model)):
        raise UnsupportedModelError(
            f"model.mlp_tile_tokens: not every layer of {type(model).__name__} has a feed-forward block that "
            "computes each token by itself; leave it out"
        )
    for block in blocks:
        block.forward = functools.partial(_tiling(), block.forward, num_tokens)


@functools.cache
def _tiling() -> Callable[..., Tensor]:
    # One object, because torch would compile the layers again for another.
    # Not recursive: a row of one tile runs the compiled block. `checkpoint` is never compiled.
    tiling: Callable[..., Tensor] = torch.compiler.disable(
        _in_tiles, recursive=False, reason="rows have many lengths"
    )
    return tiling


def _in_tiles(whole: Callable[..., Tensor], num_tokens: int, features: Tensor) -> Tensor:
    num_tiles = -(-features.shape[:-1].numel() // num_tokens)
    if num_tiles <= 1:
        return whole(features)
    tiles = features.tensor_split(num_tiles, dim=1)  # [B, L, D] along L
    recomputed = functools.partial(checkpoint, whole, use_reentrant=False)
    return torch.cat(list(map(recomputed, tiles)), dim=1)


def trim_last_layer(model: PreTrainedModel) -> None:
    """Makes the last feed-forward block skip unscored positions of packed rows, in place. Exact if the block
    never mixes positions; proofs check that."""
    layer, block = feed_forwards(model)[-1]
    if block is None:
        return
    trimmed = _TrimmedBlock(whole=block.forward)
    block.forward = trimmed.forward
    layer.register_forward_pre_hook(trimmed.before_layer, with_kwargs=True)
    for part in layer.children():
        if part is not block and any(part.children()):  # the attention, because a norm does not get the row
            part.register_forward_pre_hook(trimmed.before_part, with_kwargs=True)


@dataclass(eq=False, slots=True, kw_only=True)
class _TrimmedBlock:
    whole: Callable[..., Any]
    positions: Tensor | None = None  # [U], None: all

    def before_layer(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        segments = keywords.get("row_segments")
        self.positions = None if segments is None else segments.scored_positions

    def before_part(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # Activation checkpointing does not run the layer's hooks when it recomputes a layer.
        if "row_segments" in keywords:
            self.before_layer(part, inputs, keywords)

    def forward(self, features: Tensor, *others: Any, **options: Any) -> Any:
        """Runs the block: [1, T, D] -> [1, T, D], zero at positions that the row does not need."""
        if self.positions is None or others or options:
            return self.whole(features, *others, **options)
        needed = self.whole(features.index_select(1, self.positions))  # [1, U, D]
        if not isinstance(needed, Tensor):  # a block with a router also returns router values
            return self.whole(features)
        return needed.new_zeros(features.shape).index_copy(1, self.positions, needed)


@contextlib.contextmanager
def stock_layers(model: PreTrainedModel) -> Iterator[None]:
    """Context in which every module runs its class's own forward; only `times_transposed` still acts."""
    own = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    try:
        yield
    finally:
        for module, forward in own.items():
            module.forward = forward
