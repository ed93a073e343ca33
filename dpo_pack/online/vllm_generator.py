"""The policy's completions by vLLM in this process.

vLLM holds a second copy of the weights, beside the policy's, and its own cache. Before each phase it is given
the policy's weights as they are then; the policy is not touched, so training needs nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dpo_pack.models import CompletionLogps
from dpo_pack.online.completions import completion_of, end_tokens
from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.sampling import SamplingSettings, completion_seed
from dpo_pack.online.vllm_engine import VllmEngine
from dpo_pack.online.vllm_weights import checkpoint_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGenerator:
    """Draws n completions a prompt from the policy as it is when asked; each is a request with a seed."""

    engine: VllmEngine
    policy: CompletionLogps
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        if not draws:
            return []
        self.engine.take_weights(
            checkpoint_tensors(self.policy.model, has_adapter=self.policy.adapter is not None)
        )
        n = self.sampling.completions_per_prompt
        sequences = [(draw, number) for draw in draws for number in range(n)]
        ends = end_tokens(self.policy.model, self.tokenizer)
        outputs = self.engine.answer(
            [draw.prompt.ids for draw, _ in sequences],
            [
                sampling_options(self.sampling, completion_seed(self.seed, draw.number, number), ends)
                for draw, number in sequences
            ],
        )
        answered = [self._completion(output, ends) for output in outputs]
        return [_of_one_prompt(answered[place * n : (place + 1) * n]) for place in range(len(draws))]

    def weights_step(self, step: int) -> int:
        return step

    def _completion(self, output: Any, ends: set[int]) -> Completion | Failure:
        if output.finish_reason not in ("stop", "length"):
            return Failure(reason=f"vLLM ended a completion with {output.finish_reason!r}")
        line = np.array(output.token_ids, dtype=np.int32)
        by_string = isinstance(output.stop_reason, str)  # a token is named by its number
        return completion_of(
            line,
            self.tokenizer,
            ends=ends,
            stop=self.sampling.stop,
            stop_end=len(line) if by_string else None,
        )


def sampling_options(sampling: SamplingSettings, seed: int, ends: set[int]) -> dict[str, Any]:
    """What vLLM's SamplingParams are made from.

    The tokens that end a completion are given, so that vLLM's own idea of EOS does not matter.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
    }


def _of_one_prompt(answered: Sequence[Completion | Failure]) -> tuple[Completion, ...] | Failure:
    failed = next((one for one in answered if isinstance(one, Failure)), None)
    return failed or tuple(one for one in answered if isinstance(one, Completion))
