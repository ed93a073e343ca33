"""Gives the policy's tensors, in the form of a checkpoint, to an engine that has its own copy of the weights.

They come layer by layer, with an adapter added to the base weights, so that the computed weights (merged or
regrouped) of only one layer at a time are in memory.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dpo_pack.model.lora import plain_name

_LAYER = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.)")  # a name up to its first number, such as model.layers.3


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, *, has_adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of all parameters and persistent buffers; tied tensors come once. A tensor that
    no adapter changes is the model's own, so read it before the next training step."""
    tensors: dict[int, tuple[str, Tensor]] = {}  # by identity: tied tensors have one
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    adapted: dict[str, Any] = {}
    if has_adapter:
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}
    for layer, named in groupby(tensors.values(), key=lambda item: _layer_of(item[0])):
        inside = [module for name, module in adapted.items() if _layer_of(f"{name}.") == layer]
        # A variable would keep this result in memory while the next layer is computed.
        yield from _as_in_checkpoints(model, named, inside, has_adapter=has_adapter).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""


def _as_in_checkpoints(
    model: PreTrainedModel, named: Iterable[tuple[str, Tensor]], adapted: Sequence[Any], *, has_adapter: bool
) -> dict[str, Tensor]:
    """Returns a layer's tensors, adapters added, with the names and shapes of checkpoints, but without a
    prefix before the text model: the engine gets the class of this model."""
    own = vars(model).pop("_weight_conversions", None)
    try:
        with _merged(adapted):
            state = {
                plain: tensor.detach()
                for name, tensor in named
                if (plain := plain_name(name) if has_adapter else name) is not None
            }
        reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    finally:
        if own is not None:
            vars(model)["_weight_conversions"] = own
    return reverted


@contextlib.contextmanager
def _merged(layers: Sequence[Any]) -> Iterator[None]:
    """Adds the adapter to the base weights of `layers`, as peft does; restores the weights afterwards."""
    bases: list[nn.Module] = [layer.get_base_layer() for layer in layers]
    before = [(parameter, parameter.data) for base in bases for parameter in base.parameters(recurse=False)]
    try:
        for layer in layers:
            layer.merge(safe_merge=True)  # peft writes the sum into a new tensor
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()
