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
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.key_index import KeyIndex, Keys
from dpo_pack.reference.parts import (
    KEY,
    SUM,
    TOKENS,
    TokenLogps,
    key_column,
    keys_of,
    number_column,
    numbers_of,
    token_column,
    tokens_of,
)
from dpo_pack.reference.work import weighted_keys
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs."""

    sums: FloatArray  # [P, (chosen, rejected)] sums over tokens, in nats; weighted, if tokens have weights
    # Per-token values, if the loss or weights of tokens need them. Those of pair p are at `places[p, 0]`
    # (chosen) and `places[p, 1]`.
    tokens: TokenLogps | None = None
    places: IntArray | None = None  # [P, (chosen, rejected)]

    def token_logps(self, pairs: IntArray) -> npt.NDArray[np.float32] | None:
        """Returns [N] per-token log-probs of these pairs: for each pair, first chosen and then rejected.

        The tokens are in the order in which a row has them. Returns None if there are no per-token values.
        """
        if self.tokens is None or self.places is None:
            return None
        return self.tokens.take(self.places[pairs].ravel()).values


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference log-probs that one run uses. They are a file of its output directory, so later changes of
    the shared cache cannot change the run, even after a resume."""

    keys: Keys  # [U, 16], each key once, in ascending order
    sums: FloatArray  # [U]
    tokens: TokenLogps | None = None  # per-token values of the U sequences; of some none, see `take`

    @staticmethod
    def take(
        cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
    ) -> FrozenReference:
        """Copies the values of the tables' sequences from `cache`. Raises CacheError if a value is missing.

        `per_token` copies the log-prob of each token too, for a loss that weighs single tokens. Otherwise
        this is done only for the sequences whose tokens have weights.
        """
        keys = unique_keys(tables)
        tokens = None
        needs_tokens = np.full(len(keys), per_token) | (KeyIndex.of(weighted_keys(tables)).find(keys) >= 0)
        if needs_tokens.any():
            sums = np.full(len(keys), np.nan)
            sums[needs_tokens], found = cache.lookup_tokens(keys[needs_tokens])
            sums[~needs_tokens] = cache.lookup(keys[~needs_tokens])
            # An empty sequence at the end stands for all sequences that need only their sum.
            places = np.where(needs_tokens, needs_tokens.cumsum() - 1, len(found))
            tokens = TokenLogps.join([found, TokenLogps.none(1)]).take(places)
        else:
            sums = cache.lookup(keys)
        if np.isnan(sums).any():
            raise CacheError(
                f"{int(np.isnan(sums).sum())} reference log-probs are no longer in {cache.directory}, "
                "although they were computed; run the command again"
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
        index = KeyIndex.of(self.keys)
        if (index.find(unique_keys([table])) < 0).any():
            return False
        places = index.find(weighted_keys([table]))
        return not len(places) or (self.tokens is not None and bool(self.tokens.lengths[places].all()))

    def only(self, table: PairTable) -> FrozenReference:
        """Returns the values of the table's sequences only. This reference must have all of them."""
        keys = unique_keys([table])
        places = KeyIndex.of(self.keys).find(keys)
        tokens = None if self.tokens is None else self.tokens.take(places)
        return FrozenReference(keys=keys, sums=self.sums[places], tokens=tokens)

    def joined(self, other: FrozenReference) -> FrozenReference:
        """Returns the values of both references. If both have a sequence, this reference's value is used."""
        keys = np.concatenate([self.keys, other.keys])
        first = KeyIndex.of(keys).first  # if both have a key, the first position is in `self`
        tokens = None
        if self.tokens is not None or other.tokens is not None:
            both = [part.tokens or TokenLogps.none(len(part.keys)) for part in (self, other)]
            tokens = TokenLogps.join(both).take(first)
        return FrozenReference(
            keys=keys[first], sums=np.concatenate([self.sums, other.sums])[first], tokens=tokens
        )

    def of(self, table: PairTable) -> PairReference:
        """Returns the values of the table's pairs. Raises CacheError if a sequence has no value here."""
        index = KeyIndex.of(self.keys)
        places = np.stack([index.find(keys) for keys in (table.chosen_keys, table.rejected_keys)], axis=1)
        if (places < 0).any() or not self.covers(table):
            raise CacheError("this run's reference.parquet belongs to other data; use another output_dir")
        sums = self.sums[places]  # [P, (chosen, rejected)]
        for pair in np.flatnonzero(table.has_token_weights).tolist():
            for side, weights in enumerate(table.token_weights(pair)):
                assert self.tokens is not None, "`covers` has checked this"
                is_scored = weights > 0
                logps = self.tokens.of(places[pair, side])[is_scored].astype(np.float64)
                sums[pair, side] = (logps * weights[is_scored]).sum()
        return PairReference(sums=sums, tokens=self.tokens, places=None if self.tokens is None else places)

    def save(self, path: Path) -> None:
        columns = {KEY: key_column(self.keys), SUM: number_column(self.sums)}
        if self.tokens is not None:
            columns[TOKENS] = token_column(self.tokens)
        with written_aside(path) as temporary:
            pq.write_table(pa.table(columns), temporary, write_page_checksum=True)

    @staticmethod
    def load(path: Path, *, per_token: bool = False) -> FrozenReference:
        """Reads what `save` wrote. Raises CacheError if it is missing, damaged or lacks the token values that
        `per_token` asks for."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return FrozenReference(
                keys=keys_of(table),
                sums=numbers_of(table[SUM]),
                tokens=tokens_of(table) if per_token or TOKENS in table.column_names else None,
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
