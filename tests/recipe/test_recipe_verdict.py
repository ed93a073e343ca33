"""The `verdict` section: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_recipe import SMALLEST, changed_keys, load, message_of

from dpo_pack.recipe.load import check_environment, dump_recipe
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.system.errors import RecipeError

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
        ("{tasks: [/my/tasks]}", "verdict.tasks.0", "neither the name of one task nor a YAML file"),
        ('{tasks: ["/x/evil.yaml,arc_easy"]}', "verdict.tasks.0", "neither the name of one task"),
        ("{tasks: [a, 'b*']}", "verdict.tasks.1", "neither the name of one task"),
        ("{tasks: [a], primary: b}", "verdict.primary", "no source has this name; they are a"),
        ("{command: my-score}", "verdict.command", "write {model} where its path belongs"),
        ('{command: "my-score \'{model}"}', "verdict.command", "No closing quotation"),
        ("{tasks: [a], sampling: {temperature: -1}}", "verdict.sampling.temperature", "must be a"),
        ("{tasks: [a], task: [b]}", "verdict.task", "did you mean verdict.tasks?"),
        ("{tasks: [a], prompts: {path: p.jsonl, share: 2}}", "verdict.prompts.share", "leave it out"),
        (
            "{tasks: [a], prompts: {path: p.jsonl, min_margin: 1}}",
            "verdict.prompts.min_margin",
            "leave it out",
        ),
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
    values = f"judges: [{llm}, {FUNCTION}, {model}], tasks: [mmlu, own/task.yaml], primary: big"
    verdict = section(f"{{{values}}}")
    assert verdict.judge_names == ["big", "my.judges:score", "reward"]
    assert verdict.task_names == ["mmlu", "task"]
    assert "two sources have one name" in message_of(lambda: section(f"{{judges: [{llm}, {llm}]}}"))


def test_a_command_may_hold_what_only_a_path_may_not() -> None:
    command = """sh -c 'echo ${HOME} "$1"' sh {model}"""
    assert load(f"verdict.command={json.dumps(command)}").verdict.command == command  # type: ignore[union-attr]


def test_a_recipe_says_before_the_run_what_its_verdict_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("dpo_pack.recipe.load.install_command", lambda extra: f"install {extra}")
    llm = f"{{type: llm, endpoint: {SERVER}}}"

    def lacks(values: str, **options: Any) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            check_environment(load(f"verdict={values}", text=HELD_OUT), **options)
        return list(caught.value.problems)

    values = f"{{judges: [{llm}], tasks: [ifeval, ./no.yaml], prompts: ./no.jsonl}}"
    found = lacks(values, only="verdict")
    keys = ["verdict.prompts.path", "verdict.tasks.1", "verdict.tasks", "verdict.judges.0"]
    assert [line.partition(":")[0] for line in found] == keys
    assert found[2].endswith("install verdict")
    assert set(found) < set(lacks(values)) and not set(found) & set(lacks(values, trains=False))
    (missing,) = lacks("{tasks: [ifeval], lm_eval: no-lm-eval}", only="verdict")
    assert missing.startswith("verdict.lm_eval: ")
    (tmp_path / "lm-eval").touch()
    there = load(f"verdict={{tasks: [ifeval], lm_eval: '{tmp_path}/lm-eval'}}", text=HELD_OUT)
    check_environment(there, only="verdict")


def test_a_run_may_go_on_with_another_verdict_and_others_see_no_server_and_no_path() -> None:
    one = load(f"verdict={{judges: [{FUNCTION}], command: '/home/me/score {{model}}'}}", text=HELD_OUT)
    other = load("verdict={tasks: [ifeval]}", text=HELD_OUT)
    assert not changed_keys(one, other) and not changed_keys(one, load(text=HELD_OUT))
    llm = load(f"verdict={{judges: [{{type: llm, endpoint: {SERVER}}}]}}", text=HELD_OUT)
    for recipe in (one, llm):
        assert not any(
            private in dump_recipe(recipe, for_others=True) for private in ("/home/me", "localhost")
        )
