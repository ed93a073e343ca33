"""Chooses an attention backend that computes a model's attention exactly on a device; gives the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpo_pack.model.attention import BACKENDS
from dpo_pack.model.attention.flash import flash_attn_obstacle, supports_window_and_scale
from dpo_pack.model.attention.flex import flex_obstacle
from dpo_pack.system.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The properties of a model's attention that decide which backends can compute it."""

    head_dim: int
    value_head_dim: int
    has_window: bool
    has_softcap: bool
    has_sinks: bool
    has_custom_scale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The chosen backend's name and a one-line reason: for `auto`, why it rejected the backends before."""

    name: str
    reason: str


def select_backend(
    requested: str, needs: AttentionNeeds, *, device: torch.device, dtype: torch.dtype
) -> BackendChoice:
    """Returns the requested backend, or for "auto" the first of `BACKENDS` that computes the model exactly.

    `dtype` is the dtype of the activations. Raises UnsupportedModelError when the requested backend cannot
    compute this model exactly.
    """
    if requested != "auto":
        obstacle = backend_obstacle(requested, needs, device=device, dtype=dtype)
        if obstacle is not None:
            raise UnsupportedModelError(
                f"model.attention: {requested} cannot be used here: {obstacle}; use model.attention: auto"
            )
        return BackendChoice(name=requested, reason="set by model.attention")
    obstacles: list[str] = []
    for name in BACKENDS:
        obstacle = backend_obstacle(name, needs, device=device, dtype=dtype)
        if obstacle is None:
            return BackendChoice(name=name, reason="; ".join(obstacles) or "the fastest backend")
        obstacles.append(f"not {name}: {obstacle}")
    raise AssertionError("the sdpa backend takes every model")


def backend_obstacle(
    name: str, needs: AttentionNeeds, *, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Returns why backend `name` cannot compute this model exactly on `device`, or None when it can."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return "it needs a CUDA device"
    if name == "flex":
        if not (needs.has_softcap or needs.has_sinks):
            return "the model has neither softcaps nor sinks, and only models with these need it"
        return flex_obstacle(device, dtype, needs.head_dim, needs.value_head_dim)
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 0)
    if capability < (8, 0):  # for example V100 and T4
        return "FlashAttention needs compute capability 8.0, and the device has {}.{}".format(*capability)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    if needs.has_sinks:
        return "the model has attention sinks, and its kernel cannot compute them"
    if needs.head_dim != needs.value_head_dim:
        return f"head dimensions of keys ({needs.head_dim}) and values ({needs.value_head_dim}) differ"
    if needs.head_dim > 256:
        return f"head dimension {needs.head_dim} is above 256"
    if name == "flash_attn":
        return flash_attn_obstacle()
    if torch.version.hip is not None:
        return "on ROCm torch's kernel aligns queries with the first keys, not with the last"
    if needs.head_dim % 8 != 0:  # the flash-attn package pads such heads itself
        return f"head dimension {needs.head_dim} is not a multiple of 8"
    if needs.has_softcap:
        return "the model caps attention logits, and its kernel cannot do this"
    if (needs.has_window or needs.has_custom_scale) and not supports_window_and_scale():
        return f"the kernel of torch {torch.__version__} takes no sliding window and no scale"
    return None
