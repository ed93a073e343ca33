"""The kernel proof: its plain attention is right, its bound holds with room and is narrow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.groups import CPU
from torch import Tensor

from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import AttentionOptions
from dpo_pack.proofs.layers import SeamCall, attention_error

PLAIN = AttentionOptions(scale=0.25, window=None, softcap=None, sinks=None)
LLAMA = SeamCall(num_heads=4, num_kv_heads=2, head_dim=16, value_head_dim=16, options=PLAIN, has_sinks=False)
CALLS = {
    "grouped heads": LLAMA,
    "one key and value head": replace(LLAMA, num_kv_heads=1),
    "a window": replace(LLAMA, options=replace(PLAIN, window=7)),
    "a window longer than the proof's segments": replace(LLAMA, options=replace(PLAIN, window=4096)),
    "a softcap": replace(LLAMA, options=replace(PLAIN, softcap=2.0)),
    "sinks": replace(LLAMA, has_sinks=True),
    "narrower values": replace(LLAMA, head_dim=12, value_head_dim=6),
    "wide heads": replace(LLAMA, head_dim=128, value_head_dim=128, options=replace(PLAIN, scale=128**-0.5)),
}
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


def ratios(attention: Any, call: SeamCall, dtype: torch.dtype) -> list[float]:
    """Error over what it may be, for a few draws."""
    found = []
    for seed in range(5):
        torch.manual_seed(seed)
        error, allowed = attention_error(attention, call, dtype, CPU)
        found.append(error / allowed)
    return found


def wrong_scale(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: Any) -> Tensor:
    return sdpa_attention(query, key, value, segments, replace(options, scale=1.02 * options.scale))


def without_window(query: Tensor, key: Tensor, value: Tensor, segments: Any, options: Any) -> Tensor:
    return sdpa_attention(query, key, value, segments, replace(options, window=None))


def one_token_wrong(*inputs: Any) -> Tensor:
    """The output of the segment of one token."""
    out = sdpa_attention(*inputs)
    return torch.cat((0.9 * out[:1], out[1:]))


def not_a_number(*inputs: Any) -> Tensor:
    return sdpa_attention(*inputs) * torch.nan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("attention", "name"),
    [
        (wrong_scale, "grouped heads"),
        (without_window, "a window"),
        (without_window, "a window longer than the proof's segments"),
        (one_token_wrong, "wide heads"),
        (not_a_number, "grouped heads"),
    ],
)
def test_a_wrong_kernel_exceeds_every_dtype_s_bound(attention: Any, name: str, dtype: torch.dtype) -> None:
    assert min(ratios(attention, CALLS[name], dtype)) > 1.0
