"""Shows completions of the same prompts side by side in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpo_pack.system.output import printable

_NARROWEST = 24  # columns of a completion; in less room, completions stand below each other
_MOST_OF_PROMPT = 300  # characters; the end is kept, because it says what is asked


def render_completions(
    prompts: Sequence[tuple[str, str]], completions: Mapping[str, Sequence[str]], console: Console
) -> None:
    """Prints each prompt and below it the completions, in a column for each model.

    prompts: (source, text). completions: model name -> a text for each prompt.
    """
    is_wide = console.width // max(len(completions), 1) >= _NARROWEST
    for number, (source, prompt) in enumerate(prompts):
        cut = prompt if len(prompt) <= _MOST_OF_PROMPT else f"... {prompt[-_MOST_OF_PROMPT:]}"
        console.print()
        console.print(f"{source}: {cut}")
        if is_wide:
            table = Table(box=SIMPLE_HEAD)
            for name in completions:
                table.add_column(Text(printable(name)), ratio=1, overflow="fold")
            table.add_row(*(_lines(texts[number]) for texts in completions.values()))
            console.print(table)
        else:
            for name, texts in completions.items():
                console.print(f"  {name}: {texts[number]}")


def _lines(text: str) -> Text:
    return Text("\n".join(map(printable, text.strip("\n").split("\n"))))
