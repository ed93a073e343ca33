"""How a command ends when it does not end well: one line and an exit status. Imports no torch.

Exit status: 2 the user can mend it, 130 or 143 interrupted, 1 our bug.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dpo_pack.errors import DpoPackError
from dpo_pack.interrupts import Interrupted

OUR_BUG = 1
USER_CAN_MEND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What to tell of the exception that ended a command."""

    message: str | None  # one line; None: a bug of ours, which its traceback tells
    exit_status: int
    is_interruption: bool = False
    is_urgent: bool = False  # nothing is to be waited for, whatever is still being written


def ending_of(error: BaseException) -> Ending:
    match error:
        case Interrupted():
            return Ending(
                message=f"{error}; the same command goes on from what is done",
                exit_status=error.exit_status,
                is_interruption=True,
                is_urgent=error.is_urgent,
            )
        case DpoPackError():
            return Ending(message=_one_line(f"error: {error}"), exit_status=USER_CAN_MEND)
        case RuntimeError() if "out of memory" in str(error):  # torch has several classes for it, and no code
            return Ending(message=f"error: {_out_of_memory(str(error))}", exit_status=USER_CAN_MEND)
    return Ending(message=None, exit_status=OUR_BUG)


def complain(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _one_line(message: str) -> str:
    # Causes quoted from other libraries may have several.
    return " ".join(line.strip() for line in message.splitlines())


def _out_of_memory(message: str) -> str:
    """What torch says of the allocation that failed, and what makes allocations smaller."""
    sentences = message.strip().partition("\n")[0].split(". ")
    what = ". ".join(sentences[:3]).rstrip(".")  # the size of the allocation, and what of the device is free
    return (
        f"{what}; lower packing.token_budget (reference.token_budget if it was in the reference pass or an "
        "evaluation), or set model.gradient_checkpointing=true"
    )
