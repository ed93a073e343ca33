"""What an http generator asks for, what it does without, and by which token a server's answer ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console
from support.stub_server import Refusal, Reply, Stub, completions, serving
from support.tiny_tokenizer import tiny_tokenizer
from test_online_endpoint import DRAWS, SAMPLING, generator, texts, words

from dpo_pack.online.interface import Failure, SamplingSettings

PLAIN = SamplingSettings(completions_per_prompt=3, max_new_tokens=12)
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def printed(console: Console) -> str:
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def openai(status: int, *, names_all: bool = True) -> Reply:
    """Knows OpenAI's own fields, and refuses others by name."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        unknown = sorted(NEUTRAL.keys() & body.keys())
        if not unknown:
            return completions(words)(path, body)
        named = unknown if names_all else unknown[:1]
        return Refusal(status, json.dumps({"detail": [{"loc": ["body", name]} for name in named]}))

    return reply


def test_what_the_recipe_leaves_open_is_not_left_to_the_server() -> None:
    with serving(Stub(completions(words))) as stub:
        generator(stub, PLAIN).generate(DRAWS)
    assert all({name: asked[name] for name in NEUTRAL} == NEUTRAL for asked in stub.requests)


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("names_all, num_refused", [(True, 1), (False, 3)])
def test_a_server_that_knows_less_is_asked_for_less_from_then_on(
    status: int, names_all: bool, num_refused: int, console: Console
) -> None:
    with serving(Stub(openai(status, names_all=names_all))) as stub:
        made = generator(stub, PLAIN, console, concurrency=1, retries=0)
        answers = texts(made.generate(DRAWS))
        assert None not in answers and len(stub.requests) == num_refused + 3
        assert texts(made.generate(DRAWS)) == answers and len(stub.requests) == num_refused + 6
    assert not NEUTRAL.keys() & stub.requests[-1].keys()
    said = "online.generator.endpoint: the server refuses the fields min_p, repetition_penalty, top_k; "
    assert printed(console).count("Warning") == 1 and said in printed(console)


def test_what_the_recipe_asks_for_is_not_given_up(console: Console) -> None:
    with serving(Stub(openai(400))) as stub:
        made = generator(stub, SAMPLING, console)
        results = made.generate(DRAWS)
    assert all(isinstance(r, Failure) and "HTTP 400" in r.reason and "top_k" in r.reason for r in results)
    assert not made.endpoint.refused and not printed(console)


def test_a_refusal_that_only_quotes_the_request_costs_nothing_but_that_prompt(console: Console) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if body["prompt"] == DRAWS[1].prompt.ids.tolist():
            return Refusal(400, f"too long: {json.dumps(body)}")
        return completions(words)(path, body)

    with serving(Stub(reply)) as stub:
        made = generator(stub, PLAIN, console)
        results = made.generate(DRAWS)
    assert [isinstance(result, Failure) for result in results] == [False, True, False]
    assert not made.endpoint.refused and not printed(console)


@pytest.mark.parametrize(
    "said, end",
    [
        ({}, [2]),
        ({"finish_reason": "length"}, None),
        ({"stop_reason": None}, [2]),
        ({"stop_reason": 7}, [7]),
        ({"stop_reason": 0}, [0]),
        ({"stop_reason": True}, [2]),
        ({"matched_stop": 7}, [7]),
        ({"stop_reason": "END"}, []),
        ({"matched_stop": "END"}, []),
    ],
)  # fmt: skip
def test_a_completion_ends_with_the_token_that_the_server_names(
    said: dict[str, Any], end: list[int] | None
) -> None:
    """Or with a stop string; None: it was cut."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        return {"choices": [{"text": "yes", "finish_reason": "stop", **said}] * 3}

    with serving(Stub(reply)) as stub:
        (result,) = generator(stub).generate(DRAWS[:1])
    assert not isinstance(result, Failure)
    text = "yesEND" if end == [] else "yes"
    assert result[0].ids.tolist() == [*tiny_tokenizer()(text)["input_ids"], *(end or [])]
    assert result[0].text == "yes" and result[0].is_finished == (end is not None)


@pytest.mark.parametrize(
    "choice",
    [
        *({"text": "yes", "finish_reason": "stop", "stop_reason": number} for number in (-1, 384, 10**9)),
        {"text": "yes \ud83d", "finish_reason": "stop"},  # half a surrogate pair, which no tokenizer reads
        {"finish_reason": "stop"},
        {"text": None},
        "yes",
        None,
    ],
)
def test_a_choice_without_text_or_with_a_token_that_does_not_exist_is_not_trained_on(choice: Any) -> None:
    with serving(Stub(lambda path, body: {"choices": [choice] * 3})) as stub:
        (result,) = generator(stub, retries=1).generate(DRAWS[:1])
    assert isinstance(result, Failure) and len(stub.requests) == 2
