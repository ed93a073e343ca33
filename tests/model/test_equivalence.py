"""Packed and shared rows equal each sequence alone, whatever the rows; what no row can have is refused.

Families and their bounds are in tests/model/test_families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.family_errors import GROUPS
from support.groups import group, make_row
from support.loading import load_usual
from support.oracle import completion_logps_one_by_one, gradients
from support.tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from dpo_pack.model.attention import row_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.scorer import CompletionLogps, LoadedModel
from dpo_pack.system.errors import UnsupportedModelError

# Few token values, so that completions begin alike, repeat and are prefixes of each other.
_tokens = st.lists(st.integers(3, 5), min_size=1, max_size=8)
_contents = st.lists(
    st.tuples(
        st.lists(st.integers(3, 5), min_size=1, max_size=20), st.lists(_tokens, min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, CompletionLogps]:
    """(plain, packed): one tiny model for all random rows."""
    directory = tmp_path_factory.mktemp("llama")
    plain = tiny_model("llama")
    plain.save_pretrained(directory)
    return plain, load_usual(directory, packed=True).scorer


@settings(max_examples=20)
@given(contents=_contents, weights=st.lists(st.floats(-2, 2), min_size=16, max_size=16))
def test_log_probs_and_gradients_of_random_rows_equal_those_of_each_sequence_alone(
    llama: tuple[PreTrainedModel, CompletionLogps],
    contents: list[tuple[list[int], list[list[int]]]],
    weights: list[float],
) -> None:
    """Groups of one to four completions: of one token, prefixes of each other, duplicates, empty tails."""
    plain, packed = llama
    groups = [group(context, *completions) for context, completions in contents]
    sequences = [(context, completion) for context, completions in contents for completion in completions]
    factors = torch.tensor(weights[: len(sequences)])
    plain.zero_grad()
    packed.zero_grad()
    expected = completion_logps_one_by_one(plain, sequences)
    (expected * factors).sum().backward()
    with torch.no_grad():
        unshared = packed(make_row(groups, "unshared"))
    shared = packed(make_row(groups, "shared"))
    for output in (shared, unshared):
        torch.testing.assert_close(output.sums.float(), expected, atol=1e-4, rtol=0)
        assert output.num_tokens.tolist() == [len(completion) for _, completion in sequences]
    (shared.sums * factors).sum().backward()
    theirs, ours = gradients(plain), gradients(packed.model)
    # Of each sequence's weight, not of their sum, which may cancel.
    scale = sum(abs(weight) for weight in weights[: len(sequences)]) + 1e-6
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_a_model_with_layers_that_bypass_the_seam_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = load_usual(tmp_path, packed=True)
    loaded.scorer.num_attention_layers += 1
    with pytest.raises(UnsupportedModelError, match="3 layers, but 2 .*padded"):
        loaded.scorer(make_row(GROUPS[:1], "shared"))


def test_what_no_row_can_have_is_refused_by_its_attention() -> None:
    row = make_row(GROUPS[:1], "shared")
    layout: dict[str, Any] = {"row_segments": row.segments, "row_backend": sdpa_attention}
    states, more = torch.zeros(1, 2, row.num_tokens, 4), torch.zeros(1, 2, row.num_tokens + 3, 4)
    assert row_attention(nn.Module(), states, states, states, None, **layout)[0].shape[1] == row.num_tokens
    with pytest.raises(UnsupportedModelError, match="does not pass keyword arguments.*padded"):
        row_attention(nn.Module(), states, states, states, None)
    with pytest.raises(UnsupportedModelError, match="dropout"):
        row_attention(nn.Module(), states, states, states, None, dropout=0.1, **layout)
    # A prefix of keys, or keys compressed from others.
    with pytest.raises(UnsupportedModelError, match="45 keys in a row of 42 tokens.*padded"):
        row_attention(nn.Module(), states, more, more, None, **layout)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}),
        ("opt", {"dropout": 0.5, "layerdrop": 0.5}),
        ("mixtral", {}),
        ("phimoe", {}),
    ],
)
def test_dropout_and_routers_noise_are_off_in_training(
    family: str, dropout: dict[str, float], checkpointing: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {**dropout}
    if family == "mixtral":  # Phi 3.5 MoE draws experts anyway
        changes["router_jitter_noise"] = 0.5
    tiny_model(family, **changes).save_pretrained(tmp_path)
    loaded: LoadedModel = load_usual(tmp_path, packed=True, gradient_checkpointing=checkpointing)
    row = make_row(GROUPS, "shared")
    assert torch.equal(loaded.scorer(row).sums, loaded.scorer(row).sums)
    assert loaded.replaced == dropout
