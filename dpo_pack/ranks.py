"""What ranks say to each other on the host: small facts, not tensors. On one process nothing is said.

Everything here goes over gloo, so that nothing of it waits for a device. Every rank must make the same
calls in the same order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dpo_pack.errors import DpoPackError, RunError

# Ranks wait here while the first one tokenises for hours. That one of them is gone shows in its connection.
_HOST_TIME = timedelta(days=7)
_MOST_SHOWN = 40  # characters of a value

Item = TypeVar("Item")
Value = TypeVar("Value")

_host_groups: dict[Any, Any] = {}  # by the default group, of which tests make several


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def uses_cuda() -> bool:
    """Whether ranks compute on CUDA devices; `accelerate launch --cpu` says that they do not."""
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"


def host_group() -> Any:
    """The group whose messages stay on the host; collective when it is first asked for."""
    default = dist.group.WORLD
    if default not in _host_groups:
        _host_groups[default] = dist.new_group(backend="gloo", timeout=_HOST_TIME)
    return _host_groups[default]


def leave() -> None:
    """End this process's groups; it says nothing to other ranks afterwards.

    A group's threads end with its last reference. One that still ran when the interpreter goes down could ask
    for it, and the process would be aborted after all its work was done.
    """
    dist.destroy_process_group()
    _host_groups.clear()


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on some rank."""
    if num_ranks() == 1:
        return flag
    number = torch.tensor(int(flag))
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=host_group())
    return bool(number)


def largest_number(number: int) -> int:
    """The largest of all ranks' numbers."""
    if num_ranks() == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=host_group())
    return int(largest)


def first_says(value: Value) -> Value:
    """Rank 0's value, on every rank; anything that can be pickled."""
    if num_ranks() == 1:
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=host_group())
    said: Value = values[0]
    return said


def every_rank_says(value: Value, group: Any = None) -> list[Value]:
    """Each rank's value, in the order of ranks. `group` is for threads, whose calls meet no others in it."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value, group=group or host_group())
    return values


def share_out(items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Value]]) -> list[Value]:
    """What `work` makes of each item, in order, on every rank; each of them works on its part of the items.

    `work` gets items and returns as many values, which can be pickled. A rank without an item does nothing.
    Where it raises a DpoPackError on one rank, all of them raise it.
    """
    mine = items[rank() :: num_ranks()]
    values: list[Value] = []
    failure: DpoPackError | None = None
    try:
        values = list(work(mine)) if mine else []
    except DpoPackError as error:
        if num_ranks() == 1:
            raise
        failure = error
    results: list[Any] = [None] * len(items)
    for other, (said, failed) in enumerate(every_rank_says((values, failure))):
        if failed is not None:
            raise failed
        results[other :: num_ranks()] = said
    return results


def wait_for_all() -> None:
    """Until every rank is here."""
    if num_ranks() > 1:
        dist.barrier(group=host_group())


@contextlib.contextmanager
def first_goes_first() -> Iterator[None]:
    """Rank 0 goes through the block alone, the others after it, when its files are there.

    Where it fails with a DpoPackError, they raise the same one.
    """
    if num_ranks() == 1:
        yield
        return
    if is_first():
        failure: DpoPackError | None = None
        try:
            yield
        except DpoPackError as error:
            failure = error
            raise
        finally:
            first_says(failure)
    else:
        failure = first_says(None)
        if failure is not None:
            raise failure
        yield


def first_does(action: Callable[[], Value]) -> Value:
    """What `action` returns on rank 0, which alone does it; where it raises a DpoPackError, all do."""
    value: Value | None = None
    with first_goes_first():
        if is_first():
            value = action()
    said: Value = first_says(value)  # type: ignore[assignment]
    return said


def require_same(facts: Mapping[str, Any], remedy: str) -> None:
    """Raise the same RunError on every rank if some fact, by name, is not the same on all of them."""
    told = every_rank_says((socket.gethostname(), dict(facts)))
    host, expected = told[0]
    for other, (other_host, found) in enumerate(told):
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        if names:
            name = names[0]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(
                f"rank {other} (on {other_host}) and rank 0 (on {host}) differ in {name}{more}: "
                f"{_shown(found.get(name))} and {_shown(expected.get(name))}; {remedy}"
            )


def require_shared(directory: Path, recipe_key: str) -> None:
    """Raise the same RunError on every rank if ranks on some node do not see `directory` as rank 0 does."""
    hosts = every_rank_says(socket.gethostname())
    if len(set(hosts)) == 1:
        return
    name = first_does(lambda: _leave_mark(directory, recipe_key))
    try:
        seen = every_rank_says((directory / name).exists())
    finally:
        if is_first():
            (directory / name).unlink()
    for host, is_seen in zip(hosts, seen, strict=True):
        if not is_seen:
            raise RunError(
                f"{recipe_key}: what rank 0 (on {hosts[0]}) writes in {directory} is not there on {host}; "
                "use a directory on a file system that all nodes share"
            )


def _leave_mark(directory: Path, recipe_key: str) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".shared-", suffix=".tmp", dir=directory)
    except OSError as error:
        raise RunError(f"{recipe_key}: cannot write in {directory}: {error.strerror}") from error
    os.close(descriptor)
    return Path(path).name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
