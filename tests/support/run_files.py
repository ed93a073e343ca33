"""What a run left in its output_dir, as tests compare it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

# Metrics that no two runs share: how long things took.
TIMES = ("seconds", "mfu", "tokens_per_second", "pairs_per_second")


Run = tuple[str, str, tuple[str, ...]]  # strategy, variant, further overrides


def records(run: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, of one split or of all."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if split in (None, line["split"])]


def timeless(run: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    return [
        {name: value for name, value in record.items() if name.split("/")[0] not in TIMES}
        for record in records(run, split)
    ]


def losses(run: Path, split: str = "train") -> list[float]:
    """The loss of each logged step, or of each evaluation."""
    return [record["loss"] for record in records(run, split)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the exported model, or of the exported adapter."""
    (file,) = (run / "model").glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    """Both trained the same, to the last bit."""
    assert timeless(one) == timeless(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_same_metrics(
    ours: list[dict[str, Any]],
    alone: list[dict[str, Any]],
    what: Run,
    *,
    counts: tuple[str, ...] = ("pairs", "tokens"),
) -> None:
    """Everything but times, and what depends on the number of rows. `counts` without tokens: each rank
    computes what its pairs begin with, so two ranks compute more."""
    assert [(line["split"], line["step"]) for line in ours] == [(x["split"], x["step"]) for x in alone]
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, float) and name.split("/")[0] not in TIMES:
                where = f"{what}, {mine['split']} {mine['step']}: {name}"
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=2e-5), where
    for name in counts:
        assert [line.get(name) for line in ours] == [line.get(name) for line in alone], f"{what}: {name}"
