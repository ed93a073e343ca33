"""The pass that fills the reference cache: right values, nothing lost or computed twice, its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from support.crash_points import Files, read_files, write_files
from support.file_operations import IS_POSSIBLE, Half, Operation, in_forks, traced
from support.oracle import completion_logps_one_by_one
from support.reference_pairs import (
    NAMESPACE,
    SETTINGS,
    SmallMemory,
    all_sums,
    load_scorer,
    make_table,
    num_cached,
    random_pairs,
    run_pass,
)
from support.refusals import refusal
from support.tiny_models import tiny_model

import dpo_pack.reference.compute as reference_pass
from dpo_pack.model.facts import model_shape
from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.reference.cache import FrozenReference, ReferenceCache, sequence_table
from dpo_pack.reference.compute import BudgetSearch, compute_missing, fill_cache, find_work, plan_pass
from dpo_pack.system.errors import CacheError, ModelError
from dpo_pack.system.files import read_json


@pytest.mark.parametrize("mode", ["shared", "unshared", "padded"])
def test_the_pass_computes_what_each_sequence_has_alone(mode: str, model_path: Path, tmp_path: Path) -> None:
    pairs = random_pairs(12)
    tables = [make_table(pairs[:8]), make_table([*pairs[6:], (pairs[0][0], pairs[0][2], (7, 7))])]
    cache = ReferenceCache(tmp_path, NAMESPACE)
    # One side of a pair is there already: a group of one sequence among groups of two.
    cache.append(sequence_table(tables[0].chosen_keys[3:4], np.array([-123.0]), np.array([1])))
    done: list[int] = []
    run_pass(
        cache,
        tables,
        load_scorer(model_path, packed=mode != "padded"),
        replace(SETTINGS, share_prompt=mode == "shared"),
        progress=done.append,
    )
    assert sum(done) == 2 * 12 + 1 - 1 and len(done) > 1

    model = tiny_model("llama")
    for table in tables:
        values = FrozenReference.find(cache, [table], whole=True).of(table)
        groups = [table.group(pair) for pair in range(table.num_pairs)]
        for side, keys in enumerate((table.chosen_keys, table.rejected_keys)):
            ours = values[:, side]
            sequences = [(group.context.tolist(), group.completions[side].tolist()) for group in groups]
            with torch.no_grad():
                expected = completion_logps_one_by_one(model, sequences).double().numpy()
            expected[(keys == tables[0].chosen_keys[3]).all(axis=1)] = -123.0
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    rows = [row for part in cache.directory.glob("part-*") for row in pq.read_table(part).to_pylist()]
    counts = {row["key"]: row["num_tokens"] for row in rows}
    assert counts[tables[0].chosen_keys[0].tobytes()] == tables[0].chosen_lengths[0]
    assert len(counts) == 25


def test_two_runs_on_one_cache_share_the_work(model_path: Path, tmp_path: Path) -> None:
    tables, settings = [make_table(random_pairs(40))], replace(SETTINGS, write_every_seconds=0.0)
    scorer, begun = load_scorer(model_path), list[int]()
    computed: list[Path] = []

    class Both:
        backend, model = scorer.backend, scorer.model

        def __call__(self, row: Row) -> RowLogps:
            begun.append(len(computed))
            if len(begun) == 2:  # while the first run computes its second row, another one does everything
                other = ReferenceCache(tmp_path, NAMESPACE)
                run_pass(other, tables, scorer, settings)
                computed.extend(other.directory.glob("part-*"))
            result: RowLogps = scorer(row)
            return result

    cache, done = ReferenceCache(tmp_path, NAMESPACE), list[int]()
    run_pass(cache, tables, Both(), settings, progress=done.append)  # type: ignore[arg-type]
    assert len(begun) == 2 and len(computed) > 3  # the second row was already under way
    assert sum(done) == 80 and find_work(cache, tables).missing.sum() == 0


def test_a_model_with_log_probs_not_finite_is_refused_uncached(model_path: Path, tmp_path: Path) -> None:
    """A NaN in the cache would look like a sequence that is missing, run after run."""
    scorer = load_scorer(model_path)
    table = make_table([((5, 6), (7, 8), (9,)), ((5,), (7,), (40, 41))])
    with torch.no_grad():
        scorer.model.get_parameter("model.embed_tokens.weight")[40] = torch.nan
    cache = ReferenceCache(tmp_path, NAMESPACE)
    message = refusal(lambda: run_pass(cache, [table], scorer), ModelError)
    assert "row 2 of" in message and "nan" in message and "model.dtype" in message
    assert list(cache.directory.glob("part-*")) == []


# ---- Going on after a kill


@pytest.mark.parametrize("mode", ["shared", "padded"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_pass_that_was_killed_and_goes_on_ends_bitwise_as_an_uninterrupted_one(
    mode: str, num_ranks: int, model_path: Path, tmp_path: Path
) -> None:
    scorer = load_scorer(model_path, packed=mode == "shared")
    tables = [make_table(random_pairs(20)), make_table(random_pairs(8, seed=1))]
    straight, killed = ReferenceCache(tmp_path / "a", NAMESPACE), ReferenceCache(tmp_path / "b", NAMESPACE)
    for cache in (straight, killed):  # something was there before
        cache.append(sequence_table(tables[0].chosen_keys[::3], np.full(7, -5.0), np.ones(7, dtype=np.int64)))
    run_pass(straight, tables, scorer)

    def stop(num_sequences: int) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_pass(killed, tables, scorer, progress=stop)
    work = find_work(killed, tables)
    assert 0 < work.missing.sum() < work.sides.sum() - 7
    for rank in range(num_ranks):
        settings = replace(SETTINGS, rank=rank, num_ranks=num_ranks)
        compute_missing(
            killed,
            plan_pass(work, model_shape(scorer.model), settings, is_packed=scorer.backend is not None),
            scorer,
            settings,
        )
    sums = all_sums(killed, tables)
    assert np.isfinite(sums).all() and sums.tobytes() == all_sums(straight, tables).tobytes()


def test_a_disk_that_fills_up_stops_the_pass_with_one_line_and_keeps_what_was_written(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tables = ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(10))]
    write_bytes, num_written = Path.write_bytes, 0

    def write_twice(path: Path, data: bytes) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 2:
            write_bytes(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device", str(path))
        return write_bytes(path, data)

    scorer = load_scorer(model_path)
    monkeypatch.setattr(Path, "write_bytes", write_twice)
    settings = replace(SETTINGS, write_every_seconds=0.0)
    message = refusal(lambda: run_pass(cache, tables, scorer, settings), CacheError)
    assert "No space left on device" in message and str(cache.directory) in message
    monkeypatch.undo()
    names = sorted(path.suffix for path in cache.directory.iterdir())
    assert names == [".json", ".parquet", ".parquet"]
    work = find_work(cache, tables)
    assert 0 < work.missing.sum() < work.sides.sum()
    run_pass(cache, tables, scorer, settings)
    assert find_work(cache, tables).missing.sum() == 0


# ---- Out of memory


def test_out_of_memory_halves_the_budget_and_loses_no_finished_row(model_path: Path, tmp_path: Path) -> None:
    tables, cache = [make_table(random_pairs(20))], ReferenceCache(tmp_path, NAMESPACE)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=1000, fails_at=(3, 5))
    done: list[int] = []
    fitted = run_pass(cache, tables, scorer, replace(SETTINGS, token_budget=128), progress=done.append)
    assert fitted < 64  # halved twice
    assert sum(done) == 40 == num_cached(find_work(cache, tables))
    assert len(scorer.rows) == len(done) + 2  # a row that was finished was never computed again
    assert max(scorer.rows[3:]) <= 64 < max(scorer.rows[:3])
    expected = ReferenceCache(tmp_path / "expected", NAMESPACE)
    run_pass(expected, tables, load_scorer(model_path))
    np.testing.assert_allclose(all_sums(cache, tables), all_sums(expected, tables), rtol=0, atol=1e-4)


def test_ranks_in_lockstep_cannot_split_a_row_and_name_a_budget(model_path: Path, tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=1000, fails_at=(3,))
    settings = replace(SETTINGS, token_budget=128, in_lockstep=True)
    tables, done = [make_table(random_pairs(20))], list[int]()
    message = refusal(lambda: run_pass(cache, tables, scorer, settings, progress=done.append), ModelError)
    budget = int(message.rpartition("reference.token_budget: ")[2])
    assert message.startswith("reference.token_budget: ") and 0 < budget <= 64
    assert num_cached(find_work(cache, tables)) == sum(done) > 0


def test_a_pair_too_large_for_memory_is_named(model_path: Path, tmp_path: Path) -> None:
    table = make_table([((5,), (6,), (7,)), (tuple(range(3, 40)), (6, 7), (8,))])
    cache = ReferenceCache(tmp_path, NAMESPACE)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=30)
    message = refusal(lambda: run_pass(cache, [table], scorer), ModelError)
    assert "row 2 of its data source" in message and "40 tokens" in message and "data.max_length" in message


def test_an_error_that_is_not_about_memory_is_not_taken_for_one(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = load_scorer(model_path)

    def fail(row: Row) -> RowLogps:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(scorer, "forward", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        run_pass(ReferenceCache(tmp_path, NAMESPACE), [make_table(random_pairs(2))], scorer)


@pytest.mark.slow
@pytest.mark.skipif(not IS_POSSIBLE, reason="file operations are traced on Linux on x86-64 only")
def test_a_pass_killed_at_any_file_operation_loses_and_falsifies_nothing(
    model_path: Path, tmp_path: Path
) -> None:
    scorer = load_scorer(model_path)
    tables = [make_table(random_pairs(8)), make_table(random_pairs(3, seed=1))]
    settings = replace(SETTINGS, write_every_seconds=0.0)  # a part for each row
    killed = ReferenceCache(tmp_path, NAMESPACE)
    moments: list[Files] = []

    def copy(operation: Operation) -> Half | None:
        if operation.changes:
            moments.append(read_files(tmp_path))
        is_write = operation.call == "write" and operation.size > 1
        return Half(then=lambda: moments.append(read_files(tmp_path))) if is_write else None

    def whole_pass() -> int:
        run_pass(killed, tables, scorer, settings)
        return 0

    def go_on_from_each_moment() -> tuple[list[int], list[str]]:
        """Sequences that each killed pass has kept, and what is wrong after it."""
        assert traced(whole_pass, [tmp_path], copy) == 0
        expected = all_sums(killed, tables)
        kept, wrong = [], []
        for number, files in enumerate(moments):
            write_files(tmp_path, files)
            sums, work = all_sums(killed, tables), find_work(killed, tables)
            resumed: list[int] = []
            kept.append(num_cached(work))
            run_pass(killed, tables, scorer, progress=resumed.append)
            is_false = (np.isfinite(sums) & (sums != expected)).any()
            if is_false or sum(resumed) != work.missing.sum() or (all_sums(killed, tables) != expected).any():
                wrong.append(f"moment {number}")
            wrong += [str(path) for path in killed.directory.glob("*.damaged")]
        return kept, wrong

    ((kept, wrong),) = in_forks([go_on_from_each_moment])
    assert not wrong
    # What one moment has, the next has too.
    assert kept[0] == 0 and kept == sorted(kept) and len(set(kept)) > 3


def fill(
    directory: Path,
    scorer: CompletionLogps,
    console: Console,
    *,
    is_exact: Callable[[int], bool] = lambda token_budget: True,
    memo: str = "memo.json",
) -> int | None:
    """Fills a cache with a search for the longest rows; returns the token budget that is remembered."""
    cache, tables = ReferenceCache(directory, NAMESPACE), [make_table(random_pairs(30))]
    search = BudgetSearch(memo_path=directory / memo, key="model on device", is_exact=is_exact)
    work, shape = find_work(cache, tables), model_shape(scorer.model)
    settings = replace(SETTINGS, token_budget=50)
    fill_cache(cache, work, scorer, shape, settings, search=search, console=console)
    assert find_work(cache, tables).missing.sum() == 0
    return (read_json(directory / memo) or {}).get("model on device")


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_largest_budget_that_fits_is_found_used_and_remembered(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 400)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=210)
    assert fill(tmp_path, scorer, console) == 200
    assert "rows of up to 200 tokens" in text_of(console)
    assert [tokens > 210 for tokens in scorer.rows].count(True) == 1  # tried once, and never again
    again = SmallMemory(load_scorer(model_path), most_tokens=210)
    assert fill(tmp_path / "second", again, console, memo="../memo.json") == 200
    assert max(again.rows) <= 200 and len(again.rows) == len(scorer.rows) - 2  # nothing was measured


@pytest.mark.parametrize("content", ['{"model on device": "many"}', '{"model on device": 0}', "[1]", '{"m'])
def test_a_damaged_memo_is_forgotten(
    content: str, model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 120)  # fits
    (tmp_path / "memo.json").write_text(content)
    assert fill(tmp_path, load_scorer(model_path), console) == 120


def test_the_search_stays_within_what_the_model_is_exact_for(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 200)
    scorer = SmallMemory(load_scorer(model_path), most_tokens=10_000)
    assert fill(tmp_path, scorer, console, is_exact=lambda token_budget: token_budget <= 110) == 100
    assert 50 < max(scorer.rows) <= 100


def test_memory_that_runs_out_later_is_told_and_remembered(
    model_path: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_pass, "LARGEST_TOKEN_BUDGET", 200)
    remembered = fill(tmp_path, SmallMemory(load_scorer(model_path), most_tokens=210, fails_at=(3,)), console)
    assert remembered is not None and 50 <= remembered <= 100
    assert f"reference.token_budget={remembered}" in text_of(console)


@pytest.mark.gpu
def test_on_a_gpu_rows_shrink_until_they_fit(model_path: Path, tmp_path: Path, console: Console) -> None:
    device = torch.device("cuda")
    scorer = load_scorer(model_path).to(device)
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        cache = ReferenceCache(tmp_path, NAMESPACE)
        table = make_table(random_pairs(200_000))
        search = BudgetSearch(memo_path=tmp_path / "memo.json", key="k", is_exact=lambda budget: True)
        settings = replace(SETTINGS, token_budget=1024, device=device)
        fill_cache(
            cache,
            find_work(cache, [table]),
            scorer,
            model_shape(scorer.model),
            settings,
            search=search,
            console=console,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1024 < read_json(tmp_path / "memo.json")["k"] < reference_pass.LARGEST_TOKEN_BUDGET
