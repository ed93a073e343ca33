"""The packing page: well formed, self-contained, and drawn by a real browser where there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from support.browser import run_browser
from support.inspected_lengths import inspect
from support.outline import Outline

from dpo_pack.packing.lengths import PairLengths
from dpo_pack.reports.packing import headline, rows_sentence, tables
from dpo_pack.reports.pages import packing_page


def full_report() -> dict[str, Any]:
    random = np.random.default_rng(0)
    prompt, chosen, rejected = (random.integers(20, 200, 300) for _ in range(3))
    return inspect(
        PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt),
        token_budget=4096,
        pairs_per_step=32,
        ranks=(1, 8, 64),
        budgets=(2048, 8192),
        model="org/<b>model</b> & co",
        removed_pairs={"too_long": 12},
        truncated={"eos_lost": 3, "prompt_truncated": 1},
    )


def outline(report: dict[str, Any]) -> Outline:
    parser = Outline()
    parser.feed(packing_page(report))
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_self_contained_and_says_what_the_terminal_says() -> None:
    report = full_report()
    page = outline(report)
    text = " ".join(page.text)
    assert headline(report) in text and rows_sentence(report) in text
    for title, cells in tables(report).items():
        assert title[0].upper() + title[1:] in text  # FLOPs stay as they are
        assert all(cell in page.text for row in cells.rows for cell in row if cell)
    assert {"12 pairs", "3 completions", "1 pair"} <= set(page.text)  # a pair has two completions
    assert page.tags.count("table") == 4 and ("class", "picked") in page.attributes
    # It loads nothing, runs nothing, and what comes from files is escaped.
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|//|@import|url\(|expression\(", packing_page(report))
    assert "&lt;b&gt;model&lt;/b&gt; &amp; co" in packing_page(report)


# ---- In a browser


def test_nothing_runs_out_of_a_narrow_screen(tmp_path: Path) -> None:
    """The page measures itself: a script that only the test adds writes its width into the title."""
    page = tmp_path / "page.html"
    probe = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
    page.write_text(packing_page(full_report()).replace("</body>", f"{probe}</body>"), encoding="utf-8")
    measured = re.search(
        r"<title>(\d+) (\d+)</title>", run_browser("--dump-dom", "--window-size=500,900", page=page)
    )
    assert measured is not None and int(measured[1]) <= int(measured[2])
