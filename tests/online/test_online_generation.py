"""Drawing tokens, and the policy answering prompts between two training steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.loading import load_usual
from support.tiny_run import tiny_checkpoint
from support.tiny_tokenizer import tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from dpo_pack.data.tokenization import Prompt
from dpo_pack.model.attention import ATTENTION_NAME
from dpo_pack.model.layout import packed_row
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Draw, SamplingSettings
from dpo_pack.online.transformers_generator import (
    TransformersGenerator,
    _invert,
    completion_of,
    completion_uniforms,
    draw_tokens,
    end_tokens,
    generating,
)
from dpo_pack.packing.lengths import Group

TEXTS = ("ask one", "what is the colour of the sky?", "x", "how do I bake bread at home? yes or no")
PLAIN = SamplingSettings(completions_per_prompt=3, max_new_tokens=8)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(model_directory: Path) -> CompletionLogps:
    return load_usual(model_directory).scorer


def generator(
    policy: CompletionLogps, sampling: SamplingSettings = PLAIN, *, token_budget: int = 10_000, seed: int = 0
) -> TransformersGenerator:
    return TransformersGenerator(
        scorer=policy,
        tokenizer=tiny_tokenizer(),
        sampling=sampling,
        seed=seed,
        token_budget=token_budget,
        device=torch.device("cpu"),
        console=Console(quiet=True),
    )


def draws(first_number: int = 0) -> list[Draw]:
    tokenizer = tiny_tokenizer()
    return [
        Draw(
            number=first_number + index,
            prompt_index=index,
            prompt=Prompt(
                ids=np.array(tokenizer(text)["input_ids"], dtype=np.int32),
                text=text,
                messages=None,
                row_number=index + 1,
            ),
        )
        for index, text in enumerate(TEXTS)
    ]


def answers(made: TransformersGenerator, to: list[Draw]) -> list[list[list[int]]]:
    results = made.generate(to)
    assert all(isinstance(result, tuple) for result in results)
    return [[completion.ids.tolist() for completion in result] for result in results]  # type: ignore[union-attr]


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).log_softmax(0)
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    drawn = draw_tokens(logits.expand(10_000, 4), uniforms, replace(PLAIN, temperature=2.0))
    shares = torch.bincount(drawn, minlength=4) / 10_000
    assert torch.allclose(shares, (logits / 2.0).softmax(0), atol=2e-4)


@pytest.mark.parametrize(
    "settings, kept",
    [({"top_k": 2}, {0, 3}), ({"top_p": 0.6}, {3}), ({"top_p": 0.7}, {0, 3}), ({"min_p": 0.2}, {0, 3}),
     ({"top_p": 0.01}, {3}), ({"top_k": 3, "min_p": 0.05}, {0, 1, 3})],
)  # fmt: skip
def test_filters_keep_what_transformers_keeps(settings: dict[str, float], kept: set[int]) -> None:
    from transformers.generation import logits_process as theirs

    logits = torch.FloatTensor([[1.0, 0.0, -1.0, 2.0]])  # softmax: 0.24, 0.09, 0.03, 0.64
    uniforms = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    drawn = draw_tokens(logits.expand(1000, 4), uniforms, replace(PLAIN, **settings))  # type: ignore[arg-type]
    assert set(drawn.tolist()) == kept
    filtered: torch.Tensor = logits
    ids = torch.LongTensor([[0]])
    if "top_k" in settings:
        filtered = theirs.TopKLogitsWarper(int(settings["top_k"]))(ids, torch.FloatTensor(filtered))
    if "top_p" in settings:
        filtered = theirs.TopPLogitsWarper(settings["top_p"])(ids, torch.FloatTensor(filtered))
    if "min_p" in settings:
        filtered = theirs.MinPLogitsWarper(settings["min_p"])(ids, torch.FloatTensor(filtered))
    assert set(torch.isfinite(filtered[0]).nonzero().flatten().tolist()) == kept
    shares = torch.bincount(drawn, minlength=4) / 1000
    assert torch.allclose(shares, filtered[0].softmax(0), atol=2e-3)


def test_completions_are_drawn_from_the_policy_s_own_distribution(policy: CompletionLogps) -> None:
    """Each token must be where the cumulative distribution of a plain forward passes its uniform."""
    made = generator(policy)
    for draw, completions in zip(draws(), answers(made, draws()), strict=True):
        for number, ids in enumerate(completions):
            uniforms = completion_uniforms(0, draw.number, number, PLAIN.max_new_tokens)
            with torch.no_grad():
                group = Group(context=draw.prompt.ids, completions=(np.array(ids),))
                row = packed_row([group], torch.device("cpu"), share_prompt=False)
                hidden = policy._run_layers(row).last_hidden_state[0][row.logit_index]
                logits = hidden @ policy.model.get_output_embeddings().weight.T
            expected = draw_tokens(logits, torch.from_numpy(uniforms[: len(ids)]), PLAIN)
            assert expected.tolist() == ids


def test_weights_are_cast_once_for_all_tokens_of_a_batch(policy: CompletionLogps) -> None:
    shapes = {parameter.shape for parameter in policy.parameters() if parameter.ndim == 2}
    casts = 0

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal casts
            is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32
            casts += is_cast and args[0].shape in shapes
            return func(*args, **(kwargs or {}))

    with policy.replaced(autocast=torch.bfloat16), Casts():  # type: ignore[no-untyped-call]
        made = answers(generator(policy), draws())
    assert max(len(ids) for of_draw in made for ids in of_draw) > 3
    assert casts == sum(type(module) is torch.nn.Linear for module in policy.modules())


def test_completions_do_not_depend_on_the_batch_they_are_in(policy: CompletionLogps) -> None:
    together = answers(generator(policy), draws())
    assert answers(generator(policy, token_budget=1), draws()) == together
    assert answers(generator(policy), draws()[2:]) == together[2:]
    assert answers(generator(policy, seed=1), draws()) != together
    assert answers(generator(policy), draws(first_number=9)) != together
    assert len({tuple(ids) for ids in together[0]}) > 1


def test_attention_is_the_rows_again_afterwards_and_trains_the_same(policy: CompletionLogps) -> None:
    group = Group(context=draws()[1].prompt.ids, completions=(np.array([5, 6, 7]), np.array([5, 9])))
    row = packed_row([group], torch.device("cpu"), share_prompt=True)
    before = policy(row).sums
    generator(policy).generate(draws())
    assert policy.model.config._attn_implementation == ATTENTION_NAME
    assert torch.equal(policy(row).sums, before)


def test_recomputed_activations_padding_and_own_settings_change_nothing(model_directory: Path) -> None:
    plain = load_usual(model_directory).scorer
    recomputing = load_usual(model_directory, gradient_checkpointing=True).scorer
    modes = [module.training for module in recomputing.modules()]
    assert any(modes)
    config = recomputing.model.generation_config
    config.update(repetition_penalty=5.0, do_sample=True, top_k=1)
    recomputing.model.config.use_cache = False
    padded = load_usual(model_directory, packed=False).scorer
    expected = answers(generator(plain), draws())
    assert answers(generator(recomputing), draws()) == answers(generator(padded), draws()) == expected
    assert [module.training for module in recomputing.modules()] == modes
    assert recomputing.model.generation_config is config


def test_a_completion_ends_with_the_token_that_ended_it(policy: CompletionLogps) -> None:
    made = generator(policy, replace(PLAIN, max_new_tokens=60, completions_per_prompt=6))
    completions = [c for result in made.generate(draws()) if isinstance(result, tuple) for c in result]
    finished = [c for c in completions if c.is_finished]
    assert finished and len(finished) < len(completions)
    for completion in completions:
        places = np.flatnonzero(completion.ids == 2)
        assert len(places) == int(completion.is_finished)
        assert completion.ids[-1] == 2 if completion.is_finished else len(completion.ids) == 60
        assert "</s>" not in completion.text and "<pad>" not in completion.text


@pytest.mark.parametrize("named, ends", [(7, {2, 7}), ([5, 7], {2, 5, 7}), (None, {2})])
def test_ends_are_those_of_tokenizer_config_and_generation_config(
    named: int | list[int] | None, ends: set[int], model_directory: Path
) -> None:
    model = load_usual(model_directory).scorer.model
    model.generation_config.eos_token_id = named
    assert end_tokens(model, tiny_tokenizer()) == ends
    backbone = model.get_decoder()
    assert not backbone.can_generate() and end_tokens(backbone, tiny_tokenizer()) == {2}


def test_a_stop_string_ends_a_completion_and_is_not_shown_to_judges(policy: CompletionLogps) -> None:
    free = generator(policy).generate(draws())
    letters = [c.text for result in free if isinstance(result, tuple) for c in result]
    letter = next(char for text in letters for char in text[2:] if char.isascii() and char.isalpha())
    stopped = generator(policy, replace(PLAIN, stop=("not written", letter))).generate(draws())
    both = [pair for results in zip(free, stopped, strict=True) for pair in zip(*results, strict=True)]  # type: ignore[arg-type]
    for whole, cut in both:
        assert cut.text == whole.text.partition(letter)[0]
        assert cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
        assert cut.is_finished if letter in whole.text else len(cut.ids) == len(whole.ids)


def test_a_softcap_is_not_lost_where_transformers_takes_sdpa_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_usual(tiny_checkpoint(tmp_path, "gemma2")).scorer.model
    monkeypatch.setattr(type(model), "_supports_sdpa", True)  # as in transformers 5.19
    with generating(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == ATTENTION_NAME


def test_a_completion_s_text_ends_before_the_earliest_stop_string() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer.encode("one two three", add_special_tokens=False), dtype=np.int32)
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    first, second = "tw", "thr"
    assert 0 < text.find(first) < text.find(second)
    for stop in ([first, second], [second, first], ["not there", first]):
        completion = completion_of(ids, tokenizer, ends=(), stop=stop, stop_end=len(ids))
        assert completion.text == text[: text.find(first)]
    begun = completion_of(ids, tokenizer, ends=(), stop=["one"], stop_end=len(ids))
    assert text.startswith("one") and begun.text == ""


def test_a_draw_at_the_very_end_takes_the_last_token_that_can_be_drawn() -> None:
    masses = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    assert _invert(masses, torch.ones(3)).tolist() == [2, 1, 3]
    assert _invert(masses, torch.zeros(3)).tolist() == [0, 1, 0]
