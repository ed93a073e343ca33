"""The work of `dpopack cache`: lists and prunes reference caches, exports and imports log-probs.

Only files that dpo-pack has written, known by their names, are deleted. An exported file has the columns of a
part, see cache.py. `cache_dir`: None is the default directory.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.store import PairTable
from dpo_pack.reference.cache import (
    NAMESPACE_FILE,
    NUM_TOKENS,
    PART_NAME,
    SUM,
    USED_FILE,
    KeyIndex,
    ReferenceCache,
    UsedTimes,
    default_cache_directory,
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


def find_namespaces(cache_dir: Path | None) -> list[dict[str, Any]]:
    """Returns what `cache list --json` prints of each namespace, the latest used first."""
    paths = ((cache_dir or default_cache_directory()) / "reference").glob("*")
    found = [_describe(path) for path in paths if is_namespace(path) and not path.is_symlink()]
    return sorted(found, key=lambda one: -float(one["last_used"]))


def _describe(directory: Path) -> dict[str, Any]:
    described = read_json(directory / NAMESPACE_FILE) or {}
    times = read_json(directory / USED_FILE, UsedTimes) or {}
    used = {model: seconds for model, seconds in times.items() if 0 <= seconds <= time.time()}
    files, num_sequences = _our_files(directory), 0
    for part in directory.glob("part-*.parquet"):  # only their footers are read
        with contextlib.suppress(OSError, pa.ArrowException):  # a run will set it aside
            num_sequences += pq.read_metadata(part).num_rows
    return {
        "namespace": directory.name,
        "directory": str(directory),
        "models": sorted(used, key=lambda model: -used[model]),  # paths of models, the latest used first
        "parameters": str(described.get("parameters")),
        "autocast": described.get("autocast"),
        "sequences": num_sequences,  # one that is in several parts counts in each
        "parts": sum(file.suffix == ".parquet" for file in files),
        "damaged_parts": sum(file.suffix == ".damaged" for file in files),
        "size_bytes": _size(files),
        "last_used": max([*(file.stat().st_mtime for file in files if file.exists()), *used.values()]),
    }


def prune_cache(
    cache_dir: Path | None, *, older_than_seconds: float | None, most_bytes: int | None, dry_run: bool
) -> Iterator[str]:
    """Deletes files of killed processes; namespaces that no run has used for `older_than_seconds`; then the
    longest unused ones, until the rest has at most `most_bytes`; and damaged parts. Yields before how many
    bytes, of what and why. With `dry_run` it deletes nothing. Raises CacheError."""
    cache_dir = cache_dir or default_cache_directory()
    namespaces = find_namespaces(cache_dir)
    kept_bytes = sum(one["size_bytes"] for one in namespaces)
    deletions = [(f"{cache_dir}: leftovers of killed runs", find_leftovers(cache_dir))]
    for one in reversed(namespaces):
        age, files = time.time() - one["last_used"], _our_files(Path(one["directory"]))
        if older_than_seconds is not None and age > older_than_seconds:
            reason = f"not used for {age / 86400:.0f} days"
        elif most_bytes is not None and kept_bytes > most_bytes:
            reason = "unused for the longest time, and the cache is larger than the limit"
        else:
            reason, files = "damaged parts", [file for file in files if file.suffix == ".damaged"]
        kept_bytes -= 0 if reason == "damaged parts" else one["size_bytes"]
        # namespace.json goes last, so that an interrupted deletion can be found and repeated.
        files.sort(key=lambda file: file.name == NAMESPACE_FILE)
        deletions.append(
            (f"{one['namespace']} ({', '.join(one['models']) or 'unknown model'}): {reason}", files)
        )
    for what, files in deletions:
        if files:
            yield f"{_size(files) / 1e6:,.1f} MB of {what}"
        for file in () if dry_run else files:
            discard(file)
            if file.exists():
                raise CacheError(f"cannot delete {file}; correct its permissions")
            if file.name == NAMESPACE_FILE and not any(file.parent.iterdir()):
                file.parent.rmdir()


def _our_files(directory: Path) -> list[Path]:
    files = (path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    return [file for file in files if _OURS.fullmatch(file.name)]


def _size(paths: Sequence[Path]) -> int:
    """Returns the bytes of files, and of the files in directories; 0 of one that another job has deleted."""
    with contextlib.suppress(OSError):
        files = (file for path in paths for file in (path, *path.rglob("*")))
        return sum(file.lstat().st_size for file in files if not file.is_dir())
    return 0


def export_namespace(cache_dir: Path | None, prefix: str, target: Path) -> int:
    """Writes all log-probs of the one namespace that begins with `prefix`; returns their number. Of a
    sequence in several parts the last one counts, as in a run. Raises CacheError, also for a damaged part."""
    found = [one["directory"] for one in find_namespaces(cache_dir) if one["namespace"].startswith(prefix)]
    if len(found) != 1:
        raise CacheError(
            f"--namespace: {len(found)} names begin with {prefix!r}; `dpopack cache list` prints all names"
        )
    directory = Path(found[0])
    # Of equal keys the first row counts.
    tables: list[Any] = [read_part(part) for part in sorted(directory.glob("part-*.parquet"), reverse=True)]
    if not tables or any(table is None for table in tables):
        raise CacheError(f"{directory} has no log-probs to export, or is being changed; try again")
    table = pa.concat_tables(tables)
    table = table.take(pa.array(np.sort(KeyIndex.of(keys_of(table)).first)))
    metadata = {"dpo_pack.namespace": json.dumps(read_json(directory / NAMESPACE_FILE))}
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
    known = KeyIndex.of(np.concatenate([k for t in tables for k in (t.chosen_keys, t.rejected_keys)]))
    lengths = np.concatenate([n for t in tables for n in (t.chosen_scored, t.rejected_scored)])[known.first]
    places, own = known.find(keys), KeyIndex.of(keys)
    is_other = (num_tokens < 1) | ((places >= 0) & (num_tokens != lengths[places]))
    for problem, is_wrong in (
        (f"{SUM} must be a finite number, at most 0", ~(np.isfinite(sums) & (sums <= _LARGEST_LOGP))),
        (f"{NUM_TOKENS} must be the number of scored tokens of the completion", is_other),
        (f"another row has another {SUM} for the same key", sums != sums[own.first][own.inverse]),
    ):
        if is_wrong.any():
            raise CacheError(f"{file} row {is_wrong.argmax() + 1}: {problem}; nothing was imported")
    rows = own.first[np.isnan(cache.lookup(keys[own.first]))]
    cache.append(
        sequence_table(keys[rows], sums[rows], num_tokens[rows]), {"origin": f"imported from {file.name}"}
    )
    return len(rows)
