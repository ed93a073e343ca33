"""Random rows with common beginnings against each sequence alone, in float64: log-probs and gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.family_errors import skip_unless_packed
from support.gradients import flat, gradients
from support.groups import CPU, group
from support.marks import slow
from support.oracle import completion_logps_one_by_one
from support.oracle import gradients as their_gradients
from support.recurrent_stand_ins import use_stand_ins
from support.tiny_models import VOCABULARY, tiny_model

import dpo_pack.model.attention.segments as of_segments
from dpo_pack.model.attention import ATTENTION_NAME, cuda, register_attention, sdpa
from dpo_pack.model.attention.cuda import flex_attention
from dpo_pack.model.attention.sdpa import sdpa_attention
from dpo_pack.model.attention.segments import MAX_MASK_BYTES
from dpo_pack.model.layout import packed_row
from dpo_pack.model.recurrence import wrap_recurrent_layers
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs.layers import take_kernels

tails = st.integers(0, 12)


@st.composite
def blocks(draw: st.DrawFn) -> list[Group]:
    """Groups of a common beginning, others between them: empty tails, equal answers, one token, whole prompts
    that are a beginning; pairs, one side of a pair, three answers; tokens that are not scored."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    pairs = []
    for _ in range(draw(st.integers(1, 2))):
        beginning = ids(draw(st.one_of(st.integers(0, 5), st.integers(0, 200))))
        for _ in range(draw(st.integers(1, 3))):
            own, alike = ids(draw(tails)), ids(draw(tails))
            prompt = [*beginning, *own] or [3]
            number = draw(st.sampled_from([2, 2, 1, 3]))
            answers = [[*alike, *ids(draw(tails))] or [4] for _ in range(number)]
            length = len(beginning) if draw(st.integers(0, 4)) else 0
            masks = None
            if draw(st.booleans()):  # at least one token of an answer is scored
                draws = (torch.rand(len(answer), generator=generator) for answer in answers)
                masks = tuple(chances.numpy() < 0.7 for chances in draws)
                for mask in masks:
                    mask[draw(st.sampled_from([0, -1]))] = True
            pairs.append(replace(group(prompt, *answers, beginning=length), scored=masks))
    return pairs


@functools.cache
def models(family: str) -> tuple[CompletionLogps, Any]:
    """Ours, and the same weights in transformers' own code."""
    with pytest.MonkeyPatch.context() as patch:
        if family == "kimi_linear":  # which a kernel of another package computes
            use_stand_ins(patch)
        skip_unless_packed(family)
        register_attention()
        ours, theirs = tiny_model(family, attention=ATTENTION_NAME), tiny_model(family, attention="eager")
        for model in (ours, theirs):  # the grouped product of experts takes no float64
            model.set_experts_implementation("eager")
        wrap_recurrent_layers(ours)
        scorer = CompletionLogps(ours.double(), backend=sdpa_attention, autocast=None)
        if family == "kimi_linear":
            assert len(take_kernels(scorer, CPU)) == len(scorer.recurrent_kernels) == 2
    return scorer, theirs.double()


def check(scorer: CompletionLogps, theirs: Any, pairs: Sequence[Group], *, bound: float) -> None:
    sums, grads = gradients(scorer, packed_row(pairs, CPU, share_prompt=True))
    theirs.zero_grad(set_to_none=True)
    sequences = [(g.context.tolist(), ids.tolist()) for g in pairs for ids in g.completions]
    masks = [g.scored or [np.ones(len(ids), dtype=np.bool_) for ids in g.completions] for g in pairs]
    scored = [mask.tolist() for of_group in masks for mask in of_group]
    alone = completion_logps_one_by_one(theirs, sequences, scored)
    (alone * torch.linspace(-1.0, 1.0, len(alone))).sum().backward()
    torch.testing.assert_close(sums, alone.detach().double(), rtol=bound, atol=bound)
    expected = {f"model.{name}": grad for name, grad in their_gradients(theirs).items()}
    assert grads.keys() == expected.keys()
    ours, alike = flat(grads), flat({name: expected[name] for name in grads})
    assert (ours - alike).norm() <= bound * (1 + alike.norm())


few = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("backend", ["sdpa", "gathered", "flex"])
# Rotations and norms of mistral are in fp32, whatever the model's type; it has a window.
@pytest.mark.parametrize(("family", "bound"), [("gpt2", 1e-9), ("mistral", 1e-5)])
@few
@given(pairs=blocks())
def test_attention_on_paths_is_that_of_each_sequence_alone(
    family: str, bound: float, backend: str, pairs: list[Group]
) -> None:
    scorer, theirs = models(family)
    attend, kernel = flex_attention if backend == "flex" else sdpa_attention, sdpa._cpu_kernel()
    # Without the kernel, as on other devices, and with softcaps or sinks.
    with scorer.replaced(backend=attend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "_cpu_kernel", lambda: kernel if backend == "sdpa" else None)
        check(scorer, theirs, pairs, bound=bound)


# Softcaps, sinks and latent attention; masks in parts, of mistral with a window.
@pytest.mark.parametrize(
    ("family", "bound", "mask_bytes"),
    [
        *((family, 1e-4, MAX_MASK_BYTES) for family in ("gemma2", "gpt_oss", "deepseek_v3")),
        *((family, 1e-5, 200) for family in ("mistral", "gemma2")),
    ],
)
@few
@given(pairs=blocks())
def test_other_attention_on_paths_is_that_of_each_sequence_alone(
    family: str, bound: float, mask_bytes: int, pairs: list[Group]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_segments, "MAX_MASK_BYTES", mask_bytes)
        check(*models(family), pairs, bound=bound)


@pytest.mark.parametrize(
    # transformers computes states in fp32.
    ("family", "bound"),
    [
        ("lfm2", 1e-5),
        *((family, 1e-4) for family in ("qwen3_5_text", "bamba", "falcon_h1")),
        *slow(("kimi_linear", 1e-4)),
    ],  # fmt: skip
)
@few
@given(pairs=blocks())
def test_states_on_paths_are_those_of_each_sequence_alone(
    family: str, bound: float, pairs: list[Group]
) -> None:
    check(*models(family), pairs, bound=bound)


@settings(few, max_examples=6)
@given(groups=blocks())
def test_routers_count_the_tokens_of_each_sequence_alone(groups: list[Group]) -> None:
    scorer, _ = models("mixtral")
    sides = [replace(g, completions=(ids,), scored=None) for g in groups for ids in g.completions]
    with torch.no_grad():
        row, *alone = (
            scorer(packed_row(some, CPU, share_prompt=True, counts_copies=True))
            for some in (groups, *([side] for side in sides))
        )
    assert row.expert_counts.tolist() == sum(one.expert_counts for one in alone).tolist()
    torch.testing.assert_close(row.expert_probs, sum(one.expert_probs for one in alone))


@pytest.fixture(autouse=True)
def _flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    cuda._kernel.cache_clear()
