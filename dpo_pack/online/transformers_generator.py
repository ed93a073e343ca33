"""The policy answers prompts itself, on the training device, by transformers' `generate`.

The module that trains is the one that generates: its attention is switched to a stock kernel and back, no
weight is loaded or copied. What training set up (no cache, recomputed activations) does not hold meanwhile.

Legend: B sequences of a batch, n completions of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dpo_pack.attention import ATTENTION_NAME
from dpo_pack.kernels import stock_layers
from dpo_pack.model_config import own_attention
from dpo_pack.models import CompletionLogps
from dpo_pack.online.completions import completion_of, end_tokens
from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.sampling import SamplingSettings, completion_uniforms, draw_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersGenerator:
    """Draws n completions a prompt from the policy as it is when asked.

    `token_budget` bounds a batch: sequences x (longest prompt + max_new_tokens), what its cache holds.
    """

    policy: CompletionLogps
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int
    token_budget: int
    device: torch.device

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        n = self.sampling.completions_per_prompt
        sequences = [(draw, number) for draw in draws for number in range(n)]
        completions: dict[int, Completion] = {}
        ends = end_tokens(self.policy.model, self.tokenizer)  # not meanwhile: its generation config is away
        with generating(self.policy.model):
            for batch in self._batches(sequences):
                answered = self._answer([sequences[place] for place in batch], ends)
                completions.update(zip(batch, answered, strict=True))
        return [tuple(completions[place * n + number] for number in range(n)) for place in range(len(draws))]

    def weights_step(self, step: int) -> int:
        return step

    def _batches(self, sequences: Sequence[tuple[Draw, int]]) -> Iterator[list[int]]:
        """Positions in `sequences`, those of about one length together, the longest first."""
        lengths = [len(draw.prompt.ids) for draw, _ in sequences]
        order = sorted(range(len(sequences)), key=lambda place: -lengths[place])
        batch: list[int] = []
        for place in order:
            longest = lengths[batch[0]] if batch else lengths[place]
            if batch and (len(batch) + 1) * (longest + self.sampling.max_new_tokens) > self.token_budget:
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    @torch.no_grad()
    def _answer(self, sequences: Sequence[tuple[Draw, int]], ends: set[int]) -> list[Completion]:
        pad = int(self.tokenizer.pad_token_id or 0)
        ids, mask = _left_padded([draw.prompt.ids for draw, _ in sequences], pad)
        uniforms = np.stack(
            [
                completion_uniforms(self.seed, draw.number, number, self.sampling.max_new_tokens)
                for draw, number in sequences
            ]
        )
        stops = _StopStrings(self.tokenizer, self.sampling.stop, ids.shape[1], len(sequences))
        with self.policy.autocasting(self.device):
            output: Any = self.policy.model.generate(  # type: ignore[operator]
                input_ids=torch.from_numpy(ids).to(self.device),
                attention_mask=torch.from_numpy(mask).to(self.device),
                generation_config=GenerationConfig(
                    max_new_tokens=self.sampling.max_new_tokens,
                    do_sample=False,  # the processor has drawn already: it leaves one token to choose
                    use_cache=True,
                    pad_token_id=pad,
                    eos_token_id=sorted(ends) or None,
                ),
                logits_processor=LogitsProcessorList(
                    [_Drawing(self.sampling, torch.from_numpy(uniforms).to(self.device), ids.shape[1])]
                ),
                stopping_criteria=StoppingCriteriaList([stops] if self.sampling.stop else []),
            )
        lines = output[:, ids.shape[1] :].cpu().numpy().astype(np.int32)
        return [
            completion_of(line, self.tokenizer, ends=ends, stop=self.sampling.stop, stop_end=end)
            for line, end in zip(lines, stops.ends, strict=True)
        ]


def _left_padded(
    prompts: Sequence[npt.NDArray[np.int32]], pad: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[B] prompts -> [B, longest] ids and mask."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.full((len(prompts), longest), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, longest - len(prompt) :] = prompt
        mask[place, longest - len(prompt) :] = 1
    return ids, mask


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model that is set up for training generate, and sets it up for training again."""
    attention = model.config._attn_implementation
    config, model.generation_config = model.generation_config, GenerationConfig()
    in_training = [module for module in model.modules() if module.training]
    for module in in_training:
        module.training = False  # layers that recompute their activations have no cache
    if attention == ATTENTION_NAME:
        _use_stock_attention(model)
    try:
        with stock_layers(model):  # compiled ones would be compiled anew as the cache grows
            yield
    finally:
        if attention == ATTENTION_NAME:
            model.set_attn_implementation(attention)
        for module in in_training:
            module.training = True
        model.generation_config = config


def _use_stock_attention(model: PreTrainedModel) -> None:
    try:
        model.set_attn_implementation(own_attention(model.config) or "sdpa")
    except (ValueError, ImportError):  # transformers' way to say that this family's code has no sdpa
        model.set_attn_implementation("eager")


class _Drawing(LogitsProcessor):
    """Draws each sequence's token and leaves `generate` no other to choose."""

    def __init__(self, sampling: SamplingSettings, uniforms: Tensor, prompt_tokens: int) -> None:
        """uniforms: [B, max_new_tokens] float64."""
        self.sampling = sampling
        self.uniforms = uniforms
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_tokens
        tokens = draw_tokens(scores, self.uniforms[:, step], self.sampling)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _StopStrings(StoppingCriteria):
    """Ends a sequence whose text contains a stop string, and remembers where."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], prompt_tokens: int, num_sequences: int
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.prompt_tokens = prompt_tokens
        # A character may take up to four tokens of a byte-level vocabulary.
        self.tail_tokens = 4 * max(map(len, stop), default=0) + 4
        self.ends: list[int | None] = [None] * num_sequences  # completion tokens up to the stop string's end

    def __call__(self, input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        num_tokens = input_ids.shape[1] - self.prompt_tokens
        tails = input_ids[:, self.prompt_tokens :][:, -self.tail_tokens :].tolist()
        for place, tail in enumerate(tails):
            if self.ends[place] is None:
                text = str(self.tokenizer.decode(tail, skip_special_tokens=True))
                if any(string in text for string in self.stop):
                    self.ends[place] = num_tokens
        ended = [end is not None for end in self.ends]
        return torch.tensor(ended, device=input_ids.device)
