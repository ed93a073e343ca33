"""Tasks of lm-eval and commands of the user's: how they are run, read and paired."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.lm_eval_stand_in import CALLS, REAL_FILES, SCORES, write_stand_in
from support.refusals import refusal
from support.tiny_run import tiny_checkpoint

from dpo_pack.recipe.load import parse_recipe
from dpo_pack.recipe.verdict import VerdictRecipe
from dpo_pack.run.models import resolve_model
from dpo_pack.run.setup import prepare_tokenizer
from dpo_pack.system.errors import RunError
from dpo_pack.verdicts.answers import Contest
from dpo_pack.verdicts.benchmarks import pair_items, read_lm_eval, run_benchmarks
from dpo_pack.verdicts.conclusion import conclude

CPU = torch.device("cpu")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models; the second gets the higher scores."""
    directory = tmp_path_factory.mktemp("models")
    start = tiny_checkpoint(directory / "start")
    new = tiny_checkpoint(directory / "new", seed=1)
    (start / SCORES).write_text("[1, 0, 0, 0]")
    (new / SCORES).write_text("[0, 1, 1, 0]")
    return start, new


Contestant = Callable[..., Contest]


@pytest.fixture
def contest(models: tuple[Path, Path], tmp_path: Path, console: Console) -> Contest:
    start, new = map(str, models)
    tree = {"output_dir": str(tmp_path), "model": {"path": start}, "data": {"train": "unused"}}
    recipe = parse_recipe(tree, [f"reference.cache_dir={tmp_path / 'cache'}"])
    return Contest(
        recipe=recipe,
        start=resolve_model(recipe, CPU),
        new=resolve_model(recipe, CPU, new, recipe_key="verdict"),
        tokenizer=prepare_tokenizer(recipe),
        device=CPU,
        console=console,
    )


def verdict_of(**values: Any) -> VerdictRecipe:
    return VerdictRecipe.model_validate(values)


def test_items_of_a_real_run_of_lm_eval_have_the_first_filter_and_what_the_model_said() -> None:
    lines = read_lm_eval(REAL_FILES)
    assert len(lines) == 8 and len({line["item"] for line in lines}) == 8
    free, choice = (
        next(line for line in lines if line["task"] == task) for task in ("free_facts", "simple_facts")
    )
    assert " first-word " in free["item"] and free["scores"] == {"exact_match": 0.0}
    assert free["answer"] == "L'aujourcé! I" and "The capital of France is" in free["prompt"]
    assert choice["scores"] == {"acc": 1.0, "acc_norm": 1.0} and choice["answer"] == "Paris"


def test_a_metric_whose_lower_values_are_better_changes_its_sign_and_a_list_is_no_metric(
    tmp_path: Path,
) -> None:
    (real,) = REAL_FILES.glob("samples_simple*")
    sample = json.loads(real.read_text().splitlines()[0])
    names = {"words": [1.0, 2.0], "perplexity": -3.5, "errors": 0.25, "broken": float("nan"), "right": True}
    names["large"] = 10**400
    (tmp_path / real.name).write_text(json.dumps(sample | {"metrics": list(names)} | names))
    lower = {"simple_facts": {name: name == "right" for name in names}}
    (tmp_path / "results_x.json").write_text(json.dumps({"higher_is_better": lower}))
    (line,) = read_lm_eval(tmp_path)
    assert line["scores"] == {"perplexity": -3.5, "errors": -0.25, "right": True}


def line_of(item: str, task: str = "t", **scores: float) -> dict[str, Any]:
    return {"item": item, "task": task, "scores": scores, "prompt": item, "answer": f"said {item}"}


def test_a_group_is_pooled_and_a_metric_is_one_that_each_item_of_both_models_has() -> None:
    start = [line_of("a", f1=0.2, acc=1), line_of("b", f1=0.1, acc=0), line_of("c", "other", em=0)]
    new = [line_of("c", "other", em=1), line_of("b", acc=1), line_of("a", f1=0.9, acc=1)]
    source, items = pair_items("group", "task", start, new)
    assert source.values.tolist() == [0, 1, 1] and source.num_failed == 0
    assert [(item["item"], item["metric"]) for item in items] == [("a", "acc"), ("b", "acc"), ("c", "em")]
    assert items[2] == {**items[2], "prompt": "c", "start": "said c", "new": "said c", "value": 1}
    message = refusal(lambda: pair_items("group", "task", start, new[1:]), RunError)
    assert "'c' of the start (1 such items)" in message
    message = refusal(lambda: pair_items("t", "task", [line_of("a", f1=1)], [line_of("a", acc=1)]), RunError)
    assert message.endswith("t has no metric with one finite number an item")


def test_lm_eval_gets_both_models_the_same_way(
    contest: Contest, models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    task = tmp_path / "own" / "mine.yaml"
    task.write_text("group: both\ntask:\n  - simple_facts\n  - free_facts\n")
    contest.tokenizer.chat_template = TEMPLATE
    verdict = verdict_of(tasks=["simple_facts", str(task)], lm_eval=str(write_stand_in(tmp_path)))
    (simple, items), (mine, pooled) = run_benchmarks(contest, verdict)
    assert (simple.name, simple.kind, simple.values.tolist()) == ("simple_facts", "task", [-1, 1, 1, 0])
    assert (mine.name, len(mine.values), len(pooled)) == ("mine", 8, 8)
    assert items[0]["metric"] == "acc" and items[0]["start"] == items[0]["new"] == "Paris"
    calls = [json.loads(line) for line in (tmp_path / CALLS).read_text().splitlines()]
    named = [json.loads(call.pop(call.index("--model_args") + 1)) for call in calls]
    assert [one["pretrained"] for one in named] == [*map(str, models), *map(str, models)]
    assert {(one["dtype"], one["trust_remote_code"]) for one in named} == {("float32", False)}
    for call in calls:
        del call[call.index("--output_path") + 1]
    assert calls[0] == calls[1] and calls[2] == calls[3]
    rest = ["--batch_size", "8", "--seed", "0", "--log_samples", "--output_path", "--apply_chat_template"]
    assert calls[0] == ["run", "--model", "hf", "--model_args", "--tasks", "simple_facts", *rest]
    including = ["--tasks", "both", "--include_path", str(task.parent)]
    assert calls[2] == ["run", "--model", "hf", "--model_args", *including, *rest]


def test_a_task_that_fails_is_a_source_without_a_result_and_the_console_says_why(
    contest: Contest, tmp_path: Path, console: Console
) -> None:
    verdict = verdict_of(tasks=["broken", "simple_facts"], lm_eval=str(write_stand_in(tmp_path)))
    (broken, items), (whole, _) = run_benchmarks(contest, verdict)
    assert not items and not len(broken.values) and len(whole.values)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ValueError: Tasks not found: broken." in told and "Warning: broken: lm-eval has no result" in told
    published = json.dumps(conclude([broken, whole], earlier=[], number=1))
    assert "broken has no result: lm-eval gave no usable scores." in published
    assert "ValueError" not in published and str(tmp_path) not in published


def command_that(writes: str, directory: Path) -> str:
    """A command that runs a line of Python, in which `new` says whether the model is the new one."""
    script = directory / "my score.py"
    script.write_text(f"import sys\nnew = sys.argv[1].endswith('new')\n{writes}\n")
    return f"{sys.executable} '{script}' {{model}}"


def test_a_command_gives_a_score_for_each_id(contest: Contest, tmp_path: Path) -> None:
    writes = """print('{"id": 7, "score": %s, "answer": "ok"}\\n\\n{"id": "x", "score": 2}' % (0.5 + new))"""
    verdict = verdict_of(command=command_that(writes, tmp_path))
    ((source, items),) = run_benchmarks(contest, verdict)
    assert (source.name, source.kind, source.values.tolist()) == ("command", "command", [1.0, 0.0])
    assert items[0] == {
        "prompt": "7",
        "value": 1.0,
        "item": "7",
        "metric": "score",
        "start": "ok",
        "new": "ok",
    }
    assert items[1]["start"] == "score 2"


@pytest.mark.parametrize(
    ("writes", "what"),
    [
        ('print(\'{"id": 1, "score": 1}\\n\' * 2)', "wrote the id 1 again in line 2"),
        ("print('loading')", "wrote a line without id and finite score (line 1: 'loading')"),
        ('print(\'{"id": 1, "score": NaN}\')', "without id and finite score (line 1"),
        ("""print('{"id": 1, "score": 1%s}' % ("0" * 400))""", "without id and finite score (line 1"),
        ('print(\'{"id": 1, "score": "1"}\')', "without id and finite score (line 1"),
        ('print(\'{"id": %d, "score": 1}\' % new)', "no score of the item '0' of the start (2 such items)"),
        ("pass", "wrote nothing to standard output"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_lines_of_a_command_that_are_wrong_end_the_verdict_in_one_line(
    writes: str, what: str, contest: Contest, tmp_path: Path
) -> None:
    verdict = verdict_of(command=command_that(writes, tmp_path))
    assert what in refusal(lambda: run_benchmarks(contest, verdict), RunError)
    command_that("""print('{"id": 1, "score": 1}')""", tmp_path)
    assert run_benchmarks(contest, verdict)[0][0].values.tolist() == [0.0]  # nothing wrong was kept


def test_a_command_that_is_not_there_is_named(contest: Contest, tmp_path: Path) -> None:
    verdict = verdict_of(command="./no-such-program {model}")
    message = refusal(lambda: run_benchmarks(contest, verdict), RunError)
    assert message == "verdict.command: cannot start ./no-such-program: No such file or directory"
