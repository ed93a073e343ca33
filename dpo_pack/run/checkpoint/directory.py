"""Checkpoint directories of a run: finds them, removes old ones, checks their files for damage.

The writer renames a directory to `step-000100/` when all its files are on the disk. Removal also begins with
a rename. So a directory of that name is always complete. Its `checkpoint.json` has a checksum of every other
file. The checksums show damage by a disk or a copy before the file is loaded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpo_pack.system.files import parse_json, remove_directory, write_json_atomically

COUNTERS = "checkpoint.json"
_CHUNK_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """The size and the CRC-32 of a file as it was written."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileList:
    files: dict[str, FileSum]


def checkpoint_path(directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint that is taken after `step` steps."""
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


def prune(directory: Path, *, keep: int, also: Collection[int]) -> None:
    """Removes all checkpoints except the newest `keep` and those of the steps in `also`."""
    for path in checkpoints(directory)[:-keep]:
        if step_of(path) not in also:
            remove_directory(path)


def file_sums(directory: Path, *, pattern: str = "*") -> dict[str, dict[str, int]]:
    """Returns bytes and CRC-32 of each file, by its path in `directory`; leaves `checkpoint.json` out."""
    files = (file for file in sorted(directory.rglob(pattern)) if file.is_file())
    return {
        file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
        for file in files
        if file.name != COUNTERS
    }


def write_counters(path: Path, counters: dict[str, Any]) -> None:
    """Writes `checkpoint.json` with a checksum of its content; this makes the directory a checkpoint."""
    write_json_atomically(path / COUNTERS, {**counters, "crc32": _crc32_of(counters)})


def read_counters(path: Path, shape: Any = dict[str, Any]) -> Any:
    """Returns the content of `checkpoint.json` without its checksum; None if it is missing or damaged.

    Raises OSError if the disk cannot be read.
    """
    try:
        text = (path / COUNTERS).read_bytes()
    except FileNotFoundError:
        return None
    counters = parse_json(text) or {}
    checksum = counters.pop("crc32", None)
    return parse_json(json.dumps(counters).encode(), shape) if checksum == _crc32_of(counters) else None


def _crc32_of(counters: dict[str, Any]) -> int:
    # Numbers that were read from JSON are written with the same characters, so the checksum stays the same.
    return zlib.crc32(json.dumps(counters, sort_keys=True).encode())


def find_damage(path: Path, *, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Returns a text about the first damaged file, or None; each rank checks a part of the files.

    Raises OSError if a file cannot be read: if a disk does not answer for a moment, this is no damage.
    """
    listed: _FileList | None = read_counters(path, _FileList)
    if listed is None:
        return f"{COUNTERS} is missing or damaged"
    mine = sorted(listed.files.items())[rank::num_ranks]
    return damage_of_files(path, dict(mine))


def damage_of_files(directory: Path, sums: Mapping[str, FileSum]) -> str | None:
    """Returns a text about the first file that is missing or differs from `sums`, or None. Raises OSError."""
    for name, expected in sums.items():
        try:
            num_bytes = (directory / name).stat().st_size
            if num_bytes != expected.bytes:
                return f"{name} has {num_bytes:,} bytes instead of {expected.bytes:,}"
            if _crc32(directory / name) != expected.crc32:
                return f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
