"""scripts/benchmark_images.py: what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmark_images
import pytest


def test_the_page_has_ratios_turn_by_turn_and_other_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = 0.6

    def measured(_: str, what: str, size: str, turn: int, *counts: int) -> dict[str, Any]:
        if what == "pixels":
            return {"milliseconds": {"dpo-pack": 10.0, "TRL": 25.0 + turn}, "tokens": [1441, 94, 72]}
        is_ours = what.startswith("dpo-pack")
        seconds = 0.5 if is_ours else 1.0 + turn + 9.0 * ("micro-batch 2" in what)
        return {"seconds_a_pair": seconds, "losses": [0.69, loss if is_ours else 0.6], "peak_gb": 1.5}

    monkeypatch.setattr(benchmark_images, "make_assets", lambda *_: None)
    monkeypatch.setattr(benchmark_images, "in_new_process", measured)
    monkeypatch.setattr(benchmark_images, "version", lambda name: "1.0")
    expected = tmp_path / "expected.txt"
    expected.write_text("Twice as fast.\n")
    benchmark_images.main(tmp_path / "page.md", repeats=3, sizes="640x480", prediction=expected)
    page = (tmp_path / "page.md").read_text()
    assert page.count("| dpo-pack, first run | 2 | 2 to 2 | 4.00 (2.00 to 6.00) |") == 1
    assert page.count("| dpo-pack | 10 | 10 to 10 | 2.60 (2.50 to 2.70) |") == 2
    assert "at most\n1.50 GB resident" in page
    assert "1,441 tokens in its prompt, 94 and 72" in page and "## Expected\n\nTwice as fast.\n" in page
    loss = 0.61
    with pytest.raises(SystemExit, match="do not do the same work: losses differ by 1.0e-02"):
        benchmark_images.main(tmp_path / "other.md", repeats=1)
