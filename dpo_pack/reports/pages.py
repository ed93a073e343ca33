"""Renders reports as HTML pages from templates/. A page is one file; it has no script and loads nothing."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpo_pack.packing.report import PackingReport
from dpo_pack.reports import packing_tables, pair_views
from dpo_pack.run.show import ShownRecipe


def packing_page(report: PackingReport) -> str:
    """Returns the page that `inspect-packing --html` writes."""
    return render_page("packing.html.jinja", report=report, text=packing_tables)


def pairs_page(shown: ShownRecipe) -> str:
    """Returns the page that `show --html` writes."""
    return render_page("pairs.html.jinja", shown=shown, text=pair_views, rows=packing_tables)


def render_page(template: str, **values: Any) -> str:
    """Returns the page from a template and its `values`; text in `values` is escaped."""
    environment = Environment(
        loader=PackageLoader("dpo_pack.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
