"""The reference cache on disk, the pass that fills it, and the values a run freezes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import torch
from oracle import completion_logps_one_by_one
from tiny_models import VOCABULARY, tiny_model

from dpo_pack.data.store import PairTable, TokenStore, join_pairs
from dpo_pack.data.truncation import PairIds
from dpo_pack.errors import CacheError, DpoPackError, ModelError
from dpo_pack.models import CompletionLogps, Precision, load_model
from dpo_pack.reference import FrozenReference, ReferenceCache, compute_missing, find_missing

NAMESPACE = {"weights": "abc", "parameters": "float32"}
CPU = torch.device("cpu")
Ids = Sequence[int]
Pair = tuple[Ids, Ids, Ids]  # prompt, chosen, rejected
Keys = npt.NDArray[np.uint8]


def make_table(pairs: Sequence[Pair]) -> PairTable:
    """A table of pairs given as token ids; row numbers count from 1."""
    ids = [
        PairIds(prompt=_ids(prompt), chosen=_ids(chosen), rejected=_ids(rejected))
        for prompt, chosen, rejected in pairs
    ]
    tokenized = join_pairs(ids, [1.0] * len(ids), range(1, len(ids) + 1))
    store = TokenStore(
        directory=Path("in memory"),
        fingerprint="",
        tokens=tokenized.tokens,
        records=tokenized.records,
        summary={},
    )
    return PairTable.of([store])


def _ids(ids: Ids) -> npt.NDArray[np.int32]:
    return np.asarray(ids, dtype=np.int32)


def random_pairs(num_pairs: int, *, seed: int = 0) -> list[Pair]:
    random = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        drawn: list[int] = random.integers(3, VOCABULARY, random.integers(1, most + 1)).tolist()
        return drawn

    return [(ids(20), ids(9), ids(9)) for _ in range(num_pairs)]


def random_keys(count: int, *, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def one_line(function: Callable[[], object], kind: type[DpoPackError] = CacheError) -> str:
    with pytest.raises(kind) as caught:
        function()
    message = str(caught.value)
    assert message.isprintable()
    return message


# ---- The cache on disk


def test_lookup_finds_what_was_appended_in_any_order_and_nan_for_the_rest(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys = random_keys(5)
    sums = np.array([-1.5, -2.0, 0.0, -1e-12, -4e3])
    assert np.isnan(cache.lookup(keys)).all()
    cache.append(keys[:3], sums[:3], np.array([3, 4, 5]))
    cache.append(keys[3:], sums[3:], np.array([6, 7]))
    wanted = np.concatenate((keys[[4, 1]], random_keys(1, seed=1), keys[[1, 0, 2, 3]]))
    np.testing.assert_array_equal(cache.lookup(wanted), [-4e3, -2.0, np.nan, -2.0, -1.5, 0.0, -1e-12])
    assert cache.lookup(keys[:0]).shape == (0,)


def test_keys_that_differ_in_zero_bytes_only_are_different_keys(tmp_path: Path) -> None:
    """numpy's strings drop trailing zero bytes."""
    keys = np.zeros((4, 16), dtype=np.uint8)
    keys[1, 0] = keys[2, 14] = keys[3, 15] = 7
    cache = ReferenceCache(tmp_path, NAMESPACE)
    cache.append(keys, np.array([-1.0, -2.0, -3.0, -4.0]), np.ones(4, dtype=np.int64))
    assert cache.lookup(keys[::-1]).tolist() == [-4.0, -3.0, -2.0, -1.0]
    missing = keys[:1].copy()
    missing[0, 8] = 7
    assert np.isnan(cache.lookup(missing)).all()


def test_a_sequence_that_two_jobs_computed_has_the_value_of_one_of_them(tmp_path: Path) -> None:
    keys = random_keys(3)
    for value in (-1.0, -2.0):
        ReferenceCache(tmp_path, NAMESPACE).append(keys, np.full(3, value), np.ones(3, dtype=np.int64))
    cache = ReferenceCache(tmp_path, NAMESPACE)
    first = cache.lookup(keys)
    assert set(first) in ({-1.0}, {-2.0})
    np.testing.assert_array_equal(cache.lookup(keys), first)


def test_each_namespace_has_values_of_its_own(tmp_path: Path) -> None:
    keys = random_keys(2)
    ReferenceCache(tmp_path, NAMESPACE).append(keys, np.array([-1.0, -2.0]), np.array([1, 1]))
    other = ReferenceCache(tmp_path, {**NAMESPACE, "parameters": "bfloat16"})
    assert np.isnan(other.lookup(keys)).all()
    assert ReferenceCache(tmp_path, dict(reversed(NAMESPACE.items()))).lookup(keys).tolist() == [-1.0, -2.0]


def test_pandas_reads_a_part(tmp_path: Path) -> None:
    keys = random_keys(3)
    part = ReferenceCache(tmp_path, NAMESPACE).append(keys, np.array([-1.0, -2.5, -3.0]), np.array([4, 5, 6]))
    frame = pytest.importorskip("pandas").read_parquet(part)
    assert frame["key"].tolist() == [key.tobytes() for key in keys]
    assert frame["logps_sum"].tolist() == [-1.0, -2.5, -3.0] and frame["num_tokens"].tolist() == [4, 5, 6]
    assert str(pq.read_schema(part).field("key").type) == "fixed_size_binary[16]"


@pytest.mark.parametrize("damage", ["a flipped byte", "cut short", "emptied"])
def test_a_damaged_part_is_set_aside_with_a_warning_and_the_others_still_count(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys, ones = random_keys(4), np.ones(2, dtype=np.int64)
    part = cache.append(keys[:2], np.array([-1.0, -2.0]), ones)
    cache.append(keys[2:], np.array([-3.0, -4.0]), ones)
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    damaged: dict[str, bytes | bytearray] = {
        "a flipped byte": content,
        "cut short": content[:-20],
        "emptied": b"",
    }
    part.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(cache.lookup(keys), [np.nan, np.nan, -3.0, -4.0])
    assert len(caplog.records) == 1 and part.name in caplog.text and "damaged" in caplog.text
    assert not part.exists() and part.with_suffix(".damaged").exists()
    cache.append(keys[:2], np.array([-1.0, -2.0]), ones)
    assert cache.lookup(keys).tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert len(caplog.records) == 1


def test_a_damaged_part_that_another_job_sets_aside_first_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys = random_keys(1)
    part = cache.append(keys, np.array([-1.0]), np.array([1]))
    part.write_bytes(b"damaged")
    rename = Path.rename

    def rename_twice(path: Path, target: Path) -> Path:
        rename(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_twice)
    assert np.isnan(cache.lookup(keys)).all()
    assert not part.exists()


def test_a_part_that_vanishes_between_listing_and_reading_is_only_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    keys = random_keys(1)
    gone = cache.append(keys, np.array([-1.0]), np.array([1])).with_stem("part-gone")
    listing = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [gone, *listing(path, pattern)])
    assert cache.lookup(keys).tolist() == [-1.0]


def test_a_part_that_cannot_be_read_is_a_one_line_error(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    (cache.directory / "part-0.parquet").mkdir()  # root may read any file, but nobody a directory
    message = one_line(lambda: cache.lookup(random_keys(1)))
    assert "part-0.parquet" in message and "reference.cache_dir" in message


def test_a_directory_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = one_line(lambda: ReferenceCache(tmp_path / "file" / "cache", NAMESPACE))
    assert str(tmp_path / "file") in message and "writable" in message
    cache = ReferenceCache(tmp_path, NAMESPACE)
    for path in cache.directory.iterdir():
        path.unlink()
    cache.directory.rmdir()
    cache.directory.write_text("in the way")
    message = one_line(lambda: cache.append(random_keys(1), np.zeros(1), np.ones(1, dtype=np.int64)))
    assert str(cache.directory) in message


def test_several_caches_write_to_one_directory_at_once_without_losing_anything(tmp_path: Path) -> None:
    num_writers, num_parts = 4, 6
    keys = random_keys(num_writers * num_parts * 3).reshape(num_writers, num_parts, 3, 16)
    seen: list[int] = []

    def write(writer: int) -> None:
        cache = ReferenceCache(tmp_path, NAMESPACE)
        for part in range(num_parts):
            cache.append(keys[writer, part], np.full(3, -float(writer)), np.ones(3, dtype=np.int64))
            seen.append(int(np.isfinite(cache.lookup(keys[writer].reshape(-1, 16))).sum()) - 3 * (part + 1))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0] * num_writers * num_parts
    cache = ReferenceCache(tmp_path, NAMESPACE)
    expected = np.repeat(-np.arange(num_writers, dtype=np.float64), num_parts * 3)
    np.testing.assert_array_equal(cache.lookup(keys.reshape(-1, 16)), expected)
    assert all(path.suffix in (".parquet", ".json") for path in cache.directory.iterdir())


# ---- What is missing

# b's first pair is a's first with the sides exchanged, its second has a's first prompt and a new chosen.
TABLE_A: list[Pair] = [((5, 6, 7), (8, 9), (8, 10, 11)), ((5,), (6, 7), (6,))]
TABLE_B: list[Pair] = [((5, 6, 7), (8, 10, 11), (8, 9)), ((5, 6, 7), (12,), (8, 9))]


def test_equal_sequences_are_missing_once_over_pairs_and_tables(tmp_path: Path) -> None:
    tables = [make_table(TABLE_A), make_table(TABLE_B)]
    missing = find_missing(ReferenceCache(tmp_path, NAMESPACE), tables)
    assert (missing.num_unique, missing.num_cached, missing.num_sequences) == (5, 0, 5)
    groups = [missing.group(number) for number in range(len(missing.pair_indices))]
    contents = [(g.context.tolist(), [c.tolist() for c in g.completions]) for g in groups]
    assert contents == [([5, 6, 7], [[8, 9], [8, 10, 11]]), ([5], [[6, 7], [6]]), ([5, 6, 7], [[12]])]
    assert missing.table_indices.tolist() == [0, 0, 1] and missing.pair_indices.tolist() == [0, 1, 1]
    # Shared: 3 + 1 (8 is common) + 1 + 2; 1 + 1 + 1 + 0; 3 + 1.
    assert missing.row_tokens(share_prompt=True).tolist() == [7, 3, 4]
    assert missing.row_tokens(share_prompt=False).tolist() == [11, 5, 4]
    keys = [tables[0].chosen_keys[0], tables[0].rejected_keys[0]]
    assert all(np.array_equal(a, b) for a, b in zip(missing.keys(0), keys, strict=True))


def test_the_same_tokens_with_another_boundary_are_another_sequence(tmp_path: Path) -> None:
    table = make_table([((5, 6), (7, 8), (7,)), ((5, 6, 7), (8,), (9,))])
    assert find_missing(ReferenceCache(tmp_path, NAMESPACE), [table]).num_sequences == 4


def test_a_pair_that_lacks_one_side_is_a_group_of_one(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    cached = np.stack((table.rejected_keys[0], table.chosen_keys[1]))
    cache.append(cached, np.array([-1.0, -2.0]), np.array([3, 2]))
    missing = find_missing(cache, [table])
    assert (missing.num_unique, missing.num_cached, missing.num_sequences) == (4, 2, 2)
    assert missing.needs_chosen.tolist() == [True, False] and missing.needs_rejected.tolist() == [False, True]
    groups = [missing.group(number) for number in range(2)]
    assert [[c.tolist() for c in group.completions] for group in groups] == [[[8, 9]], [[6]]]
    assert missing.row_tokens(share_prompt=True).tolist() == [5, 2]
    assert np.array_equal(missing.keys(1), table.rejected_keys[1:])


def test_nothing_is_missing_once_everything_is_cached(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    keys = np.concatenate((table.chosen_keys, table.rejected_keys))
    cache.append(keys, np.full(4, -1.0), np.ones(4, dtype=np.int64))
    missing = find_missing(cache, [table, make_table(TABLE_B[:1])])
    assert (missing.num_sequences, len(missing.pair_indices), missing.num_cached) == (0, 0, 4)


# ---- The pass


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


def load_scorer(path: Path, *, packed: bool) -> CompletionLogps:
    return load_model(
        str(path),
        revision=None,
        trust_remote_code=False,
        precision=Precision(parameters=torch.float32, autocast=None),
        attention="auto",
        packed=packed,
        gradient_checkpointing=False,
        device=CPU,
        recipe_key="model.path",
    ).scorer


def run_pass(
    cache: ReferenceCache,
    tables: Sequence[PairTable],
    scorer: CompletionLogps,
    *,
    token_budget: int = 64,
    share_prompt: bool = True,
    progress: Callable[[int], None] = lambda count: None,
    write_every_seconds: float = 20.0,
) -> None:
    compute_missing(
        cache,
        find_missing(cache, tables),
        scorer,
        token_budget=token_budget,
        share_prompt=share_prompt,
        pad_token_id=0,
        device=CPU,
        progress=progress,
        write_every_seconds=write_every_seconds,
    )


@pytest.mark.parametrize("mode", ["shared", "unshared", "padded"])
def test_the_pass_computes_what_each_sequence_has_alone(mode: str, model_path: Path, tmp_path: Path) -> None:
    pairs = random_pairs(12)
    tables = [make_table(pairs[:8]), make_table([*pairs[6:], (pairs[0][0], pairs[0][2], (7, 7))])]
    cache = ReferenceCache(tmp_path, NAMESPACE)
    # One side of a pair is there already: a group of one sequence among groups of two.
    cache.append(tables[0].chosen_keys[3:4], np.array([-123.0]), np.array([1]))
    done: list[int] = []
    run_pass(
        cache,
        tables,
        load_scorer(model_path, packed=mode != "padded"),
        share_prompt=mode == "shared",
        progress=done.append,
    )
    assert sum(done) == 2 * 12 + 1 - 1 and len(done) > 1

    model = tiny_model("llama")
    for table in tables:
        values = FrozenReference.take(cache, [table]).of(table)
        for keys, completion, ours in (
            (table.chosen_keys, table.chosen, values.chosen),
            (table.rejected_keys, table.rejected, values.rejected),
        ):
            sequences = [(table.prompt(i).tolist(), completion(i).tolist()) for i in range(table.num_pairs)]
            with torch.no_grad():
                expected = completion_logps_one_by_one(model, sequences).double().numpy()
            expected[(keys == tables[0].chosen_keys[3]).all(axis=1)] = -123.0
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    rows = [row for part in cache.directory.glob("part-*") for row in pq.read_table(part).to_pylist()]
    counts = {row["key"]: row["num_tokens"] for row in rows}
    assert counts[tables[0].chosen_keys[0].tobytes()] == tables[0].chosen_lengths[0]
    assert len(counts) == 25


def test_the_pass_keeps_no_gradients(model_path: Path, tmp_path: Path) -> None:
    scorer = load_scorer(model_path, packed=True)
    recorded: list[bool] = []
    scorer.register_forward_hook(lambda module, inputs, output: recorded.append(output.sums.requires_grad))
    run_pass(ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(2))], scorer)
    assert recorded == [False]


def test_a_second_pass_computes_nothing(model_path: Path, tmp_path: Path) -> None:
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(3))]
    scorer = load_scorer(model_path, packed=True)
    run_pass(cache, tables, scorer)
    scorer.register_forward_hook(lambda *_: pytest.fail("computed again"))
    run_pass(cache, tables, scorer, progress=lambda count: pytest.fail("computed again"))


def test_an_interrupted_pass_keeps_every_finished_row_and_goes_on_from_there(
    model_path: Path, tmp_path: Path
) -> None:
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(10))]
    scorer = load_scorer(model_path, packed=True)
    done: list[int] = []

    def stop_after_the_third_row(count: int) -> None:
        done.append(count)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_pass(cache, tables, scorer, progress=stop_after_the_third_row)
    missing = find_missing(cache, tables)
    assert missing.num_cached == sum(done) and 0 < missing.num_sequences == 20 - sum(done)
    kept = cache.lookup(tables[0].chosen_keys)
    run_pass(cache, tables, scorer, progress=done.append)
    assert sum(done) == 20
    values = cache.lookup(tables[0].chosen_keys)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values[np.isfinite(kept)], kept[np.isfinite(kept)])


def test_a_killed_pass_would_keep_all_rows_written_so_far(model_path: Path, tmp_path: Path) -> None:
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(10))]
    done: list[int] = []
    on_disk: list[int] = []

    def look(count: int) -> None:
        done.append(count)
        on_disk.append(find_missing(cache, tables).num_cached)

    scorer = load_scorer(model_path, packed=True)
    run_pass(cache, tables, scorer, progress=look, write_every_seconds=0.0)
    # Each row is on disk before the next one is finished.
    assert len(done) > 3 and on_disk == [sum(done[:row]) for row in range(len(done))]
    parts = [pq.read_metadata(part).num_rows for part in cache.directory.glob("part-*")]
    assert sorted(parts) == sorted(done) and sum(parts) == 20  # none is written twice


def test_parts_are_written_at_intervals_not_for_each_row(model_path: Path, tmp_path: Path) -> None:
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(10))]
    scorer = load_scorer(model_path, packed=True)
    done: list[int] = []
    run_pass(cache, tables, scorer, progress=done.append)
    assert len(done) > 1 and len(list(cache.directory.glob("part-*"))) == 1


def test_a_sequence_longer_than_the_budget_has_a_row_of_its_own(model_path: Path, tmp_path: Path) -> None:
    done: list[int] = []
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(5))]
    run_pass(cache, tables, load_scorer(model_path, packed=True), token_budget=1, progress=done.append)
    assert done == [2] * 5


def test_a_model_whose_log_probs_are_not_finite_is_refused_and_nothing_is_cached(
    model_path: Path, tmp_path: Path
) -> None:
    """A NaN in the cache would look like a sequence that is missing, run after run."""
    scorer = load_scorer(model_path, packed=True)
    table = make_table([((5, 6), (7, 8), (9,)), ((5,), (7,), (40, 41))])
    with torch.no_grad():
        scorer.model.get_parameter("model.embed_tokens.weight")[40] = torch.nan
    cache = ReferenceCache(tmp_path, NAMESPACE)
    message = one_line(lambda: run_pass(cache, [table], scorer), ModelError)
    assert "row 2 of" in message and "nan" in message and "model.dtype" in message
    assert list(cache.directory.glob("part-*")) == []


# ---- What a run freezes


@pytest.fixture
def frozen_table(tmp_path: Path) -> Iterator[tuple[FrozenReference, PairTable]]:
    table = make_table(random_pairs(6))
    cache = ReferenceCache(tmp_path / "cache", NAMESPACE)
    for keys, factor in ((table.chosen_keys, 1.0), (table.rejected_keys, 10.0)):
        cache.append(keys, -factor * np.arange(1.0, 7.0), np.ones(6, dtype=np.int64))
    yield FrozenReference.take(cache, [table, table]), table


def test_frozen_values_are_those_of_each_pair_s_sides_before_and_after_a_round_trip(
    frozen_table: tuple[FrozenReference, PairTable], tmp_path: Path
) -> None:
    frozen, table = frozen_table
    frozen.save(tmp_path / "reference.parquet")
    again = FrozenReference.load(tmp_path / "reference.parquet")
    assert again.fingerprint == frozen.fingerprint and len(again.keys) == 12
    for reference in (frozen, again):
        values = reference.of(table.select(np.array([4, 0, 0])))
        assert values.chosen.tolist() == [-5.0, -1.0, -1.0]
        assert values.rejected.tolist() == [-50.0, -10.0, -10.0]


def test_values_frozen_for_other_data_are_refused(frozen_table: tuple[FrozenReference, PairTable]) -> None:
    frozen, _ = frozen_table
    for seed in range(1, 5):  # keys before, between and after the frozen ones
        message = one_line(lambda: frozen.of(make_table(random_pairs(3, seed=seed))))  # noqa: B023
        assert "other data" in message and "output_dir" in message


def test_the_fingerprint_changes_with_the_last_bit_of_one_value(
    frozen_table: tuple[FrozenReference, PairTable],
) -> None:
    frozen, _ = frozen_table
    changed = frozen.sums.copy()
    changed[3] = np.nextafter(changed[3], 0.0)
    assert FrozenReference(keys=frozen.keys, sums=changed).fingerprint != frozen.fingerprint
    assert FrozenReference(keys=frozen.keys, sums=frozen.sums.copy()).fingerprint == frozen.fingerprint


def test_values_that_vanished_from_the_cache_are_a_one_line_error(tmp_path: Path) -> None:
    cache, table = ReferenceCache(tmp_path, NAMESPACE), make_table(TABLE_A)
    cache.append(table.chosen_keys, np.array([-1.0, -2.0]), np.array([1, 1]))
    message = one_line(lambda: FrozenReference.take(cache, [table]))
    assert message.startswith("2 reference log-probs have vanished") and str(cache.directory) in message


def test_no_flipped_byte_changes_frozen_values_unnoticed(
    frozen_table: tuple[FrozenReference, PairTable], tmp_path: Path
) -> None:
    frozen, _ = frozen_table
    path = tmp_path / "reference.parquet"
    one_line(lambda: FrozenReference.load(path))
    frozen.save(path)
    content = path.read_bytes()
    num_noticed = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            assert FrozenReference.load(path).fingerprint == frozen.fingerprint
        except CacheError as error:
            num_noticed += 1
            assert str(error).isprintable() and str(path) in str(error) and "--overwrite" in str(error)
    assert num_noticed > len(content) / 6  # the rest is metadata that nobody reads
