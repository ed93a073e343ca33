"""Shows pairs as the model gets them: writes the sentences about a pair, and prints pairs in the terminal.

The HTML page uses the same sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from dpo_pack.data.faults import SIDES, Fault
from dpo_pack.data.ingest import columns_sentence
from dpo_pack.data.view import LeftOutReason, SourceView, Token
from dpo_pack.reports.packing_tables import draw_rows
from dpo_pack.reports.tables import Cells, counted
from dpo_pack.system.output import printable

if TYPE_CHECKING:  # it imports torch
    from dpo_pack.run.show import PackedRow, ShownPair, ShownRecipe

_MOST_COLUMNS = 120
# The terminal shows only so many tokens at the beginning and at the end of a long prompt or completion.
_SHOWN_TOKENS = {"prompt": (60, 60), "completion": (120, 40)}
_SHOWN_CUT_TOKENS = (12, 12)
_SHOWN_CHARACTERS = (240, 60)  # of a value in a row that is left out
_NAMED_ROWS = 8
_ROWS_OF_A_REASON, _ASKED_ROWS_OF_A_REASON = 1, 5
_DRAWN_PAIRS = 8
_COLOURS = {"prompt": "blue", "chosen": "green", "rejected": "red"}


class _Marks(NamedTuple):
    """Marks that the terminal shows between tokens."""

    between: str  # between two tokens; "" if underlining shows the border
    newline: str  # for a line break in a token


def render_pairs(shown: ShownRecipe, console: Console, *, lists_dropped: bool = False) -> None:
    """Prints the report in lines that are at most as wide as the terminal, and at most 120 columns."""
    has_colour = console.color_system is not None and not console.no_color
    ascii_only = console.options.ascii_only
    marks = _Marks(
        between="" if has_colour else "|" if ascii_only else "·",
        newline="\\n" if ascii_only else "↵",
    )
    for line in summary(shown):
        _print(console, line)
    console.print()
    for fault in shown.faults:
        sentence = printable(f"{where(fault)}: {fault.sentence}.")
        _print(console, Text.assemble(("WARNING ", "bold yellow"), sentence))
        _print(console, Text.assemble(("Remedy: ", "bold"), printable(fault.remedy), "."), indent=2)
    if not shown.faults:
        _print(console, no_fault(shown))
    pairs = () if lists_dropped and not shown.asked else shown.pairs
    if pairs:
        console.print()
        _print(console, _legend(marks), style="dim")
    for pair in pairs:
        console.print()
        _print_pair(pair, shown, marks, console)
    _print_left_out(shown, console, lists_dropped=lists_dropped)
    if shown.row is not None and not shown.asked and not lists_dropped:
        console.print()
        _print_packed_row(shown.row, console)
    console.print()
    for line in next_steps(shown):
        _print(console, line, style="dim")


# ---- Sentences


def summary(shown: ShownRecipe) -> list[str]:
    """Returns the lines above the pairs: model, tokenizer, template, limits, and what was read."""
    own = shown.tokenizer == shown.model
    tokenizer = "its own tokenizer" if own else f"tokenizer {shown.tokenizer}"
    template = (
        "no chat template, because the data is not a conversation"
        if shown.template is None
        else f"chat template: {shown.template}"
    )
    positions = ""
    if shown.num_positions is not None and shown.num_positions < shown.max_length:
        positions = f", but this model is exact for {shown.num_positions:,} positions only"
    return [
        f"Model {shown.model}; {tokenizer}, {shown.num_tokens:,} tokens, EOS {quoted(shown.eos)}; {template}",
        f"data.max_length: {shown.max_length:,} tokens of prompt and one completion{positions}; "
        f"data.truncation: {shown.truncation}",
        *dict.fromkeys(line for view in shown.sources for line in source_sentences(view)),
    ]


def source_sentences(view: SourceView) -> tuple[str, str]:
    """Returns what was read of a source: its rows, and its columns."""
    return read_sentence(view), columns_sentence(view.columns, view.columns_not_read)


def read_sentence(view: SourceView) -> str:
    """Returns how many rows of a source were read and kept."""
    rows = counted(view.num_rows, "row")
    if view.num_rows_of_source == view.num_rows:
        what = f"all {rows}" if view.num_rows > 1 else rows
    elif view.num_rows_of_source is not None:
        what = f"{view.num_rows:,} of {view.num_rows_of_source:,} rows"
    else:
        what = f"only the first {rows}" if view.last_row <= view.num_rows else rows
    num_stopping = sum(reason.num_rows for reason in view.left_out if reason.stops_run)
    num_left_out = view.num_rows - view.num_kept
    which = (
        f"{num_stopping:,} of these"
        if num_stopping < num_left_out
        else "this one"
        if num_stopping == 1
        else "these"
    )
    stop = f", and a run stops because of {which}" if num_stopping else ""
    outcome = f"{view.num_kept:,} kept, {num_left_out:,} left out{stop}"
    return f"{view.origin.label}, format {view.format}: {what} tokenised, {outcome}"


def where(fault: Fault) -> str:
    """Returns which pairs or rows have a fault: "a.jsonl, 12 of 200 pairs (lines 3, 8 and 10 more)"."""
    label, checked = fault.origin.label, counted(fault.of_rows, fault.unit)
    if fault.num_rows == fault.of_rows:
        return f"{label}, {'all' if fault.of_rows > 1 else 'its'} {checked}"
    named = ", ".join(f"{number:,}" for number in fault.rows[:_NAMED_ROWS])
    more = fault.num_rows - _NAMED_ROWS
    rows = f"{fault.origin.row_word}{'s' if fault.num_rows > 1 else ''} {named}"
    rows += f" and {more:,} more" if more > 0 else ""
    return f"{label}, {fault.num_rows:,} of {checked} ({rows})"


def no_fault(shown: ShownRecipe) -> str:
    return "No common fault was found in the pairs that were read." if shown.pairs else "No pair is left."


def prompt_sentence(pair: ShownPair) -> str:
    """Returns the heading of the prompt."""
    tokens = prompt_tokens(pair)
    kept, cut = _split_cut(tokens)
    sentence = f"{counted(len(kept), 'token')}, not scored, the same for chosen and rejected"
    if cut:
        sentence += f"; {len(cut):,} of its {len(tokens):,} tokens were cut off at the left"
    return sentence


def completion_sentence(pair: ShownPair, side: str, eos: str) -> str:
    """Returns the heading of a completion: its tokens, those that are scored, and its end in words."""
    tokens = completion_tokens(pair, side)
    kept, cut = _split_cut(tokens)
    num_scored = sum(token.scored is not False for token in kept)
    scored = "all scored" if num_scored == len(kept) else f"{num_scored:,} of them scored"
    sentence = f"{counted(len(kept), 'token')}, {scored}"
    shared = num_shared_completion(pair)
    if shared:
        sentence += f"; the first {shared:,} in both" if shared > 1 else "; the first one in both"
    if cut:
        sentence += f"; {len(cut):,} more were cut off at the right"
    end = pair.ends[side]
    if end is None:
        return f"{sentence}; EOS {quoted(eos)} is missing at its end"
    if end != eos:
        return f"{sentence}; ends with {quoted(end)}, the template's end of a turn (EOS is {quoted(eos)})"
    return f"{sentence}; ends with EOS {quoted(eos)}"


def reason_sentence(reason: LeftOutReason) -> str:
    """Returns how many rows are left out for a reason, and what to do."""
    rows = counted(reason.num_rows, "row")
    stop = "; a run stops there" if reason.stops_run else ""
    remedy = f"; remedy: {reason.remedy}" if reason.remedy else ""
    return f"{rows} of {reason.origin.label}: {reason.reason}{stop}{remedy}"


def row_sentence(row: PackedRow) -> str:
    """Returns the sizes of the drawn row."""
    tokens = row.drawn.tokens
    sharing = "prompts are computed once" if row.share_prompt else "prompts are not shared"
    return (
        f"{counted(len(row.pairs), 'pair')}, {tokens:,} of {row.token_budget:,} tokens "
        f"({tokens / row.token_budget:.1%} full); {sharing}"
    )


def row_cells(row: PackedRow) -> Cells:
    """Returns the numbers of tokens of each pair in the drawn row, by kind."""
    kinds = ("prompt", "chosen", "rejected")
    rows = []
    for place, drawn in row.pairs.items():
        tokens = Counter[str]()
        for segment in drawn.segments:
            tokens[segment.kind] += segment.tokens
        rows.append((place, *(f"{tokens[kind]:,}" for kind in kinds)))
    return Cells(("pair", *kinds), rows)


def next_steps(shown: ShownRecipe) -> list[str]:
    """Returns what else the command can show."""
    lines = (
        [] if shown.asked else ["To see each token with its id, give --pair N (N: the row) or --html FILE."]
    )
    if any(view.num_rows_of_source != view.num_rows for view in shown.sources):
        lines.append("Only a part of the rows was read; --dropped reads all and lists those left out.")
    return lines


def completion_tokens(pair: ShownPair, side: str) -> list[Token]:
    tokens = pair.chosen if side == "chosen" else pair.rejected
    return [token for token in tokens if token.part == "completion"]


def prompt_tokens(pair: ShownPair) -> list[Token]:
    return [token for token in pair.chosen if token.part == "prompt"]


def num_shared_completion(pair: ShownPair) -> int:
    """Returns with how many common tokens the two completions begin."""
    return pair.num_shared - len(_split_cut(prompt_tokens(pair))[0])


def row_text(content: Any) -> list[tuple[str, str]]:
    """Returns (name, text) of each column of a row; ("", text) if `content` is no dict."""
    if not isinstance(content, dict):
        return [("", content if isinstance(content, str) else repr(content))]
    return [
        (str(name), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        for name, value in content.items()
    ]


def quoted(text: str) -> str:
    return f'"{text}"'


def _split_cut(tokens: Sequence[Token]) -> tuple[list[Token], list[Token]]:
    return [t for t in tokens if not t.is_cut], [t for t in tokens if t.is_cut]


# ---- Terminal


def _print(console: Console, text: str | Text, *, indent: int = 0, style: str = "") -> None:
    """Prints text, wrapped to the terminal."""
    text = Text(printable(text), style=style) if isinstance(text, str) else text
    width = min(console.width, _MOST_COLUMNS) - indent
    text.rstrip()
    for line in text.wrap(console, width, overflow="fold"):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line))


def _legend(marks: _Marks) -> str:
    between = (
        f"{marks.between} is between two tokens" if marks.between else "every second token is underlined"
    )
    return f"{between}, {marks.newline} is a line break; [marks] in brackets are not text of the pair."


def _print_pair(pair: ShownPair, shown: ShownRecipe, marks: _Marks, console: Console) -> None:
    _print(console, Text(printable(pair.place), style="bold underline"))
    for note in pair.new_notes:
        _print(console, Text.assemble(("! ", "bold yellow"), printable(note)))
    has_ids = shown.asked
    if shown.asked:
        _print_row(pair.content, console)
    prompt = _tokens(prompt_tokens(pair), "prompt", marks, has_ids=has_ids)
    prompt.append("[the prompt ends]", style="dim")
    _print_part("PROMPT", prompt_sentence(pair), prompt, _COLOURS["prompt"], console)
    for side in SIDES:
        text = _tokens(
            completion_tokens(pair, side),
            side,
            marks,
            has_ids=has_ids,
            num_shared=num_shared_completion(pair),
        )
        if pair.ends[side] is None:
            text.append("[no EOS]", style="bold yellow")
        _print_part(side.upper(), completion_sentence(pair, side, shown.eos), text, _COLOURS[side], console)


def _print_part(name: str, sentence: str, text: Text, colour: str, console: Console) -> None:
    _print(console, Text.assemble((name, f"bold {colour}"), f" {printable(sentence)}"), indent=1)
    _print(console, text, indent=3)


def _tokens(tokens: Sequence[Token], part: str, marks: _Marks, *, has_ids: bool, num_shared: int = 0) -> Text:
    """Returns tokens as a text, with a note where tokens were cut off or are not shown."""
    text, number = Text(), 0
    num_kept = len(_split_cut(tokens)[0])
    head, tail = _SHOWN_TOKENS["prompt" if part == "prompt" else "completion"]
    is_short = num_kept <= 1.25 * (head + tail)
    follows_token = False  # the text ends with a token, and not with a mark or a line break
    for is_cut, group in groupby(tokens, lambda token: token.is_cut):
        if is_cut:
            _append_cut(text, list(group))
            follows_token = False
            continue
        for token in group:
            if num_shared and number == num_shared:
                text.append("[differs]", style="dim")
                follows_token = False
            if is_short or number < head or number >= num_kept - tail:
                style = _COLOURS["prompt" if number < num_shared else part]
                if not marks.between and number % 2:
                    style += " underline"
                if token.part == "completion" and token.scored is False:
                    style += " dim"
                if follows_token:
                    text.append(marks.between, style="dim")
                _append_token(text, token, style, marks, has_id=has_ids)
                follows_token = not token.text.endswith("\n")
            elif number == head:
                num_hidden = num_kept - head - tail
                text.append(f"[{num_hidden:,} tokens not shown here; --html shows all]", style="dim")
                follows_token = False
            number += 1
    return text


def _append_token(text: Text, token: Token, style: str, marks: _Marks, *, has_id: bool) -> None:
    shown = f"{marks.newline}\n".join(map(printable, token.text.split("\n")))
    ends_line = shown.endswith("\n")
    text.append(shown.removesuffix("\n"), style=style)
    if has_id:
        text.append(f"({token.id})", style="dim")
    if ends_line:
        text.append("\n")


def _append_cut(text: Text, cut: Sequence[Token]) -> None:
    head, tail = _SHOWN_CUT_TOKENS
    is_short = len(cut) <= head + tail
    shown = "".join(token.text for token in (cut if is_short else cut[:head]))
    end = "" if is_short else " ... " + "".join(token.text for token in cut[-tail:])
    text.append(f"[{counted(len(cut), 'token')} cut off: ", style="bold yellow")
    text.append(printable(shown + end), style="dim strike")
    text.append("]", style="bold yellow")


def _print_left_out(shown: ShownRecipe, console: Console, *, lists_dropped: bool) -> None:
    if not shown.left_out:
        console.print()
        _print(console, "Left out: none of the rows that were read.")
    most = _ASKED_ROWS_OF_A_REASON if lists_dropped or shown.asked else _ROWS_OF_A_REASON
    for reason in shown.left_out:
        rows = [row for row in reason.rows if row in shown.rows_left_out]
        if not rows:
            continue
        console.print()
        _print(console, Text.assemble(("Left out: ", "bold"), printable(reason_sentence(reason))))
        for row in rows[:most]:
            place = printable(row.origin.place(row.row_number))
            _print(console, Text.assemble((place, "bold"), f": {printable(row.detail)}"), indent=1)
            _print_row(row.content, console)
        if len(rows) > most:
            how = "--json and --html list more" if lists_dropped else "--dropped lists more"
            _print(console, f"[{reason.num_rows - most:,} more of these rows; {how}]", indent=1, style="dim")


def _print_row(content: Any, console: Console) -> None:
    for name, value in row_text(content):
        title = f"{printable(name)}: " if name else ""
        _print(console, Text.assemble((title, "bold"), _shorten(value)), indent=3)


def _shorten(value: str) -> str:
    head, tail = _SHOWN_CHARACTERS
    if len(value) <= head + tail:
        return printable(value)
    middle = f"[{len(value) - head - tail:,} characters not shown here; --html shows all]"
    return f"{printable(value[:head])}{middle}{printable(value[-tail:])}"


def _print_packed_row(row: PackedRow, console: Console) -> None:
    title = ("One packed row of the pairs that were read: ", "bold")
    _print(console, Text.assemble(title, row_sentence(row)))
    names, drawn = list(row.pairs), list(row.pairs.values())
    draw_rows("its pairs", drawn[:_DRAWN_PAIRS], console, names=names[:_DRAWN_PAIRS])
    if len(row.pairs) > _DRAWN_PAIRS:
        more = f"[{len(row.pairs) - _DRAWN_PAIRS:,} more pairs in this row; --html shows all]"
        _print(console, more, style="dim")
