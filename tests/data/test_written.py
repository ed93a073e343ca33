"""Every text of a row is in its rendering, or the row is a bad row: chat templates beside shapes of rows.

A text of a row here has a word that occurs nowhere else, so whether a template wrote it is plain to see.
"""

import importlib.util
import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.rows import assistant, said, user
from support.tiny_tokenizer import tiny_tokenizer

from dpo_pack.data.formats import FORMATS
from dpo_pack.data.tokenizer import apply_chat_template
from dpo_pack.data.values import BadRow
from dpo_pack.data.written import MESSAGE_KEY, check_written, suited

_TURN = "{% for m in messages %}{{ '<s>' + m.role + '\n' }}BODY{{ '</s>\n' }}{% endfor %}"
_OPEN = "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}"
)
_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
BODIES = {
    "content alone": "{{ m.content or '' }}",
    "three roles": "{% if m.role in ['system', 'user', 'assistant'] %}{{ m.content or '' }}{% endif %}",
    "parts": _PARTS,
    "calls": "{{ m.content or '' }}" + _CALLS,
    "calls as text": "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name + "
    "c.function.arguments }}{% endfor %}",
    "strips thinking": "{{ (m.content or '').split('</think>')[-1] }}",
    "reasoning": "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}",
    "upper case": "{{ (m.content or '') | upper }}",
    "one line": "{{ (m.content or '').split() | join(' ') }}",
    "older calls": "{{ m.content or '' }}{% if m.function_call %}{{ m.function_call | tojson }}{% endif %}",
    "call or content": "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}",
    "reads the text": "{% if '7' not in (m.content or '') %}{{ m.content or '' }}{% endif %}",
}
_numbers = count()


def _text() -> str:
    return f"Text w{next(_numbers):06d} here."


def _call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": arguments}}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SHAPES: dict[str, Any] = {
    "plain": lambda: ([user(_text())], assistant(_text())),
    "system": lambda: ([said("system", _text()), user(_text())], assistant(_text())),
    "developer": lambda: ([said("developer", _text()), user(_text())], assistant(_text())),
    "other role": lambda: ([said("human", _text())], assistant(_text())),
    "turns": lambda: ([user(_text()), assistant(_text()), user(_text())], assistant(_text())),
    "parts": lambda: ([user(_parts(_text(), _text()))], assistant(_parts(_text()))),
    "reasoning": lambda: ([user(_text())], assistant(_text(), reasoning_content=_text())),
    "thinking": lambda: ([user(_text())], assistant(f"<think>\n{_text()}\n</think>\n\n{_text()}")),
    "call": lambda: ([user(_text())], assistant(None, tool_calls=[_call({"city": _text()})])),
    "call and text": lambda: ([user(_text())], assistant(_text(), tool_calls=[_call({"city": _text()})])),
    "older call": lambda: (
        [
            user(_text()),
            assistant("", function_call={"name": "weather", "arguments": _text()}),
            said("tool", _text()),
        ],
        assistant(_text(), function_call={"name": "weather", "arguments": _text()}),
    ),
    "call as JSON": lambda: (
        [user(_text())],
        assistant("", tool_calls=[_call(json.dumps({"city": f'"{_text()}"\n'}))]),
    ),
    "result": lambda: (
        [user(_text()), assistant("", tool_calls=[_call({"city": _text()})]), said("tool", _text())],
        assistant(_text()),
    ),
    "parts of a provider": lambda: (
        [user([{"type": "input_text", "text": _text()}])],
        assistant([{"type": "output_text", "text": _text(), "annotations": []}]),
    ),
    "strings": lambda: ([user([_text(), _text()])], assistant([_text()])),
    "tool as a part": lambda: (
        [user(_text()), assistant([{"type": "tool_use", "id": "x", "name": "f", "input": {"city": _text()}}])]
        + [user([{"type": "tool_result", "tool_use_id": "x", "content": _text()}])],
        assistant(_text()),
    ),
    "other key": lambda: ([{"role": "user", "value": _text()}], assistant(_text())),
    "no words": lambda: ([user(_text())], assistant("", feeling="good")),
}


def _trl_templates() -> list[Path]:
    trl = importlib.util.find_spec("trl")
    return (
        [] if trl is None or trl.origin is None else sorted(Path(trl.origin).parent.glob("chat_templates/*"))
    )


def _judge(template: str, shape: str) -> tuple[str, set[str]]:
    """Returns what becomes of a row ("kept", or a reason), and its words that are not in the rendering."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    prompt, chosen = SHAPES[shape]()
    pair = FORMATS["conversational"].pair(
        {"prompt": prompt, "chosen": [chosen], "rejected": [assistant(_text())]}
    )
    row, verdict = suited(pair, tokenizer), "kept"
    try:
        texts = apply_chat_template(row.pair, (row.pair.chosen, row.pair.rejected), tokenizer)
    except BadRow as bad:
        return bad.reason, set()
    try:
        check_written(row, texts, tokenizer)
    except BadRow as bad:
        verdict = bad.reason
    missing = set(re.findall(r"w\d{6}", json.dumps([prompt, chosen]))) - set(
        re.findall(r"w\d{6}", texts[1].lower())
    )
    return verdict, missing


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("body", BODIES)
def test_a_row_is_kept_if_and_only_if_all_of_it_is_written(body: str, shape: str) -> None:
    verdict, missing = _judge(_TURN.replace("BODY", BODIES[body]) + _OPEN, shape)
    if verdict in ("kept", "empty_completion"):
        assert not missing or verdict == "empty_completion"
    elif verdict != "template_error":
        is_printed = shape == "tool as a part" and body != "parts"
        assert missing or is_printed, "a row is refused although all of it is written"


@pytest.mark.parametrize(
    ("body", "shape", "verdict"),
    [
        ("content alone", "developer", "kept"),
        ("three roles", "developer", "kept"),  # as system
        ("three roles", "other role", "role_not_written"),
        ("parts", "plain", "kept"),  # texts become parts
        ("content alone", "parts", "kept"),  # joined
        ("content alone", "call", "empty_completion"),
        ("content alone", "call and text", "call_not_written"),
        ("content alone", "older call", "call_not_written"),
        ("older calls", "older call", "kept"),
        ("calls", "call as JSON", "kept"),  # as objects
        ("calls as text", "call", "kept"),  # as JSON text
        ("call or content", "call and text", "text_not_written"),
        ("strips thinking", "thinking", "reasoning_not_written"),
        ("content alone", "reasoning", "reasoning_not_written"),
        ("upper case", "plain", "kept"),
        ("content alone", "parts of a provider", "kept"),  # joined
        ("content alone", "strings", "kept"),
        ("content alone", "tool as a part", "text_not_written"),  # printed as Python prints it
        ("parts", "tool as a part", "text_not_written"),
        ("content alone", "other key", "text_not_written"),
        ("content alone", "no words", "empty_completion"),
    ],
)
def test_what_is_missing_is_named(body: str, shape: str, verdict: str) -> None:
    assert _judge(_TURN.replace("BODY", BODIES[body]) + _OPEN, shape)[0] == verdict


_CITY = {"type": "string", "description": "where", "title": "City"}
_TOOL = {
    "name": "weather",
    "description": "tells",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": _CITY}},
}


@pytest.mark.parametrize(
    ("tool", "template", "counts"),
    [
        ({"type": "function", "function": _TOOL}, "{{ tools | tojson }}", set()),
        (_TOOL, "{{ tools | tojson }}", set()),
        (
            {"function": _TOOL},
            "{% for t in tools %}{{ t.function.name ~ t.function.description ~ "
            "(t.function.parameters | tojson) }}{% endfor %}",
            set(),
        ),
        (
            {"function": _TOOL},
            "{% for t in tools %}{{ t.function.name ~ t.function.description }}{% for n, p in "
            "t.function.parameters.properties.items() %}{{ n ~ p.description }}{% endfor %}{% endfor %}",
            set(),
        ),
        (_TOOL, "{% for t in tools %}{{ (t.function or {}).name }}{% endfor %}", {"tools_not_written"}),
        (
            {"function": _TOOL},
            "{{ tools[0].function.name ~ tools[0].function.description }}",
            {"tools_not_written"},
        ),
        ({"function": _TOOL}, "", {"tools_not_written"}),
    ],
)
def test_of_tools_names_and_descriptions_are_written(
    tool: dict[str, Any], template: str, counts: set[str]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template + _TURN.replace("BODY", BODIES["content alone"]) + _OPEN
    row = {"prompt": [user("why")], "chosen": [assistant("a")], "rejected": [assistant("b")], "tools": [tool]}
    suiting = suited(FORMATS["conversational"].pair(row), tokenizer)
    texts = apply_chat_template(suiting.pair, (suiting.pair.chosen, suiting.pair.rejected), tokenizer)
    found = {name for name in check_written(suiting, texts, tokenizer)[0] if "not_written" in name}
    assert found == counts


@pytest.mark.parametrize(
    ("body", "message", "counts"),
    [
        ("content alone", user("a\n b "), {}),
        ("one line", user("a\n b"), {"texts_changed": 1}),
        ("upper case", user("aß"), {"texts_changed": 1}),
        ("content alone", {**user("a"), "weight": 0, "tool_call_id": "x"}, {f"{MESSAGE_KEY}weight": 1}),
    ],
)
def test_what_a_template_changes_or_leaves_out_on_purpose_is_counted(
    body: str, message: dict[str, Any], counts: dict[str, int]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _TURN.replace("BODY", BODIES[body]) + _OPEN
    row = suited(
        FORMATS["conversational"].pair(
            {"prompt": [message], "chosen": [assistant("C")], "rejected": [assistant("D")]}
        ),
        tokenizer,
    )
    texts = apply_chat_template(row.pair, (row.pair.chosen, row.pair.rejected), tokenizer)
    found = check_written(row, texts, tokenizer)[0]
    assert {name: count for name, count in found.items() if name != "characters"} == counts


@pytest.mark.slow
@pytest.mark.skipif(not _trl_templates(), reason="TRL is not installed")
def test_templates_of_published_models() -> None:
    for path in _trl_templates():
        for shape in SHAPES if path.suffix == ".jinja" else ():
            verdict, missing = _judge(path.read_text(), shape)
            if verdict == "kept":
                assert not missing, (path.name, shape)
            elif verdict not in ("template_error", "empty_completion"):
                assert missing or shape == "tool as a part", (path.name, shape, verdict)
