"""Runs a block on every rank: starts the ranks if no launcher has (process_starter.py), connects them, checks
that they agree."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # torch.distributed's, typed
from torch.distributed.rendezvous import rendezvous

import dpo_pack
from dpo_pack.system import ranks
from dpo_pack.system.console import log_only, make_console
from dpo_pack.system.endings import end_soon, ending_of, settle_failure
from dpo_pack.system.errors import RecipeError, RunError, first_line
from dpo_pack.system.files import leaves
from dpo_pack.system.machine import package_versions
from dpo_pack.system.process import KEY, Placement, has_accelerate_config, is_set, placement
from dpo_pack.system.process_starter import end_with_parent, start_ranks, usable_cores

# The longest waits of a rank: until all ranks have started (nodes of a job start at different times), and in
# a collective (rank 0 may be writing a large checkpoint).
_MEETING_TIME, _COLLECTIVE_TIME = timedelta(minutes=15), timedelta(minutes=60)
_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

_stores: dict[Placement, Store] = {}  # at most one, because a process meets the other ranks once


@contextlib.contextmanager
def on_every_rank(
    wanted: int | Literal["auto"],
    command: Sequence[str] | None,
    settings: Mapping[str, Any],
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> Iterator[Console]:
    """Runs the block on every rank, with a console that prints on rank 0 only (nowhere if `quiet`).

    `wanted` is `distributed.num_processes`. If several are wanted and no launcher has started them, this
    process starts `command` for each, waits, and raises SystemExit with their status; without a command it
    runs the block alone. Raises RecipeError if the number of processes is wrong, RunError if the ranks
    cannot connect or differ.
    """
    if has_accelerate_config():
        _refuse_other_shards()
    place = placement(os.environ)
    num_processes = 1 if place is None and command is None else wanted_processes(wanted, place)
    if place is None and command is not None and num_processes > 1:
        raise SystemExit(start_ranks(command, num_processes))
    if "OMP_NUM_THREADS" not in os.environ:  # torch counts cores, not the quota of a container
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    if place is not None and num_processes > 1:
        _join_and_agree(place, settings)
    console = make_console(quiet=quiet or not ranks.is_first(), verbose=verbose)
    if place is not None and wanted == "auto" and num_processes == 1 < _num_devices():
        console.print(
            f"Note: one of {_num_devices()} visible GPUs is used, because WORLD_SIZE=1; to use all, start a "
            "process for each, or unset RANK, WORLD_SIZE and LOCAL_RANK"
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
    """Prints why this rank ended, unless another rank failed before; returns the exit status.

    The process must exit after this; `end_soon` makes sure that it does.
    """
    end_soon(error)
    try:
        store = meet(place, timedelta(seconds=30))
    except RunError:  # the other ranks never started, or have ended
        store = HashStore()
    return settle_failure(error, rank=place.rank, store=store)


def wanted_processes(wanted: int | Literal["auto"], place: Placement | None) -> int:
    """Returns `distributed.num_processes` as a number. Raises RecipeError if it is impossible here."""
    if place is not None:
        return _launched_processes(wanted, place)
    # With a configuration for several processes on CPUs, `accelerate launch` starts one. It does not say
    # how many were asked for, but only then sets the address at which they would meet.
    if wanted == "auto" and is_set("ACCELERATE_USE_CPU") and "MASTER_PORT" in os.environ:
        raise RecipeError(
            f"{KEY}: accelerate's configuration asks for several processes on CPUs, "
            "but accelerate launch starts only one; set their number here, and dpo-pack starts them"
        )
    num_devices = _num_devices()
    number = max(1, num_devices) if wanted == "auto" else wanted
    if num_devices and number > num_devices:
        raise RecipeError(
            f"{KEY}: {number} processes need as many GPUs, and {num_devices} are visible; lower the "
            "number, or correct CUDA_VISIBLE_DEVICES"
        )
    return number


def _launched_processes(wanted: int | Literal["auto"], place: Placement) -> int:
    num_devices = _num_devices()
    if wanted not in ("auto", place.num_ranks):
        raise RecipeError(
            f"{KEY}: the recipe asks for {wanted}, but the launcher has started {place.num_ranks} "
            f"(WORLD_SIZE, or SLURM_STEP_NUM_TASKS); set it to auto, or start {wanted}"
        )
    if 1 < num_devices < place.num_local_ranks:  # if one GPU is visible, each rank may see a different GPU
        raise RecipeError(
            f"{KEY}: {place.num_local_ranks} processes are on a node with {num_devices} visible GPUs; start "
            "one process for each GPU"
        )
    return place.num_ranks


def _num_devices() -> int:
    return torch.cuda.device_count() if ranks.uses_cuda() else 0


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


def _refuse_other_shards() -> None:
    refused = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "FSDP": "FSDP 1"}
    if os.environ.get("FSDP_VERSION") == "2":
        del refused["FSDP"]
    for variable, name in {**refused, "PARALLELISM_CONFIG": "a parallelism_config"}.items():
        if is_set(f"ACCELERATE_USE_{variable}"):
            raise RecipeError(
                f"distributed.strategy: accelerate's configuration asks for {name}, which dpo-pack does not "
                "have; choose one of distributed_type: MULTI_GPU, or FSDP with fsdp_version: 2"
            )


def _join_and_agree(place: Placement, settings: Mapping[str, Any]) -> None:
    """Raises RunError if the ranks cannot connect, or if their `settings` or package versions differ."""
    end_with_parent()
    _join(place, meet(place))
    if place.rank > 0:
        _hush()
    versions = {**package_versions(), "dpo_pack": dpo_pack.__version__}
    facts = {f"version of {name}": version for name, version in versions.items()}
    facts |= dict(leaves(settings, separator="."))
    ranks.require_same(facts, "start every rank with the same recipe, overrides and packages")


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
    """Returns GLOO_SOCKET_IFNAME, or the network interface that leads to other nodes. All ranks must call it.

    Gloo would take the interface of the host's name, on many clusters loopback. We take that of the route to
    rank 0, and on rank 0's own node that of the route to a rank of another node. Raises RunError.
    """
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
        raise RecipeError(
            f"{KEY}: ranks {', '.join(map(str, sharing))} have the same GPU; start one process for each GPU"
        )


def _hush() -> None:
    from datasets import disable_progress_bars as hush_datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars as hush_hub
    from transformers.utils.logging import disable_progress_bar as hush_transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hush_datasets()
    hush_hub()
    hush_transformers()
