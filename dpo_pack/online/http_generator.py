"""Completions from a server: vLLM, SGLang, llama.cpp, anything with OpenAI's /completions.

Prompts are sent as token ids, so that the server continues exactly what training will see. Its text is
tokenised here again, and the token that ended it added where it says that it stopped. The server's weights
are not updated: its completions are those of the policy as it started, and their staleness is counted from
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.online.endpoint import Endpoint, UnusableAnswer
from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.sampling import SamplingSettings

# What leaves the model's distribution as it is. A server that is not told so may draw otherwise: vLLM as the
# published generation config says, llama.cpp with filters of its own.
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGenerator:
    """Asks one request a prompt for its n completions."""

    endpoint: Endpoint
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int
    console: Console

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        bodies = [self._body(draw) for draw in draws]
        spare = _NEUTRAL.keys() - self._filters().keys()
        before = set(self.endpoint.refused)
        answers = self.endpoint.ask_all("/completions", bodies, self._read, spare=spare)
        if refused := sorted(self.endpoint.refused - before):
            self.console.print(
                f"  Warning: {self.endpoint.recipe_key}: the server does not take {', '.join(refused)}; "
                "where it filters or penalises tokens by itself, completions are not drawn as the recipe says"
            )
        return answers

    def weights_step(self, step: int) -> int:
        return 0

    def _filters(self) -> dict[str, float]:
        """What the recipe sets of the fields in _NEUTRAL."""
        filters: dict[str, float] = {}
        if self.sampling.top_k is not None:
            filters["top_k"] = self.sampling.top_k
        if self.sampling.min_p > 0.0:
            filters["min_p"] = self.sampling.min_p
        return filters

    def _body(self, draw: Draw) -> dict[str, Any]:
        sampling = self.sampling
        body: dict[str, Any] = {
            "prompt": draw.prompt.ids.tolist(),
            "n": sampling.completions_per_prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_NEUTRAL,
            **self._filters(),
            # A server that heeds it answers a resumed run as it would have the first one.
            "seed": int(np.random.SeedSequence([self.seed, draw.number]).generate_state(1)[0]) >> 1,
        }
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
        # vLLM's name and SGLang's: the stop string, or the number of the stop token; text lacks both.
        stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
        end = stopped_by if isinstance(stopped_by, str) else ""
        ids = list(self.tokenizer(text + end, add_special_tokens=False)["input_ids"])
        if is_finished and not end:
            ids += self._end_token(stopped_by)
        if not 1 <= len(ids) <= self.sampling.max_new_tokens:
            raise UnusableAnswer(
                f"a completion of {len(ids)} tokens, not 1 to {self.sampling.max_new_tokens}"
            )
        return Completion(ids=np.array(ids, dtype=np.int32), text=text, is_finished=is_finished)

    def _end_token(self, stopped_by: Any) -> list[int]:
        """The one that the server names, else EOS."""
        if not isinstance(stopped_by, int) or isinstance(stopped_by, bool):
            return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        if not 0 <= stopped_by < len(self.tokenizer):
            raise UnusableAnswer(f"it stopped at token {stopped_by}, which the tokenizer does not have")
        return [stopped_by]
