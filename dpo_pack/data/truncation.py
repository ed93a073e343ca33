"""Cuts a pair of token id arrays so that it fits `data.max_length`, or refuses it. Lengths are in tokens."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.formats import BadRow

TokenIds = NDArray[np.int32]
TokenWeights = NDArray[np.float32]
Truncation = Literal["drop", "prompt_left", "completion_right", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """The largest allowed lengths, and the option that decides what happens to longer pairs."""

    max_length: int  # prompt + one completion
    max_prompt_length: int | None
    truncation: Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIds:
    """The token ids of a pair, and the weights of its completions' tokens."""

    prompt: TokenIds
    chosen: TokenIds
    rejected: TokenIds
    # The weight of each completion token in the sum of the completion's log-probs; None: all weights are 1.
    chosen_weights: TokenWeights | None = None
    rejected_weights: TokenWeights | None = None

    def completion(self, side: str) -> TokenIds:
        """Returns the completion of a side, which is "chosen" or "rejected"."""
        return self.chosen if side == "chosen" else self.rejected

    @property
    def longest_length(self) -> int:
        """Returns the number of tokens of the prompt and the longer completion together."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def truncate(pair: PairIds, limits: LengthLimits, bos_token_id: int | None) -> PairIds:
    """Returns the pair, cut to the limits by one of these rules (`limits.truncation`).

    - `prompt_left` cuts the oldest prompt tokens. One or more stay; if two or more stay, BOS stays first.
    - `completion_right` cuts the ends of completions, never a prompt.
    - `drop` and `error` cut nothing.

    Raises BadRow `prompt_too_long` or `too_long` for a pair that still does not fit,
    `identical_after_truncation` if cutting makes the completions equal, and `unscored_after_truncation` if it
    leaves a completion without a token that is scored.
    """
    cuts_prompt = limits.truncation == "prompt_left"
    prompt_limit = limits.max_prompt_length
    if prompt_limit is not None and len(pair.prompt) > prompt_limit:
        if not cuts_prompt:
            detail = f"the prompt has {len(pair.prompt)} tokens, data.max_prompt_length is {prompt_limit}"
            raise BadRow("prompt_too_long", detail)
        pair = _with_newest_prompt(pair, prompt_limit, bos_token_id)
    if pair.longest_length <= limits.max_length:
        return pair
    completion_length = pair.longest_length - len(pair.prompt)
    if cuts_prompt and completion_length < limits.max_length:
        return _with_newest_prompt(pair, limits.max_length - completion_length, bos_token_id)
    if limits.truncation == "completion_right" and len(pair.prompt) < limits.max_length:
        return _with_shorter_completions(pair, limits.max_length - len(pair.prompt))
    detail = f"{len(pair.prompt)} prompt and {completion_length} completion tokens"
    raise BadRow("too_long", f"{detail}, data.max_length is {limits.max_length}")


def _with_newest_prompt(pair: PairIds, length: int, bos_token_id: int | None) -> PairIds:
    # Models attend heavily to the first position and expect BOS there, so BOS is kept.
    if length > 1 and pair.prompt[0] == bos_token_id:
        prompt = np.concatenate([pair.prompt[:1], pair.prompt[1 - length :]])
    else:
        prompt = pair.prompt[-length:]
    return replace(pair, prompt=prompt)


def _with_shorter_completions(pair: PairIds, length: int) -> PairIds:
    chosen, rejected = pair.chosen[:length], pair.rejected[:length]
    if np.array_equal(chosen, rejected):
        detail = f"the first {length} tokens of the completions, all that data.max_length leaves, are equal"
        raise BadRow("identical_after_truncation", detail)
    both = (pair.chosen_weights, pair.rejected_weights)
    weights = [None if of_side is None else of_side[:length] for of_side in both]
    if any(of_side is not None and not of_side.any() for of_side in weights):
        detail = f"the first {length} tokens of a completion, all that data.max_length leaves, are not scored"
        raise BadRow("unscored_after_truncation", detail)
    return replace(
        pair, chosen=chosen, rejected=rejected, chosen_weights=weights[0], rejected_weights=weights[1]
    )
