"""Stores tokenised pairs on disk and reads them through a memory map.

A store is a directory with the token ids, one record for each pair, and a manifest. If a token has another
weight than 1, there is also a file with the weights of all tokens. A store is written under a
temporary name and then renamed, so it is whole or absent. A changed byte is noticed: opening a store
compares its manifest, records and weights with a checksum. The tokens of a pair are compared with their hash
only when they are read, so a store of gigabytes opens at once. P is the number of pairs; lengths are in
tokens.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.keys import KEY_BYTES, content_key, sequence_key
from dpo_pack.data.truncation import PairIds, TokenIds, TokenWeights
from dpo_pack.packing.lengths import PairLengths
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import read_json, write_json_atomically, written_aside

TOKEN_DTYPE, WEIGHT_DTYPE = np.dtype("<i4"), np.dtype("<f4")
RECORD_DTYPE = np.dtype(
    [
        ("prompt_length", "<i4"),
        ("chosen_length", "<i4"),
        ("rejected_length", "<i4"),
        ("shared_length", "<i4"),  # the common prefix of prompt + chosen and prompt + rejected
        ("weight", "<f4"),
        ("row_number", "<i8"),  # position in the source, from 1
        ("prompt_key", "u1", KEY_BYTES),  # sequence_key of the prompt alone
        ("chosen_key", "u1", KEY_BYTES),  # sequence_key of the prompt and chosen
        ("rejected_key", "u1", KEY_BYTES),
        ("whole_prompt_key", "u1", KEY_BYTES),
    ]
)
Records = NDArray[np.void]  # of RECORD_DTYPE

_TOKENS, _WEIGHTS, _RECORDS, _MANIFEST = "tokens.bin", "weights.bin", "records.bin", "manifest.json"
NO_TOKENS = np.zeros(0, dtype=TOKEN_DTYPE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStore:
    """Pairs as token ids: those of one source, mapped into memory read-only, or any pairs, in memory only."""

    tokens: TokenIds  # [total] prompt | chosen | rejected of each pair, one after another
    records: Records  # [P]
    # [total] the weight of each token in the sum of its completion's log-probs; None: all weights are 1.
    # Tokens of prompts have the weight 1, which nobody reads.
    token_weights: TokenWeights | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)  # the counts of the pass that wrote the store
    directory: Path | None = None  # None: the pairs are in memory only

    def damaged(self, row_number: int) -> CacheError:
        """Returns the error for changed tokens. Removes the manifest: the next run writes the store again."""
        remedy = "run the same command again, which writes this store again"
        try:
            self.forget()
        except OSError:
            remedy = "remove this directory and run the same command again"
        return CacheError(
            f"{self.directory} is damaged: its token ids of row {row_number} have changed; {remedy}"
        )

    def forget(self) -> None:
        """Removes the manifest, so that the store can be written again. Raises OSError."""
        if self.directory is not None:
            (self.directory / _MANIFEST).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Pairs of one or more sources: the arrays are in memory, the token ids in memory-mapped files."""

    stores: tuple[TokenStore, ...]
    source_indices: NDArray[np.int16]  # [P] position in `stores`
    offsets: NDArray[np.int64]  # [P] position of the pair's first token in its store
    prompt_lengths: NDArray[np.int32]  # [P]
    chosen_lengths: NDArray[np.int32]  # [P] EOS included
    rejected_lengths: NDArray[np.int32]  # [P]
    shared_lengths: NDArray[np.int32]  # [P] common prefix of both sequences, at least the prompt
    weights: NDArray[np.float32]  # [P] a factor of the pair's loss
    has_token_weights: NDArray[np.bool_]  # [P] a completion token of the pair has another weight than 1
    # [P] the sums of the completions' token weights, which are their lengths where all weights are 1. Losses
    # and metrics that divide by a length divide by these.
    chosen_scored: NDArray[np.float64]
    rejected_scored: NDArray[np.float64]
    row_numbers: NDArray[np.int64]  # [P] position in the source, from 1
    prompt_keys: NDArray[np.uint8]  # [P, 16]
    chosen_keys: NDArray[np.uint8]  # [P, 16] sequence_key of prompt and chosen
    rejected_keys: NDArray[np.uint8]  # [P, 16]
    whole_prompt_keys: NDArray[np.uint8]  # [P, 16] of the prompts in the source, before tokens were cut

    @staticmethod
    def of(stores: Sequence[TokenStore]) -> "PairTable":
        """Makes a table of all pairs of the stores, one store after another."""
        records = np.concatenate([store.records for store in stores])
        sizes = [len(store.records) for store in stores]
        # A column of the table has the name of a field of the records, with an "s" at its end.
        columns = {f"{name}s": np.ascontiguousarray(records[name]) for name in RECORD_DTYPE.fields or ()}
        weighed = (np.concatenate(columns) for columns in zip(*map(_weigh, stores), strict=True))
        differs, chosen_scored, rejected_scored = weighed
        return PairTable(
            stores=tuple(stores),
            source_indices=np.repeat(np.arange(len(stores), dtype=np.int16), sizes),
            offsets=np.concatenate([_offsets(store) for store in stores]),
            has_token_weights=differs,
            chosen_scored=chosen_scored,
            rejected_scored=rejected_scored,
            **columns,
        )

    @property
    def num_pairs(self) -> int:
        return len(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Returns 32 hex digits that name the pairs: ids, boundaries, all weights, sources and order."""
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for column in (self.chosen_keys, self.rejected_keys, self.weights, self.source_indices):
            digest.update(column.data)
        for store in self.stores:
            if store.token_weights is not None:
                digest.update(store.token_weights.data)
                digest.update(self.offsets.data)
        return digest.hexdigest()

    def prompt(self, pair: int) -> TokenIds:
        """Returns the token ids of the prompt as a view. Raises CacheError if the file has changed."""
        return self._sequence(pair, self.prompt_keys, 0, 0)[0]

    def chosen(self, pair: int) -> TokenIds:
        """Returns the token ids of the chosen completion as a view. Raises CacheError as `prompt` does."""
        return self._sequence(pair, self.chosen_keys, 0, self.chosen_lengths[pair])[1]

    def rejected(self, pair: int) -> TokenIds:
        """Returns the token ids of the rejected completion as a view. Raises CacheError as `prompt` does."""
        before, length = self.chosen_lengths[pair], self.rejected_lengths[pair]
        return self._sequence(pair, self.rejected_keys, before, length)[1]

    def token_weights(self, pair: int) -> tuple[TokenWeights, TokenWeights]:
        """Returns the weights of the chosen completion's tokens, and those of the rejected completion's."""
        lengths = int(self.chosen_lengths[pair]), int(self.rejected_lengths[pair])
        weights = self.stores[self.source_indices[pair]].token_weights
        if weights is None:
            return np.ones(lengths[0], dtype=WEIGHT_DTYPE), np.ones(lengths[1], dtype=WEIGHT_DTYPE)
        begin = int(self.offsets[pair]) + int(self.prompt_lengths[pair])
        middle = begin + lengths[0]
        return weights[begin:middle], weights[middle : middle + lengths[1]]

    def select(self, indices: NDArray[np.int64]) -> "PairTable":
        """Returns a table of the pairs at `indices`, in the order of `indices`."""
        columns = (column.name for column in fields(self) if column.name != "stores")
        return replace(self, **{name: getattr(self, name)[indices] for name in columns})

    def _sequence(
        self, pair: int, keys: NDArray[np.uint8], before: np.int32 | int, length: np.int32 | int
    ) -> tuple[TokenIds, TokenIds]:
        """Returns the prompt, and the completion that begins `before` tokens after the prompt's end.

        Raises CacheError if these tokens do not have the key that the record has, so they have changed.
        """
        store = self.stores[self.source_indices[pair]]
        begin = self.offsets[pair]
        end = begin + self.prompt_lengths[pair]
        prompt, completion = store.tokens[begin:end], store.tokens[end + before : end + before + length]
        if sequence_key(prompt, completion) != keys[pair].tobytes():
            raise store.damaged(int(self.row_numbers[pair]))
        return prompt, completion


def join_pairs(
    pairs: Sequence[PairIds],
    weights: Sequence[float],
    row_numbers: Sequence[int],
    whole_prompt_keys: Sequence[bytes] | None = None,
) -> TokenStore:
    """Puts pairs into a store in memory. `whole_prompt_keys` are not needed for uncut prompts."""
    records = np.zeros(len(pairs), dtype=RECORD_DTYPE)
    records["prompt_length"] = [len(pair.prompt) for pair in pairs]
    records["chosen_length"] = [len(pair.chosen) for pair in pairs]
    records["rejected_length"] = [len(pair.rejected) for pair in pairs]
    records["shared_length"] = [
        len(pair.prompt) + common_prefix_length(pair.chosen, pair.rejected) for pair in pairs
    ]
    records["weight"] = weights
    records["row_number"] = row_numbers
    records["prompt_key"] = _keys(sequence_key(pair.prompt, NO_TOKENS) for pair in pairs)
    records["whole_prompt_key"] = (
        records["prompt_key"] if whole_prompt_keys is None else _keys(whole_prompt_keys)
    )
    records["chosen_key"] = _keys(sequence_key(pair.prompt, pair.chosen) for pair in pairs)
    records["rejected_key"] = _keys(sequence_key(pair.prompt, pair.rejected) for pair in pairs)
    parts = [part for pair in pairs for part in (pair.prompt, pair.chosen, pair.rejected)]
    return TokenStore(
        tokens=np.concatenate([NO_TOKENS, *parts]), records=records, token_weights=_join_weights(pairs)
    )


def join_stores(stores: Sequence[TokenStore], summary: Mapping[str, Any]) -> TokenStore:
    """Puts the pairs of stores into one store in memory."""
    weights = None
    if any(store.token_weights is not None for store in stores):
        ones = (np.ones(len(store.tokens), dtype=WEIGHT_DTYPE) for store in stores)
        both = zip(stores, ones, strict=True)
        weights = np.concatenate([one if s.token_weights is None else s.token_weights for s, one in both])
    return TokenStore(
        tokens=np.concatenate([store.tokens for store in stores]),
        records=np.concatenate([store.records for store in stores]),
        token_weights=weights,
        summary=summary,
    )


def _join_weights(pairs: Sequence[PairIds]) -> TokenWeights | None:
    """Returns the weights of all tokens in a store's order; None if every weight is 1."""
    if all(pair.chosen_weights is None and pair.rejected_weights is None for pair in pairs):
        return None
    parts = []
    for pair in pairs:
        given = (
            (pair.prompt, None),
            (pair.chosen, pair.chosen_weights),
            (pair.rejected, pair.rejected_weights),
        )
        parts += [np.ones(len(ids), dtype=WEIGHT_DTYPE) if of is None else of for ids, of in given]
    weights = np.concatenate(parts)
    return None if (weights == 1).all() else weights


def common_prefix_length(ids: TokenIds, other_ids: TokenIds) -> int:
    """Returns the number of tokens in the common beginning of both arrays."""
    shorter = min(len(ids), len(other_ids))
    differs = ids[:shorter] != other_ids[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def write_store(
    directory: Path, batches: Iterable[TokenStore], summarize: Callable[[], dict[str, Any]]
) -> None:
    """Writes each batch when `batches` yields it. Calls `summarize` after the final batch.

    If another process has written this store in the meantime, its store stays. If `batches` raises
    an error, no file stays on the disk. Raises CacheError if the disk refuses the files.
    """
    with contextlib.suppress(_WrittenMeanwhile), written_aside(directory) as temporary:
        temporary.mkdir()
        with contextlib.ExitStack() as files:
            tokens, records = (
                files.enter_context((temporary / name).open("wb")) for name in (_TOKENS, _RECORDS)
            )
            weights, num_tokens = None, 0
            for batch in batches:
                if batch.token_weights is not None and weights is None:  # all earlier tokens count 1
                    weights = files.enter_context((temporary / _WEIGHTS).open("wb"))
                    weights.write(np.ones(num_tokens, dtype=WEIGHT_DTYPE).data)
                if weights is not None:
                    ones = np.ones(len(batch.tokens), dtype=WEIGHT_DTYPE)
                    weights.write((ones if batch.token_weights is None else batch.token_weights).data)
                tokens.write(batch.tokens.data)
                records.write(batch.records.tobytes())
                num_tokens += len(batch.tokens)
        summary = summarize()
        checksum = _checksum(*_map_files(temporary), summary)
        write_json_atomically(temporary / _MANIFEST, {"checksum": checksum, "summary": summary})
        if open_store(directory) is not None:
            raise _WrittenMeanwhile


def open_store(directory: Path) -> TokenStore | None:
    """Opens the store in `directory`. Returns None if no store is there, or if the store is damaged."""
    manifest = read_json(directory / _MANIFEST)
    try:
        tokens, records, weights = _map_files(directory)
    except (FileNotFoundError, ValueError):  # ValueError: a file is empty or ends within an entry
        return None
    except OSError as error:
        raise CacheError(f"cannot read {directory}: {error.strerror}; check its permissions") from error
    summary = manifest.get("summary") if isinstance(manifest, dict) else None
    if not isinstance(summary, dict) or manifest.get("checksum") != _checksum(
        tokens, records, weights, summary
    ):
        return None
    return TokenStore(
        tokens=tokens, records=records, token_weights=weights, summary=summary, directory=directory
    )


class _WrittenMeanwhile(Exception):
    """Another process has finished the same store first."""


def key_values(keys: NDArray[np.uint8]) -> NDArray[np.void]:
    """Turns [P, bytes] keys into [P] values, so that numpy sorts and compares each key as a whole."""
    return np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1]))).ravel()


def _offsets(store: TokenStore) -> NDArray[np.int64]:
    records = store.records
    sizes = records["prompt_length"].astype(np.int64) + records["chosen_length"] + records["rejected_length"]
    offsets: NDArray[np.int64] = np.cumsum(sizes) - sizes
    return offsets


def _weigh(store: TokenStore) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Returns [P] whether a token's weight is not 1, and the sums of weights of chosen and of rejected."""
    records, weights = store.records, store.token_weights
    chosen, rejected = (records[name].astype(np.float64) for name in ("chosen_length", "rejected_length"))
    if weights is None:
        return np.zeros(len(records), dtype=np.bool_), chosen, rejected
    chosen_begins = _offsets(store) + records["prompt_length"]
    middles = chosen_begins + records["chosen_length"]
    ends = middles + records["rejected_length"]
    # `reduceat` takes the values from each position to the next one. The last `end` is the end of the file.
    begins = np.stack((chosen_begins, middles, ends), axis=1).ravel()[:-1]
    sums = np.add.reduceat(weights, begins, dtype=np.float64)
    differs = np.logical_or.reduceat(weights != 1, begins)
    return differs[0::3] | differs[1::3], sums[0::3], sums[1::3]


def _keys(keys: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)


def _map_files(directory: Path) -> tuple[TokenIds, Records, TokenWeights | None]:
    weights = directory / _WEIGHTS
    return (
        np.asarray(np.memmap(directory / _TOKENS, dtype=TOKEN_DTYPE, mode="r")),
        np.asarray(np.memmap(directory / _RECORDS, dtype=RECORD_DTYPE, mode="r")),
        np.asarray(np.memmap(weights, dtype=WEIGHT_DTYPE, mode="r")) if weights.exists() else None,
    )


def _checksum(
    tokens: TokenIds, records: Records, weights: TokenWeights | None, summary: dict[str, Any]
) -> str:
    """Returns a hash of a store. Of the tokens only the count is hashed: records have the tokens' hashes."""
    parts = [len(tokens), hashlib.blake2b(records.view(np.uint8).data).hexdigest(), summary]
    if weights is not None:
        parts.append(hashlib.blake2b(weights.data).hexdigest())
    return content_key(parts)


def pair_lengths(table: PairTable) -> PairLengths:
    """Returns the lengths of a table's pairs in the form that the planner needs."""
    return PairLengths(
        prompt=table.prompt_lengths,
        chosen=table.chosen_lengths,
        rejected=table.rejected_lengths,
        shared=table.shared_lengths,
    )
