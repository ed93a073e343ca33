"""The reference log-probs of a run, copied from the cache when it begins. No value changes later. Legend: P
pairs, U different sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.store import PairTable
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.reference.cache import (
    SUM,
    UNPACKED,
    KeyIndex,
    Keys,
    ReferenceCache,
    keys_of,
    numbers_of,
    sequence_table,
)
from dpo_pack.reference.compute import Found, find_values
from dpo_pack.system import ranks
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside

_AT_ONCE = 2**16  # sequences that a hash copies


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference log-probs that one run uses. They are a file of its output directory, so later changes of
    the shared cache cannot change the run, even after a resume."""

    keys: Keys  # [U, 16], each key once, in ascending order
    sums: FloatArray  # [U]
    # Tables, and the [P, (chosen, rejected)] positions of their sequences in `keys`.
    known: Sequence[tuple[PairTable, IntArray]] = ()

    @staticmethod
    def of_found(tables: Sequence[PairTable], found: Found) -> FrozenReference:
        """Returns what `find_values` has found of these tables."""
        index, sums = found
        ends = np.cumsum([table.num_pairs for table in tables])
        places = np.split(index.inverse.reshape(-1, 2), ends[:-1])
        known = list(zip(tables, places, strict=True))
        return FrozenReference(keys=index.keys, sums=sums, known=known)

    @staticmethod
    def take(cache: ReferenceCache, tables: Sequence[PairTable]) -> FrozenReference:
        """Copies the values of the tables' sequences from `cache`. Every rank must call it. Raises CacheError
        if a value is missing."""

        def find() -> Found:
            found = find_values(cache, tables)
            if num_missing := int(np.isnan(found[1]).sum()):
                raise CacheError(
                    f"{num_missing} reference log-probs are no longer in {cache.directory}, "
                    "although they were computed; run the command again"
                )
            return found

        return FrozenReference.of_found(tables, ranks.of_node(find))

    def fingerprint(self, table: PairTable | None = None) -> str:
        """A hash of the sequences and of every bit of their values: of all, or those of a table."""
        is_used = np.full(len(self.keys), table is None)
        if table is not None:
            is_used[self._places(table)] = True
        digest = hashlib.blake2b(digest_size=16)
        for values in (self.keys, self.sums):
            for begin in range(0, len(values), _AT_ONCE):
                block = slice(begin, begin + _AT_ONCE)
                digest.update(values[block][is_used[block]].data)
        return digest.hexdigest()

    def covers(self, table: PairTable) -> bool:
        """Returns True if this reference has the values of all sequences of the table."""
        return self._places(table) is not None

    def _places(self, table: PairTable) -> IntArray | None:
        """Returns the position in `keys` of each pair's (chosen, rejected), [P, 2]; None if a value lacks."""
        places = next((places for known, places in self.known if known is table), None)
        if places is None:
            index = KeyIndex.of(self.keys)
            places = np.stack([index.find(k) for k in (table.chosen_keys, table.rejected_keys)], axis=1)
        return places if (places >= 0).all() else None

    def joined(self, other: FrozenReference) -> FrozenReference:
        """Returns the values of both references. If both have a sequence, this reference's value is used."""
        index = KeyIndex.of(np.concatenate([self.keys, other.keys]))  # of equal keys `self` has the first
        return FrozenReference(keys=index.keys, sums=np.concatenate([self.sums, other.sums])[index.first])

    def of(self, table: PairTable) -> FloatArray:
        """Returns the sums of the table's pairs, [P, (chosen, rejected)]. Raises CacheError if a sequence has
        no value here."""
        places = self._places(table)
        if places is None:
            what = "reference.parquet in output_dir is of other pairs than data.train and data.eval are now"
            raise CacheError(f"{what}; use another output_dir, or --overwrite")
        return self.sums[places]

    def save(self, path: Path) -> None:
        with written_aside(path) as temporary:
            table = sequence_table(self.keys, self.sums, None)
            pq.write_table(table, temporary, write_page_checksum=True, **UNPACKED)

    @staticmethod
    def load(path: Path) -> FrozenReference:
        """Reads what `save` wrote. Raises CacheError if it is damaged."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return FrozenReference(keys=keys_of(table), sums=numbers_of(table[SUM]))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise CacheError(
                f"{path} is missing or damaged, so this run cannot go on as it began; start again with "
                "checkpoint.resume=never and --overwrite"
            ) from error
