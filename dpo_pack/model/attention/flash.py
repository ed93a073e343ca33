"""Attention on CUDA with FlashAttention's kernel for segments of any length.

torch has this kernel, and so has the optional package flash-attn, which supports more models. Both take
[T, H, D] queries, [K, H_kv, D] keys and values in bf16 or fp16, and return [T, H, D].

Legend: T tokens of the row, K keys of all segments (see segments.py), H heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import deterministic

from dpo_pack.model.attention.segments import AttentionOptions, RowSegments, as_autocast
from dpo_pack.system.errors import first_line

_memory: Any = deterministic  # torch's module has this setting as a property, which mypy does not see


def flash_attn_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "flash_attn", which calls the kernel of the flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    assert options.sinks is None  # select_backend refuses these models
    out: Tensor = flash_attn_varlen_func(
        *as_autocast(query, key, _as_wide(value, query)),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        max(segments.query_lengths),
        max(segments.key_lengths),
        softmax_scale=options.scale,
        causal=True,
        window_size=_neighbours(options.window),
        softcap=options.softcap or 0.0,
        deterministic=True,
    )
    return out[..., : value.shape[-1]]


def torch_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, options: AttentionOptions
) -> Tensor:
    """The backend "torch_varlen", which calls torch's own kernel."""
    from torch.nn.attention.varlen import varlen_attn

    assert options.softcap is None and options.sinks is None  # select_backend refuses these models
    out = varlen_attn(
        *as_autocast(query, key, _as_wide(value, query)),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        max(segments.query_lengths),
        max(segments.key_lengths),
        **_varlen_options(options, grouped_heads=query.shape[1] != key.shape[1]),
    )
    assert isinstance(out, Tensor)  # it returns a tuple only if the caller asks for the logsumexp
    _make_backward_deterministic(out)
    return out[..., : value.shape[-1]]


def _as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Pads values with zeros to the width of queries, which the kernels want: latent attention has less."""
    missing = query.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing else value


@contextlib.contextmanager
def keeps_deterministic_mode() -> Iterator[None]:
    """Context of a backward pass that may fail: the mode is as before, also if the kernel has raised."""
    before, fills = torch.get_deterministic_debug_mode(), _memory.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        _memory.fill_uninitialized_memory = fills


def _make_backward_deterministic(out: Tensor) -> None:
    """Makes the kernel's backward pass give the same bits in each run.

    The kernel reads torch's global mode, which is on only while it runs: others could raise errors in it.
    """
    if out.grad_fn is None:
        return
    modes: list[contextlib.AbstractContextManager[None]] = []

    def enter(grads: tuple[Tensor, ...]) -> None:
        modes.append(keeps_deterministic_mode())
        modes[-1].__enter__()
        torch.set_deterministic_debug_mode("error")
        _memory.fill_uninitialized_memory = False  # the kernel writes all that it allocates

    def leave(inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        modes.pop().__exit__(None, None, None)

    out.grad_fn.register_prehook(enter)
    out.grad_fn.register_hook(leave)


def flash_attn_obstacle() -> str | None:
    """Returns why the flash-attn package's kernel cannot be called, or None when it can."""
    try:  # the wheel `flash-attn-4` installs a package of this name without the function
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except Exception as error:  # also if a CUDA library is missing or was built for another torch
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_attn":
            return "package flash-attn is not installed"
        return f"package flash-attn cannot be used ({first_line(error)})"
    return None


def supports_window_and_scale() -> bool:
    """Whether torch's kernel takes a sliding window and a softmax scale (torch 2.10: no)."""
    return {"window_size", "scale"} <= _varlen_parameters()


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_options(options: AttentionOptions, *, grouped_heads: bool) -> dict[str, Any]:
    """Returns the kernel's keyword arguments. Causal: `is_causal` in torch 2.10, `window_size` from 2.11."""
    known = _varlen_parameters()
    assert options.window is None or "window_size" in known
    arguments: dict[str, Any] = {"is_causal": True}
    if "window_size" in known:
        arguments = {"window_size": _neighbours(options.window)}
    if "scale" in known:
        arguments["scale"] = options.scale
    if "enable_gqa" in known and grouped_heads:
        arguments["enable_gqa"] = True
    return arguments


def _neighbours(window: int | None) -> tuple[int, int]:
    """Returns how many keys a query sees to its (left, right), -1 for all. `window` counts its own, too."""
    return (-1 if window is None else window - 1, 0)
