"""The reference values a run works with, frozen at its start.

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

from dpo_pack.data.lengths import IntArray, PairLengths
from dpo_pack.data.store import PairTable
from dpo_pack.errors import CacheError
from dpo_pack.files import written_aside
from dpo_pack.key_index import KeyIndex, Keys
from dpo_pack.reference_cache import ReferenceCache
from dpo_pack.reference_parts import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs: summed over each completion's tokens, nats, [P] each."""

    chosen: Floats
    rejected: Floats
    # What the sums are the sums of, where the run's loss needs it: sequence `places[pair, side]` of `tokens`.
    tokens: TokenLogps | None = None
    places: IntArray | None = None  # [P, (chosen, rejected)]

    def token_logps(self, pairs: IntArray) -> npt.NDArray[np.float32]:
        """[N]: per-token log-probs of these pairs, chosen and rejected in turn, as they lie in a row.

        Only where the values were taken with `per_token`.
        """
        assert self.tokens is not None and self.places is not None, "frozen without per-token values"
        return self.tokens.take(self.places[pairs].ravel()).values


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference values one run uses, kept in its own directory: nothing that happens to the shared
    cache later can change the run or its resumption."""

    keys: Keys  # [U, 16], ascending
    sums: Floats  # [U]
    tokens: TokenLogps | None = None  # of U sequences

    @staticmethod
    def take(
        cache: ReferenceCache, tables: Sequence[PairTable], *, per_token: bool = False
    ) -> FrozenReference:
        """What `cache` holds of the tables' sequences; `per_token`: for a loss that weighs single tokens.

        Raises CacheError when one is missing.
        """
        keys = unique_keys(tables)
        tokens = None
        if per_token:
            sums, tokens = cache.lookup_tokens(keys)
        else:
            sums = cache.lookup(keys)
        if np.isnan(sums).any():
            raise CacheError(
                f"{int(np.isnan(sums).sum())} reference log-probs have vanished from {cache.directory} since "
                "they were computed; run the command again"
            )
        return FrozenReference(keys=keys, sums=sums, tokens=tokens)

    @property
    def fingerprint(self) -> str:
        """Names the sequences and their values, to the last bit."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.keys).tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(self.sums).tobytes())
        if self.tokens is not None:
            digest.update(np.ascontiguousarray(self.tokens.values).tobytes())
        return digest.hexdigest()

    def covers(self, table: PairTable) -> bool:
        """Whether it has the values of all the table's sequences."""
        return bool((KeyIndex.of(self.keys).find(unique_keys([table])) >= 0).all())

    def only(self, table: PairTable) -> FrozenReference:
        """The values of the table's sequences, all of which it has."""
        keys = unique_keys([table])
        index = KeyIndex.of(self.keys)
        places = index.first[index.find(keys)]
        tokens = None if self.tokens is None else self.tokens.take(places)
        return FrozenReference(keys=keys, sums=self.sums[places], tokens=tokens)

    def joined(self, other: FrozenReference) -> FrozenReference:
        """With what `other` has besides; both with per-token values, or neither."""
        keys = np.concatenate([self.keys, other.keys])
        first = KeyIndex.of(keys).first  # of a key in both, ours
        tokens = None
        if self.tokens is not None and other.tokens is not None:
            tokens = TokenLogps.join([self.tokens, other.tokens]).take(first)
        return FrozenReference(
            keys=keys[first], sums=np.concatenate([self.sums, other.sums])[first], tokens=tokens
        )

    def of(self, table: PairTable) -> PairReference:
        """The table's values. Raises CacheError when the run was frozen for other data."""
        index = KeyIndex.of(self.keys)
        places = np.stack([index.find(keys) for keys in (table.chosen_keys, table.rejected_keys)], axis=1)
        if (places < 0).any():
            raise CacheError("this run's reference.parquet is for other data; use another output_dir")
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
        """Raises CacheError when the file is missing or damaged, or lacks the per-token values."""
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


def pair_lengths(table: PairTable) -> PairLengths:
    """The planner's view of a table's lengths."""
    return PairLengths(
        prompt=table.prompt_lengths,
        chosen=table.chosen_lengths,
        rejected=table.rejected_lengths,
        shared=table.shared_lengths,
    )


def unique_keys(tables: Sequence[PairTable]) -> Keys:
    """[U, 16]: the keys of the tables' sequences, each once, ascending."""
    keys = np.concatenate([side for table in tables for side in (table.chosen_keys, table.rejected_keys)])
    unique: Keys = keys[KeyIndex.of(keys).first]
    return unique
