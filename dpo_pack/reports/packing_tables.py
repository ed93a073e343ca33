"""The packing report in sentences and tables. This module prints it; pages.py puts it into an HTML page."""

from typing import Any

from rich.console import Console

from dpo_pack.reports.tables import Cells, cells_of, counted, terminal_table

_OVERSIZE_PAIRS_SHOWN = 5


def render_packing(report: dict[str, Any], console: Console) -> None:
    """Prints the report as tables for 80 columns."""
    console.print(f"{headline(report)}; {rows_sentence(report)}")
    for title, cells in tables(report).items():
        console.print(terminal_table(title, cells))
    if report["statistics"]["oversize_pairs"]:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


def headline(report: dict[str, Any]) -> str:
    """Returns the numbers of pairs and steps."""
    ours, full = report["statistics"], report["pairs_per_step"]
    last = ours["num_pairs"] - (ours["num_steps"] - 1) * full
    return f"{ours['num_pairs']:,} pairs in {ours['num_steps']:,} steps of {full:,} (the last of {last:,})"


def rows_sentence(report: dict[str, Any]) -> str:
    """Returns the settings that form the rows, and how many and how full they are on one rank."""
    ours, sharing = report["statistics"], "shared" if report["share_prompt"] else "not shared"
    num_steps = ours["num_steps"]
    return (
        f"rows of up to {report['token_budget']:,} tokens, prompts {sharing}; on average a step has "
        f"{ours['num_rows'] / num_steps:,.1f} rows and {ours['computed_tokens'] / num_steps:,.1f} tokens; "
        f"rows are {ours['budget_fill']:.1%} full, the longest has {ours['max_row_tokens']:,} tokens "
        f"(measured on {ours['steps_measured']:,} steps)."
    )


def oversize_sentence(report: dict[str, Any]) -> str:
    """Returns sentences about the pairs above the token budget, with advice."""
    oversize = report["statistics"]["oversize_pairs"]
    shown = [f"{place}: {tokens:,} tokens" for place, tokens in oversize.items()][:_OVERSIZE_PAIRS_SHOWN]
    more = f"; and {len(oversize) - len(shown):,} more" if len(oversize) > len(shown) else ""
    return (
        f"Longer than packing.token_budget ({report['token_budget']:,}), so that each is a row of its own: "
        f"{counted(len(oversize), 'pair')}, {'; '.join(shown)}{more}. Raise packing.token_budget to at least "
        f"{max(oversize.values()):,} if memory allows, or lower data.max_length."
    )


def tables(report: dict[str, Any]) -> dict[str, Cells]:
    """Returns the tables of the report by title. The best token budget is highlighted and says so."""
    ours, balance, sweep = report["statistics"], report["balance"], report["sweep"]
    padded = [
        {
            **one,
            "packing": one["saved_by_packing_tokens"] / one["tokens"],
            "sharing": ours["saved_by_sharing_tokens"] / one["tokens"],
        }
        for one in ours["padded"]
    ]
    of_padded = {
        "pairs a micro-batch": "{[microbatch_pairs]}",
        "tokens": "{[tokens]:,}",
        "by packing": "{[packing]:.1%}",
        "by sharing": "{[sharing]:.1%}",
        "x tokens": "{[times_computed_tokens]:.2f}",
        "x FLOPs": "{[times_flops]:.2f}",
    }
    of_balance = {
        "ranks": "{[num_ranks]:,}",
        "rows a step": "{[rows_per_step]:,.1f}",
        "most a rank": "{[max_rows_per_rank]:,}",
        "slowest / mean": "{[slowest_over_mean]:.3f}",
        "worst full step": "{[worst_full_step_slowest_over_mean]:.3f}",
        "idle steps": "{[steps_with_idle_ranks]:,}",
    }
    of_budgets = {
        "budget": "{[token_budget]:,}",
        "rows a step": "{[rows_per_step]:,.1f}",
        "longest row": "{[max_row_tokens]:,}",
        "fill": "{[budget_fill]:.1%}",
        "too long": "{[num_oversize_pairs]:,}",
        "time": "{[relative_time]:.3f}",
        "": "{[mark]}",
    }
    marked = [one | {"mark": "best" if one["is_best"] else ""} for one in sweep]
    best = next(number for number, one in enumerate(sweep) if one["is_best"])
    steps = f"{balance[0]['steps_measured']:,} of {ours['num_steps']:,} steps"
    found = {
        f"{ours['computed_tokens']:,} tokens an epoch, against padded training": cells_of(padded, of_padded),
        f"balance of ranks, by FLOPs, over {steps}": cells_of(balance, of_balance),
        "token budgets": cells_of(marked, of_budgets)._replace(picked=best),
    }
    if left_out := report["removed_pairs"] | report["truncated"]:
        counts = [(reason, f"{count:,}") for reason, count in left_out.items()]
        found["dropped or truncated before packing"] = Cells(("reason", "pairs"), counts)
    return found
