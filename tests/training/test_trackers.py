"""metrics.jsonl is JSON whatever happens, and trackers get its numbers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from support.full_disk import no_file_beyond

from dpo_pack.recipe.load import Recipe, parse_recipe
from dpo_pack.run import prepare
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.training.trackers import MetricsLog, end_trackers, start_trackers, track


class Recorder:
    """Stands in for an accelerator with trackers."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))


def tracked(record: dict[str, Any]) -> tuple[dict[str, Any], int]:
    recorder = Recorder()
    track(cast(Accelerator, recorder), record)
    (only,) = recorder.logged
    return only


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1, "grad_norm": math.nan, "by_length": {"all": {"loss": -math.inf, "pairs": 2}}})
    text = (tmp_path / "metrics.jsonl").read_text()
    parsed = json.loads(text, parse_constant=lambda constant: 1 / 0)
    assert parsed == {"step": 1, "grad_norm": None, "by_length": {"all": {"loss": None, "pairs": 2}}}


def test_bounds_that_are_not_finite_are_null_too(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write({"step": 1, "intervals": {"loss": [math.nan, 0.5]}})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["intervals"] == {"loss": [None, 0.5]}


def test_a_full_disk_ends_the_log_in_one_line_after_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(CacheError, match=f"cannot write {path}: File too large"), MetricsLog(path) as log:
        log.write({"step": 1})
        offset = log.offset
        with no_file_beyond(20):
            log.write({"step": 2, "text": "x" * 100})
    with MetricsLog(path, offset=offset) as log:
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


def tracked_recipe(tmp_path: Path) -> Recipe:
    return parse_recipe(
        {"output_dir": str(tmp_path / "run-7"), "model": {"path": "org/m"}, "data": {"train": "org/d"}},
        ["logging.trackers=[wandb]"],
    )


def start_run_trackers(accelerator: Accelerator, run: Path) -> None:
    run.mkdir(parents=True)
    start_trackers(
        accelerator, {"seed": 0}, trackers=["wandb"], directory=run / "trackers", name=run.name, run_id="abc"
    )


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=not ranks.uses_cuda(), log_with=[BrokenTracker(starts=False)])
    with pytest.raises(RunError, match=r"^logging\.trackers: wandb cannot be started \(api_key not .*log in"):
        start_run_trackers(accelerator, tmp_path / "run-7")


def test_a_tracker_that_fails_later_ends_no_training_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=not ranks.uses_cuda(), log_with=[BrokenTracker(starts=True)])
    start_run_trackers(accelerator, tmp_path / "run-7")
    for step in range(3):
        track(accelerator, {"split": "train", "step": step, "loss": 0.5})
    end_trackers(accelerator)
    (record,) = caplog.records
    assert "no route to host" in record.getMessage() and "training goes on" in record.getMessage()


def test_a_run_in_wandb_has_its_name_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate alone would make a project of the run's name."""
    begun: list[dict[str, Any]] = []
    wandb = SimpleNamespace(
        init=lambda **options: begun.append(options), config=SimpleNamespace(update=lambda *_, **__: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "preferences")
    accelerator = Accelerator(cpu=not ranks.uses_cuda())
    accelerator.log_with = ["wandb"]  # as accelerate has it where the package is installed
    start_run_trackers(accelerator, tmp_path / "run-7")
    (options,) = begun
    assert (options["project"], options["name"], options["id"]) == ("preferences", "run-7", "abc")
    assert options["resume"] == "allow" and options["dir"] == str(tmp_path / "run-7" / "trackers")


def test_trackers_get_the_numbers_of_a_train_line_by_their_names() -> None:
    record = {"split": "train", "step": 7, "loss": 0.5, "seconds/data": 0.1, "grad_norm": None}
    assert tracked(record) == ({"loss": 0.5, "seconds/data": 0.1}, 7)


def test_trackers_get_an_evaluation_with_its_breakdowns_below_its_set() -> None:
    part = {"pairs": 2, "loss": 0.4, "intervals": {"loss": [0.3, 0.5]}}
    record = {
        "split": "eval",
        "source": "hh",
        "step": 3,
        "loss": 0.6,
        "intervals": {"loss": [0.5, 0.7]},
        "by_length": {"chosen_longer": part},
    }
    assert tracked(record) == (
        {
            "eval/hh/loss": 0.6,
            "eval/hh/by_length/chosen_longer/pairs": 2,
            "eval/hh/by_length/chosen_longer/loss": 0.4,
        },
        3,
    )


def test_a_device_that_is_neither_cuda_nor_the_cpu_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would take a Mac's GPU, where there are no float64 sums."""
    asked: list[bool] = []

    def accelerator(*, cpu: bool, **options: Any) -> Any:
        asked.append(cpu)
        return SimpleNamespace(num_processes=1, process_index=0)

    monkeypatch.setattr("dpo_pack.run.prepare.Accelerator", accelerator)
    for has_cuda in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_cuda=has_cuda: has_cuda)
        prepare._accelerator(tracked_recipe(tmp_path / str(has_cuda)))
    assert asked == [True, False]
