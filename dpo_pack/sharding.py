"""One model over all ranks through torch's `fully_shard` (FSDP2): each keeps a part of every weight.

Rank 0 reads the weights, the others build the model without any. A layer at a time is filled, told to all
ranks and cut to shards, so that no rank but the first ever holds more than that layer and its own shards.

A sharded layer gathers its weights for its own forward and backward. The scorer is sharded as a whole as
well: its forward gathers embeddings, the last norm and the output head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack import ranks
from dpo_pack.errors import UnsupportedModelError
from dpo_pack.models import CompletionLogps
from dpo_pack.strategy import Strategy


def shard_model(scorer: CompletionLogps, strategy: Strategy, device: torch.device) -> None:
    """Turn every parameter into a DTensor of rank 0's values, in place; collective.

    On ranks other than 0 parameters may be on the meta device. Raises UnsupportedModelError for a model that
    has no layers we know, or that is built otherwise without its weights.
    """
    assert strategy.mesh is not None
    _check_same_tensors(scorer.model)
    _check_one_type(scorer.model)
    options: dict[str, Any] = {
        "mesh": strategy.mesh,
        "mp_policy": _mixed_precision(scorer),
        "offload_policy": CPUOffloadPolicy() if strategy.cpu_offload else OffloadPolicy(),
    }
    for layer in _layers(scorer.model):
        _fill(layer, device)
        fully_shard(layer, **options)
    _fill(scorer, device)
    _fill_buffers(scorer, device)
    fully_shard(scorer, **options)
    scorer.register_forward_hook(_free_after_inference)
    _gather_for_logits(scorer)


def _mixed_precision(scorer: CompletionLogps) -> MixedPrecisionPolicy:
    """Weights are gathered as they are, or in the scorer's `gather_dtype`; gradients meet in fp32 or wider.

    Inputs are not cast: what is not a weight (positions, the layout of a row) is right as it is.
    """
    is_low = scorer.gather_dtype is not None or any(p.dtype.itemsize < 4 for p in scorer.parameters())
    return MixedPrecisionPolicy(
        param_dtype=scorer.gather_dtype,
        reduce_dtype=torch.float32 if is_low else None,
        cast_forward_inputs=False,
    )


def _free_after_inference(scorer: Any, inputs: Any, output: Any) -> None:
    """The scorer's own weights stay gathered for a backward pass; without one nothing else frees them."""
    if not torch.is_grad_enabled():
        scorer.reshard()


def _gather_for_logits(scorer: Any) -> None:
    """`full_logits` gathers the scorer's own weights as its forward does, and frees them."""
    register_fsdp_forward_method(scorer, "full_logits")
    gathering = scorer.full_logits

    def full_logits(**inputs: Any) -> Tensor:
        try:
            logits: Tensor = gathering(**inputs)
            return logits
        finally:
            scorer.reshard()

    scorer.full_logits = full_logits


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's layers, outermost, each to be gathered by itself."""
    kinds = set(model._no_split_modules or ())
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if module in inner:
            continue
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in kinds:
            layers.append(module)
            inner.update(module.modules())
    if not layers:
        raise UnsupportedModelError(
            f"distributed.strategy: {type(model).__name__} does not say what its layers are, so it cannot be "
            "sharded; set distributed.strategy: ddp"
        )
    return layers


def _check_same_tensors(model: nn.Module) -> None:
    """Ranks that build the model without weights must build the same one.

    Of parameters' types, and which are trained, reading weights may have its own opinion: rank 0's. So it may
    of buffers, see `_fill_buffers`.
    """
    mine = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    mine += [(name, ()) for name, _ in model.named_buffers(remove_duplicate=False)]
    if any(theirs != mine for theirs in ranks.every_rank_says(mine)):
        raise UnsupportedModelError(
            f"distributed.strategy: {type(model).__name__} has other tensors when it is built without its "
            "weights, so it cannot be sharded; set distributed.strategy: ddp"
        )
    kinds = ranks.first_says([(parameter.dtype, parameter.requires_grad) for parameter in model.parameters()])
    for parameter, (dtype, is_trained) in zip(model.parameters(), kinds, strict=True):
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(is_trained)


def _check_one_type(model: nn.Module) -> None:
    """A layer's gradients are reduced as one tensor; some families keep a part of their weights in fp32."""
    trained = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    wide = [name for name, dtype in trained if dtype.itemsize >= 4]
    if wide and len(wide) < len(trained):
        raise UnsupportedModelError(
            f"model.dtype: {type(model).__name__} keeps {wide[0]} in float32 beside weights of a lower "
            "precision, and shards must be of one type; set model.dtype: float32 or distributed.strategy: ddp"
        )


@torch.no_grad()
def _fill(module: nn.Module, device: torch.device) -> None:
    """Rank 0's values of the parameters that are not sharded yet, on every rank's device.

    Tied parameters stay tied.
    """
    filled: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            if id(parameter) not in filled:
                value = _from_first(parameter.detach(), device)
                filled[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(part, name, filled[id(parameter)])


@torch.no_grad()
def _fill_buffers(module: nn.Module, device: torch.device) -> None:
    """Rank 0's buffers in its shapes and types: those read with the weights may be in fp32 always."""
    named = dict(module.named_buffers(remove_duplicate=False))
    kinds = ranks.first_says({name: (buffer.shape, buffer.dtype) for name, buffer in named.items()})
    for name, buffer in named.items():
        shape, dtype = kinds[name]
        same = buffer if ranks.is_first() else torch.empty(shape, dtype=dtype, device="meta")
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, _from_first(same, device))


def _from_first(tensor: Tensor, device: torch.device) -> Tensor:
    value = tensor.to(device) if ranks.is_first() else torch.empty_like(tensor, device=device)
    value = value.contiguous()
    dist.broadcast(value, src=0)
    return value


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def full_state(model: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """The model's tensors on rank 0's CPU, by name, tied ones once; nothing on the others. Collective.

    One tensor at a time is gathered on the device. `trained_only` leaves frozen ones and buffers out.
    """
    state: dict[str, Tensor] = {}
    whole: dict[int, Tensor] = {}
    for name, tensor in _tensors(model):
        if trained_only and not tensor.requires_grad:
            continue
        if id(tensor) not in whole:
            value = tensor.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            whole[id(tensor)] = value.cpu() if ranks.is_first() else value.new_empty(0)
        if ranks.is_first():
            state[name] = whole[id(tensor)]
    return state


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the model saves, by name."""
    saved = model.state_dict().keys()
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if name in saved:
            yield name, tensor
