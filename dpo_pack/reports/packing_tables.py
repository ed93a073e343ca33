"""The packing report in sentences and tables. This module prints it; pages.py puts it into an HTML page."""

from rich.console import Console
from rich.text import Text

from dpo_pack.packing.report import PackingReport
from dpo_pack.reports.tables import Cells, cells_of, counted, terminal_table

_OVERSIZE_PAIRS_SHOWN = 5


def render_packing(report: PackingReport, console: Console) -> None:
    """Prints the report as tables for 80 columns."""
    console.print(Text.assemble((headline(report), "bold"), f"; {rows_sentence(report)}"))
    for title, cells in tables(report).items():
        console.print(terminal_table(title, cells))
    if report.statistics.oversize_pairs:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


def headline(report: PackingReport) -> str:
    """Returns the numbers of pairs and steps."""
    ours = report.statistics
    steps, mean = f"{ours.num_pairs:,} pairs in {ours.num_steps:,} steps", ours.num_pairs / ours.num_steps
    if report.pairs_per_step is None:
        return f"{steps} of {report.rows_per_step:,} rows, {mean:,.1f} pairs on average"
    last = ours.num_pairs - (ours.num_steps - 1) * report.pairs_per_step
    return f"{steps} of {report.pairs_per_step:,} (the last of {last:,})"


def rows_sentence(report: PackingReport) -> str:
    """Returns the settings that form the rows, and how many and how full they are on one rank."""
    ours = report.statistics
    sharing = "prompts shared" if report.share_prompt else "prompts not shared"
    if report.merge_prompts:
        sharing += f", {ours.merged_pairs:,} pairs merged"
    rows, tokens = ours.num_rows / ours.num_steps, ours.computed_tokens / ours.num_steps
    measured = ""
    if ours.steps_measured < ours.num_steps:
        measured = f" (measured on {ours.steps_measured:,} steps)"
    return (
        f"rows of up to {report.token_budget:,} tokens, {report.algorithm}, {sharing}; on average a step has "
        f"{rows:,.1f} rows and {tokens:,.1f} tokens; rows are {ours.budget_fill:.1%} full, the longest has "
        f"{ours.max_row_tokens:,} tokens{measured}."
    )


def oversize_sentence(report: PackingReport) -> str:
    """Returns sentences about the pairs above the token budget, with advice."""
    oversize = report.statistics.oversize_pairs
    shown = [f"{place}: {tokens:,} tokens" for place, tokens in oversize.items()][:_OVERSIZE_PAIRS_SHOWN]
    more = f"; and {len(oversize) - len(shown):,} more" if len(oversize) > len(shown) else ""
    return (
        f"Longer than packing.token_budget ({report.token_budget:,}), so that each is a row of its own: "
        f"{counted(len(oversize), 'pair')}, {'; '.join(shown)}{more}. Raise packing.token_budget to at least "
        f"{max(oversize.values()):,} if memory allows, or lower data.max_length."
    )


def tables(report: PackingReport) -> dict[str, Cells]:
    """Returns the tables of the report by title. The best token budget is highlighted and says so."""
    ours = report.statistics
    padded = [
        (
            counted(padded.microbatch_pairs, "pair"),
            f"{padded.tokens:,}",
            f"{padded.saved_by_packing_tokens / padded.tokens:.1%}",
            f"{ours.saved_by_sharing_tokens / padded.tokens:.1%}",
            f"{padded.times_computed_tokens:.2f}x",
            f"{padded.times_flops:.2f}x",
        )
        for padded in ours.padded
    ]
    balance = {
        "ranks": "{.num_ranks:,}",
        "rows a step": "{.rows_per_step:,.1f}",
        "most a rank": "{.max_rows_per_rank:,}",
        "slowest / mean": "{.slowest_over_mean:.3f}",
        "worst full step": "{.worst_full_step_slowest_over_mean:.3f}",
        "idle steps": "{.steps_with_idle_ranks:,}",
    }
    rows_of_step = {"rows a step": "{.rows_per_step:,.1f}"}
    if report.rows_per_step is not None:  # the recipe's key, which belongs to the budget
        rows_of_step = {"rows_per_step": "{.full_step_rows:,}"}
    budgets = {
        "budget": "{.token_budget:,}",
        **rows_of_step,
        "longest row": "{.max_row_tokens:,}",
        "fill": "{.budget_fill:.1%}",
        "too long": "{.num_oversize_pairs:,}",
        "time": "{.relative_time:.3f}",
    }
    compared = cells_of(report.sweep, budgets)
    marks = ["best" if outcome.is_best else "" for outcome in report.sweep]
    marked = [(*row, mark) for row, mark in zip(compared.rows, marks, strict=True)]
    columns = ("micro-batch", "tokens", "by packing", "by sharing", "tokens", "FLOPs")
    steps = f"{report.balance[0].steps_measured:,} of {ours.num_steps:,} steps"
    found = {
        f"{ours.computed_tokens:,} tokens an epoch, against padded training": Cells(columns, padded),
        f"balance of ranks, by FLOPs, over {steps}": cells_of(report.balance, balance),
        "token budgets": Cells((*compared.columns, ""), marked, marks.index("best")),
    }
    left_out = {**report.removed_pairs, **report.truncated}
    if left_out:
        counts = [(reason, f"{count:,}") for reason, count in left_out.items()]
        found["dropped or truncated before packing"] = Cells(("reason", "pairs"), counts)
    return found
