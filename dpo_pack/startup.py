"""What makes a command quick to start."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Around the first imports of torch and transformers: nothing is collected meanwhile.

    They make some million objects that live as long as the process. Looking through them for garbage again
    and again takes a sixth of the time; afterwards they are set aside, so that no later collection looks at
    them either.
    """
    if "transformers" in sys.modules:  # nothing large to come, and what is alive by now need not stay
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
