"""Starts the ranks of one node and watches them: all end well, or all end.

torch's elastic launcher is made for restarting workers, and what it does when one ends cannot be had
otherwise: it gives ranks that are saving a checkpoint 30 seconds before it kills them, prints a page about
the failure after the rank's own line, dies of SIGUSR1, and leaves its workers running when it is itself
killed. This keeps its contract with the workers (the same variables, and a store to meet at that the parent
serves, so that no port is ever guessed), which is all that torch and accelerate know of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore  # torch.distributed's, with its types

from dpo_pack import stop_signals
from dpo_pack.endings import OUR_BUG, complain
from dpo_pack.interrupts import Interrupted
from dpo_pack.placement import Placement

PARENT_PIPE = "DPO_PACK_PARENT_PIPE"  # a file descriptor whose end says that the parent is gone

_POLL_SECONDS = 0.05
# A rank that has failed has told why; the others notice by their connections, or never.
_SECONDS_AFTER_A_FAILURE = 5.0
# A rank that was interrupted has saved its part. What the others still write may be large.
_SECONDS_AFTER_AN_INTERRUPTION = 600.0
_INTERRUPTED_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(slots=True, kw_only=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it and every process it has started, which are a session of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run `command` as ranks 0 to `num_ranks` - 1 of this node until all have ended; returns the status.

    That is the exit status of the rank that failed first, or 1 where one was killed, which is said. A first
    SIGINT, SIGTERM or SIGUSR1 is passed on to every rank, once, and their end waited for; a second ends them
    at once. Raises Interrupted where the ranks were stopped before they could say so themselves.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = _environment(num_ranks)
    read_end, write_end = os.pipe()
    ranks: list[_Rank] = []
    with stop_signals.recorded() as received:
        try:
            with stop_signals.held_back():
                for number in range(num_ranks):
                    place = Placement(
                        rank=number,
                        num_ranks=num_ranks,
                        local_rank=number,
                        num_local_ranks=num_ranks,
                        address="127.0.0.1",
                        port=store.port,
                    )
                    ranks.append(_start(command, place, environment, parent_pipe=read_end))
            os.close(read_end)
            return _watch(ranks, received)
        finally:
            for rank in ranks:
                rank.kill()
            os.close(write_end)


def usable_cores() -> int:
    """Those this process may run on, fewer than the machine's where a scheduler has bound it."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(num_ranks: int) -> dict[str, str]:
    """What is the same for all ranks; what the user has set stays."""
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are here: what the host's name resolves to must not matter.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {**defaults, **os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _start(
    command: Sequence[str], place: Placement, environment: Mapping[str, str], *, parent_pipe: int
) -> _Rank:
    own = {**environment, **place.environment(), PARENT_PIPE: str(parent_pipe)}
    if place.rank > 0:
        own.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # rank 0 gives the same warnings
    process = subprocess.Popen(
        command, env=own, stdin=subprocess.DEVNULL, pass_fds=(parent_pipe,), start_new_session=True
    )
    return _Rank(number=place.rank, process=process)


def _watch(ranks: Sequence[_Rank], received: Sequence[int]) -> int:
    """Wait for all ranks, in the order they end; end the others where one's end means that."""
    statuses: dict[int, int] = {}  # by rank, in the order of their ends
    passed_on = False
    deadline = math.inf
    while len(statuses) < len(ranks):
        for rank in ranks:
            status = rank.process.poll() if rank.number not in statuses else None
            if status is None:
                continue
            statuses[rank.number] = status
            if status < 0 and -status not in received:
                complain(_killed(rank.number, -status))
                return OUR_BUG
            if status != 0:
                seconds = _SECONDS_AFTER_A_FAILURE
                if status in _INTERRUPTED_STATUSES or received:
                    seconds = _SECONDS_AFTER_AN_INTERRUPTION
                deadline = min(deadline, time.monotonic() + seconds)
        if received and not passed_on:
            passed_on = True
            for rank in ranks:
                if rank.number not in statuses:
                    rank.process.send_signal(received[0])
        if len(received) > 1 or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return _status_of_all(list(statuses.values()), len(ranks), received)


def _status_of_all(statuses: Sequence[int], num_ranks: int, received: Sequence[int]) -> int:
    """The command's status from those of the ranks that ended by themselves, in the order of their ends."""
    if len(statuses) == num_ranks and not any(statuses):
        return 0  # a signal came when all was done, or none
    told = [status for status in statuses if status > 0]
    if len(received) > 1 or not told:
        raise Interrupted(received[-1])
    failures = [status for status in told if status not in _INTERRUPTED_STATUSES]
    if failures:
        return failures[0]
    return Interrupted(received[0]).exit_status if received else told[0]


def _killed(rank: int, signum: int) -> str:
    name = signal.Signals(signum).name
    if signum == signal.SIGKILL:
        return f"error: rank {rank} was killed ({name}), often by the system for want of memory"
    return f"error: rank {rank} died of {name}"


# ------------------------------------------------------------------------------------------- in a rank


def end_with_parent() -> None:
    """In a rank that `start_ranks` has started: end it, and what it has started, when the parent is gone."""
    pipe = os.environ.pop(PARENT_PIPE, None)
    if pipe is not None:
        threading.Thread(target=_wait_for_the_end, args=(int(pipe),), daemon=True, name="parent").start()


def _wait_for_the_end(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: this returns when the last writer, the parent, is gone
    os.killpg(0, signal.SIGKILL)
