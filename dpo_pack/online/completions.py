"""From the tokens that a policy wrote to a completion: where it ended, and what judges read of it.

Legend: L tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dpo_pack.online.interface import Completion


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """EOS of the tokenizer, of the model's config and of its generation config, which may name several.

    Some families (Phi 3) have the token that ends a turn in their generation config alone.
    """
    named: list[Any] = [tokenizer.eos_token_id, model.config.get_text_config().eos_token_id]
    if model.can_generate():  # others have no generation config
        named.append(model.generation_config.eos_token_id)
    return {end for ends in named for end in ([ends] if isinstance(ends, int) else ends or ())}


def completion_of(
    line: npt.NDArray[np.int32],
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int],
    stop: Sequence[str],
    stop_end: int | None,
) -> Completion:
    """[L] tokens, cut behind the one that ended them: there is padding behind it, if anything.

    `stop_end` is the number of tokens up to the one with which a stop string was complete; None: none was.
    """
    places = np.flatnonzero(np.isin(line, sorted(ends)))
    eos_end = int(places[0]) + 1 if len(places) else None
    end = min((end for end in (eos_end, stop_end) if end is not None), default=None)
    ids = line if end is None else line[:end]
    text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
    return Completion(ids=ids, text=until_stop(text, stop), is_finished=end is not None)


def until_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((place for string in stop if (place := text.find(string)) >= 0), default=len(text))]
