"""Servers with OpenAI's interface, by a local one that fails, stalls, babbles and recovers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.run_files import records
from support.stub_server import Refusal, Reply, Stub, completions, hanging, serving, verdicts
from support.tiny_online import online_recipe
from support.tiny_tokenizer import tiny_tokenizer
from support.whole_runs import text
from test_online_judges import ROLLOUTS, rollout
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from dpo_pack.online.endpoint import Endpoint, api_key
from dpo_pack.online.http_generator import HttpGenerator
from dpo_pack.online.interface import Completion, Failure, SamplingSettings
from dpo_pack.online.judges import LlmJudge
from dpo_pack.recipe.online import EndpointRecipe, JudgeRecipe
from dpo_pack.system.errors import RunError
from dpo_pack.trainer import train

PAUSE = "openai._base_client.INITIAL_RETRY_DELAY"
SAMPLING = SamplingSettings(completions_per_prompt=3, max_new_tokens=12, top_k=9, min_p=0.1, stop=("END",))
SOONER = 25.0  # seconds; whatever stalls or pauses here takes longer: only who waits for it is later
WORDS = ("bread", "sky", "yes", "tree", "seven", "")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAUSE, 0.01)


def words(seed: int, number: int) -> str:
    return f" {WORDS[seed % 5]} {WORDS[(seed // 5 + number) % 6]}".rstrip()


def endpoint(
    stub: Stub, api_key: str | None = "secret", console: Console | None = None, **settings: Any
) -> Endpoint:
    usual = {"url": stub.url, "model": "served", "timeout_seconds": 5.0, "retries": 3, "concurrency": 4}
    return Endpoint(
        settings=EndpointRecipe.model_validate(usual | settings),
        api_key=api_key,
        recipe_key="online.generator.endpoint",
        console=console or Console(quiet=True),
    )


def judge_of(endpoint: Endpoint, **settings: Any) -> LlmJudge:
    usual = {"type": "llm", "endpoint": {"url": endpoint.settings.url, "model": "served"}}
    judge = JudgeRecipe.model_validate(usual | settings)
    return LlmJudge(endpoint=endpoint, settings=judge, recipe_key="online.judges.0")


def generator(
    stub: Stub, sampling: SamplingSettings = SAMPLING, console: Console | None = None, **settings: Any
) -> HttpGenerator:
    return HttpGenerator(
        endpoint=endpoint(stub, console=console or Console(quiet=True), **settings),
        tokenizer=tiny_tokenizer(),
        sampling=sampling,
        seed=0,
    )


DRAWS = [r.draw for r in ROLLOUTS]


def texts(results: list[tuple[Completion, ...] | Failure]) -> list[list[str] | None]:
    return [None if isinstance(r, Failure) else [c.text for c in r] for r in results]


def test_a_request_says_what_the_recipe_says_and_the_answer_is_tokenised() -> None:
    with serving(Stub(completions(words))) as stub:
        results = generator(stub).generate(DRAWS)
    assert sorted(r["prompt"] for r in stub.requests) == sorted(d.prompt.ids.tolist() for d in DRAWS)
    asked = next(r for r in stub.requests if r["prompt"] == DRAWS[0].prompt.ids.tolist())
    assert asked["key"] == "Bearer secret" and asked["model"] == "served" and asked["n"] == 3
    assert asked["max_tokens"] == 12 and asked["top_k"] == 9 and asked["min_p"] == 0.1
    assert asked["top_p"] == asked["repetition_penalty"] == 1.0
    assert asked["stop"] == ["END"] and asked["temperature"] == 1.0 and asked["return_token_ids"] is True
    assert len({r["seed"] for r in stub.requests}) == 3
    tokenizer = tiny_tokenizer()
    for result in results:
        assert not isinstance(result, Failure) and len(result) == 3
        for completion in result:
            assert completion.ids.tolist() == [*tokenizer(completion.text)["input_ids"], 2]
            assert completion.is_finished


@pytest.mark.parametrize("fault", ["500", "503", "429", "408", "garbage", "nonsense", "brackets", "hang up"])
def test_what_may_pass_is_asked_again_and_nothing_is_lost(fault: str) -> None:
    with serving(Stub(completions(words))) as calm:
        expected = texts(generator(calm).generate(DRAWS))
    with serving(Stub(completions(words), faults=[fault] * 3)) as stub:
        assert texts(generator(stub).generate(DRAWS)) == expected
    assert len(stub.requests) == 6 and None not in expected


@pytest.mark.parametrize("fault", ["trickle", *slow("stall")])
def test_a_stalled_answer_counts_as_failed_after_the_timeout(fault: str) -> None:
    with serving(Stub(completions(words), faults=[fault], stall_seconds=40.0)) as stub:
        begun = time.monotonic()
        results = generator(stub, timeout_seconds=1.0).generate(DRAWS[:1])
        assert None not in texts(results) and len(stub.requests) == 2
        while any("(worker)" in thread.name for thread in threading.enumerate()):  # of a pool
            assert time.monotonic() - begun < 20.0  # the connection was ended, not only forgotten
            time.sleep(0.01)


def test_a_host_name_that_nobody_resolves_takes_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, waited = threading.Event(), list[bool]()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: waited.append(released.wait(20.0)))
    with serving(Stub(completions(words))) as stub:
        (result,) = generator(stub, timeout_seconds=0.1, retries=0).generate(DRAWS[:1])
        assert not waited, "the host name was waited for"
        released.set()
    assert isinstance(result, Failure) and "0.1 s" in result.reason


def test_an_answer_of_too_many_bytes_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpo_pack.online.endpoint._MOST_BYTES", 10_000)
    with serving(Stub(completions(words), faults=["flood"])) as stub:
        (result,) = generator(stub, retries=0).generate(DRAWS[:1])
    assert isinstance(result, Failure) and "more than 10,000 bytes" in result.reason


def test_a_redirect_is_not_followed_so_that_no_other_server_gets_the_key() -> None:
    with serving(Stub(completions(words))) as other:
        target = f"{other.url}/completions"
        with (
            serving(Stub(completions(words), faults=[f"redirect {target}"])) as stub,
            pytest.raises(RunError, match=f"HTTP 302: {target}"),
        ):
            generator(stub).generate(DRAWS[:1])
    assert len(stub.requests) == 1 and other.requests == []


@pytest.mark.parametrize("fault", ["echo 3", "echo 190", "echo 1980", "status-line"])
@pytest.mark.parametrize("key", ["secret", 'se"cr/et'])
def test_no_message_holds_the_api_key_nor_a_part_of_it(fault: str, key: str) -> None:
    with serving(Stub(completions(words), faults=[fault])) as stub:
        extra = {"metadata": [{"note": "Bearer"}, {"much": {"more": ["secr", "cr", 4096]}}]}
        asking = replace(endpoint(stub, retries=0, extra_body=extra), api_key=key)
        (result,) = replace(generator(stub), endpoint=asking).generate(DRAWS[:1])
    assert isinstance(result, Failure) and "Bearer" not in result.reason
    assert key not in repr(asking)
    if fault in ("echo 3", "status-line"):
        assert "[extra_body] [API key]" in result.reason  # "secr" is a part of the first key
    assert asking._quoted("at most 4096") == "at most 4096"  # a number keeps no secret


@pytest.mark.parametrize(("faults", "num_requests"), [(["400"], 3), (["500"] * 3, 5), (["hang up"] * 3, 5)])
def test_who_fails_to_the_end_fails_alone_and_a_refusal_is_not_repeated(
    faults: list[str], num_requests: int
) -> None:
    with serving(Stub(completions(words), faults=list(faults))) as stub:
        failed, *others = generator(stub, retries=2, concurrency=1).generate(DRAWS)
    assert isinstance(failed, Failure) and failed.reason.isprintable()
    assert not any(isinstance(result, Failure) for result in others) and len(stub.requests) == num_requests


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_cannot_pass_by_itself_stops_the_run(status: str) -> None:
    with (
        serving(Stub(completions(words), faults=[status] * 9)) as stub,
        pytest.raises(RunError, match=rf"online\.generator\.endpoint: .*HTTP {status}") as caught,
    ):
        generator(stub).generate(DRAWS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("then", ["hang up", *slow("stall")])
def test_an_error_whose_text_never_comes_is_the_error_it_is(then: str) -> None:
    with serving(Stub(completions(words), faults=[f"503 {then}"], stall_seconds=90.0)) as stub:
        results = generator(stub, timeout_seconds=1.0).generate(DRAWS[:1])
        assert None not in texts(results) and len(stub.requests) == 2
    with (
        serving(Stub(completions(words), faults=[f"401 {then}"], stall_seconds=90.0)) as stub,
        pytest.raises(RunError, match="HTTP 401"),
    ):
        generator(stub, timeout_seconds=1.0).generate(DRAWS[:1])


def test_no_more_requests_are_under_way_than_allowed() -> None:
    def slow(path: str, body: dict[str, Any]) -> Any:
        time.sleep(0.03)
        return completions(words)(path, body)

    with serving(Stub(slow)) as stub:
        generator(stub, concurrency=2).generate(DRAWS * 4)
    assert len(stub.requests) == 12 and stub.most_under_way == 2


def test_an_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", " k\n")  # as a file gives it
    assert api_key("MY_KEY", "key") == "k" and api_key(None, "key") is None
    for key in ("\n", "sk-1\nsk-2", "sk-1\x7f", "schl\u00fcssel-1", "sk-1\u200b"):  # no header takes these
        monkeypatch.setenv("MY_KEY", key)
        with pytest.raises(RunError, match="key: .*MY_KEY") as caught:
            api_key("MY_KEY", "key")
        assert "-1" not in str(caught.value)
    with pytest.raises(RunError, match="key: .*NO_SUCH_KEY"):
        api_key("NO_SUCH_KEY", "key")


@pytest.mark.parametrize("key", ["secret", None])
def test_nothing_of_a_request_comes_from_the_variables_of_the_package(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "WEBHOOK_SECRET"):
        monkeypatch.setenv(f"OPENAI_{name}", "theirs")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://theirs.invalid/v1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Custom: theirs\nAuthorization: theirs\nHost: theirs")
    with serving(Stub(completions(words))) as stub:
        asking = replace(endpoint(stub), api_key=key)
        results = replace(generator(stub), endpoint=asking).generate(DRAWS[:1])
    assert None not in texts(results)
    assert stub.requests[0]["key"] == (key and f"Bearer {key}")
    assert "theirs" not in str(stub.headers) and "openai" not in str(stub.headers).lower()


def test_a_url_that_is_none_is_named() -> None:
    with pytest.raises(RunError, match=r"online\.generator\.endpoint\.url: .*http://host:port/v1"):
        generator(Stub(completions(words), url="http://host:port/v1")).generate(DRAWS)


# ------------------------------------------------------------------------------------------ interruptions


ASKING = """
import sys
from dpo_pack.system.interrupts import Interrupted, interruptible
from dpo_pack.online.endpoint import Endpoint
from dpo_pack.recipe.online import EndpointRecipe

server = EndpointRecipe(url=sys.argv[1], model="m", timeout_seconds=60.0, retries=9, concurrency=2)
endpoint = Endpoint(settings=server, api_key=None, recipe_key="online.generator.endpoint")
try:
    with interruptible():
        endpoint.ask_all("/completions", [{}, {}], lambda answer: answer)
except Interrupted as interrupted:
    sys.exit(interrupted.exit_status)
"""


def test_the_end_of_the_process_does_not_wait_for_a_server_either() -> None:
    released = threading.Event()
    with (
        serving(Stub(hanging(released))) as stub,
        subprocess.Popen([sys.executable, "-c", ASKING, stub.url]) as process,
    ):
        try:
            while stub.num_under_way < 2:
                assert process.poll() is None
                time.sleep(0.01)
            process.terminate()
            assert process.wait(timeout=SOONER) == 143
        finally:
            process.kill()
            released.set()


# --------------------------------------------------------------------------------------------- the judge


def longer(first: str, second: str) -> str:
    return "A" if len(first) > len(second) else "B" if len(first) < len(second) else "tie"


def judged(says: Callable[[str, str], str]) -> tuple[list[Any], Stub]:
    with serving(Stub(verdicts(says))) as stub:
        return judge_of(endpoint(stub), instructions="Be kind.").score(ROLLOUTS), stub


def test_a_completion_scores_the_part_of_its_comparisons_it_wins_in_both_orders() -> None:
    scores, stub = judged(longer)
    assert [s.tolist() for s in scores] == [[0.0, 1.0, 0.5], [0.0, 1.0], [0.0, 1.0]]
    assert len(stub.requests) == 6 + 2 + 2
    system, question = (message["content"] for message in stub.requests[0]["messages"])
    assert "Be kind." in system and any(r.draw.prompt.text in question for r in ROLLOUTS)


def test_equal_answers_are_a_tie_without_asking() -> None:
    with serving(Stub(verdicts(longer))) as stub:
        (scores,) = judge_of(endpoint(stub)).score([rollout("x", "aa", "aa", "b")])
    assert not isinstance(scores, Failure) and scores.tolist() == [0.75, 0.75, 0.0]
    assert len(stub.requests) == 4


def test_a_verdict_that_is_none_is_asked_again_then_sets_its_prompt_aside() -> None:
    def dodges(first: str, second: str) -> str:
        return "I would rather not say" if "bake" in first + second else longer(first, second)

    scores, stub = judged(dodges)
    assert isinstance(scores[1], Failure) and "neither A, B nor T" in scores[1].reason
    assert "I would rather not say" in scores[1].reason
    assert not isinstance(scores[0], Failure) and not isinstance(scores[2], Failure)
    assert len(stub.requests) == 6 + 2 * 4 + 2


def test_a_judge_sends_what_the_recipe_says_and_leaves_out_what_the_server_refuses(console: Console) -> None:
    def reasoning(path: str, body: dict[str, Any]) -> Any:
        if "max_tokens" in body:
            return Refusal(400, "'max_tokens' is not supported with this model.")
        if body.get("temperature", 1) != 1:
            return Refusal(400, "'temperature' does not support 0.0 with this model.")
        return verdicts(longer)(path, body)

    with serving(Stub(reasoning)) as stub:
        asking = endpoint(stub, console=console, extra_body={"reasoning_effort": "low"})
        judge = judge_of(asking, max_new_tokens=500)
        assert not any(isinstance(scores, Failure) for scores in judge.score(ROLLOUTS))
        num_requests, last = len(stub.requests), stub.requests[-1]
        judge.score(ROLLOUTS)
        assert len(stub.requests) == num_requests + 10 and num_requests > 10
        said = text(console)
        assert said.count("the server refuses the fields temperature; ") == 1
        assert last["max_completion_tokens"] == 500 and last["reasoning_effort"] == "low"
        assert not {"max_tokens", "temperature"} & last.keys()
        unlike = judge_of(endpoint(stub), temperature=0.5)  # not given up: the recipe asks for it
        (failed,) = unlike.score(ROLLOUTS[:1])
    assert isinstance(failed, Failure) and "'temperature' does not support" in failed.reason
    with serving(Stub(verdicts(longer))) as stub:
        judge_of(endpoint(stub), temperature=None).score(ROLLOUTS[:1])
    assert not {"max_tokens", "temperature"} & stub.requests[0].keys()


# ---------------------------------------------------------------------------------------------- a run


@pytest.mark.slow
def test_a_run_against_a_server_that_misbehaves_and_recovers_loses_nothing(
    tmp_path: Path, console: Console
) -> None:
    faults = ["500", "garbage", "stall", "429", "hang up", "nonsense", "503"]
    with (
        serving(Stub(completions(words), faults=list(faults), stall_seconds=0.8)) as answers,
        serving(Stub(verdicts(longer), faults=["garbage", "500", "hang up"])) as judge,
    ):
        served = {"model": "m", "retries": 8, "concurrency": 3, "timeout_seconds": 0.4}
        recipe = online_recipe(
            tmp_path / "assets",
            tmp_path / "run",
            generator={"type": "http", "endpoint": {**served, "url": answers.url}},
            judges=[{"type": "llm", "endpoint": {**served, "url": judge.url}}],
            max_staleness_steps=5,  # as old as the server's weights become
        )
        train(recipe, console)
    assert not answers.faults and not judge.faults
    last = records(tmp_path / "run", "train")[-1]
    assert last["online/total_generator_failures"] == last["online/total_judge_failures"] == 0
    # The server's weights stay those of the start, and their age is counted.
    assert last["step"] == 6 and last["online/staleness"] == 5.0


# ---------------------------------------------------------------------------- what an http generator asks for


PLAIN = SamplingSettings(completions_per_prompt=3, max_new_tokens=12)
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def openai(status: int, *, names_all: bool = True) -> Reply:
    """Knows OpenAI's own fields, and refuses others by name."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        unknown = sorted(NEUTRAL.keys() & body.keys())
        if not unknown:
            return completions(words)(path, body)
        named = unknown if names_all else unknown[:1]
        return Refusal(status, json.dumps({"detail": [{"loc": ["body", name]} for name in named]}))

    return reply


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
    assert NEUTRAL.items() <= stub.requests[0].items()  # so the server's defaults do not count
    assert not NEUTRAL.keys() & stub.requests[-1].keys()
    said = "online.generator.endpoint: the server refuses the fields min_p, repetition_penalty, top_k; "
    assert text(console).count("Warning") == 1 and said in text(console)


def test_what_the_recipe_asks_for_is_not_given_up(console: Console) -> None:
    with serving(Stub(openai(400))) as stub:
        made = generator(stub, SAMPLING, console)
        results = made.generate(DRAWS)
    assert all(isinstance(r, Failure) and "HTTP 400" in r.reason and "top_k" in r.reason for r in results)
    assert not made.endpoint.refused and not text(console)


def test_a_refusal_that_only_quotes_the_request_costs_nothing_but_that_prompt(console: Console) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if body["prompt"] == DRAWS[1].prompt.ids.tolist():
            return Refusal(400, f"too long: {json.dumps(body)}")
        return completions(words)(path, body)

    with serving(Stub(reply)) as stub:
        made = generator(stub, PLAIN, console)
        results = made.generate(DRAWS)
    assert [isinstance(result, Failure) for result in results] == [False, True, False]
    assert not made.endpoint.refused and not text(console)


YES, YES_END = (tiny_tokenizer()(text)["input_ids"] for text in ("yes", "yesEND"))
GIVEN = {"token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        # A completion ends with the token that the server names, or with a stop string; or it was cut.
        *(({}, [*YES, 2]), ({"finish_reason": "length"}, YES), ({"stop_reason": None}, [*YES, 2])),
        *(({"stop_reason": 7}, [*YES, 7]), ({"stop_reason": 0}, [*YES, 0]), ({"matched_stop": 7}, [*YES, 7])),
        ({"stop_reason": True}, [*YES, 2]),
        *(({"stop_reason": "END"}, YES_END), ({"matched_stop": "END"}, YES_END)),
        # Training takes the tokens that the server's model wrote.
        ({"token_ids": [5, 6, 2]}, [5, 6, 2]),
        (GIVEN, [5, 6, 2]),  # a server that leaves its EOS out
        ({"token_ids": [5, 6, 7], "stop_reason": 7}, [5, 6, 7]),
        *(({**GIVEN, "stop_reason": 7}, [5, 6, 7]), ({**GIVEN, "stop_reason": "END"}, [5, 6])),
        *(({**GIVEN, "finish_reason": "length"}, [5, 6]), ({"token_ids": [2], "text": ""}, [2])),
        ({"token_ids": None, "finish_reason": "length"}, YES),
        # Without text, or with a token that does not exist, it is not trained on.
        *(({"token_ids": wrong}, None) for wrong in ([5, 10**6], ["5"], 5)),
        *(({"stop_reason": number}, None) for number in (-1, 384, 10**9)),
        ({"text": "yes \ud83d"}, None),  # half a surrogate pair, which no tokenizer reads
        *(({"text": None}, None), ("yes", None), (None, None)),
    ],
)
def test_a_choice_gives_the_tokens_that_the_server_s_model_wrote_or_fails(
    choice: Any, ids: list[int] | None
) -> None:
    whole = {"text": "yes", "finish_reason": "stop", **choice} if isinstance(choice, dict) else choice
    with serving(Stub(lambda path, body: {"choices": [whole] * 3})) as stub:
        (result,) = generator(stub, retries=0).generate(DRAWS[:1])
    if isinstance(result, Failure):
        assert ids is None
        return
    assert [c.ids.tolist() for c in result] == [ids] * 3 and result[0].text == whole["text"]
    assert result[0].is_finished == (whole["finish_reason"] == "stop")


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
    assert made.counts == {"all": 5, "differing": 1} and said in " ".join(text(console).split())


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
    assert text(console).count("Warning") == 1
