"""What a person looks at before a run: the packing preview in the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dpo_pack.data.packing_report import PackingReport, PackingStatistics
from dpo_pack.errors import RecipeError

_OVERSIZE_PAIRS_SHOWN = 5
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*%#"


def render_packing(report: PackingReport, console: Console) -> None:
    """Print the report as tables that fit 80 columns; plain ASCII where the console cannot print more."""
    ours = report.statistics
    sharing = "prompts shared" if report.share_prompt else "prompts not shared"
    last_step_pairs = ours.num_pairs - (ours.num_steps - 1) * report.pairs_per_step
    console.print(
        f"[bold]{ours.num_pairs:,} pairs in {ours.num_steps:,} steps of {report.pairs_per_step:,}[/bold] "
        f"(the last of {last_step_pairs:,}), rows of up to {report.token_budget:,} tokens, "
        f"{report.algorithm}, {sharing}"
    )
    console.print(_lengths_table(report, bars=_ASCII_BARS if console.options.ascii_only else _BARS))
    console.print(_rows_table(ours))
    console.print(_padded_table(ours))
    console.print(_balance_table(report))
    if report.removed_pairs:
        table = _table("dropped or truncated before packing", "reason", "pairs")
        for reason, count in report.removed_pairs.items():
            table.add_row(reason, f"{count:,}")
        console.print(table)
    if ours.oversize_pairs:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


def _table(title: str, first_column: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.min_width = len(title)  # or a title wider than its table is broken
    table.add_column(first_column)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _lengths_table(report: PackingReport, *, bars: str) -> Table:
    table = _table("lengths in tokens", "", "mean", "median", "p90", "p99", "max")
    table.add_column("0 to p99, rest in last", no_wrap=True)
    for summary in report.lengths:
        counts = (summary.median, summary.p90, summary.p99, summary.max)
        histogram = draw_bars(summary.histogram_counts, bars=bars)
        table.add_row(summary.name, f"{summary.mean:,.1f}", *(f"{count:,}" for count in counts), histogram)
    return table


def draw_bars(counts: Sequence[int], *, bars: str = _BARS) -> str:
    """A character a bin, its height by the largest count; only an empty bin is blank."""
    tallest = max(counts)
    return "".join(bars[-(-count * len(bars) // tallest) - 1] if count else " " for count in counts)


def _rows_table(ours: PackingStatistics) -> Table:
    table = _table("rows on one rank", "", "mean", "min", "max")
    for name, spread in (("rows a step", ours.rows_per_step), ("tokens a step", ours.tokens_per_step)):
        table.add_row(name, f"{spread.mean:,.1f}", f"{spread.min:,}", f"{spread.max:,}")
    mean_row_tokens = ours.computed_tokens / ours.num_rows
    table.add_row("tokens a row", f"{mean_row_tokens:,.1f}", "", f"{ours.max_row_tokens:,}")
    table.add_row("fill of the budget", f"{ours.budget_fill:.1%}", "", "")
    return table


def _padded_table(ours: PackingStatistics) -> Table:
    title = f"{ours.computed_tokens:,} tokens an epoch, against padded training"
    table = _table(title, "micro-batch", "tokens", "saved by packing", "by sharing", "padded / ours")
    for padded in ours.padded:
        table.add_row(
            f"{padded.microbatch_pairs} pair{'s' if padded.microbatch_pairs > 1 else ''}",
            f"{padded.tokens:,}",
            f"{padded.saved_by_packing_tokens / padded.tokens:.1%}",
            f"{ours.saved_by_sharing_tokens / padded.tokens:.1%}",
            f"{padded.times_computed_tokens:.2f}x",
        )
    return table


def _balance_table(report: PackingReport) -> Table:
    measured = max((balance.steps_measured for balance in report.balance), default=0)
    title = f"balance of ranks, by tokens, over {measured:,} of {report.statistics.num_steps:,} steps"
    columns = ("rows a step", "most a rank", "slowest / mean", "worst full step", "idle steps")
    table = _table(title, "ranks", *columns)
    for balance in report.balance:
        table.add_row(
            f"{balance.num_ranks:,}",
            f"{balance.rows_per_step.mean:,.1f}",
            f"{balance.max_rows_per_rank:,}",
            f"{balance.slowest_over_mean:.3f}",
            f"{balance.worst_full_step_slowest_over_mean:.3f}",
            f"{balance.steps_with_idle_ranks:,}",
        )
    return table


def oversize_sentence(report: PackingReport) -> str:
    oversize = report.statistics.oversize_pairs
    shown = [f"{pair.place}: {pair.tokens:,} tokens" for pair in oversize[:_OVERSIZE_PAIRS_SHOWN]]
    more = len(oversize) - len(shown)
    return (
        f"{len(oversize):,} pair{'s exceed' if len(oversize) > 1 else ' exceeds'} packing.token_budget "
        f"({report.token_budget:,}) and get a row of their own: {'; '.join(shown)}"
        f"{f'; and {more:,} more' if more else ''}. "
        f"Raise packing.token_budget to at least {max(pair.tokens for pair in oversize):,} if memory allows, "
        "or lower data.max_length."
    )


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read the flag `--ranks 1,8,64`. Raises RecipeError."""
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise RecipeError(f"--ranks {text!r}: not positive whole numbers; write them as in --ranks 1,8,64")
    return ranks
