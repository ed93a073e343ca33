"""Finds millions of 16-byte sequence keys quickly: sorts the keys once, then uses binary search.

Legend: n given keys, U unique keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpo_pack.packing.lengths import IntArray

Keys = npt.NDArray[np.uint8]  # [n, 16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyIndex:
    """The unique keys of an array, in ascending order of their bytes."""

    unique: npt.NDArray[np.bytes_]  # [U]
    first: IntArray  # [U] position of each unique key's first occurrence in the array
    inverse: IntArray  # [n] position in `unique` of each key of the array

    @staticmethod
    def of(keys: Keys) -> KeyIndex:
        """Makes an index of [n, 16] keys, which may be in any order and repeat."""
        unique, first, inverse = np.unique(_as_strings(keys), return_index=True, return_inverse=True)
        return KeyIndex(unique=unique, first=first, inverse=inverse)

    def __len__(self) -> int:
        return len(self.unique)

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
