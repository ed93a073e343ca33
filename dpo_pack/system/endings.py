"""Ends a command after an error or a stop signal: one rank prints one line, then all ranks exit.

Exit status 2: the user can repair the mistake. 130 or 143: the command was interrupted. 1: a bug of dpo-pack.
Importing this file does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpo_pack.system.errors import DpoPackError, is_out_of_memory
from dpo_pack.system.interrupts import Interrupted, taken_signals
from dpo_pack.system.output import complain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OUR_BUG = 1
USER_CAN_MEND = 2

# Errors of the disk. A file of a cache, of output_dir or of a library may raise them, and so may stdout.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
# A rank that failed waits this long, so that other ranks with the same mistake can report it too. If a rank
# was killed, its launcher ends the others in this time, before they print that a connection broke.
_SECONDS_FOR_THE_OTHERS = 1.0
_SECONDS_FOR_THE_MESSAGE = 5.0  # in which the rank that failed first prints its message
_SECONDS_TO_END = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The message and the exit status for an exception that ended a command."""

    message: str | None  # one line; None: a bug of dpo-pack, so the traceback is printed
    exit_status: int
    is_interruption: bool = False
    is_urgent: bool = False  # a second signal came, so the process exits at once and saves nothing


def ending_of(error: BaseException) -> Ending:
    match error:
        case Interrupted():
            return Ending(
                message=f"{error}; {error.next_step}",
                exit_status=error.exit_status,
                is_interruption=True,
                is_urgent=error.is_urgent,
            )
        case DpoPackError():
            text = " ".join(
                line.strip() for line in str(error).splitlines()
            )  # another library's may have more
        case _ if is_out_of_memory(error):
            sentences = str(error).strip().partition("\n")[0].split(". ")
            what = ". ".join(sentences[:3]).rstrip(".")  # size of the allocation, free memory of the device
            text = (
                f"{what}; lower packing.token_budget (if it was the reference pass or an evaluation: "
                "reference.token_budget), or set model.gradient_checkpointing=true"
            )
        case OSError() if error.errno in _DISK_ERRORS:
            where = "a file" if error.filename is None else error.filename
            text = f"{where}: {error.strerror}; free space, or check the disk for faults"
        case _:
            return Ending(message=None, exit_status=OUR_BUG)
    return Ending(message=f"error: {text}", exit_status=USER_CAN_MEND)


def settle_failure(error: BaseException, *, rank: int, num_ranks: int, store: Store) -> int:
    """Prints the error that ended this rank, unless another rank prints first; returns the exit status.

    If a rank fails, other ranks fail too: their connections break, or they find the same mistake. Each failed
    rank writes its message to `store`. The first rank in the store prints its message; the other ranks print
    nothing and end with the exit status of the first rank.
    """
    from torch._C._distributed_c10d import PrefixStore  # as in torch.distributed, but with types

    ending = ending_of(error)
    store = PrefixStore("dpo_pack/failures", store)
    messages: list[str | None] = []  # of all failed ranks
    with contextlib.suppress(RuntimeError, ValueError):  # the process that served the store has ended
        place = store.add("number", 1)
        store.set(str(place), json.dumps([ending.message, ending.exit_status]))
        if place > 1:
            _wait_until(lambda: store.check(["printed"]), _SECONDS_FOR_THE_MESSAGE)
            return int(json.loads(store.get("1"))[1])
        if not ending.is_interruption:
            is_bug = ending.message is None
            _wait_until(lambda: not is_bug and store.add("number", 0) == num_ranks, _SECONDS_FOR_THE_OTHERS)
        messages = [json.loads(store.get(str(n)))[0] for n in range(1, store.add("number", 0) + 1)]
    is_common = ending.message is not None and messages == [ending.message] * num_ranks
    if rank > 0 and not is_common and not ending.is_interruption:
        say_of_rank(rank, ending.message or "a bug of dpo-pack")
    elif ending.message is not None:
        complain(ending.message)
    if ending.message is None:
        traceback.print_exception(error)
    with contextlib.suppress(RuntimeError):
        store.set("printed", "")
    return ending.exit_status


def say_of_rank(rank: int, message: str) -> None:
    complain(f"rank {rank} ({socket.gethostname()}): {message}")


def end_soon(error: BaseException) -> None:
    """Lets an alarm end this process after 60 seconds. Stop signals are ignored after an interruption;
    after other errors they end the process."""
    is_interruption = ending_of(error).is_interruption
    for number in taken_signals():
        signal.signal(number, signal.SIG_IGN if is_interruption else signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS_TO_END)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
