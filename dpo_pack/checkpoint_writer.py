"""Writing checkpoints: by all ranks together, aside, renamed when whole; if wanted, while training goes on.

torch.distributed.checkpoint writes the tensors, each rank its shards, or its part of what all ranks have. In
the background it works from a copy in the host's memory, with collectives in a group of its own, so that they
meet no others. There is never more than one checkpoint on its way: the next one waits for it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from dpo_pack import ranks
from dpo_pack.checkpoint_dir import checkpoint_path, file_sums, prune, write_counters
from dpo_pack.errors import CacheError
from dpo_pack.files import cannot_write, discard, path_aside, put_in_place
from dpo_pack.host_memory import free_memory_bytes
from dpo_pack.interrupts import Interrupted

TENSORS, HOST_STATE, MODEL = "tensors", "host.pt", "model"
Value = TypeVar("Value")
_LONGEST_WRITE = timedelta(days=1)  # of rank 0, while the others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The state of a run after a step. Where ranks differ in what is no tensor, rank 0's counts."""

    step: int
    tensors: dict[str, Tensor]  # of this rank; shards as DTensors
    host: dict[str, Any]  # what torch.load reads with weights_only
    counters: dict[str, Any]  # for JSON
    keep: int  # newest checkpoints
    keep_steps: Collection[int]  # others that stay


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. Every rank makes the same calls."""

    def __init__(self, directory: Path, *, in_background: bool | Literal["auto"]) -> None:
        """`in_background` auto: from a device's memory, if the host has room for a copy."""
        self.directory = directory
        self.in_background = in_background
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stager: StateDictStager | None = None
        self._group: Any = None

    def write(self, content: CheckpointContent, *, export: Callable[[Path], None] | None = None) -> Path:
        """`directory`/step-000100, at once or in the background; returns its path.

        `export` writes the model to a directory inside, before this returns. Raises CacheError when the disk
        refuses a rank, or has refused one while the last checkpoint was on its way.
        """
        self.wait()
        if ranks.num_ranks() > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        path = checkpoint_path(self.directory, content.step)
        temporary = ranks.first_says(path_aside(path))
        if self.in_background == "auto":
            self.in_background = not ranks.any_rank(not _has_room_for_copy(content.tensors))
        with _discarded_on_failure(temporary):
            _together(self._group, path, _make_directory, temporary)
            if export is not None:
                _together(self._group, path, export, temporary / MODEL)
            if self.in_background:
                content = replace(content, tensors=self._in_host_memory(content.tensors))
        if self.in_background:
            self._thread = self._thread or _one_thread()
            self._pending = self._thread.submit(_write, content, temporary, path, self._group)
        else:
            _write(content, temporary, path, self._group)
        return path

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint may be on its way."""
        return self._pending is not None

    def wait(self) -> None:
        """Until nothing is on its way. Raises CacheError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _in_host_memory(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy; its memory, pinned where there is a GPU, is used again for the next one."""
        has_gpu = torch.cuda.is_available()
        if self._stager is None:
            # Without the public DefaultStager around it, which in torch 2.11 closes it after the first copy.
            self._stager = StateDictStager(pin_memory=has_gpu)
        staged = self._stager.stage(tensors, non_blocking=has_gpu)
        if has_gpu:
            torch.cuda.synchronize()
        assert isinstance(staged, dict)
        return staged

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is on its way arrives; on a second signal nobody waits for it.

        An interrupted run says that it goes on from what is saved, so it must tell if that is not.
        """
        if isinstance(error, Interrupted) and error.is_urgent:
            return
        has_cause = error is not None and not isinstance(error, Interrupted)
        try:
            with contextlib.suppress(*((CacheError,) if has_cause else ())):
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()


def _one_thread() -> ThreadPoolExecutor:
    """On the device of this thread: torch's saving makes streams there, and a new thread is on GPU 0."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    return ThreadPoolExecutor(
        1,
        thread_name_prefix="checkpoint",
        initializer=torch.cuda.set_device,
        initargs=(torch.cuda.current_device(),),
    )


def _has_room_for_copy(tensors: dict[str, Tensor]) -> bool:
    """Whether copies of this node's ranks take half of its free memory, and the state is not there anyway."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    num_bytes = sum(tensor.nbytes for tensor in local) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return any(tensor.is_cuda for tensor in local) and 2 * num_bytes <= free_memory_bytes()


def _write(content: CheckpointContent, temporary: Path, path: Path, group: Any) -> None:
    """Fill `temporary` and rename it to `path`. Every rank calls; where one fails, all do."""
    with _discarded_on_failure(temporary):
        _together(group, path, _save_tensors, content.tensors, temporary / TENSORS, group)
        sums = _together(group, path, _sums_of_this_rank, temporary / TENSORS)
        files = {f"{TENSORS}/{name}": total for part in sums for name, total in part.items()}
        _together(group, path, _complete, content, temporary, path, files)


def _sums_of_this_rank(directory: Path) -> dict[str, dict[str, int]]:
    """Of the tensors' files that this rank has written."""
    sums = file_sums(directory, pattern=f"__{ranks.rank()}_*")
    return sums | file_sums(directory, pattern=".metadata") if ranks.is_first() else sums


def _complete(
    content: CheckpointContent, temporary: Path, path: Path, files: dict[str, dict[str, int]]
) -> None:
    """What rank 0 does when all ranks have written their tensors; `files` are theirs."""
    if not ranks.is_first():
        return
    torch.save(content.host, temporary / HOST_STATE)
    model = {f"{MODEL}/{name}": total for name, total in file_sums(temporary / MODEL).items()}
    files = {**files, **file_sums(temporary, pattern=HOST_STATE), **model}
    write_counters(temporary, {**content.counters, "files": files})
    put_in_place(temporary, path)
    prune(path.parent, keep=content.keep, also={content.step, *content.keep_steps})


def _save_tensors(tensors: dict[str, Tensor], directory: Path, group: Any) -> None:
    """Raises OSError, on every rank, when a disk refuses."""
    is_alone = ranks.num_ranks() == 1
    # That one process saves alone is what we want.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
    # What torch 2.10 says of its own code.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch")
    try:
        save(tensors, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=is_alone)
    except CheckpointException as wrapped:
        _raise_cause(wrapped)


def _raise_cause(wrapped: CheckpointException) -> NoReturn:
    """Raise what torch has wrapped for all ranks: an OSError, or what none of us expects.

    It wraps what comes from outside, too: `Interrupted` is still that.
    """
    errors = [error for _, (error, _) in sorted(wrapped.failures.items())]
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    for error in errors:
        if isinstance(error, (OSError, RuntimeError)):
            raise error from wrapped
    raise wrapped


def _together(group: Any, path: Path, function: Callable[..., Value], *arguments: Any) -> list[Value]:
    """What `function` returns on each rank. Where a disk refuses one of them, all raise its CacheError."""
    value: Value | None = None
    failure: CacheError | None = None
    try:
        value = function(*arguments)
    except CacheError as error:
        failure = error
    except OSError as error:
        failure = cannot_write(path, error)
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        # How torch's archive writer says that the disk took only part of it.
        failure = cannot_write(path, "it could not be written in full")
    told = ranks.every_rank_says((value, failure), group)
    for _, failure in told:
        if failure is not None:
            raise failure
    values: list[Any] = [value for value, _ in told]
    return values


def _make_directory(directory: Path) -> None:
    if ranks.is_first():
        directory.mkdir(parents=True)


@contextlib.contextmanager
def _discarded_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if ranks.is_first():
            discard(temporary)
        raise
