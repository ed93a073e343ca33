"""Checkpoint directories of a run: which are whole, which are kept.

`step-000100/` appears by a rename when everything in it is on the disk, and goes by a rename, so that there
is never half of one. `checkpoint.json` in it has a checksum of every other file: what a disk or a copy has
damaged since is noticed before it is loaded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dpo_pack.files import remove_directory, write_json_atomically

COUNTERS = "checkpoint.json"
_CHUNK_BYTES = 2**24


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return directory / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(directory: Path) -> list[Path]:
    """Checkpoints of a run, oldest first. Their content has not been looked at."""
    found = (file.parent for file in directory.glob(f"step-*/{COUNTERS}"))
    return sorted((path for path in found if path.name.removeprefix("step-").isdigit()), key=step_of)


def drop_later_checkpoints(directory: Path, step: int) -> None:
    """Remove checkpoints after `step`: a run that goes on from there takes those steps anew."""
    for path in checkpoints(directory):
        if step_of(path) > step:
            remove_directory(path)


def prune(directory: Path, *, keep: int, also: Collection[int]) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps `also`."""
    for path in checkpoints(directory)[:-keep]:
        if step_of(path) not in also:
            remove_directory(path)


def file_sums(directory: Path, *, pattern: str = "*") -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file below, by its path in `directory`; `checkpoint.json` is left out."""
    files = (file for file in sorted(directory.rglob(pattern)) if file.is_file())
    return {
        file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
        for file in files
        if file.name != COUNTERS
    }


def write_counters(path: Path, counters: dict[str, Any]) -> None:
    """What makes a directory a checkpoint, with a checksum of itself."""
    write_json_atomically(path / COUNTERS, {**counters, "crc32": _crc32_of(counters)})


def read_counters(path: Path) -> dict[str, Any] | None:
    """What `write_counters` was given; None when there is none, or it is damaged.

    Raises OSError when the disk does not say.
    """
    try:
        counters = json.loads((path / COUNTERS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(counters, dict):
        return None
    checksum = counters.pop("crc32", None)
    return counters if checksum == _crc32_of(counters) else None


def _crc32_of(counters: dict[str, Any]) -> int:
    # Numbers read from JSON are written as they were.
    return zlib.crc32(json.dumps(counters, sort_keys=True).encode())


def find_damage(path: Path, *, rank: int = 0, num_ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None; each rank looks at a part of them.

    Raises OSError where they cannot be read: a disk that is away for a moment has damaged nothing.
    """
    counters = read_counters(path)
    if counters is None:
        return f"{COUNTERS} is missing or damaged"
    for name, expected in sorted(counters["files"].items())[rank::num_ranks]:
        damage = _damage_of_file(path / name, expected)
        if damage is not None:
            return f"{name} {damage}"
    return None


def _damage_of_file(file: Path, expected: dict[str, Any]) -> str | None:
    try:
        if file.stat().st_size != expected["bytes"]:
            return f"has {file.stat().st_size:,} bytes instead of {expected['bytes']:,}"
        return None if _crc32(file) == expected["crc32"] else "has other content than was written"
    except FileNotFoundError:
        return "is missing"


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
