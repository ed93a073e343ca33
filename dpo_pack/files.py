"""Files that are whole or absent: written beside, synced, renamed into place."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpo_pack.errors import CacheError


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed to `path`, else removed.

    Works for a file or a directory. Raises CacheError when the disk refuses (full, read-only).
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
    """A new name beside `path`, hidden, under which nothing is whole yet."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Sync a file or directory and rename it to `path`, which is replaced. Raises OSError."""
    for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
        sync(part)
    replaced = path_aside(path)
    if temporary.is_dir() and path.is_dir():
        path.rename(replaced)  # no rename replaces a directory that has files
    temporary.replace(path)
    sync(path.parent)
    discard(replaced)  # takes minutes where it is large, and the new one is in its place


def remove_directory(path: Path) -> None:
    """Whoever is killed meanwhile leaves all of it or nothing under its name."""
    aside = path_aside(path)
    path.rename(aside)
    discard(aside)


def discard(temporary: Path) -> None:
    """Remove what was not put in place, if it is there; what a file system holds on to is left."""
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # already renamed, or its folder never came to be
            temporary.unlink()


def cannot_write(path: Path, reason: OSError | str) -> CacheError:
    """The error to raise when the disk refuses."""
    why = reason if isinstance(reason, str) else reason.strerror or reason
    return CacheError(f"cannot write {path}: {why}; free space or choose a writable directory")


def write_text_atomically(path: Path, text: str) -> None:
    with written_aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomically(path: Path, value: Any) -> None:
    write_text_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The parsed file, or None when there is none or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sync(path: Path) -> None:
    """Until what has been written to a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
