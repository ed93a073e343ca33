"""The console of a command: what it prints, and the copy of it that a run keeps in its directory."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, NewLine
from rich.control import Control
from rich.text import Text

from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import writing
from dpo_pack.system.output import printable, unguarded

_LOG_WIDTH = 120  # columns of a table in a run's console.log


def make_console(*, quiet: bool = False) -> Console:
    """Returns the console of a command. Only rank 0 prints; all other ranks are `quiet`."""
    return _Console(file=unguarded(sys.stdout), quiet=quiet)


def keep_log(console: Console, path: Path) -> None:
    """Appends to a file what the console has printed, and from now on what it prints. Raises CacheError.

    Other consoles than those of `make_console`, and quiet ones, keep nothing.
    """
    if isinstance(console, _Console) and not console.quiet:
        console.log_path = path
        console.append_to_log()


def log_only(console: Console, text: str) -> None:
    """Writes a text into the file of `keep_log`: an error, which the terminal gets another way."""
    if isinstance(console, _Console) and console.log_path is not None:
        with contextlib.suppress(CacheError):  # the user must see the error that ended the run
            console.copy.print(text)
            console.append_to_log()


class _Plain(Console):
    """Shows strings, also those in tables, without the control characters that names in them may have."""

    def __init__(self, **options: Any) -> None:
        # Names and paths may contain brackets, which rich would read as markup.
        super().__init__(highlight=False, soft_wrap=True, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


class _Console(_Plain):
    """Prints, and keeps a copy of its lines: without colours, without lines that move."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.copy = _Plain(file=io.StringIO(), width=_LOG_WIDTH, color_system=None, force_terminal=False)
        self.log_path: Path | None = None

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        of_moving_line = any(isinstance(item, Control | NewLine) for item in objects)
        if not self.quiet and not of_moving_line:
            self.copy.print(*objects, **options)
            self.append_to_log()

    def append_to_log(self) -> None:
        if self.log_path is not None:
            with writing(self.log_path), self.log_path.open("a", encoding="utf-8") as file:
                file.write(self.copy.file.getvalue())  # type: ignore[attr-defined]
            self.copy.file = io.StringIO()


def format_count(count: int) -> str:
    """Returns the count as a short text: 812, 40.1K, 7.0M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 1000)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Returns the time as a short text: 4.3 s, 43 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
