"""Builds the objects that only an online run has: source of batches, generator, judges, evaluation."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from dpo_pack.model.facts import ModelFacts
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.endpoint import Endpoint, api_key
from dpo_pack.online.http_generator import HttpGenerator
from dpo_pack.online.interface import Generator, Judge, SamplingSettings
from dpo_pack.online.judges import FunctionJudge, LlmJudge, WeightedJudges
from dpo_pack.online.phases import RolloutLog
from dpo_pack.online.reward_model import RewardModelJudge, load_reward_model
from dpo_pack.online.source import OnlineSource
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.online.vllm_generator import (
    KEY,
    VllmGenerator,
    checkpoint_tensors,
    prove_agreement,
    start_engine,
)
from dpo_pack.online.win_rate import WinRate
from dpo_pack.recipe.online import EndpointRecipe, JudgeRecipe, OnlineRecipe
from dpo_pack.run.models import Setup
from dpo_pack.run.pairs import row_builder
from dpo_pack.run.setup import load_judge_files, load_moving_reference, load_second_model
from dpo_pack.system import ranks
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.process import load_function
from dpo_pack.training.references import CachedReference, LiveReference, Reference


def build_online(
    setup: Setup, loaded: LoadedModel, *, directory: Path
) -> tuple[OnlineSource, WinRate | None]:
    """Returns the source of batches, and the evaluation on the prompts of `data.eval` (None without prompts).
    Rollouts are written into `directory`. The policy must have its starting weights. Raises RecipeError or
    ModelError if a generator or a judge cannot be created."""
    recipe, online, held_out = setup.recipe, _section(setup), setup.data.eval_prompts
    facts, judge = setup.policy_facts, build_judge(setup)
    names = {field.name for field in fields(SamplingSettings)}
    sampling = SamplingSettings(**online.model_dump(include=names))
    by_policy = TransformersGenerator(
        scorer=loaded.scorer,
        tokenizer=setup.tokenizer,
        sampling=sampling,
        seed=recipe.seed,
        token_budget=online.generator.token_budget,
        device=setup.device,
        console=setup.console,
    )
    generator: Generator = by_policy
    if online.generator.endpoint is not None:
        endpoint = _endpoint(online.generator.endpoint, "online.generator.endpoint", setup.console)
        generator = HttpGenerator(
            endpoint=endpoint, tokenizer=setup.tokenizer, sampling=sampling, seed=recipe.seed
        )
    elif online.generator.type == "vllm":
        generator = _vllm_generator(setup, loaded, sampling)
    source = OnlineSource(
        setup.data,
        generator=generator,
        judge=judge,
        recipe=recipe,
        online=online,
        builder=partial(row_builder, setup, is_trained=True),
        token_budget=setup.token_budget,
        shape=facts.shape if facts.is_packed else None,
        equal_rows=setup.strategy.shards,
        log=ranks.only_first_does(partial(RolloutLog, directory=directory)),
    )
    if not held_out:
        return source, None
    one_each = replace(by_policy, sampling=replace(sampling, completions_per_prompt=1))
    return source, WinRate(held_out, one_each, judge, seed=recipe.seed)


def check_generator(setup: Setup) -> None:
    """Checks, before a model is loaded, that the generator can work. Raises RecipeError, ModelError."""
    if _section(setup).generator.type != "vllm":
        return
    if ranks.num_ranks() > 1:
        raise RecipeError(
            f"{KEY}: vllm answers in one process, and this run has {ranks.num_ranks()}; set "
            "distributed.num_processes: 1, or use http with a vLLM server"
        )
    if setup.policy_facts.quantization is not None:
        raise ModelError(
            f"{KEY}: vllm cannot take quantised weights; use transformers, or a base that is not quantised"
        )


def _vllm_generator(setup: Setup, loaded: LoadedModel, sampling: SamplingSettings) -> VllmGenerator:
    prompts, dtype = setup.data.prompts, setup.policy_facts.precision.activations
    engine = start_engine(
        loaded.model,
        setup.tokenizer,
        dtype=dtype,
        device=setup.device,
        max_tokens=max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens,
        gpu_memory_utilization=_section(setup).generator.gpu_memory_utilization,
        trust_remote_code=setup.recipe.model.trust_remote_code,
    )
    engine.take_weights(checkpoint_tensors(loaded.model, has_adapter=loaded.adapter is not None))
    difference = prove_agreement(
        engine, loaded.scorer, prompts[0].ids, max_new_tokens=sampling.max_new_tokens, dtype=dtype
    )
    setup.console.print(
        f"vLLM {engine.version}: has the policy's weights; log-probs differ by {difference:.1e} nats a token"
    )
    return VllmGenerator(
        engine=engine,
        scorer=loaded.scorer,
        tokenizer=setup.tokenizer,
        sampling=sampling,
        seed=setup.recipe.seed,
    )


def build_judge(setup: Setup) -> Judge:
    """Combines the recipe's judges. Raises RecipeError or ModelError if a judge cannot be created."""
    make = partial(
        make_judge,
        model=setup.policy_facts,
        token_budget=setup.reference_token_budget,
        device=setup.device,
        console=setup.console,
        is_chat=any(prompt.messages is not None for prompt in setup.data.prompts),
    )
    with ranks.first_goes_first():  # the other ranks then find rank 0's downloads in the caches
        judges = [
            (make(settings, f"online.judges.{number}"), settings.weight)
            for number, settings in enumerate(_section(setup).judges)
        ]
    return WeightedJudges(judges=tuple(judges))


def make_judge(
    settings: JudgeRecipe,
    key: str,
    *,
    model: ModelFacts,
    token_budget: int,
    device: torch.device,
    console: Console,
    is_chat: bool,
) -> FunctionJudge | LlmJudge | RewardModelJudge:
    """Returns one judge, at `key` of the recipe. A reward model has the precision of `model`, which answers,
    and is told if it cannot write conversations (`is_chat`). Raises RecipeError or ModelError."""
    if settings.function is not None:
        function = load_function(settings.function, f"{key}.function")
        return FunctionJudge(name=settings.function, function=function, retries=settings.retries)
    if settings.endpoint is not None:
        endpoint = _endpoint(settings.endpoint, f"{key}.endpoint", console)
        return LlmJudge(endpoint=endpoint, settings=settings, recipe_key=key)
    path, key = str(settings.path), f"{key}.path"
    _, tokenizer = load_judge_files(path, key, model.settings.trust_remote_code)
    judge, notes = load_reward_model(
        path,
        tokenizer,
        settings=model.settings,
        precision=model.precision,
        token_budget=token_budget,
        device=device,
        recipe_key=key,
    )
    if is_chat and tokenizer.chat_template is None:
        console.print(
            f"Warning: {key}: its tokenizer has no chat template, so it reads conversations in the policy's; "
            "put the template that it was trained with into its directory, as chat_template.jinja"
        )
    for note in notes:
        console.print(f"{key}: {note}")
    return judge


def _endpoint(settings: EndpointRecipe, key: str, console: Console) -> Endpoint:
    secret = api_key(settings.api_key_env, f"{key}.api_key_env")
    return Endpoint(settings=settings, api_key=secret, recipe_key=key, console=console)


def online_reference(setup: Setup, loaded: LoadedModel) -> Reference:
    """Returns none if the loss needs none, else the policy without its new adapter, or a second model, which
    is frozen or follows the policy."""
    recipe, online = setup.recipe, _section(setup)
    if not setup.objective.needs_reference:
        setup.console.print("Reference: none, the loss needs no reference")
        return CachedReference(lookup=None)
    setup.console.print("Reference: live, on the rows of each step")
    if recipe.reference.sync is not None:
        return load_moving_reference(setup)
    if recipe.reference.path is None and loaded.adapter is not None and loaded.adapter.is_new:
        if online.offload_reference:
            raise ModelError(
                "online.offload_reference: with model.lora the reference is the policy without its adapter, "
                "so there is no second model to offload; leave online.offload_reference out"
            )
        return LiveReference(model=loaded, device=setup.device, is_offloaded=False)
    model = load_second_model(setup)
    return LiveReference(model=model, device=setup.device, is_offloaded=online.offload_reference)


def _section(setup: Setup) -> OnlineRecipe:
    assert setup.recipe.online is not None
    return setup.recipe.online
