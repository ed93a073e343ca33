"""What an http generator asks for, what it does without, and by which token a server's answer ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support.stub_server import Refusal, Reply, Stub, completions, serving
from support.tiny_tokenizer import tiny_tokenizer
from test_online_endpoint import DRAWS, SAMPLING, generator, texts, words
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

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


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"token_ids": [5, 6, 2], "finish_reason": "stop"}, [5, 6, 2]),
        ({"token_ids": [5, 6], "finish_reason": "stop"}, [5, 6, 2]),  # a server that leaves its EOS out
        ({"token_ids": [5, 6, 7], "finish_reason": "stop", "stop_reason": 7}, [5, 6, 7]),
        ({"token_ids": [5, 6], "finish_reason": "stop", "stop_reason": 7}, [5, 6, 7]),
        ({"token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "END"}, [5, 6]),
        ({"token_ids": [5, 6], "finish_reason": "length"}, [5, 6]),
        ({"token_ids": [2], "finish_reason": "stop", "text": ""}, [2]),
        ({"token_ids": None, "finish_reason": "length"}, tiny_tokenizer()("yes")["input_ids"]),
        ({"token_ids": [5, 10**6], "finish_reason": "length"}, None),
        ({"token_ids": ["5"], "finish_reason": "length"}, None),
        ({"token_ids": 5, "finish_reason": "length"}, None),
    ],
)
def test_training_takes_the_tokens_that_the_server_s_model_wrote(
    choice: dict[str, Any], ids: list[int] | None
) -> None:
    with serving(Stub(lambda path, body: {"choices": [{"text": "yes", **choice}] * 3})) as stub:
        (result,) = generator(stub, retries=0).generate(DRAWS[:1])
    assert stub.requests[0]["return_token_ids"] is True
    assert ids is None if isinstance(result, Failure) else [c.ids.tolist() for c in result] == [ids] * 3


def test_text_is_tokenised_behind_its_prompt_and_a_difference_at_the_border_is_said(console: Console) -> None:
    """By a tokenizer that begins each text with a space, as SentencePiece does, and has a token of two."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "_", "__", "a", "b", "\n"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("_", "_")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")
    reply = {"choices": [{"text": text, "finish_reason": "length"} for text in ("b", " b", "a")]}
    with serving(Stub(lambda path, body: reply)) as stub:
        made = replace(generator(stub, PLAIN, console), tokenizer=tokenizer)
        assert made._tokenised("a", "b") == [5] and made._tokenised("a", " b") == [2, 5]
        assert not made.counts["differing"]
        draws = [replace(DRAWS[0], prompt=replace(DRAWS[0].prompt, text="a "))]
        (result,) = made.generate(draws)
    assert not isinstance(result, Failure)
    assert [c.ids.tolist() for c in result] == [[5], [2, 5], [4]]  # together, one token of both spaces
    said = "1 of 5 completions so far have other tokens alone than behind their prompts"
    assert made.counts == {"all": 5, "differing": 1} and said in " ".join(printed(console).split())


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_that_does_not_know_n_is_asked_n_times(refuses: bool, console: Console) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if refuses and "n" in body:
            return Refusal(400, "unknown field: n")
        return completions(words)(path, {**body, "n": 1})

    with serving(Stub(reply)) as stub:
        made = generator(stub, PLAIN, console)
        (result,) = made.generate(DRAWS[:1])
        assert not isinstance(result, Failure) and len(result) == 3
        num_first = len(stub.requests)
        (again,) = made.generate(DRAWS[:1])
    assert texts([again]) == texts([result]) and len(stub.requests) == num_first + 3
    assert len({asked["seed"] for asked in stub.requests}) == 3
    assert printed(console).count("Warning") == 1
