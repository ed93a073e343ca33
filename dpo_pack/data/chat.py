"""Finds what the assistant says in a conversational completion: the tokens that are scored.

A completion of one message of the assistant is scored as a whole; nothing here looks at it. In any other
completion, `{% generation %}` marks of the chat template say which tokens are the assistant's. Without marks,
the conversation is rendered once more up to each of its turns: the text that a turn adds is the turn's.
"""

import os.path
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpo_pack.data.formats import BadRow, Message, Pair
from dpo_pack.data.tokenizer import Tokenizer, bounded_template
from dpo_pack.data.truncation import TokenWeights
from dpo_pack.system.errors import ModelError, first_line

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it


@contextmanager
def rendering() -> Iterator[None]:
    """Context in which the chat template renders a row. Raises BadRow if the template raises any error."""
    try:
        with bounded_template("mend the template, or name another one in tokenizer.chat_template"):
            yield
    except (ModelError, BadRow):
        raise
    except Exception as error:  # a template is a program that came with the model: it may raise any error
        detail = f"the chat template cannot render the row ({first_line(error)})"
        raise BadRow("template_error", detail) from error


def has_other_turns(pair: Pair) -> bool:
    """Returns True if a completion is anything but one message of the assistant."""
    completions: Any = (pair.chosen, pair.rejected)
    return any(_is_dialogue(completion) for completion in completions)


def assistant_weights(pair: Pair, texts: Sequence[str], tokenizer: Tokenizer) -> list[TokenWeights | None]:
    """Returns, for prompt + chosen and prompt + rejected, a weight of each token: 1 for the assistant's.

    None if the completion is one message of the assistant. `texts` are the two texts, rendered. Raises BadRow
    if the turns are not found, ModelError if the tokenizer cannot say where its tokens are in the text.
    """
    prompt: Any = pair.prompt
    completions: Any = {"chosen": pair.chosen, "rejected": pair.rejected}
    weights: list[TokenWeights | None] = []
    for (column, completion), text in zip(completions.items(), texts, strict=True):
        if not _is_dialogue(completion):
            weights.append(None)
            continue
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer ({type(tokenizer).__name__}) does not say where tokens are in a text, which "
                "is needed to score only what the assistant says; set data.scored_turns: all"
            )
        options = {**pair.template_options}
        with rendering():
            if _MARK.search(tokenizer.get_chat_template(None, options.get("tools"))):
                encoding = tokenizer.apply_chat_template(
                    prompt + completion, return_dict=True, return_assistant_tokens_mask=True, **options
                )
                weights.append(np.array(encoding["assistant_masks"], dtype=np.float32))
                continue
            spans = _turns(prompt + completion, len(prompt), text, column, options, tokenizer)
        weights.append(_weights_in(spans, text, tokenizer))
    return weights


def _is_dialogue(completion: Sequence[Message]) -> bool:
    return len(completion) != 1 or completion[0]["role"] != "assistant"


def _turns(
    messages: list[Message],
    num_prompt: int,
    text: str,
    column: str,
    options: dict[str, Any],
    tokenizer: Tokenizer,
) -> list[tuple[int, int]]:
    """Returns (begin, end) in `text` of each message of the assistant after the prompt.

    A message begins where the template's generation prompt ends. Raises BadRow if the text of the messages up
    to a turn is not the beginning of `text`.
    """

    def render(number: int, **more: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:number], tokenize=False, **options, **more))

    spans = []
    for number in range(num_prompt, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before, through = render(number), render(number + 1)
        if not (text.startswith(before) and text.startswith(through)):
            detail = (
                f"message {number - num_prompt + 1} of {column}: the chat template writes earlier turns in "
                "another way if more turns follow, so the assistant's tokens in them cannot be found"
            )
            raise BadRow("rewritten_turns", detail)
        opened = render(number, add_generation_prompt=True)
        begin = max(len(before), len(os.path.commonprefix([opened, text])))
        spans.append((begin, len(through)))
    return spans


def _weights_in(spans: Sequence[tuple[int, int]], text: str, tokenizer: Tokenizer) -> TokenWeights:
    """Returns [tokens of the text] 1 for tokens with a character in a span, 0 for the others."""
    encoding = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins, ends = np.array(encoding["offset_mapping"][0], dtype=np.int64).T
    weights = np.zeros(len(begins), dtype=np.float32)
    for begin, end in spans:
        weights[(begins < end) & (ends > begin)] = 1
    return weights
