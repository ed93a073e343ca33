"""Renders reports as HTML pages from templates/. A page is one file and loads no other file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpo_pack.reports import pair_views, run_files, tables
from dpo_pack.system.files import write_text_atomically
from dpo_pack.system.process import printable

_ENVIRONMENT = Environment(
    loader=PackageLoader("dpo_pack.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def packing_page(report: dict[str, Any]) -> str:
    """Returns the page that `inspect-packing --html` writes."""
    from dpo_pack.reports import packing  # imports torch

    return render_page("packing.html.jinja", report=report, text=packing)


def pairs_page(shown: Any) -> str:
    """Returns the page that `show --html` writes of a ShownRecipe, whose module imports torch."""
    return render_page("pairs.html.jinja", shown=shown, views=pair_views)


def write_run_page(paths: Sequence[Path], target: Path) -> None:
    """Writes the `run_page` of the runs in `paths`. Raises CacheError, too."""
    write_text_atomically(target, run_page(paths))


def run_page(paths: Sequence[Path]) -> str:
    """Returns the page of a run, or of several runs over each other. Raises RunError if a path has no run."""
    runs = run_files.read_runs(paths)
    assets = files("dpo_pack.reports") / "assets"
    return render_page(
        "run.html.jinja",
        runs=runs,
        held_out=list(dict.fromkeys(name for run in runs for name in run["evals"])),
        data=run_files.chart_data(runs),
        lowest=run_files.lowest_margins(runs[0]) if len(runs) == 1 else [],
        views=run_files,
        evaluations=tables,
        asset=lambda name: (assets / name).read_text(encoding="utf-8"),
    )


def render_page(template: str, **values: Any) -> str:
    """Returns the page from a template and its `values`; text in `values` is escaped."""
    page = _ENVIRONMENT.get_template(template).render(**values)
    # HTML allows no such characters, and a tokenizer may decode tokens to them.
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", lambda control: printable(control[0]), page)
