"""Reference log-probs on disk. The key of a value is a hash of token ids.

The cache stores a value for each *sequence* (prompt and completion), not for each pair. So a run finds its
values even if it pairs, mixes, orders or subsamples the data in another way. All values of one model in one
precision are in one directory, a namespace (`model/fingerprint.py`), of Parquet files, the parts:

    <cache_dir>/reference/<namespace>/namespace.json             the facts that the values depend on
    <cache_dir>/reference/<namespace>/used.json                  paths of models that used it, and when
    <cache_dir>/reference/<namespace>/part-<sha256>.parquet      see parts.py

Jobs never change a part; they only add whole ones. So any number of jobs can read and write at the same time
without locks. A part whose bytes do not match its name, or with a log-prob that is not finite, is renamed,
and its sequences are computed again.

Legend: n requested keys, U different keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.reference.parts import (
    MAX_PART_SEQUENCES,
    SUM,
    TOKENS,
    DamagedPart,
    KeyIndex,
    Keys,
    TokenLogps,
    keys_of,
    numbers_of,
    part_paths,
    read_part,
    tokens_of,
    write_part,
)
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import add_to_json, read_json, write_json_atomically

logger = logging.getLogger(__name__)

NAMESPACE_FILE, USED_FILE = "namespace.json", "used.json"
PART_NAME = r"part-[0-9a-f]{64}\.(?:parquet|damaged)"
# Names of temporary files and directories: of JSON files (file_hashes.json), parts, token stores and probes.
_TEMPORARY = re.compile(
    rf"\.(?:(?:[a-z_]+\.json|{PART_NAME}|[0-9a-f]{{32}}|probe)\.[0-9a-f]{{8}}|shared-\w+)\.tmp"
)
# An older temporary file is the rest of a killed process, because no process writes a file for so long.
_LEFTOVER_AFTER_SECONDS = 24 * 3600.0
UsedTimes = dict[str, float]  # path of a model -> seconds since 1970


def default_cache_directory() -> Path:
    """Returns the cache directory of recipes that name none: $DPO_PACK_CACHE or ~/.cache/dpo_pack."""
    return Path(os.environ.get("DPO_PACK_CACHE") or Path.home() / ".cache" / "dpo_pack")


def namespace_digest(namespace: Mapping[str, Any]) -> str:
    """Returns 32 hex digits: the name of the namespace's directory."""
    canonical = json.dumps(namespace, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def is_namespace(directory: Path) -> bool:
    """Returns whether the directory's name is the digest of its namespace.json."""
    described = read_json(directory / NAMESPACE_FILE)
    return described is not None and namespace_digest(described) == directory.name


def namespace_directories(cache_dir: Path) -> list[Path]:
    """Returns the directories of a cache's namespaces; links are not followed. Raises CacheError."""
    root = cache_dir / "reference"
    try:
        paths = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CacheError(f"cannot read {root}: {error.strerror}; correct its permissions") from error
    return [path for path in paths if is_namespace(path) and not path.is_symlink()]


class ReferenceCache:
    """Reference log-probs of one namespace on disk."""

    def __init__(self, cache_dir: Path, namespace: Mapping[str, Any]) -> None:
        """Opens or creates the namespace's directory. Writes its namespace.json if it is missing or damaged.

        Raises CacheError if the directory cannot be written.
        """
        self.directory = cache_dir / "reference" / namespace_digest(namespace)
        self.named_parts: set[str] = set()  # written by this job; a directory listing may lack them
        if not is_namespace(self.directory):
            write_json_atomically(self.directory / NAMESPACE_FILE, dict(namespace))

    def note_use(self, model: str) -> None:
        """Writes into used.json that a run with the model at this path uses the namespace now."""
        add_to_json(self.directory / USED_FILE, UsedTimes, {model: time.time()})

    def check_writable(self) -> None:
        """Raises CacheError if this job cannot add parts. Called before any log-prob is computed."""
        probe = self.directory / f".probe.{uuid.uuid4().hex[:8]}.tmp"
        try:
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise CacheError(
                f"cannot write in {self.directory}: {error.strerror}; free space, or set reference.cache_dir"
            ) from error

    def lookup(self, keys: Keys, *, per_token: bool = False) -> FloatArray:
        """Maps [n, 16] sequence keys to [n] summed log-probs, NaN where the cache has no value.

        With `per_token`, a sequence without log-probs of its tokens has no value. One part is read at a time,
        so memory grows with the number of keys, not with the size of the cache.
        """
        index = KeyIndex.of(keys)
        sums = np.full(len(index), np.nan)
        for table, rows, places in self._matches(index, per_token=per_token):
            sums[places] = numbers_of(table[SUM])[rows]
        return sums[index.inverse]

    def lookup_tokens(self, keys: Keys) -> tuple[FloatArray, TokenLogps]:
        """Maps [n, 16] sequence keys to [n] sums and to the log-probs of their tokens.

        A sequence gets NaN and no token values if the cache has no token values of it, even if it has a sum.
        """
        index = KeyIndex.of(keys)
        which = np.full(len(index), -1)  # [U] position among the found sequences; -1 if not found
        sums, tokens, num_found = [np.zeros(0)], [TokenLogps.none(0)], 0
        for table, rows, places in self._matches(index, per_token=True):
            which[places] = np.arange(num_found, num_found + len(rows))
            sums.append(numbers_of(table[SUM])[rows])
            tokens.append(tokens_of(table).take(rows))
            num_found += len(rows)
        which = which[index.inverse]
        return np.append(np.concatenate(sums), np.nan)[which], TokenLogps.join(tokens).take(which)

    def append(self, table: pa.Table, metadata: Mapping[str, str] | None = None) -> list[Path]:
        """Adds the sequences of a `sequence_table`, in parts of bounded size. Raises CacheError."""
        whole, parts = table.combine_chunks(), []
        for begin in range(0, len(whole), MAX_PART_SEQUENCES):
            parts.append(write_part(self.directory, whole.slice(begin, MAX_PART_SEQUENCES), metadata or {}))
            self.named_parts.add(parts[-1].name)
        return parts

    def _matches(self, index: KeyIndex, *, per_token: bool) -> Iterator[tuple[pa.Table, IntArray, IntArray]]:
        """Yields (content, matching rows, their positions in `index`) of each part that has some keys.

        With `per_token`, only parts with log-probs of tokens count. A directory listing of a network file
        system may lack new files, so this job's own parts are opened by name. If several parts have a
        sequence, callers use the last part by name: always the same one.
        """
        listed = {part.name for part in part_paths(self.directory)}
        for part in sorted(self.directory / name for name in listed | self.named_parts) if len(index) else ():
            try:
                table = read_part(part, per_token=per_token)
            except DamagedPart as damage:
                aside = part.with_suffix(".damaged")
                with contextlib.suppress(OSError):  # another job has renamed it, or we may only read here
                    part.rename(aside)
                logger.warning("%s; the part is now called %s", damage, aside.name)
                continue
            if table is not None and (not per_token or TOKENS in table.column_names):
                places = index.find(keys_of(table))
                rows = np.flatnonzero(places >= 0)
                if len(rows):
                    yield table, rows, places[rows]


def find_leftovers(cache_dir: Path) -> list[Path]:
    """Returns the temporary files and directories that killed processes have left in a cache."""
    directories, found = (cache_dir, cache_dir / "tokens", *namespace_directories(cache_dir)), []
    for path in (path for directory in directories for path in directory.glob(".*.tmp")):
        with contextlib.suppress(OSError):  # its process has just given it its final name
            changed = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
            if _TEMPORARY.fullmatch(path.name) and time.time() - changed > _LEFTOVER_AFTER_SECONDS:
                found.append(path)
    return found
