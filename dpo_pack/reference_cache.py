"""Reference log-probs on disk, keyed by content.

The unit is a *sequence* (context and completion), not a pair: data that is paired, mixed, ordered or
subsampled another way reuses what is there. A namespace (`fingerprint.py`) is one directory of Parquet
parts, which pandas opens too:

    <cache_dir>/reference/<namespace>/namespace.json             what the values depend on
    <cache_dir>/reference/<namespace>/used.json                  by which model paths, and when
    <cache_dir>/reference/<namespace>/part-<sha256>.parquet      see reference_parts.py

Parts are only ever added, each whole or absent, so any number of jobs read and write at once without
locks. A part whose bytes do not match its name is set aside and its sequences are computed again.

Legend: n keys asked for, U distinct ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpo_pack.errors import CacheError
from dpo_pack.files import read_json, write_json_atomically
from dpo_pack.key_index import IntArray, KeyIndex, Keys
from dpo_pack.reference_parts import (
    KEY,
    MAX_PART_SEQUENCES,
    SUM,
    TOKENS,
    Floats,
    SequenceLogps,
    TokenLogps,
    is_intact,
    keys_of,
    numbers_of,
    parse_part,
    part_paths,
    read_content,
    tokens_of,
    write_part,
)

logger = logging.getLogger(__name__)

NAMESPACE_FILE, USED_FILE = "namespace.json", "used.json"


def default_cache_directory() -> Path:
    """Where caches are when a recipe does not say: $DPO_PACK_CACHE, else below the home directory."""
    return Path(os.environ.get("DPO_PACK_CACHE") or Path.home() / ".cache" / "dpo_pack")


def reference_directory(cache_dir: Path) -> Path:
    """Where the namespaces of a cache directory are."""
    return cache_dir / "reference"


def namespace_digest(namespace: Mapping[str, Any]) -> str:
    """32 hex digits; the name of the namespace's directory."""
    canonical = json.dumps(namespace, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


class ReferenceCache:
    """Reference log-probs of one namespace on disk."""

    def __init__(self, cache_dir: Path, namespace: Mapping[str, Any]) -> None:
        """Opens, or creates, the namespace's directory. Raises CacheError when that is not possible."""
        self.directory = reference_directory(cache_dir) / namespace_digest(namespace)
        self.named_parts: set[str] = set()  # written by this job, whether or not a listing has them yet
        if not (self.directory / NAMESPACE_FILE).is_file():
            write_json_atomically(self.directory / NAMESPACE_FILE, dict(namespace))

    def note_use(self, model: str) -> None:
        """Remember that a run with the model at this path uses the namespace now."""
        used = read_json(self.directory / USED_FILE) or {}
        with contextlib.suppress(CacheError):  # a cache that may only be read serves as well
            write_json_atomically(self.directory / USED_FILE, {**used, model: time.time()})

    def check_writable(self) -> None:
        """Raises CacheError when no part can be added, before anything is computed in vain."""
        probe = self.directory / f".probe.{uuid.uuid4().hex[:8]}.tmp"
        try:
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise CacheError(
                f"cannot write in {self.directory}: {error.strerror}; free space, or set reference.cache_dir "
                "to a writable directory"
            ) from error

    def lookup(self, keys: Keys) -> Floats:
        """[n, 16] sequence keys -> [n] summed log-probs, NaN where the cache has none.

        Reads one part at a time; memory grows with `keys`, not with the cache.
        """
        index = KeyIndex.of(keys)
        values = np.full(len(index), np.nan)
        for table, rows, places in self._matches(index, (KEY, SUM)):
            values[places] = numbers_of(table[SUM])[rows]
        return values[index.inverse]

    def lookup_tokens(self, keys: Keys) -> tuple[Floats, TokenLogps]:
        """[n, 16] sequence keys -> [n] sums and the per-token values they are the sums of.

        NaN and an empty sequence where the cache has no per-token values, whether or not it has a sum.
        """
        index = KeyIndex.of(keys)
        which = np.full(len(index), -1)  # [U] position among the found ones
        found: list[TokenLogps] = []
        sums: list[Floats] = []
        num_found = 0
        for table, rows, places in self._matches(index, (KEY, SUM, TOKENS)):
            if TOKENS in table.column_names:
                which[places] = np.arange(num_found, num_found + len(rows))
                found.append(tokens_of(table).take(rows))
                sums.append(numbers_of(table[SUM])[rows])
                num_found += len(rows)
        # One more, empty, at the end: what -1 stands for.
        nothing = TokenLogps(values=np.zeros(0, dtype=np.float32), offsets=np.zeros(2, dtype=np.int64))
        every_sum = np.concatenate([*sums, np.full(1, np.nan)])
        which = np.where(which < 0, num_found, which)[index.inverse]
        return every_sum[which], TokenLogps.join([*found, nothing]).take(which)

    def contains(self, keys: Keys, *, per_token: bool) -> npt.NDArray[np.bool_]:
        """[n]: whether the cache has the sequence's sum, or with `per_token` its per-token values."""
        index = KeyIndex.of(keys)
        is_there = np.zeros(len(index), dtype=np.bool_)
        columns = (KEY, TOKENS) if per_token else (KEY,)
        for table, _, places in self._matches(index, columns):
            if not per_token or TOKENS in table.column_names:
                is_there[places] = True
        return is_there[index.inverse]

    def append(
        self,
        keys: Keys,
        sums: Floats,
        num_tokens: npt.NDArray[np.integer],
        tokens: TokenLogps | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> Path:
        """Add a part holding [n, 16] keys, [n] sums and [n] token counts. Raises CacheError."""
        logps = SequenceLogps(keys=keys, sums=sums, num_tokens=num_tokens, tokens=tokens)
        part = write_part(self.directory, logps, metadata or {})
        self.named_parts.add(part.name)
        return part

    def append_all(self, logps: SequenceLogps, metadata: Mapping[str, str]) -> None:
        """Add parts of bounded size. Raises CacheError."""
        for begin in range(0, len(logps), MAX_PART_SEQUENCES):
            some = np.arange(begin, min(begin + MAX_PART_SEQUENCES, len(logps)))
            tokens = None if logps.tokens is None else logps.tokens.take(some)
            self.append(logps.keys[some], logps.sums[some], logps.num_tokens[some], tokens, metadata=metadata)

    def _matches(
        self, index: KeyIndex, columns: Sequence[str]
    ) -> Iterator[tuple[pa.Table, IntArray, IntArray]]:
        """Of every part that has some of the keys: its columns, the rows that match, their places in `index`.

        A network file system may list a directory as it was a while ago; it opens what is asked for by name.
        The part read last wins where several have a sequence: always the same one, as names are sorted.
        """
        listed = {part.name for part in part_paths(self.directory)} if len(index) else set()
        for part in sorted(self.directory / name for name in listed | self.named_parts):
            table = read_part(part, columns)
            if table is not None:
                places = index.find(keys_of(table))
                rows = np.flatnonzero(places >= 0)
                if len(rows):
                    yield table, rows, places[rows]


def read_part(part: Path, columns: Sequence[str]) -> pa.Table | None:
    """Those of `columns` that the part has; None when it is damaged, which sets it aside, or gone.

    Raises CacheError.
    """
    content = read_content(part)
    if content is None:
        return None
    if is_intact(part, content):
        return parse_part(part, content, columns)
    aside = part.with_suffix(".damaged")
    with contextlib.suppress(OSError):  # another job was faster, or we may only read here
        part.rename(aside)
    logger.warning("%s is damaged; set aside as %s, its log-probs are computed again", part, aside.name)
    return None
