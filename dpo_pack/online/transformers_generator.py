"""The policy answers prompts on the training device, with transformers' `generate`, its own attention and a
KV cache: no weight is loaded or copied.

Each token has a uniform number that the host draws, a function of (seed, number of the prompt in the run,
number of the completion, position), and is the first at which the cumulative distribution is above it. So a
completion depends neither on other sequences in the batch, nor on the rank.

Legend: B sequences of a batch, n completions of a prompt, V vocabulary, L tokens.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from dpo_pack.data.tokenizer import end_of_turn
from dpo_pack.model.attention import ATTENTION_NAME
from dpo_pack.model.config import attention_names, eos_tokens, own_attention
from dpo_pack.model.fast_layers import stock_layers
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.online.interface import Completion, Draw, Failure, SamplingSettings
from dpo_pack.system.console import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersGenerator:
    """Draws n completions for each prompt from the current policy. The KV cache of a batch of several
    sequences has at most `token_budget` tokens: sequences x (longest prompt + max_new_tokens)."""

    scorer: CompletionLogps
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingSettings
    seed: int
    token_budget: int
    device: torch.device
    console: Console  # shows how many completions are written

    def generate(self, draws: Sequence[Draw]) -> list[tuple[Completion, ...] | Failure]:
        n = self.sampling.completions_per_prompt
        longest_first = sorted(range(len(draws)), key=lambda place: -len(draws[place].prompt.ids))
        left = [(place, number) for place in longest_first for number in range(n)]
        completions: dict[tuple[int, int], Completion] = {}
        ends = end_tokens(self.scorer.model, self.tokenizer)  # `generating` hides the generation config
        written = shown(self.console, "Generating", "completions", len(left))
        with generating(self.scorer.model), written as bar:
            while left:
                longest = len(draws[left[0][0]].prompt.ids) + self.sampling.max_new_tokens
                fitting = max(1, self.token_budget // longest)
                batch, left = left[:fitting], left[fitting:]
                answers = self._complete([(draws[place], number) for place, number in batch], ends)
                completions |= zip(batch, answers, strict=True)
                bar.advance(len(batch))
        return [tuple(completions[place, number] for number in range(n)) for place in range(len(draws))]

    def weights_step(self, step: int) -> int:
        return step

    @torch.no_grad()
    def _complete(self, sequences: Sequence[tuple[Draw, int]], ends: set[int]) -> list[Completion]:
        sampling = self.sampling
        model: Any = self.scorer.model
        prompts = [torch.tensor(draw.prompt.ids, dtype=torch.int64) for draw, _ in sequences]
        # [B, longest]; masked zeros pad: the tokenizer's pad id may be too large for the model.
        ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left")
        prompt_tokens, drawing = ids.shape[1], LogitsProcessorList()
        if sampling.temperature > 0.0:
            draws = (
                completion_uniforms(self.seed, d.number, n, sampling.max_new_tokens) for d, n in sequences
            )
            uniforms = torch.from_numpy(np.stack(list(draws))).to(self.device)
            drawing.append(_Drawing(sampling=sampling, uniforms=uniforms, prompt_tokens=prompt_tokens))
        stops = _StopStrings(
            tokenizer=self.tokenizer, stop=sampling.stop, prompt_tokens=prompt_tokens, ends=[None] * len(ids)
        )
        generate = partial(
            model.generate,
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,  # `drawing`, if any, draws and leaves `generate` one possible token
                use_cache=True,
                pad_token_id=0,
                eos_token_id=sorted(ends) or None,
            ),
            logits_processor=drawing,
            stopping_criteria=StoppingCriteriaList([stops] if sampling.stop else []),
            # A rank with shorter completions goes on, because every forward needs all ranks.
            synced_gpus=is_sharded(model),
        )
        # Each token is a forward. The casts of a sharded model would be those of the whole model.
        with self.scorer.autocasting(self.device, keeps_casts=not is_sharded(model)):
            answers = self.scorer.with_own_weights(generate)[:, prompt_tokens:]
        return [
            completion_of(written, self.tokenizer, ends=ends, stop=sampling.stop, stop_end=stop_end)
            for written, stop_end in zip(answers.cpu().numpy().astype(np.int32), stops.ends, strict=True)
        ]


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """Context in which a model in training is set up for generation."""
    attention = attention_names(model.config)
    config, model.generation_config = model.generation_config, GenerationConfig()
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False  # a layer that recomputes its activations would have no cache
    if attention[""] == ATTENTION_NAME:
        try:
            model.set_attn_implementation(own_attention(model.config) or "sdpa")
        except (ValueError, ImportError):  # transformers raises these if the family's code has no sdpa
            model.set_attn_implementation("eager")
    try:
        with stock_layers(model):  # compiled layers would compile again whenever the cache grows
            yield
    finally:
        if attention[""] == ATTENTION_NAME:
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


def completion_uniforms(
    seed: int, draw_number: int, completion: int, num_tokens: int
) -> npt.NDArray[np.float64]:
    """Returns [num_tokens] in [0, 1). The first n do not depend on `num_tokens`."""
    # Raw bits of PCG64 are the same in all versions of numpy.
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)))
    return (stream.random_raw(num_tokens) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_tokens(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> Tensor:
    """Draws tokens: [B, V] logits, [B] float64 `uniforms` in [0, 1) -> [B] int64 tokens.

    Filters run in transformers' order: temperature, top_k, top_p (Holtzman et al. 2020, arXiv 1904.09751),
    min_p (Nguyen et al. 2024, arXiv 2407.01082).
    """
    if settings.temperature == 0.0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / settings.temperature, dim=-1).double()
    if settings.top_p == 1.0 and settings.top_k is None and settings.min_p == 0.0:
        return _invert(probabilities, uniforms)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if settings.top_k is not None:
        ordered[:, settings.top_k :] = 0.0
    ordered /= ordered.sum(dim=-1, keepdim=True)
    # A token stays if all likelier tokens have together less than top_p. So the likeliest always stays.
    ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= settings.top_p, 0.0)
    ordered = ordered.masked_fill(ordered < settings.min_p * ordered[:, :1], 0.0)
    places = _invert(ordered, uniforms)
    return tokens.gather(1, places[:, None]).squeeze(1)


def _invert(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Returns [B]: the first position where the cumulative sum of `masses`, [B, V] unnormalised
    probabilities, exceeds `uniforms`, [B], x their sum. No returned position has probability zero."""
    cumulative = masses.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Rounding may put the target behind the last token whose probability is above zero.
    last = masses.shape[-1] - 1 - (masses > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(places, last)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the tokens that end a completion: the model's, and the one that ends the template's turns."""
    turn_end = end_of_turn(tokenizer)
    return eos_tokens(model, tokenizer) | (set() if turn_end is None else {turn_end})


def completion_of(
    ids: npt.NDArray[np.int32],
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int],
    stop: Sequence[str],
    stop_end: int | None,
) -> Completion:
    """Returns the completion at the start of `ids` [L]: all tokens up to and with the first of `ends`, or
    `stop_end` tokens, if these contain a stop string and are fewer."""
    places = np.flatnonzero(np.isin(ids, sorted(ends)))
    eos_end = int(places[0]) + 1 if len(places) else None
    end = min((end for end in (eos_end, stop_end) if end is not None), default=None)
    ids = ids if end is None else ids[:end]
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    text = text[: min((place for string in stop if (place := text.find(string)) >= 0), default=len(text))]
    return Completion(ids=ids, text=text, is_finished=end is not None)
