"""The commands as Python functions."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

import dpo_pack
import dpo_pack.trainer as train_module
from dpo_pack import api
from dpo_pack.api import load
from dpo_pack.recipe.load import Recipe, load_recipe
from dpo_pack.system.errors import DpoPackError, RecipeError
from dpo_pack.system.interrupts import Interrupted


def margin_loss(logps: Any) -> Any:  # named by a test, never called
    raise NotImplementedError


def test_a_run_from_python_is_the_run_of_the_command(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides: dict[str, Any] = {"optim.lr": 5e-4, "output_dir": recipe.parent / "from-python"}
    run = api.train(recipe, **overrides)
    assert "Done: " in capsys.readouterr().out
    assert run.path == recipe.parent / "from-python"
    steps = [line for line in run.metrics if "loss" in line and "grad_norm" in line]
    assert steps and run.evaluation
    assert (run.model_path / "model.safetensors").is_file() and run.report_path.is_file()
    kept = yaml.safe_load((run.path / "recipe.yaml").read_text())
    assert kept["optim"]["lr"] == 5e-4
    again = api.train(run)  # of a finished run
    assert "nothing to do" in capsys.readouterr().out and again == run
    quiet = api.train(recipe, quiet=True, **{**overrides, "output_dir": recipe.parent / "quiet"})
    assert capsys.readouterr() == ("", "") and quiet.metrics[-1]["step"] == run.metrics[-1]["step"]
    reference = dpo_pack.precompute_ref(recipe)
    assert (reference["num_cached"], reference["num_computed"]) == (44, 0)
    assert reference["sets"].keys() == {"train", *run.evaluation}
    assert reference["sets"]["train"]["row"] == list(range(1, 17))
    for found in reference["sets"].values():
        assert max(found["ref_chosen_logps"] + found["ref_rejected_logps"]) < 0
    assert api.report(run.path, output=run.path / "page.html") == run.path / "page.html"
    assert (run.path / "page.html").read_text() == run.report_path.read_text()
    alone = run.report_path.read_text()
    monkeypatch.chdir(recipe.parent)
    assert api.report(run, quiet) == Path("comparison.html") and Path("comparison.html").is_file()
    assert run.report_path.read_text() == alone
    capsys.readouterr()
    results = dpo_pack.evaluate(run, quiet=True)
    assert capsys.readouterr().out == ""
    ((name, expected),) = run.evaluation.items()
    assert list(results) == [name]
    assert results[name]["rewards/accuracies"] == pytest.approx(expected["rewards/accuracies"], abs=1e-6)
    both = dpo_pack.evaluate(run.path, compare=(run, run.model_path), quiet=True)
    assert {"a", "b", "difference"} <= both[name].keys()
    answers = dpo_pack.sample(run, prompts=["ask red"], quiet=True)
    assert [row["model"] for row in answers] == [str(recipe.parent / "model"), str(run.model_path)]
    assert capsys.readouterr().out == ""


def test_python_has_the_three_answers_to_whether_a_run_would_start(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpo_pack.check(recipe) == [] and "tokenizer: " in capsys.readouterr().out
    (wrong,) = dpo_pack.check(recipe, quiet=True, **{"model.path": "./no"})
    assert wrong.startswith("model.path: ")
    (recipe.parent / "earlier").mkdir()
    (recipe.parent / "earlier" / "run.json").write_text("{}")
    (wrong,) = dpo_pack.check(recipe, quiet=True, **{"model.path": str(recipe.parent / "earlier")})
    assert "earlier is a run of dpo-pack" in wrong
    (wrong,) = dpo_pack.check(recipe, quiet=True, **{"model.path": "no-owner/no-model"})
    assert "there is no such directory; if it is a hub id: " in wrong
    memory = dpo_pack.inspect_packing(recipe, memory=10**9, devices=2)["memory"]
    assert (memory["num_devices"], memory["fits"]) == (2, False)
    found = dpo_pack.doctor(recipe, quiet=True)
    assert found["error"] is None and found["memory"]["fits"] and found["proofs"]
    assert capsys.readouterr() == ("", "") and not (recipe.parent / "run").exists()
    for name in api.REMOVED:
        with pytest.raises(RecipeError, match=f"^{name}: "):
            dpo_pack.train(recipe, **{name: 1})


def test_the_package_has_the_functions_of_api_and_no_other_name() -> None:
    for name in dpo_pack.__all__:
        assert getattr(dpo_pack, name).__doc__
    assert dir(dpo_pack) == sorted(["__version__", *dpo_pack.__all__])
    assert dpo_pack.DpoPackError is DpoPackError and dpo_pack.Recipe is Recipe and dpo_pack.train is api.train
    with pytest.raises(AttributeError):
        dpo_pack.trian  # noqa: B018


def test_a_dict_a_path_and_a_recipe_are_the_same_recipe(recipe: Path) -> None:
    of_path = load(recipe, {"loss.beta": 0.2})
    tree = yaml.safe_load(recipe.read_text().replace("${recipe_dir}", str(recipe.parent)))
    of_dict = load({**tree, "loss": {"beta": 0.2}}, {})
    of_recipe = load(load_recipe(recipe), {"loss.beta": 0.2})
    assert of_path == of_dict == of_recipe and of_path.loss.beta == 0.2


def test_a_dataset_as_a_source_is_kept_as_a_file_named_by_its_content(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPO_PACK_CACHE", str(tmp_path))
    rows = [json.loads(line) for line in (recipe.parent / "pairs.jsonl").read_text().splitlines()]
    data = Dataset.from_list(rows)
    paths = {
        load(recipe, {"data.train": [{"path": each, "name": "mine"}]}).data.train[0].path
        for each in (data, Dataset.from_list(rows))
    }
    other = load(recipe, {"data.train": data.select(range(8))}).data.train[0].path
    assert len(paths) == 1 and other not in paths
    assert sorted(map(str, (tmp_path / "datasets").iterdir())) == sorted([*paths, other])
    (path,) = paths
    assert Dataset.from_parquet(path).to_list() == rows


def test_a_function_becomes_its_name_and_one_without_a_name_is_refused(recipe: Path) -> None:
    assert load(recipe, {"loss.type": margin_loss}).loss.type == f"{__name__}:margin_loss"
    with pytest.raises(RecipeError, match=r"^loss\.type: .* has no name in its module; define it"):
        load(recipe, {"loss.type": lambda logps: logps})


@pytest.mark.parametrize("name", ["train", "precompute_ref"])
def test_several_processes_are_not_started_behind_the_caller_s_back(name: str, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"^distributed\.num_processes: 2 .*torchrun"):
        getattr(api, name)(recipe, **{"distributed.num_processes": 2})


@pytest.mark.parametrize(
    ("before", "overrides", "after"),
    [
        ({}, {}, "expandable_segments:True"),
        ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "7"}, {}, "expandable_segments:True"),
        ({}, {"generator": {"type": "vllm"}}, None),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "9"},
            {},
            "backend:native",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}, None),
    ],
)
def test_torch_s_surroundings_are_set_unless_the_user_or_vllm_says_otherwise(
    before: dict[str, str], overrides: dict[str, Any], after: str | None,
    recipe: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "environ", {**os.environ})
    capacity = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    allocators = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in (*allocators, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", capacity):
        os.environ.pop(name, None)
    os.environ |= before
    monkeypatch.setattr("dpo_pack.recipe.load.check_environment", lambda recipe, trains: None)
    judges = {"max_new_tokens": 8, "judges": [{"type": "reward_model", "path": "a"}]}
    api.load(recipe, {"train.max_steps": 2, "online": {**judges, **overrides} if overrides else None})
    assert os.environ.get("PYTORCH_ALLOC_CONF") == after
    assert os.environ["GOMP_SPINCOUNT"] == before.get("GOMP_SPINCOUNT", "10000")
    assert os.environ[capacity] == before.get(capacity, "64")


def test_texts_of_overrides_keep_every_character(recipe: Path) -> None:
    assert (
        api.load(recipe, {"data.system_prompt": "Answer \U0001f600"}).data.system_prompt
        == "Answer \U0001f600"
    )


def test_python_asks_for_a_verdict_as_the_command_line_does(tmp_path: Path) -> None:
    with pytest.raises(DpoPackError, match="--output: .*name a directory"):
        dpo_pack.verdict(tmp_path, quiet=True, **{"verdict.tasks": ["ifeval"]})


def test_pairs_and_rows_can_be_looked_at_from_python(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, report = dpo_pack.show(recipe, pairs=[2]), dpo_pack.inspect_packing(recipe, budgets=[128, 256])
    assert capsys.readouterr().out == ""
    assert {row["row"] for row in shown.rows} == {2} and report["statistics"]["num_pairs"] == 16
    assert shown.rows[0]["prompt"].startswith("ask") and shown.rows[0]["chosen"].startswith(" ")
    assert [outcome["token_budget"] for outcome in report["sweep"]] == [128, 256]
    assert [balance["num_ranks"] for balance in report["balance"]] == [1]
    by_recipe = dpo_pack.inspect_packing(recipe, **{"distributed.num_processes": 4})
    assert [balance["num_ranks"] for balance in by_recipe["balance"]] == [4]
    assert len(repr(shown)) < 120
    api.show(recipe, pairs=[2], quiet=False)
    assert "pairs line 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("signum", "command", "error"),
    [
        (signal.SIGINT, None, KeyboardInterrupt),
        (signal.SIGTERM, None, Interrupted),
        (signal.SIGINT, ["dpopack"], Interrupted),
    ],
)
def test_ctrl_c_is_python_s_own_interrupt_unless_a_command_is_run(
    signum: int,
    command: list[str] | None,
    error: type[BaseException],
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise Interrupted(signum)

    monkeypatch.setattr(train_module, "train", stop)
    with pytest.raises(error):
        api.train(recipe, command=command)
