"""Runs a block on every rank: starts the ranks if no launcher has, connects them, checks that they agree.

torchrun does not start them: its status is not the failed rank's, and its ranks continue if it is killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed's, typed
from torch.distributed.rendezvous import rendezvous

import dpo_pack
from dpo_pack.system import ranks
from dpo_pack.system.console import log_only, make_console
from dpo_pack.system.endings import OUR_BUG, end_soon, ending_of, say_of_rank, settle_failure
from dpo_pack.system.errors import RecipeError, RunError, first_line
from dpo_pack.system.files import leaves, text_of
from dpo_pack.system.interrupts import Interrupted, recorded, signals_blocked
from dpo_pack.system.machine import control_groups, package_versions
from dpo_pack.system.process import ALONE, KEY, Placement, is_set, placement

# The longest waits of a rank: until all ranks have started (nodes of a job start at different times), and in
# a collective (rank 0 may be writing a large checkpoint).
_MEETING_TIME, _COLLECTIVE_TIME = timedelta(minutes=15), timedelta(minutes=60)
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

_stores: dict[Placement, Store] = {}  # at most one, because a process meets the other ranks once


@contextlib.contextmanager
def on_every_rank(
    wanted: int | Literal["auto"],
    command: Sequence[str] | None,
    settings: Callable[[], Mapping[str, Any]],
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> Iterator[Console]:
    """Runs the block on every rank, with a console that prints on rank 0 only (nowhere if `quiet`). If no
    launcher has started the `wanted` processes, this one starts `command` for each, waits, and raises
    SystemExit with their status; without a command it runs the block alone. All must have the `settings`."""
    others = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "FSDP")
    for name in others if os.environ.get("FSDP_VERSION") != "2" else others[:-1]:
        if is_set(f"ACCELERATE_USE_{name}"):
            raise RecipeError(
                f"distributed.strategy: accelerate's configuration asks for {name}, which dpo-pack does not "
                "have; choose one of distributed_type: MULTI_GPU, or FSDP with fsdp_version: 2"
            )
    place = placement(os.environ)
    num_processes = 1 if place is None and command is None else wanted_processes(wanted, place)
    if place is None and command is not None and num_processes > 1:
        raise SystemExit(start_ranks(command, num_processes))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(num_threads())
    if place is not None and num_processes > 1:
        end_with_parent()
        _join(place, meet(place))
        if place.rank > 0:
            _hush()
        versions = {"version": {**package_versions(), "dpo_pack": dpo_pack.__version__}}
        facts = dict(leaves({**versions, **settings()}, separator="."))
        ranks.require_same(facts, "start every rank with the same recipe, overrides and packages")
    console = make_console(quiet=quiet or not ranks.is_first(), verbose=verbose)
    try:
        yield console
    except BaseException as error:
        log_only(console, ending_of(error).message or traceback.format_exc())
        raise
    ranks.wait_for_all()  # if a rank ended now, it would close a connection that another rank still uses
    if place is not None and dist.is_initialized():  # if `place` is None, vLLM owns and ends the group
        ranks.leave()


def report_failure(error: BaseException, place: Placement) -> int:
    """Prints why this rank ended, unless another rank failed before; returns the exit status."""
    end_soon(error)
    try:
        store = meet(place, timedelta(seconds=30))
    except RunError:  # the other ranks never started, or have ended
        store = HashStore()
    return settle_failure(error, rank=place.rank, store=store)


def wanted_processes(wanted: int | Literal["auto"], place: Placement | None) -> int:
    """Returns `distributed.num_processes` as a number. Raises RecipeError if it is impossible here."""
    num_devices = torch.cuda.device_count() if ranks.uses_cuda() else 0
    if place is None:
        number = max(1, num_devices) if wanted == "auto" else wanted
        if 0 < num_devices < number:
            raise RecipeError(f"{KEY}: {number} processes need as many GPUs, and {num_devices} are visible")
        return number
    if wanted not in ("auto", place.num_ranks):
        what = f"the recipe asks for {wanted}, but the launcher has started {place.num_ranks}"
        raise RecipeError(f"{KEY}: {what}; set it to auto, or start {wanted}")
    if 1 < num_devices < place.num_local_ranks:  # if one GPU is visible, each rank may see a different GPU
        what = f"{place.num_local_ranks} processes are on a node with {num_devices} visible GPUs"
        raise RecipeError(f"{KEY}: {what}; start one process for each GPU")
    return place.num_ranks


def meet(place: Placement, timeout: timedelta = _MEETING_TIME) -> Store:
    """Waits for the other ranks; returns the torch Store that all share. Raises RunError if one is absent."""
    if place not in _stores:
        os.environ.update(place.environment())  # torch and accelerate read it
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
        except dist.DistError as error:
            raise RunError(
                f"{KEY}: the {place.num_ranks} ranks did not meet at {place.address}:"
                f"{place.port} ({first_line(error)}); check that all were started and can reach it"
            ) from error
        # When torchrun restarts ranks, its store still holds the addresses of the ranks that failed.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _stores[place] = PrefixStore(f"dpo_pack/attempt {attempt}", store)
    return _stores[place]


def _join(place: Placement, store: Store) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, usable_cores() // place.num_local_ranks)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # accelerate and other libraries read it later
        torch.set_num_threads(num_threads)
    backend, device = "gloo", None
    if ranks.uses_cuda():
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        _require_own_device(device, place, store)
    try:
        if place.num_local_ranks < place.num_ranks:
            os.environ[_GLOO_VARIABLE] = _interface_to_other_nodes(place, store)
        dist.init_process_group(
            backend,
            store=PrefixStore("dpo_pack/ranks", store),
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=_COLLECTIVE_TIME,
            device_id=device,
        )
    except RuntimeError as error:
        used = os.environ.get(_GLOO_VARIABLE, "none given")
        raise RunError(
            f"{KEY}: the {place.num_ranks} ranks cannot connect to each other "
            f"({first_line(error)}; network interface: {used}); on each node set {_GLOO_VARIABLE} to the "
            "interface that reaches the other nodes"
        ) from error


def _interface_to_other_nodes(place: Placement, store: Store) -> str:
    """Returns GLOO_SOCKET_IFNAME, or the interface of the route to rank 0, and on rank 0's own node to a rank
    of another node. (Gloo would take that of the host's name, often loopback.) All ranks must call it."""
    store = PrefixStore("dpo_pack/addresses", store)
    own = _end_of_route(place.address)
    store.set(str(place.rank), own)
    if _GLOO_VARIABLE in os.environ:
        return os.environ[_GLOO_VARIABLE]
    if not own:
        addresses = [store.get(str(rank)).decode() for rank in range(place.num_ranks)]
        own = next((_end_of_route(other) for other in addresses if other), "")
    for name, found in psutil.net_if_addrs().items():
        if own in [one.address.partition("%")[0] for one in found]:
            return name
    raise RunError(
        f"{KEY}: on {socket.gethostname()} no network interface leads to the other nodes (rank 0 is at "
        f"{place.address}); on each node set {_GLOO_VARIABLE} to the one that does"
    )


def _end_of_route(host: str) -> str:
    """Returns this machine's address on the route to `host`; "" if no route leaves it. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


def _require_own_device(device: torch.device, place: Placement, store: Store) -> None:
    """Raises RecipeError if two ranks use one GPU. NCCL would also fail, but its message gives no advice."""
    store = PrefixStore("dpo_pack/devices", store)
    store.set(str(place.rank), str(torch.cuda.get_device_properties(device).uuid))
    identities = [store.get(str(rank)) for rank in range(place.num_ranks)]
    sharing = [rank for rank, identity in enumerate(identities) if identity == identities[place.rank]]
    if len(sharing) > 1:
        what = f"ranks {', '.join(map(str, sharing))} have the same GPU"
        raise RecipeError(f"{KEY}: {what}; start one process for each GPU")


def _hush() -> None:
    from transformers.utils.logging import disable_progress_bar

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets is imported only where it is needed
    disable_progress_bar()  # transformers' and the hub's


# ------------------------------------------------------------- starting the ranks of one node

PARENT_PIPE = "DPO_PACK_PARENT_PIPE"  # a file descriptor; a read from it returns when the parent has ended
# After a rank has ended, the others get this time: after an interruption they may still write large files.
_SECONDS_AFTER_A_FAILURE, _SECONDS_AFTER_AN_INTERRUPTION = 5.0, 600.0
_INTERRUPTED_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores a scheduler and a container's quota leave to this process, at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for group, _ in control_groups("cpu", root):  # microseconds of time in a period, or no limit
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of version 2, or 1
        limit = " ".join(text_of(group / file) for file in files).split()
        if len(limit) == 2 and all(map(str.isdecimal, limit)):
            cores = min(cores, max(1, -(-int(limit[0]) // int(limit[1]))))
    return cores


def num_threads(num_here: int | str = "auto") -> int:
    """Returns the threads of a rank on a CPU. (torch counts cores, not the quota of a container.)"""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    cores = usable_cores()
    return min(torch.get_num_threads(), cores) if num_here in ("auto", 1) else max(1, cores // int(num_here))


def start_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Runs `command` as all ranks of this node; returns the first failed rank's status, 1 if it was killed.

    The first stop signal is sent to every rank; a second one ends all at once. Raises Interrupted then, or if
    ranks ended before they could handle the first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    read_end, write_end = os.pipe()
    defaults = {"OMP_NUM_THREADS": str(num_threads(num_ranks))}
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
