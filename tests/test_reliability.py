"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_every_promise_has_a_test_that_is_there() -> None:
    promises = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "| test |" not in line
    ]
    assert len(promises) > 20
    for promise in promises:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", promise)
        assert named, promise
        for file, name in named:
            assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file} has no {name}"
