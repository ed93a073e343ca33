"""Recurrent layers on packed rows: each function against the family's own; kernels of other packages.

On a CPU functions with the same arguments stand in for the kernels.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_errors import GROUPS, skip_unless_packed
from support.gradients import flat, gradients
from support.groups import CPU, group, make_row, segments_of
from support.loading import load_usual
from support.marks import slow
from support.recurrent_stand_ins import (
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    mamba_chunk_scan_combined,
    use_stand_ins,
)
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5

from dpo_pack.model.attention import ATTENTION_NAME, register_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import RowSegments, make_gather
from dpo_pack.model.config import check_packs
from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.recurrence.kernels import KERNELS, row_history, row_pieces
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.proofs.layers import take_kernels
from dpo_pack.proofs.start_up import prove
from dpo_pack.system.errors import UnsupportedModelError

THE_PAIR = group([1, 2], [7, 8, 9], [7, 5])  # of the docstrings of layout.py and kernels.py


Pieces = tuple[list[list[list[float]]], list[list[int]]]


def pieces_of(segments: RowSegments) -> Pieces:
    """Of a row whose tokens are 1, 2, ...: the padded pieces of each level, and their parents from the second
    level on."""
    made = row_pieces(segments, padded=True)
    tokens = torch.arange(1.0, sum(segments.query_lengths) + 1)
    taken = [batch.take(tokens) for batch in chain.from_iterable(made.levels)]
    assert made.to_row(torch.cat(taken)).tolist() == tokens.tolist()
    in_line = row_pieces(segments, padded=False)
    flat = torch.cat([batch.take(tokens) for batch in chain.from_iterable(in_line.levels)])
    assert in_line.to_row(flat).tolist() == tokens.tolist()
    lines = [
        [line for batch in batches for line in batch.take(tokens).view(batch.num_pieces, -1).tolist()]
        for batches in made.levels
    ]
    return lines, [gather.index.tolist() for gather in made.to_next]


def test_longer_pieces_come_first_and_tails_find_the_shared_part_of_their_group() -> None:
    short, long = group([1], [2, 3], [2, 4]), group([1] * 5, [2], [3, 4, 5])
    levels, parents = pieces_of(segments_of([short, long]))
    assert levels[0] == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert levels[1] == [[11, 12, 13], [3, 0, 0], [4, 0, 0], [10, 0, 0]]
    assert parents == [[0, 1, 1, 0]]


def test_a_beginning_is_a_level_of_its_own() -> None:
    pairs = [group([1, 2, 3], [7, 8], [9], beginning=2), group([1, 2], [6], [4], beginning=2)]
    levels, parents = pieces_of(segments_of(pairs))
    assert levels == [[[1, 2]], [[3], [7], [8]], [[4, 5], [6, 0]]]
    assert parents == [[0, 0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("completions", "mode", "expected"),
    [
        ([[7, 8, 9], [7, 5]], "unshared", ([[[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]], [])),
        ([[7], [7, 5]], "shared", ([[[1, 2, 3]], [[4]]], [[0]])),
        ([[7, 5], [7]], "shared", ([[[1, 2, 3]], [[4]]], [[0]])),
        ([[7], [7]], "shared", ([[[1, 2, 3]]], [])),
    ],
    ids=["shares nothing", "prefix first", "prefix last", "equal"],
)
def test_a_sequence_that_shares_nothing_has_no_parent_and_an_empty_tail_is_no_piece(
    completions: list[list[int]], mode: str, expected: Any
) -> None:
    assert pieces_of(segments_of([group([1, 2], *completions)], mode)) == expected


def test_a_convolution_sees_the_end_of_the_shared_part_and_zeros_before_a_sequence() -> None:
    with_history, to_row = row_history(segments_of([THE_PAIR, group([6], [3], [4])]), 4)
    longer = with_history(torch.tensor([10.0, 11, 12, 13, 14, 15, 16, 17, 18]))
    first, second = [0, 0, 0, 10, 11, 12, 13, 14], [10, 11, 12, 15]
    assert longer.tolist() == [*first, *second, *[0, 0, 0, 16, 17], *[0, 0, 16, 18]]
    assert to_row(longer).tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]


def test_the_history_of_a_convolution_follows_the_path_through_short_nodes() -> None:
    pairs = [group([1, 2, 3], [7, 8], [9], beginning=2), group([1, 2, 5], [6], [4], beginning=2)]
    with_history, _ = row_history(segments_of(pairs), 4)
    longer = with_history(torch.arange(10.0, 19)).tolist()
    assert longer == [0, 0, 0, 10, 11, 12, 13, 14, *[10, 11, 12, 15], *[0, 10, 11, 16, 17], *[10, 11, 16, 18]]


def test_a_gather_is_an_index_select_with_zeros_in_values_and_gradients() -> None:
    index = np.array([2, -1, 0, 2, 2, -1, 1])
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    take = make_gather(index, 4, CPU)
    assert torch.equal(take(source)[index >= 0], source[index[index >= 0]])
    assert not take(source)[index < 0].any()
    assert torch.autograd.gradcheck(take, (source,))


def test_layers_that_call_none_of_our_functions_are_refused_with_the_release(tmp_path: Path) -> None:
    skip_unless_packed("lfm2")
    tiny_model("lfm2").save_pretrained(tmp_path)
    scorer = load_usual(tmp_path, packed=True).scorer
    wrapped: list[nn.Module] = [m for m in scorer.model.modules() if type(m).__name__ == "Lfm2ShortConv"]
    del vars(wrapped[0])["forward"]
    (proof,) = prove(scorer, CPU)
    assert proof.name == "wiring" and not proof.passed
    assert proof.numbers["calls of our recurrent functions"] == 0.0
    assert re.match(r"install the transformers release .* \(this is \d.*padded", proof.remedy)


@pytest.mark.parametrize(
    ("family", "products"),
    [("qwen3_5_text", 3 * 4 * 8 * 8), ("kimi_linear", 3 * 4 * 8 * 8), ("bamba", 2 * 4 * 16 * 8), ("lfm2", 0)],
)
def test_the_products_of_a_token_with_its_layer_s_state_count_as_flops(family: str, products: int) -> None:
    assert model_shape(without_weights(tiny_config(family))).state_products == products


# ---------------------------------------------------------------------------------- kernels of other packages


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
    expected, expected_grads = gradients(scorer, make_row(GROUPS, mode))
    lines = take_kernels(scorer, CPU)
    assert set(scorer.recurrent_kernels) == set(FAMILIES[family])
    assert sorted(lines) == sorted(f"{KERNELS[n].name} of {KERNELS[n].package}" for n in FAMILIES[family])
    sums, grads = gradients(scorer, make_row(GROUPS, mode))
    assert (sums - expected).abs().max() < 1e-4
    grad, expected_grad = flat(grads), flat(expected_grads)
    assert (grad - expected_grad).norm() < 2e-5 * expected_grad.norm()


@pytest.mark.parametrize("packed", [True, False])
def test_proofs_in_fp32_need_no_kernel_of_transformers(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_kimi_s_delta_attention_is_packed_by_its_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fla.ops.kda", None)
        with pytest.raises(UnsupportedModelError, match="flash-linear-attention.*packing.mode: padded"):
            check_packs(tiny_config("kimi_linear"))
    use_stand_ins(monkeypatch)
    check_packs(tiny_config("kimi_linear"))


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
