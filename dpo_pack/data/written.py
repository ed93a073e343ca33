"""Does the chat template write every text of a row? A row that it writes in part only is a bad row.

A template may pass over roles, keys, parts, calls and reasoning without an error. So the texts of a row must
be in its rendering, in their order. Where one is not, and once for each shape of rows, the template gets
marks in place of the texts: a text whose mark is missing is not written.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, NamedTuple

from dpo_pack.data.formats import Pair
from dpo_pack.data.tokenizer import Tokenizer, rendering
from dpo_pack.data.values import BadRow, Message

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "id", *_REASONING_KEYS}
_FIELDS_OF_PARTS = {"thinking": "reasoning", "text": "content", "content": "content"}
THINKING = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")  # templates cut a content at these marks
_SHAPES = 4096  # are remembered
_UNRENDERED = 1000  # problems of a row that the template refuses
_QUICK = 32  # characters
MESSAGE_KEY = "message_keys_not_written/"  # begins the names of counts
_TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}  # for any
# A list of parts, an object and JSON in JSON, as a template prints what it should have taken apart.
_PRINTED = re.compile(r"""\[\{['"]type['"]: ?['"]\w*text['"]|\\"qz\d+zq|\{'\w+': 'qz\d+zq""")
_PRINTED_BY_PYTHON = re.compile(r"\[\{'type': '|\{'\w+': 'qz\d|\['qz\d")
# Ids and numbers of calls, which are no part of a shape. Some templates want ids of nine characters.
_IDS = re.compile(r'("(?:\w*_)?id": )"[^"]*"')
_NUMBERS = re.compile(r"(?<=[\[ ])-?\d[\d.e+-]*(?=[,\]}])")

Change = Callable[[str, str], str]  # of the field "content", "reasoning" or "tool_calls", and a text of it


class Text(NamedTuple):
    """A text of a message."""

    message: int  # from 0, in prompt and completion together
    field: str
    text: str


class Known(NamedTuple):
    """How a template writes the rows of a shape."""

    lost: frozenset[int] = frozenset()  # the numbers of the texts that it does not write
    prints: bool = False  # it prints a list of parts or an object as Python does
    changes: tuple[str, ...] = ()  # the CHANGES with which it writes more


class Suited(NamedTuple):
    """A pair in the form that the chat template writes."""

    pair: Pair
    changes: tuple[str, ...]  # the names of the CHANGES made
    known: tuple[Known, ...]  # of prompt + chosen and prompt + rejected, or of the prompt alone


# ---- Forms of messages


def _developer_as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _texts_as_parts(message: Message) -> Message:
    parts = [{"type": "text", "text": message["content"]}]
    return {**message, "content": parts} if isinstance(message["content"], str) else message


def _parts_as_text(message: Message) -> Message:
    """Joins parts if each is a text, whatever a provider's API calls it."""
    parts, aside = message["content"], {"type", "text", "cache_control", "annotations"}
    if not isinstance(parts, list):
        return message
    texts: list[Any] = [p.get("text") if isinstance(p, dict) and p.keys() <= aside else p for p in parts]
    return {**message, "content": "\n".join(texts)} if all(isinstance(t, str) for t in texts) else message


def _with_arguments(change: Callable[[Any], Any], message: Message) -> Message:
    def changed(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        has_arguments = isinstance(call, dict) and "arguments" in call
        return {**call, "arguments": change(call["arguments"])} if has_arguments else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(changed, calls))} if isinstance(calls, list) else message


def _parsed(arguments: Any) -> Any:
    """Returns the object whose JSON text the arguments of a call are; other arguments unchanged."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _dumped(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


# Other forms of a message that say the same. The first ones with which the template writes more are taken.
CHANGES: dict[str, Callable[[Message], Message]] = {
    "developer_as_system": _developer_as_system,
    "parts_joined": _parts_as_text,
    "texts_as_parts": _texts_as_parts,
    "arguments_as_objects": partial(_with_arguments, _parsed),
    "arguments_as_text": partial(_with_arguments, _dumped),
}


def suited(pair: Pair, tokenizer: Tokenizer) -> Suited:
    """Returns the pair with the CHANGES with which the chat template writes more of it; mostly none."""
    of_shape = dict(pair.template_options)
    if isinstance(tools := of_shape.get("tools"), list) and tools:
        has_function = isinstance(tools[0], dict) and "function" in tools[0]
        of_shape["tools"] = [{"type": "function", "function": _TOOL} if has_function else _TOOL]
    options = json.dumps(of_shape, default=str)
    names: tuple[str, ...] = ()
    while True:
        parts: Any = (pair.prompt, pair.chosen, pair.rejected)
        prompt, num_prompt = tuple(map(_shape_of, parts[0])), len(parts[0])
        sides = [prompt + tuple(map(_shape_of, part)) for part in (parts[1:] if pair.chosen else ([],))]
        known = tuple(known_shape(tokenizer, side, num_prompt, options) for side in sides)
        changes = {name for side in known for name in side.changes}
        if names or not changes:
            return Suited(pair, names, known)
        names = tuple(name for name in CHANGES if name in changes)
        for name in names:
            parts = [[CHANGES[name](message) for message in part] for part in parts]
        pair = replace(pair, prompt=parts[0], chosen=parts[1], rejected=parts[2])


# ---- Shapes: what a template can branch on, texts aside


@lru_cache(maxsize=_SHAPES)
def known_shape(
    tokenizer: Tokenizer, shapes: tuple[str | tuple[str, bool], ...], num_prompt: int, json_options: str
) -> Known:
    """Renders messages of these shapes with marks for texts; if one is missing, in forms of CHANGES too."""
    messages: Any = [
        json.loads(shape)
        if isinstance(shape, str)
        else {"role": shape[0], "content": "x" if shape[1] else ""}
        for shape in shapes
    ]
    options = json.loads(json_options)
    texts, marked = _take_texts(messages, lambda n, text: f"qz{n}zq" if text.strip() else text)
    required = [
        f"qz{number}zq"
        for number, text in enumerate(texts)
        if text.text and not (text.field == "reasoning" and text.message < num_prompt)
    ]
    changes: tuple[str, ...] = ()
    problems, rendered = _UNRENDERED + 1, ""
    for names in ((), *combinations(CHANGES, 1), *combinations(CHANGES, 2)):
        if problems < (_UNRENDERED if len(names) == 2 else 1):  # two at once where none alone is rendered
            break
        changed = marked
        for name in names:
            changed = [CHANGES[name](message) for message in changed]
        if names and changed == marked:
            continue
        fewer, other = _UNRENDERED, ""
        with suppress(BadRow):
            other = _render(changed, options, tokenizer)
            # Marks that are missing, or in a form that only a program prints.
            printed = len(_PRINTED.findall(other)) + len(_PRINTED_BY_PYTHON.findall(other))
            fewer = sum(mark not in other for mark in required) + printed
        if fewer < problems:
            problems, rendered, marked, changes = fewer, other, changed, (*changes, *names)
    if problems >= _UNRENDERED:  # each row says why
        return Known(changes=changes)
    return Known(
        lost=frozenset(int(mark[2:-2]) for mark in required if mark not in rendered),
        prints=_PRINTED_BY_PYTHON.search(rendered) is not None,
        changes=changes,
    )


def _shape_of(message: Message) -> str | tuple[str, bool]:
    """Returns JSON of a message without its texts; of a plain message its role, and if it has text."""
    if _is_plain(message):
        content = message["content"]
        return message["role"], bool(content) and not content.isspace()
    shape = json.dumps(_mapped(message, lambda field, text: "x" if text.strip() else ""))
    return _IDS.sub(r'\1"000000000"', _NUMBERS.sub("1", shape))


def _is_plain(message: Message) -> bool:
    content = message["content"]
    if len(message) != 2 or type(content) is not str:
        return False
    return not ("think>" in content or "thinking>" in content or "THINK]" in content)  # see THINKING


# ---- Rows


def check_written(
    row: Suited, texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[dict[str, int], list[list[str]]]:
    """Raises BadRow if the rendered `texts` (as of ReadRow) lack a text of a message.

    Returns the texts of the messages of prompt, chosen and rejected, and counts: the row's `characters` (a
    prompt's once for each side); a 1 for each of the CHANGES made; `characters_of_earlier_reasoning` that the
    template leaves out, as many do by design; `texts_changed` by it; tools and keys that are not written.
    """
    parts: Any = (row.pair.prompt, row.pair.chosen, row.pair.rejected)
    contents = [
        [message["content"].strip()]
        if len(part) == 1 and _is_plain(message := part[0])
        else [text.text.strip() for text in _take_texts(part)[0]]
        for part in parts
    ]
    counts = Counter[str](row.changes)
    sides = (1, 2) if row.pair.chosen else (0,)  # of `parts`
    for side, known, rendered in zip(sides, row.known, texts[1:] or texts, strict=True):
        name = ("prompt", "chosen", "rejected")[side]
        if known.prints:
            detail = f"the chat template prints a list or object of prompt or {name} as Python does"
            raise BadRow("text_not_written", f"{detail}, not its texts")
        suspects, at = set(known.lost), 0
        for number, text in enumerate(contents[0] + contents[side] if side else contents[0]):
            found = rendered.find(text[:_QUICK], at)  # much faster than to look for the whole text
            if found >= 0 and not rendered.startswith(text, found):
                found = rendered.find(text, at)
            if found < 0:
                suspects.add(number)
            else:
                at = found + len(text)
            counts["characters"] += len(text)
        if suspects or not (side and any(contents[side])):
            told = _look_closely(row.pair, side, sorted(suspects), known, rendered, tokenizer)
            counts.update({key: number for key, number in told.items() if "characters" in key})
            counts["texts_changed"] |= told["texts_changed"]
    template = str(tokenizer.chat_template)
    for message in (message for part in parts for message in part if len(message) > 2):
        for key in message.keys() - _KNOWN_KEYS:
            if key not in template and not any(key in text for text in texts):
                counts[f"{MESSAGE_KEY}{key}"] = 1
    counts["tools_not_written"] = int(_lacks_tools(row.pair.template_options.get("tools") or (), texts[0]))
    return +counts, contents


def _look_closely(
    pair: Pair, side: int, suspects: Sequence[int], known: Known, rendered: str, tokenizer: Tokenizer
) -> Counter[str]:
    """Counts texts changed, and earlier reasoning left out; raises BadRow for others. `side`: of `parts`."""
    parts: Any = (pair.prompt, pair.chosen, pair.rejected)
    messages, num_prompt = parts[0] + (parts[side] if side else []), len(pair.prompt)
    texts, _ = _take_texts(messages)
    lost, told = list[int](), Counter[str]()
    for number in suspects:
        text = texts[number].text
        if not text.strip() or (number not in known.lost and _is_in(text, rendered)):
            continue
        if texts[number].field == "reasoning" and texts[number].message < num_prompt:
            told["characters_of_earlier_reasoning"] += len(text)
            continue
        # Marks at both ends: a template may read a text, or change it.
        _, changed = _take_texts(messages, {number: f"qzbeginzq {text} qzendzq"}.get)
        is_read = True  # if the template refuses the marks: it wants another text
        with suppress(BadRow):
            again = _render(changed, pair.template_options, tokenizer)
            is_read = "qzbeginzq" in again and "qzendzq" in again
        told["texts_changed"] |= is_read
        lost += [] if is_read else [number]
    name = ("prompt", "chosen", "rejected")[side]
    answer = {n for n, text in enumerate(texts) if text.message >= num_prompt and text.text.strip()}
    no_answer = [*parts[0], {"role": "assistant", "content": ""}]
    if (
        side
        and answer <= set(lost)
        and rendered.lower() == _render(no_answer, pair.template_options, tokenizer)
    ):
        raise BadRow("empty_completion", f"the chat template writes nothing of {name}")
    if lost:
        raise _not_written(texts[lost[0]], messages, num_prompt, name)
    return told


def _not_written(text: Text, messages: Sequence[Message], num_prompt: int, side: str) -> BadRow:
    is_prompt, role = text.message < num_prompt, messages[text.message]["role"]
    number = text.message + 1 if is_prompt else text.message - num_prompt + 1
    is_usual = role in ("system", "user", "assistant", "tool")
    reasons = {"reasoning": "reasoning_not_written", "tool_calls": "call_not_written"}
    reason = reasons.get(text.field, "text_not_written" if is_usual else "role_not_written")
    quote = text.text.strip() if len(text.text) <= 40 else text.text.strip()[:37] + "..."
    field = text.field.replace("tool_calls", "tool call")
    where = f"message {number} of {'prompt' if is_prompt else side} (role {role!r})"
    return BadRow(reason, f"the chat template does not write the {field} of {where}: {quote!r}")


def _lacks_tools(tools: Sequence[Any], rendered: str) -> bool:
    """Whether a prompt lacks a name or description of its tools, or of what they take."""
    schemas = list(tools)
    for schema in schemas:  # grows
        for key, value in schema.items() if isinstance(schema, dict) else ():
            texts = [value] if isinstance(value, str) and key in ("name", "description") else []
            if isinstance(value, dict):
                texts = list(map(str, value)) if key == "properties" else []
                schemas += value.values() if key == "properties" else [value]
            if not all(_is_in(text, rendered) for text in texts):
                return True
    return False


def _is_in(text: str, rendered: str) -> bool:
    """JSON's escapes aside."""
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any(form.strip() in rendered for form in forms)


def _render(messages: list[Message], options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    with rendering():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options)).lower()


# ---- Texts of messages


def _take_texts(
    messages: Sequence[Message], change: Callable[[int, str], str | None] = lambda number, text: text
) -> tuple[list[Text], list[Message]]:
    """Returns the texts of messages, and the messages with `change(number, text)` in the place of each."""
    texts: list[Text] = []

    def take(field: str, text: str) -> str:
        texts.append(Text(len(changed), field, text))
        return change(len(texts) - 1, text) or text

    changed: list[Message] = []
    for message in messages:
        changed.append(_mapped(message, take))
    return texts, changed


def _mapped(message: Message, change: Change) -> Message:
    """Returns the message with `change` applied to each text that is to be written."""
    mapped = dict(message)
    for key in _REASONING_KEYS:
        if isinstance(mapped.get(key), str):
            mapped[key] = change("reasoning", mapped[key])
    mapped["content"] = _mapped_content(mapped.get("content"), change)
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        mapped["tool_calls"] = [_mapped_call(call, partial(change, "tool_calls")) for call in calls]
    elif message.get("content") is None:  # the text may be in keys that only this template knows, or none
        for key in [key for key in message if key not in (*_KNOWN_KEYS, "name", "function_call")]:
            mapped[key] = _mapped_leaves(message[key], partial(change, key))
    if "function_call" in message:  # OpenAI's older form of a call
        mapped["function_call"] = _mapped_leaves(message["function_call"], partial(change, "tool_calls"))
    return mapped


def _mapped_leaves(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped_leaves(inner, change) for key, inner in value.items()}
    return [_mapped_leaves(inner, change) for inner in value] if isinstance(value, list) else value


def _mapped_content(content: Any, change: Change) -> Any:
    if isinstance(content, str):
        parts = THINKING.split(content)
        for at in range(0, len(parts), 2):
            is_thought = at + 1 < len(parts) and "/" in parts[at + 1]
            parts[at] = change("reasoning" if is_thought else "content", parts[at])
        return "".join(parts)
    return [_mapped_part(part, change) for part in content] if isinstance(content, list) else content


def _mapped_part(part: Any, change: Change) -> Any:
    if not isinstance(part, dict):
        return change("content", part) if isinstance(part, str) else part
    is_known, mapped = not part.keys().isdisjoint(_FIELDS_OF_PARTS), dict(part)
    for key, value in part.items():
        field = _FIELDS_OF_PARTS.get(key, "content")
        if key == "content":
            mapped[key] = _mapped_content(value, change)
        elif key in _FIELDS_OF_PARTS or not (is_known or key == "type" or key.endswith("id")):
            mapped[key] = _mapped_leaves(value, partial(change, field))
    return mapped


def _mapped_call(call: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mapped_call(call["function"], change)}
    mapped = {**call, **{key: _mapped_leaves(call[key], change) for key in ("name",) if key in call}}
    if "arguments" in call:
        arguments = _parsed(call["arguments"])
        mapped["arguments"] = _mapped_leaves(arguments, change)
        if arguments is not call["arguments"]:  # it is JSON
            mapped["arguments"] = _dumped(mapped["arguments"])
    return mapped
