"""A command on every rank: starts the ranks where nobody has, joins them, makes sure that they agree.

`dpopack` on several devices starts itself once for each of them (process_starter.py); under torchrun,
accelerate launch or srun it is started so often already (placement.py), and only joins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # torch.distributed's, with their types
from torch.distributed.rendezvous import rendezvous

import dpo_pack
from dpo_pack import ranks
from dpo_pack.console import make_console
from dpo_pack.errors import RecipeError, RunError
from dpo_pack.placement import Placement, placement
from dpo_pack.process_starter import end_with_parent, start_ranks, usable_cores
from dpo_pack.rank_failures import end_soon, settle_failure
from dpo_pack.recipe import Recipe

# Until the last rank is there: nodes of a job do not start at once.
_MEETING_TIME = timedelta(minutes=15)
# The longest that a device may wait for the others inside a step: rank 0 writes a large checkpoint meanwhile.
_COLLECTIVE_TIME = timedelta(minutes=60)
_MEETING_TIME_OF_FAILURES = timedelta(seconds=30)

_stores: dict[Placement, Store] = {}  # of the one meeting of this process


@contextlib.contextmanager
def on_every_rank(recipe: Recipe, *, quiet: bool = False) -> Iterator[Console]:
    """The body runs on every rank, with a console that prints on rank 0 alone (not at all when `quiet`).

    Where several processes are wanted and nobody has started them, this starts them with the command line of
    this process, waits for them and raises SystemExit with their exit status: the body runs in them only.
    Raises RecipeError when the number of processes is wrong, RunError when the ranks do not meet or disagree.
    """
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
    yield make_console(quiet=quiet or not ranks.is_first())
    ranks.wait_for_all()  # no rank takes a connection away from one that still works
    if place is not None and dist.is_initialized():  # else it is vLLM's own, which ends it itself
        ranks.leave()


def tell_among_ranks(error: BaseException, place: Placement) -> int:
    """What ended this rank, told once whatever number of ranks it ended; returns the exit status.

    The process must end after this, and does.
    """
    end_soon(error)
    try:
        store = meet(place, _MEETING_TIME_OF_FAILURES)
    except RunError:  # the others never came, or have left
        store = HashStore()
    return settle_failure(error, rank=place.rank, num_ranks=place.num_ranks, store=store)


def wanted_processes(recipe: Recipe, place: Placement | None) -> int:
    """`distributed.num_processes` as a number. Raises RecipeError where there are not so many."""
    wanted = recipe.distributed.num_processes
    num_devices = torch.cuda.device_count() if ranks.uses_cuda() else 0
    if place is None:
        number = max(1, num_devices) if wanted == "auto" else wanted
        if num_devices and number > num_devices:
            raise RecipeError(
                f"distributed.num_processes: {number} processes need as many GPUs, and {num_devices} are "
                "visible; lower it, or see what CUDA_VISIBLE_DEVICES says"
            )
        return number
    if wanted not in ("auto", place.num_ranks):
        raise RecipeError(
            f"distributed.num_processes: {wanted} are asked for, but the launcher has started "
            f"{place.num_ranks} (WORLD_SIZE, or SLURM_STEP_NUM_TASKS); leave it at auto, or start that many"
        )
    if 1 < num_devices < place.num_local_ranks:  # with one visible, the launcher may have given each its own
        raise RecipeError(
            f"distributed.num_processes: {place.num_local_ranks} processes were started on a node with "
            f"{num_devices} visible GPUs; start one a GPU"
        )
    return place.num_ranks


def meet(place: Placement, timeout: timedelta = _MEETING_TIME) -> Store:
    """Wait for the other ranks; returns the store that all of them write to. Raises RunError."""
    if place not in _stores:
        os.environ.update(place.environment())  # for those who read it: torch, accelerate
        try:
            _stores[place], _, _ = next(rendezvous("env://", timeout=timeout))
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"distributed.num_processes: the {place.num_ranks} ranks did not meet at {place.address}:"
                f"{place.port} ({reason}); see whether all were started, and can reach that host and port"
            ) from error
    return _stores[place]


def _join(place: Placement, store: Store) -> None:
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise RecipeError(
                f"distributed.strategy: accelerate's own configuration asks for {name}, which dpo-pack does "
                "not take from there; choose a configuration without it, and set distributed.strategy"
            )
    if "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, usable_cores() // place.num_local_ranks)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for what reads it later, accelerate among it
        torch.set_num_threads(num_threads)
    backend, device = "gloo", None
    if ranks.uses_cuda():
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        _require_own_device(device, place, store)
    dist.init_process_group(
        backend,
        store=PrefixStore("dpo_pack/ranks", store),
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=_COLLECTIVE_TIME,
        device_id=device,
    )


def _require_own_device(device: torch.device, place: Placement, store: Store) -> None:
    """NCCL would say so as well, but not what to do."""
    store = PrefixStore("dpo_pack/devices", store)
    store.set(str(place.rank), str(torch.cuda.get_device_properties(device).uuid))
    identities = [store.get(str(rank)) for rank in range(place.num_ranks)]
    sharing = [rank for rank, identity in enumerate(identities) if identity == identities[place.rank]]
    if len(sharing) > 1:
        raise RecipeError(
            f"distributed.num_processes: ranks {', '.join(map(str, sharing))} were given the same GPU; start "
            "one process a GPU"
        )


def _facts(recipe: Recipe) -> dict[str, Any]:
    from dpo_pack.run_dir import package_versions

    versions = {**package_versions(), "dpo_pack": dpo_pack.__version__}
    return {
        **{f"version of {name}": version for name, version in versions.items()},
        **dict(_leaves(recipe.model_dump(mode="json"))),
    }


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _own_command() -> list[str]:
    # `-m` puts the working directory before the installed packages; a script does not.
    safe_path = [] if sys.path[0] in ("", os.getcwd()) else ["-P"]
    return [sys.executable, *safe_path, "-m", "dpo_pack", *sys.argv[1:]]


def _hush() -> None:
    """On ranks that are not the first: what libraries tell people, but errors, rank 0 tells already."""
    from datasets import disable_progress_bars as hush_datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars as hush_hub
    from transformers.utils.logging import disable_progress_bar as hush_transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hush_datasets()
    hush_hub()
    hush_transformers()
