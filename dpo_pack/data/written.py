"""Does the chat template write every text of a row? A row that it writes in part only is a bad row.

A template may pass over roles, keys, parts, calls and reasoning without an error. So the texts of a row must
be in its rendering, in their order. Where one is not, and once for each shape of rows, the template gets
marks in place of the texts: a text whose mark is missing is not written.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, count
from typing import Any, NamedTuple

from dpo_pack.data.formats import BadRow, Message, Pair
from dpo_pack.data.tokenizer import Tokenizer, rendering

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINKING = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")  # templates cut a content at these marks
_SHAPES = 4096  # are remembered
_UNRENDERED = 1000  # problems of a row that the template refuses
_QUICK = 32  # characters
_MARK = "qz{}zq"
_TOOL_MARKS = ("qznamezq", "qztextzq", "qzparameterzq")
_MARKED_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_MARKS[0],
        "description": _TOOL_MARKS[1],
        "parameters": {
            "type": "object",
            "properties": {_TOOL_MARKS[2]: {"type": "string", "description": "x"}},
            "required": [_TOOL_MARKS[2]],
        },
    },
}
# A list of parts, an object and JSON in JSON, as a template prints what it should have taken apart.
_PRINTED = re.compile(r"""\[\{['"]type['"]: ?['"]text['"]|\\"qz\d+zq|\{'\w+': 'qz\d+zq""")


# Ids and numbers of calls, which are no part of a shape. Some templates want ids of nine characters.
_IDS = re.compile(r'("(?:\w*_)?id": )"[^"]*"')
_NUMBERS = re.compile(r"(?<=[\[ ])-?\d[\d.e+-]*(?=[,\]}])")


class Text(NamedTuple):
    """A text of a message."""

    message: int  # from 0, in prompt and completion together
    field: str  # "content", "reasoning" or "tool_calls"
    text: str


class Shape(NamedTuple):
    """What a template can branch on, texts aside: roles, keys, which texts are blank, marks of thinking."""

    messages: tuple[str | tuple[str, bool], ...]  # JSON; of a plain message its role, and if it has text
    num_prompt: int
    options: str  # JSON of chat_template_kwargs
    has_tools: bool


class Known(NamedTuple):
    """How a template writes the rows of a shape."""

    lost: frozenset[int]  # the numbers of the texts that it does not write
    misses_tools: bool  # it leaves out names or descriptions of functions or parameters
    changes: tuple[str, ...]  # the CHANGES with which it writes more


def _texts_as_parts(message: Message) -> Message:
    if not isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _parts_as_text(message: Message) -> Message:
    parts = message["content"]
    if not isinstance(parts, list) or any(
        not isinstance(p, dict) or set(p) != {"type", "text"} for p in parts
    ):
        return message
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    def changed(call: Any) -> Any:
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return (
        {**message, "tool_calls": [changed(c) for c in message["tool_calls"]]} if _calls(message) else message
    )


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(call, dict) for call in calls) else []


def _parsed(arguments: Any) -> Any:
    """Returns the object whose JSON text the arguments of a call are; other arguments unchanged."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# Other forms of a message that say the same. The first ones with which the template writes more are taken.
CHANGES: dict[str, Callable[[Message], Message]] = {
    "developer_as_system": lambda message: (
        {**message, "role": "system"} if message["role"] == "developer" else message
    ),
    "parts_joined": _parts_as_text,
    "texts_as_parts": _texts_as_parts,
    "arguments_as_objects": lambda message: _with_arguments(message, _parsed),
    "arguments_as_text": lambda message: _with_arguments(
        message, lambda value: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    ),
}


class Suited(NamedTuple):
    """A pair in the form that the chat template writes."""

    pair: Pair
    changes: tuple[str, ...]  # the names of the CHANGES made
    known: tuple[Known, ...]  # of prompt + chosen and prompt + rejected, or of the prompt alone


def suited(pair: Pair, tokenizer: Tokenizer) -> Suited:
    """Returns the pair with the CHANGES with which the chat template writes more of it; mostly none."""
    known = _known_sides(tokenizer, pair)
    changes = {name for side in known for name in side.changes}
    if not changes:
        return Suited(pair, (), known)
    names = tuple(name for name in CHANGES if name in changes)
    parts: list[Any] = [pair.prompt, pair.chosen, pair.rejected]
    for name in names:
        parts = [[CHANGES[name](message) for message in part] for part in parts]
    pair = replace(pair, prompt=parts[0], chosen=parts[1], rejected=parts[2])
    return Suited(pair, names, _known_sides(tokenizer, pair))


def check_written(row: Suited, texts: Sequence[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Raises BadRow if the rendered `texts` lack a text of a message.

    `texts` are those of the prompt and, of a pair, of prompt + chosen and prompt + rejected. Returns counts:
    the row's `characters` (a prompt's once for each side); a 1 for each of the CHANGES made;
    `characters_of_earlier_reasoning` that the template leaves out, as many do by design; and
    `tools_not_written`.
    """
    pair, characters, left_out = row.pair, 0, 0
    prompt: Any = pair.prompt
    parts: Any = (pair.chosen, pair.rejected) if pair.chosen else ([],)
    contents = [texts_of(part) for part in parts]
    of_prompt = texts_of(prompt)
    for side, known, of_part, rendered in zip(
        _sides(pair), row.known, contents, texts[1:] or texts, strict=True
    ):
        suspects, at = set(known.lost), 0
        for number, text in enumerate((*of_prompt, *of_part)):
            found = rendered.find(text[:_QUICK], at)  # much faster than to look for the whole text
            if found >= 0 and not rendered.startswith(text, found):
                found = rendered.find(text, at)
            if found < 0:
                suspects.add(number)
            else:
                at = found + len(text)
            characters += len(text)
        if suspects or not any(of_part):
            left_out += _left_out(pair, side, sorted(suspects), known, rendered, tokenizer)
    counts = {"characters": characters, **dict.fromkeys(row.changes, 1)}
    if left_out:
        counts["characters_of_earlier_reasoning"] = left_out
    if any(known.misses_tools for known in row.known):
        counts["tools_not_written"] = 1
    return counts


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Returns the texts of messages without white space at their ends."""
    found: list[str] = []
    for message in messages:
        if _is_plain(message):
            found.append(message["content"].strip())
        else:
            found += (text.text.strip() for text in _texts([message]))
    return found


def _left_out(
    pair: Pair, side: str, suspects: Sequence[int], known: Known, rendered: str, tokenizer: Tokenizer
) -> int:
    """Returns how many characters of earlier reasoning are not written; raises BadRow for any other text."""
    messages, num_prompt, left_out = _messages(pair, side), len(pair.prompt), 0
    texts = list(_texts(messages))
    lost = []
    for number in suspects:
        text = texts[number]
        if not text.text.strip() or (number not in known.lost and _is_in(text.text, rendered)):
            continue
        if _may_be_left_out(text, num_prompt):
            left_out += len(text.text)
        elif not _mark_is_written(messages, number, pair.template_options, tokenizer):
            lost.append(number)
    answer = {n for n, text in enumerate(texts) if text.message >= num_prompt and text.text.strip()}
    if side != "prompt" and answer <= set(lost) and rendered == _with_no_answer(pair, tokenizer):
        raise BadRow("empty_completion", f"the chat template writes nothing of {side}")
    if lost:
        raise _not_written(texts[lost[0]], messages, num_prompt, side)
    return left_out


def _not_written(text: Text, messages: Sequence[Message], num_prompt: int, side: str) -> BadRow:
    is_prompt = text.message < num_prompt
    number = text.message + 1 if is_prompt else text.message - num_prompt + 1
    role = messages[text.message]["role"]
    reason = {"reasoning": "reasoning_not_written", "tool_calls": "call_not_written"}.get(text.field)
    if reason is None:
        is_usual = role in ("system", "user", "assistant", "tool")
        reason = "text_not_written" if is_usual else "role_not_written"
    field = {"tool_calls": "tool call"}.get(text.field, text.field)
    quote = text.text.strip() if len(text.text) <= 40 else text.text.strip()[:37] + "..."
    return BadRow(
        reason,
        f"the chat template does not write the {field} of message {number} of "
        f"{'prompt' if is_prompt else side} (role {role!r}): {quote!r}",
    )


@lru_cache(maxsize=_SHAPES)
def known_shape(tokenizer: Tokenizer, shape: Shape) -> Known:
    """Renders a row of this shape whose texts are marks; in the forms of CHANGES too if a mark is missing."""
    messages = [
        json.loads(part) if isinstance(part, str) else {"role": part[0], "content": "x" if part[1] else ""}
        for part in shape.messages
    ]
    options = {**json.loads(shape.options), **({"tools": [_MARKED_TOOL]} if shape.has_tools else {})}
    required = [
        _MARK.format(number)
        for number, text in enumerate(_texts(messages))
        if text.text and not _may_be_left_out(text, shape.num_prompt)
    ]
    marked = _marked(messages)
    changes: tuple[str, ...] = ()
    problems, rendered = _problems(marked, required, options, tokenizer)
    for names in (*combinations(CHANGES, 1), *combinations(CHANGES, 2)):
        if problems < (_UNRENDERED if len(names) == 2 else 1):  # two at once where none alone is rendered
            break
        changed = marked
        for name in names:
            changed = [CHANGES[name](message) for message in changed]
        if changed != marked:
            fewer, other = _problems(changed, required, options, tokenizer)
            if fewer < problems:
                problems, rendered, marked, changes = fewer, other, changed, (*changes, *names)
    if problems >= _UNRENDERED:  # each row says why
        return Known(frozenset(), False, changes)
    lost = frozenset(int(mark[2:-2]) for mark in required if mark not in rendered)
    misses_tools = shape.has_tools and any(mark not in rendered for mark in _TOOL_MARKS)
    return Known(lost, misses_tools, changes)


def _problems(
    marked: list[Message], required: Sequence[str], options: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[int, str]:
    """Returns how many marks are missing or are in a form that only a program prints, and the rendering."""
    try:
        rendered = _rendered(marked, options, tokenizer)
    except BadRow:
        return _UNRENDERED, ""
    missing = sum(mark not in rendered for mark in required)
    return missing + len(_PRINTED.findall(rendered)), rendered


def _known_sides(tokenizer: Tokenizer, pair: Pair) -> tuple[Known, ...]:
    prompt: Any = pair.prompt
    parts: Any = (pair.chosen, pair.rejected) if pair.chosen else ([],)
    beginning, options, has_tools = [*map(_shape_of, prompt)], "{}", False
    if pair.template_options:
        has_tools = "tools" in pair.template_options
        options = json.dumps({k: v for k, v in pair.template_options.items() if k != "tools"}, default=str)
    sides = [[*beginning, *map(_shape_of, part)] for part in parts]
    known = known_shape(tokenizer, Shape(tuple(sides[0]), len(prompt), options, has_tools))
    if len(sides) == 1 or sides[0] == sides[1]:
        return (known,) * len(sides)
    return known, known_shape(tokenizer, Shape(tuple(sides[1]), len(prompt), options, has_tools))


def _shape_of(message: Message) -> str | tuple[str, bool]:
    if _is_plain(message):
        content = message["content"]
        return message["role"], bool(content) and not content.isspace()
    shape = json.dumps(_mapped(message, lambda field, text: "x" if text.strip() else ""))
    return _IDS.sub(r'\1"000000000"', _NUMBERS.sub("1", shape))


def _sides(pair: Pair) -> tuple[str, ...]:
    return ("chosen", "rejected") if pair.chosen else ("prompt",)


def _messages(pair: Pair, side: str) -> list[Message]:
    parts: Any = {"prompt": [], "chosen": pair.chosen, "rejected": pair.rejected}
    return [*pair.prompt, *parts[side]]


def _is_plain(message: Message) -> bool:
    content = message["content"]
    return len(message) == 2 and type(content) is str and not ("think" in content or "THINK" in content)


def _texts(messages: Sequence[Message]) -> Iterator[Text]:
    for number, message in enumerate(messages):
        if _is_plain(message):
            yield Text(number, "content", message["content"])
            continue
        found: list[tuple[str, str]] = []

        def note(field: str, text: str, found: list[tuple[str, str]] = found) -> str:
            found.append((field, text))
            return text

        _mapped(message, note)
        yield from (Text(number, field, text) for field, text in found)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with a mark in place of each text that is not blank."""
    numbers = count()

    def mark(field: str, text: str) -> str:
        number = next(numbers)
        return _MARK.format(number) if text.strip() else text

    return [_mapped(message, mark) for message in messages]


def _mark_is_written(
    messages: Sequence[Message], wanted: int, options: Mapping[str, Any], tokenizer: Tokenizer
) -> bool:
    """Returns True if marks at both ends of a text are written: a template may read a text, or change it."""
    numbers = count()

    def mark(field: str, text: str) -> str:
        return f"qzbeginzq {text} qzendzq" if next(numbers) == wanted else text

    try:
        rendered = _rendered([_mapped(message, mark) for message in messages], options, tokenizer)
    except BadRow:  # the template reads this text, and wants another one
        return True
    return "qzbeginzq" in rendered and "qzendzq" in rendered


def _with_no_answer(pair: Pair, tokenizer: Tokenizer) -> str:
    with rendering():
        messages: Any = [*pair.prompt, {"role": "assistant", "content": ""}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **pair.template_options))


def _rendered(messages: list[Message], options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    with rendering():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options)).lower()


def _is_in(text: str, rendered: str) -> bool:
    """Returns True if the rendering has the text, white space and JSON's escapes aside."""
    squeezed = "".join(rendered.split())
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any("".join(form.split()) in squeezed for form in forms)


def _may_be_left_out(text: Text, num_prompt: int) -> bool:
    return text.field == "reasoning" and text.message < num_prompt


def _mapped(message: Message, change: Callable[[str, str], str]) -> Message:
    """Returns the message with `change` applied to (field, text) of each text that is to be written."""
    mapped = dict(message)
    for key in _REASONING_KEYS:
        if isinstance(mapped.get(key), str):
            mapped[key] = change("reasoning", mapped[key])
    mapped["content"] = _mapped_content(mapped.get("content"), change)
    if _calls(message):
        mapped["tool_calls"] = [_mapped_call(call, change) for call in message["tool_calls"]]
    return mapped


def _mapped_content(content: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(content, str):
        parts = THINKING.split(content)
        for at in range(0, len(parts), 2):
            is_thought = at + 1 < len(parts) and "/" in parts[at + 1]
            parts[at] = change("reasoning" if is_thought else "content", parts[at])
        return "".join(parts)
    mapped = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            part = change("content", part)
        elif isinstance(part, dict):
            part = dict(part)
            for name, field in (("thinking", "reasoning"), ("text", "content")):
                if isinstance(part.get(name), str):
                    part[name] = change(field, part[name])
            if "content" in part:
                part["content"] = _mapped_content(part["content"], change)
        mapped.append(part)
    return mapped if isinstance(content, list) else content


def _mapped_call(call: Message, change: Callable[[str, str], str]) -> Message:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mapped_call(call["function"], change)}

    def mapped(value: Any) -> Any:
        if isinstance(value, str):
            return change("tool_calls", value)
        if isinstance(value, dict):
            return {key: mapped(inner) for key, inner in value.items()}
        return [mapped(inner) for inner in value] if isinstance(value, list) else value

    arguments = _parsed(call.get("arguments"))
    is_json = arguments is not call.get("arguments")
    changed = {
        name: mapped(value)
        for name, value in {**call, "arguments": arguments}.items()
        if name in call and name in ("name", "arguments")
    }
    if is_json:
        changed["arguments"] = json.dumps(changed["arguments"], ensure_ascii=False)
    return {**call, **changed}
