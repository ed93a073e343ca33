"""Recurrent layers on packed rows: pieces, gathers, and each function against the family's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_errors import CPU, GROUPS, load, make_row, skip_unless_packed
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from dpo_pack.model.attention.segments import RowSegments, make_gather
from dpo_pack.model.layout import Group, packed_row
from dpo_pack.model.recurrence import RecurrentCall, kept_numbers, wrap_recurrent_layers
from dpo_pack.model.recurrence.delta import invert_unit_triangular, row_delta_rule
from dpo_pack.model.recurrence.pieces import row_history, row_pieces
from dpo_pack.model.shape import model_shape, without_weights
from dpo_pack.system.errors import UnsupportedModelError


def segments_of(*groups: tuple[list[int], list[list[int]]], share_prompt: bool = True) -> RowSegments:
    as_groups = [
        Group(context=np.array(context), completions=tuple(np.array(ids) for ids in completions))
        for context, completions in groups
    ]
    segments = packed_row(as_groups, CPU, share_prompt=share_prompt).segments
    assert segments is not None
    return segments


THE_PAIR = ([1, 2], [[7, 8, 9], [7, 5]])  # of the docstrings of layout.py and pieces.py


def test_both_tails_of_the_documented_row_start_from_the_state_behind_its_shared_part() -> None:
    segments = segments_of(THE_PAIR)
    assert segments.shared_lengths == (3, 3)
    pieces = row_pieces(segments, 2)
    chunks = pieces.to_chunks(torch.tensor([10.0, 11, 12, 13, 14, 15])).view(-1, 2).tolist()
    assert chunks == [[10, 11], [12, 0], [13, 14], [15, 0]]
    assert (pieces.root_steps, pieces.tail_steps) == ((1, 1), (2,))
    assert pieces.to_tails is not None and pieces.to_tails.index.tolist() == [0, 0]
    assert pieces.to_row(pieces.to_chunks(torch.arange(6.0))).tolist() == [0, 1, 2, 3, 4, 5]
    assert row_pieces(segments, 2) is pieces, "all layers use the same object"


def test_longer_pieces_come_first_and_tails_find_the_root_of_their_group() -> None:
    short, long = ([1], [[2, 3], [2, 4]]), ([1] * 5, [[2], [3, 4, 5]])
    pieces = row_pieces(segments_of(short, long), 2)
    assert (pieces.root_steps, pieces.tail_steps) == ((2, 1, 1), (4, 1))
    assert pieces.to_tails is not None
    assert pieces.to_tails.index.tolist() == [0, 1, 1, 0]  # the long group's tails have 3 tokens and 1


def test_a_sequence_that_shares_nothing_is_a_piece_of_its_own() -> None:
    pieces = row_pieces(segments_of(THE_PAIR, share_prompt=False), 8)
    assert (pieces.root_steps, pieces.tail_steps, pieces.to_tails) == ((2,), (), None)


@pytest.mark.parametrize(
    ("completions", "tail_steps"), [([[7], [7, 5]], (1,)), ([[7, 5], [7]], (1,)), ([[7], [7]], ())]
)
def test_a_sequence_whose_tail_is_empty_adds_no_piece(
    completions: list[list[int]], tail_steps: tuple[int, ...]
) -> None:
    pieces = row_pieces(segments_of(([1, 2], completions)), 8)
    assert (pieces.root_steps, pieces.tail_steps) == ((1,), tail_steps)


def test_a_convolution_sees_the_end_of_the_shared_part_and_zeros_before_a_sequence() -> None:
    with_history, to_row = row_history(segments_of(THE_PAIR, ([6], [[3], [4]])), 4)
    longer = with_history(torch.tensor([10.0, 11, 12, 13, 14, 15, 16, 17, 18]))
    first, second = [0, 0, 0, 10, 11, 12, 13, 14], [10, 11, 12, 15]
    assert longer.tolist() == [*first, *second, *[0, 0, 0, 16, 17], *[0, 0, 16, 18]]
    assert to_row(longer).tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18]


def test_a_gather_is_an_index_select_with_zeros_in_values_and_gradients() -> None:
    index = np.array([2, -1, 0, 2, 2, -1, 1])
    source = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    take = make_gather(index, 4, CPU)
    assert torch.equal(take(source)[index >= 0], source[index[index >= 0]])
    assert not take(source)[index < 0].any()
    assert torch.autograd.gradcheck(take, (source,))


def test_a_gradient_of_many_copies_in_bfloat16_loses_no_small_term() -> None:
    source = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = make_gather(np.zeros(257, dtype=np.int64), 1, CPU)(source)
    copies.backward(torch.tensor([[256.0], *[[0.5]] * 256], dtype=torch.bfloat16))
    assert source.grad is not None and source.grad.item() == 384.0


def test_layers_that_do_not_call_the_functions_of_this_release_are_refused_with_the_release(
    tmp_path: Path,
) -> None:
    skip_unless_packed("lfm2")
    tiny_model("lfm2").save_pretrained(tmp_path)
    scorer = load(tmp_path, packed=True).scorer
    wrapped: list[nn.Module] = [m for m in scorer.model.modules() if type(m).__name__ == "Lfm2ShortConv"]
    del vars(wrapped[0])["forward"]
    with pytest.raises(UnsupportedModelError, match=r"of transformers \d.*called 0 of 1 .*padded"):
        scorer(make_row(GROUPS, "shared"))


def test_triangular_matrices_are_inverted_and_have_their_gradients() -> None:
    system = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)  # the upper part is not read
    matrix = system.detach().tril(-1) + torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(invert_unit_triangular(system), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(invert_unit_triangular, (system,))


@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_the_inverse_in_float32_is_as_near_as_forward_substitution(alike: float) -> None:
    """Also where the keys of a chunk are alike: powers of L, which other ways sum up, then are above 1e8."""
    keys = F.normalize(alike + (1 - alike) * torch.randn(50, 32, 16, dtype=torch.float64), dim=-1)
    exact = torch.linalg.inv((keys @ keys.mT).tril(-1) + torch.eye(32, dtype=torch.float64))
    system = (keys @ keys.mT).float()
    identity = torch.eye(32).expand_as(system)
    substituted = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    errors = [(inverse - exact).norm() for inverse in (invert_unit_triangular(system), substituted)]
    assert errors[0] <= 2 * errors[1] + 1e-6 * exact.norm()


@pytest.mark.parametrize("strongest", [0.1, 20.0])
def test_heads_that_forget_at_once_are_exact_and_leave_no_numbers_that_slow_a_cpu_down(
    strongest: float,
) -> None:
    """Qwen3.5's heads begin with decays of up to about exp(-20) a token."""
    num_tokens, size = 100, 16
    query, key, value, weights = (torch.randn(1, num_tokens, 1, size) for _ in range(4))
    g = -strongest * (0.5 + torch.rand(1, num_tokens, 1)).requires_grad_()
    beta = torch.rand(1, num_tokens, 1)
    segments = segments_of((list(range(num_tokens - 1)), [[7], [7]]))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours, _ = row_delta_rule(
            query, key, value, g, beta, use_qk_l2norm_in_kernel=True, row_segments=segments
        )
    state, outputs = torch.zeros(size, size, dtype=torch.float64), []
    for token in range(num_tokens):
        q, k = (F.normalize(x[0, token, 0].double(), dim=0) for x in (query, key))
        state = state * g[0, token, 0].double().exp()
        state = state + beta[0, token, 0] * torch.outer(k, value[0, token, 0] - k @ state)
        outputs.append(q @ state / size**0.5)
    exact = torch.stack(outputs)
    torch.testing.assert_close(ours[0, :, 0].double(), exact, rtol=1e-4, atol=1e-6)
    gradient, of_exact = (
        torch.autograd.grad((out * weights[0, :, 0]).sum(), g)[0] for out in (ours[0, :, 0], exact)
    )
    assert (gradient - of_exact).norm() <= 1e-4 * of_exact.norm()
    tiny = torch.finfo(torch.float32).tiny
    assert sum(int(((x != 0) & (x.abs() < tiny)).sum()) for x in kept if x.dtype == torch.float32) == 0


@pytest.mark.parametrize(
    ("family", "products"),
    [("qwen3_5_text", 3 * 4 * 8 * 8), ("kimi_linear", 3 * 4 * 8 * 8), ("bamba", 2 * 4 * 16 * 8), ("lfm2", 0)],
)
def test_the_products_of_a_token_with_its_layer_s_state_count_as_flops(family: str, products: int) -> None:
    assert model_shape(without_weights(tiny_config(family))).state_products == products


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_5_text", {"linear_key_head_dim": 64, "linear_value_head_dim": 32}),
        ("kimi_linear", {"linear_head_dim": 32}),
        ("bamba", {"mamba_d_state": 64}),
        ("lfm2", {}),
    ],
)
def test_the_memory_estimate_counts_what_recurrent_layers_keep_for_the_backward_pass(
    family: str, sizes: dict[str, Any]
) -> None:
    skip_unless_packed(family)
    ids = [torch.randint(0, 90, (n,)).tolist() for n in (128, 64, 64)]
    segments = segments_of(*[(ids[0], [[1, *ids[1]], [2, *ids[2]]])] * 4)
    num_tokens = sum(segments.query_lengths)
    model = tiny_model(family, **sizes)
    wrap_recurrent_layers(model)
    layer = next(m for m in model.modules() if "forward" in vars(m))
    kept: dict[int, int] = {}
    counted: list[int] = []

    def counting(call: RecurrentCall) -> object:
        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
            return tensor

        alive: list[Tensor] = []
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call.run()
        counted.append(sum(kept.values()))
        return result

    hidden = torch.randn(1, num_tokens, 32, requires_grad=True)
    layer(hidden, row_segments=segments, row_recurrence=counting)
    assert kept_numbers(layer) == pytest.approx(sum(counted) / 4 / num_tokens, rel=0.25)
