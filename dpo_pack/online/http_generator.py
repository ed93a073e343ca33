"""Completions from a server that has OpenAI's HTTP interface /completions: vLLM, SGLang, llama.cpp, others.

Prompts are sent as token ids. Training takes the server's own tokens (`return_token_ids` of vLLM); if it
gives none, its text is tokenised behind the prompt. Training does not update the server's weights, so a
completion that is used at step n is n steps old.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
    counts: Counter[str] = field(default_factory=Counter)  # of completions that the server gave as text only

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        sampling, n, before = self.sampling, self.sampling.completions_per_prompt, self.counts["differing"]
        filters: dict[str, Any] = {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
        filters = {name: value for name, value in filters.items() if value is not None}
        common = {
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True,
            **_NEUTRAL,
            **filters,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        optional = dict.fromkeys([*(_NEUTRAL.keys() - filters.keys()), "return_token_ids", "seed", "n"])
        bodies = [self._body(common, draw) for draw in draws]
        answers = self.endpoint.ask_all("/completions", bodies, self._read, optional=optional)
        # A server that does not know `n` is asked for each further completion alone.
        numbers = [range(len(got), n) if isinstance(got, list) else () for got in answers]
        places = [(place, number) for place, missing in enumerate(numbers) for number in missing]
        if places:
            if "n" not in self.endpoint.refused:
                self.endpoint.refused["n"] = None
                self._warn(f"the server ignores the field n, so it is asked {n} times for each prompt")
            bodies = [self._body({**common, "n": 1}, draws[p], number=k) for p, k in places]
            more = self.endpoint.ask_all("/completions", bodies, self._read, optional=optional)
            for (place, _), got in zip(places, more, strict=True):
                so_far = answers[place]
                if isinstance(so_far, list):
                    answers[place] = got if isinstance(got, Failure) else [*so_far, got[0]]
        results = [
            got if isinstance(got, Failure) else self._completions(draw, got)
            for draw, got in zip(draws, answers, strict=True)
        ]
        differing = self.counts["differing"]
        if differing and (before == 0 or len(str(differing)) > len(str(before))):  # the 1st, 10th, 100th, ...
            self._warn(
                f"{differing:,} of {self.counts['all']:,} completions so far have other tokens alone than "
                "behind their prompts, so they may not be the tokens that the server's model wrote; use a "
                "server that knows return_token_ids, as vLLM does"
            )
        return results

    def weights_step(self, step: int) -> int:
        return 0

    def _warn(self, sentence: str) -> None:
        self.endpoint.console.print(f"  Warning: {self.endpoint.recipe_key}: {sentence}", markup=False)

    def _body(self, common: Mapping[str, Any], draw: Draw, *, number: int = 0) -> dict[str, Any]:
        # A server that uses the seed gives a resumed run the same completions.
        entropy = [self.seed, draw.number, number] if number else [self.seed, draw.number]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1
        return {**common, "prompt": draw.prompt.ids.tolist(), "seed": seed}

    def _read(self, answer: Any) -> list[Any]:
        """Returns the choices of an answer, at least one. Raises ValueError if they cannot be used."""
        choices: Any = answer.get("choices") if isinstance(answer, dict) else None
        number, most = len(choices) if isinstance(choices, list) else 0, self.sampling.completions_per_prompt
        if not 1 <= number <= most:
            raise ValueError(f"the answer has {number or 'no'} choices, not {most}")
        for choice in choices:
            if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
                raise ValueError("one of the choices has no text")
            # Raises ValueError for half of a surrogate pair, which no tokenizer takes.
            choice["text"].encode()
            ids, stopped_by = choice.get("token_ids"), _stopped_by(choice)
            named = [stopped_by] if type(stopped_by) is int else []  # True is no token
            for token in named + (ids if isinstance(ids, list) else [str(ids)] if ids else []):
                if type(token) is not int or not 0 <= token < len(self.tokenizer):
                    raise ValueError(f"it has token {token}, which the tokenizer does not have")
        return list(choices)

    def _completions(self, draw: Draw, choices: Sequence[Any]) -> tuple[Completion, ...] | Failure:
        completions = []
        for choice in choices:
            text, is_finished = str(choice["text"]), choice.get("finish_reason") == "stop"
            stopped_by, given = _stopped_by(choice), list(choice.get("token_ids") or ())
            # The completion's text does not contain the stop string or token.
            end = stopped_by if isinstance(stopped_by, str) else ""
            ids = given or self._tokenised(draw.prompt.text, text + end)
            if is_finished and not end:
                eos, ends = self.tokenizer.eos_token_id, self.tokenizer.all_special_ids
                if type(stopped_by) is int:
                    eos, ends = stopped_by, [stopped_by]
                if eos is not None and not (given and ids[-1] in ends):
                    ids.append(eos)
            if not 1 <= len(ids) <= (most := self.sampling.max_new_tokens):
                reason = f"a completion has {len(ids)} tokens, not 1 to {most}"
                return Failure(reason=f"{self.endpoint.settings.url}: {reason}")
            completions.append(
                Completion(ids=np.array(ids, dtype=np.int32), text=text, is_finished=is_finished)
            )
        return tuple(completions)

    def _tokenised(self, prompt: str, text: str) -> list[int]:
        """Returns the tokens of `text` behind `prompt`: many tokenizers begin each text with a space."""

        def tokens(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        self.counts["all"] += 1
        before, whole = tokens(prompt), tokens(prompt + text)
        if whole[: len(before)] != before:  # a token reaches over the border
            self.counts["differing"] += 1
            before, whole = tokens("\n"), tokens("\n" + text)
        return whole[len(before) :] if whole[: len(before)] == before else tokens(text)


def _stopped_by(choice: Mapping[str, Any]) -> Any:
    """The stop string, or the id of the stop token, that ended the completion. vLLM calls this field
    stop_reason, SGLang matched_stop."""
    return choice.get("stop_reason", choice.get("matched_stop"))
