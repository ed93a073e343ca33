"""The commands as Python functions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from support.tiny_run import tiny_run

import dpo_pack
from dpo_pack.commands.python import load
from dpo_pack.recipe.load import load_recipe
from dpo_pack.system.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("python"))


def margin_loss(logps: Any) -> Any:  # named by a test, never called
    raise NotImplementedError


def call(name: str, *arguments: Any, **overrides: Any) -> Any:
    """Calls a function of the interface; its name is also the name of a module."""
    return getattr(dpo_pack, name)(*arguments, **overrides)


def test_a_run_from_python_is_the_run_of_the_command(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        del os.environ[name]  # which the end of this test restores
    run = call("train", recipe, **{"optim.lr": 5e-4, "output_dir": recipe.parent / "from-python"})
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "Done: " in capsys.readouterr().out
    assert run.path == recipe.parent / "from-python"
    steps = [line for line in run.metrics if "loss" in line and "grad_norm" in line]
    assert steps and run.evaluation
    assert (run.model_path / "model.safetensors").is_file() and run.report_path.is_file()
    kept = yaml.safe_load((run.path / "recipe.yaml").read_text())
    assert kept["optim"]["lr"] == 5e-4
    again = call("train", run.path / "recipe.yaml")  # of a finished run
    assert "nothing to do" in capsys.readouterr().out and again == run
    results = call("evaluate", run.path / "recipe.yaml")
    name = next(iter(results))
    assert results[name]["rewards/accuracies"] == pytest.approx(
        run.evaluation[name]["rewards/accuracies"], abs=1e-6
    )


def test_a_name_that_the_package_lacks_is_an_error_of_python() -> None:
    with pytest.raises(AttributeError, match="'dpo_pack' has no attribute 'trian'"):
        call("trian")


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


def test_several_processes_are_refused_with_the_ways_that_start_them(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="num_processes: a call from Python .*torchrun.*dpopack train"):
        load(recipe, {"distributed.num_processes": 2})
    assert load(recipe, {}).distributed.num_processes == 1


def test_pairs_and_rows_can_be_looked_at_from_python(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = call("show", recipe, pairs=[2])
    assert "pairs.jsonl line 2" in capsys.readouterr().out
    report = call("inspect_packing", recipe, ranks=[1, 2], budgets=[128])
    assert {pair.row for pair in shown.pairs} == {2} and report.statistics.num_pairs == 16
    assert "fill" in capsys.readouterr().out
