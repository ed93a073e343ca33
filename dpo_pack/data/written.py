"""Does the chat template write every text of a row? A row that it writes in part only is a bad row.

A template may pass over roles, keys, parts, calls and reasoning without an error. So the texts of a row must
be in its rendering, in their order. Where one is not, and once for each shape of rows, the template gets
marks in place of the texts: a text whose mark is missing is not written.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, NamedTuple

from dpo_pack.data.formats import BadRow, Message, Pair
from dpo_pack.data.tokenizer import Tokenizer, rendering

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "id", *_REASONING_KEYS}
THINKING = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")  # templates cut a content at these marks
_SHAPES = 4096  # are remembered
_UNRENDERED = 1000  # problems of a row that the template refuses
_QUICK = 32  # characters
_MARK = "qz{}zq"
TOOL_KEY, MESSAGE_KEY = "tool_keys_not_written/", "message_keys_not_written/"  # begin the names of counts
_PARAMETER = "qzparameterzq"  # the name of one
_STRUCTURE = ("function", "parameters", "properties")  # keys of tools
# A list of parts, an object and JSON in JSON, as a template prints what it should have taken apart.
_PRINTED = re.compile(r"""\[\{['"]type['"]: ?['"]\w*text['"]|\\"qz\d+zq|\{'\w+': 'qz\d+zq""")
_PRINTED_BY_PYTHON = re.compile(r"\[\{'type': '|\{'\w+': 'qz\d|\['qz\d")


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
    tool_keys: frozenset[tuple[str, str]]  # see `_tool_keys`; empty: no tools


class Known(NamedTuple):
    """How a template writes the rows of a shape."""

    lost: frozenset[int]  # the numbers of the texts that it does not write
    prints: bool  # it prints a list of parts or an object as Python does
    misses_tools: bool  # it leaves out names or descriptions of functions or parameters
    tool_keys: frozenset[str]  # other keys of the tools' schemas that it leaves out
    changes: tuple[str, ...]  # the CHANGES with which it writes more


def _texts_as_parts(message: Message) -> Message:
    if not isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _parts_as_text(message: Message) -> Message:
    """Joins parts if each is a text, whatever a provider's API calls it."""
    parts, aside = message["content"], {"type", "text", "cache_control", "annotations"}
    if not isinstance(parts, list):
        return message
    texts: list[Any] = [p.get("text") if isinstance(p, dict) and p.keys() <= aside else p for p in parts]
    return {**message, "content": "\n".join(texts)} if all(isinstance(t, str) for t in texts) else message


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
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
    tool_keys, options = frozenset[tuple[str, str]](), "{}"
    if pair.template_options:
        tool_keys = _tool_keys(pair.template_options.get("tools"))
        options = json.dumps({k: v for k, v in pair.template_options.items() if k != "tools"}, default=str)
    names: tuple[str, ...] = ()
    while True:
        parts: Any = (pair.prompt, pair.chosen, pair.rejected)
        prompt, num_prompt = tuple(map(_shape_of, parts[0])), len(parts[0])
        sides = [prompt + tuple(map(_shape_of, part)) for part in (parts[1:] if pair.chosen else ([],))]
        known = tuple(known_shape(tokenizer, Shape(side, num_prompt, options, tool_keys)) for side in sides)
        changes = {name for side in known for name in side.changes}
        if names or not changes:
            return Suited(pair, names, known)
        names = tuple(name for name in CHANGES if name in changes)
        for name in names:
            parts = [[CHANGES[name](message) for message in part] for part in parts]
        pair = replace(pair, prompt=parts[0], chosen=parts[1], rejected=parts[2])


def check_written(
    row: Suited, texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[dict[str, int], list[list[str]]]:
    """Raises BadRow if the rendered `texts` (as of ReadRow) lack a text of a message.

    Returns the texts of the messages of prompt, chosen and rejected, and counts: the row's `characters` (a
    prompt's once for each side); a 1 for each of the CHANGES made; `characters_of_earlier_reasoning` that the
    template leaves out, as many do by design; `texts_changed` by it; tools and keys that are not written.
    """
    pair, told = row.pair, Counter[str]()
    parts: Any = (pair.prompt, pair.chosen, pair.rejected)
    contents: list[list[str]] = [[], [], []]
    for texts_of_part, part in zip(contents, parts, strict=True):
        for message in part:
            if _is_plain(message):
                texts_of_part.append(message["content"].strip())
            else:
                texts_of_part += (text.text.strip() for text in _take_texts([message])[0])
    sides = (1, 2) if pair.chosen else (0,)  # of `parts`
    characters = 0
    for side, known, rendered in zip(sides, row.known, texts[1:] or texts, strict=True):
        if known.prints:
            name = ("the prompt", "prompt and chosen", "prompt and rejected")[side]
            detail = f"the chat template prints a list or object in {name} as Python does, not its texts"
            raise BadRow("text_not_written", detail)
        suspects, at = set(known.lost), 0
        for number, text in enumerate(contents[0] + contents[side] if side else contents[0]):
            found = rendered.find(text[:_QUICK], at)  # much faster than to look for the whole text
            if found >= 0 and not rendered.startswith(text, found):
                found = rendered.find(text, at)
            if found < 0:
                suspects.add(number)
            else:
                at = found + len(text)
            characters += len(text)
        if suspects or not (side and any(contents[side])):
            _look_closely(pair, side, sorted(suspects), known, rendered, tokenizer, told)
    counts = {"characters": characters, **dict.fromkeys(row.changes, 1), **+told}
    template = str(tokenizer.chat_template)
    for message in (message for part in parts for message in part if len(message) > 2):
        for key in message.keys() - _KNOWN_KEYS:
            if key not in template and not any(key in text for text in texts):
                counts[f"{MESSAGE_KEY}{key}"] = 1
    for known in row.known if pair.template_options else ():
        counts |= {"tools_not_written": 1} if known.misses_tools else {}
        counts |= {f"{TOOL_KEY}{key}": 1 for key in known.tool_keys}
    return counts, contents


def _look_closely(
    pair: Pair,
    side: int,
    suspects: Sequence[int],
    known: Known,
    rendered: str,
    tokenizer: Tokenizer,
    told: Counter[str],
) -> None:
    """Counts in `told` what is changed, or left out of earlier reasoning; raises BadRow for any other text.
    `side`: 0 is the prompt alone, 1 chosen, 2 rejected."""
    parts: Any = (pair.prompt, pair.chosen, pair.rejected)
    messages, num_prompt = parts[0] + (parts[side] if side else []), len(pair.prompt)
    texts, _ = _take_texts(messages)
    lost = []
    squeezed = "".join(rendered.split())  # white space aside
    for number in suspects:
        text = texts[number].text
        # JSON's escapes aside.
        forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
        is_there = any("".join(form.split()) in squeezed for form in forms)
        if not text.strip() or (number not in known.lost and is_there):
            told["texts_changed"] |= not any(form.strip() in rendered for form in forms)
            continue
        if texts[number].field == "reasoning" and texts[number].message < num_prompt:
            told["characters_of_earlier_reasoning"] += len(text)
            continue
        # Marks at both ends: a template may read a text, or change it.
        _, changed = _take_texts(messages, {number: f"qzbeginzq {text} qzendzq"}.get)
        with suppress(BadRow):  # the template reads this text, and wants another one
            again = _render(changed, pair.template_options, tokenizer).lower()
            is_read = "qzbeginzq" in again and "qzendzq" in again
            told["texts_changed"] |= is_read
            lost += [] if is_read else [number]
    answer = {n for n, text in enumerate(texts) if text.message >= num_prompt and text.text.strip()}
    no_answer = [*parts[0], {"role": "assistant", "content": ""}]
    name = ("prompt", "chosen", "rejected")[side]
    if side and answer <= set(lost) and rendered == _render(no_answer, pair.template_options, tokenizer):
        raise BadRow("empty_completion", f"the chat template writes nothing of {name}")
    if lost:
        raise _not_written(texts[lost[0]], messages, num_prompt, name)


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
    messages: Any = [
        json.loads(part) if isinstance(part, str) else {"role": part[0], "content": "x" if part[1] else ""}
        for part in shape.messages
    ]
    options = json.loads(shape.options)
    if shape.tool_keys:
        options["tools"] = [_marked_tool(shape.tool_keys)]
    texts, marked = _take_texts(messages, lambda n, text: _MARK.format(n) if text.strip() else text)
    required = [
        _MARK.format(number)
        for number, text in enumerate(texts)
        if text.text and not (text.field == "reasoning" and text.message < shape.num_prompt)
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
            other = _render(changed, options, tokenizer).lower()
            # Marks that are missing, or in a form that only a program prints.
            printed = len(_PRINTED.findall(other)) + len(_PRINTED_BY_PYTHON.findall(other))
            fewer = sum(mark not in other for mark in required) + printed
        if fewer < problems:
            problems, rendered, marked, changes = fewer, other, changed, (*changes, *names)
    if problems >= _UNRENDERED:  # each row says why
        return Known(frozenset(), False, False, frozenset(), changes)
    lost = frozenset(int(mark[2:-2]) for mark in required if mark not in rendered)
    prints = _PRINTED_BY_PYTHON.search(rendered) is not None
    misses_tools, left_out = False, set[str]()
    if shape.tool_keys:
        misses_tools, left_out = _missing_tools(shape, marked, options, rendered, tokenizer)
    return Known(lost, prints, misses_tools, frozenset(left_out), changes)


def _missing_tools(
    shape: Shape, messages: list[Message], options: dict[str, Any], rendered: str, tokenizer: Tokenizer
) -> tuple[bool, set[str]]:
    """Returns whether a name or description is not written, and the other keys that are left out."""
    misses, left_out = _PARAMETER in str(options["tools"]) and _PARAMETER not in rendered, set[str]()
    for kind, key in shape.tool_keys:
        if key == "name" or (key == "description" and kind != "parameters"):
            misses = misses or f"qz{kind}{key}zq" not in rendered
        elif key not in _STRUCTURE and (kind, key) != ("tool", "type"):
            tools = [_marked_tool(shape.tool_keys - {(kind, key)})]
            with suppress(BadRow):
                if _render(messages, {**options, "tools": tools}, tokenizer).lower() == rendered:
                    left_out.add(key)
    return misses, left_out


def _tool_keys(tools: Any) -> frozenset[tuple[str, str]]:
    """Returns the keys of the JSON schemas of tools, each with the kind of schema that has it."""
    found: set[tuple[str, str]] = set()
    schemas = [("tool", tool) for tool in tools] if isinstance(tools, list) else []
    for kind, schema in schemas:  # grows
        for key, value in schema.items() if isinstance(schema, dict) else ():
            found.add((kind, key))
            if key in ("function", "parameters"):
                schemas.append((key, value))
            elif key == "items":
                schemas.append(("parameter", value))
            elif key == "properties" and isinstance(value, dict):
                schemas += (("parameter", parameter) for parameter in value.values())
    return frozenset(found)


def _marked_tool(keys: Collection[tuple[str, str]]) -> dict[str, Any]:
    """Returns a tool with these keys (see `_tool_keys`), whose names and descriptions are marks."""
    schemas: dict[str, dict[str, Any]] = {"tool": {}, "function": {}, "parameters": {}, "parameter": {}}
    values = {"type": "string", "strict": True, "items": {"type": "string"}, "enum": ["x"], "properties": {}}
    for kind, key in sorted(keys):
        mark = f"qz{kind}{key}zq"
        schemas[kind][key] = [mark] if key.endswith("Of") else values.get(key, mark)
    of_all = {"type": "object", "properties": {_PARAMETER: schemas["parameter"]}, "required": [_PARAMETER]}
    for key in of_all.keys() & schemas["parameters"].keys() if schemas["parameter"] else ():
        schemas["parameters"][key] = of_all[key]
    for owner, key in (("function", "parameters"), ("tool", "parameters"), ("tool", "function")):
        if key in schemas[owner]:
            schemas[owner][key] = schemas[key]
    return schemas["tool"]


def _shape_of(message: Message) -> str | tuple[str, bool]:
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


def _take_texts(
    messages: Sequence[Message], change: Callable[[int, str], str] = lambda number, text: text
) -> tuple[list[Text], list[Message]]:
    """Returns the texts of messages, and the messages with `change(number, text)` in the place of each."""
    texts: list[Text] = []

    def take(field: str, text: str) -> str:
        texts.append(Text(len(changed), field, text))
        return change(len(texts) - 1, text)

    changed: list[Message] = []
    for message in messages:
        changed.append(_mapped(message, take))
    return texts, changed


def _render(messages: list[Message], options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    with rendering():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _mapped(message: Message, change: Callable[[str, str], str]) -> Message:
    """Returns the message with `change` applied to (field, text) of each text that is to be written."""
    mapped = dict(message)
    for key in _REASONING_KEYS:
        if isinstance(mapped.get(key), str):
            mapped[key] = change("reasoning", mapped[key])
    mapped["content"] = _mapped_content(mapped.get("content"), change)
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        mapped["tool_calls"] = [_mapped_call(call, change) for call in calls]
    elif message.get("content") is None:  # the text may be in keys that only this template knows, or none
        for key, value in message.items():
            if key not in _KNOWN_KEYS and key not in ("name", "function_call"):
                mapped[key] = _mapped_leaves(value, partial(change, key))
    if "function_call" in message:  # OpenAI's older form of a call
        mapped["function_call"] = _mapped_leaves(message["function_call"], partial(change, "tool_calls"))
    return mapped


def _mapped_leaves(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped_leaves(inner, change) for key, inner in value.items()}
    return [_mapped_leaves(inner, change) for inner in value] if isinstance(value, list) else value


def _mapped_content(content: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(content, str):
        parts = THINKING.split(content)
        for at in range(0, len(parts), 2):
            is_thought = at + 1 < len(parts) and "/" in parts[at + 1]
            parts[at] = change("reasoning" if is_thought else "content", parts[at])
        return "".join(parts)
    if not isinstance(content, list):
        return content
    fields = {"thinking": "reasoning", "text": "content"}
    mapped: list[Any] = []
    for part in content:
        if not isinstance(part, dict):
            mapped.append(change("content", part) if isinstance(part, str) else part)
            continue
        is_known = not part.keys().isdisjoint((*fields, "content"))
        mapped.append(dict(part))
        for key, value in part.items():
            if key == "content":
                mapped[-1][key] = _mapped_content(value, change)
            elif (is_known and key in fields) or not (is_known or key == "type" or key.endswith("id")):
                mapped[-1][key] = _mapped_leaves(value, partial(change, fields.get(key, "content")))
    return mapped


def _mapped_call(call: Any, change: Callable[[str, str], str]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mapped_call(call["function"], change)}
    arguments = _parsed(call.get("arguments"))
    is_json = arguments is not call.get("arguments")
    changed = {
        name: _mapped_leaves(value, partial(change, "tool_calls"))
        for name, value in {**call, "arguments": arguments}.items()
        if name in call and name in ("name", "arguments")
    }
    if is_json:
        changed["arguments"] = json.dumps(changed["arguments"], ensure_ascii=False)
    return {**call, **changed}
