"""The vLLM generator on a stand-in for vLLM: options, seeds, ends, order, weights, refusals, whole runs."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support import fake_vllm
from support.loading import load_usual
from support.refusals import refusal
from support.run_files import timeless
from support.tiny_adapters import saved_adapter
from support.tiny_models import tiny_model
from support.tiny_online import online_recipe, rollouts
from support.tiny_run import tiny_checkpoint
from support.tiny_tokenizer import tiny_tokenizer
from test_online_generation import draws
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import dpo_pack.online.vllm_generator as vllm_generator
import dpo_pack.run.rollouts as build
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Completion, Failure, SamplingSettings
from dpo_pack.online.vllm_generator import (
    VllmGenerator,
    checkpoint_tensors,
    completion_seed,
    prove_agreement,
    start_engine,
)
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.trainer import train

CPU = torch.device("cpu")
PLAIN = SamplingSettings(completions_per_prompt=3, max_new_tokens=8)


def start(policy: CompletionLogps) -> vllm_generator.VllmEngine:
    return start_engine(
        policy.model,
        tiny_tokenizer(),
        dtype=torch.float32,
        device=CPU,
        max_tokens=128,
        gpu_memory_utilization=0.2,
        trust_remote_code=False,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[fake_vllm.LLM]]:
    yield fake_vllm.install(monkeypatch)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        os.environ.pop(name, None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(directory: Path) -> CompletionLogps:
    return load_usual(directory).scorer


def generator(policy: CompletionLogps, sampling: SamplingSettings = PLAIN, *, seed: int = 0) -> VllmGenerator:
    return VllmGenerator(
        engine=start(policy), scorer=policy, tokenizer=tiny_tokenizer(), sampling=sampling, seed=seed
    )


def completions(made: VllmGenerator, first_number: int = 0) -> list[tuple[Completion, ...]]:
    results = [result for result in made.generate(draws(first_number)) if not isinstance(result, Failure)]
    assert len(results) == len(draws())
    return results


def ids(results: list[tuple[Completion, ...]]) -> list[list[list[int]]]:
    return [[completion.ids.tolist() for completion in result] for result in results]


def test_options_are_passed_on_in_vllm_s_words(fake: type[fake_vllm.LLM], policy: CompletionLogps) -> None:
    sampling = SamplingSettings(
        completions_per_prompt=2,
        max_new_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        stop=("END", "\n\n"),
    )
    completions(generator(policy, sampling))
    (llm,) = fake.started
    assert llm.options == {
        "dtype": "float32",
        "max_model_len": 128,
        "gpu_memory_utilization": 0.2,
        "load_format": "dummy",
        "model_impl": "vllm",
        "generation_config": "vllm",
        "enforce_eager": True,
    }
    for _, params in llm.requests:
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.05)
        assert (params.max_tokens, params.stop, params.detokenize) == (9, ["END", "\n\n"], True)
        assert params.stop_token_ids == [2] and params.ignore_eos
    policy.model.generation_config.eos_token_id = [5, 7]
    completions(generator(policy))
    params = fake.started[1].requests[0][1]
    assert (params.top_k, params.detokenize, params.stop_token_ids) == (0, False, [2, 5, 7])


def test_a_completion_s_seed_is_a_function_of_seed_draw_and_number(
    fake: type[fake_vllm.LLM], policy: CompletionLogps
) -> None:
    made = generator(policy)
    together = ids(completions(made))
    (llm,) = fake.started
    assert [prompt for prompt, _ in llm.requests] == [
        draw.prompt.ids.tolist() for draw in draws() for _ in range(3)
    ]
    expected = [completion_seed(0, draw.number, number) for draw in draws() for number in range(3)]
    assert [params.seed for _, params in llm.requests] == expected
    assert len(set(expected)) == 12 and all(0 <= seed < 2**63 for seed in expected)
    assert ids(completions(made)) == together
    assert ids(completions(generator(policy, seed=1))) != together
    assert ids(completions(made, first_number=9)) != together
    alone = made.generate(draws()[2:3])[0]
    assert isinstance(alone, tuple) and [c.ids.tolist() for c in alone] == together[2]
    assert made.generate([]) == [] and made.weights_step(7) == 7


def test_what_vllm_gives_up_on_is_a_failure_of_that_prompt_only(
    fake: type[fake_vllm.LLM], policy: CompletionLogps, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fake.answer

    def give_up(self: fake_vllm.LLM, prompt: list[int], params: Any) -> fake_vllm.CompletionOutput:
        output = answer(self, prompt, params)
        gives_up = prompt == draws()[1].prompt.ids.tolist() and params.seed % 2
        return replace(output, finish_reason="abort") if gives_up else output

    monkeypatch.setattr(fake, "answer", give_up)
    results = generator(policy).generate(draws())
    assert results[1] == Failure(reason="vLLM ended a completion with 'abort'")
    assert all(isinstance(result, tuple) for place, result in enumerate(results) if place != 1)


def test_each_phase_is_written_by_the_weights_of_then(
    fake: type[fake_vllm.LLM], policy: CompletionLogps
) -> None:
    made = generator(policy)
    first = ids(completions(made))
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight
        head.copy_(head.flip(0))
    changed = ids(completions(made))
    assert changed != first and fake.started[0].num_updates == 2
    theirs = fake.started[0].model.state_dict()
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(theirs[name], tensor) and theirs[name].data_ptr() != tensor.data_ptr()
    with torch.no_grad():
        head.copy_(head.flip(0))
    assert ids(completions(made)) == first


@pytest.mark.slow
def test_a_proof_passes_with_all_weights_and_fails_without_one(
    fake: type[fake_vllm.LLM], policy: CompletionLogps
) -> None:
    engine = start(policy)

    def prove() -> float:
        engine.take_weights(checkpoint_tensors(policy.model, has_adapter=False))
        prompt = draws()[1].prompt.ids
        return prove_agreement(engine, policy, prompt, max_new_tokens=12, dtype=torch.float32)

    attention = policy.model.config._attn_implementation
    assert prove() < 1e-5
    assert policy.model.config._attn_implementation == attention
    for name in dict(checkpoint_tensors(policy.model, has_adapter=False)):
        whole = fake.started[0].model.state_dict()[name].clone()
        fake.started[0].model.state_dict()[name].normal_(std=1e-3)  # as it is before it is loaded
        fake.started[0].forgotten = {name}
        with pytest.raises(
            ModelError, match=r"online\.generator\.type: vLLM's log-probs differ .* nats a token"
        ):
            prove()
        fake.started[0].forgotten = set()
        fake.started[0].model.state_dict()[name].copy_(whole)
    assert prove() < 1e-5


def test_starting_vllm_leaves_the_process_as_it_was(
    fake: type[fake_vllm.LLM], policy: CompletionLogps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states() -> Any:
        numpy: Any = np.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist()

    before, set_num_threads, num_threads = states(), torch.set_num_threads, torch.get_num_threads()
    start(policy)
    assert states() == before
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == num_threads
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and os.environ["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    start(policy)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_what_vllm_refuses_is_told_in_one_line(
    fake: type[fake_vllm.LLM], policy: CompletionLogps, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (
        "1 validation error for ModelConfig\n  Value error, Model architectures ['XForCausalLM'] are not "
        "supported for now. Supported architectures: dict_keys(['A', 'B']) [type=value_error, input_value=3]"
    )
    monkeypatch.setattr(fake, "refusal", ValueError(told))
    with pytest.raises(ModelError, match=r"online\.generator\.type: .*not supported for now") as caught:
        start(policy)
    assert "dict_keys" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="full", marks=pytest.mark.slow),
        pytest.param(("model.lora={r: 4, alpha: 8}",), id="lora"),
    ],
)
def test_a_whole_run_is_written_by_the_policy_of_each_step(
    overrides: tuple[str, ...], fake: type[fake_vllm.LLM], tmp_path: Path, console: Console
) -> None:
    """The rollouts of later phases must be what the later weights write: kl of fresh pairs starts at 0."""
    recipe = online_recipe(
        tmp_path / "assets",
        tmp_path / "run",
        "online.generator={type: vllm, gpu_memory_utilization: 0.1}",
        f"data.eval={tmp_path}/assets/heldout.jsonl",
        "train.max_steps=3",
        *overrides,
    )
    train(recipe, console)
    (llm,) = fake.started
    assert llm.options["gpu_memory_utilization"] == 0.1
    longest = max(len(prompt) for prompt, _ in llm.requests)
    assert longest + 12 <= llm.options["max_model_len"] < 128
    records = timeless(tmp_path / "run", "train")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["kl/chosen"] == 0.0 and records[2]["kl/chosen"] != 0.0
    assert all(len(row["completions"]) == 3 for row in rollouts(tmp_path / "run"))
    assert llm.num_updates == 1 + len(list((tmp_path / "run" / "rollouts.parquet").glob("part-*")))
    assert "vLLM 0.32.0: has the policy's weights" in console.file.getvalue()  # type: ignore[attr-defined]
    assert len(timeless(tmp_path / "run", "eval")) == 2  # by the transformers generator
    if not overrides:
        train(recipe.model_copy(update={"output_dir": tmp_path / "again"}), Console(quiet=True))
        assert rollouts(tmp_path / "again") == rollouts(tmp_path / "run")


def test_runs_that_cannot_be_are_refused_before_the_policy_is_loaded(
    fake: type[fake_vllm.LLM], tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = online_recipe(tmp_path / "assets", tmp_path / "run", "online.generator.type=vllm")
    monkeypatch.setattr("dpo_pack.run.inputs.load_proved", lambda prepared: pytest.fail("loaded"))
    with monkeypatch.context() as patch:
        quantised = {"quant_method": "bitsandbytes"}
        patch.setattr("dpo_pack.run.setup.check_model", lambda *_, **__: None)
        patch.setattr("dpo_pack.model.facts.ModelFacts.quantization", quantised)
        assert "vllm cannot take quantised weights" in refused(recipe, console)
    with monkeypatch.context() as patch:
        patch.setattr("dpo_pack.run.rollouts.ranks.num_ranks", lambda: 2)
        told = "vllm answers in one process, and this run has 2; set distributed.num_processes: 1"
        with pytest.raises(RecipeError, match=told):
            build.check_generator(prepared_of(recipe, console))


def refused(recipe: Any, console: Console) -> str:
    return refusal(lambda: train(recipe, console))


def prepared_of(recipe: Any, console: Console) -> Any:
    return type("Setup", (), {"recipe": recipe, "console": console, "device": CPU})()


# ---------------------------------------------------------------------------- tensors that an engine is given


# Dense, tied, convolution-like weights, fused projections, experts stacked in memory, buffers that are saved.
FAMILIES = ("llama", "gemma2", "gpt2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")


def saved(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    model.save_pretrained(directory)
    tensors: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_that_a_checkpoint_of_the_family_has(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "first")
    for model in (tiny_model(family), AutoModelForCausalLM.from_pretrained(tmp_path / "first")):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        handed = list(checkpoint_tensors(model, has_adapter=False))
        expected = saved(model, tmp_path / "saved")
        assert sorted(name for name, _ in handed) == sorted(expected)  # none twice
        assert all(torch.equal(tensor, expected[name]) for name, tensor in handed)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "family, settings",
    [
        ("llama", {}),
        ("llama", {"use_rslora": True, "r": 8}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("gpt2", {"fan_in_fan_out": True, "target_modules": ["c_attn"]}),
    ],
    ids=["all", "rslora", "dora", "head-saved", "head", "transposed"],
)
def test_an_adapter_is_added_as_peft_merges_it_and_the_policy_stays_bitwise(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_model(family, tie_word_embeddings=False).save_pretrained(tmp_path / "base")
    adapter = saved_adapter(tmp_path / "adapter", tmp_path / "base", **settings)
    policy = load_usual(tmp_path / "base", adapter=adapter)
    before = {name: (t.data_ptr(), t.clone()) for name, t in policy.model.state_dict().items()}
    handed = list(checkpoint_tensors(policy.model, has_adapter=True))
    for name, tensor in policy.model.state_dict().items():
        assert before[name][0] == tensor.data_ptr() and torch.equal(before[name][1], tensor), name
    assert policy.adapter is not None
    expected = saved(policy.adapter.merge(), tmp_path / "merged")
    assert sorted(name for name, _ in handed) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in handed)
    plain = load_file(tmp_path / "base" / "model.safetensors")
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in handed)


def test_of_merged_weights_one_layer_exists_at_a_time(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=6).save_pretrained(tmp_path / "base")
    policy = load_usual(tmp_path / "base", adapter=saved_adapter(tmp_path / "adapter", tmp_path / "base"))
    made: list[weakref.ref[Tensor]] = []
    most = 0
    for name, tensor in checkpoint_tensors(policy.model, has_adapter=True):
        if name.endswith("_proj.weight"):
            made.append(weakref.ref(tensor))
        most = max(most, sum(reference() is not None for reference in made))
    assert len(made) == 6 * 7  # linear modules, all merged
    assert most <= 7 + 1  # those of a layer, and the one in hand
