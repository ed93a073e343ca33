"""metrics.jsonl is JSON whatever happens, and trackers get its numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from support.limits import no_file_beyond

from dpo_pack.run.log import MetricsLog, end_trackers, start_trackers, track
from dpo_pack.run.run_dir import RunDir
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RunError


class RunLog:
    """Stands in for an accelerator with trackers."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))


def tracked(record: dict[str, Any], held_out_names: Sequence[str] = ("hh",)) -> tuple[dict[str, Any], int]:
    recorder = RunLog()
    track(cast(Accelerator, recorder), record, held_out_names)
    (only,) = recorder.logged
    return only


def test_a_full_disk_ends_the_log_in_one_line_after_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with (
        pytest.raises(CacheError, match=f"cannot write {path}: File too large"),
        contextlib.closing(MetricsLog(path)) as log,
    ):
        log.write({"step": 1})
        offset = log.offset
        with no_file_beyond(20):
            log.write({"step": 2, "text": "x" * 100})
    with contextlib.closing(MetricsLog(path, offset=offset)) as log:
        log.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


class BrokenTracker(GeneralTracker):  # type: ignore[misc]
    """A server that was there when the run began."""

    name = "broken"
    requires_logging_directory = False

    def __init__(self, *, starts: bool) -> None:
        super().__init__(_blank=True)
        self.starts = starts

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        if not self.starts:
            raise ValueError("api_key not configured (no-tty)\ncall login()")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")

    def finish(self) -> None:
        raise ConnectionError("no route to host")


def start_run_trackers(accelerator: Accelerator, root: Path) -> None:
    root.mkdir(parents=True)
    run = RunDir(root=root, checkpoint=None, is_finished=False)
    start_trackers(accelerator, {"seed": 0}, run, name=root.name, step=0)


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=not ranks.uses_cuda(), log_with=[BrokenTracker(starts=False)])
    with pytest.raises(RunError, match=r"^logging\.trackers: .*api_key not"):
        start_run_trackers(accelerator, tmp_path / "run-7")


def test_a_tracker_that_fails_later_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=not ranks.uses_cuda(), log_with=[BrokenTracker(starts=True)])
    start_run_trackers(accelerator, tmp_path / "run-7")
    for step in range(3):
        track(accelerator, {"split": "train", "step": step, "loss": 0.5})
    end_trackers(accelerator)
    (record,) = caplog.records
    assert "no route to host" in record.getMessage() and "training continues" in record.getMessage()


IDENTITIES = {  # tracker: what makes two processes the same run there; its project
    "wandb": (("id", "resume", "name"), "WANDB_PROJECT"),
    "trackio": (("name",), "TRACKIO_PROJECT"),
    "mlflow": (("run_name",), "MLFLOW_EXPERIMENT_NAME"),
    "comet_ml": (("experiment_key",), "COMET_PROJECT_NAME"),
    "swanlab": (("id", "resume", "name"), "SWANLAB_PROJECT"),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_a_run_that_goes_on_is_the_same_run_of_the_same_project_in_each_tracker(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate alone would make a project of the run's name, and a new run each time."""
    identity, variable = IDENTITIES[kind]
    begin = MagicMock()  # the tracker's package records with what a run begins, and takes whatever follows
    begin.return_value.info.run_id = "made-by-mlflow"
    package = MagicMock(init=begin, start=begin, start_run=begin, __version__="3.58.0")
    package.search_experiments = lambda filter_string: [SimpleNamespace(experiment_id=filter_string)]
    package.utils.validation = SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    monkeypatch.setitem(sys.modules, kind, package)
    monkeypatch.setenv(variable, "preferences")
    run = RunDir(root=tmp_path / "run-7", checkpoint=None, is_finished=False)
    run.root.mkdir()
    for checkpoint in (None, run.checkpoints / "step-000003"):
        run.checkpoint = checkpoint
        accelerator = Accelerator(cpu=not ranks.uses_cuda())
        accelerator.log_with = [kind]  # as accelerate has it where the package is installed
        start_trackers(accelerator, {"seed": 0}, run, name="run-7", step=3)
    first, second = begun = [call.kwargs for call in begin.call_args_list]
    names = [call.args[0] for call in begin.return_value.set_name.call_args_list]
    assert {key: first[key] for key in identity} == {key: second[key] for key in identity}
    assert "run-7" in (first.get("name"), first.get("run_name"), *names)
    projects = [options.get("project") or options.get("project_name") for options in begun]
    if kind == "mlflow":  # it makes the id of a run itself
        assert (first["run_id"], second["run_id"]) == (None, "made-by-mlflow")
        projects = [options["experiment_id"].split("'")[1] for options in begun]
    assert projects == ["preferences"] * 2
    if kind == "trackio":  # where another run may have the same name
        assert (first["resume"], second["resume"]) == ("never", "allow")
    takers = (package.config.update, package.log_params, begin.return_value.log_parameters)
    sent = [call.args[0] for taker in takers for call in taker.call_args_list]
    assert sent == [{"seed": 0}], "settings are sent once: MLflow refuses a second value"


def test_trackers_get_a_train_line_under_the_names_that_transformers_trainer_sends() -> None:
    record = {"split": "train", "step": 7, "loss": 0.5, "seconds/data": 0.1, "grad_norm": None}
    numbers = {"train/loss": 0.5, "train/seconds/data": 0.1, "train/global_step": 7}
    assert tracked(record) == (numbers, 7)


def test_trackers_get_the_numbers_of_an_evaluation_without_its_parts() -> None:
    part = {"pairs": 2, "loss": 0.4}
    record = {
        "split": "eval",
        "source": "hh",
        "step": 3,
        "loss": 0.6,
        "intervals": {"loss": [0.5, 0.7]},
        "by_length": {"chosen_longer": part},
    }
    assert tracked(record) == ({"eval/loss": 0.6, "train/global_step": 3}, 3)
    assert "eval/hh_loss" in tracked(record, ["hh", "code"])[0]
