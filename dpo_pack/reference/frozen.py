"""The reference log-probs of a run, copied from the cache at the start of the run and never changed.

Legend: P pairs, U unique sequences, N completion tokens of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.store import PairTable
from dpo_pack.packing.lengths import IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.key_index import KeyIndex, Keys
from dpo_pack.reference.parts import (
    KEY,
    SUM,
    TOKENS,
    Floats,
    TokenLogps,
    key_column,
    keys_of,
    number_column,
    numbers_of,
    token_column,
    tokens_of,
)
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs: `chosen` and `rejected` are sums over tokens, in nats, [P]."""

    chosen: Floats
    rejected: Floats
    # Per-token values if the loss needs them. Those of pair p are at `places[p, 0]` (chosen), `places[p, 1]`.
    tokens: TokenLogps | None = None
    places: IntArray | None = None  # [P, (chosen, rejected)]

    def token_logps(self, pairs: IntArray) -> npt.NDArray[np.float32]:
        """Returns [N] per-token log-probs of these pairs: for each pair, first chosen and then rejected.

        The reference must have per-token values. The tokens are in the order in which a row has them.
        """
        assert self.tokens is not None and self.places is not None, "frozen without per-token values"
        return self.tokens.take(self.places[pairs].ravel()).values


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference log-probs that one run uses. They are a file of its output directory, so later changes of
    the shared cache cannot change the run, even after a resume."""

    keys: Keys  # [U, 16], ascending
    sums: Floats  # [U]
    tokens: TokenLogps | None = None  # per-token values of the U sequences

    @staticmethod
    def take(
        cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
    ) -> FrozenReference:
        """Copies the values of the tables' sequences from `cache`. Raises CacheError if a value is missing.

        `per_token` copies the log-prob of each token too, for a loss that weighs single tokens.
        """
        keys = unique_keys(tables)
        tokens = None
        if per_token:
            sums, tokens = cache.lookup_tokens(keys)
        else:
            sums = cache.lookup(keys)
        if np.isnan(sums).any():
            raise CacheError(
                f"{int(np.isnan(sums).sum())} reference log-probs are no longer in {cache.directory} since "
                "they were computed; run the command again"
            )
        return FrozenReference(keys=keys, sums=sums, tokens=tokens)

    @property
    def fingerprint(self) -> str:
        """A hash of the sequences and of every bit of their values."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.keys).tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(self.sums).tobytes())
        if self.tokens is not None:
            digest.update(np.ascontiguousarray(self.tokens.values).tobytes())
        return digest.hexdigest()

    def covers(self, table: PairTable) -> bool:
        """Returns True if this reference has the values of all sequences of the table."""
        return bool((KeyIndex.of(self.keys).find(unique_keys([table])) >= 0).all())

    def only(self, table: PairTable) -> FrozenReference:
        """Returns the values of the table's sequences only. This reference must have all of them."""
        keys = unique_keys([table])
        index = KeyIndex.of(self.keys)
        places = index.first[index.find(keys)]
        tokens = None if self.tokens is None else self.tokens.take(places)
        return FrozenReference(keys=keys, sums=self.sums[places], tokens=tokens)

    def joined(self, other: FrozenReference) -> FrozenReference:
        """Adds the values that only `other` has. Both references must have per-token values, or neither."""
        keys = np.concatenate([self.keys, other.keys])
        first = KeyIndex.of(keys).first  # if both have a key, the first position is in `self`
        tokens = None
        if self.tokens is not None and other.tokens is not None:
            tokens = TokenLogps.join([self.tokens, other.tokens]).take(first)
        return FrozenReference(
            keys=keys[first], sums=np.concatenate([self.sums, other.sums])[first], tokens=tokens
        )

    def of(self, table: PairTable) -> PairReference:
        """Returns the values of the table's pairs. Raises CacheError if a sequence has no value here."""
        index = KeyIndex.of(self.keys)
        places = np.stack([index.find(keys) for keys in (table.chosen_keys, table.rejected_keys)], axis=1)
        if (places < 0).any():
            raise CacheError("this run's reference.parquet belongs to other data; use another output_dir")
        places = index.first[places]
        return PairReference(
            chosen=self.sums[places[:, 0]],
            rejected=self.sums[places[:, 1]],
            tokens=self.tokens,
            places=None if self.tokens is None else places,
        )

    def save(self, path: Path) -> None:
        columns = {KEY: key_column(self.keys), SUM: number_column(self.sums)}
        if self.tokens is not None:
            columns[TOKENS] = token_column(self.tokens)
        with written_aside(path) as temporary:
            pq.write_table(pa.table(columns), temporary, write_page_checksum=True)

    @staticmethod
    def load(path: Path, *, per_token: bool = False) -> FrozenReference:
        """Reads what `save` wrote. Raises CacheError if it is missing, damaged or lacks the token values."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return FrozenReference(
                keys=keys_of(table),
                sums=numbers_of(table[SUM]),
                tokens=tokens_of(table) if per_token else None,
            )
        except (OSError, KeyError, pa.ArrowException) as error:
            raise CacheError(
                f"{path} is missing or damaged, so this run cannot go on as it began; start again with "
                "checkpoint.resume=never and --overwrite"
            ) from error


def unique_keys(tables: Sequence[PairTable]) -> Keys:
    """Returns [U, 16] keys of the tables' sequences, each key once, in ascending order."""
    keys = np.concatenate([side for table in tables for side in (table.chosen_keys, table.rejected_keys)])
    unique: Keys = keys[KeyIndex.of(keys).first]
    return unique
