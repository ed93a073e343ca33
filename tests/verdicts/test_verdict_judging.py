"""Judges of two models' answers: values, orders, and what is asked again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support.online_judges as online_judges
import torch
from rich.console import Console
from support.rows import said, user
from support.stub_server import Refusal, Stub, serving, verdicts
from support.tiny_models import tiny_config
from support.tiny_tokenizer import tiny_tokenizer
from support.tiny_verdict import answered, contest_in
from support.whole_runs import text
from transformers import AutoModelForSequenceClassification

from dpo_pack.online.interface import Rollout
from dpo_pack.online.reward_model import RewardModelJudge
from dpo_pack.recipe.online import JudgeRecipe
from dpo_pack.system.errors import RunError
from dpo_pack.system.files import Json
from dpo_pack.verdicts import judging
from dpo_pack.verdicts.answers import Contest
from dpo_pack.verdicts.conclusion import Source, conclude
from dpo_pack.verdicts.judging import judge_answers

ROLLOUTS = [
    answered("ask about the sky", " grey", " the sky is blue", 0),
    answered("ask about bread", " bake it well", " bake", 1),
    answered("ask about the sea", " wet", " wet", 2),
]


def longer(first: str, second: str) -> str:
    return "A" if len(first) > len(second) else "B"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Contest:
    return contest_in(tmp_path_factory.mktemp("verdict"))


@pytest.fixture
def contest(made: Contest, console: Console) -> Contest:
    return replace(made, console=console)


def llm(stub: Stub, **more: Any) -> JudgeRecipe:
    endpoint = {"url": stub.url, "model": "judge", "retries": 0, **more.pop("endpoint", {})}
    return JudgeRecipe.model_validate({"type": "llm", "endpoint": endpoint, **more})


def judged(
    contest: Contest, settings: JudgeRecipe, directory: Path, rollouts: list[Rollout] = ROLLOUTS
) -> tuple[Source, list[Json]]:
    (one,) = judge_answers(contest, rollouts, {"the judge": settings}, directory)
    return one


def by_llm(
    contest: Contest, says: Callable[[str, str], str], directory: Path, **more: Any
) -> tuple[Source, list[Json], Stub]:
    with serving(Stub(verdicts(says))) as stub:
        return *judged(contest, llm(stub, **more), directory), stub


def test_a_judge_that_prefers_the_first_answer_says_nothing(contest: Contest, tmp_path: Path) -> None:
    source, items, stub = by_llm(contest, lambda first, second: "A", tmp_path)
    assert source.values.tolist() == [0.5, 0.5, 0.5] and source.kind == "llm"
    assert items[0]["orders"] == items[1]["orders"] == [0.0, 1.0]
    assert "orders" not in items[2] and len(stub.requests) == 4  # equal answers are not sent
    assert "the judge: 4 requests of about" in text(contest.console)


def test_a_language_model_s_value_is_the_mean_of_both_orders(contest: Contest, tmp_path: Path) -> None:
    source, items, _ = by_llm(contest, longer, tmp_path)
    assert source.values.tolist() == [1.0, 0.0, 0.5] and source.num_failed == 0
    assert source.more_characters is not None
    assert source.more_characters.tolist() == [len(" the sky is blue") - 5, 5 - len(" bake it well"), 0]
    first = {"prompt": "ask about the sky", "start": " grey", "new": " the sky is blue"}
    assert items[0] == {**first, "value": 1.0, "orders": [1.0, 1.0]}
    source, _, _ = by_llm(contest, lambda a, b: "T" if "grey" in b else longer(a, b), tmp_path / "ties")
    assert source.values.tolist() == [0.75, 0.0, 0.5]


def test_a_failed_request_is_asked_again_and_only_that_one(contest: Contest, tmp_path: Path) -> None:
    fails = [True]

    def says(first: str, second: str) -> str:
        return "no letter" if fails[0] and first == " bake" else longer(first, second)

    with serving(Stub(verdicts(says))) as stub:
        source, items = judged(contest, llm(stub), tmp_path)
        assert source.values.tolist() == [1.0, 0.5] and source.num_failed == 1
        assert [item["value"] for item in items] == [1.0, None, 0.5]
        assert "Warning: the judge: 1 of 4 judgements failed; the first: " in text(contest.console)
        fails[0] = False
        source, _ = judged(contest, llm(stub), tmp_path)
        assert source.values.tolist() == [1.0, 0.0, 0.5] and len(stub.requests) == 5
    assert "[Answer A]\n bake\n" in stub.requests[-1]["messages"][-1]["content"]


def test_a_stopped_verdict_goes_on_and_says_the_same(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_BATCH_JUDGEMENTS", 2)
    stops = [True]

    def reply(path: str, body: Json) -> Any:
        return Refusal(401, "no") if stops[0] and len(stub.requests) > 2 else verdicts(longer)(path, body)

    with serving(Stub(reply)) as stub:
        with pytest.raises(RunError, match="HTTP 401"):
            judged(contest, llm(stub, endpoint={"concurrency": 1}), tmp_path / "stopped")
        stops[0], stub.requests[:] = False, []
        again = judged(contest, llm(stub, endpoint={"timeout_seconds": 9.0}), tmp_path / "stopped")
        assert len(stub.requests) == 2  # the first two judgements were kept
        assert "2 requests of about" in text(contest.console)
        assert "2 judgements are kept" in text(contest.console)
        whole = judged(contest, llm(stub), tmp_path / "whole")
        assert again[1] == whole[1] and again[0].values.tolist() == whole[0].values.tolist()
    files = [tmp_path / name / "judgements.jsonl" for name in ("stopped", "whole")]
    assert files[0].read_text() == files[1].read_text()


def test_another_judge_and_another_answer_are_asked_anew(contest: Contest, tmp_path: Path) -> None:
    with serving(Stub(verdicts(longer))) as stub:
        judged(contest, llm(stub), tmp_path)
        judged(contest, llm(stub), tmp_path)
        assert len(stub.requests) == 4
        judged(contest, llm(stub, instructions="The shorter one is better."), tmp_path)
        assert len(stub.requests) == 8
        other = answered("ask about the sky", " grey", " the sky is red", 0)
        judged(contest, llm(stub), tmp_path, [other, *ROLLOUTS[1:]])
        assert len(stub.requests) == 10


def test_nothing_of_a_server_is_written(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame-open")
    endpoint = {"api_key_env": "JUDGE_KEY", "extra_body": {"hint": "whisper"}}
    _, items, stub = by_llm(contest, longer, tmp_path, endpoint=endpoint)
    assert stub.requests[0]["key"] == "Bearer sesame-open"
    written = (tmp_path / "judgements.jsonl").read_text() + json.dumps(items) + text(contest.console)
    assert not any(word in written for word in ("sesame", "whisper", "127.0.0.1", "JUDGE_KEY"))


def test_a_server_that_is_down_is_named_on_the_console_only(contest: Contest, tmp_path: Path) -> None:
    down = {"url": "http://127.0.0.1:9/v1/hidden", "model": "judge", "retries": 0}
    settings = JudgeRecipe.model_validate({"type": "llm", "endpoint": down})
    source, items = judged(contest, settings, tmp_path)
    assert source.num_failed == 2 and "127.0.0.1:9" in text(contest.console)
    found = conclude([replace(source, values=source.values[:0])], earlier=[], number=1)
    assert "the judge has no result: no judgement succeeded." in found["sentence"]
    assert not any(word in json.dumps([found, items]) for word in ("127.0.0.1", "hidden"))


def test_messages_and_tools_reach_the_judge_as_written(contest: Contest, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = (said("system", "Be brief."), user("warm?"))
    asked = answered("<s>warm?", " yes", " no", messages=messages, tools=tools)
    with serving(Stub(verdicts(longer))) as stub:
        judged(contest, llm(stub), tmp_path, [asked])
    question = stub.requests[0]["messages"][-1]["content"]
    assert f"tools: {json.dumps(tools)}\n\nsystem: Be brief.\n\nuser: warm?\n\n[Answer A]\n" in question


def test_a_function_wins_loses_and_ties_by_its_scores_and_failures_are_left_out(
    contest: Contest, tmp_path: Path
) -> None:
    settings = JudgeRecipe(type="function", function="support.online_judges:dislikes_bread", retries=0)
    online_judges.calls.clear()
    tie = answered("ask about the moon", " a b c", " d e f", 3)
    source, items = judged(contest, settings, tmp_path, [*ROLLOUTS, tie])
    assert source.values.tolist() == [1.0, 0.5, 0.5] and source.num_failed == 1
    assert [item["value"] for item in items] == [1.0, None, 0.5, 0.5]
    num_calls = len(online_judges.calls)
    judged(contest, settings, tmp_path, [*ROLLOUTS, tie])
    assert online_judges.calls[num_calls:] == [["ask about bread"] * 2]
    source, _ = judged(contest, settings, tmp_path / "other", [ROLLOUTS[1]])
    assert len(source.values) == 0 and source.num_failed == 1 and "no bread" in text(contest.console)


def test_a_function_whose_file_has_changed_judges_anew(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taste.py").write_text(
        "def score(*, prompts, completions): return list(map(len, completions))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = JudgeRecipe(type="function", function="taste:score")
    assert judged(contest, settings, tmp_path)[0].values.tolist() == [1.0, 0.0, 0.5]
    with (tmp_path / "taste.py").open("a") as file:
        file.write("# another\n")
    judged(contest, settings, tmp_path)
    assert len((tmp_path / "judgements.jsonl").read_text().splitlines()) == 4


def test_a_reward_model_s_games_are_won_by_the_higher_score_and_its_weights_are_its_name(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer()
    config = tiny_config("llama", vocab_size=len(tokenizer), num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    settings = JudgeRecipe(type="reward_model", path=str(tmp_path / "judge"))
    tokenizer.save_pretrained(tmp_path / "judge")
    scored, score = list[int](), RewardModelJudge.score

    def counted(self: RewardModelJudge, rollouts: Any) -> Any:
        scored.append(len(rollouts))
        return score(self, rollouts)

    monkeypatch.setattr(RewardModelJudge, "score", counted)
    found = []
    for sign in (1, 1, -1):
        with torch.no_grad():
            model.score.weight.mul_(sign)
        model.save_pretrained(tmp_path / "judge")
        found.append(judged(contest, settings, tmp_path)[0].values)
    assert scored == [2, 2]  # the same weights are not asked twice; equal answers never
    assert found[0].tolist() == found[1].tolist() == (1 - found[2]).tolist()
    assert set(found[0][:2]) <= {0.0, 1.0} and found[0][2] == 0.5
