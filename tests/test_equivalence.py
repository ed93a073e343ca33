"""Packed and shared log-probs and gradients equal each sequence's alone, on tiny models of many families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import completion_logps_one_by_one, gradients
from tiny_models import FAMILIES, VOCABULARY, tiny_config, tiny_model
from torch import nn

from dpo_pack.attention import row_attention
from dpo_pack.attention.sdpa import sdpa_attention
from dpo_pack.errors import UnsupportedModelError
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.models import LoadedModel, Precision, load_model

CPU = torch.device("cpu")
MODES = ("shared", "unshared", "padded")


def load(directory: Path, *, packed: bool, gradient_checkpointing: bool = False) -> LoadedModel:
    return load_model(
        str(directory),
        revision=None,
        trust_remote_code=False,
        precision=Precision(parameters=torch.float32, autocast=None),
        attention="auto",
        packed=packed,
        gradient_checkpointing=gradient_checkpointing,
        device=CPU,
        recipe_key="model.path",
    )


def make_row(groups: Sequence[Group], mode: str) -> Row:
    if mode == "padded":
        return padded_row(groups, pad_token_id=0, device=CPU)
    return packed_row(layout_row(groups, share_prompt=mode == "shared"), CPU)


def make_groups() -> list[Group]:
    """Long and one-token prompts and completions, common beginnings, prefixes, rankings."""
    random = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return random.integers(3, VOCABULARY, count)

    def group(context: int, common: int, *tails: int) -> Group:
        beginning = ids(common)
        completions = tuple(np.concatenate((beginning, ids(tail))) for tail in tails)
        return Group(context=ids(context), completions=completions)

    return [
        group(20, 0, 9, 13),
        group(5, 0, 1, 1),
        group(12, 2, 8, 3),
        group(1, 0, 4, 6),
        group(30, 1, 15, 2),
        group(6, 4, 0, 3),  # chosen is how rejected begins
        group(6, 4, 3, 0),
        group(9, 0, 3, 5, 4),
        group(9, 0, 3),
    ]


GROUPS = make_groups()
SEQUENCES = [(g.context.tolist(), c.tolist()) for g in GROUPS for c in g.completions]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_and_gradients_equal_each_sequence_alone(family: str, mode: str, tmp_path: Path) -> None:
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    weights = torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(1))
    expected = completion_logps_one_by_one(plain, SEQUENCES)
    (expected * weights).sum().backward()
    loaded = load(tmp_path, packed=mode != "padded")
    output = loaded.scorer(make_row(GROUPS, mode))
    (output.sums * weights).sum().backward()

    error = (output.sums - expected).abs()
    assert error.max() < 1e-4 and error.mean() < 2e-5, (family, mode, error.max(), error.mean())
    theirs, ours = gradients(plain), gradients(loaded.model)
    assert theirs.keys() == ours.keys()
    whole = torch.cat([grad.flatten() for grad in theirs.values()])
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs])
    assert difference.norm() / whole.norm() < 1e-6, (family, mode)
    assert difference.abs().max() / whole.abs().max() < 1e-6, (family, mode)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mistral", "sliding_window", None),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("granite", "logits_scaling", 1.0),
        ("cohere", "logit_scale", 1.0),
    ],
)
def test_what_is_special_about_a_family_shows_in_its_tiny_model(
    family: str, key: str, value: float | None
) -> None:
    """Or the test above would not see it missing."""
    special: dict[str, Any] = {key: value}
    expected = completion_logps_one_by_one(tiny_model(family), SEQUENCES)
    changed = completion_logps_one_by_one(tiny_model(family, **special), SEQUENCES)
    assert (changed - expected).abs().max() > 0.01


def test_gradient_checkpointing_recomputes_with_the_row_s_own_layout(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    stored = []
    for checkpointing in (False, True):
        loaded = load(tmp_path, packed=True, gradient_checkpointing=checkpointing)
        # Two rows in flight: a layout kept in a global would be the second one's when the first recomputes.
        first, second = (loaded.scorer(make_row(part, "shared")) for part in (GROUPS[:4], GROUPS[4:]))
        (first.sums.sum() + second.sums.sum()).backward()
        stored.append(gradients(loaded.model))
    for name in stored[0]:
        torch.testing.assert_close(stored[0][name], stored[1][name], msg=name)


def test_pairs_of_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    scorer = load(tmp_path, packed=True).scorer
    before = scorer(make_row(GROUPS[:3], "shared")).sums
    changed = Group(context=(GROUPS[1].context + 1) % VOCABULARY, completions=GROUPS[1].completions)
    after = scorer(make_row([GROUPS[0], changed, GROUPS[2]], "shared")).sums
    assert torch.equal(before[:2], after[:2]) and torch.equal(before[4:], after[4:])
    assert (before[2:4] != after[2:4]).all()


def test_a_model_that_ignores_our_keywords_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="padded"):
        states = torch.zeros(1, config.num_attention_heads, 3, 4)
        row_attention(nn.Module(), states, states, states, None)


def test_a_model_with_layers_that_bypass_the_seam_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = load(tmp_path, packed=True)
    loaded.scorer.num_attention_layers += 1
    with pytest.raises(UnsupportedModelError, match="3 layers, but 2 .*padded"):
        loaded.scorer(make_row(GROUPS[:1], "shared"))


def test_attention_dropout_is_refused_and_model_dropout_is_switched_off(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="dropout"):
        row = make_row(GROUPS[:1], "shared")
        states = torch.zeros(1, 2, row.num_tokens, 4)
        layout: dict[str, Any] = {"row_segments": row.segments, "row_backend": sdpa_attention}
        row_attention(nn.Module(), states, states, states, None, dropout=0.1, **layout)
    tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).save_pretrained(tmp_path)
    loaded = load(tmp_path, packed=True)
    row = make_row(GROUPS, "shared")
    assert loaded.scorer.training and torch.equal(loaded.scorer(row).sums, loaded.scorer(row).sums)
    assert loaded.dropout == {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
