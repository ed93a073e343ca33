"""Reference log-probs on disk. The key of a value is a hash of token ids.

The cache stores a value for each *sequence* (prompt and completion), not for each pair. So a run finds its
values even if it pairs, mixes, orders or subsamples the data in another way. All values of one model in one
precision are in one directory, a namespace (`model/fingerprint.py`), of Parquet files, the parts:

    <cache_dir>/reference/<namespace>/namespace.json             the facts that the values depend on
    <cache_dir>/reference/<namespace>/used.json                  paths of models that used it, and when
    <cache_dir>/reference/<namespace>/part-<sha256>.parquet      see parts.py

Jobs never change a part; they only add whole ones. So any number of jobs can read and write at the same time
without locks. A part whose bytes do not match its name is renamed, and its sequences are computed again.

Legend: n requested keys, U distinct keys.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.reference.key_index import KeyIndex, Keys
from dpo_pack.reference.parts import (
    KEY,
    MAX_PART_SEQUENCES,
    SUM,
    TOKENS,
    DamagedPart,
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
NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}")
UsedTimes = dict[str, float]  # path of a model -> seconds since 1970


def default_cache_directory() -> Path:
    """Returns the cache directory of recipes that name none: $DPO_PACK_CACHE or ~/.cache/dpo_pack."""
    return Path(os.environ.get("DPO_PACK_CACHE") or Path.home() / ".cache" / "dpo_pack")


def reference_directory(cache_dir: Path) -> Path:
    """Returns the directory of the namespaces in a cache directory."""
    return cache_dir / "reference"


def namespace_digest(namespace: Mapping[str, Any]) -> str:
    """Returns 32 hex digits: the name of the namespace's directory."""
    canonical = json.dumps(namespace, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def describes_its_content(directory: Path) -> bool:
    """Returns whether the directory's name is the digest of its namespace.json."""
    described = read_json(directory / NAMESPACE_FILE)
    return described is not None and namespace_digest(described) == directory.name


def is_namespace(directory: Path) -> bool:
    """Returns True if the directory's name is the digest of its namespace.json, so that it is one of ours."""
    is_named = NAMESPACE_NAME.fullmatch(directory.name) and not directory.is_symlink()
    return bool(is_named) and describes_its_content(directory)


class ReferenceCache:
    """Reference log-probs of one namespace on disk."""

    def __init__(self, cache_dir: Path, namespace: Mapping[str, Any]) -> None:
        """Opens or creates the namespace's directory. Writes its namespace.json if it is missing or damaged.

        Raises CacheError if the directory cannot be written.
        """
        self.directory = reference_directory(cache_dir) / namespace_digest(namespace)
        self.named_parts: set[str] = set()  # written by this job; a directory listing may lack them
        if not describes_its_content(self.directory):
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
                f"cannot write in {self.directory}: {error.strerror}; free space, or set reference.cache_dir "
                "to a writable directory"
            ) from error

    def lookup(self, keys: Keys) -> FloatArray:
        """Maps [n, 16] sequence keys to [n] summed log-probs, NaN where the cache has no value.

        It reads one part at a time, so memory grows with the number of keys, not with the size of the cache.
        """
        index = KeyIndex.of(keys)
        values = np.full(len(index), np.nan)
        for table, rows, places in self._matches(index, (KEY, SUM)):
            values[places] = numbers_of(table[SUM])[rows]
        return values[index.inverse]

    def lookup_tokens(self, keys: Keys) -> tuple[FloatArray, TokenLogps]:
        """Maps [n, 16] sequence keys to [n] sums and to the log-probs of their tokens.

        A sequence gets NaN and no token values if the cache has no token values of it, even if it has a sum.
        """
        index = KeyIndex.of(keys)
        which = np.full(len(index), -1)  # [U] position among the found sequences; -1 if not found
        found: list[TokenLogps] = []
        sums: list[FloatArray] = []
        num_found = 0
        for table, rows, places in self._matches(index, (KEY, SUM, TOKENS)):
            if TOKENS in table.column_names:
                which[places] = np.arange(num_found, num_found + len(rows))
                found.append(tokens_of(table).take(rows))
                sums.append(numbers_of(table[SUM])[rows])
                num_found += len(rows)
        # An empty sequence at the end stands for all sequences that were not found.
        every_sum = np.concatenate([*sums, [np.nan]])
        which = np.where(which < 0, num_found, which)[index.inverse]
        return every_sum[which], TokenLogps.join([*found, TokenLogps.none(1)]).take(which)

    def contains(self, keys: Keys, *, per_token: bool) -> npt.NDArray[np.bool_]:
        """Returns [n]: True if the cache has the sequence's sum, or with `per_token` its per-token values."""
        index = KeyIndex.of(keys)
        is_there = np.zeros(len(index), dtype=np.bool_)
        columns = (KEY, TOKENS) if per_token else (KEY,)
        for table, _, places in self._matches(index, columns):
            if not per_token or TOKENS in table.column_names:
                is_there[places] = True
        return is_there[index.inverse]

    def append(self, table: pa.Table, metadata: Mapping[str, str] | None = None) -> list[Path]:
        """Adds the sequences of a `sequence_table`, in parts of bounded size. Raises CacheError."""
        whole, parts = table.combine_chunks(), []
        for begin in range(0, len(whole), MAX_PART_SEQUENCES):
            parts.append(write_part(self.directory, whole.slice(begin, MAX_PART_SEQUENCES), metadata or {}))
            self.named_parts.add(parts[-1].name)
        return parts

    def _matches(
        self, index: KeyIndex, columns: Sequence[str]
    ) -> Iterator[tuple[pa.Table, IntArray, IntArray]]:
        """Yields (its columns, matching rows, their positions in `index`) of each part that has some keys.

        A directory listing of a network file system may lack new files, so this job's own parts are opened
        by name. If several parts have a sequence, callers use the last part by name: always the same one.
        """
        listed = {part.name for part in part_paths(self.directory)} if len(index) else set()
        for part in sorted(self.directory / name for name in listed | self.named_parts):
            table = _read_or_set_aside(part, columns)
            if table is not None:
                places = index.find(keys_of(table))
                rows = np.flatnonzero(places >= 0)
                if len(rows):
                    yield table, rows, places[rows]


def _read_or_set_aside(part: Path, columns: Sequence[str]) -> pa.Table | None:
    """Reads those of `columns` that the part has. Returns None if the part is missing or damaged."""
    try:
        return read_part(part, columns)
    except DamagedPart:
        aside = part.with_suffix(".damaged")
        with contextlib.suppress(OSError):  # another job has renamed it, or we may only read here
            part.rename(aside)
        logger.warning("%s is damaged and now called %s; its log-probs are computed again", part, aside.name)
        return None
