"""The views of `dpopack show`: JSON, and sections of lines, which the terminal and the HTML page show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from dpo_pack.data.ingest import columns_sentence
from dpo_pack.data.view import Fault, PackedRow, ShownPair, ShownRecipe, SourceView, Token
from dpo_pack.reports.tables import counted
from dpo_pack.system.process import printable

# The terminal shows only so much at the beginning and at the end of a long text; the page shows all.
_SHOWN_TOKENS, _SHOWN_CHARACTERS = (120, 40), (240, 60)
_NAMED = 8  # rows of a fault, and pairs of a packed row
# The styles of `Run` are classes in the style sheet of the page; this is what rich calls them.
_STYLES = {
    "prompt-token": "blue",
    "chosen-token": "green",
    "rejected-token": "red",
    "unscored": "dim",
    "cut": "dim strike",
    "mark": "dim",
    "facts": "dim",
    "warn": "bold yellow",
    "name": "bold",
}


class Run(NamedTuple):
    """A piece of a line in one style. Its text has no control characters but line breaks."""

    text: str
    style: str = ""  # words of _STYLES
    title: str = ""  # what the page shows under the pointer


Line = tuple[int, list[Run]]  # the indent of a line, and its pieces


def to_json(shown: ShownRecipe) -> str:
    """Returns the report as JSON text. Sequences have the tokens that the model gets, without those cut."""
    value = asdict(shown)
    for image in value["images"]:
        del image["tiles"]  # for the page
    for name in ("warnings", "pairs", "left_out", "dropped"):
        value[name] = [{"source": view["name"], **one} for view in value["sources"] for one in view.pop(name)]
    for pair in value["pairs"]:
        for side in ("chosen", "rejected"):
            kept = [token for token in pair[side] if not token.pop("is_cut")]
            pair[side] = [{k: v for k, v in token.items() if k != "is_placeholder"} for token in kept]
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair becomes JSON's escape


def render_pairs(shown: ShownRecipe, console: Console, *, lists_dropped: bool = False) -> None:
    """Prints the report in lines that are at most as wide as the terminal, and at most 120 columns."""
    for lines in sections(shown, is_page=False, lists_dropped=lists_dropped):
        for indent, runs in lines:
            styles = [" ".join(_STYLES[word] for word in run.style.split()) for run in runs]
            text = Text.assemble(*((run.text, style) for run, style in zip(runs, styles, strict=True)))
            text.rstrip()
            for line in text.wrap(console, min(console.width, 120) - indent, overflow="fold"):
                line.rstrip()
                console.print(Text(" " * indent).append_text(line))
        console.print()


def sections(shown: ShownRecipe, *, is_page: bool, lists_dropped: bool) -> Iterator[list[Line]]:
    """Yields the sections of a view; with `lists_dropped`, rows that are left out but no pairs."""
    summary = list(shown.settings)
    for view in shown.sources:
        summary += [_read(view), columns_sentence(view.columns, view.columns_not_read)]
    yield [_line(sentence) for sentence in dict.fromkeys(summary)]
    for view in shown.sources:
        yield from (_fault_lines("WARNING ", fault, view) for fault in view.warnings)
    if not shown.warnings:
        is_all = not any(view.left_out for view in shown.sources)
        found = "No common fault was found" + ("." if is_all else " in these pairs; other rows are left out.")
        yield [_line(found if shown.pairs else "No pair is left.")]
    if shown.pairs and (shown.asked or not lists_dropped):
        ids = "Hold the pointer over a token to see its id" if is_page else "| is between two tokens"
        yield [
            _line(Run(f"{ids}, ↵ is a line break; [marks] in brackets are not text of the pair.", "facts"))
        ]
        for view in shown.sources:
            for pair in view.pairs:
                title = _line(Run(view.place(pair.row), "name"))
                yield [title, *_pair_lines(pair, is_page=is_page, has_ids=shown.asked and not is_page)]
    most = 5 if is_page or shown.asked or lists_dropped else 1
    for view in shown.sources:
        for reason in view.left_out:
            rows = [row for row in view.dropped if row.reason == reason.name]
            lines = _fault_lines("Left out: ", reason, view)
            for row in rows[:most]:
                lines.append(_line(Run(view.place(row.row), "name"), f": {row.detail}", indent=1))
                lines += _row_lines(row.content, is_page=is_page)
            if len(rows) > most:
                more = f"[{reason.count - most:,} more of these rows; --dropped and --json list more]"
                lines.append(_line(Run(more, "mark"), indent=1))
            if rows:
                yield lines
    if not any(view.left_out for view in shown.sources):
        yield [_line("Left out: none of the rows that were read.")]
    if shown.packed_row is not None and not shown.asked and not lists_dropped:
        yield _packed_row(shown.packed_row)
    more = "More: --pair N (row N, with ids of tokens), --dropped (reads all rows), --html FILE (a page)."
    yield [_line(Run(more, "facts"))]


def _line(*runs: Run | str, indent: int = 0) -> Line:
    pieces = [Run(run) if isinstance(run, str) else run for run in runs]
    return indent, [run._replace(text=printable(run.text)) for run in pieces]


def _read(view: SourceView) -> str:
    rows = f"only {view.rows_read:,}" if view.rows is None else f"{view.rows_read:,} of {view.rows:,}"
    outcome = f"{view.pairs_kept:,} kept, {view.rows_read - view.pairs_kept:,} left out"
    return f"{view.label}, format {view.format}: {rows} rows tokenised, {outcome}"


def _fault_lines(title: str, fault: Fault, view: SourceView) -> list[Line]:
    rows = ", ".join(f"{number:,}" for number in fault.rows[:_NAMED])
    more = f" and {fault.count - _NAMED:,} more" if fault.count > _NAMED else ""
    word = view.row_word if fault.count == 1 else f"{view.row_word}s"
    where = f"{fault.count:,} of {counted(fault.of, fault.unit)} ({word} {rows}{more})"
    lines = [_line(Run(title, "warn"), f"{view.label}, {where}: {fault.sentence}.")]
    if fault.remedy:
        lines.append(_line(Run("Remedy: ", "name"), f"{fault.remedy}.", indent=2))
    return lines


def _pair_lines(pair: ShownPair, *, is_page: bool, has_ids: bool) -> Iterator[Line]:
    yield from (_line(Run("! ", "warn"), note) for note in pair.warnings)
    if has_ids:
        yield from _row_lines(pair.content, is_page=is_page)
    prompt = [token for token in pair.chosen if token.part == "prompt"]
    num_tokens = sum(not token.is_cut for token in prompt)
    num_shared = pair.shared_tokens - num_tokens  # with which both completions begin
    facts = f" {counted(num_tokens, 'token')}, not scored, the same for chosen and rejected"
    yield _line(Run("PROMPT", "prompt-token"), facts, indent=1)
    runs = _tokens(prompt, "prompt", 0, is_page=is_page, has_ids=has_ids)
    yield 3, [*runs, Run("[the prompt ends]", "mark")]
    for side, sequence in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        tokens, end = sequence[len(prompt) :], pair.ends_with[side]
        num_tokens = sum(not token.is_cut for token in tokens)
        num_scored = sum(token.scored is not False for token in tokens)
        facts = f" {counted(num_tokens, 'token')}, "
        facts += "all scored" if num_scored == num_tokens else f"{num_scored:,} of them scored"
        facts += f"; the first {num_shared:,} in both" if num_shared else ""
        facts += f'; ends with "{end}"' if end else "; EOS is missing at its end"
        yield _line(Run(side.upper(), f"{side}-token"), facts, indent=1)
        runs = _tokens(tokens, side, num_shared, is_page=is_page, has_ids=has_ids)
        yield 3, [*runs, Run("" if end else "[no EOS]", "warn")]


def _tokens(
    tokens: Sequence[Token], part: str, num_shared: int, *, is_page: bool, has_ids: bool
) -> Iterator[Run]:
    tokens = [token for token in tokens if token.text or not token.is_placeholder]
    head, tail = _SHOWN_TOKENS
    is_long = len(tokens) > 1.25 * (head + tail) and not is_page
    num_hidden = len(tokens) - head - tail if is_long else 0
    for number, token in enumerate(tokens):
        was_cut = number > 0 and tokens[number - 1].is_cut
        if token.is_cut != was_cut:
            yield Run("[cut off:" if token.is_cut else "]", "warn")
        if number and number == num_shared:
            yield Run("[differs]", "mark")
        if num_hidden and number == head:
            yield Run(f"[{num_hidden:,} tokens not shown here; --html shows all]", "mark")
        if head <= number < head + num_hidden:
            continue
        if not is_page and number and not tokens[number - 1].text.endswith("\n"):
            yield Run("|", "mark")
        kind = "prompt" if number < num_shared else part
        style = f"{kind}-token{' unscored' if token.part == 'completion' and token.scored is False else ''}"
        text = "↵\n".join(map(printable, token.text.split("\n")))
        title = (
            f"token id {token.id}{f', scored {token.scored}' if token.scored not in (True, False) else ''}"
        )
        yield Run(text.removesuffix("\n"), "cut" if token.is_cut else style, title)
        if has_ids:
            yield Run(f"({token.id})", "mark")
        if text.endswith("\n"):
            yield Run("\n")
    if tokens and tokens[-1].is_cut:
        yield Run("]", "warn")


def _row_lines(content: Any, *, is_page: bool) -> Iterator[Line]:
    for name, value in content.items() if isinstance(content, dict) else [("", content)]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        head, tail = _SHOWN_CHARACTERS
        if len(text) > head + tail and not is_page:
            note = f"[{len(text) - head - tail:,} characters not shown here; --html shows all]"
            text = f"{text[:head]}{note}{text[-tail:]}"
        yield _line(Run(f"{name}: " if name else "", "name"), text, indent=3)


def _packed_row(row: PackedRow) -> list[Line]:
    full = f"{row.tokens:,} of {row.token_budget:,} tokens ({row.tokens / row.token_budget:.1%} full)"
    title = Run("One packed row of the pairs that were read", "name")
    lines = [_line(title, f": {counted(len(row.pairs), 'pair')}, {full}; tokens of the first ones:")]
    for place, parts in list(row.pairs.items())[:_NAMED]:
        numbers = ", ".join(f"{part} {tokens:,}" for part, tokens in parts.items())
        lines.append(_line(f"{place}: {numbers}", indent=1))
    return lines
