"""Rules of a recipe's `online` section, and of the other sections beside it."""

import re
from collections.abc import Iterator

from dpo_pack.recipe_errors import Problem
from dpo_pack.recipe_online import GeneratorRecipe, JudgeRecipe, OnlineRecipe
from dpo_pack.recipe_schema import Recipe

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_URL = re.compile(r"https?://\S+")
VLLM_HIGHEST_TEMPERATURE = 2.0


def broken_online_rules(recipe: Recipe) -> Iterator[Problem]:
    """Problems that only several keys together show."""
    if recipe.online is None:
        return
    if recipe.train.max_steps is None:
        yield "train.max_steps", "an online run needs it: its pairs do not exist before it"
    if recipe.train.epochs != 1:
        yield "train.epochs", "an online run is as long as train.max_steps says; leave it out"
    if recipe.packing.scope == "epoch":
        yield "packing.scope", "epoch needs pairs that exist beforehand; with online use step"
    if recipe.data.truncation == "completion_right":
        yield "data.truncation", "completions are yet to be written; with online use drop or prompt_left"
    if recipe.online.max_new_tokens >= recipe.data.max_length:
        limit = f"data.max_length ({recipe.data.max_length}), to leave room for a prompt"
        yield "online.max_new_tokens", f"must be below {limit}, not {recipe.online.max_new_tokens}"
    needs_copies = why_not_sharded(recipe)
    if recipe.distributed.strategy == "fsdp2" and needs_copies is not None:
        remedy = "use http with a vLLM server" if recipe.online.generator.type == "vllm" else "set ddp"
        yield "distributed.strategy", f"{needs_copies}, so fsdp2 is not for this run; {remedy}"
    if recipe.online.generator.type == "vllm" and recipe.distributed.num_processes not in ("auto", 1):
        yield (
            "distributed.num_processes",
            "online.generator.type vllm answers in one process; set 1, or use http with a vLLM server",
        )
    if recipe.online.generator.type == "vllm" and recipe.online.temperature > VLLM_HIGHEST_TEMPERATURE:
        limit = f"at most {VLLM_HIGHEST_TEMPERATURE:g}"
        yield (
            "online.temperature",
            f"online.generator.type vllm takes {limit}, not {recipe.online.temperature:g}",
        )
    yield from _broken_generator_rules(recipe.online.generator)
    yield from _broken_staleness_rule(recipe.online, recipe.train.max_steps)
    for number, judge in enumerate(recipe.online.judges):
        yield from _broken_judge_rules(judge, f"online.judges.{number}")
    yield from _unused_options(recipe.online)


def why_not_sharded(recipe: Recipe) -> str | None:
    """What of an online run needs a whole model on each rank; None: nothing does."""
    online, held_out = recipe.online, recipe.data.eval
    if online is None:
        return None
    every_token = "and gathering shards for every token would take far too long"
    if online.generator.type == "transformers":
        return f"the policy answers the prompts itself, {every_token}"
    if online.generator.type == "vllm":
        return "online.generator.type vllm takes a whole model's weights in one process"
    if not isinstance(held_out, tuple) or held_out:
        return f"the policy answers the prompts of data.eval itself, {every_token}"
    if online.offload_reference:
        return "online.offload_reference moves a whole model"
    return None


def _broken_generator_rules(generator: GeneratorRecipe) -> Iterator[Problem]:
    if generator.type == "http":
        if generator.endpoint is None:
            yield "online.generator.endpoint", "type http needs it, as in {url: ..., model: ...}"
        else:
            yield from _broken_url(generator.endpoint.url, "online.generator.endpoint.url")
    elif generator.endpoint is not None:
        yield "online.generator.endpoint", f"not used by type {generator.type}, only by http"


def _broken_staleness_rule(online: OnlineRecipe, max_steps: int | None) -> Iterator[Problem]:
    """A server answers with the weights of the start: a pair is as many steps old as have been taken."""
    bound = online.max_staleness_steps
    if online.generator.type != "http" or bound is None or max_steps is None or max_steps <= bound + 1:
        return
    yield (
        "online.max_staleness_steps",
        f"a server's weights are not updated, so from step {bound + 2} of {max_steps} on every pair would be "
        "older; leave it out, or set online.generator.type: transformers or vllm",
    )


def _broken_judge_rules(judge: JudgeRecipe, key: str) -> Iterator[Problem]:
    needed = {"function": "function", "reward_model": "path", "llm": "endpoint"}
    for judge_type, name in needed.items():
        value = {"function": judge.function, "path": judge.path, "endpoint": judge.endpoint}[name]
        if judge.type == judge_type and value is None:
            yield f"{key}.{name}", f"type {judge_type} needs it"
        elif judge.type != judge_type and value is not None:
            yield f"{key}.{name}", f"not used by type {judge.type}, only by {judge_type}"
    if judge.function is not None and not _FUNCTION.fullmatch(judge.function):
        yield f"{key}.function", f"must be module:function, not {judge.function!r}"
    if judge.endpoint is not None:
        yield from _broken_url(judge.endpoint.url, f"{key}.endpoint.url")
    if judge.instructions is not None and judge.type != "llm":
        yield f"{key}.instructions", f"not used by type {judge.type}, only by llm"


def _broken_url(url: str, key: str) -> Iterator[Problem]:
    if not _URL.fullmatch(url):
        yield key, f"must begin with http:// or https://, not {url!r}"


def _unused_options(online: OnlineRecipe) -> Iterator[Problem]:
    generator, defaults = online.generator, GeneratorRecipe()
    if generator.type == "http" and generator.token_budget != defaults.token_budget:
        yield "online.generator.token_budget", "not used by type http, only by transformers"
    if generator.type != "vllm" and generator.gpu_memory_utilization != defaults.gpu_memory_utilization:
        yield "online.generator.gpu_memory_utilization", f"not used by type {generator.type}, only by vllm"
