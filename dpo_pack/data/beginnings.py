"""Finds the *beginnings* of prompts: first tokens that many pairs of a source have in common, such as system
prompts or definitions of tools. A row has each once, for all of its pairs that have it.

A beginning costs its tokens once in each row. A source that fills steps of 64 pairs has it once in a step, so
it pays if at least 1 in 64 pairs have it, and at least two. Many prompts with one system prompt also have
their next words in common: a longer beginning is taken only if that saves more tokens than the shorter one,
which its pairs then no longer share with the others. P: number of pairs.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.store import PairTable, TokenStore
from dpo_pack.packing.lengths import AnyIntArray, common_prefix_length
from dpo_pack.system.errors import CacheError
from dpo_pack.system.files import written_aside

_FILE = "beginnings.npy"  # beside the store's other files
# A hash of the beginning's tokens, the same in all sources, and their number; zeros: none.
_DTYPE = np.dtype([("key", "<i8"), ("length", "<i4")])
_FEWEST_TOKENS, _PAIRS_A_STEP = 16, 64


def table_of(stores: Sequence[TokenStore], image_token: int = -1) -> PairTable:
    """Returns the table of all pairs of the stores, with their beginnings. A beginning ends before the first
    `image_token`, because equal placeholders may be different pictures."""
    table, found = PairTable.of(stores), np.concatenate([_of_store(store, image_token) for store in stores])
    return replace(table, beginnings=found["key"].astype(np.int64), beginning_lengths=found["length"])


def _of_store(store: TokenStore, image_token: int) -> NDArray[np.void]:
    """Returns [P] of _DTYPE, from the store's file; makes the file if it is absent or damaged. (A file that
    is wrong makes rows longer, and nothing else: they compare the tokens that they share.)"""
    table, path = PairTable.of([store]), store.directory and store.directory / _FILE
    lengths = table.prompt_lengths
    with contextlib.suppress(OSError, ValueError, EOFError):
        known: NDArray[np.void] = np.load(path or "")
        is_right = known.dtype == _DTYPE and known.shape == lengths.shape
        if is_right and (known["length"] <= lengths).all() and (known["length"] >= 0).all():
            return known

    def prompt(pair: int) -> AnyIntArray:
        begin = table.offsets[pair]
        ids: AnyIntArray = table.parts[table.part_indices[pair]].tokens[begin : begin + lengths[pair]]
        images = np.flatnonzero(ids == image_token) if image_token >= 0 else np.zeros(0, dtype=np.int64)
        return ids[: images[0]] if len(images) else ids

    found = find_beginnings(prompt, lengths)
    if path is not None:
        with contextlib.suppress(CacheError), written_aside(path) as temporary, temporary.open("wb") as file:
            np.save(file, found)
    return found


def find_beginnings(prompt: Callable[[int], AnyIntArray], lengths: AnyIntArray) -> NDArray[np.void]:
    """Returns [P] of _DTYPE. `prompt` returns the ids of a pair's prompt, at most `lengths`, [P]."""
    found = np.zeros(len(lengths), dtype=_DTYPE)
    least = max(len(lengths) / _PAIRS_A_STEP, 1.0)  # how often a beginning is computed
    groups = [(np.arange(len(lengths)), 0)]  # pairs, the tokens of the beginning that they have so far
    while groups:
        group, taken = groups.pop()
        ids = prompt(int(group[len(group) // 2]))
        shared = np.array([common_prefix_length((ids, prompt(pair))) for pair in group.tolist()])
        # Each part is cut in two while that saves tokens, at `best` tokens in common with `ids`.
        parts = [(group, shared, taken)]
        while parts:
            pairs, common, taken = parts.pop()
            ends, counts = np.unique(common, return_counts=True)
            at_least = counts[::-1].cumsum()[::-1]  # pairs that share at least so many
            saved = (ends - taken) * at_least - ends * least
            saved[(ends < max(_FEWEST_TOKENS, taken + 1)) | (at_least < 2)] = -1.0
            if saved.max(initial=-1.0) >= 0:
                best, is_longer = int(ends[saved.argmax()]), common >= ends[saved.argmax()]
                tokens = np.ascontiguousarray(ids[:best], dtype="<i4").data
                key = int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "little", signed=True)
                found[pairs[is_longer]] = (key or 1, best)
                parts += [(pairs[~is_longer], common[~is_longer], taken)]
                parts += [(pairs[is_longer], common[is_longer], best)]
                continue
            for end in ends[counts >= max(least, 2)].tolist():  # they go on otherwise than `ids`
                leaving = pairs[common == end]
                ids_left = (prompt(pair)[end:] for pair in leaving.tolist())
                following = np.array([left[0] if len(left) else -1 for left in ids_left])
                for token, count in zip(*np.unique(following, return_counts=True), strict=True):
                    if token >= 0 and count >= max(least, 2):
                        groups.append((leaving[following == token], taken))
    _, inverse, counts = np.unique(found["key"], return_inverse=True, return_counts=True)
    found[counts[inverse] < max(least, 2)] = 0  # longer ones have taken the others
    return found
