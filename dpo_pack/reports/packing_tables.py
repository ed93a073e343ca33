"""The packing report in sentences and tables. This module prints it; pages.py puts it into an HTML page."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dpo_pack.packing.report import DrawnRow, PackingReport
from dpo_pack.packing.statistics import PackingStatistics
from dpo_pack.reports.tables import Cells, cells_of, counted, terminal_table

_OVERSIZE_PAIRS_SHOWN = 5
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*%#"
# For each kind of segment: colour, ASCII cell, Unicode cell, and full name.
_KINDS = {
    "prompt": ("blue", "=", "█", "prompt and what both completions begin with"),
    "chosen": ("green", "+", "▓", "chosen"),
    "rejected": ("red", "-", "▒", "rejected"),
    "merged": ("magenta", "#", "█", "pairs of one prompt, merged"),
    "padding": ("bright_black", ".", "·", "padding"),
}
# The first key figure compares with padded micro-batches of so many pairs, TRL's default.
_KEY_MICROBATCH_PAIRS = 8


def render_packing(report: PackingReport, console: Console) -> None:
    """Prints the report as tables for 80 columns; uses only ASCII if the console cannot print Unicode."""
    ours, flops = report.statistics, report.statistics.flops
    bars = _ASCII_BARS if console.options.ascii_only else _BARS
    console.print(Text.assemble((headline(report), "bold"), f"; {layout_sentence(report)}"))
    console.print(terminal_table("lengths in tokens", _lengths_cells(report, bars), no_wrap=True))
    console.print(terminal_table("rows on one rank", _rows_cells(ours)))
    draw_rows("rows of the first step", report.drawn_rows, console)
    console.print()
    title = f"{ours.computed_tokens:,} tokens an epoch, against padded training"
    console.print(terminal_table(title, _padded_cells(ours)))
    console.print(
        f"{head_sentence(ours)} A pair is estimated at {format_flops(flops.per_pair)} "
        f"({flops.token_part:.0%} layers, {flops.head_part:.0%} head, {flops.attention_part:.0%} attention).",
        highlight=False,
    )
    measured = max((balance.steps_measured for balance in report.balance), default=0)
    title = f"balance of ranks, by FLOPs, over {measured:,} of {ours.num_steps:,} steps"
    console.print(terminal_table(title, balance_cells(report)))
    if report.recommendation is not None:
        console.print(terminal_table("token budgets", sweep_cells(report)))
        reasons = "; ".join(report.recommendation.reasons)
        console.print(f"Recommended: {report.recommendation.overrides}, because {reasons}.", highlight=False)
    if report.removed_pairs or report.truncated:
        console.print(terminal_table("dropped or truncated before packing", left_out_cells(report)))
    if ours.oversize_pairs:
        console.print(oversize_sentence(report), style="yellow", highlight=False)


# ---- Sentences


def headline(report: PackingReport) -> str:
    """Returns the numbers of pairs and steps as a phrase."""
    ours = report.statistics
    steps = f"{ours.num_pairs:,} pairs in {ours.num_steps:,} steps"
    if report.pairs_per_step is None:
        return f"{steps} of {report.rows_per_step:,} rows, {ours.pairs_per_step.mean:,.1f} pairs on average"
    last = ours.num_pairs - (ours.num_steps - 1) * report.pairs_per_step
    return f"{steps} of {report.pairs_per_step:,} (the last of {last:,})"


def layout_sentence(report: PackingReport) -> str:
    """Returns the settings that form the rows, as a phrase."""
    sharing = "prompts shared" if report.share_prompt else "prompts not shared"
    if report.merge_prompts:
        sharing += f", {report.statistics.merged_pairs:,} pairs merged"
    return f"rows of up to {report.token_budget:,} tokens, {report.algorithm}, {sharing}"


def head_sentence(ours: PackingStatistics) -> str:
    """Returns a sentence about the positions for which the output head is not computed."""
    skipped = 1 - ours.head_tokens / ours.computed_tokens
    positions = f"{ours.head_tokens:,} of {ours.computed_tokens:,} positions"
    return f"The output head sees completions only: {positions}, {skipped:.1%} saved."


def oversize_sentence(report: PackingReport) -> str:
    """Returns sentences about the pairs above the token budget, with advice."""
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


def key_figures(report: PackingReport) -> list[tuple[str, str]]:
    """Returns the most important numbers, each with its meaning."""
    ours = report.statistics
    padded = next(p for p in ours.padded if p.microbatch_pairs == _KEY_MICROBATCH_PAIRS)
    figures = [
        (f"{padded.times_flops:.1f}x", f"less compute than padded batches of {_KEY_MICROBATCH_PAIRS} pairs"),
        (f"{ours.computed_tokens:,}", "tokens an epoch"),
        (f"{ours.rows_per_step.mean:,.1f}", f"rows a step, up to {ours.max_row_tokens:,} tokens each"),
        (f"{ours.budget_fill:.0%}", f"mean fill of the {report.token_budget:,} token budget"),
        (format_flops(ours.flops.per_pair), "estimated for a pair and training step"),
    ]
    if report.recommendation is not None:
        figures.append((f"{report.recommendation.token_budget:,}", "recommended token budget"))
    return figures


def format_flops(flops: float) -> str:
    """Returns a text with three digits and a prefix, such as 12.3 TFLOPs."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G")):
        if flops >= 10**power:
            return f"{flops / 10**power:.3g} {prefix}FLOPs"
    return f"{flops / 1e6:.3g} MFLOPs"


# ---- Tables


def _lengths_cells(report: PackingReport, bars: str) -> Cells:
    columns = {
        "": "{.name}",
        "mean": "{.mean:,.1f}",
        "median": "{.median:,}",
        "p90": "{.p90:,}",
        "p99": "{.p99:,}",
        "max": "{.max:,}",
    }
    numbers = cells_of(report.lengths, columns)
    drawn = [draw_bars(part.histogram_counts, bars=bars) for part in report.lengths]
    rows = [(*row, histogram) for row, histogram in zip(numbers.rows, drawn, strict=True)]
    return Cells((*columns, "0 to p99, rest in last"), rows)


def _rows_cells(ours: PackingStatistics) -> Cells:
    rows = [
        (name, f"{spread.mean:,.1f}", f"{spread.min:,}", f"{spread.max:,}")
        for name, spread in (("rows a step", ours.rows_per_step), ("tokens a step", ours.tokens_per_step))
    ]
    mean_row_tokens = ours.computed_tokens / ours.num_rows
    rows.append(("tokens a row", f"{mean_row_tokens:,.1f}", "", f"{ours.max_row_tokens:,}"))
    rows.append(("fill of the budget", f"{ours.budget_fill:.1%}", "", ""))
    return Cells(("", "mean", "min", "max"), rows)


def _padded_cells(ours: PackingStatistics) -> Cells:
    rows = [
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
    return Cells(("micro-batch", "tokens", "by packing", "by sharing", "tokens", "FLOPs"), rows)


def balance_cells(report: PackingReport) -> Cells:
    """Returns the table of the balance between ranks, one row for each number of ranks."""
    columns = {
        "ranks": "{.num_ranks:,}",
        "rows a step": "{.rows_per_step.mean:,.1f}",
        "most a rank": "{.max_rows_per_rank:,}",
        "slowest / mean": "{.slowest_over_mean:.3f}",
        "worst full step": "{.worst_full_step_slowest_over_mean:.3f}",
        "idle steps": "{.steps_with_idle_ranks:,}",
    }
    return cells_of(report.balance, columns)


def sweep_cells(report: PackingReport) -> Cells:
    """Returns the table that compares token budgets; the recommended budget is highlighted."""
    columns = {
        "budget": "{.token_budget:,}",
        "rows a step": "{.rows_per_step:,.1f}",
        "longest row": "{.max_row_tokens:,}",
        "fill": "{.budget_fill:.1%}",
        "too long": "{.num_oversize_pairs:,}",
        "row overhead": "{.row_overhead:.1%}",
        "time": "{.relative_time:.3f}",
    }
    assert report.recommendation is not None
    budgets = [outcome.token_budget for outcome in report.sweep]
    return cells_of(report.sweep, columns, picked=budgets.index(report.recommendation.token_budget))


def left_out_cells(report: PackingReport) -> Cells:
    """Returns the table of pairs that were dropped or shortened before packing, by reason."""
    counts = (*report.removed_pairs.items(), *report.truncated.items())
    return Cells(("reason", "pairs"), [(reason, f"{count:,}") for reason, count in counts])


# ---- Drawings


def draw_bars(counts: Sequence[int], *, bars: str = _BARS) -> str:
    """Returns a bar (character) for each bin, in proportion to the largest count. An empty bin is blank."""
    tallest = max(counts)
    return "".join(bars[-(-count * len(bars) // tallest) - 1] if count else " " for count in counts)


def drawn_kinds(rows: Sequence[DrawnRow]) -> list[tuple[str, str]]:
    """Returns the kinds of segments (keys of _KINDS) in the drawn rows, with their full names."""
    drawn = {segment.kind for row in rows for segment in row.segments}
    return [(kind, name) for kind, (*_, name) in _KINDS.items() if kind in drawn]


def segments(row: DrawnRow) -> list[tuple[str, int]]:
    """Returns kind and number of tokens of each segment."""
    return [(segment.kind, segment.tokens) for segment in row.segments]


def draw_rows(
    title: str, rows: Sequence[DrawnRow], console: Console, *, names: Sequence[str] | None = None
) -> None:
    """Prints rows as bars with the same scale. The parts of a bar are the row's segments, in their order.

    names: a label for each row; by default its number of pairs.
    """
    symbol = 1 if console.options.ascii_only else 2
    cells = {kind: style[symbol] for kind, style in _KINDS.items()}
    names = names or [counted(row.num_pairs, "pair") for row in rows]
    labels = [f" {row.tokens:,}, {name}" for row, name in zip(rows, names, strict=True)]
    width = max(min(console.width, 120) - max(map(len, labels)), 20)
    scale = max(row.tokens for row in rows) / width
    legend = Text(f"{title}: ", style="bold")
    for kind, _ in drawn_kinds(rows):
        legend.append(f"{cells[kind]} {kind}  ", style=_KINDS[kind][0])
    legend.rstrip()
    console.print(legend)
    of_character = f"{scale:,.0f}" if scale >= 10 else f"{scale:.2g}"
    console.print(f"one character of a bar: {of_character} tokens", style="dim")
    for row, label in zip(rows, labels, strict=True):
        bar, position = Text(), 0
        for kind, tokens in segments(row):
            begin, position = round(position / scale), position + tokens
            bar.append(cells[kind] * (round(position / scale) - begin), style=_KINDS[kind][0])
        console.print(bar, Text(label, style="dim"), sep="", soft_wrap=False, crop=True, no_wrap=True)
