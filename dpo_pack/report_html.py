"""The packing report as one self-contained HTML page: no script, no request, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

from dpo_pack.data.packing_numbers import LengthSummary, PackingStatistics, PaddedComparison, RankBalance
from dpo_pack.data.packing_report import DrawnRow, PackingReport
from dpo_pack.report import format_flops, headline, layout_sentence, oversize_sentence
from dpo_pack.report_style import STYLE

# The micro-batch the first card compares with: TRL's default.
_CARD_MICROBATCH_PAIRS = 8
_KIND_NAMES = {
    "prompt": "prompt and what both completions begin with",
    "chosen": "chosen",
    "rejected": "rejected",
    "merged": "pairs of one prompt, merged",
    "padding": "padding",
}


def packing_page(report: PackingReport) -> str:
    """The whole page as text."""
    sections = (
        _savings(report.statistics),
        _drawn_rows(report),
        _lengths(report.lengths),
        _flops(report.statistics),
        _balance(report),
        _budgets(report),
        _left_out(report),
    )
    title = f"Packing of {report.model}" if report.model else "Packing"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(headline(report))}</h1>",
            f'<p class="soft">{escape(layout_sentence(report))}'
            + (f"; model <code>{escape(report.model)}</code>" if report.model else "")
            + "</p>",
            _cards(report),
            *(section for section in sections if section),
            f"<footer>Plan {report.plan_fingerprint}, written by <code>dpopack inspect-packing</code>. "
            "FLOPs are estimates from the model's config; docs/packing.md has the formula.</footer>",
            "</main></body></html>",
            "",
        ]
    )


def _cards(report: PackingReport) -> str:
    ours = report.statistics
    padded = next(p for p in ours.padded if p.microbatch_pairs == _CARD_MICROBATCH_PAIRS)
    cards = [
        (
            f"{padded.times_flops:.1f}x",
            f"less compute than padded batches of {padded.microbatch_pairs} pairs",
        ),
        (f"{ours.computed_tokens:,}", "tokens an epoch"),
        (f"{ours.rows_per_step.mean:,.1f}", f"rows a step, up to {ours.max_row_tokens:,} tokens each"),
        (f"{ours.budget_fill:.0%}", f"mean fill of the {report.token_budget:,} token budget"),
        (format_flops(ours.flops.per_pair).removesuffix("s"), "estimated for a pair and training step"),
    ]
    if report.recommendation is not None:
        cards.append((f"{report.recommendation.token_budget:,}", "recommended token budget"))
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card{" first" if number == 0 else ""}">'
            f"<b>{escape(value)}</b><span>{escape(text)}</span></div>"
            for number, (value, text) in enumerate(cards)
        )
        + "</div>"
    )


def _section(title: str, introduction: str, *content: str) -> str:
    return (
        f'<section><h2>{escape(title)}</h2><p class="soft">{escape(introduction)}</p>'
        + "".join(content)
        + "</section>"
    )


def _savings(ours: PackingStatistics) -> str:
    most = max(padded.tokens for padded in ours.padded)
    lines = "".join(_savings_line(ours, padded, most) for padded in ours.padded)
    legend = _legend(
        ("computed", "computed here"),
        ("sharing", "saved: prompts computed once"),
        ("packing", "saved: no padding"),
    )
    return _section(
        "Against padded training",
        "Tokens of one epoch through the model, and what a padded loop would compute at each micro-batch "
        "size. At the right, how many times ours: tokens, then FLOPs.",
        f'<div class="lines">{lines}</div>',
        legend,
        _head_sentence(ours),
    )


def _savings_line(ours: PackingStatistics, padded: PaddedComparison, most: int) -> str:
    parts = (
        ("computed", ours.computed_tokens),
        ("sharing", ours.saved_by_sharing_tokens),
        ("packing", max(padded.saved_by_packing_tokens, 0)),
    )
    pairs = f"{padded.microbatch_pairs} pair{'s' if padded.microbatch_pairs > 1 else ''}"
    title = f"padded, micro-batches of {pairs}: {padded.tokens:,} tokens"
    return (
        f'<span class="label">{pairs}</span>{_bar(parts, most, title)}'
        f'<span class="value">{padded.times_computed_tokens:.2f}x &nbsp; '
        f"<b>{padded.times_flops:.2f}x</b></span>"
    )


def _head_sentence(ours: PackingStatistics) -> str:
    skipped = 1 - ours.head_tokens / ours.computed_tokens
    return (
        f'<p class="facts">The output head sees completions only: {ours.head_tokens:,} of '
        f"{ours.computed_tokens:,} positions, {skipped:.1%} saved; a padded loop runs every position "
        "through it.</p>"
    )


def _bar(parts: Iterable[tuple[str, float]], full: float, title: str, kind: str = "bar") -> str:
    """A bar of coloured parts, in percent of `full`."""
    cells = "".join(
        f'<i class="{name}" style="width:{100 * value / full:.3f}%"></i>' for name, value in parts
    )
    return (
        f'<div class="{kind}" role="img" aria-label="{escape(title)}" title="{escape(title)}">{cells}</div>'
    )


def _legend(*entries: tuple[str, str]) -> str:
    return (
        '<div class="legend">'
        + "".join(f'<span><i class="{kind}"></i>{escape(text)}</span>' for kind, text in entries)
        + "</div>"
    )


def _drawn_rows(report: PackingReport) -> str:
    rows = report.drawn_rows
    full = max(report.token_budget, *(row.tokens for row in rows))
    kinds = {segment.kind for row in rows for segment in row.segments}
    return _section(
        "Rows of the first step",
        "Every row is one forward and one backward. Its width here is the token budget; what is left free "
        "is not computed.",
        '<div class="lines">'
        + "".join(_drawn_row(row, number, full) for number, row in enumerate(rows, 1))
        + "</div>",
        _legend(*((kind, name) for kind, name in _KIND_NAMES.items() if kind in kinds)),
    )


def _drawn_row(row: DrawnRow, number: int, full: int) -> str:
    pairs = f"{row.num_pairs} pair{'s' if row.num_pairs > 1 else ''}"
    parts = ((segment.kind, segment.tokens) for segment in row.segments)
    title = f"row {number}: {pairs}, {row.tokens:,} tokens"
    bar = _bar(parts, full, title, kind="bar row track")
    value = f'<span class="value">{row.tokens:,} <span class="soft">{pairs}</span></span>'
    return f'<span class="label">row {number}</span>{bar}{value}'


def _lengths(lengths: Sequence[LengthSummary]) -> str:
    return _section(
        "Lengths",
        "Tokens of each part over the pairs of an epoch. The last bar also holds what is longer.",
        f'<div class="histograms">{"".join(map(_histogram, lengths))}</div>',
    )


def _histogram(summary: LengthSummary) -> str:
    counts = summary.histogram_counts
    width, tallest = 100 / len(counts), max(counts)
    colour = {"pair": "computed"}.get(summary.name, summary.name)
    bars = "".join(
        f'<rect x="{width * number:.2f}" y="{100 - 100 * count / tallest:.2f}" width="{width * 0.86:.2f}" '
        f'height="{100 * count / tallest:.2f}" fill="var(--{colour})"><title>'
        f"{summary.histogram_edges[number]:,.0f} to {summary.histogram_edges[number + 1]:,.0f} tokens: "
        f"{count:,}</title></rect>"
        for number, count in enumerate(counts)
        if count
    )
    name = "a pair in its row" if summary.name == "pair" else summary.name
    return (
        f"<figure><figcaption>{escape(name)}</figcaption>"
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="histogram of {escape(name)} lengths">{bars}</svg>'
        f'<div class="axis"><span>0</span><span>{summary.histogram_edges[-1]:,.0f}</span></div>'
        f'<p class="facts">median {summary.median:,}, mean {summary.mean:,.0f}, 90 % within {summary.p90:,}, '
        f"99 % within {summary.p99:,}, longest {summary.max:,}</p></figure>"
    )


def _flops(ours: PackingStatistics) -> str:
    flops = ours.flops
    parts = (
        ("computed", flops.token_part, "layers"),
        ("sharing", flops.head_part, "output head"),
        ("merged", flops.attention_part, "attention"),
    )
    return _section(
        "Where the compute goes",
        f"{format_flops(flops.total)} for an epoch of training, {format_flops(flops.per_pair)} a pair.",
        _bar([(kind, part) for kind, part, _ in parts], 1.0, "parts of the FLOPs"),
        _legend(*((kind, f"{name} {part:.1%}") for kind, part, name in parts)),
    )


def _balance(report: PackingReport) -> str:
    rows = [
        (
            f"{balance.num_ranks:,}",
            f"{balance.rows_per_step.mean:,.1f}",
            f"{balance.max_rows_per_rank:,}",
            f"{balance.slowest_over_mean:.3f}",
            f"{balance.worst_full_step_slowest_over_mean:.3f}",
            f"{balance.steps_with_idle_ranks:,}",
        )
        for balance in report.balance
    ]
    columns = ("ranks", "rows a step", "most a rank", "slowest / mean", "worst full step", "idle steps")
    return _section(
        "Balance of ranks",
        "A step takes as long as its slowest rank: 1.000 wastes nothing. Where one pair alone is more than a "
        "rank's share, no plan can balance it; more pairs a step can. Bars: the part of the ranks' time "
        "that is work.",
        f'<div class="lines">{"".join(map(_balance_line, report.balance))}</div>',
        _table(columns, rows),
    )


def _balance_line(balance: RankBalance) -> str:
    used = 1 / balance.slowest_over_mean
    ranks = f"{balance.num_ranks:,} rank{'s' if balance.num_ranks > 1 else ''}"
    bar = _bar([("good", used)], 1.0, f"{ranks}: {used:.1%} of the time is work", kind="bar track")
    return f'<span class="label">{ranks}</span>{bar}<span class="value">{used:.1%}</span>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], picked: int | None = None) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr{' class=pick' if number == picked else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _budgets(report: PackingReport) -> str:
    advice = report.recommendation
    if advice is None:
        return ""
    rows = [
        (
            f"{outcome.token_budget:,}",
            f"{outcome.rows_per_step:,.1f}",
            f"{outcome.max_row_tokens:,}",
            f"{outcome.budget_fill:.0%}",
            f"{outcome.num_oversize_pairs:,}",
            f"{outcome.row_overhead:.1%}",
            f"{outcome.relative_time:.3f}",
        )
        for outcome in report.sweep
    ]
    columns = ("budget", "rows a step", "longest row", "fill", "too long", "row overhead", "relative time")
    picked = [outcome.token_budget for outcome in report.sweep].index(advice.token_budget)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in advice.reasons)
    unchanged = "never what is trained on"
    if advice.rows_per_step is not None:
        unchanged = "and in scope epoch which pairs are in a step, but not which an epoch has"
    return _section(
        "Token budgets",
        f"The budget changes memory and the number of rows, {unchanged}.",
        _table(columns, rows, picked),
        f'<div class="advice">Take <code>{advice.overrides}</code>:<ul>{reasons}</ul></div>',
    )


def _left_out(report: PackingReport) -> str:
    counts = [*report.removed_pairs.items(), *report.truncated.items()]
    content = (
        [_table(("reason", "pairs"), [(name, f"{count:,}") for name, count in counts])] if counts else []
    )
    if report.statistics.oversize_pairs:
        content.append(f'<p class="warn">{escape(oversize_sentence(report))}</p>')
    introduction = "Pairs that never reached packing, or were shortened before it."
    return _section(
        "Left out", introduction if counts else "Nothing was dropped or truncated before packing.", *content
    )
