"""What a person looks at before a run: the packing preview in the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpo_pack.data.packing_numbers import PackingStatistics
from dpo_pack.data.packing_report import DrawnRow, PackingReport
from dpo_pack.errors import RecipeError

_OVERSIZE_PAIRS_SHOWN = 5
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*%#"


def render_packing(report: PackingReport, console: Console) -> None:
    """Print the report as tables that fit 80 columns; plain ASCII where the console cannot print more."""
    ours = report.statistics
    is_ascii = console.options.ascii_only
    console.print(Text.assemble((headline(report), "bold"), f"; {layout_sentence(report)}"))
    console.print(_lengths_table(report, bars=_ASCII_BARS if is_ascii else _BARS))
    console.print(_rows_table(ours))
    _draw_rows(report.drawn_rows, console)
    console.print(_padded_table(ours))
    console.print(savings_sentence(ours), highlight=False)
    console.print(_balance_table(report))
    if report.recommendation is not None:
        console.print(_sweep_table(report))
        console.print(recommendation_sentence(report), highlight=False)
    if report.removed_pairs or report.truncated:
        table = _table("dropped or truncated before packing", "reason", "pairs")
        for reason, count in (*report.removed_pairs.items(), *report.truncated.items()):
            table.add_row(reason, f"{count:,}")
        console.print(table)
    if ours.oversize_pairs:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


def headline(report: PackingReport) -> str:
    """Pairs and steps."""
    ours = report.statistics
    steps = f"{ours.num_pairs:,} pairs in {ours.num_steps:,} steps"
    if report.pairs_per_step is None:
        return f"{steps} of {report.rows_per_step:,} rows, {ours.pairs_per_step.mean:,.1f} pairs on average"
    last = ours.num_pairs - (ours.num_steps - 1) * report.pairs_per_step
    return f"{steps} of {report.pairs_per_step:,} (the last of {last:,})"


def layout_sentence(report: PackingReport) -> str:
    """How rows are made."""
    sharing = "prompts shared" if report.share_prompt else "prompts not shared"
    if report.merge_prompts:
        sharing += f", {report.statistics.merged_pairs:,} pairs merged"
    return f"rows of up to {report.token_budget:,} tokens, {report.algorithm}, {sharing}"


def savings_sentence(ours: PackingStatistics) -> str:
    """What the three savings come to in FLOPs."""
    flops = ours.flops
    skipped = 1 - ours.head_tokens / ours.computed_tokens
    return (
        f"The output head sees completions only: {ours.head_tokens:,} of {ours.computed_tokens:,} positions, "
        f"{skipped:.1%} saved. A pair is estimated at {format_flops(flops.per_pair)} "
        f"({flops.token_part:.0%} layers, {flops.head_part:.0%} head, {flops.attention_part:.0%} attention)."
    )


def recommendation_sentence(report: PackingReport) -> str:
    """The budget to take and why."""
    advice = report.recommendation
    assert advice is not None
    return f"Recommended: {advice.overrides}. {'; '.join(advice.reasons)}."


def format_flops(flops: float) -> str:
    """With three digits and a prefix: 12.3 TFLOPs."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G")):
        if flops >= 10**power:
            return f"{flops / 10**power:.3g} {prefix}FLOPs"
    return f"{flops / 1e6:.3g} MFLOPs"


_ROW_STYLES = {
    "prompt": ("blue", "=", "█"),
    "chosen": ("green", "+", "▓"),
    "rejected": ("red", "-", "▒"),
    "merged": ("magenta", "#", "█"),
    "padding": ("bright_black", ".", "·"),
}


def _draw_rows(rows: Sequence[DrawnRow], console: Console) -> None:
    """The first rows as bars: a cell is so many tokens, and every segment begins where it would."""
    label = max(len(f"{row.tokens:,}") for row in rows) + 8
    width = max(min(console.width, 120) - label - 2, 20)
    scale = max(row.tokens for row in rows) / width
    kinds = [kind for kind in _ROW_STYLES if any(s.kind == kind for row in rows for s in row.segments)]
    legend = Text("rows of the first step: ", style="bold")
    for kind in kinds:
        legend.append(f"{_cell(kind, console)} {kind}  ", style=_ROW_STYLES[kind][0])
    console.print(legend)
    for row in rows:
        bar, position = Text(), 0
        for segment in row.segments:
            begin, position = round(position / scale), position + segment.tokens
            cells = _cell(segment.kind, console) * (round(position / scale) - begin)
            bar.append(cells, style=_ROW_STYLES[segment.kind][0])
        pairs = f"{row.num_pairs} pair{'s' if row.num_pairs > 1 else ''}"
        console.print(bar, Text(f" {row.tokens:,}, {pairs}", style="dim"), sep="", crop=True, no_wrap=True)
    console.print()


def _cell(kind: str, console: Console) -> str:
    return _ROW_STYLES[kind][1 if console.options.ascii_only else 2]


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
    table = _table(title, "micro-batch", "tokens", "by packing", "by sharing", "tokens", "FLOPs")
    for padded in ours.padded:
        table.add_row(
            f"{padded.microbatch_pairs} pair{'s' if padded.microbatch_pairs > 1 else ''}",
            f"{padded.tokens:,}",
            f"{padded.saved_by_packing_tokens / padded.tokens:.1%}",
            f"{ours.saved_by_sharing_tokens / padded.tokens:.1%}",
            f"{padded.times_computed_tokens:.2f}x",
            f"{padded.times_flops:.2f}x",
        )
    return table


def _balance_table(report: PackingReport) -> Table:
    measured = max((balance.steps_measured for balance in report.balance), default=0)
    title = f"balance of ranks, by FLOPs, over {measured:,} of {report.statistics.num_steps:,} steps"
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


def _sweep_table(report: PackingReport) -> Table:
    columns = ("rows a step", "longest row", "fill", "too long", "row overhead", "time")
    table = _table("token budgets", "budget", *columns)
    assert report.recommendation is not None
    for outcome in report.sweep:
        is_choice = outcome.token_budget == report.recommendation.token_budget
        table.add_row(
            f"{outcome.token_budget:,}",
            f"{outcome.rows_per_step:,.1f}",
            f"{outcome.max_row_tokens:,}",
            f"{outcome.budget_fill:.1%}",
            f"{outcome.num_oversize_pairs:,}",
            f"{outcome.row_overhead:.1%}",
            f"{outcome.relative_time:.3f}",
            style="bold" if is_choice else None,
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


def parse_numbers(text: str, *, option: str, instance: str) -> tuple[int, ...]:
    """Read a flag such as `--ranks 1,8,64`. Raises RecipeError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise RecipeError(
            f"{option} {text!r}: not positive whole numbers; write them as in {option} {instance}"
        )
    return numbers
