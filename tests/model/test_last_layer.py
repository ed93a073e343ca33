"""Leaving unread positions out of the last feed-forward block changes nothing that is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.gradients import gradients
from support.groups import group, make_row
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.facts import model_shape, without_weights
from dpo_pack.model.fast_layers import feed_forwards, trim_last_layer
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import PairLengths, pair_flops

GROUPS = [group([5, 6, 7, 8, 9, 10], [11, 12, 13], [11, 14]), group([20, 21], [22], [23, 24, 25, 26])]


def scorer_of(family: str, *, trims: bool) -> CompletionLogps:
    register_attention()
    model = tiny_model(family, attention=ATTENTION_NAME)
    if trims:
        trim_last_layer(model)
    return CompletionLogps(model, backend=BACKENDS["sdpa"], autocast=None)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "phi", "olmo2"])
@pytest.mark.parametrize("mode", ["unshared", "shared"])
def test_log_probs_and_gradients_of_a_trimmed_last_layer_are_those_of_the_whole_layer(
    family: str, mode: str
) -> None:
    row = make_row(GROUPS, mode)
    sums, grads = gradients(scorer_of(family, trims=False), row)
    trimmed_sums, trimmed = gradients(scorer_of(family, trims=True), row)
    torch.testing.assert_close(trimmed_sums, sums, rtol=0, atol=1e-5)
    assert trimmed.keys() == grads.keys()
    for name, grad in trimmed.items():
        assert (grad - grads[name]).norm() <= 1e-5 * max(1.0, float(grads[name].norm()))


def test_the_last_feed_forward_block_sees_each_read_position_once() -> None:
    scorer = scorer_of("llama", trims=False)
    _, block = feed_forwards(scorer.model)[-1]
    assert block is not None
    seen: list[int] = []
    whole = block.forward

    def counted(features: Tensor) -> Tensor:
        seen.append(features.shape[1])
        output: Tensor = whole(features)
        return output

    block.forward = counted
    trim_last_layer(scorer.model)
    scorer(make_row(GROUPS))
    # The position before 11 and 11 itself are read for both completions of the first group.
    assert seen == [(3 + 2 - 2) + (1 + 4 - 1)]
    scorer.model.set_attn_implementation("eager")
    scorer.model(input_ids=torch.tensor([[5, 6, 7]]))  # as in generation: everything
    assert seen[1:] == [3]


def test_flops_of_the_last_layer_count_what_is_computed() -> None:
    scorer, shape = scorer_of("llama", trims=True), model_shape(without_weights(tiny_config("llama")))
    lengths = PairLengths(
        prompt=np.array([6, 2]), chosen=np.array([3, 1]), rejected=np.array([2, 4]), shared=np.array([7, 2])
    )
    row = make_row(GROUPS)
    with FlopCounterMode(display=False) as trimmed, torch.no_grad():
        scorer(row)
    with FlopCounterMode(display=False) as whole, torch.no_grad():
        scorer_of("llama", trims=False)(row)
    counted = whole.get_total_flops() - trimmed.get_total_flops()
    unread = row.num_tokens - ((3 + 2 - 2) + (1 + 4 - 1))
    assert counted == 2 * shape.last_block_weights * unread
    untrimmed = replace(shape, last_block_weights=0.0)
    spared = pair_flops(untrimmed, lengths, share_prompt=True) - pair_flops(shape, lengths, share_prompt=True)
    assert float(spared.sum()) == 3 * counted
