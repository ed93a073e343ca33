"""Kernels of other packages for recurrent layers: what they are given, and when they are used.

On a CPU functions with the same arguments stand in for them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.family_errors import GROUPS, skip_unless_packed
from support.gradients import flat, gradients
from support.groups import CPU, make_row
from support.marks import slow
from support.recurrent_stand_ins import (
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    mamba_chunk_scan_combined,
    use_stand_ins,
)
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from dpo_pack.model.attention import ATTENTION_NAME, register_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.config import check_packs
from dpo_pack.model.recurrence import RecurrentCall, wrap_recurrent_layers
from dpo_pack.model.recurrence.kernels import KERNELS
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs.recurrence import take_kernels
from dpo_pack.proofs.start_up import prove
from dpo_pack.system.errors import UnsupportedModelError

CUDA = torch.device("cuda")
# A family for each kernel: a tiny model, and the kernels that its layers use.
FAMILIES = {
    "qwen3_5_text": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "kimi_linear": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "mamba2": ("causal_conv1d_fn", "mamba2_chunk_scan"),
    "lfm2": ("causal_conv1d_fn",),
}


def make_scorer(
    family: str, autocast: torch.dtype | None = None, device: torch.device = CPU, **sizes: Any
) -> CompletionLogps:
    skip_unless_packed(family)
    register_attention()
    model = tiny_model(family, attention=ATTENTION_NAME, **sizes)
    wrap_recurrent_layers(model)
    return CompletionLogps(model, backend=sdpa_attention, autocast=autocast).to(device)


@pytest.mark.parametrize("mode", ["shared", *slow("unshared")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_by_kernels_has_the_log_probs_and_gradients_of_the_torch_functions(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    scorer = make_scorer(family)
    scorer.recurrence = RecurrentCall.run
    expected, expected_grads = gradients(scorer, make_row(GROUPS, mode))
    scorer.recurrence = None
    lines = take_kernels(scorer, CPU)
    assert set(scorer.recurrent_kernels) == set(FAMILIES[family])
    assert sorted(lines) == sorted(f"{KERNELS[n].name} of {KERNELS[n].package}" for n in FAMILIES[family])
    sums, grads = gradients(scorer, make_row(GROUPS, mode))
    assert (sums - expected).abs().max() < 1e-4
    grad, expected_grad = flat(grads), flat(expected_grads)
    assert (grad - expected_grad).norm() < 2e-5 * expected_grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_kernels_passes_the_proofs_under_autocast(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: set[torch.dtype] = set()

    @functools.wraps(chunk_gated_delta_rule)
    def without_fp32(q: Tensor, *arguments: Any, **options: Any) -> Any:
        dtypes.add(q.dtype)
        assert q.dtype != torch.float32, "does not support float32"  # as in flash-linear-attention
        return chunk_gated_delta_rule(q, *arguments, **options)

    use_stand_ins(monkeypatch, chunk_gated_delta_rule=without_fp32)
    scorer = make_scorer(family, torch.bfloat16)
    take_kernels(scorer, CPU)
    assert set(scorer.recurrent_kernels) == set(FAMILIES[family])
    proofs = prove(scorer, CPU)
    assert all(proof.passed for proof in proofs), proofs
    assert dtypes == ({torch.bfloat16} if family == "qwen3_5_text" else set())


@pytest.mark.parametrize("packed", [True, False])
def test_proofs_in_fp32_need_no_kernel_that_transformers_itself_calls(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(stock)
    def installed(query: Tensor, *arguments: Any, **options: Any) -> Any:
        assert query.dtype != torch.float32, "does not support float32"
        return stock(query, *arguments, **options)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", installed)
    scorer = make_scorer("qwen3_5_text", torch.bfloat16)
    if not packed:
        model = tiny_model("qwen3_5_text")
        scorer = CompletionLogps(model, backend=None, autocast=torch.bfloat16)
    proofs = prove(scorer, CPU)
    assert all(proof.passed for proof in proofs), proofs
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is installed


def test_a_model_whose_heads_all_forget_at_once_is_exact_in_fp32() -> None:
    """With transformers' chunks of 64 tokens it would not be."""
    scorer = make_scorer("qwen3_5_text")
    with torch.no_grad():
        for name, parameter in scorer.model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(3.0)
    (proof,) = (proof for proof in prove(scorer, CPU) if proof.name == "recurrence")
    assert proof.passed, proof


def test_kimi_s_delta_attention_is_packed_by_its_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    check_packs(tiny_config("kimi_linear"))
    with pytest.raises(
        UnsupportedModelError, match=r"chunk_kda of flash-linear-attention.*packing.mode: padded"
    ):
        make_scorer("kimi_linear")(make_row(GROUPS, "shared"))


Changed = Callable[..., Any]


def with_options(function: Changed, change: Callable[[dict[str, Any]], object]) -> Changed:
    @functools.wraps(function)
    def changed(*arguments: Any, **options: Any) -> Any:
        change(options)
        return function(*arguments, **options)

    return changed


def detach(name: str) -> Callable[[dict[str, Any]], object]:
    def change(options: dict[str, Any]) -> None:
        if options[name] is not None:
            options[name] = options[name].detach()

    return change


@functools.wraps(mamba_chunk_scan_combined)
def decay_at_pads(x: Tensor, dt: Tensor, *arguments: Any, **options: Any) -> Any:
    return mamba_chunk_scan_combined(x, torch.where(dt == 0, 0.05, dt), *arguments, **options)


def older(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, offsets: Tensor) -> None:
    """A release before `cu_seqlens`."""


def another_gpu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    raise RuntimeError("no kernel image is available for this GPU\nand more")


ERROR = "its relative error is .*, and .* is allowed"
WRONG: dict[str, tuple[str, str, Changed, str]] = {  # family, kernel, wrong function, why it is not used
    "tails start from zero": (
        "qwen3_5_text",
        "torch_chunk_gated_delta_rule",
        with_options(chunk_gated_delta_rule, lambda options: options.update(initial_state=None)),
        ERROR,
    ),
    "no gradient into first states": (
        "qwen3_5_text",
        "torch_chunk_gated_delta_rule",
        with_options(chunk_gated_delta_rule, detach("initial_state")),
        ERROR,
    ),
    "no gradient into first states of Mamba 2": (
        "mamba2",
        "mamba2_chunk_scan",
        with_options(mamba_chunk_scan_combined, detach("initial_states")),
        ERROR,
    ),
    "pads decay the state": ("mamba2", "mamba2_chunk_scan", decay_at_pads, ERROR),
    "no activation": (
        "mamba2",
        "causal_conv1d_fn",
        with_options(causal_conv1d_fn, lambda options: options.update(activation=None)),
        ERROR,
    ),
    "other arguments": (
        "qwen3_5_text",
        "torch_chunk_gated_delta_rule",
        older,
        ".* unexpected keyword argument .*",
    ),
    "an error": ("lfm2", "causal_conv1d_fn", another_gpu, "no kernel image is available for this GPU"),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("what", WRONG)
def test_a_kernel_that_is_wrong_is_not_used_and_a_line_says_why(
    what: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, name, function, reason = WRONG[what]
    use_stand_ins(monkeypatch, **{KERNELS[name].name: function})
    scorer = make_scorer(family, autocast)
    lines = take_kernels(scorer, CPU)
    assert set(scorer.recurrent_kernels) == set(FAMILIES[family]) - {name}
    (line,) = (line for line in lines if "not used" in line)
    kernel = KERNELS[name]
    prefix = f"{kernel.name} of {kernel.package} is not used: "
    assert line.startswith(prefix)
    assert re.fullmatch(reason, line.removeprefix(prefix)), line


# Sizes that the packages' kernels take.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": {"linear_head_dim": 64},
    "mamba2": {"state_size": 64},
    "lfm2": {},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_the_real_kernels_are_right_on_this_gpu(family: str) -> None:
    for name in FAMILIES[family]:
        pytest.importorskip(KERNELS[name].module, exc_type=ImportError)
    scorer = make_scorer(family, torch.bfloat16, CUDA, **SIZES[family])
    lines = take_kernels(scorer, CUDA)
    assert set(scorer.recurrent_kernels) == set(FAMILIES[family]), lines
    proofs = prove(scorer, CUDA)
    assert all(proof.passed for proof in proofs), proofs
