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

import numpy as np
import pytest
import typer
import yaml
from rich.console import Console
from support.dpopack import Dpopack
from support.refusals import refusal
from support.rows import write_rows
from support.tiny_adapters import saved_adapter
from support.tiny_run import tiny_checkpoint, tiny_pairs

import dpo_pack.trainer as train_module
from dpo_pack import api
from dpo_pack.commands import main
from dpo_pack.recipe.load import load_recipe
from dpo_pack.run.export import add_to_card
from dpo_pack.run.run_dir import RunDir, begin_run
from dpo_pack.system.errors import RecipeError
from dpo_pack.system.files import read_json
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.verdicts import benchmarks, comparison, conclusion

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
    told = ended.out.splitlines()[-1]
    assert told.startswith("run compared with its start, ") and f"/model: {conclusion}" in told
    assert read_json(run / "run.json")["verdict"]["its start"]["conclusion"] == conclusion


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
    assert info["verdict"] == {"its start": found} and info["status"] == "finished"
    items = [json.loads(line) for line in (run / "verdict" / "items.jsonl").read_text().splitlines()]
    assert [item["source"] for item in items] == [judge["name"]] * 6 + ["command"] * 40
    assert items[0].keys() >= {"prompt", "start", "new", "value"}
    for seen in (run / "report.html", run / "model" / "README.md", run / "console.log"):
        assert found["sentence"] in seen.read_text().replace("&#39;", "'"), seen
    card = (run / "model" / "README.md").read_text()
    assert "| command | 40 | 0.300 (" in card
    assert card.index("## Compared with its start") < card.index("## Recipe")
    other = tiny_checkpoint(tmp_path / "other", seed=3)
    for more in ([], ["--against", other]):
        ended = dpopack("verdict", run, *words, *more)
    assert ended.out.splitlines()[-1].startswith("run compared with other: better by command")
    card, page = ((run / name).read_text() for name in ("model/README.md", "report.html"))
    assert card.count("## Compared with its start\n") == card.count("## Compared with other\n") == 1
    assert "Better than its start?" in page and "Better than other?" in page
    assert read_json(run / "run.json")["verdict"].keys() == {"its start", "other"}


@pytest.mark.slow
def test_looking_again_counts_unless_the_evidence_is_the_same(
    run: Path, tmp_path: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    real = conclusion.conclude

    def noting(*sources: Any, **options: Any) -> Any:
        asked.append((options["number"], len(options["earlier"])))
        return real(*sources, **options)

    monkeypatch.setattr("dpo_pack.verdicts.comparison.conclude", noting)
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
    name, real = "dpo_pack.verdicts.comparison.run_benchmarks", benchmarks.run_benchmarks

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
    run: Path, tmp_path: Path, dpopack: Dpopack, monkeypatch: pytest.MonkeyPatch
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
    server = {"type": "llm", "endpoint": {"url": "http://evil/v1", "model": "m", "api_key_env": "MY_KEY"}}
    recipe |= {"verdict": {"judges": [server]}, "model": recipe["model"] | {"trust_remote_code": True}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    refused = dpopack("verdict", run)
    assert "verdict.judges (http://evil/v1), model.trust_remote_code (True)" in refused.err
    refused = dpopack("verdict", run, "--judge", judge_file(tmp_path))
    assert "model.trust_remote_code" in refused.err and "evil" not in refused.err
    monkeypatch.chdir(tmp_path)  # where a directory has the name of a task
    recipe |= {"verdict": {"tasks": [run.name]}, "model": recipe["model"] | {"trust_remote_code": False}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert "verdict.tasks (run)" in dpopack("verdict", run).err
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
        ([run, "--tasks", "no.yaml", f"verdict.lm_eval={empty}"], "verdict.tasks.0: no such file"),
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


def test_a_start_that_has_changed_since_the_run_is_refused(
    run: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    command = command_in(tmp_path, 0.3)
    other = tiny_checkpoint(tmp_path / "other", seed=3)
    ended = dpopack("verdict", run, "--command", command, f"model.path={other}")
    assert ended.status == 2 and "is no longer the model with which this run began" in ended.err
    assert dpopack("verdict", run, "--command", command, "--against", other).status == 0


def test_a_verdict_is_one_process(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "start it alone" in refusal(lambda: main.verdict(str(run)), RecipeError)


def test_words_of_the_command_line_reach_the_recipe_as_they_are(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def noting(name: str, overrides: list[str], *others: Any, **options: Any) -> Any:
        given.append(load_recipe(Path(name), overrides).verdict)
        return {"conclusion": "better"}

    monkeypatch.setattr("dpo_pack.verdicts.comparison.give_verdict", noting)
    judge = {"type": "llm", "endpoint": {"url": "http://h/v1", "model": "m"}, "instructions": "Be kind 🙂"}
    with pytest.raises(typer.Exit):
        main.verdict(str(run), tasks="ifeval, mmlu", judge=[judge_file(tmp_path, judge)])
    assert given[0].tasks == ("ifeval", "mmlu") and given[0].judges[0].instructions == "Be kind 🙂"


def test_looks_outlive_a_run_that_is_overwritten_and_lines_that_cannot_be_read(
    run: Path, tmp_path: Path, dpopack: Dpopack
) -> None:
    command = command_in(tmp_path, 0.3)
    shutil.copytree(run, tmp_path / "kept")
    dpopack("verdict", run, "--command", command)
    looks = run / "verdict" / "history.jsonl"
    with looks.open("a") as file:
        file.write("{broken\n")
    begin_run(RunDir(root=run, checkpoint=None, is_finished=False), "", "cpu", None)
    assert [path.name for path in (run / "verdict").iterdir()] == ["history.jsonl"]
    assert not (run / "model").exists()
    shutil.copytree(tmp_path / "kept", run, dirs_exist_ok=True)
    ended = dpopack("verdict", run, "--command", command)
    assert "This is verdict number 2" in ended.out and "1 line cannot be read" in ended.out
    assert len(looks.read_text().splitlines()) == 3


def test_a_card_s_cells_keep_their_bars(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Model\n")
    add_to_card(tmp_path / "README.md", "Compared with a|b", "Better.", [["source"], ["a|b"]])
    assert "| a\\|b |" in (tmp_path / "README.md").read_text()


def test_long_texts_end_with_a_mark_and_the_table_s_items_are_shown(console: Console) -> None:
    items = [{"prompt": "p", "start": "a" * 601, "new": "b" * 600, "value": 1.0}]
    source = conclusion.Source(name="judge", kind="function", values=np.array([1.0]))
    comparison.show(conclusion.conclude([source], earlier=[], number=1), [(source, items)], console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert told.count("…") == 1 and told.count("a" * 20) and "better by judge: p" in told


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
    statuses = (0, 3, 4, 2, 0, 0)

    def start(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
        started.append((words, env))
        return subprocess.CompletedProcess(words, statuses[len(started) - 1])

    monkeypatch.setattr("subprocess.run", start)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    recipe = load_recipe(run, ["verdict.tasks=[ifeval]"])  # the section was added when the run was finished
    assert recipe.verdict is not None
    for status in statuses[:4]:
        train_module.begin_verdict(run, recipe.verdict, console)
        told = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("has no verdict; the same command tries again" in told) == (status == 2)
    words, environment = started[0]
    assert words[-4:] == ["dpo_pack", "verdict", str(run), "--trust-recipe"]
    assert not environment.keys() & {"RANK", "OMP_NUM_THREADS"} and environment["PATH"] == os.environ["PATH"]
    assert load_recipe(run) == recipe
    info = read_json(run / "run.json")
    for against, number in (("other", 5), ("its start", 5)):
        (run / "run.json").write_text(json.dumps(info | {"verdict": {against: {}}}))
        train_module.begin_verdict(run, recipe.verdict, console)
        assert len(started) == number
    changed = load_recipe(run, ["verdict.tasks=[mmlu]"])
    assert changed.verdict is not None
    train_module.begin_verdict(run, changed.verdict, console)
    assert len(started) == 6 and load_recipe(run) == changed


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
        assert f"model: {name} by support.online_judges:says_yes" in capfd.readouterr().out
        assert read_json(run.path / "run.json")["verdict"]["its start"]["conclusion"] == name
        assert (run.path / "verdict" / "answers.jsonl").is_file()
        api.train(recipe, **overrides)
        told = capfd.readouterr().out
        assert "nothing to do" in told and "compared with its start" not in told
