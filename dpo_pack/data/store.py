"""Hashes of content; stores, which are tokenised pairs on disk; and tables of the pairs of several stores.

A store is a directory with the token ids, one record for each pair, a manifest, and which tokens are scored
unless all are. It is written under a temporary name and then renamed, so it is whole or absent. Opening it
compares all but the token ids with a checksum; those of a pair are compared with their hash when they are
read. A large source's store names those of its ranges of rows, see ingest.py. P: number of pairs.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.images import CONTENT, ImageJoiner, Pixels, ReadImage, StoredImages
from dpo_pack.data.values import BadRow
from dpo_pack.packing.lengths import (
    AnyIntArray,
    Bools,
    FloatArray,
    Group,
    IntArray,
    ModelShape,
    PairLengths,
    common_prefix_length,
)
from dpo_pack.system.errors import CacheError, DataError
from dpo_pack.system.files import Json, add_to_json, read_json, write_json_atomically, writing, written_aside

KEY_BYTES = 16
TokenIds = NDArray[np.int32]
Keys = NDArray[np.uint8]  # [n, 16], hashes
TOKEN_DTYPE = np.dtype("<i4")
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
        ("pair_key", "u1", KEY_BYTES),  # `pair_key` of tokenization.py; zeros of a pair that no row has
        ("score_margin", "<f8"),  # score of chosen - score of rejected; NaN: the row has none
    ]
)
_KEYS = ("prompt_key", "chosen_key", "rejected_key", "whole_prompt_key", "pair_key")

_TOKENS, _SCORED, _RECORDS, _MANIFEST = "tokens.bin", "scored.bin", "records.bin", "manifest.json"
_LARGEST = "largest_token_id"  # in the summary
NO_TOKENS = np.zeros(0, dtype=TOKEN_DTYPE)


def content_key(content: object) -> str:
    """Returns 32 hex digits that name a JSON-able value."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


_FileHashes = dict[str, tuple[str, str]]  # path -> a stamp of the file's state, sha256


def file_hashes(paths: Iterable[Path], memo_path: Path) -> list[str]:
    """Returns sha256 of each file's bytes, in hex. The JSON file `memo_path` keeps them for later calls."""
    memo: _FileHashes = read_json(memo_path, _FileHashes) or {}
    hashes, added = [], _FileHashes()
    try:
        for path in paths:
            status = path.stat()
            # Every change of content changes ctime, even if a program sets mtime back (cp -p, rsync -t).
            stamp = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
            name = str(path.resolve())
            if name not in memo or memo[name][0] != stamp:
                with path.open("rb") as file:
                    memo[name] = added[name] = stamp, hashlib.file_digest(file, "sha256").hexdigest()
            hashes.append(memo[name][1])
    finally:  # after Ctrl-C the files that were read are not read again
        if added:
            add_to_json(memo_path, _FileHashes, added)
    return hashes


def path_hash(path: Path, memo_path: Path) -> str:
    """Returns sha256 of a file, or a key of names and contents of a directory's files, except hidden ones."""
    if path.is_file():
        return file_hashes([path], memo_path)[0]
    files = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
    names = [name for name in files if not any(part.startswith(".") for part in name.parts)]
    hashes = file_hashes((path / name for name in names), memo_path)
    return content_key([[name.as_posix(), digest] for name, digest in zip(names, hashes, strict=True)])


def sequence_key(
    prompt_ids: AnyIntArray, completion_ids: AnyIntArray, images: bytes = b"", scored: Bools | None = None
) -> bytes:
    """Returns 16 bytes that name a sequence: blake2b of the prompt's length (int64, little-endian like all),
    the ids (int32), `StoredImages.keys_of` and, unless all are scored, a bit for each completion token."""
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(np.ascontiguousarray(prompt_ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(completion_ids, dtype="<i4").data)
    digest.update(images)
    if scored is not None and not scored.all():
        digest.update(np.packbits(scored).data)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStore:
    """Pairs as token ids: those of one source, mapped into memory read-only, or any pairs, in memory only."""

    tokens: TokenIds  # [total] prompt | chosen | rejected of each pair, one after another
    records: NDArray[np.void]  # [P] of RECORD_DTYPE
    # [total] whether the token's log-prob is in the sum of its completion (of a prompt's tokens nobody reads
    # it); None: all are.
    scored: Bools | None = None
    images: StoredImages | None = None  # None: no pair has one
    summary: Mapping[str, Any] = field(default_factory=dict)  # the counts of the pass that wrote the store
    directory: Path | None = None  # None: the pairs are in memory only
    label: str = ""  # the source's path or hub id, as the user wrote it
    ranges: tuple["TokenStore", ...] = ()  # if there are some, they have all tokens and records
    rows_before: int = 0  # of a range: rows of the source before it; its records count rows from here

    @staticmethod
    def of_ranges(ranges: Iterable["TokenStore"], summary: Mapping[str, Any], **more: Any) -> "TokenStore":
        """Joins stores, which become the `ranges` of one; `more`: its other fields."""
        empty = np.zeros(0, dtype=RECORD_DTYPE)
        return TokenStore(tokens=NO_TOKENS, records=empty, summary=summary, ranges=tuple(ranges), **more)

    @property
    def largest_token_id(self) -> int:
        """Of a store without ranges. Reads all tokens if it is in memory only, or of an earlier release."""
        known: int | None = self.summary.get(_LARGEST)
        return int(self.tokens.max(initial=0)) if known is None else known

    def damaged(self, row_number: int) -> CacheError:
        """Returns the error for changed tokens. Removes the manifest: the next run writes the store again."""
        remedy = "run the same command again, which writes this store again"
        try:
            self.forget()
        except CacheError:
            remedy = "remove this directory and run the same command again"
        return CacheError(
            f"{self.directory} is damaged: its token ids of row {row_number} have changed; {remedy}"
        )

    def read_image(self, image: int) -> Pixels:
        """Returns [height, width, 3]. Raises DataError, and forgets the store, if the image has changed."""
        assert self.images is not None
        try:
            return self.images.read(image)
        except BadRow as bad:
            is_there = isinstance(bad.__cause__, OSError) and not isinstance(
                bad.__cause__, FileNotFoundError | NotADirectoryError
            )  # but it could not be read now, which may pass
            with contextlib.suppress(CacheError):
                if not is_there:
                    self.forget()
            pairs = self.images.pairs
            begin = pairs["begin"][np.argmax(pairs["image"] == image)]
            position = np.searchsorted(_measure_tokens(self)[0], begin)
            row = self.records["row_number"][position] + self.rows_before
            remedy = "restore the file, or start again with --overwrite"
            if self.images.path_of(image) is None:
                remedy = "run the same command again, which writes this store again"
            raise DataError(f"{self.label} row {row}: {bad.detail}; {remedy}") from bad

    def forget(self) -> None:
        """Removes the manifest, so that the store can be written again. Raises CacheError."""
        if self.directory is not None:
            with writing(self.directory):
                (self.directory / _MANIFEST).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTable:
    """Pairs of one or more sources: the arrays are in memory, the token ids in memory-mapped files."""

    parts: tuple[TokenStore, ...]  # the sources' stores, or their ranges
    part_indices: NDArray[np.int32]  # [P] position in `parts`
    source_indices: NDArray[np.int16]  # [P]
    offsets: IntArray  # [P] position of the pair's first token in its part
    prompt_lengths: NDArray[np.int32]  # [P]
    chosen_lengths: NDArray[np.int32]  # [P] EOS included
    rejected_lengths: NDArray[np.int32]  # [P]
    shared_lengths: NDArray[np.int32]  # [P] common prefix of both sequences, at least the prompt
    weights: NDArray[np.float32]  # [P] a factor of the pair's loss
    # [P] the scored tokens of the completions. Losses and metrics that divide by a length divide by these.
    chosen_scored: FloatArray
    rejected_scored: FloatArray
    row_numbers: IntArray  # [P] position in the source, from 1
    prompt_keys: Keys  # [P, 16]
    chosen_keys: Keys  # [P, 16] sequence_key of prompt and chosen
    rejected_keys: Keys  # [P, 16]
    whole_prompt_keys: Keys  # [P, 16] of the prompts in the source, before tokens were cut
    pair_keys: Keys  # [P, 16] of the pairs in the source, see `pair_names`
    score_margins: FloatArray  # [P] score of chosen - score of rejected; NaN: there is none
    # [P] a hash of the tokens that the prompt has in common with others, and their number; 0: beginnings.py
    # has found none, or nobody has asked it.
    beginnings: IntArray
    beginning_lengths: NDArray[np.int32]

    @staticmethod
    def of(stores: Sequence[TokenStore]) -> "PairTable":
        """Makes a table of all pairs of the stores, one store after another."""
        parts = [replace(part, label=store.label) for store in stores for part in store.ranges or (store,)]
        sources = [number for number, store in enumerate(stores) for _ in store.ranges or (store,)]
        sizes = [len(part.records) for part in parts]
        # A column of the table has the name of a field of the records, with an "s" at its end.
        names = RECORD_DTYPE.fields or ()
        columns = {f"{name}s": np.concatenate([part.records[name] for part in parts]) for name in names}
        columns["row_numbers"] += np.repeat([part.rows_before for part in parts], sizes)
        of_tokens = (np.concatenate(arrays) for arrays in zip(*map(_measure_tokens, parts), strict=True))
        offsets, chosen_scored, rejected_scored = of_tokens
        return PairTable(
            parts=tuple(parts),
            part_indices=np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
            source_indices=np.repeat(np.array(sources, dtype=np.int16), sizes),
            offsets=offsets,
            chosen_scored=chosen_scored,
            rejected_scored=rejected_scored,
            beginnings=np.zeros(sum(sizes), dtype=np.int64),
            beginning_lengths=np.zeros(sum(sizes), dtype=np.int32),
            **columns,
        )

    @property
    def num_pairs(self) -> int:
        return len(self.offsets)

    @property
    def pair_names(self) -> list[str]:
        """Returns for each pair 32 hex digits, a hash of its texts and images as its row has them."""
        return [key.tobytes().hex() for key in self.pair_keys]

    @property
    def fingerprint(self) -> str:
        """Returns 32 hex digits that name the pairs: ids, scored tokens, weights, sources and order."""
        digest = hashlib.blake2b(digest_size=KEY_BYTES)
        for column in (self.chosen_keys, self.rejected_keys, self.weights, self.source_indices):
            digest.update(column.data)
        return digest.hexdigest()

    def group(self, pair: int, sides: Iterable[bool] = (True, True)) -> Group:
        """Returns the token ids, as views, of the prompt and of the completions that are True in `sides`.
        Raises CacheError if they do not have the keys that the record has."""
        store, begin = self.parts[self.part_indices[pair]], int(self.offsets[pair])
        middle = begin + int(self.prompt_lengths[pair])
        end = middle + int(self.chosen_lengths[pair])
        prompt, last = store.tokens[begin:middle], end + int(self.rejected_lengths[pair])
        both = ((self.chosen_keys, slice(middle, end)), (self.rejected_keys, slice(end, last)))
        read = [one for one, is_read in zip(both, sides, strict=True) if is_read]
        images, numbers = b"", tuple[int, ...]()
        if store.images is not None:
            images, numbers = store.images.keys_of(begin), store.images.of_pair(begin)
        for keys, part in read or [(self.prompt_keys, slice(0))]:
            scored = None if store.scored is None else store.scored[part]
            if sequence_key(prompt, store.tokens[part], images, scored) != keys[pair].tobytes():
                raise store.damaged(int(self.row_numbers[pair]))
        return Group(
            context=prompt,
            completions=tuple(store.tokens[part] for _, part in read),
            scored=None if store.scored is None else tuple(store.scored[part] for _, part in read),
            images=tuple(partial(store.read_image, number) for number in numbers),
            beginning=int(self.beginning_lengths[pair]),
        )

    def select(self, indices: IntArray | slice) -> "PairTable":
        """Returns a table of the pairs at `indices`, in the order of `indices`."""
        columns = (column.name for column in fields(self) if column.name != "parts")
        return replace(self, **{name: getattr(self, name)[indices] for name in columns})


def join_pairs(
    pairs: Sequence[Group],
    weights: Sequence[float],
    row_numbers: Sequence[int],
    whole_prompt_keys: Sequence[bytes] | None = None,
    images: Sequence[Sequence[ReadImage]] = (),
    processor: str = "",
    pair_keys: Sequence[bytes] = (),
    score_margins: Sequence[float] | float = math.nan,
) -> TokenStore:
    """Puts pairs into a store in memory; images: those of each pair, read for `processor`, a fingerprint."""
    parts = [(pair.context, *pair.completions) for pair in pairs]  # (prompt, chosen, rejected)
    tokens = np.concatenate([NO_TOKENS, *(ids for of_pair in parts for ids in of_pair)])
    are_scored = np.ones(len(tokens), dtype=np.bool_)
    records = np.zeros(len(pairs), dtype=RECORD_DTYPE)
    for position, name in enumerate(("prompt_length", "chosen_length", "rejected_length")):
        records[name] = [len(of_pair[position]) for of_pair in parts]
    records["shared_length"] = [len(p.context) + common_prefix_length(p.completions) for p in pairs]
    records["weight"] = weights
    records["row_number"] = row_numbers
    records["score_margin"] = score_margins
    begins = [0, *np.cumsum([sum(map(len, of_pair)) for of_pair in parts]).tolist()][:-1]
    stored = StoredImages.of(images, begins, processor) if any(images) else None
    for position, (pair, begin) in enumerate(zip(pairs, begins, strict=True)):
        seen = b"" if stored is None else stored.keys_of(begin)
        both = zip(pair.completions, pair.scored or (None, None), strict=True)
        keys = [sequence_key(pair.context, completion, seen, scored) for completion, scored in both]
        keys = [sequence_key(pair.context, NO_TOKENS, seen), *keys]
        keys.append(whole_prompt_keys[position] if whole_prompt_keys else keys[0])
        keys.append(pair_keys[position] if pair_keys else bytes(KEY_BYTES))
        for name, key in zip(_KEYS, keys, strict=True):
            records[name][position] = np.frombuffer(key, dtype=np.uint8)
        if pair.scored is not None:
            completions, start = np.concatenate(pair.scored), begin + len(pair.context)
            are_scored[start : start + len(completions)] = completions
    scored = None if are_scored.all() else are_scored
    return TokenStore(tokens=tokens, records=records, scored=scored, images=stored)


class _NotNeeded(Exception):
    """The store has no pair, or another process has finished it meanwhile."""


def write_store(
    directory: Path, batches: Iterable[TokenStore], summarize: Callable[[], Json]
) -> TokenStore | None:
    """Writes each batch when `batches` yields it, then `summarize()`, and opens the store; None: there is no
    pair. If `batches` raises an error, no file stays on the disk. Raises CacheError."""
    scored, images, num_tokens, largest = None, None, 0, 0
    with contextlib.suppress(_NotNeeded), written_aside(directory) as temporary:
        temporary.mkdir()
        with contextlib.ExitStack() as files:
            names = (_TOKENS, _RECORDS)
            tokens, records = (files.enter_context((temporary / name).open("wb")) for name in names)
            for batch in batches:
                tokens.write(batch.tokens.data)
                records.write(batch.records.tobytes())
                if batch.scored is not None and scored is None:  # all earlier tokens are
                    scored = files.enter_context((temporary / _SCORED).open("wb"))
                    scored.write(np.ones(num_tokens, dtype=np.bool_).data)
                if scored is not None:
                    all_true = np.ones(len(batch.tokens), dtype=np.bool_)
                    scored.write((all_true if batch.scored is None else batch.scored).data)
                if batch.images is not None:
                    if images is None:
                        content = files.enter_context((temporary / CONTENT).open("wb"))
                        images = ImageJoiner(content, batch.images.fingerprint)
                    images.add(batch.images, num_tokens)
                num_tokens += len(batch.tokens)
                largest = max(largest, int(batch.tokens.max(initial=0)))
        if not num_tokens:
            raise _NotNeeded
        of_images = {} if images is None else images.write(temporary)
        summary = {**summarize(), _LARGEST: largest, **of_images}
        _, checksum = _map_files(temporary, summary)
        write_json_atomically(temporary / _MANIFEST, {"checksum": checksum, "summary": summary})
        if open_store(directory) is not None:
            raise _NotNeeded
    store = open_store(directory)
    if store is None and num_tokens:
        raise CacheError(f"{directory} was removed or damaged while it was written; run again")
    return store


def write_ranged_store(directory: Path, ranges: Sequence[TokenStore], summary: Json) -> TokenStore:
    """Writes the store of a source that has these ranges, if nobody else has done so. Raises CacheError."""
    summary = {**summary, _LARGEST: max(one.largest_token_id for one in ranges)}
    names = [[one.directory.name, one.rows_before] for one in ranges if one.directory is not None]
    with contextlib.suppress(_NotNeeded), written_aside(directory) as temporary:
        temporary.mkdir()
        content = {"checksum": content_key([names, summary]), "summary": summary, "ranges": names}
        write_json_atomically(temporary / _MANIFEST, content)
        if open_store(directory) is not None:
            raise _NotNeeded
    return TokenStore.of_ranges(ranges, summary, directory=directory)


def open_store(directory: Path) -> TokenStore | None:
    """Opens the store in `directory`; None: there is none, it is damaged, or a file of an image changed."""
    manifest = read_json(directory / _MANIFEST) or {}
    if not isinstance(summary := manifest.get("summary"), dict):
        return None
    if "ranges" in manifest:
        if manifest.get("checksum") != content_key([manifest["ranges"], summary]):
            return None
        ranges = [(open_store(directory.with_name(name)), before) for name, before in manifest["ranges"]]
        found = [replace(one, rows_before=before) for one, before in ranges if one is not None]
        is_whole = len(found) == len(ranges)
        return TokenStore.of_ranges(found, summary, directory=directory) if is_whole else None
    try:
        store, checksum = _map_files(directory, summary)
    except (FileNotFoundError, ValueError):  # ValueError: a file is empty or ends within an entry
        return None
    except OSError as error:
        raise CacheError(f"cannot read {directory}: {error.strerror}; check its permissions") from error
    if store.images is not None and store.images.have_changed():
        return None
    return store if manifest.get("checksum") == checksum else None


def key_heads(keys: Keys) -> NDArray[np.uint64]:
    """Turns the first 8 bytes of [P, bytes] keys into [P] numbers of the same order, which sort faster."""
    return np.ascontiguousarray(keys[:, :8]).view(">u8").ravel().astype(np.uint64)


def distinct_keys(keys: Keys) -> tuple[IntArray, IntArray]:
    """Returns of [P, bytes] keys the first position of each different one, [U], in the order of their bytes,
    and each key's position among those, [P]."""
    if len(keys) and keys.shape[1] == KEY_BYTES:
        heads = key_heads(keys)
        if (heads[1:] > heads[:-1]).all():  # they are distinct and in order already
            return np.arange(len(keys)), np.arange(len(keys))
        order = np.argsort(heads)
        heads = heads[order]
        is_new = np.append(True, heads[1:] != heads[:-1])
        again, tails = np.flatnonzero(~is_new), np.ascontiguousarray(keys).view(np.uint64)[:, 1]
        if np.array_equal(tails[order[again]], tails[order[again - 1]]):  # else heads are not enough
            inverse = heads.view(np.int64)  # its memory is used again
            inverse[order] = np.cumsum(is_new) - 1
            return np.minimum.reduceat(order, np.flatnonzero(is_new)), inverse
    whole = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1]))).ravel()
    _, *found = np.unique(whole, return_index=True, return_inverse=True)
    return found[0], found[1]


def _measure_tokens(store: TokenStore) -> tuple[NDArray[Any], ...]:
    """Returns three [P]: offsets, and the scored tokens of both completions."""
    records = store.records
    chosen, rejected = (records[name].astype(np.float64) for name in ("chosen_length", "rejected_length"))
    sizes = records["prompt_length"].astype(np.int64) + records["chosen_length"] + records["rejected_length"]
    offsets = np.cumsum(sizes) - sizes
    if store.scored is None:
        return offsets, chosen, rejected
    chosen_begins = offsets + records["prompt_length"]
    middles = chosen_begins + records["chosen_length"]
    # `reduceat` takes the values from each position to the next one. The last end is the end of the file.
    begins = np.stack((chosen_begins, middles, offsets + sizes), axis=1).ravel()[:-1]
    sums = np.add.reduceat(store.scored, begins, dtype=np.float64)
    return offsets, sums[0::3], sums[1::3]


def _map_files(directory: Path, summary: Json) -> tuple[TokenStore, str]:
    """Returns a store and its checksum. Of the tokens only the count is hashed: records have their hashes."""
    tokens = np.asarray(np.memmap(directory / _TOKENS, dtype=TOKEN_DTYPE, mode="r"))
    records = np.asarray(np.memmap(directory / _RECORDS, dtype=RECORD_DTYPE, mode="r"))
    parts = [len(tokens), hashlib.blake2b(records.view(np.uint8).data).hexdigest(), summary]
    scored = None
    if (directory / _SCORED).exists():
        scored = np.asarray(np.memmap(directory / _SCORED, dtype=np.bool_, mode="r"))
        parts.append(hashlib.blake2b(scored.data).hexdigest())
    images = None
    if "image_processor" in summary:
        images = StoredImages.open(directory, summary["image_processor"])
        parts.append(images.checksum)
    store = TokenStore(
        tokens=tokens, records=records, scored=scored, images=images, summary=summary, directory=directory
    )
    return store, content_key(parts)


def longest_sequence(tables: Sequence[PairTable]) -> int:
    """Returns the number of tokens of the longest prompt with one completion."""
    longer = [np.maximum(table.chosen_lengths, table.rejected_lengths) for table in tables]
    return max(int((table.prompt_lengths + more).max()) for table, more in zip(tables, longer, strict=True))


def pair_lengths(table: PairTable, shape: ModelShape | None = None) -> PairLengths:
    """Returns lengths for the planner, with `shape` also the FLOPs of images. Reads prompts with images."""
    return PairLengths(
        prompt=table.prompt_lengths,
        chosen=table.chosen_lengths,
        rejected=table.rejected_lengths,
        shared=table.shared_lengths,
        beginning=table.beginnings,
        common=table.beginning_lengths,
        tower=_tower_flops(table, shape) if shape is not None and shape.image_flops else 0.0,
    )


def _tower_flops(table: PairTable, shape: ModelShape) -> FloatArray:
    flops = np.zeros(table.num_pairs)
    for pair, begin in enumerate(table.offsets):
        tokens = table.parts[table.part_indices[pair]].tokens
        prompt = tokens[begin : begin + table.prompt_lengths[pair]]
        flops[pair] = shape.image_flops * np.count_nonzero(prompt == shape.image_token)
    return flops
