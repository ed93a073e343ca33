"""Writes files that are whole or absent after a crash; reads JSON; holds locks on files."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError

from dpo_pack.system.errors import CacheError, RunError
from dpo_pack.system.process import lone_half

logger = logging.getLogger(__name__)
Json = dict[str, Any]  # a JSON object: a report, a line or a file of a run

MOST_BYTES = 1 << 28  # of an image, a template, or a file of a run or a cache that is read as a whole

# What file systems answer to a call that they do not have: mounts of object stores, CIFS, sshfs.
_NO_SUCH_CALL = (
    *(errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EXDEV),
    *(errno.EBADF, errno.EISDIR, errno.ENOTTY),
)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a new path for a file or directory; it becomes `path` if the block succeeds. See `writing`."""
    temporary = path_aside(path)
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            put_in_place(temporary, path)
    finally:
        discard(temporary)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises CacheError, which names `path`, if the disk refuses to write (full, read-only) in the block."""
    try:
        yield
    except Exception as error:  # the package tokenizers raises plain Exception
        rust = re.search(r"([^:]+) \(os error \d+\)", str(error))  # tokenizers, safetensors
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif rust is not None:
            reason = rust[1].strip()
        elif isinstance(error, UnicodeEncodeError):  # the name of a file, or a text that is written
            raise CacheError(f"cannot write {path}: rename {lone_half(error.object)}, no UTF-8") from error
        elif isinstance(error, SafetensorError) or "inline_container" in str(error):  # torch.save
            reason = "it could not be written in full"
        else:
            raise
        wrong_places = (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
        remedy = f"{'' if isinstance(error, wrong_places) else 'free space or '}choose a writable directory"
        raise CacheError(f"cannot write {path}: {reason}; {remedy}") from error


def path_aside(path: Path) -> Path:
    """Returns a new hidden path in the directory of `path`, for a file or directory that is not whole yet."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Syncs a file or directory and renames it to `path`, or copies it where renames are refused; replaces an
    old `path`. Raises OSError."""
    if path.is_dir() and not temporary.is_dir():  # else the directory would be taken for an old file
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    for part in (*temporary.rglob("*"), temporary):
        sync(part)
    replaced = path_aside(path)
    with dispensable("rename"):
        if temporary.is_dir() and path.is_dir():
            path.rename(replaced)  # a rename cannot replace a directory that has files
        temporary.replace(path)
    if temporary.exists():  # the newest file comes last: it says that a checkpoint or a store is whole
        discard(path)
        files = [part for part in (temporary, *temporary.rglob("*")) if part.is_file()]
        for part in sorted(files, key=lambda part: part.stat().st_mtime_ns):
            copy = path / part.relative_to(temporary)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part, copy)
            sync(copy)
        discard(temporary)
    sync(path.parent)
    discard(replaced)  # last, because removing a large directory takes minutes


def remove_directory(path: Path) -> None:
    """Removes a directory. If the process is killed meanwhile, `path` is whole or absent."""
    aside = path_aside(path)
    with dispensable("rename"):
        path.rename(aside)
    discard(aside)
    discard(path)  # only there if it could not be renamed


def discard(temporary: Path) -> None:
    """Removes a temporary file or directory, if it exists and can be removed."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # already renamed, or its directory was never made
            temporary.unlink()


def write_text_atomically(path: Path, text: str) -> None:
    with written_aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomically(path: Path, value: Any) -> None:
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def regular_file(path: Path) -> os.stat_result:
    """Returns the facts of a file that may be read whole. Raises OSError, also for pipes: they block."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "no file, but a pipe, a socket or a device")
    if status.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"a file of {status.st_size:,} bytes, more than {MOST_BYTES:,}")
    return status


def text_of(path: Path) -> str:
    """Returns the text of a file; "" if it cannot be read."""
    try:
        regular_file(path)
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(path: Path, shape: Any = dict[str, Any]) -> Any:
    """Returns the content of a JSON file; None if it cannot be read, is damaged or has another `shape`: a
    type for pydantic (of a dataclass, keys that are no fields are ignored)."""
    try:
        regular_file(path)
        return TypeAdapter(shape).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError):  # ValueError: pydantic's, also for values that are nested too deep
        return None


def parse_json(text: bytes, shape: Any = dict[str, Any]) -> Any:
    try:
        return TypeAdapter(shape).validate_json(text, strict=True)
    except ValueError:
        return None


def add_to_json(path: Path, shape: Any, entries: Mapping[str, Any]) -> None:
    """Adds entries to a cache's JSON file, to which other processes add, too. Some may be lost."""
    content = {**(read_json(path, shape) or {}), **entries}
    with contextlib.suppress(CacheError):
        write_json_atomically(path, TypeAdapter(shape).dump_python(content, mode="json"))


def sync(path: Path) -> None:
    """Waits until a file or directory is on the disk, if the file system can say so. Raises OSError."""
    with dispensable(f"fsync of {'directories' if path.is_dir() else 'files'}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def dispensable(what: str) -> Iterator[None]:
    """Goes on if the file system does not have the call `what`, with which the block ends; says so once."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
        _say_once(f"Warning: the file system refuses {what} ({error.strerror}); the command goes on")


@functools.cache
def _say_once(line: str) -> None:
    logger.warning(line)


def leaves(tree: Mapping[str, Any], *, separator: str) -> Iterator[tuple[str, Any]]:
    """Yields (keys joined by `separator`, value) of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((key + separator + name, leaf) for name, leaf in leaves(value, separator=separator))
        else:
            yield key, value


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds a lock on a file in this block, and removes it. Raises RunError, with `what`, if another process
    holds it. Where the file system has no locks, it says so."""
    has_parent = path.parent.exists()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
        holder = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                holder = "which is ending"  # it removed this file, and a third run may have made a new one
        except BlockingIOError:
            holder = text_of(path)
        except OSError as error:
            reason = f"its file system has no locks ({error.strerror})"
            _say_once(f"Warning: {what}: {reason}: start no second run there")
    if holder is not None:
        file.close()
        raise RunError(f"{what} is in use by another run, {holder}; wait until that run ends, or stop it")
    try:
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T %Z')}")
            file.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # still locked, so no other process uses this file
            if not has_parent:
                path.parent.rmdir()  # only if empty: rmdir refuses a directory with files
        with contextlib.suppress(OSError):
            file.close()
