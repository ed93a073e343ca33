"""Recurrent layers on packed rows: pieces, gathers, and each function against the family's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.family_errors import GROUPS, skip_unless_packed
from support.groups import CPU, group, make_row, segments_of
from support.loading import load_usual
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn

from dpo_pack.model.attention.segments import RowSegments, make_gather
from dpo_pack.model.recurrence import RecurrentCall, recurrence_sizes, wrap_recurrent_layers
from dpo_pack.model.recurrence.pieces import row_history, row_pieces
from dpo_pack.model.shape import model_shape, without_weights
from dpo_pack.system.errors import UnsupportedModelError

THE_PAIR = group([1, 2], [7, 8, 9], [7, 5])  # of the docstrings of layout.py and pieces.py


def pieces_of(segments: RowSegments) -> tuple[list[list[float]], list[list[float]], list[int]]:
    """Of a row whose tokens are 1, 2, ...: padded roots, padded tails, and the root of each tail."""
    made = row_pieces(segments, padded=True)
    tokens = torch.arange(1.0, sum(segments.query_lengths) + 1)
    taken = [batch.take(tokens) for batch in (*made.roots, *made.tails)]
    assert made.to_row(torch.cat(taken)).tolist() == tokens.tolist()
    in_line = row_pieces(segments, padded=False)
    flat = torch.cat([batch.take(tokens) for batch in (*in_line.roots, *in_line.tails)])
    assert in_line.to_row(flat).tolist() == tokens.tolist()
    lines = [
        [line for batch in batches for line in batch.take(tokens).view(batch.num_pieces, -1).tolist()]
        for batches in (made.roots, made.tails)
    ]
    return lines[0], lines[1], made.to_tails.index.tolist()


def test_longer_pieces_come_first_and_tails_find_the_root_of_their_group() -> None:
    short, long = group([1], [2, 3], [2, 4]), group([1] * 5, [2], [3, 4, 5])
    roots, tails, parents = pieces_of(segments_of([short, long]))
    assert roots == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert tails == [[11, 12, 13], [3, 0, 0], [4, 0, 0], [10, 0, 0]]
    assert parents == [0, 1, 1, 0]


def test_only_pieces_of_like_lengths_are_padded_together() -> None:
    groups = [group([1] * length, [2], [3]) for length in (300, 40, 200, 7, 60)]
    made = row_pieces(segments_of(groups), padded=True)
    assert [(batch.num_pieces, len(batch.take.index)) for batch in made.roots] == [
        (1, 300),
        (1, 200),
        (3, 180),
    ]
    assert [batch.num_pieces for batch in row_pieces(segments_of(groups), padded=False).roots] == [5]


@pytest.mark.parametrize(
    ("completions", "mode", "expected"),
    [
        ([[7, 8, 9], [7, 5]], "unshared", ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]], [], [])),
        ([[7], [7, 5]], "shared", ([[1, 2, 3]], [[4]], [0])),
        ([[7, 5], [7]], "shared", ([[1, 2, 3]], [[4]], [0])),
        ([[7], [7]], "shared", ([[1, 2, 3]], [], [])),
    ],
    ids=["shares nothing", "prefix first", "prefix last", "equal"],
)
def test_a_sequence_that_shares_nothing_is_a_root_and_an_empty_tail_is_no_piece(
    completions: list[list[int]], mode: str, expected: Any
) -> None:
    assert pieces_of(segments_of([group([1, 2], *completions)], mode)) == expected


def test_a_convolution_sees_the_end_of_the_shared_part_and_zeros_before_a_sequence() -> None:
    with_history, to_row = row_history(segments_of([THE_PAIR, group([6], [3], [4])]), 4)
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
    scorer = load_usual(tmp_path, packed=True).scorer
    wrapped: list[nn.Module] = [m for m in scorer.model.modules() if type(m).__name__ == "Lfm2ShortConv"]
    del vars(wrapped[0])["forward"]
    with pytest.raises(UnsupportedModelError, match=r"of transformers \d.*called 0 of 1 .*padded"):
        scorer(make_row(GROUPS, "shared"))


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
        ("bamba", {"mamba_d_state": 64, "mamba_chunk_size": 256}),
        ("lfm2", {}),
    ],
)
def test_the_memory_estimate_counts_what_recurrent_layers_keep_for_the_backward_pass(
    family: str, sizes: dict[str, Any]
) -> None:
    skip_unless_packed(family)
    ids = [torch.randint(0, 90, (n,)).tolist() for n in (128, 64, 64)]
    segments = segments_of([group(ids[0], [1, *ids[1]], [2, *ids[2]])] * 4)
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
    assert recurrence_sizes(layer)[1] == pytest.approx(sum(counted) / 4 / num_tokens, rel=0.25)
