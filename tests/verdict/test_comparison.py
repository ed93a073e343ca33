"""`dpopack verdict`, as a user runs it, and what is left of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from support.dpopack import Dpopack
from support.rows import write_rows
from support.tiny_adapters import saved_adapter
from support.tiny_run import tiny_checkpoint, tiny_pairs

import dpo_pack.trainer as train_module
from dpo_pack import api
from dpo_pack.system.files import read_json
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.verdict import benchmarks, conclusion

FUNCTION = {"type": "function", "function": "support.online_judges:count_e"}
SHORT = "verdict.max_new_tokens=8"


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A finished run."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


def command_in(directory: Path, gain: float, name: str = "score.py", spread: int = 0) -> str:
    """A command that gives the model in a directory model/ of a run `gain` more than others, on 40 items."""
    (directory / name).write_text(
        "import json, sys\n"
        "new = sys.argv[1].endswith('run/model')\n"
        f"scores = [n % 3 + new * ({gain} + {spread} * (n % 2 - 0.5)) for n in range(40)]\n"
        "print(*(json.dumps({'id': n, 'score': score}) for n, score in enumerate(scores)), sep='\\n')\n"
    )
    return f"{sys.executable} {directory / name} {{model}}"


def judge_file(directory: Path, judge: Any = FUNCTION) -> Path:
    (directory / "judge.yaml").write_text(yaml.safe_dump(judge))
    return directory / "judge.yaml"


@pytest.mark.parametrize(
    ("gain", "spread", "expected", "conclusion"),
    [(0.3, 0, 0, "better"), (-0.3, 0, 3, "worse"), (0, 1, 4, "cannot tell")],
)
def test_the_status_says_what_the_sentence_says(
    gain: float, spread: int, expected: int, conclusion: str, run: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    ended = dpopack("verdict", run, "--command", command_in(tmp_path, gain, spread=spread))
    assert ended.status == expected
    assert ended.out.splitlines()[-1].startswith(conclusion)
    assert read_json(run / "run.json")["verdict"]["conclusion"] == conclusion


def test_a_verdict_leaves_its_evidence_and_is_seen_in_the_run(
    run: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    written, words = tmp_path / "verdict.json", ["--command", command_in(tmp_path, 0.3)]
    ended = dpopack("verdict", run, *words, "--judge", judge_file(tmp_path), SHORT, "--json", written)
    found = json.loads(written.read_text())
    judge, command = found["sources"]
    assert (judge["name"], judge["kind"], judge["n"]) == ("support.online_judges:count_e", "function", 6)
    assert (command["says"], command["n"], found["conclusion"]) == ("above", 40, "better")
    assert ended.out.count("better by command: ") >= 4 and "score 1.3" in ended.out
    info = read_json(run / "run.json")
    assert info["verdict"] == {"against": "model", **found} and info["status"] == "finished"
    items = [json.loads(line) for line in (run / "verdict" / "items.jsonl").read_text().splitlines()]
    assert [item["source"] for item in items] == [judge["name"]] * 6 + ["command"] * 40
    assert items[0].keys() >= {"prompt", "start", "new", "value"}
    for seen in (run / "report.html", run / "model" / "README.md", run / "console.log"):
        assert found["sentence"] in seen.read_text().replace("&#39;", "'"), seen
    card = (run / "model" / "README.md").read_text()
    assert "| command | 40 | 0.300 (" in card
    assert card.index("## Compared with its start") < card.index("## Recipe")
    dpopack("verdict", run, *words)
    assert (run / "model" / "README.md").read_text().count("## Compared with its start") == 1


@pytest.mark.slow
def test_looking_again_counts_unless_the_evidence_is_the_same(
    run: Path, tmp_path: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    real = conclusion.conclude

    def noting(*sources: Any, **options: Any) -> Any:
        asked.append((options["number"], len(options["earlier"])))
        return real(*sources, **options)

    monkeypatch.setattr("dpo_pack.verdict.comparison.conclude", noting)
    one, other = (command_in(tmp_path, gain, f"{gain}.py") for gain in (0.1, 0.2))
    for command in (one, one, other):
        ended = dpopack("verdict", run, "--command", command)
    assert asked == [(1, 0), (2, 0), (3, 1)] and "verdict number 3" in ended.out
    other_start = tiny_checkpoint(tmp_path / "other", seed=3)
    dpopack("verdict", run, "--command", other, "--against", other_start)
    assert asked[3] == (1, 0)


@pytest.mark.slow
def test_a_verdict_that_was_stopped_goes_on_with_the_same_result(
    run: Path, tmp_path: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(shutil.copytree(run, tmp_path / "whole" / "run"))
    words = ["--judge", judge_file(tmp_path), "--command", command_in(tmp_path, 0.3), SHORT]
    assert dpopack("verdict", whole, *words, "--json", tmp_path / "whole.json").status == 0
    name, real = "dpo_pack.verdict.comparison.run_benchmarks", benchmarks.run_benchmarks

    def stopped(*arguments: Any) -> Any:
        raise Interrupted(15)

    monkeypatch.setattr(name, stopped)
    assert dpopack("verdict", run, *words).status == 143
    assert "verdict" not in read_json(run / "run.json") and not (run / "verdict" / "history.jsonl").exists()
    monkeypatch.setattr(name, real)
    again = dpopack("verdict", run, *words, "--json", tmp_path / "again.json")
    assert "Loading" not in again.out  # no model answers again
    assert (tmp_path / "again.json").read_text() == (tmp_path / "whole.json").read_text()
    for name in ("items.jsonl", "answers.jsonl", "judgements.jsonl"):  # which name the models' directories
        of_whole = (whole / "verdict" / name).read_text().replace(str(whole), str(run))
        assert (run / "verdict" / name).read_text() == of_whole


def test_code_of_a_run_s_recipe_runs_only_if_the_user_trusts_it(
    run: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    command, marker = command_in(tmp_path, 0.3), tmp_path / "it ran"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    task = tmp_path / "task.yaml"
    task.write_text("task: x")
    bad = {"command": f"touch '{marker}' {{model}}", "lm_eval": str(marker), "tasks": [str(task)]}
    recipe["verdict"] = {**bad, "judges": [FUNCTION]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    refused = dpopack("verdict", run)
    assert refused.status == 2 and not marker.exists() and refused.err.count("\n") == 1
    for key in (*bad, "judges"):
        assert f"verdict.{key} (" in refused.err
    assert "--trust-recipe" in refused.err
    recipe["verdict"] = {"command": command}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert "verdict.command" in dpopack("verdict", run, "verdict.num_prompts=3").err
    assert dpopack("verdict", run, "--trust-recipe").status == 0
    assert dpopack("verdict", run, "--command", command_in(tmp_path, -1, "own.py")).status == 3


def test_what_is_no_verdict_is_refused_in_one_line(run: Path, tmp_path: Path, dpopack: Dpopack) -> None:
    command, judge = command_in(tmp_path, 0.3), judge_file(tmp_path)
    model = tiny_checkpoint(tmp_path / "plain")
    unfinished = Path(shutil.copytree(run, tmp_path / "unfinished"))
    info = read_json(run / "run.json")
    (unfinished / "run.json").write_text(json.dumps(info | {"status": "interrupted"}))
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    for words, what in (
        ([run], "verdict: no source of evidence: name judges of type function, reward_model or llm"),
        ([run, "--judge", "no.yaml"], "--judge: no.yaml is no file that can be read"),
        ([run, "--judge", empty], "--judge: "),
        ([run, "--tasks", "no.yaml"], "verdict.tasks.0: no such file"),
        ([run, "--command", command, "--output", tmp_path / "v"], "run, whose verdict is in"),
        ([run, "--command", command, "verdict.primary=x"], "verdict.primary: no source has this name"),
        ([unfinished, "--command", command], "this run is not finished (interrupted)"),
        ([model, "--command", command], "--output: "),
        ([model, "--command", command, "--output", tmp_path / "v"], "give it with --against MODEL"),
        ([model, "--judge", judge, "--output", tmp_path / "v", "--against", model], "verdict.prompts: "),
    ):
        ended = dpopack("verdict", *words)
        assert ended.status == 2 and what in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (run / "verdict").exists() and not (tmp_path / "v").exists()


@pytest.mark.slow
def test_a_model_or_an_adapter_that_is_no_run_has_a_verdict_in_a_directory_of_yours(
    straight: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    command = command_in(tmp_path, 0.3)
    plain, adapter = tiny_checkpoint(tmp_path / "plain"), tmp_path / "run" / "model"
    saved_adapter(adapter, plain)
    calls: list[list[str | Path]] = [
        [adapter],
        [straight / "model", "--against", plain],
        [plain, "--against", straight],
    ]
    for number, words in enumerate(calls):
        output = tmp_path / f"verdict {number}"
        ended = dpopack("verdict", *words, "--command", command, "--output", output)
        assert ended.status in (0, 3, 4), ended.err
        assert (output / "items.jsonl").exists() and (output / "history.jsonl").exists()
    assert not (straight / "verdict").exists()


def test_training_ends_with_a_verdict_in_another_process(
    run: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    statuses = (0, 3, 4, 2)

    def start(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
        started.append((words, env))
        return subprocess.CompletedProcess(words, statuses[len(started) - 1])

    monkeypatch.setattr("subprocess.run", start)
    monkeypatch.setenv("RANK", "0")
    for status in statuses:
        train_module.begin_verdict(run, console)
        told = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("has no verdict; the same command tries again" in told) == (status == 2)
    words, environment = started[0]
    assert words[-4:] == ["dpo_pack", "verdict", str(run), "--trust-recipe"]
    assert "RANK" not in environment and environment["PATH"] == os.environ["PATH"]
    info = read_json(run / "run.json")
    (run / "run.json").write_text(json.dumps(info | {"verdict": {}}))
    train_module.begin_verdict(run, console)
    assert len(started) == 4


@pytest.mark.slow
def test_a_run_on_right_pairs_is_better_by_its_own_measure_and_one_on_swapped_pairs_worse(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pairs prefer answers that say yes. The loss makes a random model write, too."""
    rows = tiny_pairs(random.Random(1), 220)
    write_rows(recipe.parent / "many.jsonl", rows[:120])
    write_rows(recipe.parent / "others.jsonl", rows[120:])
    overrides: dict[str, Any] = {
        "data.train": str(recipe.parent / "many.jsonl"),
        "loss.type": [{"type": "sigmoid"}, {"type": "sft", "weight": 1.0}],
        "optim.lr": 2e-3,
        "train.epochs": 6,
        "verdict": {
            "judges": [{"type": "function", "function": "support.online_judges:says_yes"}],
            "prompts": str(recipe.parent / "others.jsonl"),
            "max_new_tokens": 24,
        },
    }
    for name, columns in (("better", {}), ("worse", {"chosen": "rejected", "rejected": "chosen"})):
        overrides |= {"output_dir": str(recipe.parent / name), "data.train.columns": columns}
        run = api.train(recipe, **overrides)
        assert f"\n{name} by support.online_judges:says_yes" in capfd.readouterr().out
        assert read_json(run.path / "run.json")["verdict"]["conclusion"] == name
        assert (run.path / "verdict" / "answers.jsonl").is_file()
        api.train(recipe, **overrides)
        assert "nothing to do" in capfd.readouterr().out
