"""The work of `dpopack cache`: lists, verifies, exports and prunes reference caches, without a model.

These functions change or delete only files that dpo-pack has written; they know such files by their names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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
    NAMESPACE_NAME,
    USED_FILE,
    UsedTimes,
    is_namespace,
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

_PART = r"part-[0-9a-f]{64}\.parquet"
_DAMAGED = re.compile(r"part-[0-9a-f]{64}\.damaged")
_KNOWN = re.compile(rf"{NAMESPACE_FILE}|{USED_FILE}|{_PART}|{_DAMAGED.pattern}")
# Names of temporary files and directories: of JSON files (file_hashes.json), parts, token stores and probes.
_TEMPORARY = re.compile(
    rf"\.(?:(?:[a-z_]+\.json|{_PART}|{NAMESPACE_NAME.pattern}|probe)\.[0-9a-f]{{8}}|shared-\w+)\.tmp"
)
# An older temporary file is the rest of a killed process, because no process writes a file for so long.
_LEFTOVER_AFTER_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The log-probs of one model in one precision on disk. `cache list --json` prints these fields."""

    directory: Path
    models: tuple[str, ...]  # paths of the models that used it, the latest first
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
    """Files that may be deleted, and the reason."""

    directory: Path  # the directory of a namespace, or the cache directory
    name: str
    files: tuple[Path, ...]
    reason: str
    is_whole: bool = False  # the whole namespace is deleted, except files that are not ours

    @property
    def size_bytes(self) -> int:
        return sum(_size(file) for path in self.files for file in (path, *path.rglob("*")))


def find_namespaces(cache_dir: Path) -> list[Namespace]:
    """Returns all namespaces of a cache directory, the latest used first. Raises CacheError."""
    root = reference_directory(cache_dir)
    try:
        directories = [path for path in root.iterdir() if is_namespace(path)] if root.is_dir() else []
    except OSError as error:
        raise CacheError(f"cannot read {root}: {error.strerror}; correct its permissions") from error
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
                f"{prefix!r} must be the beginning of exactly one namespace in "
                f"{reference_directory(cache_dir)}; namespaces that begin so: {names}"
            )
    return [n for n in found if not prefixes or n.name.startswith(tuple(prefixes))]


def find_damage(namespace: Namespace) -> Iterator[tuple[Path, str]]:
    """Yields (file, its fault) for every file that has changed, cannot be read or has non-finite values."""
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

    A sequence can be in several parts (files). Its values then come from the last part by name that has token
    values, as in a run. If no part has token values, the sum comes from the last part by name, and the token
    values are null. Returns the number of sequences. Raises CacheError if even one part is damaged, because
    an export must be complete.
    """
    tables: list[Any] = []
    for part in part_paths(namespace.directory):
        try:
            tables.append(read_part(part, (KEY, SUM, NUM_TOKENS, TOKENS)))
        except DamagedPart as error:
            raise CacheError(f"{error}; run `dpopack cache verify`, compute it again, then export") from error
    if not tables or any(table is None for table in tables):
        raise CacheError(f"{namespace.directory} has no log-probs to export, or is being changed; try again")
    table = pa.concat_tables(tables, promote_options="default")
    has_tokens = np.repeat([TOKENS in part.column_names for part in tables], [len(part) for part in tables])
    order = np.argsort(has_tokens, kind="stable")[::-1]  # of equal keys the row to use is first
    table = table.take(pa.array(np.sort(order[KeyIndex.of(keys_of(table)[order]).first])))
    write_export(target, table, read_json(namespace.directory / NAMESPACE_FILE))
    return len(table)


def write_export(target: Path, table: pa.Table, namespace: dict[str, Any]) -> None:
    """Writes a file that `dpopack cache import` reads. Its metadata names the model of the log-probs."""
    metadata = {"dpo_pack.namespace": json.dumps(namespace)}
    with written_aside(target) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, write_page_checksum=True)


def find_leftovers(cache_dir: Path) -> list[Path]:
    """Returns the temporary files and directories that killed processes have left in a cache."""
    of_namespaces = (path for path in cache_dir.glob("reference/*/.*.tmp") if is_namespace(path.parent))
    paths = (*cache_dir.glob(".*.tmp"), *cache_dir.glob("tokens/.*.tmp"), *of_namespaces)
    return [path for path in paths if _TEMPORARY.fullmatch(path.name) and _is_abandoned(path)]


def plan_prune(cache_dir: Path, *, older_than_seconds: float | None, most_bytes: int | None) -> list[Removal]:
    """Chooses files to delete: temporary files of killed processes; namespaces that no run has used for
    `older_than_seconds`; then namespaces, the longest unused first, until the rest has at most `most_bytes`;
    and damaged parts of the namespaces that stay."""
    leftovers, reason = tuple(find_leftovers(cache_dir)), "leftovers of killed runs"
    removals = [Removal(directory=cache_dir, name=str(cache_dir), files=leftovers, reason=reason)]
    namespaces = find_namespaces(cache_dir)
    kept_bytes = sum(namespace.size_bytes for namespace in namespaces)
    for namespace in sorted(namespaces, key=lambda n: n.last_used):
        age = time.time() - namespace.last_used
        files = tuple(file for file in _files(namespace.directory) if _KNOWN.fullmatch(file.name))
        is_whole = True
        if older_than_seconds is not None and age > older_than_seconds:
            reason = f"not used for {age / 86400:.0f} days"
        elif most_bytes is not None and kept_bytes > most_bytes:
            reason = "unused for the longest time, and the cache is larger than the limit"
        else:
            reason, is_whole = "damaged parts", False
            files = tuple(file for file in files if _DAMAGED.fullmatch(file.name))
        name = f"{namespace.name} ({', '.join(namespace.models) or 'unknown model'})"
        removals.append(
            Removal(directory=namespace.directory, name=name, files=files, reason=reason, is_whole=is_whole)
        )
        kept_bytes -= namespace.size_bytes if is_whole else 0
    return [removal for removal in removals if removal.files]


def remove(removal: Removal) -> list[str]:
    """Deletes the files. For a whole namespace, returns the names of files in it that are not ours and stay.

    It deletes namespace.json last, so that an interrupted removal can be found and repeated. Raises
    CacheError.
    """
    directory = removal.directory
    try:
        for file in sorted(removal.files, key=lambda file: file.name == NAMESPACE_FILE):
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)
        if not removal.is_whole:
            return []
        left = sorted(path.name for path in directory.iterdir())
        if not left:
            directory.rmdir()
    except OSError as error:
        raise CacheError(
            f"cannot remove {error.filename}: {error.strerror}; correct its permissions"
        ) from error
    return left


def _namespace_at(directory: Path) -> Namespace:
    described = read_json(directory / NAMESPACE_FILE) or {}
    times = read_json(directory / USED_FILE, UsedTimes) or {}
    used = {model: seconds for model, seconds in times.items() if 0 <= seconds <= time.time()}
    parts = part_paths(directory)
    keys, with_tokens = [np.zeros((0, 16), dtype=np.uint8)], [np.zeros((0, 16), dtype=np.uint8)]
    for part in parts:
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
        parts=len(parts),
        damaged_parts=sum(bool(_DAMAGED.fullmatch(file.name)) for file in files),
        size_bytes=sum(map(_size, files)),
        last_used=max([newest, *used.values()]),
    )


def _files(directory: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]


def _is_abandoned(temporary: Path) -> bool:
    """Returns True if nobody has changed the file, or any file in the directory, for a day."""
    try:
        changed = max(path.lstat().st_mtime for path in (temporary, *temporary.rglob("*")))
    except OSError:  # its process has just given it its final name
        return False
    return time.time() - changed > _LEFTOVER_AFTER_SECONDS


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another job has just moved or deleted it
        return 0
