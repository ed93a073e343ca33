"""Leaving unread positions out of the last feed-forward block changes nothing that is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dpo_pack.model.attention import ATTENTION_NAME, BACKENDS, register_attention
from dpo_pack.model.fast_layers import feed_forwards, trim_last_layer
from dpo_pack.model.layout import Row, packed_row
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.model.shape import model_shape, without_weights
from dpo_pack.packing.lengths import Group, PairLengths, pair_flops


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


GROUPS = [
    Group(context=ids(5, 6, 7, 8, 9, 10), completions=(ids(11, 12, 13), ids(11, 14))),
    Group(context=ids(20, 21), completions=(ids(22), ids(23, 24, 25, 26))),
]


def gradients(scorer: CompletionLogps, row: Row) -> tuple[Tensor, list[Tensor]]:
    scorer.zero_grad(set_to_none=True)
    output = scorer(row)
    (output.sums * torch.arange(1.0, 5.0, dtype=torch.float64)).sum().backward()
    return output.sums.detach(), [p.grad for p in scorer.parameters() if p.grad is not None]


def scorer_of(family: str, *, trims: bool) -> CompletionLogps:
    register_attention()
    model = tiny_model(family, attention=ATTENTION_NAME)
    if trims:
        trim_last_layer(model)
    return CompletionLogps(model, backend=BACKENDS["sdpa"], autocast=None)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "phi", "olmo2"])
@pytest.mark.parametrize("share_prompt", [False, True])
def test_log_probs_and_gradients_of_a_trimmed_last_layer_are_those_of_the_whole_layer(
    family: str, share_prompt: bool
) -> None:
    row = packed_row(GROUPS, torch.device("cpu"), share_prompt=share_prompt)
    sums, grads = gradients(scorer_of(family, trims=False), row)
    trimmed_sums, trimmed = gradients(scorer_of(family, trims=True), row)
    torch.testing.assert_close(trimmed_sums, sums, rtol=0, atol=1e-5)
    assert len(trimmed) == len(grads)
    for ours, theirs in zip(trimmed, grads, strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * max(1.0, float(theirs.norm()))


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
    scorer(packed_row(GROUPS, torch.device("cpu"), share_prompt=True))
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
    row = packed_row(GROUPS, torch.device("cpu"), share_prompt=True)
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
