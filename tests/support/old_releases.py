"""What older releases of our dependencies say, which is none of our own output."""

from __future__ import annotations

import re

_GLOO = re.compile(
    r"(\[Gloo\] Rank )+|\d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+\n?"
)


def without_gloo(printed: str) -> str:
    """What ranks printed, without what torch 2.10 prints of their connections, lines of several mixed."""
    return _GLOO.sub("", printed)
