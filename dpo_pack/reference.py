"""Reference log-probs: a cache on disk keyed by content, and the pass that fills it.

The unit is a *sequence* (context and completion), not a pair: data that is paired, mixed, ordered or
subsampled another way reuses what is there. A namespace (`fingerprint.py`) is one directory of Parquet
parts, which pandas opens too:

    <cache_dir>/reference/<namespace>/namespace.json
    <cache_dir>/reference/<namespace>/part-<sha256 of its bytes>.parquet   key, logps_sum, num_tokens

Parts are only ever added, each whole or absent, so any number of jobs read and write at once without
locks. A part whose bytes do not match its name is set aside and its sequences are computed again.

Legend: P pairs, U unique sequences.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dpo_pack.data.packing import PairLengths, pack_sequences_longest_first, padded_rows
from dpo_pack.data.store import PairTable
from dpo_pack.errors import CacheError, ModelError
from dpo_pack.files import write_json_atomically, written_aside
from dpo_pack.fingerprint import namespace_digest
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.models import CompletionLogps

logger = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint8]  # [n, 16]
Floats = npt.NDArray[np.float64]

_SCHEMA = pa.schema([("key", pa.binary(16)), ("logps_sum", pa.float64()), ("num_tokens", pa.int32())])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReference:
    """Reference log-probs of a table's pairs: summed over each completion's tokens, nats, [P] each."""

    chosen: Floats
    rejected: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference values one run uses, kept in its own directory: nothing that happens to the shared
    cache later can change the run or its resumption."""

    keys: Keys  # [U, 16]
    sums: Floats  # [U]

    @staticmethod
    def take(cache: ReferenceCache, tables: Sequence[PairTable]) -> FrozenReference:
        """What `cache` holds of the tables' sequences. Raises CacheError when one is missing."""
        keys = _unique_keys(tables)
        sums = cache.lookup(keys)
        if np.isnan(sums).any():
            raise CacheError(
                f"{int(np.isnan(sums).sum())} reference log-probs have vanished from {cache.directory} since "
                "they were computed; run the command again"
            )
        return FrozenReference(keys=keys, sums=sums)

    @property
    def fingerprint(self) -> str:
        """Names the sequences and their values, to the last bit."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.keys).tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(self.sums).tobytes())
        return digest.hexdigest()

    def of(self, table: PairTable) -> PairReference:
        """The table's values. Raises CacheError when the run was frozen for other data."""
        frozen = _sortable(self.keys)
        sides = []
        for keys in (_sortable(table.chosen_keys), _sortable(table.rejected_keys)):
            places = np.searchsorted(frozen, keys).clip(max=len(frozen) - 1)
            if not np.array_equal(frozen[places], keys):
                raise CacheError("this run's reference.parquet is for other data; use another output_dir")
            sides.append(self.sums[places])
        return PairReference(chosen=sides[0], rejected=sides[1])

    def save(self, path: Path) -> None:
        with written_aside(path) as temporary:
            table = pa.table({"key": _key_column(self.keys), "logps_sum": self.sums})
            pq.write_table(table, temporary, write_page_checksum=True)

    @staticmethod
    def load(path: Path) -> FrozenReference:
        """Raises CacheError when the file is missing or damaged."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            return FrozenReference(keys=_keys_of(table), sums=table["logps_sum"].to_numpy())
        except (OSError, KeyError, pa.ArrowException) as error:
            raise CacheError(
                f"{path} is missing or damaged, so this run cannot go on as it began; start again with "
                "checkpoint.resume=never and --overwrite"
            ) from error


class ReferenceCache:
    """Reference log-probs of one namespace on disk."""

    def __init__(self, cache_dir: Path, namespace: dict[str, Any]) -> None:
        """Opens, or creates, the namespace's directory. Raises CacheError when that is not possible."""
        self.directory = cache_dir / "reference" / namespace_digest(namespace)
        if not (self.directory / "namespace.json").is_file():
            write_json_atomically(self.directory / "namespace.json", namespace)

    def lookup(self, keys: Keys) -> Floats:
        """[n, 16] sequence keys -> [n] summed log-probs, NaN where the cache has none.

        Reads one part at a time; memory grows with `keys`, not with the cache.
        """
        wanted, inverse = np.unique(_sortable(keys), return_inverse=True)
        values = np.full(len(wanted), np.nan)
        for part in sorted(self.directory.glob("part-*.parquet")):
            table = self._read(part)
            if table is not None and len(wanted):
                part_keys = _sortable(_keys_of(table))
                places = np.searchsorted(wanted, part_keys).clip(max=len(wanted) - 1)
                found = wanted[places] == part_keys
                values[places[found]] = table["logps_sum"].to_numpy()[found]
        return values[inverse]

    def append(self, keys: Keys, sums: Floats, num_tokens: npt.NDArray[np.integer]) -> Path:
        """Add a part holding [n, 16] keys, [n] sums and [n] token counts. Raises CacheError."""
        columns = [_key_column(keys), pa.array(sums, pa.float64()), pa.array(num_tokens, pa.int32())]
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), buffer)
        content = buffer.getvalue().to_pybytes()
        path = self.directory / f"part-{hashlib.sha256(content).hexdigest()}.parquet"
        with written_aside(path) as temporary:
            temporary.write_bytes(content)
        return path

    def _read(self, part: Path) -> pa.Table | None:
        try:
            content = part.read_bytes()
        except FileNotFoundError:  # another job has just set it aside
            return None
        except OSError as error:
            raise CacheError(
                f"cannot read {part}: {error.strerror}; mend its permissions or set reference.cache_dir"
            ) from error
        if part.stem != f"part-{hashlib.sha256(content).hexdigest()}":
            aside = part.with_suffix(".damaged")
            with contextlib.suppress(OSError):  # another job was faster, or we may only read here
                part.rename(aside)
            logger.warning(
                "%s is damaged; set aside as %s, its log-probs are computed again", part, aside.name
            )
            return None
        return pq.read_table(pa.BufferReader(content))


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingSequences:
    """The sequences of some tables that the cache lacks, each once, as groups ready for rows.

    A pair that lacks both its sequences is one group, so the pass computes its prompt once.
    """

    tables: tuple[PairTable, ...]
    table_indices: npt.NDArray[np.int64]  # [groups]
    pair_indices: npt.NDArray[np.int64]  # [groups]
    needs_chosen: npt.NDArray[np.bool_]  # [groups]
    needs_rejected: npt.NDArray[np.bool_]  # [groups]
    num_unique: int  # sequences in the tables, each counted once
    num_cached: int  # of those, found in the cache

    @property
    def num_sequences(self) -> int:
        return int(self.needs_chosen.sum() + self.needs_rejected.sum())

    def group(self, number: int) -> Group:
        table, pair = self.tables[self.table_indices[number]], int(self.pair_indices[number])
        completions = []
        if self.needs_chosen[number]:
            completions.append(table.chosen(pair))
        if self.needs_rejected[number]:
            completions.append(table.rejected(pair))
        return Group(context=table.prompt(pair), completions=tuple(completions))

    def padded_tokens(self) -> npt.NDArray[np.int64]:
        """[groups]: tokens each takes in a padded batch of its own, counted as two sequences."""
        tokens = np.zeros(len(self.pair_indices), dtype=np.int64)
        for number, table in enumerate(self.tables):
            here = self.table_indices == number
            tokens[here] = pair_lengths(table).padded_tokens()[self.pair_indices[here]]
        return tokens

    def keys(self, number: int) -> Keys:
        """[1 or 2, 16]: the keys of a group's sequences, chosen first."""
        table, pair = self.tables[self.table_indices[number]], int(self.pair_indices[number])
        both = np.stack((table.chosen_keys[pair], table.rejected_keys[pair]))
        needed: Keys = both[[bool(self.needs_chosen[number]), bool(self.needs_rejected[number])]]
        return needed

    def row_tokens(self, *, share_prompt: bool) -> npt.NDArray[np.int64]:
        """[groups]: tokens each takes in a packed row."""
        tokens = np.zeros(len(self.pair_indices), dtype=np.int64)
        for number, table in enumerate(self.tables):
            here = self.table_indices == number
            pairs = self.pair_indices[here]
            lengths = pair_lengths(table)
            both = lengths.row_tokens(share_prompt=share_prompt)[pairs]
            prompt = lengths.prompt[pairs].astype(np.int64)
            only_chosen, only_rejected = prompt + lengths.chosen[pairs], prompt + lengths.rejected[pairs]
            chosen, rejected = self.needs_chosen[here], self.needs_rejected[here]
            tokens[here] = np.where(chosen & rejected, both, np.where(chosen, only_chosen, only_rejected))
        return tokens


def pair_lengths(table: PairTable) -> PairLengths:
    """The planner's view of a table's lengths."""
    return PairLengths(
        prompt=table.prompt_lengths,
        chosen=table.chosen_lengths,
        rejected=table.rejected_lengths,
        shared=table.shared_lengths,
    )


def find_missing(cache: ReferenceCache, tables: Sequence[PairTable]) -> MissingSequences:
    """Which sequences of `tables` have no log-prob yet; of equal ones, the first is chosen."""
    sides = [np.stack((table.chosen_keys, table.rejected_keys), axis=1) for table in tables]
    keys = np.concatenate(sides).reshape(-1, 16)
    _, first = np.unique(_sortable(keys), return_index=True)
    absent = np.zeros(len(keys), dtype=np.bool_)
    absent[first] = np.isnan(cache.lookup(keys[first]))
    needs = absent.reshape(-1, 2)  # [all pairs, (chosen, rejected)]
    sizes = [table.num_pairs for table in tables]
    table_indices = np.repeat(np.arange(len(tables)), sizes)
    pair_indices = np.concatenate([np.arange(size) for size in sizes])
    rows = np.flatnonzero(needs.any(axis=1))
    return MissingSequences(
        tables=tuple(tables),
        table_indices=table_indices[rows],
        pair_indices=pair_indices[rows],
        needs_chosen=needs[rows, 0],
        needs_rejected=needs[rows, 1],
        num_unique=len(first),
        num_cached=len(first) - int(absent.sum()),
    )


@torch.no_grad()
def compute_missing(
    cache: ReferenceCache,
    missing: MissingSequences,
    scorer: CompletionLogps,
    *,
    token_budget: int,
    share_prompt: bool,
    pad_token_id: int,
    device: torch.device,
    progress: Callable[[int], None],
    write_every_seconds: float = 20.0,
) -> None:
    """Fill the cache: rows of similar lengths up to `token_budget`, longest first, without gradients.

    `progress` is told the number of sequences finished with each row. A killed pass loses what was
    computed since the last part was written, an interrupted one nothing. Raises CacheError when the disk
    refuses, ModelError when a log-prob is not finite.
    """
    is_packed = scorer.backend is not None
    tokens = missing.row_tokens(share_prompt=share_prompt and is_packed)
    if is_packed:
        rows = pack_sequences_longest_first(tokens, token_budget)
    else:
        rows = padded_rows(missing.padded_tokens(), token_budget)
    finished: list[_FinishedRow] = []
    written = time.monotonic()
    try:
        for members in rows:
            groups = [missing.group(int(member)) for member in members]
            result = scorer(_row(groups, is_packed, share_prompt, pad_token_id, device))
            keys = [missing.keys(int(member)) for member in members]
            sums = result.sums.cpu().numpy()
            _require_finite(sums, np.repeat(members, [len(group_keys) for group_keys in keys]), missing)
            # One operation: a signal cannot come between a row's keys and its values.
            finished.append((np.concatenate(keys), sums, result.num_tokens.cpu().numpy()))
            progress(len(sums))
            if time.monotonic() - written > write_every_seconds:
                _write(cache, finished)
                finished, written = [], time.monotonic()
    finally:
        if finished:
            _write(cache, finished)


# A row's sequence keys [S, 16], summed log-probs [S] and token counts [S].
_FinishedRow = tuple[Keys, Floats, npt.NDArray[np.integer]]


def _write(cache: ReferenceCache, finished: Sequence[_FinishedRow]) -> None:
    keys, sums, counts = (np.concatenate(column) for column in zip(*finished, strict=True))
    cache.append(keys, sums, counts)


def _require_finite(sums: Floats, groups: npt.NDArray[np.int64], missing: MissingSequences) -> None:
    """sums: [S] of a row's sequences, groups: [S] which group each belongs to."""
    wrong = np.flatnonzero(~np.isfinite(sums))
    if len(wrong):
        group = groups[wrong[0]]
        table, pair = missing.tables[missing.table_indices[group]], missing.pair_indices[group]
        raise ModelError(
            f"the reference model gives row {table.row_numbers[pair]} of its source a log-prob of "
            f"{sums[wrong[0]]}; check its weights, or give it more range with model.dtype: float32"
        )


def _unique_keys(tables: Sequence[PairTable]) -> Keys:
    """[U, 16], in the order `_sortable` sorts by."""
    keys = np.concatenate([side for table in tables for side in (table.chosen_keys, table.rejected_keys)])
    _, first = np.unique(_sortable(keys), return_index=True)
    unique: Keys = keys[first]
    return unique


def _row(
    groups: Sequence[Group], is_packed: bool, share_prompt: bool, pad_token_id: int, device: torch.device
) -> Row:
    if is_packed:
        return packed_row(layout_row(groups, share_prompt=share_prompt), device)
    return padded_row(groups, pad_token_id=pad_token_id, device=device)


def _sortable(keys: Keys) -> npt.NDArray[np.bytes_]:
    """[n, 16] -> [n] values numpy can sort.

    S16 drops trailing zero bytes, which cannot make two 16-byte keys equal.
    """
    return np.ascontiguousarray(keys).view("S16").ravel()


def _key_column(keys: Keys) -> pa.Array:
    data = np.ascontiguousarray(keys, dtype=np.uint8)
    buffers = [None, pa.py_buffer(data.tobytes())]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(data), buffers)


def _keys_of(table: pa.Table) -> Keys:
    column = table["key"].combine_chunks()
    chunk = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    data = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
    return data[16 * chunk.offset : 16 * (chunk.offset + len(chunk))].reshape(-1, 16)
