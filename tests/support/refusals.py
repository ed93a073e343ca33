"""How every refusal must be: one line, and not a long one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dpo_pack.system.errors import DpoPackError


def refusal(function: Callable[[], object], kind: type[DpoPackError] = DpoPackError) -> str:
    """The message of the error of this class that the function raises."""
    with pytest.raises(kind) as caught:
        function()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 2500
    return message
