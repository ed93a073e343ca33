"""A CUDA build of torch without a GPU: what a row and a model's forward do there, but for the numbers.

A fake tensor has no values: whoever asks for one, as a wait for the device does, gets an error, and so does
who mixes devices. Backward passes need a device (tests marked gpu), those written here by hand do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_config
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.attention.flash import supports_window_and_scale
from dpo_pack.model.attention.segments import _Take
from dpo_pack.model.fast_layers import trim_last_layer
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.logps import HEAD_BOUNDS, HeadPasses, HeadTransform, WantedStatistics, _ChunkedLogps
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group

pytestmark = pytest.mark.cuda_build
CUDA = torch.device("cuda")
FAMILIES = ["llama", "qwen3", "olmo2", "gpt2"]
WITH_WINDOWS = ["mistral", "gemma3_text", "phi3"]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # fake tensors have none
    # Without a device torch.autocast switches itself off.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    register_attention()
    with FakeTensorMode():
        yield


def make_row() -> Row:
    random = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        drawn: np.ndarray = random.integers(3, VOCABULARY, length)
        return drawn

    groups = [Group(context=ids(9), completions=(ids(5), ids(7))) for _ in range(3)]
    return packed_row(groups, CUDA, share_prompt=True)


def make_scorer(family: str, *, autocast: torch.dtype | None = None) -> CompletionLogps:
    """Weights in bf16, or in fp32 under autocast."""
    dtype = torch.bfloat16 if autocast is None else torch.float32
    with CUDA:
        model = AutoModelForCausalLM.from_config(
            tiny_config(family), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    trim_last_layer(model)
    return CompletionLogps(model, backend=BACKENDS["torch_varlen"], autocast=autocast).eval()


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the kernel's calls; a fake kernel takes any, the real one takes one and no fp32."""
    calls: list[torch.dtype] = []

    @functools.wraps(varlen_attn)
    def checked(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        assert query.dtype == key.dtype == value.dtype
        calls.append(query.dtype)
        return varlen_attn(query, key, value, *arguments, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", checked)
    return calls


def test_waiting_for_the_device_is_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        make_row().input_ids.sum().item()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_WINDOWS])
def test_log_probs_of_a_row_wait_for_no_device(
    family: str, trains: bool, autocast: torch.dtype | None, kernel_calls: list[torch.dtype]
) -> None:
    if family in WITH_WINDOWS and not supports_window_and_scale():
        pytest.skip("this torch's kernel takes no window")
    scorer = make_scorer(family, autocast=autocast)
    with torch.set_grad_enabled(trains):
        said = scorer(make_row())
    assert said.sums.shape == (6,) and said.sums.requires_grad == trains
    tensors = [*said.token_statistics, *(field for field in said if isinstance(field, torch.Tensor))]
    assert len(tensors) == len(said.token_statistics) + len(said) - 1
    assert all(tensor.device.type == "cuda" for tensor in tensors)
    assert kernel_calls == [torch.bfloat16] * scorer.num_attention_layers


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_of_the_head_waits_for_nothing(
    dtype: torch.dtype, trains_head: bool, softcap: float | None
) -> None:
    hidden, weight = torch.zeros(7, 8, device=CUDA), torch.zeros(40, 8, device=CUDA)
    targets = torch.zeros(7, dtype=torch.int64, device=CUDA)
    ctx: Any = SimpleNamespace(
        needs_input_grad=(True, trains_head, False),
        save_for_backward=lambda *tensors: setattr(ctx, "saved_tensors", tensors),
        mark_non_differentiable=lambda *tensors: None,
    )
    transform = HeadTransform(scale=0.5, softcap=softcap)
    kept = HEAD_BOUNDS["cuda"].kept_bytes
    outputs = _ChunkedLogps.forward(
        ctx, hidden, weight, None, targets, transform, dtype, 3, kept, WantedStatistics(), HeadPasses()
    )
    grad_hidden, grad_weight, *_ = _ChunkedLogps.backward(ctx, *outputs)
    assert grad_hidden is not None and grad_hidden.shape == hidden.shape and grad_hidden.is_cuda
    assert (grad_weight is not None) == trains_head
    assert grad_weight is None or (grad_weight.shape == weight.shape and grad_weight.is_cuda)


def test_the_backward_pass_of_gathered_keys_waits_for_nothing() -> None:
    row = make_row()
    assert row.segments is not None and row.segments.kv_gather is not None
    ctx: Any = SimpleNamespace()
    states = torch.zeros(row.num_tokens, 2, 8, device=CUDA, dtype=torch.bfloat16)
    gathered = _Take.forward(ctx, states, row.segments.kv_gather)
    grad, _ = _Take.backward(ctx, gathered)
    assert len(gathered) > row.num_tokens and grad.shape == states.shape and grad.dtype == states.dtype
