"""FLOPs: areas counted one by one, and a model's own count of its matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_config, tiny_model
from support.tiny_vision import CONFIGS, IMAGE_TOKEN, StandIn, vision_config, vision_model
from torch.utils.flop_counter import FlopCounterMode

from dpo_pack.model.config import count_experts
from dpo_pack.model.facts import image_flops, model_shape, without_weights
from dpo_pack.packing.lengths import (
    AttentionKind,
    IntArray,
    ModelShape,
    PairLengths,
    causal_area,
    padded_flops,
    pair_flops,
    pair_sizes,
)

SHAPE = ModelShape(
    token_weights=1000.0,
    head_weights=50,
    attention=(
        AttentionKind(num_layers=2, width=16, window=None),
        AttentionKind(num_layers=1, width=16, window=3),
    ),
)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def counted_area(begin: int, end: int, window: int | None) -> int:
    """(query, key) pairs of the queries at `begin` to `end`, one by one."""
    return sum(
        key <= query and (window is None or query - key < window)
        for query in range(begin, end)
        for key in range(end)
    )


@given(length=st.integers(0, 40), window=st.none() | st.integers(1, 50))
def test_the_causal_area_is_that_counted_one_by_one(length: int, window: int | None) -> None:
    assert causal_area(ints(length), window)[0] == counted_area(0, length, window)


def test_a_shared_pair_costs_what_its_two_attention_segments_cost() -> None:
    # prompt 5, completions 4 and 3 of which the first token is common: shared 6, tails 3 and 2
    lengths = PairLengths(prompt=ints(5), chosen=ints(4), rejected=ints(3), shared=ints(6))
    full = counted_area(0, 9, None) + counted_area(6, 8, None)
    local = counted_area(0, 9, 3) + counted_area(6, 8, 3)
    forward = 2 * 1000 * (6 + 3 + 2) + 2 * 50 * (4 + 3) + 2 * 16 * (2 * full + local)
    assert pair_flops(SHAPE, lengths, share_prompt=True).tolist() == [3 * forward]
    assert pair_flops(SHAPE, lengths, share_prompt=True, passes=1).tolist() == [forward]
    unshared = counted_area(0, 9, None) + counted_area(0, 8, None)
    unshared_local = counted_area(0, 9, 3) + counted_area(0, 8, 3)
    forward = 2 * 1000 * (9 + 8) + 2 * 50 * 7 + 2 * 16 * (2 * unshared + unshared_local)
    assert pair_flops(SHAPE, lengths, share_prompt=False).tolist() == [3 * forward]


@pytest.mark.parametrize("whole_prompt", [False, True])
def test_a_beginning_is_computed_once_in_a_row(whole_prompt: bool) -> None:
    # beginning 4; rests of prompts 2 and 0 or 3, tails 3 and 2, 1 and 5
    shape = replace(SHAPE, last_block_weights=7.0)
    rest = 0 if whole_prompt else 3
    lengths = PairLengths(
        prompt=ints(6, 4 + rest),
        chosen=ints(3, 1),
        rejected=ints(2, 5),
        shared=ints(6, 4 + rest),
        beginning=ints(9, 9),
        common=ints(4, 4),
    )
    sizes = pair_sizes(lengths, shape, share_prompt=True)
    segments = [(0, 9), (6, 8), (4, 4 + rest + 1), (4 + rest, 4 + rest + 5)]
    full, local = (sum(counted_area(*one, window) for one in segments) for window in (None, 3))
    tokens = 9 + 2 + rest + 1 + 5
    read = {"prompts' ends": 2, "tails but their last tokens": 2 + 1 + 0 + 4}
    unread = tokens - sum(read.values())
    forward = 2 * 1000 * tokens + 2 * 50 * 11 + 2 * 16 * (2 * full + local) - 2 * 7 * unread
    assert sizes.of_row(ints(0, 1)) == (tokens, 3 * forward)
    assert lengths.select(ints(1)).common == [4]


def test_the_frozen_tower_runs_forward_once_for_each_prompt_in_a_row() -> None:
    lengths = PairLengths(prompt=ints(5, 5), chosen=ints(4, 4), rejected=ints(3, 3), shared=ints(6, 6))
    seen = replace(lengths, tower=np.array([0.0, 7.0]))
    for share_prompt, sides, times in (
        (True, [True, True], 1),
        (False, [True, True], 2),
        (True, [False, True], 1),
        (True, [False, False], 0),
    ):
        for passes in (1.0, 3.0):
            costs = [
                pair_flops(
                    SHAPE, each, share_prompt=share_prompt, passes=passes, sides=np.array([sides, sides])
                )
                for each in (lengths, seen)
            ]
            assert (costs[1] - costs[0]).tolist() == [0, 7 * times]
    assert seen.select(ints(1)).tower == [7.0] and lengths.select(ints(1)).tower == [0.0]


# Beside their patches some towers have a position of their own, and llava_next adds tokens between rows.
@pytest.mark.parametrize(
    ("family", "error"),
    [(family, {"llava": 0.06, "internvl": 0.06, "llava_next": 0.2}.get(family, 1e-6)) for family in CONFIGS],
)
def test_the_flops_of_an_image_are_those_of_the_tower_s_linear_layers(family: str, error: float) -> None:
    model = vision_model(family)
    processor, image = StandIn(family, model), np.zeros((512, 512, 3), dtype=np.uint8)
    inputs = {name: value for name, value in processor.pixel_inputs([image]).items() if name != "rows"}
    backbone: Any = model.base_model
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        backbone.get_image_features(**inputs, return_dict=True)
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)
    counted = sum(counter.get_flop_counts()["Global"].get(product, 0) for product in products)
    num_tokens = processor.image_ids(512, 512).count(IMAGE_TOKEN)
    estimate = image_flops(without_weights(vision_config(family)), processor) * num_tokens
    assert estimate == pytest.approx(counted, rel=error)


def test_a_pair_skips_the_last_block_at_positions_that_are_not_read() -> None:
    # Of [ p p p p a b | c | c d ] the positions p (the last), a, b and the second tail's c are read.
    skipping = replace(SHAPE, last_block_weights=7.0)
    lengths = PairLengths(prompt=ints(4), chosen=ints(3), rejected=ints(4), shared=ints(6))
    whole, skipped = (pair_flops(shape, lengths, share_prompt=True)[0] for shape in (SHAPE, skipping))
    assert lengths.row_tokens(share_prompt=True).tolist() == [9]
    assert whole - skipped == 3 * 2 * 7 * 5


def test_padded_batches_run_every_position_through_layers_and_head() -> None:
    area = 2 * counted_area(0, 7, None) + counted_area(0, 7, 3)
    forward = 2 * 1000 * 7 + 2 * 50 * 7 + 2 * 16 * area
    assert padded_flops(SHAPE, ints(7), ints(4)) == 3 * 4 * forward


# Grouped queries, GPT-2's fused and plain layers, latent attention, shared and routed experts, windows,
# tied and untied heads. The counter sees eager attention, which multiplies the whole square.
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "deepseek_v3", "qwen3_moe", "qwen2_moe", "gpt_oss", "opt", "olmo3"]
)
def test_the_shape_of_a_model_agrees_with_its_own_matrix_products(family: str) -> None:
    num_tokens = 24
    shape = model_shape(without_weights(tiny_config(family)))
    model = tiny_model(family, experts="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 90, (1, num_tokens)), use_cache=False)
    square = sum(2 * kind.num_layers * kind.width * num_tokens**2 for kind in shape.attention)
    expected = 2 * (shape.token_weights + shape.head_weights) * num_tokens + square
    # Older releases of transformers multiply positions by frequencies as matrices.
    rotary = [ops for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb")]
    counted = counter.get_total_flops() - sum(sum(ops.values()) for ops in rotary)
    assert counted == pytest.approx(expected, rel=1e-6)


def test_of_experts_numbered_layer_by_layer_the_mean_counts() -> None:
    shape = model_shape(without_weights(tiny_config("hunyuan_v1_moe", moe_topk=2)))
    assert model_shape(without_weights(tiny_config("hunyuan_v1_moe", moe_topk=[2, 2]))) == shape
    assert count_experts({"num_experts": [4, 8], "moe_topk": [1, 2]}) == (6.0, 1.5)


def test_only_active_experts_count() -> None:
    few = model_shape(without_weights(tiny_config("mixtral", num_experts_per_tok=1)))
    many = model_shape(without_weights(tiny_config("mixtral", num_experts_per_tok=3)))
    experts = 2 * 3 * 32 * 48  # layers x (gate, up, down) of one expert
    assert many.token_weights - few.token_weights == pytest.approx(2 * experts)
