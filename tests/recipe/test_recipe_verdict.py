"""The `verdict` section: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_recipe import SMALLEST, changed_keys, load, message_of

from dpo_pack.recipe.load import dump_recipe, verdict_problems
from dpo_pack.recipe.verdict import VerdictRecipe

HELD_OUT = SMALLEST.replace("pairs.jsonl", "pairs.jsonl, eval: {fraction: 0.1}")
FUNCTION = "{type: function, function: 'my.judges:score'}"
SERVER = "{url: 'http://localhost:8000/v1', model: big}"
SECRET = f"{{type: llm, endpoint: {SERVER[:-1]}, urls: 'http://k:v@h'}}}}"


def section(values: str) -> VerdictRecipe:
    verdict = load(f"verdict={values}", text=HELD_OUT).verdict
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("values", "key", "what"),
    [
        ("{}", "verdict.judges", "no source of evidence: name judges"),
        ("{num_prompts: 9}", "verdict.judges", "--tasks NAME,FILE.yaml"),
        ("{tasks: [a, x/a.yaml]}", "verdict.tasks", "two sources have one name; leave one out (a, a)"),
        ("{tasks: [a], primary: b}", "verdict.primary", "no source has this name; they are a"),
        ("{command: my-score}", "verdict.command", "write {model} where its path belongs"),
        ('{command: "my-score \'{model}"}', "verdict.command", "No closing quotation"),
        ("{tasks: [a], sampling: {temperature: -1}}", "verdict.sampling.temperature", "must be a"),
        ("{tasks: [a], task: [b]}", "verdict.task", "did you mean verdict.tasks?"),
        ("{tasks: [a], prompts: {path: p.jsonl, share: 2}}", "verdict.prompts.share", "leave it out"),
        (f"{{judges: [{FUNCTION[:-1]}, weight: 2.0}}]}}", "verdict.judges.0.weight", "leave it out"),
        (f"{{judges: [{SECRET}]}}", "verdict.judges.0.endpoint.urls", "unknown key"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values: str, key: str, what: str) -> None:
    message = message_of(lambda: section(values))
    assert message.startswith(f"{key}: ") and what in message and "k:v" not in message


def test_judges_need_prompts_that_are_held_out() -> None:
    message = message_of(lambda: load(f"verdict.judges=[{FUNCTION}]"))
    assert message.startswith("verdict.prompts: nothing is held out; name a data source")
    load(f"verdict={{judges: [{FUNCTION}], prompts: others.jsonl}}")
    load("verdict={tasks: [ifeval]}")


def test_sources_of_evidence_have_different_names() -> None:
    llm = f"{{type: llm, endpoint: {SERVER}}}"
    model = "{type: reward_model, path: /models/reward}"
    verdict = section(
        f"{{judges: [{llm}, {FUNCTION}, {model}, {llm}], tasks: [mmlu, own/task.yaml], primary: big}}"
    )
    assert verdict.judge_names == ["big", "my.judges:score", "reward", "big (4)"]
    assert verdict.task_names == ["mmlu", "task"]


def test_a_recipe_says_before_the_run_what_its_verdict_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    llm = f"{{type: llm, endpoint: {SERVER}}}"
    found = dict(
        verdict_problems(section(f"{{judges: [{llm}], tasks: [ifeval, ./no.yaml], prompts: ./no.jsonl}}"))
    )
    assert found.keys() == {"verdict.judges.0", "verdict.tasks", "verdict.tasks.1", "verdict.prompts.path"}
    assert "pip install 'lm-eval[hf]" in found["verdict.tasks"]
    elsewhere = section("{tasks: [ifeval], lm_eval: no-lm-eval}")
    assert dict(verdict_problems(elsewhere)).keys() == {"verdict.lm_eval"}
    (tmp_path / "lm-eval").touch()
    assert not list(verdict_problems(section(f"{{tasks: [ifeval], lm_eval: '{tmp_path}/lm-eval'}}")))


def test_a_run_may_go_on_with_another_verdict_and_others_see_no_server_and_no_path() -> None:
    one = load(f"verdict={{judges: [{FUNCTION}], command: '/home/me/score {{model}}'}}", text=HELD_OUT)
    other = load("verdict={tasks: [ifeval]}", text=HELD_OUT)
    assert not changed_keys(one, other) and not changed_keys(one, load(text=HELD_OUT))
    llm = load(f"verdict={{judges: [{{type: llm, endpoint: {SERVER}}}]}}", text=HELD_OUT)
    for recipe in (one, llm):
        assert not any(
            private in dump_recipe(recipe, for_others=True) for private in ("/home/me", "localhost")
        )
