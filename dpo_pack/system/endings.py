"""Ends a command after an error or a stop signal: one rank prints one line, then all ranks exit.

Exit status 2: the user can repair the mistake. 130 or 143: the command was interrupted. 1: a bug of dpo-pack.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dpo_pack.system.errors import DpoPackError, is_out_of_memory
from dpo_pack.system.interrupts import Interrupted, taken_signals
from dpo_pack.system.process import complain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OUR_BUG, USER_CAN_MEND = 1, 2  # exit statuses
VERDICT_STATUSES = {"better": 0, "worse": 3, "mixed": 3, "cannot tell": 4}  # of `verdict`, by its conclusion
# Errors of the disk: a file of a cache, of output_dir or of a library may raise them, and so may stdout.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
# A bug may be that the connection to a killed rank broke. In this time the launcher ends all other ranks.
_SECONDS_BEFORE_A_TRACEBACK = 1.0
_TIME_FOR_THE_MESSAGE = timedelta(seconds=5)  # in which the rank that failed first prints its message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The message and the exit status for an exception that ended a command."""

    message: str | None  # one line; None: a bug of dpo-pack, so the traceback is printed
    exit_status: int
    is_urgent: bool = False  # a second signal came, so the process exits at once and saves nothing


def ending_of(error: BaseException) -> Ending:
    from dpo_pack.system.machine import torchvision_fault  # imports pydantic

    match error:
        case Interrupted():
            message = f"{error}; {error.next_step}"
            return Ending(message=message, exit_status=error.exit_status, is_urgent=error.is_urgent)
        case DpoPackError():
            text = " ".join(line.strip() for line in str(error).splitlines())
        case _ if is_out_of_memory(error):
            sentences = str(error).strip().partition("\n")[0].split(". ")
            what = ". ".join(sentences[:3]).rstrip(".")  # size of the allocation, free memory of the device
            text = (
                f"{what}; lower packing.token_budget (if it was the reference pass or an evaluation: "
                "reference.token_budget), or set model.gradient_checkpointing=true"
            )
        case ImportError() if (fault := torchvision_fault()) is not None:
            text = fault
        case OSError() if error.errno in _DISK_ERRORS:
            where = "a file" if error.filename is None else error.filename
            text = f"{where}: {error.strerror}; free space, or check the disk for faults"
        case _:
            return Ending(message=None, exit_status=OUR_BUG)
    return Ending(message=f"error: {text}", exit_status=USER_CAN_MEND)


def settle_failure(error: BaseException, *, rank: int, store: Store) -> int:
    """Prints the error that ended this rank and returns the exit status. Ranks that fail after the first in
    `store`, often because of it, print nothing and end with its status."""
    from torch._C._distributed_c10d import PrefixStore  # imports torch; as in torch.distributed, with types

    ending = ending_of(error)
    store = PrefixStore("dpo_pack/failures", store)
    with contextlib.suppress(RuntimeError):  # the process that served the store has ended: under srun, rank 0
        if store.add("number", 1) > 1:
            with contextlib.suppress(RuntimeError):
                store.wait(["printed"], _TIME_FOR_THE_MESSAGE)
            return int(store.get("status"))
        store.set("status", str(ending.exit_status))
    if ending.message is None:
        time.sleep(_SECONDS_BEFORE_A_TRACEBACK)
    if isinstance(error, RuntimeError) and " by peer" in str(error):  # srun does not end the others
        say_of_rank(rank, "error: another rank has ended; its message or the launcher's says why")
    elif isinstance(error, Interrupted):
        complain(str(ending.message))
    else:
        say_of_rank(rank, ending.message or "a bug of dpo-pack")
        if ending.message is None:
            traceback.print_exception(error)
    with contextlib.suppress(RuntimeError):
        store.set("printed", "")
    return ending.exit_status


def say_of_rank(rank: int, message: str) -> None:
    import socket  # `--help` does without it

    complain(f"rank {rank} ({socket.gethostname()}): {message}")


def end_soon(error: BaseException) -> None:
    """Lets an alarm end this process after 60 seconds, and stop signals unless the error is one of them."""
    for number in taken_signals():
        signal.signal(number, signal.SIG_IGN if isinstance(error, Interrupted) else signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
