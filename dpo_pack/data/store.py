"""Tokenised pairs on disk, read through a memory map.

P pairs; lengths in tokens. A store is a directory with the token ids, one record per pair and a manifest.
It is written beside its final place and renamed, so it is whole or absent.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.keys import KEY_BYTES, sequence_key
from dpo_pack.data.truncation import PairIds, TokenIds
from dpo_pack.errors import CacheError
from dpo_pack.files import read_json, write_json_atomically, written_aside

TOKEN_DTYPE = np.dtype("<i4")
RECORD_DTYPE = np.dtype(
    [
        ("prompt_length", "<i4"),
        ("chosen_length", "<i4"),
        ("rejected_length", "<i4"),
        ("shared_length", "<i4"),  # common prefix of prompt + chosen and prompt + rejected
        ("weight", "<f4"),
        ("row_number", "<i8"),  # in the source, from 1
        ("prompt_key", "u1", KEY_BYTES),
        ("chosen_key", "u1", KEY_BYTES),  # sequence_key of the prompt and chosen
        ("rejected_key", "u1", KEY_BYTES),
    ]
)
Records = NDArray[np.void]  # of RECORD_DTYPE

_TOKENS, _RECORDS, _MANIFEST = "tokens.bin", "records.bin", "manifest.json"
_NO_TOKENS = np.zeros(0, dtype=TOKEN_DTYPE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedPairs:
    """Pairs on their way into a store."""

    tokens: TokenIds  # [total] prompt | chosen | rejected of each pair, one after another
    records: Records  # [P]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStore:
    """The pairs of one source, mapped read-only."""

    directory: Path
    fingerprint: str  # of the pairs: ids, boundaries, weights and their order
    tokens: TokenIds  # [total]
    records: Records  # [P]
    summary: dict[str, Any]  # what was counted when it was written


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Pairs of one or more sources: columns in memory, token ids in the sources' memory maps."""

    stores: tuple[TokenStore, ...]
    source_indices: NDArray[np.int16]  # [P] position in `stores`
    offsets: NDArray[np.int64]  # [P] where the pair begins in its store's tokens
    prompt_lengths: NDArray[np.int32]  # [P]
    chosen_lengths: NDArray[np.int32]  # [P] EOS included
    rejected_lengths: NDArray[np.int32]  # [P]
    shared_lengths: NDArray[np.int32]  # [P] common prefix of the two sequences, at least the prompt
    weights: NDArray[np.float32]  # [P] of the pair's loss
    row_numbers: NDArray[np.int64]  # [P] in the source, from 1
    prompt_keys: NDArray[np.uint8]  # [P, 16]
    chosen_keys: NDArray[np.uint8]  # [P, 16] sequence_key of prompt and chosen
    rejected_keys: NDArray[np.uint8]  # [P, 16]

    @staticmethod
    def of(stores: Sequence[TokenStore]) -> "PairTable":
        """All pairs of the stores, one store after another."""
        records = np.concatenate([store.records for store in stores])
        sizes = [len(store.records) for store in stores]
        return PairTable(
            stores=tuple(stores),
            source_indices=np.repeat(np.arange(len(stores), dtype=np.int16), sizes),
            offsets=np.concatenate([_offsets(store) for store in stores]),
            prompt_lengths=np.ascontiguousarray(records["prompt_length"]),
            chosen_lengths=np.ascontiguousarray(records["chosen_length"]),
            rejected_lengths=np.ascontiguousarray(records["rejected_length"]),
            shared_lengths=np.ascontiguousarray(records["shared_length"]),
            weights=np.ascontiguousarray(records["weight"]),
            row_numbers=np.ascontiguousarray(records["row_number"]),
            prompt_keys=np.ascontiguousarray(records["prompt_key"]),
            chosen_keys=np.ascontiguousarray(records["chosen_key"]),
            rejected_keys=np.ascontiguousarray(records["rejected_key"]),
        )

    @property
    def num_pairs(self) -> int:
        return len(self.offsets)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name the pairs: ids, boundaries, weights, sources and order."""
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for column in (self.chosen_keys, self.rejected_keys, self.weights, self.source_indices):
            digest.update(column.data)
        return digest.hexdigest()

    def prompt(self, pair: int) -> NDArray[np.int32]:
        """Token ids, a view."""
        return self._tokens(pair, 0, self.prompt_lengths[pair])

    def chosen(self, pair: int) -> NDArray[np.int32]:
        """Token ids of the completion, a view."""
        return self._tokens(pair, self.prompt_lengths[pair], self.chosen_lengths[pair])

    def rejected(self, pair: int) -> NDArray[np.int32]:
        """Token ids of the completion, a view."""
        before = self.prompt_lengths[pair] + self.chosen_lengths[pair]
        return self._tokens(pair, before, self.rejected_lengths[pair])

    def select(self, indices: NDArray[np.int64]) -> "PairTable":
        """The pairs at `indices`, in that order."""
        return replace(
            self,
            source_indices=self.source_indices[indices],
            offsets=self.offsets[indices],
            prompt_lengths=self.prompt_lengths[indices],
            chosen_lengths=self.chosen_lengths[indices],
            rejected_lengths=self.rejected_lengths[indices],
            shared_lengths=self.shared_lengths[indices],
            weights=self.weights[indices],
            row_numbers=self.row_numbers[indices],
            prompt_keys=self.prompt_keys[indices],
            chosen_keys=self.chosen_keys[indices],
            rejected_keys=self.rejected_keys[indices],
        )

    def _tokens(self, pair: int, before: np.int32 | int, length: np.int32) -> NDArray[np.int32]:
        start = self.offsets[pair] + before
        tokens: NDArray[np.int32] = self.stores[self.source_indices[pair]].tokens[start : start + length]
        return tokens


def join_pairs(
    pairs: Sequence[PairIds], weights: Sequence[float], row_numbers: Sequence[int]
) -> TokenizedPairs:
    """Lays pairs out as a store holds them."""
    records = np.zeros(len(pairs), dtype=RECORD_DTYPE)
    records["prompt_length"] = [len(pair.prompt) for pair in pairs]
    records["chosen_length"] = [len(pair.chosen) for pair in pairs]
    records["rejected_length"] = [len(pair.rejected) for pair in pairs]
    records["shared_length"] = [
        len(pair.prompt) + common_prefix_length(pair.chosen, pair.rejected) for pair in pairs
    ]
    records["weight"] = weights
    records["row_number"] = row_numbers
    records["prompt_key"] = _keys(sequence_key(pair.prompt, _NO_TOKENS) for pair in pairs)
    records["chosen_key"] = _keys(sequence_key(pair.prompt, pair.chosen) for pair in pairs)
    records["rejected_key"] = _keys(sequence_key(pair.prompt, pair.rejected) for pair in pairs)
    parts = [part for pair in pairs for part in (pair.prompt, pair.chosen, pair.rejected)]
    return TokenizedPairs(tokens=np.concatenate([_NO_TOKENS, *parts]), records=records)


def common_prefix_length(ids: TokenIds, other_ids: TokenIds) -> int:
    """Tokens that both begin with."""
    shorter = min(len(ids), len(other_ids))
    differs = ids[:shorter] != other_ids[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def write_store(
    directory: Path, batches: Iterable[TokenizedPairs], summarize: Callable[[], dict[str, Any]]
) -> None:
    """Writes batches as they come; `summarize` is called after the last one.

    Where another process has written the same store meanwhile, that one stays. What `batches` raises
    leaves no trace. Raises CacheError when the disk refuses.
    """
    try:
        with written_aside(directory) as temporary:
            temporary.mkdir()
            with (temporary / _TOKENS).open("wb") as tokens, (temporary / _RECORDS).open("wb") as records:
                for batch in batches:
                    tokens.write(batch.tokens.data)
                    records.write(batch.records.tobytes())
                sizes = {_TOKENS: tokens.tell(), _RECORDS: records.tell()}
            with (temporary / _RECORDS).open("rb") as records:
                fingerprint = _fingerprint(np.fromfile(records, dtype=RECORD_DTYPE))
            manifest = {"fingerprint": fingerprint, "size_bytes": sizes, "summary": summarize()}
            write_json_atomically(temporary / _MANIFEST, manifest)
            if open_store(directory) is not None:
                raise _WrittenMeanwhile
    except _WrittenMeanwhile:
        pass


def open_store(directory: Path) -> TokenStore | None:
    """The store in `directory`; None when there is none, or when it is damaged and to be written again."""
    manifest = read_json(directory / _MANIFEST)
    try:
        sizes = {name: (directory / name).stat().st_size for name in (_TOKENS, _RECORDS)}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"cannot read {directory}: {error.strerror}; check its permissions") from error
    if not isinstance(manifest, dict) or manifest.get("size_bytes") != sizes or 0 in sizes.values():
        return None
    return TokenStore(
        directory=directory,
        fingerprint=manifest["fingerprint"],
        tokens=np.asarray(np.memmap(directory / _TOKENS, dtype=TOKEN_DTYPE, mode="r")),
        records=np.asarray(np.memmap(directory / _RECORDS, dtype=RECORD_DTYPE, mode="r")),
        summary=manifest["summary"],
    )


class _WrittenMeanwhile(Exception):
    """Another process has finished the same store first."""


def _offsets(store: TokenStore) -> NDArray[np.int64]:
    records = store.records
    sizes = records["prompt_length"].astype(np.int64) + records["chosen_length"] + records["rejected_length"]
    offsets: NDArray[np.int64] = np.cumsum(sizes) - sizes
    return offsets


def _keys(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)


def _fingerprint(records: Records) -> str:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for name in ("chosen_key", "rejected_key", "weight"):
        digest.update(np.ascontiguousarray(records[name]).data)
    return digest.hexdigest()
