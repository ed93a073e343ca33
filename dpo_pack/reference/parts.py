"""A part of the reference cache: a Parquet file whose name has the sha256 of its bytes.

    part-<sha256>.parquet    key          16 bytes, `data/store.py`'s sequence_key
                             logps_sum    float64, nats
                             num_tokens   int32, tokens of the completion
                             token_logps  list of float32, one for each token; only if a loss needed them

A part is written under a temporary name, synced and renamed, so it is whole or absent. If a byte changes
later, the bytes no longer match the name.

Legend: n sequences, U different keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside

KEY, SUM, NUM_TOKENS, TOKENS = "key", "logps_sum", "num_tokens", "token_logps"
# A part must be small, because the check of its sha256 reads the whole part into memory.
MAX_PART_SEQUENCES = 200_000
Keys = npt.NDArray[np.uint8]  # [n, 16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyIndex:
    """The different keys of an array, in ascending order of their bytes, so that binary search finds them."""

    unique: npt.NDArray[np.bytes_]  # [U]
    first: IntArray  # [U] position of each key's first occurrence in the array
    inverse: IntArray  # [n] position in `unique` of each key of the array

    @staticmethod
    def of(keys: Keys) -> KeyIndex:
        """Makes an index of n keys, [..., 16], which may be in any order and repeat."""
        unique, first, inverse = np.unique(_as_strings(keys), return_index=True, return_inverse=True)
        return KeyIndex(unique=unique, first=first, inverse=inverse)

    def __len__(self) -> int:
        return len(self.unique)

    @property
    def keys(self) -> Keys:
        """The different keys, [U, 16]."""
        return self.unique.view(np.uint8).reshape(-1, 16)

    def find(self, keys: Keys) -> IntArray:
        """Maps [n, 16] keys to their [n] positions in `unique`, -1 if a key is not there."""
        if len(self) == 0:
            return np.full(len(keys), -1, dtype=np.int64)
        wanted = _as_strings(keys)
        order = np.argsort(wanted)  # five times as fast: sorted keys are found in one walk through memory
        places = np.empty(len(keys), dtype=np.int64)
        places[order] = np.searchsorted(self.unique, wanted[order])
        places = np.minimum(places, len(self) - 1)
        return np.where(self.unique[places] == wanted, places, -1)


def _as_strings(keys: Keys) -> npt.NDArray[np.bytes_]:
    """Turns [n, 16] keys into [n] byte strings. numpy compares them exactly, even with zeros at the end."""
    return np.ascontiguousarray(keys, dtype=np.uint8).view("S16").reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogps:
    """The log-probs of all completion tokens of n sequences, one sequence after another."""

    values: npt.NDArray[np.float32]  # [all tokens], nats
    offsets: IntArray  # [n + 1] the beginning of each sequence, then the end of the last one

    @staticmethod
    def of_lengths(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.integer]) -> TokenLogps:
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        return TokenLogps(values=values.astype(np.float32, copy=False), offsets=offsets)

    @staticmethod
    def none(num_sequences: int) -> TokenLogps:
        """Returns sequences without values."""
        return TokenLogps.of_lengths(np.zeros(0, dtype=np.float32), np.zeros(num_sequences, dtype=np.int64))

    @staticmethod
    def join(parts: Sequence[TokenLogps]) -> TokenLogps:
        """Joins the sequences of one or more parts, one part after another."""
        values, lengths = [part.values for part in parts], [part.lengths for part in parts]
        return TokenLogps.of_lengths(np.concatenate(values), np.concatenate(lengths))

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of each sequence, [n]."""
        return np.diff(self.offsets)

    def of(self, sequence: int) -> npt.NDArray[np.float32]:
        """Returns a view of the values of one sequence."""
        return self.values[self.offsets[sequence] : self.offsets[sequence + 1]]

    def take(self, sequences: IntArray) -> TokenLogps:
        """Returns the sequences at these positions, which can repeat; -1 gives a sequence without values."""
        lengths = np.append(self.lengths, 0)[sequences]
        from_here = np.repeat(self.offsets[sequences] - (np.cumsum(lengths) - lengths), lengths)
        return TokenLogps.of_lengths(self.values[from_here + np.arange(len(from_here))], lengths)


class DamagedPart(CacheError):
    """The bytes of a part have changed since it was written, or it has log-probs that are not finite."""


def sequence_table(
    keys: Keys,
    sums: FloatArray,
    num_tokens: npt.NDArray[np.integer] | None,
    tokens: TokenLogps | None = None,
) -> pa.Table:
    """Makes a table with the columns of a part: [n, 16] keys, [n] sums in nats, [n] tokens of completions.

    The columns of None are left out. `pa.array` would import pandas, which takes half a second.
    """
    data = np.ascontiguousarray(keys, dtype=np.uint8)
    buffers = [None, pa.py_buffer(data.tobytes())]
    columns = {
        KEY: pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(data), buffers),
        SUM: _number_column(sums.astype(np.float64, copy=False)),
    }
    if num_tokens is not None:
        columns[NUM_TOKENS] = _number_column(num_tokens.astype(np.int32))
    if tokens is not None:
        # A large list, because a run's values may have more tokens than 32-bit offsets can count.
        offsets, values = _number_column(tokens.offsets), _number_column(tokens.values)
        columns[TOKENS] = pa.LargeListArray.from_arrays(offsets, values)
    return pa.table(columns)


def _number_column(values: npt.NDArray[Any]) -> pa.Array:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def keys_of(table: pa.Table) -> Keys:
    """Returns the [n, 16] keys of a `sequence_table`. Raises ArrowInvalid if one is null."""
    column = _whole(table[KEY])
    keys = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, 16)
    return keys[column.offset :][: len(column)]


def numbers_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns the [n] numbers of a column. Raises ArrowInvalid for nulls. `to_numpy` would import pandas."""
    return np.from_dlpack(_whole(column))


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if column.null_count:
        raise pa.ArrowInvalid("a value is null")
    return column if isinstance(column, pa.Array) else column.combine_chunks()


def tokens_of(table: pa.Table) -> TokenLogps:
    """Returns the log-probs of tokens of a `sequence_table`; a null becomes a sequence without values."""
    column = table[TOKENS].combine_chunks()
    lengths = numbers_of(column.value_lengths().fill_null(0))
    return TokenLogps.of_lengths(numbers_of(column.flatten()), lengths)


def write_part(directory: Path, table: pa.Table, metadata: Mapping[str, str]) -> Path:
    """Adds a part to a namespace's directory. `metadata` records where the values come from.

    Raises CacheError if the disk refuses the file.
    """
    buffer = pa.BufferOutputStream()
    described = table.replace_schema_metadata({f"dpo_pack.{k}": v for k, v in metadata.items()})
    pq.write_table(described, buffer, use_dictionary=False)
    content = buffer.getvalue().to_pybytes()
    path = directory / f"part-{hashlib.sha256(content).hexdigest()}.parquet"
    with written_aside(path) as temporary:
        temporary.write_bytes(content)
    return path


def part_paths(directory: Path) -> list[Path]:
    """Returns the parts of a namespace's directory, in the order of their names."""
    return sorted(directory.glob("part-*.parquet"))


def read_part(part: Path, *, per_token: bool) -> pa.Table | None:
    """Reads the `sequence_table` of a part; with `per_token` also the log-probs of tokens, if it has them.

    Returns None if the file is missing, because another job has renamed or deleted it. Raises DamagedPart;
    CacheError if the file cannot be read or is no part of ours.
    """
    try:
        content = part.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"cannot read {part}: {error.strerror}; correct its permissions or set reference.cache_dir"
        ) from error
    if part.stem != f"part-{hashlib.sha256(content).hexdigest()}":
        raise DamagedPart(f"{part} is damaged: its bytes have changed; a run computes its log-probs again")
    try:
        # No threads: an Arrow thread may free `content` while Python ends, and then the process aborts.
        table = pq.ParquetFile(pa.BufferReader(content)).read(
            columns=[KEY, SUM, NUM_TOKENS, *([TOKENS] if per_token else [])], use_threads=False
        )
        is_finite = np.isfinite(numbers_of(table[SUM])).all()
        if TOKENS in table.column_names:
            is_finite = is_finite and np.isfinite(tokens_of(table).values).all()
    except (KeyError, pa.ArrowException) as error:
        raise CacheError(
            f"{part} is not a part of a reference cache; move it to another directory"
        ) from error
    if not is_finite:
        raise DamagedPart(f"{part} has log-probs that are not finite; a run computes its log-probs again")
    return table
