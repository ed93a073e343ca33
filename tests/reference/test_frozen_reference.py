"""The reference values a run freezes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.reference_pairs import NAMESPACE, make_table, random_pairs
from support.refusals import refusal

from dpo_pack.data.store import PairTable
from dpo_pack.reference.cache import FrozenReference, ReferenceCache, sequence_table
from dpo_pack.system.errors import CacheError


@pytest.fixture
def frozen_table(tmp_path: Path) -> Iterator[tuple[FrozenReference, PairTable]]:
    table = make_table(random_pairs(6))
    cache = ReferenceCache(tmp_path / "cache", NAMESPACE)
    for keys, factor in ((table.chosen_keys, 1.0), (table.rejected_keys, 10.0)):
        cache.append(sequence_table(keys, -factor * np.arange(1.0, 7.0), np.ones(6, dtype=np.int64)))
    yield FrozenReference.find(cache, [table, table]), table


def test_frozen_values_are_those_of_each_pair_s_sides_before_and_after_a_round_trip(
    frozen_table: tuple[FrozenReference, PairTable], tmp_path: Path
) -> None:
    frozen, table = frozen_table
    frozen.save(tmp_path / "reference.parquet")
    again = FrozenReference.load(tmp_path / "reference.parquet")
    assert again.fingerprint() == frozen.fingerprint() and len(again.keys) == 12
    for reference in (frozen, again):
        values = reference.of(table.select(np.array([4, 0, 0])))
        assert values.tolist() == [[-5.0, -50.0], [-1.0, -10.0], [-1.0, -10.0]]


def test_what_is_frozen_is_joined_and_taken_apart_again(tmp_path: Path) -> None:
    tables = [make_table(random_pairs(3, seed=seed)) for seed in (0, 1)]
    cache = ReferenceCache(tmp_path / "cache", NAMESPACE)
    for number, table in enumerate(tables):
        for keys, lengths in (
            (table.chosen_keys, table.chosen_lengths),
            (table.rejected_keys, table.rejected_lengths),
        ):
            sums = -np.arange(1.0, len(lengths) + 1) - number
            cache.append(sequence_table(keys, sums, lengths))
    first, second = (FrozenReference.find(cache, [table]) for table in tables)
    assert first.lacking(tables[0]).num_pairs == 0 and first.lacking(tables[1]).num_pairs == 3
    joined = first.joined(second)
    assert all(joined.lacking(table).num_pairs == 0 for table in tables)
    assert joined.fingerprint() == FrozenReference.find(cache, tables).fingerprint()
    assert joined.fingerprint(tables[0]) == first.fingerprint() != joined.fingerprint()
    assert joined.joined(second).fingerprint() == joined.fingerprint()


def test_values_frozen_for_other_data_are_refused(frozen_table: tuple[FrozenReference, PairTable]) -> None:
    frozen, _ = frozen_table
    for seed in range(1, 5):  # keys before, between and after the frozen ones
        message = refusal(lambda: frozen.of(make_table(random_pairs(3, seed=seed))), CacheError)  # noqa: B023
        assert "other pairs" in message and "output_dir" in message


def test_the_fingerprint_changes_with_the_last_bit(frozen_table: tuple[FrozenReference, PairTable]) -> None:
    frozen, _ = frozen_table
    changed = frozen.sums.copy()
    changed[3] = np.nextafter(changed[3], 0.0)
    assert replace(frozen, sums=changed).fingerprint() != frozen.fingerprint()
    assert replace(frozen, sums=frozen.sums.copy()).fingerprint() == frozen.fingerprint()


def test_no_flipped_byte_changes_frozen_values_unnoticed(
    frozen_table: tuple[FrozenReference, PairTable], tmp_path: Path
) -> None:
    frozen, _ = frozen_table
    path = tmp_path / "reference.parquet"
    refusal(lambda: FrozenReference.load(path), CacheError)
    frozen.save(path)
    content = path.read_bytes()
    num_noticed = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            assert FrozenReference.load(path).fingerprint() == frozen.fingerprint()
        except CacheError as error:
            num_noticed += 1
            assert str(error).isprintable() and str(path) in str(error) and "--overwrite" in str(error)
    assert num_noticed > len(content) / 6  # the rest is metadata that nobody reads
