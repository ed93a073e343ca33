"""What the chat template of a tokenizer makes of a conversation, and which tokens are the assistant's.

A completion of one message of the assistant is scored as a whole. In any other one `{% generation %}` marks
of the template say which tokens are the assistant's. Without marks, the conversation is rendered up to each
of its turns: the text that a turn adds is the turn's.
"""

from __future__ import annotations

import os.path
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from dpo_pack.data.formats import Pair, check_last_turn
from dpo_pack.data.values import BadRow, Message
from dpo_pack.packing.lengths import Bools
from dpo_pack.system.errors import ModelError, first_line

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it
# The end of a turn is among so many last tokens, because a template may write a line break after it.
TURN_END_TOKENS = 3
_TEMPLATE_SECONDS = 5.0  # CPU time to render one row


class Tokenizer(Protocol):
    """The attributes and methods of a transformers tokenizer that dpo-pack uses."""

    eos_token: str | None
    eos_token_id: int | None
    bos_token_id: int | None
    unk_token_id: int | None
    chat_template: str | dict[str, str] | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    split_special_tokens: bool

    @property
    def is_fast(self) -> bool: ...
    @property
    def backend_tokenizer(self) -> Any: ...

    def get_chat_template(self, chat_template: str | None, tools: Any) -> str: ...
    def save_pretrained(self, save_directory: str) -> Any: ...
    def __len__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...
    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


@contextmanager
def rendering() -> Iterator[None]:
    """Context in which the chat template renders a row. Raises BadRow if the template raises any error, and
    ModelError if it runs for long, in the main thread: it is a program that came with the model."""
    is_main = threading.current_thread() is threading.main_thread()
    try:
        if is_main:
            signal.signal(signal.SIGVTALRM, _stop_template)
            # Repeats every second, because Python drops an exception that is raised in a destructor.
            signal.setitimer(signal.ITIMER_VIRTUAL, _TEMPLATE_SECONDS, 1.0)
        yield
    except _TemplateRunsError:
        what = f"the chat template does not end within {_TEMPLATE_SECONDS:g} seconds for a row"
        raise ModelError(
            f"{what}; mend it, or use another one (of the policy: tokenizer.chat_template)"
        ) from None
    except (ModelError, BadRow):
        raise
    except Exception as error:  # a template is a program that came with the model: it may raise any error
        detail = f"the chat template cannot render the row ({first_line(error)})"
        raise BadRow("template_error", detail) from error
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class _TemplateRunsError(BaseException):
    """Nothing in a template or in jinja may catch it."""


def _stop_template(signum: int, frame: object) -> None:
    raise _TemplateRunsError


def apply_chat_template(pair: Pair, completions: Sequence[Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the texts of the prompt, before an answer or within its last turn if the completions go on with
    that, and of the prompt with each of `completions`."""
    prompt: Any = pair.prompt
    options = {**pair.template_options, "tokenize": False}
    goes_on = check_last_turn(pair, continues=True)
    end = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
    wholes = [_joined(prompt, part) if goes_on and part else prompt + part for part in completions]
    render: Any = tokenizer.apply_chat_template
    try:
        with rendering():
            return render(prompt, **end, **options), *(render(messages, **options) for messages in wholes)
    except BadRow as bad:
        messages = [message for part in (prompt, *completions) for message in part]
        if "content" not in bad.detail or all(m.get("content") is not None for m in messages):
            raise
        detail = (
            f"{bad.detail}: null does not reach the template, because transformers drops keys that are null; "
            "a template that tests `message.content`, not `message.content is not none`, can render the row"
        )
        raise BadRow(bad.reason, detail) from bad


def _joined(prompt: list[Message], completion: list[Message]) -> list[Message]:
    """Returns the messages of both; the last one of the prompt and the completion's first are one message."""
    begun, rest = prompt[-1], completion[0]
    contents = [message["content"] for message in (begun, rest) if message["content"] is not None]
    repeated = {key for key in begun.keys() & rest.keys() - {"content"} if begun[key] != rest[key]}
    if repeated or len(set(map(type, contents))) > 1:
        what = f"another {min(repeated)}" if repeated else "a content of another kind"
        detail = f"a completion goes on with the last message of the prompt, but has {what}"
        raise BadRow("wrong_type", detail)
    content = contents[0] + contents[1] if len(contents) == 2 else next(iter(contents), None)
    return [*prompt[:-1], {**begun, **rest, "content": content}, *completion[1:]]


def template_opens_turn(pair: Pair, tokenizer: Tokenizer) -> bool:
    """Whether the template writes the beginning of an answer after a prompt, or renders none without."""
    try:
        # [] is a completion of no messages.
        with_opening, without = apply_chat_template(pair, ([],), tokenizer)
    except BadRow:
        return True
    return with_opening != without


def scored_tokens(pair: Pair, texts: Sequence[str], tokenizer: Tokenizer) -> list[Bools | None]:
    """Returns, for prompt + chosen and prompt + rejected, whose `texts` are rendered, whether each token is
    the assistant's; None: the completion is one message of the assistant. Raises BadRow if the turns
    are not found, ModelError if the tokenizer does not say where its tokens are."""
    prompt: Any = pair.prompt
    completions: Any = {"chosen": pair.chosen, "rejected": pair.rejected}
    of_sides: list[Bools | None] = []
    for (column, completion), text in zip(completions.items(), texts, strict=True):
        if not is_dialogue(completion):
            of_sides.append(None)
            continue
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer ({type(tokenizer).__name__}) does not say where tokens are in a text, which "
                "is needed to score only what the assistant says; set data.scored_turns: all"
            )
        options, goes_on = {**pair.template_options}, check_last_turn(pair, continues=True)
        messages = _joined(prompt, completion) if goes_on and completion else prompt + completion
        with rendering():
            if _MARK.search(tokenizer.get_chat_template(None, options.get("tools"))):
                encoding: Any = tokenizer.apply_chat_template(
                    messages, return_dict=True, return_assistant_tokens_mask=True, **options
                )
                of_sides.append(np.array(encoding["assistant_masks"], dtype=np.bool_))
                continue
            spans = _turns(messages, len(prompt) - goes_on, text, column, options, tokenizer)
        encoding = tokenizer([text], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins, ends = np.array(encoding["offset_mapping"][0], dtype=np.int64).T
        scored = np.zeros(len(begins), dtype=np.bool_)
        for begin, end in spans:
            scored[(begins < end) & (ends > begin)] = True  # tokens with a character of a turn
        of_sides.append(scored)
    return of_sides


def is_dialogue(completion: Sequence[Message]) -> bool:
    """Returns True if a completion is anything but one message of the assistant."""
    return len(completion) != 1 or completion[0]["role"] != "assistant"


def _turns(
    messages: list[Message],
    num_prompt: int,
    text: str,
    column: str,
    options: dict[str, Any],
    tokenizer: Tokenizer,
) -> list[tuple[int, int]]:
    """Returns (begin, end) in `text` of what the assistant says in each message after the prompt. Raises
    BadRow if the template writes earlier turns otherwise."""

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


@lru_cache(maxsize=8)
def begin_of_turn(tokenizer: Tokenizer) -> str:
    """Returns the last characters that the chat template writes before a question; "": it writes none."""
    if tokenizer.chat_template is None:
        return ""
    with suppress(BadRow), rendering():
        text = tokenizer.apply_chat_template([{"role": "user", "content": "qzq"}], tokenize=False)
        return str(text).partition("qzq")[0].strip()[-8:]
    return ""


@lru_cache(maxsize=8)
def template_names(template: str) -> frozenset[str]:
    """Returns all words of a chat template; an option that is none of them would change nothing."""
    return frozenset(re.findall(r"\w+", template))


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Returns the special token with which the chat template ends an answer; None: there is none."""
    answer = "An answer"
    for content in (answer, [{"type": "text", "text": answer}]) if tokenizer.chat_template else ():
        messages: Any = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            with rendering():
                text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template that takes no such conversation
            continue
        ids = tokenizer([text.rpartition(answer)[2]], add_special_tokens=False)["input_ids"][0]
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        return next((id for id in ids[:TURN_END_TOKENS] if answer in text and id in special), None)
    return None
