"""From the recipe's `online` section to a source of batches and its evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpo_pack import ranks
from dpo_pack.data.store import PairTable
from dpo_pack.errors import ModelError, RecipeError
from dpo_pack.loading import load_tokenizer
from dpo_pack.models import LoadedModel
from dpo_pack.online.endpoint import Endpoint, api_key
from dpo_pack.online.function_judge import FunctionJudge, load_function
from dpo_pack.online.http_generator import HttpGenerator
from dpo_pack.online.interface import Generator, Judge
from dpo_pack.online.llm_judge import INSTRUCTIONS, LlmJudge
from dpo_pack.online.pairing import PairingSettings
from dpo_pack.online.reference import LiveReference
from dpo_pack.online.reward_model import RewardModelJudge, load_reward_model
from dpo_pack.online.reward_proof import prove_reward_model
from dpo_pack.online.rollout_log import RolloutLog
from dpo_pack.online.sampling import SamplingSettings
from dpo_pack.online.source import OnlineSettings, OnlineSource, RowSettings
from dpo_pack.online.transformers_generator import TransformersGenerator
from dpo_pack.online.vllm_engine import KEY, EngineSettings, check_installed, start_engine
from dpo_pack.online.vllm_generator import VllmGenerator
from dpo_pack.online.vllm_proof import prove_agreement
from dpo_pack.online.vllm_weights import checkpoint_tensors
from dpo_pack.online.weighted_judges import WeightedJudges
from dpo_pack.online.win_rate import WinRate
from dpo_pack.prepare import Prepared, prepare_second_model
from dpo_pack.prepare_batches import plan_settings, policy_shape, row_builder
from dpo_pack.recipe_models import policy_model, reference_token_budget, source_config
from dpo_pack.recipe_online import EndpointRecipe, JudgeRecipe, OnlineRecipe
from dpo_pack.sources import RowBuilder


def build_source(
    prepared: Prepared,
    policy: LoadedModel,
    judge: Judge,
    *,
    rollouts: Path,
    needs_reference: bool,
) -> OnlineSource:
    """The recipe's online source; `needs_reference`: its batches carry reference log-probs."""
    recipe, online = prepared.recipe, _section(prepared)
    assert recipe.train.max_steps is not None
    reference = live_reference(prepared, policy) if needs_reference else None

    def builder(table: PairTable) -> RowBuilder:
        return row_builder(prepared, table, None)

    return OnlineSource(
        prepared.data,
        generator=build_generator(prepared, policy),
        judge=judge,
        pairing=PairingSettings(
            method=online.pairing.type,
            min_margin=online.pairing.min_margin,
            missing_eos_penalty=online.pairing.missing_eos_penalty,
            seed=recipe.seed,
        ),
        reference=reference,
        settings=OnlineSettings(
            pairs_per_step=recipe.packing.pairs_per_step,
            rollouts_per_update=online.rollouts_per_update,
            max_staleness_steps=online.max_staleness_steps,
            num_steps=recipe.train.max_steps,
            shuffle=recipe.data.shuffle,
            seed=recipe.seed,
        ),
        rows=RowSettings(
            plan=plan_settings(recipe),
            builder=builder,
            shape=policy_shape(recipe) if prepared.is_packed else None,
            equal_rows=prepared.strategy.shards,
        ),
        log=RolloutLog(rollouts) if ranks.is_first() else None,
    )


def build_win_rate(prepared: Prepared, policy: LoadedModel, judge: Judge) -> WinRate | None:
    """The evaluation on `data.eval`; None without. The policy must be as it started."""
    assert prepared.data.prompts is not None
    if not prepared.data.prompts.eval:
        return None
    generator = policy_generator(prepared, policy, completions_per_prompt=1)
    return WinRate(prepared.data.prompts.eval, generator, judge, seed=prepared.recipe.seed)


def check_generator(prepared: Prepared) -> None:
    """What can be said of the recipe's generator before a model is loaded. Raises RecipeError, ModelError."""
    if _section(prepared).generator.type != "vllm":
        return
    if ranks.num_ranks() > 1:
        raise RecipeError(
            f"{KEY}: vllm answers in one process, and this run has {ranks.num_ranks()}; set "
            "distributed.num_processes: 1, or use http with a vLLM server"
        )
    check_installed(prepared.device)
    config = source_config(prepared.recipe, policy_model(prepared.recipe)).to_dict()
    if config.get("quantization_config") is not None:
        raise ModelError(f"{KEY}: vllm cannot be handed quantised weights; use transformers, or another base")


def build_generator(prepared: Prepared, policy: LoadedModel) -> Generator:
    """Who answers the training prompts."""
    online = _section(prepared)
    if online.generator.type == "vllm":
        return _vllm_generator(prepared, policy)
    if online.generator.endpoint is not None:
        return HttpGenerator(
            endpoint=_endpoint(online.generator.endpoint, "online.generator.endpoint"),
            tokenizer=prepared.tokenizer,
            sampling=sampling_settings(online),
            seed=prepared.recipe.seed,
            console=prepared.console,
        )
    return policy_generator(prepared, policy, completions_per_prompt=online.completions_per_prompt)


def _vllm_generator(prepared: Prepared, policy: LoadedModel) -> VllmGenerator:
    """vLLM, started, with the policy's weights, and proof that it computes with them as the policy does."""
    recipe, online = prepared.recipe, _section(prepared)
    assert prepared.data.prompts is not None
    prompts = prepared.data.prompts.train
    dtype = prepared.precision.activations
    engine = start_engine(
        policy.model,
        prepared.tokenizer,
        EngineSettings(
            dtype=dtype,
            device=prepared.device,
            max_tokens=max(len(prompt.ids) for prompt in prompts) + online.max_new_tokens,
            gpu_memory_utilization=online.generator.gpu_memory_utilization,
            trust_remote_code=recipe.model.trust_remote_code,
        ),
    )
    engine.take_weights(checkpoint_tensors(policy.model, has_adapter=policy.adapter is not None))
    difference = prove_agreement(
        engine,
        policy.scorer,
        prompts[0].ids,
        max_new_tokens=online.max_new_tokens,
        dtype=dtype,
        device=prepared.device,
    )
    prepared.console.print(
        f"vLLM {engine.version}: has the policy's weights; log-probs differ by {difference:.1e} nats a token"
    )
    return VllmGenerator(
        engine=engine,
        policy=policy.scorer,
        tokenizer=prepared.tokenizer,
        sampling=sampling_settings(online),
        seed=recipe.seed,
    )


def policy_generator(
    prepared: Prepared, policy: LoadedModel, *, completions_per_prompt: int
) -> TransformersGenerator:
    """The policy itself."""
    return TransformersGenerator(
        policy=policy.scorer,
        tokenizer=prepared.tokenizer,
        sampling=replace(
            sampling_settings(_section(prepared)), completions_per_prompt=completions_per_prompt
        ),
        seed=prepared.recipe.seed,
        token_budget=_section(prepared).generator.token_budget,
        device=prepared.device,
    )


def sampling_settings(online: OnlineRecipe) -> SamplingSettings:
    return SamplingSettings(
        completions_per_prompt=online.completions_per_prompt,
        max_new_tokens=online.max_new_tokens,
        temperature=online.temperature,
        top_p=online.top_p,
        top_k=online.top_k,
        min_p=online.min_p,
        stop=online.stop,
    )


def build_judge(prepared: Prepared) -> Judge:
    """The recipe's judges as one. Raises RecipeError or ModelError for one that cannot be had."""
    with ranks.first_goes_first():  # the others find in the caches what it has fetched
        judges = [
            (_judge(prepared, judge, f"online.judges.{number}"), judge.weight)
            for number, judge in enumerate(_section(prepared).judges)
        ]
    return WeightedJudges(judges=tuple(judges))


def _judge(prepared: Prepared, judge: JudgeRecipe, key: str) -> Judge:
    if judge.function is not None:
        function = load_function(judge.function, f"{key}.function")
        return FunctionJudge(name=judge.function, function=function, retries=judge.retries)
    if judge.path is not None:
        return _reward_model(prepared, judge.path, f"{key}.path")
    assert judge.endpoint is not None
    endpoint = _endpoint(judge.endpoint, f"{key}.endpoint")
    return LlmJudge(endpoint=endpoint, instructions=judge.instructions or INSTRUCTIONS)


def _reward_model(prepared: Prepared, path: str, key: str) -> RewardModelJudge:
    recipe = prepared.recipe
    tokenizer = load_tokenizer(
        path,
        revision=None,
        trust_remote_code=recipe.model.trust_remote_code,
        chat_template=None,
        recipe_key=key,
    )
    judge = load_reward_model(
        path,
        tokenizer,
        trust_remote_code=recipe.model.trust_remote_code,
        precision=prepared.precision,
        attention=recipe.model.attention,
        packed=prepared.is_packed,
        token_budget=reference_token_budget(recipe, prepared.device),
        device=prepared.device,
        recipe_key=key,
    )
    prove_reward_model(judge, key)
    return judge


def _endpoint(endpoint: EndpointRecipe, key: str) -> Endpoint:
    return Endpoint(
        url=endpoint.url,
        model=endpoint.model,
        api_key=api_key(endpoint.api_key_env, f"{key}.api_key_env"),
        timeout_seconds=endpoint.timeout_seconds,
        retries=endpoint.retries,
        concurrency=endpoint.concurrency,
        recipe_key=key,
    )


def live_reference(prepared: Prepared, policy: LoadedModel) -> LiveReference:
    """The reference as it is all along: the policy without its new adapter, or a second model."""
    recipe, online = prepared.recipe, _section(prepared)
    if recipe.reference.path is None and policy.adapter is not None and policy.adapter.is_new:
        if online.offload_reference:
            raise ModelError(
                "online.offload_reference: with model.lora the reference is the policy without its adapter, "
                "and no second model; leave it out"
            )
        return LiveReference(model=policy, device=prepared.device, is_offloaded=False)
    return LiveReference(
        model=prepare_second_model(prepared),
        device=prepared.device,
        is_offloaded=online.offload_reference,
    )


def _section(prepared: Prepared) -> OnlineRecipe:
    assert prepared.recipe.online is not None
    return prepared.recipe.online
