"""Starts the ranks of one node and watches them. If one rank fails, all ranks end.

torchrun is not used: its exit status is not the failed rank's, and its ranks continue if it is killed.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # as in torch.distributed, but with types

from dpo_pack.system.endings import OUR_BUG, say_of_rank
from dpo_pack.system.files import text_of
from dpo_pack.system.interrupts import Interrupted, recorded, signals_blocked
from dpo_pack.system.machine import control_groups
from dpo_pack.system.process import ALONE

PARENT_PIPE = "DPO_PACK_PARENT_PIPE"  # a file descriptor; a read from it returns when the parent has ended
# After a rank has ended, the others get this time: after an interruption they may still write large files.
_SECONDS_AFTER_A_FAILURE, _SECONDS_AFTER_AN_INTERRUPTION = 5.0, 600.0
_INTERRUPTED_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process may use, at least 1; a scheduler may have bound it to fewer than
    all, and a container's quota may be less than them (a part of a core counts as one)."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for group, _ in control_groups("cpu", root):  # microseconds of time in a period, or no limit
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of version 2, or 1
        limit = " ".join(text_of(group / file) for file in files).split()
        if len(limit) == 2 and all(map(str.isdecimal, limit)):
            cores = min(cores, max(1, -(-int(limit[0]) // int(limit[1]))))
    return cores


def start_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Runs `command` as all ranks of this node; returns the first failed rank's status, 1 if it was killed.

    The first stop signal is sent once to every rank; a second one ends all at once. Raises Interrupted then,
    or if the first one ended ranks before they could handle it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read_end, write_end = os.pipe()
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are on this host. `lo` works even if the host's name resolves to a wrong address.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    node = replace(ALONE, num_ranks=num_ranks, num_local_ranks=num_ranks, port=store.port)
    processes: list[subprocess.Popen[bytes]] = []  # by rank
    with recorded() as received:
        try:
            with signals_blocked():
                for rank in range(num_ranks):
                    place = replace(node, rank=rank, local_rank=rank)
                    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if rank > 0 else {}  # rank 0 warns, too
                    forced = {"TORCHELASTIC_USE_AGENT_STORE": "True", PARENT_PIPE: str(read_end)}
                    process = subprocess.Popen(
                        command,
                        env={**defaults, **quiet, **os.environ, **forced, **place.environment()},
                        stdin=subprocess.DEVNULL,
                        pass_fds=(read_end,),
                        start_new_session=True,  # with all processes that the rank will start
                    )
                    processes.append(process)
            os.close(read_end)
            return _watch(processes, received)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the rank, and every process that it has started
                process.wait()
            os.close(write_end)


def _watch(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    statuses: dict[int, int] = {}  # by rank, in the order of their ends
    passed_on = False
    deadline = math.inf
    while len(statuses) < len(processes) and len(received) < 2 and time.monotonic() <= deadline:
        for rank, process in enumerate(processes):
            status = process.poll() if rank not in statuses else None
            if status is None:
                continue
            statuses[rank] = status
            if status < 0 and -status not in received:
                why = ", often because the machine has too little memory" if -status == signal.SIGKILL else ""
                say_of_rank(rank, f"error: it was killed ({signal.Signals(-status).name}){why}")
                return OUR_BUG
            if status != 0:
                is_interruption = status in _INTERRUPTED_STATUSES or received
                seconds = _SECONDS_AFTER_AN_INTERRUPTION if is_interruption else _SECONDS_AFTER_A_FAILURE
                deadline = min(deadline, time.monotonic() + seconds)
        if received and not passed_on:
            passed_on = True
            for rank, process in enumerate(processes):
                if rank not in statuses:
                    process.send_signal(received[0])
        time.sleep(0.05)
    if len(statuses) == len(processes) and not any(statuses.values()):
        return 0  # no signal came, or it came after all work was done
    exits = [status for status in statuses.values() if status > 0]  # a killed rank has a negative status
    if len(received) > 1 or not exits:
        raise Interrupted(received[-1])
    interrupted = Interrupted(received[0]).exit_status if received else exits[0]
    return next((status for status in exits if status not in _INTERRUPTED_STATUSES), interrupted)


def end_with_parent() -> None:
    """Makes a rank of `start_ranks`, and all processes it started, end when the parent has ended."""

    def wait_for_the_end(pipe: int) -> None:
        os.read(pipe, 1)  # nothing is written: this returns when the only writer, the parent, has ended
        os.killpg(0, signal.SIGKILL)

    if (pipe := os.environ.pop(PARENT_PIPE, None)) is not None:
        threading.Thread(target=wait_for_the_end, args=(int(pipe),), daemon=True, name="parent").start()
