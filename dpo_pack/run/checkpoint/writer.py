"""Writes checkpoints: all ranks write into a temporary directory, and rank 0 renames it when it is complete.

torch.distributed.checkpoint writes the tensors: each rank writes its shards, or its part of the tensors that
all ranks have. A thread can also write a checkpoint in the background, from a copy in the host's memory. The
thread uses a separate process group, so that its collectives cannot mix with those of training. Only one
checkpoint is written at a time: the next one waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from dpo_pack.run.checkpoint.directory import checkpoint_path, file_sums, prune, write_counters
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import discard, path_aside, put_in_place, writing
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.memory import free_memory_bytes

TENSORS, HOST_STATE, MODEL = "tensors", "host.pt", "model"
Value = TypeVar("Value")
_LONGEST_WRITE = timedelta(days=1)  # the longest time that the other ranks wait for rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The state of a run after a step. Rank 0 writes its values that are not tensors for all ranks."""

    step: int
    tensors: dict[str, Any]  # this rank's tensors in nested dicts; shards are DTensors
    host: dict[str, Any]  # only types that torch.load reads with weights_only
    counters: dict[str, Any]  # written as JSON
    keep: int  # number of newest checkpoints that are kept
    keep_steps: Collection[int]  # the checkpoints of these steps are kept, too


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. Every rank must call its methods in the same order.

    torch's async_save ends when the tensors' files are written. The thread of this class calls torch's `save`
    and then also checks that every rank has written, computes the checksums and renames the directory. So the
    checkpoint becomes complete while training goes on, without another call.
    """

    def __init__(self, directory: Path, *, in_background: bool | Literal["auto"]) -> None:
        """`in_background` "auto": write in the background if tensors are on a GPU and the RAM has room."""
        self.directory = directory
        self.in_background = in_background
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stager: DefaultStager | None = None
        self._group: Any = None

    def write(self, content: CheckpointContent, *, export: Callable[[Path], None] | None = None) -> Path:
        """Writes `directory`/step-000100, now or in the background; returns its path.

        `export` writes the model into the checkpoint before this method returns. All ranks raise CacheError
        if one rank cannot write its files, or could not write those of the previous checkpoint.
        """
        self.wait()
        if ranks.num_ranks() > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        path = checkpoint_path(self.directory, content.step)
        temporary = ranks.first_says(path_aside(path))
        if self.in_background == "auto":
            self.in_background = not ranks.any_rank(not _has_room_for_copy(_local_tensors(content.tensors)))
        with _discarded_on_failure(temporary):
            _on_every_rank(
                path, self._group, lambda: temporary.mkdir(parents=True) if ranks.is_first() else None
            )
            if export is not None:
                _on_every_rank(path, self._group, lambda: export(temporary / MODEL))
            if self.in_background:
                content = replace(content, tensors=self._copy_on_host(content.tensors))
        if self.in_background:
            self._thread = self._thread or _one_thread()
            self._pending = self._thread.submit(_write, content, temporary, path, self._group)
        else:
            _write(content, temporary, path, self._group)
        return path

    @property
    def is_busy(self) -> bool:
        """Whether the background thread may still be writing a checkpoint."""
        return self._pending is not None

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is on disk. Raises CacheError if this fails."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copy_on_host(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy in host memory (pinned if there is a GPU). It overwrites the previous copy."""
        if self._stager is None:
            has_gpu = torch.cuda.is_available()
            options = StagingOptions(
                use_pinned_memory=has_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_gpu,
            )
            self._stager = DefaultStager(options)
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the checkpoint in the background, but not after a second stop signal.

        An interrupted run tells the user that it can resume from its checkpoint, so a failure to write the
        checkpoint must be raised. If another error ends the run, only that error is raised.
        """
        if isinstance(error, Interrupted) and error.is_urgent:
            return
        has_cause = error is not None and not isinstance(error, Interrupted)
        try:
            with contextlib.suppress(CacheError) if has_cause else contextlib.nullcontext():
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()


def _one_thread() -> ThreadPoolExecutor:
    """Returns a pool of one thread that uses the caller's GPU. By default a new thread would use GPU 0, and
    torch's `save` makes CUDA streams."""
    choose_device = None
    if torch.cuda.is_available():
        choose_device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    return ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=choose_device)


def _local_tensors(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields this rank's part of every tensor in nested dicts."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _local_tensors(value)
        elif isinstance(value, Tensor):
            yield value.to_local() if isinstance(value, DTensor) else value


def _has_room_for_copy(tensors: Iterable[Tensor]) -> bool:
    """Returns whether any tensor is on a GPU and the copies of all ranks of this machine fit into half the
    free RAM."""
    tensors = list(tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return any(tensor.is_cuda for tensor in tensors) and 2 * num_bytes <= free_memory_bytes()


def _write(content: CheckpointContent, temporary: Path, path: Path, group: Any) -> None:
    """Writes the checkpoint into `temporary` and renames it to `path`. Every rank must call it.

    If one rank fails, all ranks raise its error.
    """
    with _discarded_on_failure(temporary):
        _on_every_rank(path, group, lambda: _save_tensors(content.tensors, temporary / TENSORS, group))
        sums = _on_every_rank(path, group, lambda: _sums_of_this_rank(temporary / TENSORS))
        files = {f"{TENSORS}/{name}": total for part in sums for name, total in part.items()}
        _on_every_rank(path, group, lambda: _complete(content, temporary, path, files))


def _sums_of_this_rank(directory: Path) -> dict[str, dict[str, int]]:
    """Returns the checksums of the tensor files that this rank has written."""
    sums = file_sums(directory, pattern=f"__{ranks.rank()}_*")
    return sums | file_sums(directory, pattern=".metadata") if ranks.is_first() else sums


def _complete(
    content: CheckpointContent, temporary: Path, path: Path, files: dict[str, dict[str, int]]
) -> None:
    """Rank 0 adds the values that are not tensors, renames the checkpoint and removes old checkpoints.

    `files` are the checksums of all ranks' tensor files.
    """
    if not ranks.is_first():
        return
    with (temporary / HOST_STATE).open("wb") as file:  # given a path, torch.save does not report a full disk
        torch.save(content.host, file)
    model = {f"{MODEL}/{name}": total for name, total in file_sums(temporary / MODEL).items()}
    files = {**files, **file_sums(temporary, pattern=HOST_STATE), **model}
    write_counters(temporary, {**content.counters, "files": files})
    put_in_place(temporary, path)
    prune(path.parent, keep=content.keep, also={content.step, *content.keep_steps})


def _save_tensors(tensors: dict[str, Any], directory: Path, group: Any) -> None:
    """Saves the tensors. If a rank fails, every rank raises the error of the first rank that failed."""
    is_alone = ranks.num_ranks() == 1
    # torch warns if one process saves alone, but here that is right. torch 2.10 warns of its own code, too.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch")
    try:
        save(tensors, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=is_alone)
    except CheckpointException as wrapped:  # torch wraps even `Interrupted`, which is no Exception
        errors = [error for _, (error, _) in sorted(wrapped.failures.items())]
        raise min(errors, key=lambda error: isinstance(error, Exception)) from wrapped


def _on_every_rank(path: Path, group: Any, work: Callable[[], Value]) -> list[Value]:
    """Runs `work` on each rank; returns all results. If one rank cannot write, all raise its CacheError."""

    def work_or_refuse() -> Value:
        with writing(path):
            return work()

    return ranks.every_rank_does(work_or_refuse, group)


@contextlib.contextmanager
def _discarded_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if ranks.is_first():
            discard(temporary)
        raise
