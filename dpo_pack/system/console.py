"""The console of a command. It prints, and copies what it prints into a run's console.log."""

import contextlib
import io
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console, NewLine
from rich.control import Control
from rich.text import Text

from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import writing
from dpo_pack.system.output import printable, unguarded


def make_console(*, quiet: bool = False, verbose: bool = False) -> Console:
    """Returns the console of a command. Only rank 0 prints; all other ranks are `quiet`."""
    return _Console(file=unguarded(sys.stdout), quiet=quiet, verbose=verbose)


def print_detail(console: Console, text: str) -> None:
    """Prints a text in a terminal only with --verbose, in console.log always."""
    if not isinstance(console, _Console) or console.verbose:
        console.print(text)
    else:
        console.keep(text)


def keep_log(console: Console, path: Path) -> None:
    """Makes the console copy to the file `path` all that it prints. A quiet console writes no file."""
    if isinstance(console, _Console) and not console.quiet:
        console.log_path = path


def log_only(console: Console, text: str) -> None:
    """Writes a text only into the file of `keep_log`: an error that other code prints in the terminal."""
    if isinstance(console, _Console) and console.log_path is not None:
        with contextlib.suppress(CacheError):  # a full disk must not hide the error that ended the run
            console.keep(text)


class _Plain(Console):
    """Prints names and paths as they are: no markup, and escapes for control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


class _Console(_Plain):
    """Prints, and keeps a copy without colours and progress lines."""

    def __init__(self, *, verbose: bool, **options: Any) -> None:
        super().__init__(**options)
        self.verbose = verbose
        self.log_path: Path | None = None
        self._copy = _Plain(file=io.StringIO(), width=120, color_system=None, force_terminal=False)

    def print(self, *objects: Any, **options: Any) -> None:
        wraps = self.is_terminal
        super().print(*(self._wrapped(x) if wraps and isinstance(x, str) else x for x in objects), **options)
        if not any(isinstance(item, Control | NewLine) for item in objects):  # of a progress line
            self.keep(*objects, **options)

    def _wrapped(self, line: str) -> Text:
        """Wraps a line at words. Long words, such as paths, are not broken, as rich would."""
        line = printable(line)
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        whole: Any = {"break_long_words": False, "break_on_hyphens": False}
        return Text(textwrap.TextWrapper(self.width, subsequent_indent=indent, **whole).fill(line))

    def keep(self, *objects: Any, **options: Any) -> None:
        """Prints only into the copy, and appends the copy to the log file, if any. Raises CacheError."""
        if self.quiet:
            return
        self._copy.print(*objects, **options)
        if self.log_path is not None:
            with writing(self.log_path), self.log_path.open("a", encoding="utf-8") as file:
                file.write(self._copy.file.getvalue())  # type: ignore[attr-defined]
            self._copy.file = io.StringIO()


def format_count(count: int) -> str:
    """812, 40.1K, 7.0M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 1000)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """4.3 s, 43 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
