"""Leaving unread positions out of the last feed-forward block changes nothing that is read."""

from __future__ import annotations

import pytest
import torch
from support.gradients import gradients
from support.groups import group, make_row
from support.tiny_models import tiny_model
from torch import Tensor

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.fast_layers import feed_forwards, trim_last_layer
from dpo_pack.model.scorer import CompletionLogps

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
