"""Completions from a server: vLLM, SGLang, llama.cpp, anything with OpenAI's /completions.

Prompts are sent as token ids, so that the server continues exactly what training will see. Its text is
tokenised here again, and EOS added where it says that it stopped. The server's weights are not updated: its
completions are those of the policy as it started, and their staleness is counted from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dpo_pack.online.endpoint import Endpoint, UnusableAnswer
from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.sampling import SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGenerator:
    """Asks one request a prompt for its n completions."""

    endpoint: Endpoint
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        return self.endpoint.ask_all("/completions", [self._body(draw) for draw in draws], self._read)

    def weights_step(self, step: int) -> int:
        return 0

    def _body(self, draw: Draw) -> dict[str, Any]:
        sampling = self.sampling
        body: dict[str, Any] = {
            "prompt": draw.prompt.ids.tolist(),
            "n": sampling.completions_per_prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # A server that heeds it answers a resumed run as it would have the first one.
            "seed": int(np.random.SeedSequence([self.seed, draw.number]).generate_state(1)[0]) >> 1,
        }
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if sampling.min_p > 0.0:
            body["min_p"] = sampling.min_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        return body

    def _read(self, answer: Any) -> tuple[Completion, ...]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != self.sampling.completions_per_prompt:
            number = len(choices) if isinstance(choices, list) else "no"
            raise UnusableAnswer(f"{number} choices, not {self.sampling.completions_per_prompt}")
        return tuple(self._completion(choice) for choice in choices)

    def _completion(self, choice: Any) -> Completion:
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise UnusableAnswer("a choice without text")
        text, is_finished = str(choice["text"]), choice.get("finish_reason") == "stop"
        stopped_by = choice.get("stop_reason")  # vLLM's and SGLang's: the stop string, which text lacks
        end = stopped_by if isinstance(stopped_by, str) else ""
        ids = list(self.tokenizer(text + end, add_special_tokens=False)["input_ids"])
        if is_finished and not end and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        if not 1 <= len(ids) <= self.sampling.max_new_tokens:
            raise UnusableAnswer(
                f"a completion of {len(ids)} tokens, not 1 to {self.sampling.max_new_tokens}"
            )
        return Completion(ids=np.array(ids, dtype=np.int32), text=text, is_finished=is_finished)
