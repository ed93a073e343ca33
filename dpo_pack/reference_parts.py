"""One part of the reference cache: a Parquet file named by the sha256 of its bytes.

    part-<sha256>.parquet    key          16 bytes, `data/keys.py`'s sequence_key
                             logps_sum    float64, nats
                             num_tokens   int32, of the completion
                             token_logps  list of float32, one a token; only where a loss needed them

Written aside, synced and renamed, so it is whole or absent; a byte that changes later shows in the name.

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

from dpo_pack.errors import CacheError
from dpo_pack.files import written_aside
from dpo_pack.key_index import IntArray, Keys

Floats = npt.NDArray[np.float64]

KEY, SUM, NUM_TOKENS, TOKENS = "key", "logps_sum", "num_tokens", "token_logps"
# Parts of a million sequences would have to be in memory whole to be checked.
MAX_PART_SEQUENCES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogps:
    """Log-probs of every completion token of n sequences, one sequence after another."""

    values: npt.NDArray[np.float32]  # [all tokens], nats
    offsets: IntArray  # [n + 1] where each sequence begins, and the end

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """[n] tokens of each sequence."""
        return np.diff(self.offsets)

    def of(self, sequence: int) -> npt.NDArray[np.float32]:
        """[L] the values of one sequence, a view."""
        return self.values[self.offsets[sequence] : self.offsets[sequence + 1]]

    def take(self, sequences: IntArray) -> TokenLogps:
        """The sequences at these positions, in that order, repetitions included."""
        lengths = self.lengths[sequences]
        offsets = _ends(lengths)
        from_here = np.repeat(self.offsets[sequences] - offsets[:-1], lengths)
        return TokenLogps(values=self.values[from_here + np.arange(offsets[-1])], offsets=offsets)

    @staticmethod
    def join(parts: Sequence[TokenLogps]) -> TokenLogps:
        """All sequences of the parts, one part after another."""
        lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
        values = [np.zeros(0, dtype=np.float32), *(part.values for part in parts)]
        return TokenLogps(values=np.concatenate(values), offsets=_ends(np.concatenate(lengths)))

    @staticmethod
    def of_lengths(values: npt.NDArray[np.float32], lengths: npt.NDArray[np.integer]) -> TokenLogps:
        return TokenLogps(values=values.astype(np.float32, copy=False), offsets=_ends(lengths))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceLogps:
    """Log-probs of n sequences under one model."""

    keys: Keys  # [n, 16]
    sums: Floats  # [n], nats
    num_tokens: npt.NDArray[np.integer]  # [n], of the completion
    tokens: TokenLogps | None = None  # of n sequences, where a loss needs them

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def join(parts: Sequence[SequenceLogps]) -> SequenceLogps:
        """All sequences of one or more parts; the parts all have per-token values, or none has."""
        tokens = [part.tokens for part in parts if part.tokens is not None]
        assert len(tokens) in (0, len(parts))
        return SequenceLogps(
            keys=np.concatenate([part.keys for part in parts]),
            sums=np.concatenate([part.sums for part in parts]),
            num_tokens=np.concatenate([part.num_tokens for part in parts]),
            tokens=TokenLogps.join(tokens) if tokens else None,
        )


def write_part(directory: Path, logps: SequenceLogps, metadata: Mapping[str, str]) -> Path:
    """Add a part to a namespace's directory. `metadata` says where the values come from.

    Raises CacheError when the disk refuses.
    """
    columns = {
        KEY: key_column(logps.keys),
        SUM: number_column(logps.sums.astype(np.float64, copy=False)),
        NUM_TOKENS: number_column(logps.num_tokens.astype(np.int32)),
    }
    if logps.tokens is not None:
        columns[TOKENS] = token_column(logps.tokens)
    table = pa.table(columns).replace_schema_metadata({f"dpo_pack.{k}": v for k, v in metadata.items()})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, use_dictionary=False)
    content = buffer.getvalue().to_pybytes()
    path = directory / f"part-{hashlib.sha256(content).hexdigest()}.parquet"
    with written_aside(path) as temporary:
        temporary.write_bytes(content)
    return path


def part_paths(directory: Path) -> list[Path]:
    """The parts of a namespace's directory, in the order of their names."""
    return sorted(directory.glob("part-*.parquet"))


def read_content(part: Path) -> bytes | None:
    """The part's bytes; None when another job has just moved it. Raises CacheError."""
    try:
        return part.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"cannot read {part}: {error.strerror}; mend its permissions or set reference.cache_dir"
        ) from error


def is_intact(part: Path, content: bytes) -> bool:
    """Whether the bytes are those the part was named after."""
    return part.stem == f"part-{hashlib.sha256(content).hexdigest()}"


def parse_part(part: Path, content: bytes, columns: Sequence[str]) -> pa.Table:
    """Those of `columns` that the part has. Raises CacheError for a file that is none of ours."""
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        known = [name for name in columns if name in file.schema_arrow.names]
        # Arrow's threads would let go of `content` when they like, and while Python ends that aborts it.
        return file.read(columns=known, use_threads=False)
    except pa.ArrowException as error:
        raise CacheError(f"{part} is no part of a reference cache; move it elsewhere") from error


def key_column(keys: Keys) -> pa.Array:
    data = np.ascontiguousarray(keys, dtype=np.uint8)
    buffers = [None, pa.py_buffer(data.tobytes())]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(data), buffers)


def number_column(values: npt.NDArray[Any]) -> pa.Array:
    """[n] numbers as an Arrow array without nulls. `pa.array` would import pandas, half a second's work."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


# Of Arrow's types of numbers, those that numpy calls otherwise.
_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def numbers_of(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """[n] numbers of an Arrow column without nulls. `to_numpy` would import pandas, too, and so would
    `to_pandas_dtype` in older releases."""
    name = str(column.type)
    dtype = np.dtype(_NUMPY_NAMES.get(name, name))
    chunks = [column] if isinstance(column, pa.Array) else column.chunks
    values = [np.zeros(0, dtype=dtype)]
    for chunk in chunks:
        assert chunk.null_count == 0
        if len(chunk):
            values.append(np.frombuffer(chunk.buffers()[1], dtype=dtype)[chunk.offset :][: len(chunk)])
    return values[1] if len(values) == 2 else np.concatenate(values)


def keys_of(table: pa.Table) -> Keys:
    """[n, 16] of a table's column `key`."""
    chunks = [np.zeros((0, 16), dtype=np.uint8)]
    for chunk in table[KEY].chunks:
        data = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
        chunks.append(data[16 * chunk.offset : 16 * (chunk.offset + len(chunk))].reshape(-1, 16))
    return np.concatenate(chunks)


def token_column(tokens: TokenLogps) -> pa.Array:
    # Large: a run's frozen values may have more tokens than 32-bit offsets reach.
    return pa.LargeListArray.from_arrays(number_column(tokens.offsets), number_column(tokens.values))


def tokens_of(table: pa.Table) -> TokenLogps:
    """The values of a table's column `token_logps`, which has no nulls."""
    parts = []
    for chunk in table[TOKENS].chunks:
        parts.append(TokenLogps.of_lengths(numbers_of(chunk.flatten()), numbers_of(chunk.value_lengths())))
    return TokenLogps.join(parts)


def _ends(lengths: npt.NDArray[np.integer]) -> IntArray:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
