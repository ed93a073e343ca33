"""Runs a command on every rank: starts the ranks if no launcher has, connects them, checks that they agree.

On several devices `dpopack` starts one process for each device (system/process_starter.py). If torchrun,
accelerate launch or srun has started the processes (system/placement.py), each only joins the others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # torch.distributed's, typed
from torch.distributed.rendezvous import rendezvous

import dpo_pack
from dpo_pack.recipe.load import Recipe
from dpo_pack.system import ranks
from dpo_pack.system.console import log_only, make_console
from dpo_pack.system.endings import end_soon, ending_of, settle_failure
from dpo_pack.system.errors import RecipeError, RunError, first_line
from dpo_pack.system.files import leaves
from dpo_pack.system.machine import package_versions
from dpo_pack.system.placement import Placement, is_set, placement
from dpo_pack.system.process_starter import end_with_parent, start_ranks, usable_cores

# The longest time that ranks wait until all have started: nodes of a job start at different times.
_MEETING_TIME = timedelta(minutes=15)
# The longest time that a rank waits in a collective: rank 0 may be writing a large checkpoint.
_COLLECTIVE_TIME = timedelta(minutes=60)
_MEETING_TIME_OF_FAILURES = timedelta(seconds=30)
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

_stores: dict[Placement, Store] = {}  # at most one, because a process meets the other ranks once


@contextlib.contextmanager
def on_every_rank(recipe: Recipe, *, quiet: bool = False, verbose: bool = False) -> Iterator[Console]:
    """Runs the body on every rank, with a console that prints on rank 0 only (nowhere if `quiet`).

    If the recipe needs several processes and no launcher has started them, this process starts them with its
    own command line, waits for them and raises SystemExit with their exit status. The body then runs only in
    the new processes. Raises RecipeError if the number of processes is wrong, RunError if the ranks cannot
    connect, or if their recipes or package versions differ.
    """
    _refuse_other_shards()
    place = placement(os.environ)
    num_processes = wanted_processes(recipe, place)
    if place is None and num_processes > 1:
        raise SystemExit(start_ranks(_own_command(), num_processes))
    if place is not None and num_processes > 1:
        end_with_parent()
        _join(place, meet(place))
        if place.rank > 0:
            _hush()
        ranks.require_same(_facts(recipe), "start every rank with the same recipe, overrides and packages")
    console = make_console(quiet=quiet or not ranks.is_first(), verbose=verbose)
    num_devices = torch.cuda.device_count() if ranks.uses_cuda() else 0
    if place is not None and num_processes == 1 < num_devices and recipe.distributed.num_processes == "auto":
        console.print(
            f"Note: one of {num_devices} visible GPUs is used, because the launcher has started one process "
            "(WORLD_SIZE=1); to use all, start one process a GPU, or unset RANK, WORLD_SIZE and LOCAL_RANK"
        )
    try:
        yield console
    except BaseException as error:
        log_only(console, ending_of(error).message or traceback.format_exc())
        raise
    ranks.wait_for_all()  # if a rank ended now, it would close a connection that another rank still uses
    if place is not None and dist.is_initialized():  # if `place` is None, vLLM owns and ends the group
        ranks.leave()


def report_failure(error: BaseException, place: Placement) -> int:
    """Prints why this rank ended, unless another rank failed before.

    Returns the exit status. The process must exit after this; `end_soon` makes sure that it does.
    """
    end_soon(error)
    try:
        store = meet(place, _MEETING_TIME_OF_FAILURES)
    except RunError:  # the other ranks never started, or have ended
        store = HashStore()
    return settle_failure(error, rank=place.rank, store=store)


def wanted_processes(recipe: Recipe, place: Placement | None) -> int:
    """Returns `distributed.num_processes` as a number. Raises RecipeError if it is impossible here."""
    wanted = recipe.distributed.num_processes
    num_devices = torch.cuda.device_count() if ranks.uses_cuda() else 0
    if place is None:
        # With a configuration for several processes on CPUs, `accelerate launch` starts one. It does not say
        # how many were asked for, but only then sets the address at which they would meet.
        if wanted == "auto" and is_set("ACCELERATE_USE_CPU") and "MASTER_PORT" in os.environ:
            raise RecipeError(
                "distributed.num_processes: accelerate's configuration asks for several processes on CPUs, "
                "but accelerate launch starts only one; set distributed.num_processes to the number that you "
                "want, and dpo-pack starts them"
            )
        number = max(1, num_devices) if wanted == "auto" else wanted
        if num_devices and number > num_devices:
            raise RecipeError(
                f"distributed.num_processes: {number} processes need as many GPUs, and {num_devices} are "
                "visible; lower the number, or correct CUDA_VISIBLE_DEVICES"
            )
        return number
    if wanted not in ("auto", place.num_ranks):
        raise RecipeError(
            f"distributed.num_processes: the recipe asks for {wanted}, but the launcher has started "
            f"{place.num_ranks} (WORLD_SIZE, or SLURM_STEP_NUM_TASKS); set it to auto, or start {wanted}"
        )
    if 1 < num_devices < place.num_local_ranks:  # if one GPU is visible, each rank may see a different GPU
        raise RecipeError(
            f"distributed.num_processes: {place.num_local_ranks} processes were started on a node with "
            f"{num_devices} visible GPUs; start one process for each GPU"
        )
    return place.num_ranks


def meet(place: Placement, timeout: timedelta = _MEETING_TIME) -> Store:
    """Waits for the other ranks; returns the torch Store that all share. Raises RunError if one is absent."""
    if place not in _stores:
        os.environ.update(place.environment())  # torch and accelerate read it
        try:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
        except dist.DistError as error:
            raise RunError(
                f"distributed.num_processes: the {place.num_ranks} ranks did not meet at {place.address}:"
                f"{place.port} ({first_line(error)}); check that all ranks were started and can reach this "
                "host and port"
            ) from error
        # When torchrun restarts ranks, its store still holds the addresses of the ranks that failed.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _stores[place] = PrefixStore(f"dpo_pack/attempt {attempt}", store)
    return _stores[place]


def _refuse_other_shards() -> None:
    """Raises RecipeError if accelerate's configuration asks for sharding that this package does not have."""
    refused = {
        "DEEPSPEED": "DeepSpeed",
        "MEGATRON_LM": "Megatron-LM",
        "PARALLELISM_CONFIG": "a parallelism_config",
        **({} if os.environ.get("FSDP_VERSION") == "2" else {"FSDP": "FSDP 1"}),
    }
    for variable, name in refused.items():
        if is_set(f"ACCELERATE_USE_{variable}"):
            raise RecipeError(
                f"distributed.strategy: accelerate's configuration asks for {name}, which dpo-pack does not "
                "have; choose one of distributed_type: MULTI_GPU, or FSDP with fsdp_version: 2"
            )


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
            f"distributed.num_processes: the {place.num_ranks} ranks cannot connect to each other "
            f"({first_line(error)}; network interface: {used}); on each node set {_GLOO_VARIABLE} to the "
            "interface that reaches the other nodes"
        ) from error


def _interface_to_other_nodes(place: Placement, store: Store) -> str:
    """Returns GLOO_SOCKET_IFNAME, or the network interface that leads to other nodes. All ranks must call it.

    Gloo would take the interface to which the host's name resolves. On many clusters that is loopback. We
    take the one whose address is this end of the route to rank 0. On rank 0's own node this can be loopback,
    too: there we take the route to a rank of another node. Raises RunError if there is none.
    """
    store = PrefixStore("dpo_pack/addresses", store)
    own = _end_of_route(place.address)
    store.set(str(place.rank), own)
    if _GLOO_VARIABLE in os.environ:
        return os.environ[_GLOO_VARIABLE]
    if _is_loopback(own):
        addresses = [store.get(str(rank)).decode() for rank in range(place.num_ranks)]
        own = next((_end_of_route(other) for other in addresses if not _is_loopback(other)), own)
    names = [
        name
        for name, found in psutil.net_if_addrs().items()
        for one in found
        if one.address.partition("%")[0] == own
    ]
    if _is_loopback(own) or not names:
        raise RunError(
            f"distributed.num_processes: on {socket.gethostname()} no network interface is found that leads "
            f"to the other nodes (its end of the route to {place.address} is {own or 'unknown'}); on each "
            f"node set {_GLOO_VARIABLE} to the interface that does"
        )
    return names[0]


def _end_of_route(host: str) -> str:
    """Returns this machine's address on the route to `host`; "" if there is no route. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
            return address.partition("%")[0]
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def _require_own_device(device: torch.device, place: Placement, store: Store) -> None:
    """Raises RecipeError if two ranks use one GPU. NCCL would also fail, but its message gives no advice."""
    store = PrefixStore("dpo_pack/devices", store)
    store.set(str(place.rank), str(torch.cuda.get_device_properties(device).uuid))
    identities = [store.get(str(rank)) for rank in range(place.num_ranks)]
    sharing = [rank for rank, identity in enumerate(identities) if identity == identities[place.rank]]
    if len(sharing) > 1:
        raise RecipeError(
            f"distributed.num_processes: ranks {', '.join(map(str, sharing))} have the same GPU; start one "
            "process for each GPU"
        )


def _facts(recipe: Recipe) -> dict[str, Any]:
    """Returns the facts that must be equal on all ranks: package versions and every key of the recipe."""
    versions = {**package_versions(), "dpo_pack": dpo_pack.__version__}
    return {
        **{f"version of {name}": version for name, version in versions.items()},
        **dict(leaves(recipe.model_dump(mode="json"), separator=".")),
    }


def _own_command() -> list[str]:
    # With `-m`, Python searches the working directory before installed packages. `-P` turns this off.
    safe_path = [] if sys.path[0] in ("", os.getcwd()) else ["-P"]
    return [sys.executable, *safe_path, "-m", "dpo_pack", *sys.argv[1:]]


def _hush() -> None:
    """Turns off progress bars and warnings of libraries on this rank, because rank 0 shows them."""
    from datasets import disable_progress_bars as hush_datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars as hush_hub
    from transformers.utils.logging import disable_progress_bar as hush_transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hush_datasets()
    hush_hub()
    hush_transformers()
