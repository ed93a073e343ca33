"""The work of `dpopack cache`: lists and prunes reference caches, exports and imports log-probs.

Only files that dpo-pack has written, known by their names, are changed or deleted. An exported file has the
columns of a part, see cache.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.store import PairTable
from dpo_pack.packing.lengths import Bools, FloatArray, IntArray
from dpo_pack.reference.cache import (
    KEY,
    NAMESPACE_FILE,
    NUM_TOKENS,
    PART_NAME,
    SUM,
    USED_FILE,
    KeyIndex,
    Keys,
    ReferenceCache,
    UsedTimes,
    find_leftovers,
    is_namespace,
    keys_of,
    namespace_digest,
    numbers_of,
    read_part,
    sequence_table,
)
from dpo_pack.system.errors import CacheError, first_line
from dpo_pack.system.files import discard, parse_json, read_json, written_aside

_OURS = re.compile(rf"{NAMESPACE_FILE}|{USED_FILE}|{PART_NAME}")
# A log-prob is at most 0, but rounding in low precision may give a value above 0.
_LARGEST_LOGP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The log-probs of one model in one precision on disk. `cache list --json` prints these fields."""

    namespace: str  # the name of the directory
    directory: Path
    models: tuple[str, ...]  # paths of the models that used it, the latest first
    parameters: str  # dtype of the model's parameters
    autocast: str | None
    sequences: int  # in all parts; one that is in several parts counts in each
    parts: int
    damaged_parts: int  # parts that were renamed because of damage
    size_bytes: int
    last_used: float  # seconds since 1970


def find_namespaces(cache_dir: Path) -> list[Namespace]:
    """Returns all namespaces of a cache directory, the latest used first. Raises CacheError."""
    root = cache_dir / "reference"
    try:
        paths = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CacheError(f"cannot read {root}: {error.strerror}; correct its permissions") from error
    found = [_namespace_at(path) for path in paths if is_namespace(path) and not path.is_symlink()]
    return sorted(found, key=lambda namespace: -namespace.last_used)


def _namespace_at(directory: Path) -> Namespace:
    described = read_json(directory / NAMESPACE_FILE) or {}
    times = read_json(directory / USED_FILE, UsedTimes) or {}
    used = {model: seconds for model, seconds in times.items() if 0 <= seconds <= time.time()}
    parts = sorted(directory.glob("part-*.parquet"))
    num_sequences = 0
    for part in parts:  # only their footers are read
        with contextlib.suppress(OSError, pa.ArrowException):  # a run will set it aside
            num_sequences += pq.read_metadata(part).num_rows
    files = _our_files(directory)
    newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    return Namespace(
        namespace=directory.name,
        directory=directory,
        models=tuple(sorted(used, key=lambda model: -used[model])),
        parameters=str(described.get("parameters")),
        autocast=described.get("autocast"),
        sequences=num_sequences,
        parts=len(parts),
        damaged_parts=sum(file.suffix == ".damaged" for file in files),
        size_bytes=sum(map(_size, files)),
        last_used=max([newest, *used.values()]),
    )


def prune_cache(
    cache_dir: Path, *, older_than_seconds: float | None, most_bytes: int | None, dry_run: bool
) -> Iterator[tuple[str, int, str]]:
    """Deletes files of killed processes; namespaces that no run has used for `older_than_seconds`; then the
    longest unused ones, until the rest has at most `most_bytes`; and damaged parts. Yields before: of what,
    how many bytes, and why. With `dry_run` it deletes nothing. Raises CacheError."""
    deletions = [(str(cache_dir), find_leftovers(cache_dir), "leftovers of killed runs")]
    namespaces = find_namespaces(cache_dir)
    kept_bytes = sum(namespace.size_bytes for namespace in namespaces)
    for namespace in reversed(namespaces):
        age, files = time.time() - namespace.last_used, _our_files(namespace.directory)
        if older_than_seconds is not None and age > older_than_seconds:
            reason = f"not used for {age / 86400:.0f} days"
        elif most_bytes is not None and kept_bytes > most_bytes:
            reason = "unused for the longest time, and the cache is larger than the limit"
        else:
            reason, files = "damaged parts", [file for file in files if file.suffix == ".damaged"]
        kept_bytes -= namespace.size_bytes if reason != "damaged parts" else 0
        name = f"{namespace.namespace} ({', '.join(namespace.models) or 'unknown model'})"
        # namespace.json goes last, so that an interrupted deletion can be found and repeated.
        deletions.append((name, sorted(files, key=lambda file: file.name == NAMESPACE_FILE), reason))
    for name, files, reason in deletions:
        if files:
            yield name, sum(map(_size, files)), reason
        for file in () if dry_run else files:
            discard(file)
            if file.exists():
                raise CacheError(f"cannot delete {file}; correct its permissions")
            if file.name == NAMESPACE_FILE and not any(file.parent.iterdir()):
                file.parent.rmdir()


def _our_files(directory: Path) -> list[Path]:
    files = (path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    return [file for file in files if _OURS.fullmatch(file.name)]


def _size(path: Path) -> int:
    """Returns the bytes of a file, or of the files in a directory; 0 if another job has just deleted it."""
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if not file.is_dir())
    return 0


def export_namespace(cache_dir: Path, prefix: str, target: Path) -> int:
    """Writes all log-probs of the one namespace that begins with `prefix`; returns their number. Of a
    sequence in several parts the last one counts, as in a run. Raises CacheError, also for a damaged part."""
    found = [n.directory for n in find_namespaces(cache_dir) if n.namespace.startswith(prefix)]
    if len(found) != 1:
        raise CacheError(
            f"{cache_dir} has {len(found)} namespaces whose names begin with {prefix!r}; name one with "
            "--namespace (`dpopack cache list`)"
        )
    parts = sorted(found[0].glob("part-*.parquet"))
    tables: list[Any] = [read_part(part) for part in reversed(parts)]  # of equal keys the first row counts
    if not tables or any(table is None for table in tables):
        raise CacheError(f"{found[0]} has no log-probs to export, or is being changed; try again")
    table = pa.concat_tables(tables)
    table = table.take(pa.array(np.sort(KeyIndex.of(keys_of(table)).first)))
    metadata = {"dpo_pack.namespace": json.dumps(read_json(found[0] / NAMESPACE_FILE))}
    with written_aside(target) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, write_page_checksum=True)
    return len(table)


def import_logps(file: Path, cache: ReferenceCache, tables: Sequence[PairTable]) -> int:
    """Adds a file's log-probs that the cache lacks: all rows, or none; returns how many were added. Raises
    CacheError, which names the file and, if possible, the row."""
    none = np.zeros(0, dtype=np.uint8)
    columns = sequence_table(none.reshape(0, 16), np.zeros(0), none).schema
    try:
        table = pq.read_table(file, page_checksum_verification=True)
        described = (table.schema.metadata or {}).get(b"dpo_pack.namespace")
        table = table.select(columns.names).cast(columns)
        keys, sums, num_tokens = keys_of(table), numbers_of(table[SUM]), numbers_of(table[NUM_TOKENS])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise CacheError(
            f"{file} is not a Parquet file with the columns of docs/reference-cache.md: {first_line(error)}"
        ) from error
    if described is not None and namespace_digest(parse_json(described) or {}) != cache.directory.name:
        raise CacheError(
            f"{file} holds log-probs of another model or precision than the recipe's reference; import it "
            "with the recipe of that model"
        )
    for problem, is_wrong in _problems(keys, sums, num_tokens, tables):
        if is_wrong.any():
            raise CacheError(f"{file} row {is_wrong.argmax() + 1}: {problem}; nothing was imported")
    rows = KeyIndex.of(keys).first
    rows = rows[np.isnan(cache.lookup(keys[rows]))]
    added = sequence_table(keys[rows], sums[rows], num_tokens[rows])
    cache.append(added, {"origin": f"imported from {file.name}"})
    return len(rows)


def _problems(
    keys: Keys, sums: FloatArray, num_tokens: IntArray, tables: Sequence[PairTable]
) -> Iterator[tuple[str, Bools]]:
    """Yields what may be wrong, and in which rows it is. A test is only valid if those before it passed."""
    yield f"{SUM} must be a finite number, at most 0", ~(np.isfinite(sums) & (sums <= _LARGEST_LOGP))
    index = KeyIndex.of(np.concatenate([s for t in tables for s in (t.chosen_keys, t.rejected_keys)]))
    lengths = np.concatenate([s for t in tables for s in (t.chosen_scored, t.rejected_scored)])
    places = index.find(keys)
    is_other = (num_tokens < 1) | ((places >= 0) & (num_tokens != lengths[index.first][places]))
    yield f"{NUM_TOKENS} must be the number of scored tokens of the completion", is_other
    own = KeyIndex.of(keys)
    yield f"another row has another {SUM} for the same {KEY}", sums != sums[own.first][own.inverse]
