"""The `online` section of a recipe: who answers prompts, who judges, which answers become pairs."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Field, Strict

from dpo_pack.recipe_types import (
    Allowed,
    Count,
    Name,
    NonNegativeNumber,
    PartBelowOne,
    PathText,
    PositiveNumber,
    Section,
    TokenCount,
)


class EndpointRecipe(Section):
    """An HTTP server with OpenAI's interface: vLLM, SGLang, llama.cpp, a hosted service."""

    url: Name = Field(description="Base URL, up to /v1.", examples=["http://localhost:8000/v1"])
    model: Name = Field(description="What the server calls the model.", examples=["Qwen/Qwen3-8B"])
    api_key_env: Name | None = Field(
        default=None, description="Environment variable that holds the key; null: none is sent."
    )
    timeout_seconds: PositiveNumber = Field(
        default=120.0, description="A request that takes longer has failed."
    )
    retries: Annotated[int, Ge(0)] = Field(
        default=4, description="Requests sent again after a failure, each after a longer pause."
    )
    concurrency: Count = Field(default=16, description="Requests under way at once, of each process.")


class GeneratorRecipe(Section):
    """Who answers prompts."""

    type: Literal["transformers", "http", "vllm"] = Field(
        default="transformers",
        description="transformers: the policy itself, on the training device; http: a server, whose weights "
        "are not updated; vllm: in this process, with the policy's weights of each phase.",
    )
    token_budget: TokenCount = Field(
        default=16384,
        description="transformers, and the evaluation of vllm: a batch holds so many tokens, prompts and "
        "completions to come.",
    )
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] = Field(
        default=0.3,
        description="vllm: part of the device's memory (on a CPU, the machine's) for its weights and cache.",
    )
    endpoint: EndpointRecipe | None = Field(default=None, description="http: the server.")


class JudgeRecipe(Section):
    """One judge; the scores of several are added, each times its weight."""

    type: Literal["function", "reward_model", "llm"] = Field(
        description="function: Python of yours; reward_model: a sequence classifier with one output; llm: a "
        "server's model compares each two completions, in both orders.",
        examples=["function"],
    )
    weight: PositiveNumber = Field(default=1.0, description="Factor of this judge's scores.")
    function: Name | None = Field(default=None, description="function: module:function, see docs/online.md.")
    path: PathText | None = Field(default=None, description="reward_model: hub id or local directory.")
    endpoint: EndpointRecipe | None = Field(default=None, description="llm: the server.")
    instructions: Name | None = Field(
        default=None, description="llm: what makes an answer better; null: helpful, honest and to the point."
    )
    retries: Annotated[int, Ge(0)] = Field(
        default=2, description="function: calls repeated when it raises; then its prompt is set aside."
    )


class PairingRecipe(Section):
    """Which of a prompt's completions become pairs. Equal ones never do."""

    type: Literal["best_vs_worst", "all_pairs", "random"] = Field(
        default="best_vs_worst", description="Which pairs of completions are considered."
    )
    min_margin: NonNegativeNumber = Field(
        default=0.0, description="Scores of a pair must differ by more; else it is a tie, and dropped."
    )
    missing_eos_penalty: NonNegativeNumber = Field(
        default=0.0, description="Taken off the score of a completion that max_new_tokens cut off."
    )


class OnlineRecipe(Section):
    """Pairs from the policy's own completions of the prompts in data.train."""

    judges: Annotated[
        tuple[JudgeRecipe, ...],
        Strict(False),
        MinLen(1),
        Allowed("a list as [{type: function, function: my_judges:score}]"),
    ] = Field(description="Who scores completions.")
    generator: GeneratorRecipe = Field(default_factory=GeneratorRecipe, description="Who answers prompts.")
    pairing: PairingRecipe = Field(
        default_factory=PairingRecipe, description="Which completions become pairs."
    )
    completions_per_prompt: Annotated[int, Ge(2)] = Field(
        default=2, description="Completions of each prompt."
    )
    max_new_tokens: TokenCount = Field(default=256, description="Most tokens of a completion.")
    temperature: PositiveNumber = Field(default=1.0, description="Of sampling.")
    top_p: Annotated[float, Gt(0), Le(1)] = Field(
        default=1.0, description="Draw from the likeliest tokens that together have this probability."
    )
    top_k: Count | None = Field(default=None, description="Draw from so many likeliest tokens; null: all.")
    min_p: PartBelowOne = Field(
        default=0.0, description="Leave out tokens below this part of the likeliest one's probability."
    )
    stop: Annotated[tuple[Name, ...], Strict(False), Allowed("a list of texts")] = Field(
        default=(), description="Texts that end a completion, besides EOS."
    )
    rollouts_per_update: Count = Field(
        default=64,
        description="Prompts answered by the policy as it is, before it is updated on their pairs.",
    )
    max_staleness_steps: Annotated[int, Ge(0)] | None = Field(
        default=None,
        description="Pairs written by the policy of more steps ago are dropped and counted; null: none is.",
    )
    offload_reference: bool = Field(
        default=False, description="Keep the reference model in host memory between its uses."
    )
