"""The kernels of fla, causal-conv1d and mamba-ssm by definition, token by token, on any device.

They have the signatures of the real functions, and refuse what these refuse. Legend: B batch, T tokens,
N sequences, H heads, K and V key and value dimensions, D channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    assert len(beta.shape) == 3 and g.shape == beta.shape and not head_first
    return _delta_rule(
        q, k, v, g[..., None], beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    assert g.shape == k.shape and not use_gate_in_kernel and not kwargs
    # Without it the real function copies `cu_seqlens` to the host, which waits for the device.
    if cu_seqlens is not None:
        assert cu_seqlens_cpu is not None and torch.equal(cu_seqlens_cpu, cu_seqlens.cpu())
    assert initial_state is None or initial_state.dtype == torch.float32
    return _delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """[1, T, H, K] twice, [1, T, H, V], [1, T, H, 1 or K], [1, T, H] -> [1, T, H, V], [N, H, K, V]."""
    assert q.dtype == k.dtype == v.dtype and q.shape[2] == v.shape[2] and q.shape[0] == 1
    assert cu_seqlens is not None and cu_seqlens.dtype in (torch.int32, torch.int64)
    num = len(cu_seqlens) - 1
    assert initial_state is None or initial_state.shape == (num, q.shape[2], q.shape[3], v.shape[3])
    dtype = q.dtype
    q, k, v, g, beta = (states.squeeze(0).float() for states in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt() for states in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    outputs, finals = [], []
    for sequence, (start, end) in enumerate(
        zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    ):
        state = torch.zeros(*k.shape[1:], v.shape[2], device=k.device)
        if initial_state is not None:
            state = initial_state[sequence].float()
        for t in range(start, end):
            state = state * g[t].exp()[..., None]
            known = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - known))
            outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
        finals.append(state)
    return torch.stack(outputs)[None].to(dtype), torch.stack(finals) if output_final_state else None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """[B, D, T], [D, width], [D] -> [B, D, T]."""
    assert activation in (None, "silu", "swish") and seq_idx is None and initial_states is None
    dim, width = weight.shape
    assert 2 <= width <= 4 and x.ndim == 3 and x.shape[1] == dim
    assert x.stride(2) == 1 or (x.stride(1) == 1 and all(s % 8 == 0 for s in (dim, x.stride(0), x.stride(2))))
    longer = F.pad(x.float(), (width - 1, 0))
    out = sum(longer[..., i : i + x.shape[2]] * weight[:, i, None].float() for i in range(width))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias[:, None].float()
    return (out if activation is None else F.silu(out)).to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """[B, T, H, V], [B, T, H], [H], [B, T, groups, K] twice -> [B, T, H, V] (and [B, H, V, K])."""
    assert seq_idx is None and cu_seqlens is None and z is None and not return_varlen_states
    batch, length, heads, _ = x.shape
    assert B.shape == C.shape == (batch, length, *B.shape[2:]) and heads % B.shape[2] == 0
    assert dt.shape == (batch, length, heads) and A.shape == (heads,)
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    keys, reads = (s.float().repeat_interleave(heads // B.shape[2], dim=2) for s in (B, C))
    state = torch.zeros(batch, heads, x.shape[3], B.shape[3], device=x.device)
    if initial_states is not None:
        assert initial_states.shape == state.shape
        state = initial_states.float()
    outputs = []
    for t in range(length):
        step = dt[:, t, :, None, None]
        state = state * (A[:, None, None] * step).exp() + step * x[:, t, :, :, None] * keys[:, t, :, None]
        outputs.append((state * reads[:, t, :, None]).sum(dim=-1))
    out = torch.stack(outputs, dim=1)
    if D is not None:
        out = out + D[:, None] * x
    return (out.to(x.dtype), state) if return_final_states else out.to(x.dtype)


_MODULES: dict[str, Callable[..., Any]] = {
    "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
    "fla.ops.kda": chunk_kda,
    "causal_conv1d": causal_conv1d_fn,
    "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
}


def use_stand_ins(
    monkeypatch: pytest.MonkeyPatch, modules: Iterable[str] = (*_MODULES,), /, **changed: Callable[..., Any]
) -> None:
    """Makes the packages' modules importable; `changed` replaces functions, by their names."""
    for path in modules:
        function = _MODULES[path]
        module: Any = ModuleType(path)
        setattr(module, function.__name__, changed.get(function.__name__, function))
        monkeypatch.setitem(sys.modules, path, module)
