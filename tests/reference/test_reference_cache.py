"""The reference cache on disk, and what a run freezes of it: all is found, damage is noticed."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.reference_pairs import NAMESPACE, make_table, random_keys, random_pairs
from support.refusals import refusal

from dpo_pack.data.store import Keys, PairTable, distinct_keys
from dpo_pack.reference.cache import (
    FrozenReference,
    ReferenceCache,
    default_cache_directory,
    find_keys,
    sequence_table,
)
from dpo_pack.system.errors import CacheError


def test_a_part_that_no_listing_has_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system lists a directory as it was a while ago: another node's part is not there yet."""
    there, here = ReferenceCache(tmp_path, NAMESPACE), ReferenceCache(tmp_path, NAMESPACE)
    keys = random_keys(2)
    [part] = there.append(sequence_table(keys, np.array([-1.0, -2.0]), np.array([3, 4])))
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [])
    assert np.isnan(here.lookup(keys)).all()
    here.named_parts |= there.named_parts
    assert here.lookup(keys).tolist() == [-1.0, -2.0]
    part.unlink()
    assert np.isnan(here.lookup(keys)).all()


def test_lookup_finds_what_was_appended_in_any_order_and_nan_for_the_rest(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys = random_keys(5)
    sums = np.array([-1.5, -2.0, 0.0, -1e-12, -4e3])
    assert np.isnan(cache.lookup(keys)).all()
    cache.append(sequence_table(keys[:3], sums[:3], np.array([3, 4, 5])))
    cache.append(sequence_table(keys[3:], sums[3:], np.array([6, 7])))
    wanted = np.concatenate((keys[[4, 1]], random_keys(1, seed=1), keys[[1, 0, 2, 3]]))
    np.testing.assert_array_equal(cache.lookup(wanted), [-4e3, -2.0, np.nan, -2.0, -1.5, 0.0, -1e-12])
    assert cache.lookup(keys[:0]).shape == (0,)


def test_of_a_sequence_that_many_jobs_computed_the_last_part_by_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of a listing: every run and every rank must take the same value."""
    keys, ones = random_keys(3), np.ones(3, dtype=np.int64)
    values = {}
    for value in range(-20, 0):
        [part] = ReferenceCache(tmp_path, NAMESPACE).append(
            sequence_table(keys, np.full(3, float(value)), ones)
        )
        values[part.name] = float(value)
    listing = Path.glob
    for backwards in (False, True):
        monkeypatch.setattr(
            Path, "glob", lambda path, pattern, b=backwards: sorted(listing(path, pattern), reverse=b)
        )
        cache = ReferenceCache(tmp_path, NAMESPACE)
        assert set(cache.lookup(keys)) == {values[max(values)]}


def test_no_flipped_byte_in_a_part_changes_what_a_run_gets(tmp_path: Path) -> None:
    keys, values = random_keys(2), np.array([-1.0, -2.0])
    cache = ReferenceCache(tmp_path, NAMESPACE)
    [part] = cache.append(sequence_table(keys, values, np.ones(2, dtype=np.int64)))
    content = part.read_bytes()
    for position in range(0, len(content), 11):
        part.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert np.isnan(ReferenceCache(tmp_path, NAMESPACE).lookup(keys)).all()
        part.with_suffix(".damaged").unlink()


@pytest.mark.parametrize("damage", ["a flipped byte", "cut short", "emptied", "not finite"])
def test_a_damaged_part_is_set_aside_with_a_warning_and_the_others_still_count(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No run writes a log-prob that is not finite. Such a one would be taken for missing run after run."""
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys, ones = random_keys(4), np.ones(2, dtype=np.int64)
    second = np.inf if damage == "not finite" else -2.0
    [part] = cache.append(sequence_table(keys[:2], np.array([-1.0, second]), ones))
    cache.append(sequence_table(keys[2:], np.array([-3.0, -4.0]), ones))
    content = bytearray(part.read_bytes())
    if damage == "a flipped byte":
        content[len(content) // 3] ^= 1
    cut = {"cut short": len(content) - 20, "emptied": 0}
    part.write_bytes(content[: cut.get(damage, len(content))])
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(cache.lookup(keys), [np.nan, np.nan, -3.0, -4.0])
    assert len(caplog.records) == 1 and part.name in caplog.text
    assert not part.exists() and part.with_suffix(".damaged").exists()
    cache.append(sequence_table(keys[:2], np.array([-1.0, -2.5]), ones))
    assert cache.lookup(keys).tolist() == [-1.0, -2.5, -3.0, -4.0]
    assert len(caplog.records) == 1


def test_a_part_of_an_earlier_release_that_has_log_probs_of_tokens_gives_their_sums(tmp_path: Path) -> None:
    cache, keys = ReferenceCache(tmp_path, NAMESPACE), random_keys(2)
    table = sequence_table(keys, np.array([-1.5, -2.0]), np.array([2, 1]))
    cache.append(table.append_column("token_logps", pa.array([[-1.0, -0.5], [-2.0]])))
    assert cache.lookup(keys).tolist() == [-1.5, -2.0]


def test_a_part_that_cannot_be_read_is_a_one_line_error(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    (cache.directory / "part-0.parquet").mkdir()  # root may read any file, but nobody a directory
    message = refusal(lambda: cache.lookup(random_keys(1)), CacheError)
    assert "part-0.parquet" in message and "reference.cache_dir" in message


def test_many_sequences_are_written_in_some_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpo_pack.reference.cache.MAX_PART_SEQUENCES", 2)
    cache, keys = ReferenceCache(tmp_path, NAMESPACE), random_keys(5)
    sums = np.array([-1.0, -4.0, -3.0, -4.0, -6.0])
    cache.append(sequence_table(keys, sums, np.array([1, 2, 1, 1, 2])), {"origin": "test"})
    parts = list(cache.directory.glob("part-*.parquet"))
    assert sorted(pq.read_metadata(part).num_rows for part in parts) == [1, 2, 2]
    assert pq.read_schema(parts[0]).metadata[b"dpo_pack.origin"] == b"test"
    assert cache.lookup(keys).tolist() == sums.tolist()


# ---- Disks that refuse


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_says_so_before_anything_is_computed(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)

    def refuse(dir: Path) -> None:
        raise OSError(code, os.strerror(code), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    message = refusal(cache.check_writable, CacheError)
    assert os.strerror(code) in message and str(cache.directory) in message


def test_a_cache_that_may_only_be_read_can_still_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = random_keys(1)
    ReferenceCache(tmp_path, NAMESPACE).append(sequence_table(keys, np.array([-1.0]), np.array([1])))

    def refuse(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    cache = ReferenceCache(tmp_path, NAMESPACE, used_by="some/model")
    assert cache.lookup(keys).tolist() == [-1.0]


@pytest.mark.parametrize("named", [None, "", "elsewhere"])
def test_recipes_that_name_no_cache_use_the_variable_s_or_the_user_s(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DPO_PACK_CACHE", raising=False)
    if named is not None:
        monkeypatch.setenv("DPO_PACK_CACHE", named)
    assert default_cache_directory() == (Path(named) if named else tmp_path / ".cache" / "dpo_pack")


# ---- Finding keys among many


def as_keys(keys: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)


# Few distinct bytes, so that keys often begin alike or are equal.
KEYS = st.lists(
    st.tuples(
        st.sampled_from([b"\x00" * 7, b"\xff" * 7]), st.binary(min_size=1, max_size=1), st.integers(0, 3)
    ).map(lambda key: key[0] + key[1] + bytes([key[2]]) * 8),
    max_size=30,
)


@given(KEYS, KEYS)
@example([], [b"\x00" * 16])
@example(
    [b"head....tail...2", b"head....tail...1", b"head....tail...3"],
    [b"head....tail...0", b"head....tail...4"],
)
def test_every_key_is_found_where_it_is_and_no_other(keys: list[bytes], others: list[bytes]) -> None:
    first, inverse = distinct_keys(as_keys(keys))
    distinct = sorted(set(keys))
    assert first.tolist() == [keys.index(key) for key in distinct]
    assert [distinct[place] for place in inverse] == keys
    wanted = keys + others
    expected = [distinct.index(key) if key in distinct else -1 for key in wanted]
    assert find_keys(as_keys(distinct), as_keys(wanted)).tolist() == expected


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
