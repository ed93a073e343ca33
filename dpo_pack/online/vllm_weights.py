"""The policy's tensors as a checkpoint would hold them, for an engine that keeps weights of its own.

They come layer by layer, under the names of the family's checkpoints, an adapter added to its base. Nothing
of the policy changes; of what had to be computed (merged or regrouped weights) one layer exists at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

_LAYER = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.)")  # up to the first number: model.layers.3


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, *, has_adapter: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all parameters and persistent buffers, tied ones once.

    Those that an adapter does not change share the model's memory, so they must be read before it trains on.
    """
    adapted = _adapted_layers(model) if has_adapter else {}
    for layer, named in groupby(_untied(model).items(), key=lambda item: _layer_of(item[0])):
        inside = [module for name, module in adapted.items() if _layer_of(f"{name}.") == layer]
        # No name for what it returns: it would live on while the next layer is made.
        yield from _as_in_checkpoints(model, _merged_state(named, inside, has_adapter=has_adapter)).items()


def _merged_state(
    named: Iterable[tuple[str, Tensor]], adapted: Sequence[BaseTunerLayer], *, has_adapter: bool
) -> dict[str, Tensor]:
    """A layer's tensors as they are without an adapter, or with it merged."""
    with _merged(adapted):
        return {
            plain: tensor.detach()
            for name, tensor in named
            if (plain := plain_name(name) if has_adapter else name) is not None
        }


def plain_name(name: str) -> str | None:
    """A tensor's name in the model without its adapter; None for the adapter's own and what it replaces."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
        return None
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        del parts[place : place + 2]  # and the adapter's name: there is one
    return ".".join(part for part in parts if part != "base_layer")


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds, in the order of the model; tied parameters once, by their first name."""
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(tensor), (name, tensor))
    return dict(by_identity.values())


def _adapted_layers(model: PreTrainedModel) -> dict[str, BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


@contextlib.contextmanager
def _merged(layers: Sequence[Any]) -> Iterator[None]:
    """The base weights of `layers` with their adapter added, as peft adds it; then those of before."""
    bases: list[nn.Module] = [layer.get_base_layer() for layer in layers]
    before = [(parameter, parameter.data) for base in bases for parameter in base.parameters(recurse=False)]
    try:
        for layer in layers:
            layer.merge(safe_merge=True)  # into a copy
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for layer in layers:
            layer.merged_adapters.clear()


def _as_in_checkpoints(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes of transformers -> those of checkpoints: some families' experts are stacked in memory.

    What the checkpoint that was read had of its own (a prefix before the text model) stays out: the engine is
    given this model's class, not that of the checkpoint.
    """
    own = vars(model).pop("_weight_conversions", None)
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    finally:
        if own is not None:
            vars(model)["_weight_conversions"] = own
    return reverted
