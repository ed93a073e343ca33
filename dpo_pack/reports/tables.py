"""Tables of reports: their cells are text, for the terminal or for an HTML page.

A record of an evaluation is a line of metrics.jsonl: means by metric, `intervals`, and the groups `by_source`
and `by_length`. Completions stand side by side.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpo_pack.system.files import Json
from dpo_pack.system.process import counted, printable
from dpo_pack.training.health import what_can_be_told, with_interval

_MOST_OF_PROMPT = 300  # characters; the end is kept, because it says what is asked


class Cells(NamedTuple):
    """A table of text cells. The first column is aligned to the left, the other columns to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    picked: int | None = None  # index of the highlighted row


def cells_of(values: Sequence[object], columns: Mapping[str, str]) -> Cells:
    """Returns one row for each value. `columns` maps a title to a cell format, such as "{.num_rows:,}"."""
    rows = [[form.format(value) for form in columns.values()] for value in values]
    return Cells(list(columns), rows)


def terminal_table(title: str, cells: Cells, *, no_wrap: bool = False) -> Table:
    """Returns a rich table. With `no_wrap`, only the first column may wrap in a narrow terminal."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_header = any(cells.columns)
    table.min_width = len(title)  # rich would wrap a title that is wider than the table
    for number, column in enumerate(cells.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=no_wrap and number > 0)
    for number, row in enumerate(cells.rows):
        table.add_row(*row, style="bold" if number == cells.picked else None)
    return table


def render_completions(
    prompts: Sequence[tuple[str, str]], completions: Mapping[str, Sequence[str]], console: Console
) -> None:
    """Prints each prompt (source, text) and below it the completions, in a column for each model."""
    for number, (source, prompt) in enumerate(prompts):
        end = re.sub(r"^\S{,30}\s+", "", prompt[-_MOST_OF_PROMPT:])  # without a part of a word
        cut = prompt if len(prompt) <= _MOST_OF_PROMPT else f"... {end}"
        console.print()
        console.print(Text("\n".join(map(printable, f"{source}: {cut}".split("\n")))))
        table = Table(box=SIMPLE_HEAD)
        for name in completions:
            table.add_column(Text(printable(name)), ratio=1, overflow="fold")
        answers = (texts[number].strip("\n").split("\n") for texts in completions.values())
        table.add_row(*(Text("\n".join(map(printable, lines))) for lines in answers))
        console.print(table)


METRIC_NAMES = {
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "loss": "loss",
    "logratio/chosen": "log-ratio of chosen",
    "logratio/rejected": "log-ratio of rejected",
    "online/win_rate": "wins against the start",
    "online/scores": "score",
    "online/score_gain": "score above the start's",
}
INTERVALS = "In brackets: 95 % intervals, of accuracies and wins by Wilson, else bootstrap over prompts"


def render_evaluations(sets: Mapping[str, Json], console: Console, *, beta: float) -> None:
    """Prints a model's record on each held-out set, or the records `a` and `b` and their `difference`."""
    for name, found in sets.items():
        judged, columns, told = found, {"": found}, what_can_be_told(found)
        if "difference" in found:
            judged, told = found["difference"], ""
            means = {title: {**found[title.lower()], "intervals": {}} for title in ("A", "B")}
            columns = {**means, "B - A": judged}
            if difference := what_can_be_told(judged, without_effect=0.0):
                told = f"B - A: {difference}"
        title = f"{name}: {pairs_and_prompts(found.get('a', found))}"
        console.print(terminal_table(title, evaluation_cells(columns), no_wrap=True))
        if (groups := group_cells(judged)).rows:
            console.print(terminal_table(f"{name}, by group", groups, no_wrap=True))
        if told:
            console.print(f"{told}.")
        if "length/prefers_longer" in found:
            console.print(
                f"Rewards prefer the longer completion in {found['length/prefers_longer']:.1%} of pairs, "
                f"the data does in {found['length/chosen_longer']:.1%}"
            )
        for model in ("a", "b") if "difference" in found else ():
            console.print(f"{model.upper()}: {found[model]['model']}")
    console.print(f"{INTERVALS}. Rewards: beta {beta:g} x log-ratio to the recipe's reference")


VERDICT_NOTE = (
    "Judges: part of the games that the new model wins, a tie counts half. Others: new minus start. In "
    "brackets: plain 95 % intervals. p counts all sources that were tried (Holm)"
)


def verdict_cells(verdict: Json) -> Cells:
    """Returns a row for each source of evidence, and for what is left of it between answers of one length."""

    def told(found: Json) -> str:
        value = found.get("rate", found.get("difference"))
        return "none" if value is None else with_interval(value, found["interval"])

    rows = []
    for one in verdict["sources"]:
        name, kind, failed = one["name"], one["kind"].replace("_", " "), one["num_failed"]
        items = f"{one['n']:,}" + f", {failed:,} failed" * (failed > 0)
        p = "" if one["p_holm"] is None else f"{one['p_holm']:.3g}"
        rows.append((name if name == kind else f"{name} ({kind})", items, told(one), p, one["says"]))
        if controlled := one.get("length_controlled"):
            rows.append(("at equal length", "", told(controlled), "", ""))
    return Cells(("source", "items", "new model", "p", "says"), rows)


def evaluation_cells(columns: Mapping[str, Json]) -> Cells:
    """Returns a column for each record, by its title, and a row for each metric that one of them has."""
    rows = [
        (words, *(estimate(record, metric) for record in columns.values()))
        for metric, words in METRIC_NAMES.items()
        if any(metric in record for record in columns.values())
    ]
    return Cells(("", *columns), rows)


def group_cells(record: Json) -> Cells:
    """Returns accuracy and margin of each group: of sources, and of lengths of chosen against rejected."""
    groups = {**record.get("by_source", {})}
    groups |= {group.replace("_", " "): of for group, of in record.get("by_length", {}).items()}
    metrics = ("rewards/accuracies", "rewards/margins")
    rows = [
        (group, f"{of['pairs']:,}", *(estimate(of, metric) for metric in metrics))
        for group, of in groups.items()
        if of["pairs"] >= 5  # fewer say nothing
    ]
    return Cells(("group (5 pairs or more)", "pairs", "reward accuracy", "reward margin"), rows)


def estimate(record: Json, metric: str) -> str:
    """Returns "0.612 (0.550 to 0.670)", mean and interval if any; "" if a number was not finite."""
    mean, bounds = record.get(metric), record.get("intervals", {}).get(metric, ())
    if mean is None or None in (bounds or ()):
        return ""
    is_rate = metric in ("rewards/accuracies", "online/win_rate")
    return with_interval(mean, bounds if is_rate else bounds or ())


def pairs_and_prompts(record: Json) -> str:
    """Returns how many pairs were evaluated, of how many, and of how many prompts, where these differ."""
    pairs, prompts = record.get("pairs"), record.get("prompts")
    if pairs is None:
        return counted(prompts or 0, "prompt")
    whole = f"{pairs:,} of {record['held_out_pairs']:,} pairs" if "held_out_pairs" in record else ""
    whole = whole or counted(pairs, "pair")
    return whole + (f", {counted(prompts, 'prompt')}" if prompts not in (None, pairs) else "")
