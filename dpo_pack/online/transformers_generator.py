"""The policy answers prompts on the training device, with transformers' `generate`.

The module that trains also generates, so no weight is loaded or copied. Meanwhile it uses transformers' own
attention and a KV cache, and does not recompute activations.

Legend: B sequences of a batch, n completions of a prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dpo_pack.model.attention import ATTENTION_NAME
from dpo_pack.model.config import own_attention
from dpo_pack.model.fast_layers import stock_layers
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.sampling import (
    SamplingSettings,
    completion_of,
    completion_uniforms,
    draw_tokens,
    end_tokens,
)
from dpo_pack.system.console import progress_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersGenerator:
    """Draws n completions for each prompt from the current policy.

    The KV cache of a batch, sequences x (longest prompt + max_new_tokens), has at most `token_budget` tokens,
    unless the batch is one sequence.
    """

    policy: CompletionLogps
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int
    token_budget: int
    device: torch.device
    console: Console  # shows how many completions are written

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        n = self.sampling.completions_per_prompt
        sequences = [(draw, number) for draw in draws for number in range(n)]
        completions: dict[int, Completion] = {}
        ends = end_tokens(self.policy.model, self.tokenizer)  # `generating` hides the generation config
        written = progress_bar(self.console, "Generating", len(sequences), "completions")
        with generating(self.policy.model), written as bar:
            for batch in self._batches(sequences):
                batch_completions = self._complete([sequences[place] for place in batch], ends)
                completions.update(zip(batch, batch_completions, strict=True))
                bar(len(batch))
        return [tuple(completions[place * n + number] for number in range(n)) for place in range(len(draws))]

    def weights_step(self, step: int) -> int:
        return step

    def _batches(self, sequences: Sequence[tuple[Draw, int]]) -> Iterator[list[int]]:
        """Yields batches of positions in `sequences`: similar prompt lengths together, the longest first."""
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
    def _complete(self, sequences: Sequence[tuple[Draw, int]], ends: set[int]) -> list[Completion]:
        sampling, pad = self.sampling, 0  # masked; the tokenizer's pad id may be too large for the model
        prompts = [torch.tensor(draw.prompt.ids, dtype=torch.int64) for draw, _ in sequences]
        ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")  # [B, longest]
        ones = [torch.ones_like(prompt) for prompt in prompts]
        mask = pad_sequence(ones, batch_first=True, padding_side="left")  # [B, longest]
        uniforms = np.stack(
            [completion_uniforms(self.seed, d.number, n, sampling.max_new_tokens) for d, n in sequences]
        )
        prompt_tokens = ids.shape[1]
        drawing = _Drawing(
            sampling=sampling,
            uniforms=torch.from_numpy(uniforms).to(self.device),
            prompt_tokens=prompt_tokens,
        )
        stops = _StopStrings(
            tokenizer=self.tokenizer, stop=sampling.stop, prompt_tokens=prompt_tokens, ends=[None] * len(ids)
        )

        def generate() -> Any:
            with self.policy.autocasting(self.device):
                return self.policy.model.generate(  # type: ignore[operator]
                    input_ids=ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    generation_config=GenerationConfig(
                        max_new_tokens=sampling.max_new_tokens,
                        do_sample=False,  # `drawing` draws, and leaves `generate` one possible token
                        use_cache=True,
                        pad_token_id=pad,
                        eos_token_id=sorted(ends) or None,
                    ),
                    logits_processor=LogitsProcessorList([drawing]),
                    stopping_criteria=StoppingCriteriaList([stops] if sampling.stop else []),
                    # A rank with shorter completions goes on, because every forward needs all ranks.
                    synced_gpus=is_sharded(self.policy.model),
                )

        written = self.policy.with_own_weights(generate)[:, prompt_tokens:].cpu().numpy().astype(np.int32)
        return [
            completion_of(ids_of_one, self.tokenizer, ends=ends, stop=sampling.stop, stop_end=stop_end)
            for ids_of_one, stop_end in zip(written, stops.ends, strict=True)
        ]


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """In this `with` block, a model in training is set up for generation; afterwards for training again."""
    attention = model.config._attn_implementation
    config, model.generation_config = model.generation_config, GenerationConfig()
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False  # a layer that recomputes its activations would have no cache
    if attention == ATTENTION_NAME:
        try:
            model.set_attn_implementation(own_attention(model.config) or "sdpa")
        except (ValueError, ImportError):  # transformers raises these if the family's code has no sdpa
            model.set_attn_implementation("eager")
    try:
        with stock_layers(model):  # compiled layers would compile again whenever the cache grows
            yield
    finally:
        if attention == ATTENTION_NAME:
            model.set_attn_implementation(attention)
        for module in training:
            module.training = True
        model.generation_config = config


@dataclass(eq=False, kw_only=True)
class _Drawing(LogitsProcessor):
    """Draws the next token of each sequence, and makes all other tokens impossible for `generate`."""

    sampling: SamplingSettings
    uniforms: Tensor  # [B, max_new_tokens] float64
    prompt_tokens: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_tokens
        tokens = draw_tokens(scores, self.uniforms[:, step], self.sampling)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


@dataclass(eq=False, kw_only=True)
class _StopStrings(StoppingCriteria):
    """Ends a sequence when its text contains a stop string, and stores the number of tokens until then."""

    tokenizer: PreTrainedTokenizerBase
    stop: Sequence[str]
    prompt_tokens: int
    ends: list[int | None]  # number of tokens up to a stop string's end

    def __call__(self, input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        # In a byte-level vocabulary each character of a stop string may take four tokens.
        tail_tokens = 4 * max(map(len, self.stop), default=0) + 4
        written = input_ids[:, self.prompt_tokens :]
        for place, tail in enumerate(written[:, -tail_tokens:].tolist()):
            if self.ends[place] is None:
                text = str(self.tokenizer.decode(tail, skip_special_tokens=True))
                if any(string in text for string in self.stop):
                    self.ends[place] = written.shape[1]
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)
