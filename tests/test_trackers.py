"""metrics.jsonl is JSON whatever happens, and trackers get its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator

from dpo_pack.trackers import MetricsLog, track


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
