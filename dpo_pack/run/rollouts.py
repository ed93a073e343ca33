"""Builds the objects that only an online run has: source of batches, generator, judges, evaluation."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from dpo_pack.model.scorer import LoadedModel
from dpo_pack.online.endpoint import Endpoint, api_key
from dpo_pack.online.http_generator import HttpGenerator
from dpo_pack.online.interface import Generator, Judge, SamplingSettings
from dpo_pack.online.judges import FunctionJudge, LlmJudge, WeightedJudges
from dpo_pack.online.phases import RolloutLog
from dpo_pack.online.reward_model import RewardModelJudge, load_reward_model, prove_reward_model
from dpo_pack.online.source import OnlineSettings, OnlineSource
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.online.vllm_generator import (
    KEY,
    VllmGenerator,
    check_installed,
    checkpoint_tensors,
    prove_agreement,
    start_engine,
)
from dpo_pack.online.win_rate import WinRate
from dpo_pack.recipe.online import EndpointRecipe, OnlineRecipe
from dpo_pack.run.pairs import row_builder
from dpo_pack.run.setup import Setup, load_judge_files, load_moving_reference, load_second_model
from dpo_pack.system import ranks
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.process import load_function
from dpo_pack.training.references import LiveReference


def build_online(
    setup: Setup, loaded: LoadedModel, *, directory: Path
) -> tuple[OnlineSource, WinRate | None]:
    """Returns the source of batches, and the evaluation on the prompts of `data.eval` (None without prompts).

    All rollouts are written into `directory`. The policy must have its starting weights. Raises RecipeError
    or ModelError if a generator or a judge cannot be created.
    """
    recipe, online, held_out = setup.recipe, _section(setup), setup.data.eval_prompts
    assert recipe.train.max_steps is not None
    judge, seed = build_judge(setup), recipe.seed
    source = OnlineSource(
        setup.data,
        generator=_generator(setup, loaded),
        judge=judge,
        pairing=online.pairing,
        settings=OnlineSettings(
            pairs_per_step=recipe.packing.pairs_per_step,
            rollouts_per_update=online.rollouts_per_update,
            max_staleness_steps=online.max_staleness_steps,
            num_steps=recipe.train.max_steps,
            shuffle=recipe.data.shuffle,
            seed=seed,
        ),
        token_budget=recipe.packing.token_budget,
        builder=partial(row_builder, setup, is_trained=True),
        shape=setup.policy_facts.shape if setup.policy_facts.is_packed else None,
        equal_rows=setup.strategy.shards,
        log=ranks.only_first_has(RolloutLog(directory=directory)),
    )
    if not held_out:
        return source, None
    return source, WinRate(held_out, _policy_generator(setup, loaded, 1), judge, seed=seed)


def check_generator(setup: Setup) -> None:
    """Checks, before a model is loaded, that the generator can work. Raises RecipeError, ModelError."""
    if _section(setup).generator.type != "vllm":
        return
    if ranks.num_ranks() > 1:
        raise RecipeError(
            f"{KEY}: vllm answers in one process, and this run has {ranks.num_ranks()}; set "
            "distributed.num_processes: 1, or use http with a vLLM server"
        )
    check_installed(setup.device)
    if setup.policy_facts.quantization is not None:
        raise ModelError(
            f"{KEY}: vllm cannot take quantised weights; use transformers, or a base that is not quantised"
        )


def _generator(setup: Setup, loaded: LoadedModel) -> Generator:
    settings, online = _section(setup).generator, _section(setup)
    if settings.type == "transformers":
        return _policy_generator(setup, loaded, online.completions_per_prompt)
    tokenizer, sampling, seed = setup.tokenizer, _sampling(setup), setup.recipe.seed
    if settings.endpoint is not None:
        endpoint = _endpoint(setup, settings.endpoint, "online.generator.endpoint")
        return HttpGenerator(endpoint=endpoint, tokenizer=tokenizer, sampling=sampling, seed=seed)
    prompts, dtype = setup.data.prompts, setup.policy_facts.precision.activations
    engine = start_engine(
        loaded.model,
        tokenizer,
        dtype=dtype,
        device=setup.device,
        max_tokens=max(len(prompt.ids) for prompt in prompts) + online.max_new_tokens,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        trust_remote_code=setup.recipe.model.trust_remote_code,
    )
    engine.take_weights(checkpoint_tensors(loaded.model, has_adapter=loaded.adapter is not None))
    difference = prove_agreement(
        engine, loaded.scorer, prompts[0].ids, max_new_tokens=online.max_new_tokens, dtype=dtype
    )
    setup.console.print(
        f"vLLM {engine.version}: has the policy's weights; log-probs differ by {difference:.1e} nats a token"
    )
    return VllmGenerator(
        engine=engine, scorer=loaded.scorer, tokenizer=tokenizer, sampling=sampling, seed=seed
    )


def _policy_generator(
    setup: Setup, loaded: LoadedModel, completions_per_prompt: int
) -> TransformersGenerator:
    return TransformersGenerator(
        scorer=loaded.scorer,
        tokenizer=setup.tokenizer,
        sampling=replace(_sampling(setup), completions_per_prompt=completions_per_prompt),
        seed=setup.recipe.seed,
        token_budget=_section(setup).generator.token_budget,
        device=setup.device,
        console=setup.console,
    )


def _sampling(setup: Setup) -> SamplingSettings:
    names = {field.name for field in fields(SamplingSettings)}
    return SamplingSettings(**_section(setup).model_dump(include=names))


def build_judge(setup: Setup) -> Judge:
    """Combines the recipe's judges. Raises RecipeError or ModelError if a judge cannot be created."""
    judges: list[tuple[Judge, float]] = []
    with ranks.first_goes_first():  # the other ranks then find rank 0's downloads in the caches
        for number, settings in enumerate(_section(setup).judges):
            key = f"online.judges.{number}"
            judge: Judge
            if settings.type == "function" and settings.function is not None:
                function = load_function(settings.function, f"{key}.function")
                judge = FunctionJudge(name=settings.function, function=function, retries=settings.retries)
            elif settings.type == "reward_model" and settings.path is not None:
                judge = _reward_model(setup, settings.path, f"{key}.path")
            else:
                assert settings.type == "llm" and settings.endpoint is not None
                endpoint = _endpoint(setup, settings.endpoint, f"{key}.endpoint")
                judge = LlmJudge(endpoint=endpoint, settings=settings, recipe_key=key)
            judges.append((judge, settings.weight))
    return WeightedJudges(judges=tuple(judges))


def _reward_model(setup: Setup, path: str, key: str) -> RewardModelJudge:
    recipe = setup.recipe
    trusts = recipe.model.trust_remote_code
    _, tokenizer = load_judge_files(path, key, trusts)
    judge = load_reward_model(
        path,
        tokenizer,
        trust_remote_code=trusts,
        precision=setup.policy_facts.precision,
        attention=recipe.model.attention,
        packed=setup.policy_facts.is_packed,
        token_budget=setup.reference_token_budget,
        device=setup.device,
        recipe_key=key,
        is_strict=recipe.model.unused_tensors == "error",
    )
    is_chat = any(prompt.messages is not None for prompt in setup.data.prompts)
    if is_chat and tokenizer.chat_template is None:
        setup.console.print(
            f"Warning: {key}: its tokenizer has no chat template, so it reads conversations in the policy's; "
            "put the template that it was trained with into its directory, as chat_template.jinja"
        )
    for note in judge.notes:
        setup.console.print(f"{key}: {note}")
    prove_reward_model(judge, key)
    return judge


def _endpoint(setup: Setup, settings: EndpointRecipe, key: str) -> Endpoint:
    secret = api_key(settings.api_key_env, f"{key}.api_key_env")
    return Endpoint(settings=settings, api_key=secret, recipe_key=key, console=setup.console)


def live_reference(setup: Setup, loaded: LoadedModel) -> LiveReference:
    """Returns the reference: the policy without its new adapter, or a second model. The weights of the second
    model are frozen or (with `reference.sync`) follow the policy."""
    recipe, online = setup.recipe, _section(setup)
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
