"""Completions from a server that has OpenAI's HTTP interface /completions: vLLM, SGLang, llama.cpp, others.

Prompts are sent as token ids, so the server continues exactly the tokens that training uses. Its text is
tokenised, with the end token if the model ended it. Training does not update the server's weights, so a
completion that is used at step n is n steps old.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.online.endpoint import Endpoint
from dpo_pack.online.interface import Completion, Draw, Failure, SamplingSettings

# With these values the server draws from the model's own distribution. If a request lacks them, vLLM uses
# the values of the model's generation config and llama.cpp its own defaults; these may filter tokens.
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGenerator:
    """Sends one request for each prompt; the request asks for all completions of the prompt."""

    endpoint: Endpoint
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int
    console: Console

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        sampling = self.sampling
        filters: dict[str, Any] = {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
        filters = {name: value for name, value in filters.items() if value is not None}
        common = {
            "n": sampling.completions_per_prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **_NEUTRAL,
            **filters,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        # A server that uses the seed gives a resumed run the same completions.
        seeds = [np.random.SeedSequence([self.seed, draw.number]).generate_state(1)[0] for draw in draws]
        bodies = [
            {**common, "prompt": draw.prompt.ids.tolist(), "seed": int(seed) >> 1}
            for draw, seed in zip(draws, seeds, strict=True)
        ]
        before, optional = set(self.endpoint.refused), _NEUTRAL.keys() - filters.keys()
        answers = self.endpoint.ask_all("/completions", bodies, self._read, optional=optional)
        if refused := sorted(self.endpoint.refused - before):
            self.console.print(
                f"  Warning: {self.endpoint.recipe_key}: the server refuses the fields {', '.join(refused)}; "
                "if the server itself filters or penalises tokens, it does not sample as the recipe says"
            )
        return answers

    def weights_step(self, step: int) -> int:
        return 0

    def _read(self, answer: Any) -> tuple[Completion, ...]:
        choices: Any = answer.get("choices") if isinstance(answer, dict) else None
        number = len(choices) if isinstance(choices, list) else "no"
        if number != self.sampling.completions_per_prompt:
            raise ValueError(f"the answer has {number} choices, not {self.sampling.completions_per_prompt}")
        return tuple(map(self._completion, choices))

    def _completion(self, choice: Any) -> Completion:
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise ValueError("one of the choices has no text")
        text, is_finished = str(choice["text"]), choice.get("finish_reason") == "stop"
        text.encode()  # raises ValueError for half of a surrogate pair, which no tokenizer takes
        # The stop string, or the id of the stop token, that ended the completion. vLLM calls this field
        # stop_reason, SGLang matched_stop. The completion's text does not contain the stop string or token.
        stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
        end = stopped_by if isinstance(stopped_by, str) else ""
        ids = list(self.tokenizer(text + end, add_special_tokens=False)["input_ids"])
        if is_finished and not end:
            if type(stopped_by) is not int:  # no token is named: True is no token, either
                ids += [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            elif 0 <= stopped_by < len(self.tokenizer):
                ids.append(stopped_by)
            else:
                raise ValueError(f"it stopped at token {stopped_by}, which the tokenizer does not have")
        if not 1 <= len(ids) <= self.sampling.max_new_tokens:
            raise ValueError(f"a completion has {len(ids)} tokens, not 1 to {self.sampling.max_new_tokens}")
        return Completion(ids=np.array(ids, dtype=np.int32), text=text, is_finished=is_finished)
