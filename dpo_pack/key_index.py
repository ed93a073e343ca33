"""Looking up 16-byte sequence keys by the million: sorted once, found by binary search.

Legend: n keys as given, U unique keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint8]  # [n, 16]
IntArray = npt.NDArray[np.int64]
_Halves = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyIndex:
    """The distinct keys of an array, ascending by byte."""

    high: npt.NDArray[np.uint64]  # [U] the first eight bytes as a big-endian number
    low: npt.NDArray[np.uint64]  # [U] the last eight
    first: IntArray  # [U] where each key first was in the array
    inverse: IntArray  # [n] position among the distinct keys of each key of the array

    @staticmethod
    def of(keys: Keys) -> KeyIndex:
        """[n, 16] keys, in any order and with repetitions."""
        high, low = _halves(keys)
        order = np.lexsort((low, high))  # stable: of equal keys the first stays first
        high, low = high[order], low[order]
        is_new = np.ones(len(keys), dtype=np.bool_)
        is_new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        inverse = np.empty(len(keys), dtype=np.int64)
        inverse[order] = np.cumsum(is_new) - 1
        return KeyIndex(high=high[is_new], low=low[is_new], first=order[is_new], inverse=inverse)

    def __len__(self) -> int:
        return len(self.high)

    def find(self, keys: Keys) -> IntArray:
        """[n, 16] keys -> [n] position of each among the distinct keys, -1 where it is none of them."""
        high, low = _halves(keys)
        if len(self) == 0:
            return np.full(len(keys), -1, dtype=np.int64)
        order = np.argsort(high)  # a sorted search walks through memory once: three times as fast
        places = np.empty(len(keys), dtype=np.int64)
        places[order] = np.searchsorted(self.high, high[order])
        places = np.minimum(places, len(self) - 1)
        last = len(self) - 1
        while True:  # among keys that begin alike, on to the one that ends alike; hashes hardly ever do
            following = np.minimum(places + 1, last)
            is_before = (self.high[places] == high) & (self.low[places] < low)
            is_before &= (following > places) & (self.high[following] == high)
            if not is_before.any():
                break
            places[is_before] += 1
        is_found = (self.high[places] == high) & (self.low[places] == low)
        return np.where(is_found, places, -1)


def _halves(keys: Keys) -> _Halves:
    words = np.ascontiguousarray(keys, dtype=np.uint8).view(">u8").astype(np.uint64)  # [n, 2]
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])
