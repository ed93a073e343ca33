"""The script of docs/performance.md that measures what a grown file costs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_ingestion.py"


@pytest.mark.slow
def test_both_loads_are_measured() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "16384", "10"],
        env=os.environ,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert re.findall(r"([\d,]+) pairs more: [\d.]+ CPU s, ([\d,]+) rows", ended.stdout) == [
        ("16,384", "16,384"),
        ("10", "10"),
    ]
