"""The `online` section of a recipe: who answers prompts, who scores the answers, which answers pair up."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, Field, Strict

from dpo_pack.recipe import types

VLLM_HIGHEST_TEMPERATURE = 2.0
_OwnFunction = Annotated[str, Field(pattern=f"^{types.MODULE_FUNCTION.pattern}$"), "module:function"]


# The path of a field that holds a key, in lower case, with "_" between words; not max_tokens, eos_token,
# prompt_cache_key.
_SECRET_NAME = re.compile(
    r"pass_?(word|wd|phrase)|secret|authorization|credential|(api|access|auth|private)_?(key|token)"
    r"|(^|[_/])((?<!cache_)key|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!stop_)token|auth|bearer)(/|$)"
)
_SECRET_TEXT = re.compile(r"^\s*(Bearer|Basic) \S|://[^\s/?#]*@", re.IGNORECASE)


def values_in(tree: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values of nested mappings and lists that are neither, with their paths."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from values_in(value, *path, str(name))


def field_with_secret(fields: dict[str, Any]) -> str | None:
    """Returns the path of a field that seems to hold a key or a password, by its name or its text."""
    for path, value in values_in(fields):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^\w/]+", "_", "/".join(path)).lower()
        # Below "properties" are the names that a JSON schema describes.
        is_named = _SECRET_NAME.search(re.sub("(?<=properties/)[^/]+/", "", words))
        if (is_named and not isinstance(value, bool | None)) or _SECRET_TEXT.search(str(value)):
            return ".".join(path)
    return None


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    if (path := field_with_secret(fields)) is not None:
        raise ValueError(f"field {path} seems to hold a key; name its environment variable in api_key_env")
    return fields


class EndpointRecipe(types.Section):
    """An HTTP server with OpenAI's interface: vLLM, SGLang, llama.cpp, a hosted service."""

    url: Annotated[
        Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")],
        "a URL that begins with http:// or https://, without user, ? and # (api_key_env names a key)",
    ] = Field(examples=["http://localhost:8000/v1"])
    """Base URL, up to /v1."""
    model: types.Name = Field(examples=["Qwen/Qwen3-8B"])
    """The server's name of the model."""
    # Not a key itself: those have small letters and digits.
    api_key_env: Annotated[
        Annotated[str, Field(pattern="^([A-Z_][A-Z0-9_]*|[A-Za-z_]+)$")] | None,
        "the name of an environment variable, in capital letters, or null",
    ] = None
    """Environment variable that holds the key; null: no key is sent."""
    timeout_seconds: types.PositiveNumber = 120.0
    """A request that takes longer has failed."""
    retries: types.CountOrZero = 4
    """How often a failed request is sent again, each time after a longer pause."""
    concurrency: types.Count = 16
    """How many requests each process sends at the same time."""
    extra_body: Annotated[
        dict[str, Any], AfterValidator(_without_secrets), "a mapping of fields to their values"
    ] = {}
    """More fields of each request, as in {chat_template_kwargs: {enable_thinking: false}}; no keys."""


class GeneratorRecipe(types.Section):
    """Who answers prompts."""

    type: Literal["transformers", "http", "vllm"] = "transformers"
    """transformers: the policy itself; http: a server, never updated; vllm: vLLM, updated each time."""
    token_budget: types.TokenCount = 16384
    """Most tokens of a batch of prompts and their completions (transformers; vllm only in evaluations)."""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] = 0.3
    """vllm: part of the device's memory (on a CPU, the machine's) for its weights and cache."""
    endpoint: EndpointRecipe | None = None
    """http: the server."""

    def broken_rules(self) -> Iterator[types.Problem]:
        if self.type == "http" and self.endpoint is None:
            yield "endpoint", "type http needs it, as in {url: ..., model: ...}"
        users = {"endpoint": "http", "token_budget": "transformers, vllm", "gpu_memory_utilization": "vllm"}
        for key, those in users.items():
            if self.type not in those and self.is_changed(key):
                yield key, f"not used by type {self.type}, only by {those}"


class JudgeRecipe(types.Section):
    """One judge, which scores completions; the scores of several judges are added, each times its weight."""

    type: Literal["function", "reward_model", "llm"] = Field(examples=["function"])
    """function: yours; reward_model: a classifier with one output; llm: compares pairs in both orders."""
    weight: types.PositiveNumber = 1.0
    """Factor of this judge's scores."""
    function: _OwnFunction | None = None
    """function: module:function, see docs/online.md."""
    path: types.PathText | None = None
    """reward_model: hub id or local directory."""
    endpoint: EndpointRecipe | None = None
    """llm: the server."""
    instructions: types.Name | None = None
    """llm: what makes an answer better; null: helpful, honest and to the point."""
    max_new_tokens: types.TokenCount | None = None
    """llm: most tokens of a verdict, with the model's reasoning; null: the server's own limit."""
    temperature: types.NonNegativeNumber | None = 0.0
    """llm: temperature of a verdict; null: the server's own."""
    verdict: Annotated[re.Pattern[str] | None, "a regular expression or null"] = None
    """llm: a regular expression whose one group finds A, B (or 1, 2) or tie; null: see docs/online.md."""
    retries: types.CountOrZero = 2
    """function: how often a call that raises is repeated; a prompt for which it still raises is left out."""

    def broken_rules(self) -> Iterator[types.Problem]:
        llm = dict.fromkeys(("endpoint", "instructions", "max_new_tokens", "temperature", "verdict"), "llm")
        users = {"function": "function", "path": "reward_model", "retries": "function", **llm}
        for key, user in users.items():
            if self.type != user and self.is_changed(key):
                yield key, f"not used by type {self.type}, only by {user}"
            if self.type == user and key in ("function", "path", "endpoint") and not self.is_changed(key):
                yield key, f"type {user} needs it"
        if self.verdict is not None and self.verdict.groups != 1:
            yield "verdict", f"must have one group, not {self.verdict.groups}, as in 'Winner: (A|B|tie)'"


class PairingRecipe(types.Section):
    """Which of a prompt's completions become pairs. Equal completions never become a pair."""

    type: Literal["best_vs_worst", "all_pairs", "random"] = "best_vs_worst"
    """Which pairs of completions are considered."""
    min_margin: types.NonNegativeNumber = 0.0
    """The scores of a pair must differ by more than this; else the pair is a tie and is dropped."""
    missing_eos_penalty: types.NonNegativeNumber = 0.0
    """Is subtracted from the score of a completion that max_new_tokens cut off."""


class SamplingSection(types.Section):
    """From which tokens a model draws the next one."""

    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Sample only from the likeliest tokens that together have this probability."""
    top_k: types.Count | None = None
    """Sample only from this many likeliest tokens; null: all."""
    min_p: types.PartBelowOne = 0.0
    """Leave out tokens below this part of the likeliest token's probability."""
    stop: Annotated[tuple[types.Name, ...], Strict(False), "a list of texts"] = ()
    """Texts that end an answer, besides EOS."""


class OnlineRecipe(SamplingSection):
    """Pairs from the policy's own completions of the prompts in data.train."""

    judges: Annotated[tuple[JudgeRecipe, ...], Strict(False), MinLen(1), "a list as [{type: llm, ...}]"]
    """Who scores completions."""
    generator: GeneratorRecipe = Field(default_factory=GeneratorRecipe)
    """Who answers prompts."""
    pairing: PairingRecipe = Field(default_factory=PairingRecipe)
    """Which completions become pairs."""
    completions_per_prompt: Annotated[int, Ge(2)] = 2
    """Completions of each prompt."""
    max_new_tokens: types.TokenCount = 256
    """Most tokens of a completion."""
    temperature: types.PositiveNumber = 1.0
    """Temperature of sampling."""
    rollouts_per_update: types.Count = 64
    """How many prompts are answered before the policy trains on their pairs."""
    max_staleness_steps: types.CountOrZero | None = None
    """Pairs from a policy that is more steps old are dropped and counted; null: all pairs are used."""
    offload_reference: bool = False
    """Keep the reference model in host memory between its uses."""

    def broken_rules(self) -> Iterator[types.Problem]:
        if self.generator.type == "vllm" and self.temperature > VLLM_HIGHEST_TEMPERATURE:
            yield "temperature", f"online.generator.type vllm takes at most {VLLM_HIGHEST_TEMPERATURE:g}"
