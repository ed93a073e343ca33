"""A part of the reference cache: a Parquet file whose name has the sha256 of its bytes.

    part-<sha256>.parquet    key          16 bytes, `data/keys.py`'s sequence_key
                             logps_sum    float64, nats
                             num_tokens   int32, tokens of the completion
                             token_logps  list of float32, one for each token; only if a loss needed them

A part is written under a temporary name, synced and renamed, so it is whole or absent. If a byte changes
later, the bytes no longer match the name.

Legend: n sequences.
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
from dpo_pack.reference.key_index import Keys
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside

KEY, SUM, NUM_TOKENS, TOKENS = "key", "logps_sum", "num_tokens", "token_logps"
# A part must be small, because the check of its sha256 reads the whole part into memory.
MAX_PART_SEQUENCES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogps:
    """The log-probs of all completion tokens of n sequences, one sequence after another."""

    values: npt.NDArray[np.float32]  # [all tokens], nats
    offsets: IntArray  # [n + 1] the beginning of each sequence, then the end of the last one

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of each sequence, [n]."""
        return np.diff(self.offsets)

    def of(self, sequence: int) -> npt.NDArray[np.float32]:
        """Returns a view of the [L] values of one sequence."""
        return self.values[self.offsets[sequence] : self.offsets[sequence + 1]]

    def take(self, sequences: IntArray) -> TokenLogps:
        """Returns the sequences at these positions, in this order; positions can repeat."""
        lengths = self.lengths[sequences]
        offsets = _ends(lengths)
        from_here = np.repeat(self.offsets[sequences] - offsets[:-1], lengths)
        return TokenLogps(values=self.values[from_here + np.arange(offsets[-1])], offsets=offsets)

    @staticmethod
    def join(parts: Sequence[TokenLogps]) -> TokenLogps:
        """Joins all sequences of the parts, one part after another."""
        lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
        values = [np.zeros(0, dtype=np.float32), *(part.values for part in parts)]
        return TokenLogps(values=np.concatenate(values), offsets=_ends(np.concatenate(lengths)))

    @staticmethod
    def none(num_sequences: int) -> TokenLogps:
        """Returns sequences without values."""
        offsets = np.zeros(num_sequences + 1, dtype=np.int64)
        return TokenLogps(values=np.zeros(0, dtype=np.float32), offsets=offsets)

    @staticmethod
    def of_lengths(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.integer]) -> TokenLogps:
        return TokenLogps(values=values.astype(np.float32, copy=False), offsets=_ends(lengths))


class DamagedPart(CacheError):
    """The bytes of a part have changed since it was written."""


def sequence_table(
    keys: Keys, sums: FloatArray, num_tokens: npt.NDArray[np.integer], tokens: TokenLogps | None = None
) -> pa.Table:
    """Makes a table with the columns of a part: [n, 16] keys, [n] sums in nats, [n] tokens of completions."""
    columns = {
        KEY: key_column(keys),
        SUM: number_column(sums.astype(np.float64, copy=False)),
        NUM_TOKENS: number_column(num_tokens.astype(np.int32)),
    }
    if tokens is not None:
        columns[TOKENS] = token_column(tokens)
    return pa.table(columns)


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


def read_part(part: Path, columns: Sequence[str]) -> pa.Table | None:
    """Reads those of `columns` that the part has. Returns None if the file is missing (renamed or deleted).

    Raises DamagedPart if the part's bytes do not match its name, CacheError if the file cannot be read or is
    no part of ours.
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
        raise DamagedPart(f"{part} is damaged: its bytes have changed")
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        known = [name for name in columns if name in file.schema_arrow.names]
        # No threads: an Arrow thread may free `content` while Python ends, and then the process aborts.
        return file.read(columns=known, use_threads=False)
    except pa.ArrowException as error:
        raise CacheError(
            f"{part} is not a part of a reference cache; move it to another directory"
        ) from error


def key_column(keys: Keys) -> pa.Array:
    data = np.ascontiguousarray(keys, dtype=np.uint8)
    buffers = [None, pa.py_buffer(data.tobytes())]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(data), buffers)


def number_column(values: npt.NDArray[Any]) -> pa.Array:
    """Turns [n] numbers into an Arrow array. Not by `pa.array`, which would import pandas (half a second)."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def numbers_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns the [n] numbers of an Arrow column without nulls. `to_numpy` would import pandas."""
    whole = column if isinstance(column, pa.Array) else column.combine_chunks()
    return np.from_dlpack(whole)


def keys_of(table: pa.Table) -> Keys:
    """Returns the [n, 16] keys in a table's column `key`."""
    column = table[KEY].combine_chunks()
    keys = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, 16)
    return keys[column.offset :][: len(column)]


def token_column(tokens: TokenLogps, is_null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    # A large list, because a run's values may have more tokens than 32-bit offsets can count.
    mask = None if is_null is None else pa.array(is_null)
    return pa.LargeListArray.from_arrays(
        number_column(tokens.offsets), number_column(tokens.values), mask=mask
    )


def tokens_of(table: pa.Table) -> TokenLogps:
    """Returns the values of a table's column `token_logps`; a null becomes a sequence without values."""
    column = table[TOKENS].combine_chunks()
    lengths = numbers_of(column.value_lengths().fill_null(0))
    return TokenLogps.of_lengths(numbers_of(column.flatten()), lengths)


def _ends(lengths: npt.NDArray[np.integer]) -> IntArray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
