"""A stand-in for the package vllm: what the generator uses of it, as vLLM 0.32 does it, on transformers.

Like the real one it reseeds the process and takes torch's thread setting away when it starts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    detokenize: bool = True
    logprobs: int | None = None


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]]


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class _Holder(torch.nn.Module):
    """A module of a class that is not transformers'."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class LLM:
    """Draws from the softmax of a model whose weights it is given."""

    started: list[LLM] = []
    refusal: Exception | None = None  # what starting raises

    def __init__(
        self, model: str, *, trust_remote_code: bool, disable_log_stats: bool, dtype: str, **options: Any
    ) -> None:
        if LLM.refusal is not None:
            raise LLM.refusal
        self.options = {"dtype": dtype, **options}
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_num_threads = lambda number: None  # type: ignore[assignment]
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.num_updates = 0
        self.forgotten: set[str] = set()  # names of tensors that are not taken
        self.has_old_prompts = False
        LLM.started.append(self)

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights" and kwargs.keys() == {"weights_iterator"}
        tensors: Iterator[tuple[str, Tensor]] = kwargs["weights_iterator"]
        own = self.model.state_dict()
        for name, tensor in tensors:
            if name not in self.forgotten:
                own[name].copy_(tensor)
        self.num_updates += 1
        self.has_old_prompts = True

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(_Holder(self.model))]

    def reset_prefix_cache(self) -> bool:
        self.has_old_prompts = False
        return True

    @torch.no_grad()
    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert not self.has_old_prompts and not use_tqdm
        for prompt, each in zip(prompts, params, strict=True):
            ids = prompt["prompt_token_ids"]
            assert len(ids) + each.max_tokens <= self.options["max_model_len"]
            assert each.seed is not None and each.n == 1
            self.requests.append((ids, each))
        return [
            RequestOutput(prompt_token_ids=ids, outputs=[self.answer(ids, each)])
            for ids, each in self.requests[-len(prompts) :]
        ]

    def answer(self, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        assert params.detokenize or not params.stop
        numbers = torch.Generator().manual_seed(params.seed or 0)
        written: list[int] = []
        logprobs: list[dict[int, Logprob]] = []
        reason: int | str | None = None
        while reason is None and len(written) < params.max_tokens:
            logits = self.model(torch.tensor([prompt + written])).logits[0, -1].float()
            token = int(torch.multinomial((logits / params.temperature).softmax(-1), 1, generator=numbers))
            written.append(token)
            logprobs.append({token: Logprob(float(logits.log_softmax(-1)[token]))})
            if token in params.stop_token_ids:
                reason = token
            elif params.detokenize:
                text = self.tokenizer.decode(written, skip_special_tokens=True)
                reason = next((string for string in params.stop if string in text), None)
        return CompletionOutput(written, "length" if reason is None else "stop", reason, logprobs)


def install(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """`import vllm` gives this one until the test is over."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    vars(module).update({"LLM": LLM, "SamplingParams": SamplingParams, "__version__": "0.32.0"})
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "started", [])
    monkeypatch.setattr(LLM, "refusal", None)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    return LLM
