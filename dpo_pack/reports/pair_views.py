"""The views of `dpopack show`: JSON, and sections of lines, which the terminal and the HTML page show.

They show the `report` of run/show.py's ShownRecipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from dpo_pack.data.images import ReadImage, pixels_of, png_url
from dpo_pack.data.values import BadRow
from dpo_pack.system.errors import DataError
from dpo_pack.system.process import counted, printable

Values = Mapping[str, Any]
# The terminal shows only so much at the beginning and at the end of a long text; the page shows all.
_SHOWN_TOKENS, _SHOWN_CHARACTERS = (120, 40), (240, 60)
_NAMED = 8  # rows of a fault, and pairs of a packed row
_MARKS = (
    "| is between two tokens (on a page, hold the pointer over a token to see its id), ↵ is a line break; "
    "[marks] in brackets are not text of the pair."
)
# The styles of `Run` are classes in the style sheet of the page; this is what rich calls them.
_STYLES = {
    **{"prompt-token": "blue", "chosen-token": "green", "rejected-token": "red", "unscored": "dim"},
    **{"cut": "dim strike", "mark": "dim", "facts": "dim", "warn": "bold yellow", "name": "bold"},
}


class Run(NamedTuple):
    """A piece of a line in one style. Its text has no control characters but line breaks."""

    text: str
    style: str = ""  # words of _STYLES
    title: str = ""  # what the page shows under the pointer


Line = tuple[int, list[Run]]  # the indent of a line, and its pieces


def to_json(report: Values) -> str:
    """Returns the report as JSON text. Sequences have the tokens that the model gets, without those cut."""
    pairs = [dict(pair) for pair in report["pairs"]]
    for pair in pairs:
        for side in ("chosen", "rejected"):
            kept = [dict(token) for token in pair[side] if not token["is_cut"]]
            pair[side] = [token for token in kept if not token.pop("is_cut")]
    text = json.dumps({**report, "pairs": pairs}, indent=2, ensure_ascii=False, default=str) + "\n"
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair becomes JSON's escape


def render_pairs(report: Values, console: Console, *, lists_dropped: bool = False) -> None:
    """Prints the report in lines that are at most as wide as the terminal, and at most 120 columns."""
    for lines in sections(report, is_page=False, lists_dropped=lists_dropped):
        for indent, runs in lines:
            styles = [" ".join(_STYLES[word] for word in run.style.split()) for run in runs]
            text = Text.assemble(*((run.text, style) for run, style in zip(runs, styles, strict=True)))
            text.rstrip()
            for line in text.wrap(console, min(console.width, 120) - indent, overflow="fold"):
                line.rstrip()
                console.print(Text(" " * indent).append_text(line))
        console.print()


def image_url(image: ReadImage) -> str:
    """Returns an image as a model's processor gets it. Raises DataError if its file has changed."""
    try:
        return png_url(pixels_of(image))
    except BadRow as bad:
        raise DataError(f"{bad.detail}; run the same command again, which reads all images anew") from bad


def sections(report: Values, *, is_page: bool, lists_dropped: bool) -> Iterator[list[Line]]:
    """Yields the sections of a view; with `lists_dropped`, rows that are left out but no pairs."""
    is_asked, sources = report["asked"], {source["name"]: source for source in report["sources"]}
    yield [_line(sentence) for sentence in report["settings"]]
    yield from (_fault_lines("WARNING ", fault, sources) for fault in report["warnings"])
    if not report["warnings"]:
        yield [_line("No common fault was found." if report["pairs"] else "No pair is left.")]
    if report["pairs"] and (is_asked or not lists_dropped):
        yield [_line(Run(_MARKS, "facts"))]
        for pair in report["pairs"]:
            has_ids, image_token = is_asked and not is_page, report["image_token"]
            yield [*_pair_lines(pair, is_page=is_page, has_ids=has_ids, image_token=image_token)]
    most = 5 if is_page or is_asked or lists_dropped else 1
    for reason in report["left_out"]:
        source, name = sources[reason["source"]], (reason["source"], reason["name"])
        rows = [row for row in report["dropped"] if (row["source"], row["reason"]) == name]
        lines = _fault_lines("Left out: ", reason, sources)
        for row in rows[:most]:
            place = f"{source['name']} {source['row_word']} {row['row']:,}"
            lines.append(_line(Run(place, "name"), f": {row['detail']}", indent=1))
            lines += _row_lines(row["content"], is_page=is_page)
        if len(rows) > most:
            more = f"[{reason['count'] - most:,} more of these rows; --dropped and --json list more]"
            lines.append(_line(Run(more, "mark"), indent=1))
        if rows:
            yield lines
    if not report["left_out"]:
        yield [_line("Left out: none of the rows that were read.")]
    if report["packed_row"] is not None and not is_asked and not lists_dropped:
        yield _packed_row(report["packed_row"])
    more = "More: --pair N (row N, with ids of tokens), --dropped (reads all rows), --html FILE (a page)."
    yield [_line(Run(more, "facts"))]


def _line(*runs: Run | str, indent: int = 0) -> Line:
    pieces = [Run(run) if isinstance(run, str) else run for run in runs]
    return indent, [run._replace(text=printable(run.text)) for run in pieces]


def _fault_lines(title: str, fault: Values, sources: Mapping[str, Values]) -> list[Line]:
    count, source = fault["count"], sources[fault["source"]]
    rows = ", ".join(f"{number:,}" for number in fault["rows"][:_NAMED])
    more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
    word = f"{source['row_word']}{'' if count == 1 else 's'}"
    where = f"{count:,} of {counted(fault['of'], fault['unit'])} ({word} {rows}{more})"
    lines = [_line(Run(title, "warn"), f"{source['name']}, {where}: {fault['sentence']}.")]
    if fault["remedy"]:
        lines.append(_line(Run("Remedy: ", "name"), f"{fault['remedy']}.", indent=2))
    return lines


def _pair_lines(pair: Values, *, is_page: bool, has_ids: bool, image_token: int | None) -> Iterator[Line]:
    yield _line(Run(pair["place"], "name"))
    yield from (_line(Run("! ", "warn"), warning) for warning in pair["warnings"])
    if has_ids:
        yield from _row_lines(pair["content"], is_page=is_page)
    prompt = [token for token in pair["chosen"] if token["part"] == "prompt"]
    num_shared = pair["shared_tokens"] - sum(not token["is_cut"] for token in prompt)
    parts = {"prompt": prompt}
    parts |= {side: pair[side][len(prompt) :] for side in ("chosen", "rejected")}
    for part, tokens in parts.items():
        num_tokens = sum(not token["is_cut"] for token in tokens)
        num_scored = sum(token["scored"] for token in tokens)
        facts, mark = "not scored, the same for chosen and rejected", Run("[the prompt ends]", "mark")
        if part != "prompt":
            end = pair["ends_with"][part]
            facts = "all scored" if num_scored == num_tokens else f"{num_scored:,} of them scored"
            facts += f"; the first {num_shared:,} in both" if num_shared else ""
            facts += f'; ends with "{end}"' if end else "; EOS is missing at its end"
            mark = Run("" if end else "[no EOS]", "warn")
        title = Run(part.upper(), f"{part}-token")
        yield _line(title, f" {counted(num_tokens, 'token')}, {facts}", indent=1)
        shown = [token for token in tokens if token["text"] or token["id"] != image_token]
        shared = 0 if part == "prompt" else num_shared
        yield 3, [*_tokens(shown, part, shared, is_page=is_page, has_ids=has_ids), mark]


def _tokens(
    tokens: Sequence[Values], part: str, num_shared: int, *, is_page: bool, has_ids: bool
) -> Iterator[Run]:
    head, tail = _SHOWN_TOKENS
    is_long = len(tokens) > 1.25 * (head + tail) and not is_page
    num_hidden, was_cut, text = len(tokens) - head - tail if is_long else 0, False, "\n"
    for number, token in enumerate(tokens):
        if token["is_cut"] != was_cut:
            yield Run("]" if was_cut else "[cut off:", "warn")
            was_cut = token["is_cut"]
        if number and number == num_shared:
            yield Run("[differs]", "mark")
        if num_hidden and number == head:
            yield Run(f"[{num_hidden:,} tokens not shown here; --html shows all]", "mark")
        if head <= number < head + num_hidden:
            continue
        if not is_page and not text.endswith("\n"):
            yield Run("|", "mark")
        style = f"{'prompt' if number < num_shared else part}-token"
        style += "" if token["part"] == "prompt" or token["scored"] else " unscored"
        text = "↵\n".join(map(printable, token["text"].split("\n")))
        yield Run(text.removesuffix("\n"), "cut" if was_cut else style, f"token id {token['id']}")
        if has_ids:
            yield Run(f"({token['id']})", "mark")
        if text.endswith("\n"):
            yield Run("\n")
    if was_cut:
        yield Run("]", "warn")


def _row_lines(content: Any, *, is_page: bool) -> Iterator[Line]:
    for name, value in content.items() if isinstance(content, dict) else [("", content)]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        head, tail = _SHOWN_CHARACTERS
        if len(text) > head + tail and not is_page:
            note = f"[{len(text) - head - tail:,} characters not shown here; --html shows all]"
            text = f"{text[:head]}{note}{text[-tail:]}"
        yield _line(Run(f"{name}: " if name else "", "name"), text, indent=3)


def _packed_row(row: Values) -> list[Line]:
    tokens, budget, pairs = row["tokens"], row["token_budget"], row["pairs"]
    least = row["token_budget_of_little_memory"]
    short = f"; where memory is short, a run has rows of up to {least:,}" if least != budget else ""
    full = f"{tokens:,} of {budget:,} tokens ({tokens / budget:.1%} full{short})"
    title = Run("One packed row of the pairs that were read", "name")
    lines = [_line(title, f": {counted(len(pairs), 'pair')}, {full}; tokens of the first ones:")]
    sizes = {place: sum(parts.values()) for place, parts in [*pairs.items()][:_NAMED]}
    return lines + [_line(f"{place}: {size:,}", indent=1) for place, size in sizes.items()]
