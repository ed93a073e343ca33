"""Prints text. Control characters in names of files or in models' answers never reach a terminal or a log.

`say` (stdout), `complain` (stderr) and console.py print our lines, `guard_output` guards what others print.
"""

import io
import logging
import re
import sys
from typing import Any

_OF_PROGRESS_BARS = re.compile(r"(\x1b\[A|[\n\r\t])")  # what progress bars of libraries need


def printable(text: str) -> str:
    r"""Returns the text with an escape, such as \x1b or \n, for each character that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(line: str) -> None:
    print(printable(line))


def complain(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def guard_output() -> None:
    """From now on, escapes in stdout and stderr control characters and characters that the encoding lacks."""
    # transformers imports bitsandbytes if it is installed; it warns of kernels that dpo-pack does not call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    stdout = unguarded(sys.stdout)
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _Guarded(stdout), _Guarded(unguarded(sys.stderr))


def unguarded(stream: Any) -> Any:
    """Returns the stream that takes control characters, such as those of colours."""
    return stream.stream if isinstance(stream, _Guarded) else stream


class _Guarded:
    """A text stream that writes control characters as escapes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        pieces = _OF_PROGRESS_BARS.split(text)  # every second piece is what the pattern matched
        pieces[::2] = map(printable, pieces[::2])
        self.stream.write("".join(pieces))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
