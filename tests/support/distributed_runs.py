"""What runs on several processes left, and whether two such runs agree."""

from __future__ import annotations

from typing import Any

import pytest

from support.run_files import TIMES

Run = tuple[str, str, tuple[str, ...]]  # strategy, variant, further overrides


def assert_same_metrics(ours: list[dict[str, Any]], alone: list[dict[str, Any]], what: Run) -> None:
    """Everything but times, and what depends on the number of rows."""
    assert [(line["split"], line["step"]) for line in ours] == [(x["split"], x["step"]) for x in alone]
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, float) and name.split("/")[0] not in TIMES:
                where = f"{what}, {mine['split']} {mine['step']}: {name}"
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=2e-5), where
    for name in ("pairs", "tokens"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in alone], f"{what}: {name}"
