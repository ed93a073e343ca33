"""Checkpoint directories: all ranks write one, rank 0 completes it; finds, checks, reads and removes them.

A checkpoint is written into a temporary directory, which rank 0 renames to `step-000100/` when all its files
are on the disk. Removal also begins with a rename. So a directory of that name is always complete. Its
`checkpoint.json` has a checksum of every other file, which shows damage by a disk or a copy.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dpo_pack.model.parallel import local_part
from dpo_pack.run.state import Counters
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError, RunError, first_line
from dpo_pack.system.files import (
    discard,
    leaves,
    parse_json,
    path_aside,
    put_in_place,
    remove_directory,
    sync,
    write_json_atomically,
    writing,
)
from dpo_pack.system.interrupts import Interrupted
from dpo_pack.system.machine import host_memory

COUNTERS, TENSORS, HOST_STATE, MODEL = "checkpoint.json", "tensors", "host.pt", "model"
FileSums = dict[str, dict[str, int]]  # "bytes" and "crc32" of each file as it was written, by its path
_CHUNK_BYTES = 2**24
_LONGEST_WRITE = timedelta(days=1)  # the longest time that the other ranks wait for rank 0

# -------------------------------------------------------------------------------------- directories and files


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints of a run, oldest first, including damaged ones."""
    found = (file.parent for file in directory.glob(f"step-*/{COUNTERS}"))
    return sorted((path for path in found if path.name.removeprefix("step-").isdigit()), key=step_of)


def drop_later_checkpoints(directory: Path, step: int) -> None:
    """Removes checkpoints after `step`, because the run resumes at `step` and takes the later steps again."""
    for path in checkpoints(directory):
        if step_of(path) > step:
            remove_directory(path)


def file_sums(directory: Path, *, pattern: str = "**/*") -> FileSums:
    return {
        file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
        for file in sorted(directory.glob(pattern))
        if file.is_file()
    }


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def damage_of_files(directory: Path, sums: FileSums) -> str | None:
    """Returns a text about the first file that is missing or differs from `sums`, or None. Raises OSError."""
    for name, expected in sums.items():
        try:
            num_bytes = (directory / name).stat().st_size
            if num_bytes != expected["bytes"]:
                return f"{name} has {num_bytes:,} bytes instead of {expected['bytes']:,}"
            if _crc32(directory / name) != expected["crc32"]:
                return f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def damage_of(checkpoint: Path) -> str | None:
    """Returns a text about a damaged file of the checkpoint, or None. Every rank checks a part of the files.
    If one cannot be read, all raise RunError: if it counted as damaged, the run would go back."""

    def look() -> str | None:
        try:
            counters = read_counters(checkpoint)
            if counters is None:
                return f"{COUNTERS} is missing or damaged"
            sums = sorted(counters["files"].items())
            return damage_of_files(checkpoint, dict(sums[ranks.rank() :: ranks.num_ranks()]))
        except OSError as error:
            raise RunError(
                f"{error.filename or checkpoint} cannot be read: {error.strerror or error}; run the same "
                "command when the disk is back"
            ) from error

    return next((damage for damage in ranks.every_rank_does(look) if damage is not None), None)


def with_checksum(counters: dict[str, Any]) -> dict[str, Any]:
    """Returns what `checkpoint.json` holds: the counters, and a checksum of them."""
    # Numbers that were read from JSON are written with the same characters, so the checksum stays the same.
    return {**counters, "crc32": zlib.crc32(json.dumps(counters, sort_keys=True).encode())}


def read_counters(path: Path, shape: Any = dict[str, Any]) -> Any:
    """Returns checkpoint.json without its checksum; None: missing or damaged. Raises OSError of the disk."""
    try:
        counters = parse_json((path / COUNTERS).read_bytes()) or {}
    except FileNotFoundError:
        return None
    checksum = counters.pop("crc32", None)
    if checksum != with_checksum(counters)["crc32"]:
        return None
    return parse_json(json.dumps(counters).encode(), shape)


def saved_counters(path: Path) -> Counters:
    """Returns the content of checkpoint.json. Raises RunError if it cannot be read."""
    counters: Counters | None = read_counters(path, Counters)
    if counters is None:
        raise RunError(
            f"{path} is not a checkpoint of this version of dpo-pack (no readable checkpoint.json); give "
            "another with checkpoint.resume, or set it to never"
        )
    return counters


class TensorReader(FileSystemReader):
    """Reads a checkpoint's tensors, of a stranger too: torch would call whatever `.metadata` names."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(directory := checkpoint / TENSORS)
        try:
            self.metadata: metadata.Metadata = _Unpickler(
                io.BytesIO((directory / ".metadata").read_bytes())
            ).load()
            for name in {info.relative_path for info in self.metadata.storage_data.values()}:
                if Path(name).name != name or not (directory / name).is_file():
                    raise ValueError(f"there is no file {name}")
        except Exception as error:  # pickle raises errors of many types
            what = f"{directory}/.metadata: {first_line(error)}"
            raise RunError(f"{checkpoint} cannot be read ({what}); {_REMEDY}") from error

    def read_metadata(self) -> metadata.Metadata:
        return self.metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {metadata.__name__: vars(metadata), "torch": vars(torch)}.get(module, {}).get(name)
        is_ours = isinstance(known, type) and known.__module__ == metadata.__name__
        if is_ours or isinstance(known, torch.dtype):
            return known
        if (needed := _NEEDED.get(f"{module}.{name}")) is not None:
            return needed
        raise ValueError(f"it names {module}.{name}, which no checkpoint needs: it may be an attack")


def _member(kind: Any, name: str) -> Any:
    """Returns the member of an enum, which Python 3.11.0 to 3.11.3 pickle as a call of getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise ValueError(f"it calls getattr on {kind}, which no checkpoint needs: it may be an attack")
    return metadata._MEM_FORMAT_ENCODING[name]


_NEEDED = {
    "builtins.getattr": _member,
    "pathlib.PosixPath": type(Path()),
    "pathlib._local.PosixPath": type(Path()),  # of Python 3.13
    "torch.Size": torch.Size,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
    "torch.serialization._get_layout": torch.serialization._get_layout,
}
_REMEDY = "resume with the Python and torch that wrote it, or from another checkpoint (checkpoint.resume)"


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads a number of an optimizer, after a look: torch would run code, too."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def load_tensors(path: Path, into: dict[str, Any]) -> None:
    """Loads a checkpoint's tensors into those of the same names. Every rank must call it. Raises RunError."""
    is_alone = ranks.num_ranks() == 1
    # torch warns if one process loads alone, but here that is right.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
    try:
        load(
            into,
            storage_reader=TensorReader(path),
            planner=_Planner(),
            process_group=None if is_alone else ranks.host_group(),
            no_dist=is_alone,
        )
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise RunError(f"{path} cannot be read ({first_line(cause)}); {_REMEDY}") from error


# ------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The state of a run after a step. Rank 0 writes its values that are not tensors for all ranks."""

    step: int
    tensors: dict[str, Any]  # this rank's tensors in nested dicts; shards are DTensors
    host: dict[str, Any]  # only types that torch.load reads with weights_only
    counters: dict[str, Any]  # written as JSON
    keep: int  # number of newest checkpoints that are kept
    keep_steps: Collection[int]  # the checkpoints of these steps are kept, too


@dataclass(slots=True, kw_only=True)
class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes a run's checkpoints, one at a time. Every rank must call its methods in the same order. Each
    writes its shards, or its part of the tensors that all have. In the background a thread writes from a copy
    in the host's memory, with a process group of its own, so that its collectives cannot mix with training's.
    (torch's async_save would end before the directory is checked and renamed.)"""

    directory: Path
    in_background: bool | Literal["auto"]  # "auto": if tensors are on a GPU and the RAM has room
    _pending: Future[None] | None = None
    _thread: ThreadPoolExecutor | None = None
    _stager: DefaultStager | None = None
    _group: Any = None

    def write(self, content: CheckpointContent, *, export: Callable[[Path], object] | None = None) -> Path:
        """Writes `directory`/step-000100, now or in the background, with the model that `export` writes;
        returns its path. All ranks raise CacheError if one cannot write this or the one before."""
        self.wait()
        if ranks.num_ranks() > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        path = checkpoint_path(self.directory, content.step)
        temporary = ranks.first_says(path_aside(path))
        if self.in_background == "auto":
            self.in_background = all(ranks.every_rank_says(_has_room_for_copy(content.tensors)))
        with _discarded_on_failure(temporary):
            if export is not None:
                ranks.every_rank_does(
                    writing(path)(functools.partial(export, temporary / MODEL)), self._group
                )
            if self.in_background:
                content = replace(content, tensors=self._copy_on_host(content.tensors))
        if self.in_background:
            if self._thread is None:
                # By default a new thread would use GPU 0, and torch's `save` makes CUDA streams.
                device = torch.cuda.current_device() if torch.cuda.is_available() else None
                choose = None if device is None else functools.partial(torch.cuda.set_device, device)
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=choose)
            self._pending = self._thread.submit(_write, content, temporary, path, self._group)
        else:
            _write(content, temporary, path, self._group)
        return path

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is on disk. Raises CacheError if this fails."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copy_on_host(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy in host memory (pinned if there is a GPU). It overwrites the previous copy."""
        if self._stager is None:
            has_gpu = torch.cuda.is_available()
            aside = {"use_shared_memory": False, "use_async_staging": False}
            options = StagingOptions(use_pinned_memory=has_gpu, use_non_blocking_copy=has_gpu, **aside)
            self._stager = DefaultStager(options)
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until the background has written its checkpoint; after a second stop signal it does not wait.
        An interrupted run says that it can resume from that checkpoint. So an error of the write is raised,
        unless the run has ended with an error of its own."""
        if isinstance(error, Interrupted) and error.is_urgent:
            return
        has_cause = error is not None and not isinstance(error, Interrupted)
        try:
            with contextlib.suppress(CacheError) if has_cause else contextlib.nullcontext():
                self.wait()
        finally:
            self.in_background = False  # a later write finds no thread
            if self._thread is not None:
                self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()


def _has_room_for_copy(tree: Mapping[str, Any]) -> bool:
    """Whether a tensor is on a GPU, and copies of all ranks of this machine fit into half the free RAM."""
    own = [local_part(value) for _, value in leaves(tree, separator=".") if isinstance(value, Tensor)]
    num_bytes = sum(tensor.nbytes for tensor in own) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return any(tensor.is_cuda for tensor in own) and 2 * num_bytes <= host_memory().free


def _write(content: CheckpointContent, temporary: Path, path: Path, group: Any) -> None:
    """Writes the checkpoint into `temporary` and renames it to `path`; if one rank fails, all raise."""
    with _discarded_on_failure(temporary):
        with writing(path):
            _save_tensors(content.tensors, temporary / TENSORS, group)
        sums = ranks.every_rank_does(writing(path)(functools.partial(_own_sums, temporary / TENSORS)), group)
        files = {f"{TENSORS}/{name}": total for part in sums for name, total in part.items()}
        complete = writing(path)(functools.partial(_complete, content, temporary, path, files))
        ranks.every_rank_does(functools.partial(ranks.only_first_does, complete), group)


def _save_tensors(tensors: dict[str, Any], directory: Path, group: Any) -> None:
    """Saves the tensors. If a rank fails, every rank raises the error of the first rank that failed."""
    # torch warns if one process saves alone, but here that is right. torch 2.10 warns of its own code, too.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch")
    try:
        writer = FileSystemWriter(directory, sync_files=False)  # it would end where a disk refuses to sync
        save(tensors, storage_writer=writer, process_group=group, no_dist=ranks.num_ranks() == 1)
    except CheckpointException as wrapped:  # torch wraps even `Interrupted`, which is no Exception
        errors = [error for _, (error, _) in sorted(wrapped.failures.items())]
        raise min(errors, key=lambda error: isinstance(error, Exception)) from wrapped


def _own_sums(directory: Path) -> FileSums:
    """Returns the sums of this rank's files when they are on the disk."""
    own = f"__{ranks.rank()}_*"
    for file in directory.glob(own):
        sync(file)
    return file_sums(directory, pattern=own)


def _complete(content: CheckpointContent, temporary: Path, path: Path, files: FileSums) -> None:
    """Adds what is no tensor, renames the checkpoint, removes old ones. `files`: of all ranks' tensors."""
    with (temporary / HOST_STATE).open("wb") as file:  # given a path, torch.save does not report a full disk
        torch.save(content.host, file)
    for pattern in (HOST_STATE, f"{TENSORS}/.metadata", f"{MODEL}/**/*"):
        files |= file_sums(temporary, pattern=pattern)
    write_json_atomically(temporary / COUNTERS, with_checksum({**content.counters, "files": files}))
    put_in_place(temporary, path)
    for old in checkpoints(path.parent)[: -content.keep]:
        if step_of(old) not in {content.step, *content.keep_steps}:
            remove_directory(old)


@contextlib.contextmanager
def _discarded_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ranks.only_first_does(lambda: discard(temporary))
        raise
