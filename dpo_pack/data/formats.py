"""The formats of data sources: FORMATS, at the end. A format turns rows of a data file into pairs or prompts.

A row maps column names, which are already renamed as the recipe's `data.*.columns` says, to values. The
columns that a format reads are in FIELDS_OF_FORMAT of recipe/data.py.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from dpo_pack.data.values import (
    ORDERS,
    BadRow,
    Message,
    Row,
    RowImages,
    as_float,
    as_list,
    holds_messages,
    kind_of,
    message_of,
    messages_of,
    parsed_text,
    template_options_of,
    text_of,
    token_ids_of,
    token_weights_of,
    value_of,
    weight_of,
)
from dpo_pack.recipe.data import FIELDS_OF_FORMAT

Answers = tuple[list[Message], list[Message], str, float]  # chosen, rejected, `choice` and `score_margin`
_HUMAN_TURN, _ASSISTANT_TURN = "\n\nHuman:", "\n\nAssistant:"  # of HH-RLHF
_MARKED_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
SIDES = ("chosen", "rejected")
_BEGINS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with a preferred and a dispreferred completion, as text, as messages or as token ids."""

    prompt: str | list[Message] | list[int]
    # The completions have the prompt's type; they are "" when only the prompts are read.
    chosen: str | list[Message] | list[int] = ""
    rejected: str | list[Message] | list[int] = ""
    weight: float = 1.0  # a factor of the pair's loss
    # 1 for each completion token that is scored, 0 for others; None: all are 1. Only token ids have weights.
    chosen_weights: Sequence[float] | None = None
    rejected_weights: Sequence[float] | None = None
    has_inferred_prompt: bool = False  # the prompt is the text with which both completions happen to begin
    score_margin: float = field(default=math.nan, compare=False)  # of chosen and rejected; NaN: no score
    choice: str = ""  # why chosen is chosen, if the row does not call an answer so; {better} is a column
    template_options: Mapping[str, Any] = field(default_factory=dict)  # tools and chat_template_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One form that the rows of a source can have, and the functions that read such rows."""

    content: Literal["text", "messages", "token_ids"] = "messages"  # the type of prompts and completions
    # The columns of the completions' texts, chosen first; one column if both are in it. A row without them
    # gives no pair. dpopack show names them in its remedies.
    completion_columns: tuple[str, ...] = SIDES
    prompt_column: str | None = "prompt"  # the column that the prompt is read from; None: no column is it
    infers_prompts: bool = False  # without prompt_column, the common beginning of the texts is the prompt
    pair: Callable[[Row], Pair]  # makes the pair of a row (at most one); raises BadRow
    prompt: Callable[[Row], Pair]  # makes a Pair without completions; raises BadRow


def preference(row: Row) -> Pair:
    """Reads texts: `chosen`, `rejected` and `prompt`, or their common beginning if `prompt` is missing."""
    chosen, rejected = text_of(row, "chosen"), text_of(row, "rejected")
    for column, text in zip(SIDES, (chosen, rejected), strict=True):
        if _BEGINS_MESSAGES.match(text) and text.rstrip()[-1] == "]" and not holds_messages(text):
            detail = f"{column} is a list of messages as text, but neither JSON nor as Python prints it"
            raise BadRow("wrong_type", f"{detail}; store it as JSON")
    if "prompt" in row:
        return _pair(row, text_of(row, "prompt"), chosen, rejected)
    if all(isinstance(parsed_text(text), dict) for text in (chosen, rejected)):
        raise BadRow("wrong_type", "chosen and rejected are JSON of objects, and no column is the prompt")
    length = _implicit_prompt_length(chosen, rejected)
    if length == 0:
        raise BadRow("no_common_prompt", "no prompt column, and chosen and rejected begin differently")
    pair = _pair(row, chosen[:length], chosen[length:], rejected[length:])
    return replace(pair, has_inferred_prompt=True)


def transcript(row: Row) -> Pair:
    """Reads whole dialogues "\\n\\nHuman: ...\\n\\nAssistant: ..." (HH-RLHF). The last answer is scored."""
    prompts, completions = [], []
    for column in SIDES:
        prompt, mark, completion = text_of(row, column).rpartition(_ASSISTANT_TURN)
        if not mark:
            raise BadRow("no_assistant_turn", f"{column} has no {_ASSISTANT_TURN!r}")
        prompts.append(prompt + mark)
        completions.append(completion)
    if prompts[0] != prompts[1]:
        raise BadRow("no_common_prompt", f"chosen and rejected differ before their last {_ASSISTANT_TURN!r}")
    return _pair(row, prompts[0], *completions)


def transcript_turns(row: Row) -> Pair:
    """Reads the same dialogues as messages; a text before the first turn is the system's."""
    dialogues: Row = {"weight": row.get("weight")}
    for column in SIDES:
        before, *parts = (part.strip() for part in _MARKED_TURN.split(text_of(row, column)))
        if parts[-2:-1] != ["Assistant"]:
            raise BadRow("no_assistant_turn", f"{column} does not end with a turn of {_ASSISTANT_TURN!r}")
        turns = _turns_of_marks(parts)
        dialogues = {**dialogues, column: with_system_message(turns, before) if before else turns}
    return conversational(dialogues)


def conversational(row: Row) -> Pair:
    """Reads lists of `{role, content}` messages. The column `prompt` may be missing, or be in chosen and
    rejected once more: a text as one of their user messages (UltraFeedback binarized), a list as their
    beginning. Unless the recipe names the column `system`, it is not read: see `with_system`."""
    chosen, rejected = messages_of(row, "chosen"), messages_of(row, "rejected")
    common = _implicit_prompt_length(chosen, rejected)
    prompt = chosen[:common]
    if "prompt" not in row:
        _check_last_turns(chosen, rejected)
    elif not any(m["role"] == "user" and m.get("content") == row["prompt"] for m in prompt):
        if isinstance(row["prompt"], str) and not holds_messages(row["prompt"]):
            detail = "prompt is text, but chosen and rejected do not both begin with a user message of it"
            raise BadRow("prompt_mismatch", detail)
        prompt = messages_of(row, "prompt")
        repeats = [side[: len(prompt)] == prompt for side in (chosen, rejected)]
        if repeats[0] != repeats[1]:
            detail = f"only {'chosen' if repeats[0] else 'rejected'} begins with the messages of the prompt"
            raise BadRow("prompt_mismatch", detail)
        common = len(prompt) if all(repeats) else 0
    return _pair(row, prompt, chosen[common:], rejected[common:])


def openai(row: Row) -> Row:
    """Returns a row of OpenAI's fine-tuning on preferences under the columns of `conversational`."""
    chosen, rejected = _answer(row, "preferred_output"), _answer(row, "non_preferred_output")
    return {**row, "prompt": value_of(row, "input"), "chosen": chosen, "rejected": rejected}


def swift(row: Row) -> Row:
    """Returns a row of ms-swift, whose `messages` end with the chosen answer, under the columns of
    `conversational`. `rejected_messages` are a whole dialogue; `rejected_response` stands for the answer."""
    messages = messages_of({**row, "messages": dialogue_prompt(row, "messages")}, "messages")
    if row.get("rejected_messages") is not None:
        return {**row, "chosen": messages, "rejected": dialogue_prompt(row, "rejected_messages")}
    rejected = _answer(row, "rejected_response")
    if messages[-1]["role"] != "assistant":
        raise BadRow("no_assistant_turn", "messages do not end with the chosen answer")
    return {**row, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}


def tokenized(row: Row) -> Pair:
    """Reads the user's own token ids, to which no EOS is added, and weights of the completions' tokens."""
    prompt, chosen, rejected = (token_ids_of(row, f"{part}_ids") for part in ("prompt", "chosen", "rejected"))
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        weight=weight_of(row),
        chosen_weights=token_weights_of(row, "chosen_weights", len(chosen)),
        rejected_weights=token_weights_of(row, "rejected_weights", len(rejected)),
    )


def compared(row: Row) -> Answers:
    """Returns the better and the worse of two answers: `first` where `better` is 0 or `preference` is below
    0; both may be words (model_a, tie). Raises BadRow for a tie."""
    columns = [column for column in ("preference", "better") if row.get(column) is not None]
    if not columns:
        detail = "neither the column preference nor the column better says which answer is better"
        raise BadRow("missing_column" if "preference" not in row else "wrong_type", detail)
    is_second_better = {_is_second_better(column, row[column]) for column in columns}
    if len(is_second_better) > 1:
        raise BadRow("contradicting_columns", "the columns preference and better name different answers")
    better, worse = ("second", "first") if is_second_better.pop() else ("first", "second")
    value = re.sub("[{}]", "", str(row[columns[-1]])).strip()
    if columns[-1] == "preference" and math.isfinite(number := as_float(value)):
        value = "above 0" if number > 0 else "below 0"
    choice = f"{{{better}}} where {{{columns[-1]}}} is {value}"
    return _answer(row, better), _answer(row, worse), choice, math.nan


def _is_second_better(column: str, value: object) -> bool:
    number, word = as_float(value), str(value).strip().lower()
    named = _FIRST_OR_SECOND.fullmatch(word)
    if word.startswith(_TIES) or (column == "preference" and number == 0):
        raise BadRow("tie", f"{column} is {str(value)[:40]!r}: neither answer is better")
    if named is None and not (number in (0, 1) if column == "better" else math.isfinite(number)):
        numbers = "0 or 1" if column == "better" else "a number below or above 0"
        words = "first (also a, model_a), second (also b, model_b), or tie"
        raise BadRow("wrong_type", f"{column} is {str(value)[:40]!r}; it can be {numbers}, or {words}")
    return number > 0 if named is None else named[1] in ("b", "second")


_FIRST_OR_SECOND = re.compile(  # model_a, [[B]], Response B
    r"\W*(?:(?:model|answer|response|assistant|output|completion|conversation)[\W_]+)?(a|b|first|second)\W*"
)
_TIES = ("tie", "both", "neither", "equal", "draw", "same")


def ranked(row: Row) -> Answers:
    """Returns the best and the worst answer of `answers`, a list of objects with a text, by the first of
    ORDERS that they have. Raises BadRow if all are equal."""
    answers = as_list(value_of(row, "answers"))
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("wrong_type", "answers is not a list of {answer, rank} objects")
    if len(answers) < 2:
        raise BadRow("too_few_answers", f"answers has {len(answers)} entries, but a pair needs two")
    order = next((name for name in ORDERS if any(name in answer for answer in answers)), "rank")
    ranks = [as_float(value_of(answer, order)) for answer in answers]
    if not all(map(math.isfinite, ranks)):
        wrong = next(answer[order] for answer in answers if not math.isfinite(as_float(answer[order])))
        raise BadRow("wrong_type", f"{order} is {str(wrong)[:40]!r}, not a number")
    if min(ranks) == max(ranks):
        raise BadRow("tie", f"all answers have the same {order}")
    best, worst = (answers[ranks.index(rank)] for rank in (min(ranks), max(ranks))[:: ORDERS[order]])
    column = next((name for name in ("answer", "completion", "response") if name in best), "answer")
    wins, loses = ("lowest", "highest")[:: ORDERS[order]]
    choice = f"the answer of the {wins} {order}, rejected that of the {loses}"
    given = [[one.get(name) for name in ("overall_score", "score")] for one in (best, worst)]
    scores = [as_float(score if overall is None else overall) for overall, score in given]
    if any(map(math.isinf, scores)):
        raise BadRow("invalid_score", "the score of an answer is infinite, not a finite number")
    return _answer(best, column), _answer(worst, column), choice, scores[0] - scores[1]


def alpaca_prompt(row: Row) -> list[Message]:
    """Returns the turns of `history`, and `instruction` and `input` with a line break between them."""
    instruction, input = text_of(row, "instruction"), row.get("input")
    history = as_list(row.get("history") or [])
    if not isinstance(input, str | None):
        raise BadRow("wrong_type", f"input is {kind_of(input)}, not text")
    turns = []
    for turn in history if isinstance(history, list) else [None]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise BadRow("wrong_type", "history is not a list of [question, answer]")
        turns += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(text for text in (instruction, input) if text)
    return [*turns, {"role": "user", "content": question}]


def dialogue_prompt(row: Row, column: str) -> list[Message]:
    """Returns the messages of a column, which end before the answer. Their keys may be those of ShareGPT."""
    value = value_of(row, column)
    if isinstance(value, str) and column == "prompt" and not holds_messages(value):
        return _turns(value)
    value = as_list(value)
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, not a list of messages")
    return [message_of(message, column) for message in value]


def check_last_turn(pair: Pair, *, continues: bool = False, is_asked: bool = False) -> bool:
    """Returns True if the completions go on with the prompt's last turn, the assistant's. Raises BadRow if
    they would and may not (`continues`), or if somebody else must have the last turn (`is_asked`)."""
    last: Any = pair.prompt[-1] if isinstance(pair.prompt, list) and pair.prompt else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    completions: Any = [part[0] for part in (pair.chosen, pair.rejected) if part]
    goes_on = not completions or any(message["role"] == "assistant" for message in completions)
    goes_on = goes_on and not last.get("tool_calls")
    if (goes_on and not continues) or (is_asked and not goes_on):
        detail = "the prompt ends with an answer, so chosen and rejected cannot answer its last message"
        raise BadRow("answered_prompt", detail)
    return goes_on


def preference_prompt(row: Row) -> Pair:
    """Reads the column `prompt`. If it is missing, the prompt is the common beginning of the completions."""
    if "prompt" in row:
        return Pair(prompt=text_of(row, "prompt"))
    return Pair(prompt=preference(row).prompt, has_inferred_prompt=True)


def conversational_prompt(row: Row) -> Pair:
    """Reads the column `prompt` if it has messages. Else the prompt is the completions' common beginning."""
    value = row.get("prompt")
    has_messages = holds_messages(value) if isinstance(value, str) else isinstance(as_list(value), list)
    prompt = messages_of(row, "prompt") if has_messages else conversational(row).prompt
    return Pair(prompt=prompt, template_options=template_options_of(row))


def possible_formats(row: Row, columns: Mapping[str, str | None]) -> list[str]:
    """Returns the formats, in the order of FORMATS, that a row may have and that read all named `columns`."""
    lists = {column for column, value in row.items() if isinstance(as_list(value), list)}
    texts = {column for column, value in row.items() if isinstance(value, str)}
    has_both, answers = row.keys() >= {*SIDES}, as_list(row.get("answers"))
    # A text prompt or one answer that happens to be JSON stays text.
    is_conversation = not (lists - texts).isdisjoint(("prompt", "chosen")) or (
        texts.issuperset(SIDES) and all(holds_messages(row[column]) for column in SIDES)
    )
    dialogues = [str(row.get(column)) for column in SIDES]
    is_transcript = all(_HUMAN_TURN in text and _ASSISTANT_TURN in text for text in dialogues)
    is_compared = "first" in row and "second" in row and not has_both
    is_ranked = isinstance(answers, list) and bool(answers) and isinstance(answers[0], dict)
    has_images = isinstance(images := row.get("images"), RowImages) and bool(images)
    matching = {
        "tokenized": "prompt_ids" in row,
        "conversational": is_conversation and "prompt_ids" not in row,
        "openai": "preferred_output" in row and "non_preferred_output" in row,
        "swift": "messages" in lists and not {"rejected_response", "rejected_messages"}.isdisjoint(row),
        "transcript": is_transcript and "prompt" not in row,
        "messages": "messages" in lists,
        "sharegpt": "conversations" in lists,
        "alpaca": "instruction" in texts,
        "compared": is_compared,
        "ranked": is_ranked and not ORDERS.keys().isdisjoint(answers[0]) and not has_both,
    }
    # An online run reads only the prompt; it makes messages of it, as other runs do.
    of_messages = matching["ranked"] or (is_compared and not {"preference", "better"}.isdisjoint(row))
    of_messages = of_messages or is_conversation
    matching["pictured"] = has_images and "prompt" in texts and not of_messages
    begins = "prompt" in row or {"instruction", "messages", "conversations"}.isdisjoint(row)
    is_other = of_messages or has_images or matching["tokenized"] or matching["transcript"]
    matching["preference"] = begins and not is_other
    named = {ours for ours, theirs in columns.items() if theirs is not None}
    names_prompt = "prompt" in columns  # also with null, which says that no column is the prompt
    return [
        name
        for name, format in FORMATS.items()
        if named.issubset(FIELDS_OF_FORMAT[name])
        and (not names_prompt or format.prompt_column in ("prompt", None))
        and matching[name]
    ]


def with_system_message(prompt: list[Any], content: str) -> list[Any]:
    """Returns the prompt with a system message at its beginning. A prompt that has one is unchanged."""
    if prompt[0]["role"] in ("system", "developer"):
        return prompt
    return [{"role": "system", "content": content}, *prompt]


def with_system(row: Row, pair: Pair) -> Pair:
    """Returns the pair with the text of the column `system` as system message. Raises BadRow."""
    system, prompt = row.get("system"), pair.prompt
    if not isinstance(system, str | None):
        raise BadRow("wrong_type", f"system is {kind_of(system)}, not text")
    if not (system or "").strip():
        return pair
    assert isinstance(prompt, list) and isinstance(system, str)
    with_system = with_system_message(prompt, system)
    if with_system[0]["content"] != system:
        detail = "the prompt begins with another system message than the column system"
        raise BadRow("two_system_prompts", detail)
    return replace(pair, prompt=with_system)


def _as_messages(
    prompt: Callable[[Row], list[Message] | None],
    completions: Callable[[Row], Any] = lambda row: (*map(partial(_answer, row), SIDES), "", math.nan),
) -> dict[str, Any]:
    """Makes the functions of a `Format` of messages. `prompt` returns None if completions begin with it."""

    def read_pair(row: Row) -> Pair:
        chosen, rejected, choice, score_margin = completions(row)
        messages = {"chosen": chosen, "rejected": rejected}
        if (asked := prompt(row)) is not None:
            messages["prompt"] = asked
        pair = with_system(row, conversational({**row, **messages}))
        check_last_turn(pair, continues=True, is_asked=asked is not None)
        return replace(pair, choice=choice, score_margin=score_margin)

    def read_prompt(row: Row) -> Pair:
        if (asked := prompt(row)) is None:
            read = read_pair(row)
            return Pair(prompt=read.prompt, template_options=read.template_options)
        return with_system(row, conversational_prompt({**row, "prompt": asked}))

    return {"pair": read_pair, "prompt": read_prompt}


def _answer(row: Row, column: str) -> list[Message]:
    """Returns the messages of an answer: a text, a message or a list of messages."""
    value = value_of(row, column)
    if isinstance(value, str) and not holds_messages(value):
        return [{"role": "assistant", "content": value}]
    if isinstance(as_list(value), list):
        return dialogue_prompt(row, column)
    message = message_of(parsed_text(value) if isinstance(value, str) else value, column)
    if not isinstance(message, dict):
        raise BadRow("wrong_type", f"{column} is {kind_of(value)}, neither text nor a message")
    if message.get("role") != "assistant":
        raise BadRow("no_assistant_turn", f"{column} is a message of the role {message.get('role')!r}")
    return [message]


def _turns(text: str) -> list[Message]:
    """Returns the messages of a text prompt: one of the user, or those of a dialogue with marks (HH-RLHF,
    Nectar, HelpSteer 2, where the first turn has no mark)."""
    if text.startswith(_HUMAN_TURN) and text.rstrip().endswith(_ASSISTANT_TURN):
        return _turns_of_marks([part.strip() for part in _MARKED_TURN.split(text)[1:-2]])
    return _turns_of_marks(["User", *re.split(r"\n<extra_id_1>(User|Assistant)\n", text)])


def _turns_of_marks(parts: Sequence[str]) -> list[Message]:
    roles = {"Human": "user", "User": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[mark], "content": words} for mark, words in turns]


def _pair(row: Row, prompt: Any, chosen: Any, rejected: Any) -> Pair:
    is_text = isinstance(prompt, str)
    for column, completion in zip(SIDES, (chosen, rejected), strict=True):
        values = [completion]
        if not is_text:  # what counts is all but role and name: content, tool calls, ...
            values = [m[key] for m in completion for key in m.keys() - {"role", "name"}]
        if not any(value.strip() if isinstance(value, str) else value for value in values):
            raise BadRow("empty_completion", f"the {column} completion is empty")
        is_asking = is_text and completion.rfind(_HUMAN_TURN) > completion.rfind(_ASSISTANT_TURN)
        if is_asking and prompt.rstrip().endswith(_ASSISTANT_TURN):
            detail = f"{column} ends with a turn of the human ({_HUMAN_TURN!r})"
            raise BadRow("no_assistant_turn", f"{detail}, and only answers are scored")
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        weight=weight_of(row),
        template_options={} if is_text else template_options_of(row),
    )


def _implicit_prompt_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the length of the common prompt in characters or messages, as TRL's `extract_prompt` finds it:
    a space at its end belongs to the completions, and each completion has an element."""
    shorter = min(len(chosen), len(rejected))
    for length in range(shorter):
        if chosen[length] != rejected[length]:
            return length - (length > 0 and chosen[length - 1] == " ")
    return max(shorter - 1, 0)


def _check_last_turns(chosen: list[Message], rejected: list[Message]) -> None:
    """Raises BadRow unless chosen and rejected are equal before their last turns of the assistant, to which
    tool calls and results belong. Else the prompt is longer than their common beginning."""
    prompts = []
    for column, messages in zip(SIDES, (chosen, rejected), strict=True):
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise BadRow("no_assistant_turn", f"{column} has no message of the role assistant")
        start = len(roles) - 1 - roles[::-1].index("assistant")
        while start > 0 and roles[start - 1] not in ("system", "developer", "user"):
            start -= 1
        prompts.append(messages[:start])
    if prompts[0] != prompts[1]:
        detail = "no prompt column, and chosen and rejected differ before their last answer"
        raise BadRow("no_common_prompt", detail)
    if not prompts[0]:
        raise BadRow("no_common_prompt", "no prompt column, and chosen has no message before its last answer")


_NO_OUTPUTS = {"preferred_output": "", "non_preferred_output": ""}  # of OpenAI, where prompts suffice

# Of all formats that match and can read a row, `format: auto` takes the first.
FORMATS: dict[str, Format] = {
    "tokenized": Format(
        content="token_ids",
        completion_columns=("chosen_ids", "rejected_ids"),
        prompt_column="prompt_ids",
        pair=tokenized,
        prompt=lambda row: Pair(prompt=token_ids_of(row, "prompt_ids")),
    ),
    "conversational": Format(pair=conversational, prompt=conversational_prompt),
    "openai": Format(
        completion_columns=("preferred_output", "non_preferred_output"),
        prompt_column="input",
        pair=lambda row: with_system(row, conversational(openai(row))),
        prompt=lambda row: with_system(row, conversational_prompt(openai({**_NO_OUTPUTS, **row}))),
    ),
    "swift": Format(
        completion_columns=("messages", "rejected_response"),
        prompt_column="messages",
        pair=lambda row: with_system(row, conversational(swift(row))),
        prompt=lambda row: with_system(row, conversational_prompt(swift({"rejected_response": "", **row}))),
    ),
    "transcript": Format(
        content="text",
        prompt_column=None,
        pair=transcript,
        prompt=lambda row: Pair(prompt=transcript(row).prompt),
    ),
    "messages": Format(
        prompt_column="messages", **_as_messages(lambda row: dialogue_prompt(row, "messages"))
    ),
    "sharegpt": Format(
        prompt_column="conversations", **_as_messages(lambda row: dialogue_prompt(row, "conversations"))
    ),
    "alpaca": Format(prompt_column="instruction", **_as_messages(alpaca_prompt)),
    "compared": Format(
        completion_columns=("first", "second"),
        **_as_messages(lambda row: dialogue_prompt(row, "prompt") if "prompt" in row else None, compared),
    ),
    "ranked": Format(
        completion_columns=("answers",),
        **_as_messages(lambda row: dialogue_prompt(row, "prompt"), ranked),
    ),
    "pictured": Format(**_as_messages(lambda row: [{"role": "user", "content": text_of(row, "prompt")}])),
    "preference": Format(content="text", infers_prompts=True, pair=preference, prompt=preference_prompt),
}
# In place of `transcript`, where the source has `turns: messages`.
TRANSCRIPT_TURNS = Format(
    prompt_column=None, pair=transcript_turns, prompt=lambda row: Pair(prompt=transcript_turns(row).prompt)
)
