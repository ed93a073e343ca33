"""Several ranks fail, one tells: the first, and once.

When a rank fails, others fail because of it: their connections break, or they find the same mistake. Ranks
that fail say so in the store at which all of them met; whoever was first there tells the user, the others
are silent and end with its exit status.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's, with their types

from dpo_pack.endings import Ending, complain, ending_of
from dpo_pack.stop_signals import STOP_SIGNALS

_POLL_SECONDS = 0.05
# For the others to come to the same mistake. Where a rank was killed, its launcher ends the others meanwhile,
# before they show what they know of it, which is only that a connection is gone.
_SECONDS_FOR_THE_OTHERS = 1.0
_SECONDS_FOR_THE_TELLER = 5.0
_SECONDS_TO_END = 60


def settle_failure(error: BaseException, *, rank: int, num_ranks: int, store: Store) -> int:
    """Tell the user what ended this rank, unless another tells already; returns the exit status."""
    ending = ending_of(error)
    store = PrefixStore("dpo_pack/failures", store)
    try:
        place = store.add("number", 1)
        own = {"rank": rank, "message": ending.message, "exit_status": ending.exit_status}
        store.set(str(place), json.dumps(own))
        if place > 1:
            _wait_until(lambda: store.check(["told"]), _SECONDS_FOR_THE_TELLER)
            return int(_failure(store, 1)["exit_status"])
        if not ending.is_interruption:
            is_bug = ending.message is None
            _wait_until(lambda: not is_bug and store.add("number", 0) == num_ranks, _SECONDS_FOR_THE_OTHERS)
        failures = [_failure(store, number) for number in range(1, store.add("number", 0) + 1)]
    except (RuntimeError, ValueError):  # the store is gone with the process that served it
        failures = []
    messages = [failure["message"] for failure in failures]
    is_common = ending.message is not None and messages == [ending.message] * num_ranks
    _tell(error, ending, speaker=None if rank == 0 or is_common or ending.is_interruption else rank)
    with contextlib.suppress(RuntimeError):
        store.set("told", "")
    return ending.exit_status


def end_soon(error: BaseException) -> None:
    """Let nothing hold up the end of this process: not a signal that comes twice, not a device that waits."""
    is_interruption = ending_of(error).is_interruption
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if is_interruption else signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS_TO_END)


def _failure(store: Store, number: int) -> dict[str, Any]:
    failure: dict[str, Any] = json.loads(store.get(str(number)))
    return failure


def _tell(error: BaseException, ending: Ending, *, speaker: int | None) -> None:
    where = "" if speaker is None else f"rank {speaker} ({socket.gethostname()}): "
    if ending.message is not None:
        complain(f"{where}{ending.message}")
        return
    if where:
        complain(f"{where}our bug")
    traceback.print_exception(error)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
