"""Tables of reports: their cells are text, for the terminal or for an HTML page. Completions side by side."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpo_pack.system.errors import RecipeError
from dpo_pack.system.process import printable

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


def counted(count: int, word: str) -> str:
    """Returns the count with its word: "1 pair", "1,200 pairs"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def terminal_table(title: str, cells: Cells, *, no_wrap: bool = False) -> Table:
    """Returns a rich table. With `no_wrap`, only the first column may wrap in a narrow terminal."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.min_width = len(title)  # rich would wrap a title that is wider than the table
    for number, column in enumerate(cells.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=no_wrap and number > 0)
    for number, row in enumerate(cells.rows):
        table.add_row(*row, style="bold" if number == cells.picked else None)
    return table


def render_completions(
    prompts: Sequence[tuple[str, str]], completions: Mapping[str, Sequence[str]], console: Console
) -> None:
    """Prints each prompt and below it the completions, in a column for each model.

    prompts: (source, text). completions: model name -> a text for each prompt.
    """
    for number, (source, prompt) in enumerate(prompts):
        cut = prompt if len(prompt) <= _MOST_OF_PROMPT else f"... {prompt[-_MOST_OF_PROMPT:]}"
        console.print()
        console.print(f"{source}: {cut}")
        table = Table(box=SIMPLE_HEAD)
        for name in completions:
            table.add_column(Text(printable(name)), ratio=1, overflow="fold")
        answers = (texts[number].strip("\n").split("\n") for texts in completions.values())
        table.add_row(*(Text("\n".join(map(printable, lines))) for lines in answers))
        console.print(table)


def parse_numbers(text: str, *, option: str, instance: str) -> tuple[int, ...]:
    """Reads the numbers of an option such as `--ranks 1,8,64`. Raises RecipeError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise RecipeError(
            f"{option} {text!r}: not positive whole numbers; write them as in {option} {instance}"
        )
    return numbers
