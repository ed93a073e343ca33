"""The `online` section of a recipe: who answers prompts, who scores the answers, which answers pair up."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, Field, Strict

from dpo_pack.recipe.types import (
    MODULE_FUNCTION,
    Allowed,
    Count,
    CountOrZero,
    Name,
    NonNegativeNumber,
    PartBelowOne,
    PathText,
    PositiveNumber,
    Problem,
    Section,
    TokenCount,
    is_changed,
)

VLLM_HIGHEST_TEMPERATURE = 2.0


def _check_url(url: str) -> str:
    if not re.fullmatch(r"https?://\S+", url):
        raise ValueError(f"must begin with http:// or https://, not {url!r}")
    return url


def _check_function(name: str) -> str:
    if not MODULE_FUNCTION.fullmatch(name):
        raise ValueError(f"must be module:function, not {name!r}")
    return name


class EndpointRecipe(Section):
    """An HTTP server with OpenAI's interface: vLLM, SGLang, llama.cpp, a hosted service."""

    url: Annotated[Name, AfterValidator(_check_url)] = Field(examples=["http://localhost:8000/v1"])
    """Base URL, up to /v1."""
    model: Name = Field(examples=["Qwen/Qwen3-8B"])
    """The server's name of the model."""
    api_key_env: Name | None = None
    """Environment variable that holds the key; null: no key is sent."""
    timeout_seconds: PositiveNumber = 120.0
    """A request that takes longer has failed."""
    retries: CountOrZero = 4
    """How often a failed request is sent again, each time after a longer pause."""
    concurrency: Count = 16
    """How many requests each process sends at the same time."""


class GeneratorRecipe(Section):
    """Who answers prompts."""

    type: Literal["transformers", "http", "vllm"] = "transformers"
    """transformers: the policy itself, on the training device; http: a server, whose weights are not updated;
    vllm: vLLM in this process, which gets the policy's weights each time before it answers prompts."""
    token_budget: TokenCount = 16384
    """Most tokens of a batch of prompts together with the completions to come (transformers; vllm only in
    evaluations)."""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] = 0.3
    """vllm: part of the device's memory (on a CPU, the machine's) for its weights and cache."""
    endpoint: EndpointRecipe | None = None
    """http: the server."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.type == "http" and self.endpoint is None:
            yield "endpoint", "type http needs it, as in {url: ..., model: ...}"
        if self.type != "http" and self.endpoint is not None:
            yield "endpoint", f"not used by type {self.type}, only by http"
        if self.type == "http" and is_changed(self, "token_budget"):
            yield "token_budget", "not used by type http, only by transformers"
        if self.type != "vllm" and is_changed(self, "gpu_memory_utilization"):
            yield "gpu_memory_utilization", f"not used by type {self.type}, only by vllm"


class JudgeRecipe(Section):
    """One judge, which scores completions; the scores of several judges are added, each times its weight."""

    type: Literal["function", "reward_model", "llm"] = Field(examples=["function"])
    """function: Python of yours; reward_model: a sequence classifier with one output; llm: a server's model
    compares every two completions of a prompt, in both orders."""
    weight: PositiveNumber = 1.0
    """Factor of this judge's scores."""
    function: Annotated[Name, AfterValidator(_check_function)] | None = None
    """function: module:function, see docs/online.md."""
    path: PathText | None = None
    """reward_model: hub id or local directory."""
    endpoint: EndpointRecipe | None = None
    """llm: the server."""
    instructions: Name | None = None
    """llm: what makes an answer better; null: helpful, honest and to the point."""
    retries: CountOrZero = 2
    """function: how often a call that raises is repeated; a prompt for which it still raises is left out."""

    def broken_rules(self) -> Iterator[Problem]:
        for judge_type, key in (("function", "function"), ("reward_model", "path"), ("llm", "endpoint")):
            if self.type == judge_type and not is_changed(self, key):
                yield key, f"type {judge_type} needs it"
            elif self.type != judge_type and is_changed(self, key):
                yield key, f"not used by type {self.type}, only by {judge_type}"
        if self.type != "llm" and self.instructions is not None:
            yield "instructions", f"not used by type {self.type}, only by llm"


class PairingRecipe(Section):
    """Which of a prompt's completions become pairs. Equal completions never become a pair."""

    type: Literal["best_vs_worst", "all_pairs", "random"] = "best_vs_worst"
    """Which pairs of completions are considered."""
    min_margin: NonNegativeNumber = 0.0
    """The scores of a pair must differ by more than this; else the pair is a tie and is dropped."""
    missing_eos_penalty: NonNegativeNumber = 0.0
    """Is subtracted from the score of a completion that max_new_tokens cut off."""


class OnlineRecipe(Section):
    """Pairs from the policy's own completions of the prompts in data.train."""

    judges: Annotated[
        tuple[JudgeRecipe, ...],
        Strict(False),
        MinLen(1),
        Allowed("a list as [{type: function, function: my_judges:score}]"),
    ]
    """Who scores completions."""
    generator: GeneratorRecipe = Field(default_factory=GeneratorRecipe, description="Who answers prompts.")
    pairing: PairingRecipe = Field(
        default_factory=PairingRecipe, description="Which completions become pairs."
    )
    completions_per_prompt: Annotated[int, Ge(2)] = 2
    """Completions of each prompt."""
    max_new_tokens: TokenCount = 256
    """Most tokens of a completion."""
    temperature: PositiveNumber = 1.0
    """Temperature of sampling."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample only from the likeliest tokens that together have this probability."""
    top_k: Count | None = None
    """Sample only from this many likeliest tokens; null: all."""
    min_p: PartBelowOne = 0.0
    """Leave out tokens below this part of the likeliest token's probability."""
    stop: Annotated[tuple[Name, ...], Strict(False), Allowed("a list of texts")] = ()
    """Texts that end a completion, besides EOS."""
    rollouts_per_update: Count = 64
    """How many prompts are answered before the policy trains on their pairs."""
    max_staleness_steps: CountOrZero | None = None
    """Pairs whose completions come from a policy that is more steps old are dropped and counted; null: all
    pairs are used."""
    offload_reference: bool = False
    """Keep the reference model in host memory between its uses."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.generator.type == "vllm" and self.temperature > VLLM_HIGHEST_TEMPERATURE:
            limit = f"at most {VLLM_HIGHEST_TEMPERATURE:g}"
            yield "temperature", f"online.generator.type vllm takes {limit}, not {self.temperature:g}"
