"""Writes files that are whole or absent: to a temporary path first, then synced, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpo_pack.system.errors import CacheError


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the directory of `path`, for a file or a directory.

    If the block succeeds, the temporary path is synced and renamed to `path`; otherwise it is removed. Raises
    CacheError if the disk refuses (full, read-only).
    """
    temporary = path_aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        put_in_place(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        discard(temporary)


def path_aside(path: Path) -> Path:
    """Returns a new hidden path in the directory of `path`, for a file or directory that is not whole yet."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Syncs a file or directory and renames it to `path`; replaces an old `path`. Raises OSError."""
    for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
        sync(part)
    replaced = path_aside(path)
    if temporary.is_dir() and path.is_dir():
        path.rename(replaced)  # a rename cannot replace a directory that has files
    temporary.replace(path)
    sync(path.parent)
    discard(replaced)  # as the last action: a large directory takes minutes


def remove_directory(path: Path) -> None:
    """Removes a directory. If the process is killed meanwhile, `path` has all of the directory or nothing."""
    aside = path_aside(path)
    path.rename(aside)
    discard(aside)


def discard(temporary: Path) -> None:
    """Removes a temporary file or directory, if it exists and the file system allows to remove it."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # already renamed, or its directory was never made
            temporary.unlink()


def cannot_write(path: Path, reason: OSError | str) -> CacheError:
    """Returns the error to raise if the disk refuses to write `path`."""
    why = reason if isinstance(reason, str) else reason.strerror or reason
    return CacheError(f"cannot write {path}: {why}; free space or choose a writable directory")


def write_text_atomically(path: Path, text: str) -> None:
    with written_aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomically(path: Path, value: Any) -> None:
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Returns the parsed file, or None if the file does not exist or is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sync(path: Path) -> None:
    """Waits until all data written to a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leaves(tree: Mapping[str, Any], *, separator: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts, each with its keys joined by `separator`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((key + separator + name, leaf) for name, leaf in leaves(value, separator=separator))
        else:
            yield key, value
