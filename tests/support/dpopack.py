"""`dpopack`, called in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


Dpopack = Callable[..., Outcome]  # of arguments
