"""A run's changing tensors by names that are the same on any number of ranks, sharded or not.

    policy.<parameter>   reference.<parameter>   optimizer.<key>.<parameter>

Names of parameters are the model's own, tied ones once. torch.distributed.checkpoint stores tensors by name
and place in the whole, so what shards have saved loads into whole tensors and into other shards. Optimizer
state is put where it belongs as it was: `Optimizer.load_state_dict` would cast it to the parameter's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

_POLICY, _REFERENCE, _OPTIMIZER = "policy.", "reference.", "optimizer."


def policy_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained; loading into them changes the policy."""
    trained = ((name, p) for name, p in policy.named_parameters() if p.requires_grad)
    return {f"{_POLICY}{name}": parameter.detach() for name, parameter in trained}


def reference_tensors(reference: nn.Module | None) -> dict[str, Tensor]:
    """The parameters of a reference that follows the policy; of another nothing."""
    parameters = () if reference is None else reference.named_parameters()
    return {f"{_REFERENCE}{name}": parameter.detach() for name, parameter in parameters}


def optimizer_tensors(policy: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments, step counts and whatever else the optimizer keeps of each parameter as a tensor."""
    return {
        f"{_OPTIMIZER}{key}.{name}": value
        for name, key, value in _optimizer_state(policy, optimizer)
        if isinstance(value, Tensor)
    }


def optimizer_values(policy: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What is no tensor: settings of the parameter groups, and numbers kept of a parameter."""
    values: dict[str, dict[str, Any]] = {}
    for name, key, value in _optimizer_state(policy, optimizer):
        if not isinstance(value, Tensor):
            values.setdefault(name, {})[key] = value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "state": values}


def optimizer_slots(
    policy: nn.Module, optimizer: Optimizer, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Tensors to load a checkpoint's optimizer state into; `saved` describes what it holds, by name.

    What has the parameter's shape is sharded as the parameter is.
    """
    keys, slots = _keys_by_parameter(saved), {}
    for name, parameter, group in _trained(policy, optimizer):
        for key in keys.get(name, ()):
            full = f"{_OPTIMIZER}{key}.{name}"
            size, dtype = saved[full].size, saved[full].properties.dtype
            if size == parameter.shape:
                slots[full] = torch.empty_like(parameter, dtype=dtype).detach()
                continue
            # Plain optimizers count a parameter's steps on the host, fused ones on its device.
            is_on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
            slots[full] = torch.empty(size, dtype=dtype, device="cpu" if is_on_host else parameter.device)
    return slots


def set_optimizer(
    policy: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Make `optimizer` what `optimizer_tensors` and `optimizer_values` said."""
    for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update(saved)
    keys = _keys_by_parameter(tensors)
    optimizer.state.clear()
    for name, parameter, _ in _trained(policy, optimizer):
        state = {key: tensors[f"{_OPTIMIZER}{key}.{name}"] for key in keys.get(name, ())}
        state |= values["state"].get(name, {})
        if state:
            optimizer.state[parameter] = state


def _optimizer_state(policy: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Parameter, key and value of all that is kept of parameters."""
    for name, parameter, _ in _trained(policy, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value


def _trained(policy: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Name, parameter and group of everything the optimizer trains."""
    names = {parameter: name for name, parameter in policy.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter, group


def _keys_by_parameter(names: Iterable[str]) -> dict[str, list[str]]:
    """What is kept of each parameter, from names of tensors."""
    keys: dict[str, list[str]] = {}
    for full in names:
        if full.startswith(_OPTIMIZER):
            key, name = full.removeprefix(_OPTIMIZER).split(".", 1)
            keys.setdefault(name, []).append(key)
    return keys
