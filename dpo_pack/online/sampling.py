"""Parts of sampling: settings, random numbers, drawing a token from logits, finding a completion's end.

The host draws all random numbers. Each token has a uniform number, a function of (seed, number of the prompt
in the run, number of the completion, position), and is the first at which the cumulative distribution is
above that number. So a completion depends neither on other sequences in the batch, nor on the rank.

Legend: B sequences of a batch, V vocabulary, L tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.online.interface import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The distribution that completions are drawn from."""

    completions_per_prompt: int
    max_new_tokens: int
    temperature: float = 1.0  # 0: the likeliest token, without random numbers
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


def completion_uniforms(
    seed: int, draw_number: int, completion: int, num_tokens: int
) -> npt.NDArray[np.float64]:
    """Returns [num_tokens] in [0, 1). The first n do not depend on `num_tokens`."""
    # Raw bits of PCG64 are the same in all versions of numpy.
    stream = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)))
    return (stream.random_raw(num_tokens) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def completion_seed(seed: int, draw_number: int, completion: int) -> int:
    """Returns a seed in [0, 2^63) for an engine with its own random numbers; a function of the arguments."""
    state = np.random.SeedSequence(seed, spawn_key=(2, draw_number, completion)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


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
    """Returns [B]: the first position where the cumulative sum of `masses` exceeds `uniforms` x their sum.

    masses: [B, V] unnormalised probabilities. uniforms: [B]. No returned position has probability zero.
    """
    cumulative = masses.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    places = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Rounding may put the target behind the last token whose probability is above zero.
    last = masses.shape[-1] - 1 - (masses > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(places, last)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the tokens that end a completion. Some families name one in their generation config only."""
    named: list[Any] = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    if model.can_generate():  # other models have no generation config
        named.append(model.generation_config.eos_token_id)
    return {end for ends in named for end in ([ends] if isinstance(ends, int) else ends or ())}


def completion_of(
    ids: npt.NDArray[np.int32],
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int],
    stop: Sequence[str],
    stop_end: int | None,
) -> Completion:
    """Returns the completion at the start of `ids` [L]: all tokens up to and with the first of `ends`.

    It ends earlier after `stop_end` tokens, if these contain a stop string.
    """
    places = np.flatnonzero(np.isin(ids, sorted(ends)))
    eos_end = int(places[0]) + 1 if len(places) else None
    end = min((end for end in (eos_end, stop_end) if end is not None), default=None)
    ids = ids if end is None else ids[:end]
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    text = text[: min((place for string in stop if (place := text.find(string)) >= 0), default=len(text))]
    return Completion(ids=ids, text=text, is_finished=end is not None)
