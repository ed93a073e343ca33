"""Lists, verifies, exports and prunes reference caches without a model.

These functions change or delete only files that dpo-pack has written; they know such files by their names.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.reference.cache import (
    NAMESPACE_FILE,
    USED_FILE,
    UsedTimes,
    describes_its_content,
    reference_directory,
)
from dpo_pack.reference.key_index import KeyIndex
from dpo_pack.reference.parts import (
    KEY,
    NUM_TOKENS,
    SUM,
    TOKENS,
    DamagedPart,
    keys_of,
    numbers_of,
    part_paths,
    read_part,
)
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import read_json, written_aside

_NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
_PART = r"part-[0-9a-f]{64}\.parquet"
_DAMAGED = re.compile(r"part-[0-9a-f]{64}\.damaged")
_KNOWN = re.compile(rf"{NAMESPACE_FILE}|{USED_FILE}|{_PART}")
_TEMPORARY = re.compile(rf"\.(?:{NAMESPACE_FILE}|{USED_FILE}|{_PART}|probe)\.[0-9a-f]{{8}}\.tmp")
# A file that a process still writes is younger. A killed process has left an older temporary file.
_LEFTOVER_AFTER_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The log-probs of one model in one precision on disk. `cache list --json` prints these fields."""

    directory: Path
    models: tuple[str, ...]  # paths of the models that used it; the latest user is first
    parameters: str  # dtype of the model's parameters
    autocast: str | None
    sequences: int  # distinct sequences
    sequences_per_token: int  # distinct sequences with per-token values
    parts: int
    damaged_parts: int  # parts that were renamed because of damage
    size_bytes: int
    last_used: float  # seconds since 1970

    @property
    def name(self) -> str:
        return self.directory.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Files of one namespace that may be deleted, and the reason."""

    namespace: Namespace
    files: tuple[Path, ...]
    reason: str
    is_whole: bool  # True if the whole namespace goes, except files that are not ours

    @property
    def size_bytes(self) -> int:
        return sum(_size(file) for file in self.files)


def find_namespaces(cache_dir: Path) -> list[Namespace]:
    """Returns all namespaces of a cache directory, the latest used first. Raises CacheError."""
    root = reference_directory(cache_dir)
    try:
        directories = [path for path in root.iterdir() if is_namespace(path)] if root.is_dir() else []
    except OSError as error:
        raise CacheError(f"cannot read {root}: {error.strerror}; mend its permissions") from error
    return sorted(map(_namespace_at, directories), key=lambda found: -found.last_used)


def choose_namespaces(cache_dir: Path, prefixes: Sequence[str]) -> list[Namespace]:
    """Returns the namespaces that `prefixes` name, or all namespaces if `prefixes` is empty.
    Raises CacheError if a prefix is not the beginning of exactly one name."""
    found = find_namespaces(cache_dir)
    for prefix in prefixes:
        matches = [namespace.name for namespace in found if namespace.name.startswith(prefix)]
        if len(matches) != 1:
            names = ", ".join(matches) or "none; `dpopack cache list` shows what there is"
            raise CacheError(
                f"{prefix!r} must be the beginning of one namespace in {reference_directory(cache_dir)}, and "
                f"it is of {names}"
            )
    return [n for n in found if not prefixes or n.name.startswith(tuple(prefixes))]


def is_namespace(directory: Path) -> bool:
    """Returns True if the directory's name is the digest of its namespace.json, so that it is one of ours."""
    if directory.is_symlink() or not _NAMESPACE_NAME.fullmatch(directory.name):
        return False
    return describes_its_content(directory)


def find_damage(namespace: Namespace) -> Iterator[tuple[Path, str]]:
    """Yields (part, its fault) for every part that has changed, cannot be read or has non-finite values."""
    for part in part_paths(namespace.directory):
        try:
            table = read_part(part, (SUM,))
        except DamagedPart:
            yield part, "its bytes have changed"
        except CacheError as error:
            yield part, str(error)
        else:
            if table is not None and not np.isfinite(numbers_of(table[SUM])).all():
                yield part, "it has log-probs that are not finite"


def export_namespace(namespace: Namespace, target: Path) -> int:
    """Writes all log-probs of a namespace into one Parquet file, each sequence once.

    If several parts have a sequence, the last part by name gives its value, as in a run. Returns the number
    of sequences. Raises CacheError, even for one damaged part, because an export must be complete.
    """
    tables = []
    for part in part_paths(namespace.directory):
        try:
            tables.append(read_part(part, (KEY, SUM, NUM_TOKENS, TOKENS)))
        except DamagedPart as error:
            raise CacheError(f"{error}; run `dpopack cache verify`, compute it again, then export") from error
    if not tables or any(table is None for table in tables):
        raise CacheError(f"{namespace.directory} has no log-probs to export, or is being changed; try again")
    table = pa.concat_tables(tables, promote_options="default")
    # The keys are in reverse order, so that the first of equal keys comes from the last part.
    last = len(table) - 1 - KeyIndex.of(keys_of(table)[::-1]).first
    table = table.take(pa.array(np.sort(last)))
    write_export(target, table, read_json(namespace.directory / NAMESPACE_FILE))
    return len(table)


def write_export(target: Path, table: pa.Table, namespace: dict[str, Any]) -> None:
    """Writes a file that `dpopack cache import` reads. Its metadata names the model of the log-probs."""
    metadata = {"dpo_pack.namespace": json.dumps(namespace)}
    with written_aside(target) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, write_page_checksum=True)


def plan_prune(
    namespaces: Sequence[Namespace],
    *,
    older_than_seconds: float | None,
    most_bytes: int | None,
    now: float | None = None,
) -> list[Removal]:
    """Chooses files to delete: namespaces that nobody used for `older_than_seconds`; the longest unused ones
    until the rest has at most `most_bytes`; damaged parts and leftovers of killed processes in the rest."""
    now = time.time() if now is None else now
    removals = []
    kept_bytes = sum(namespace.size_bytes for namespace in namespaces)
    for namespace in sorted(namespaces, key=lambda n: n.last_used):
        age = now - namespace.last_used
        if older_than_seconds is not None and age > older_than_seconds:
            reason = f"not used for {age / 86400:.0f} days"
        elif most_bytes is not None and kept_bytes > most_bytes:
            reason = "the longest unused, and all together are too large"
        else:
            waste = tuple(f for f in _files(namespace.directory) if _is_waste(f, now))
            if waste:
                reason = "damaged parts and leftovers"
                removals.append(Removal(namespace=namespace, files=waste, reason=reason, is_whole=False))
            continue
        files = tuple(f for f in _files(namespace.directory) if _is_ours(f) or _is_waste(f, now))
        removals.append(Removal(namespace=namespace, files=files, reason=reason, is_whole=True))
        kept_bytes -= namespace.size_bytes
    return removals


def remove(removal: Removal) -> list[str]:
    """Deletes the files. If a whole namespace goes, returns the names of the files in it that are not ours.

    It deletes namespace.json last, so an interrupted removal can be found and repeated. Raises CacheError.
    """
    directory = removal.namespace.directory
    try:
        for file in sorted(removal.files, key=lambda file: file.name == NAMESPACE_FILE):
            file.unlink(missing_ok=True)
        left = sorted(path.name for path in directory.iterdir())
        if removal.is_whole and not left:
            directory.rmdir()
    except OSError as error:
        raise CacheError(f"cannot remove {error.filename}: {error.strerror}; mend its permissions") from error
    return left if removal.is_whole else []


def _namespace_at(directory: Path) -> Namespace:
    described = read_json(directory / NAMESPACE_FILE) or {}
    times = read_json(directory / USED_FILE, UsedTimes) or {}
    used = {model: seconds for model, seconds in times.items() if 0 <= seconds <= time.time()}
    keys, with_tokens, num_parts = [np.zeros((0, 16), dtype=np.uint8)], [np.zeros((0, 16), dtype=np.uint8)], 0
    for part in part_paths(directory):
        num_parts += 1
        try:
            table = pq.read_table(part, columns=[KEY])
            has_tokens = TOKENS in pq.read_schema(part).names
        except (OSError, KeyError, pa.ArrowException):  # `cache verify` reports the fault
            continue
        keys.append(keys_of(table))
        with_tokens += [keys_of(table)] if has_tokens else []
    files = [file for file in _files(directory) if not file.is_symlink()]
    newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    return Namespace(
        directory=directory,
        models=tuple(sorted(used, key=lambda model: -used[model])),
        parameters=str(described.get("parameters")),
        autocast=described.get("autocast"),
        sequences=len(KeyIndex.of(np.concatenate(keys))),
        sequences_per_token=len(KeyIndex.of(np.concatenate(with_tokens))),
        parts=num_parts,
        damaged_parts=sum(bool(_DAMAGED.fullmatch(file.name)) for file in files),
        size_bytes=sum(map(_size, files)),
        last_used=max([newest, *used.values()]),
    )


def _files(directory: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]


def _is_ours(file: Path) -> bool:
    return bool(_KNOWN.fullmatch(file.name))


def _is_waste(file: Path, now: float) -> bool:
    if _DAMAGED.fullmatch(file.name):
        return True
    return bool(_TEMPORARY.fullmatch(file.name)) and now - file.stat().st_mtime > _LEFTOVER_AFTER_SECONDS


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another job has just moved it
        return 0
