"""The model of a run that was stopped: its newest checkpoint, exported when a command needs it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.marks import slow
from support.tiny_run import tiny_run
from support.whole_runs import text

from dpo_pack.recipe.load import load_recipe
from dpo_pack.run import checkpoint
from dpo_pack.run.checkpoint import model_of
from dpo_pack.run.run_dir import only_run
from dpo_pack.system.errors import RunError
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.trainer import train

QUIET = Console(quiet=True)


@pytest.fixture(
    scope="module", params=[*slow(""), "model.lora={r: 4, alpha: 8}"], ids=["full", "lora"]
)  # what a full run leaves in a checkpoint: tests/run/test_resume.py
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without its model, which is in finished/; its last checkpoint is of the last step."""
    directory = tmp_path_factory.mktemp("stopped")
    more = [request.param] if request.param else []
    train(load_recipe(tiny_run(directory), ["checkpoint.every_steps=1", *more]), QUIET)
    (directory / "run" / "model").rename(directory / "finished")
    return directory / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy in another place than its recipe says."""
    shutil.copytree(trained, tmp_path / "moved")
    return tmp_path / "moved"


def verify(run: Path) -> None:
    """From now on its model is read back, which takes a process."""
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("verify: none", "verify: full"))


def weights_of(model: str | Path) -> bytes:
    (file,) = Path(model).glob("*.safetensors")
    return file.read_bytes()


@pytest.mark.slow
def test_the_newest_checkpoint_becomes_the_model_that_the_run_would_have_left(
    trained: Path, run: Path, console: Console
) -> None:
    verify(run)
    with model_of(str(run), console) as model:
        assert model == str(run / "checkpoints" / "step-000002" / "model")
        assert weights_of(model) == weights_of(trained.parent / "finished")
    assert "verified: the files hold all" in text(console) and "its model is of step-000002" in text(console)
    with model_of(str(run), console) as again:
        assert again == model and "(exported before)" in text(console)
    assert load_recipe(run).output_dir == run


def test_a_model_of_an_earlier_end_is_not_that_of_a_run_that_went_on(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-000001", run / "model")
    info = (run / "run.json").read_text()
    with model_of(str(run), QUIET) as model:
        assert model == str(run / "model")
    (run / "run.json").write_text(info.replace('"status": "finished"', '"status": "interrupted"'))
    with model_of(str(run), QUIET) as model:
        assert model == str(run / "checkpoints" / "step-000002" / "model")
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("resume: auto", "resume: step-000001"))
    assert load_recipe(run).checkpoint.resume == "auto"


def test_a_damaged_checkpoint_is_passed_over(run: Path, console: Console) -> None:
    (run / "checkpoints" / "step-000002" / "host.pt").write_bytes(b"")
    with model_of(str(run), console) as model:
        assert model == str(run / "checkpoints" / "step-000001" / "model") and weights_of(model)


def test_a_run_that_is_still_training_is_said_to_be_and_its_checkpoint_is_not_exported(run: Path) -> None:
    with only_run(run), pytest.raises(RunError, match="moved has no"), model_of(str(run), QUIET):
        raise AssertionError
    assert not (run / "checkpoints" / "step-000002" / "model").exists()


@pytest.mark.parametrize("error", [Interrupted(signal.SIGINT), RunError("w differs")])
def test_nothing_half_written_or_wrong_is_left(
    error: BaseException, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: dict[str, Any]) -> None:
        raise error

    verify(run)
    monkeypatch.setattr(checkpoint, "verify", fail)
    before = {path for path in run.rglob("*")}
    with pytest.raises(type(error)), model_of(str(run), QUIET):
        raise AssertionError
    assert {path for path in run.rglob("*")} == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_start_that_has_changed_is_refused_where_it_counts(name: str, trained: Path, run: Path) -> None:
    """A full run's checkpoint has all weights, that of an adapter none of its base."""
    start = run.parent / "model"
    shutil.copytree(trained.parent / "model", start)
    content = (start / name).read_bytes()
    changed = content.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05')
    (start / name).write_bytes(changed if name == "config.json" else content[:-4] + b"\0\0\0\1")
    recipe = (run / "recipe.yaml").read_text().replace(str(trained.parent / "model"), str(start))
    (run / "recipe.yaml").write_text(recipe)
    is_adapter = (trained.parent / "finished" / "adapter_config.json").exists()
    if name == "config.json" or is_adapter:
        with pytest.raises(RunError, match="model config|base model"), model_of(str(run), QUIET):
            raise AssertionError
    else:
        with model_of(str(run), QUIET) as model:
            assert weights_of(model) == weights_of(trained.parent / "finished")
