"""`dpopack cache`, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.reference_pairs import NAMESPACE, random_keys
from support.refusals import refusal
from support.tiny_run import NUM_PAIRS, tiny_run
from typer.testing import CliRunner

from dpo_pack.commands.main import cache_app
from dpo_pack.data.store import sequence_key
from dpo_pack.recipe.load import load_recipe
from dpo_pack.reference import cache as reference_cache
from dpo_pack.reference.cache import KEY, NUM_TOKENS, SUM, ReferenceCache, sequence_table
from dpo_pack.run.models import Setup
from dpo_pack.run.pairs import ReferencePass, prepare_reference
from dpo_pack.run.setup import prepare
from dpo_pack.system import files
from dpo_pack.system.console import make_console
from dpo_pack.system.files import written_aside

DAY = 86400.0


def cache(*arguments: str | Path) -> str:
    """What the command prints."""
    result = CliRunner().invoke(cache_app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str | Path) -> str:
    """The one line a command ends with, exit status 2 as main gives every DpoPackError."""
    return refusal(lambda: cache(*arguments))


def fill(
    directory: Path, namespace: dict[str, str], *, num: int = 3, seed: int = 0, used_by: str | None = None
) -> ReferenceCache:
    filled = ReferenceCache(directory, namespace, used_by=used_by)
    keys = random_keys(num, seed=seed)
    filled.append(sequence_table(keys, -np.arange(1.0, num + 1), np.ones(num, dtype=np.int64)))
    return filled


def age(filled: ReferenceCache, days: float) -> None:
    then = time.time() - days * DAY
    for path in filled.directory.iterdir():
        os.utime(path, (then, then))


# ---- list and prune


def test_list_says_whose_log_probs_there_are(tmp_path: Path) -> None:
    assert "0 namespaces" in cache("list", "--cache-dir", tmp_path)
    first = fill(tmp_path, NAMESPACE, used_by="org/model")
    first.append(sequence_table(random_keys(3), np.full(3, -1.0), np.ones(3, dtype=np.int64)))  # once more
    first.append(sequence_table(random_keys(2, seed=1), np.full(2, -1.0), np.ones(2, dtype=np.int64)))
    age(fill(tmp_path, {"parameters": "bfloat16", "autocast": "bfloat16"}), 3)
    found = json.loads(cache("list", "--json", "--cache-dir", tmp_path))
    assert [entry["parameters"] for entry in found] == ["float32", "bfloat16"]  # the latest used first
    assert found[0]["models"] == ["org/model"] and found[0]["namespace"] == first.directory.name
    assert (found[0]["sequences"], found[0]["parts"]) == (8, 3)
    assert found[0]["size_bytes"] == sum(path.stat().st_size for path in first.directory.iterdir())
    text = cache("list", "--cache-dir", tmp_path)
    assert "org/model" in text and "2 namespaces" in text


@pytest.mark.parametrize("content", ["[1]", "[" * 10**5, '{"org/model": "now"}', '{"org/model": 1e300}'])
def test_damaged_notes_of_a_namespace_hide_no_log_probs(content: str, tmp_path: Path) -> None:
    filled = fill(tmp_path, NAMESPACE)
    for name in ("used.json", "namespace.json"):
        (filled.directory / name).write_text(content)
    ReferenceCache(tmp_path, NAMESPACE)
    assert "unknown model" in cache("list", "--cache-dir", tmp_path)
    ReferenceCache(tmp_path, NAMESPACE, used_by="org/other")
    assert "org/other" in cache("list", "--cache-dir", tmp_path)
    assert "3 sequences" in cache("list", "--cache-dir", tmp_path)


def test_prune_by_age_removes_what_was_not_used_and_keeps_the_rest(tmp_path: Path) -> None:
    names = [NAMESPACE, {"parameters": "bfloat16"}, {"parameters": "float16"}]
    old, new, used = (fill(tmp_path, name) for name in names)
    age(old, 100)
    age(new, 10)
    age(used, 100)
    ReferenceCache(tmp_path, names[2], used_by="org/model")
    told = cache("prune", "--older-than", "90d", "--dry-run", "--cache-dir", tmp_path)
    assert "would remove" in told and "removing" not in told and old.directory.exists()
    assert "not used for 100 days" in cache("prune", "--older-than", "90d", "--cache-dir", tmp_path)
    assert not old.directory.exists() and new.directory.exists() and used.directory.exists()
    assert "removing" not in cache("prune", "--older-than", "90d", "--cache-dir", tmp_path)


def test_prune_by_size_removes_the_longest_unused_first(tmp_path: Path) -> None:
    filled = [fill(tmp_path, {"parameters": name}, num=1000) for name in ("a", "b", "c")]
    for days, one in enumerate(filled):
        age(one, 10 + days)
    size = sum(path.stat().st_size for path in filled[0].directory.iterdir())
    cache("prune", "--max-size", f"{2 * size + 100}B", "--cache-dir", tmp_path)
    assert [one.directory.exists() for one in filled] == [True, True, False]
    cache("prune", "--max-size", "0B", "--cache-dir", tmp_path)
    assert [one.directory.exists() for one in filled] == [False, False, False]


def test_prune_never_deletes_what_this_program_has_not_written_and_follows_no_links(tmp_path: Path) -> None:
    filled = fill(tmp_path, NAMESPACE)
    root, ours = filled.directory.parent, [path.name for path in filled.directory.iterdir()]
    (filled.directory / "notes.txt").write_text("mine")
    (filled.directory / "part-mine.parquet").write_text("mine")
    (root / "not-a-namespace").mkdir()
    (root / ("0" * 32)).mkdir()  # named like one, but it describes none
    (root / ("0" * 32) / "namespace.json").write_text("{}")
    elsewhere = fill(tmp_path / "elsewhere", {"parameters": "bfloat16"})
    (root / elsewhere.directory.name).symlink_to(elsewhere.directory)
    cache("prune", "--max-size", "0B", "--cache-dir", tmp_path)
    assert sorted(path.name for path in filled.directory.iterdir()) == ["notes.txt", "part-mine.parquet"]
    assert not any((filled.directory / name).exists() for name in ours)
    assert (root / "not-a-namespace").is_dir() and (root / ("0" * 32) / "namespace.json").is_file()
    assert len(list(elsewhere.directory.iterdir())) == 2


def killed_while_writing(*targets: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What stays of a process that is killed just before it puts each of these in place."""
    left = []
    with monkeypatch.context() as killing:
        killing.setattr(files, "discard", lambda path: None)
        for target in targets:
            with contextlib.suppress(KeyboardInterrupt), written_aside(target) as temporary:
                left.append(temporary)
                file = temporary / "tokens.bin" if target.parent.name == "tokens" else temporary
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(b"x")
                raise KeyboardInterrupt
    return left


def make_old(*paths: Path) -> None:
    for path in paths:
        for file in (path, *path.rglob("*")):
            os.utime(file, (0, 0))


def test_leftovers_of_killed_processes_go_and_what_a_process_still_writes_stays(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = recipe.parent / "cache"
    filled = fill(cache_dir, NAMESPACE)
    tokens = cache_dir / "tokens" / "0123456789abcdef0123456789abcdef"
    part = next(filled.directory.glob("part-*"))
    targets = [cache_dir / "file_hashes.json", cache_dir / "model_hashes.json", tokens, part]
    store = cache_dir / "tokens" / "fedcba9876543210fedcba9876543210"
    targets += [filled.directory / name for name in ("used.json", "namespace.json")]
    targets.append(store / "beginnings.npy")
    old = killed_while_writing(*targets, monkeypatch=monkeypatch)
    old.append(cache_dir / ".shared-ab_3x1z9.tmp")  # ranks look for it in the cache that they share
    old[-1].touch()
    mine = [cache_dir / ".notes.tmp", cache_dir / "tokens" / ".mine.0123abcd.tmp"]
    for path in mine:
        path.touch()
    make_old(*old, *mine)
    young = killed_while_writing(*targets, monkeypatch=monkeypatch)
    os.utime(young[2], (0, 0))  # a directory does not change when the files in it grow
    told = cache("prune", "--dry-run", "--cache-dir", cache_dir)
    assert f"of {cache_dir}: leftovers of killed runs" in told and "removing" not in told
    assert all(path.exists() for path in old)
    cache("prune", "--cache-dir", cache_dir)
    assert "removing" not in cache("prune", "--cache-dir", cache_dir)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*young, *mine, part))


def test_prune_removes_damaged_parts_or_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = fill(tmp_path, NAMESPACE)
    part = next(filled.directory.glob("part-*.parquet"))
    damaged = part.with_suffix(".damaged")
    damaged.write_bytes(b"x")
    with monkeypatch.context() as refusing:
        refusing.setattr(reference_cache, "discard", lambda path: None)
        assert str(damaged) in refused("prune", "--cache-dir", tmp_path)
    cache("prune", "--cache-dir", tmp_path)
    assert not damaged.exists() and part.exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--older-than", "soon"), ("--max-size", "-1GB"), ("--max-size", "80")]
)
def test_an_age_or_size_that_is_none_is_refused(option: str, value: str, tmp_path: Path) -> None:
    assert option in refused("prune", option, value, "--cache-dir", tmp_path)


# ---- export and import


def prepared_of(recipe: Path, *overrides: str) -> Setup:
    return prepare(load_recipe(recipe, overrides), make_console(quiet=True))


def fill_by(recipe: Path, *overrides: str) -> ReferencePass:
    return prepare_reference(prepared_of(recipe, *overrides))


def test_what_is_exported_imports_elsewhere_bitwise(recipe: Path, tmp_path: Path) -> None:
    filled = fill_by(recipe)
    cache_dir = recipe.parent / "cache"
    told = cache("export", tmp_path / "all.parquet", "--cache-dir", cache_dir)
    assert told.startswith("44 sequences")
    elsewhere = f"reference.cache_dir={tmp_path / 'elsewhere'}"
    # These commands are one process, whatever number of them the recipe trains on.
    told = cache("import", tmp_path / "all.parquet", recipe, elsewhere, "distributed.num_processes=8")
    assert "44 sequences added" in told and "44 of the recipe's 44" in told
    imported = fill_by(recipe, elsewhere)
    assert imported.num_computed == 0
    table = prepared_of(recipe).data.train
    keys = np.concatenate((table.chosen_keys, table.rejected_keys))
    assert imported.cache.lookup(keys).tobytes() == filled.cache.lookup(keys).tobytes()
    told = cache("import", tmp_path / "all.parquet", recipe, elsewhere)
    assert ": 0 sequences added" in told


def test_log_probs_of_another_model_are_refused(recipe: Path, tmp_path: Path) -> None:
    fill_by(recipe, "model.autocast=bfloat16")
    cache("export", tmp_path / "x.parquet", "--cache-dir", recipe.parent / "cache")
    assert "another model or precision" in refused("import", tmp_path / "x.parquet", recipe)


def test_own_log_probs_come_by_key(recipe: Path, tmp_path: Path) -> None:
    table = prepared_of(recipe).data.train
    groups = map(table.group, range(NUM_PAIRS))
    keys = [sequence_key(group.context, group.completions[0]) for group in groups]
    columns = {
        "key": pa.array(keys, pa.binary(16)),
        "logps_sum": -table.chosen_lengths.astype(float),
        "num_tokens": table.chosen_lengths,
        "token_logps": [[-1.0] * int(length) for length in table.chosen_lengths],
    }
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    assert "16 sequences added" in cache("import", tmp_path / "own.parquet", recipe)
    filled = fill_by(recipe)
    assert (filled.num_cached, filled.num_computed) == (16, 28)
    assert filled.cache.lookup(table.chosen_keys).tolist() == (-table.chosen_lengths.astype(float)).tolist()
    assert np.isfinite(filled.cache.lookup(table.chosen_keys)).all()


def key_of(number: int) -> bytes:
    return sequence_key(np.array([1], dtype=np.int32), np.array([number], dtype=np.int32))


GOOD = {
    "key": pa.array([key_of(1), key_of(2), key_of(3)], pa.binary(16)),
    "logps_sum": pa.array([-1.0, -2.0, -3.0]),
    "num_tokens": pa.array([1, 2, 2]),
}
BAD: dict[str, tuple[dict[str, pa.Array | None], str]] = {
    "not finite": ({"logps_sum": pa.array([-1.0, float("nan"), -1.0])}, " row 2: logps_sum "),
    "positive": ({"logps_sum": pa.array([-1.0, -2.0, 3.0])}, " row 3: logps_sum "),
    "null": ({"logps_sum": pa.array([-1.0, None, -3.0])}, "null"),
    "text": ({"logps_sum": pa.array(["a", "b", "c"])}, "double"),
    "no tokens": ({"num_tokens": pa.array([1, 0, 2])}, " row 2: num_tokens "),
    "half a token": ({"num_tokens": pa.array([1.5, 1.0, 2.0])}, "int32"),
    "short key": ({"key": pa.array([b"a", b"b", b"c"])}, "fixed_size_binary[16]"),
    "two values for one sequence": (
        {
            "key": pa.array([key_of(1), key_of(2), key_of(1)], pa.binary(16)),
            "num_tokens": pa.array([1, 2, 1]),
        },
        " row 3: another row ",
    ),
    "no such column": ({"key": None}, '"key"'),
}


@pytest.fixture(scope="module")
def shared_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("shared") / "work")


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_and_nothing_is_imported(kind: str, shared_recipe: Path, tmp_path: Path) -> None:
    changes, expected = BAD[kind]
    columns = {name: column for name, column in {**GOOD, **changes}.items() if column is not None}
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    message = refused("import", tmp_path / "bad.parquet", shared_recipe)
    assert expected in message and str(tmp_path / "bad.parquet") in message
    assert not list((shared_recipe.parent / "cache").glob("reference/*/part-*"))


def test_a_file_that_is_damaged_or_no_parquet_is_not_imported(shared_recipe: Path, tmp_path: Path) -> None:
    file, sums = tmp_path / "file.parquet", np.arange(1.0, 9.0)
    columns = {KEY: [bytes([n]) * 16 for n in range(8)], SUM: sums, NUM_TOKENS: np.ones(8, dtype=np.int32)}
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table(columns), file, **options)
    content = file.read_bytes()
    assert content.count(sums[3:5].tobytes()) == 1
    for damaged in (content.replace(sums[3:5].tobytes(), sums[4:6].tobytes()), b"not parquet", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert str(file) in refused("import", file, shared_recipe)


def test_a_damaged_part_is_not_left_out_of_an_export_silently(tmp_path: Path) -> None:
    filled = fill(tmp_path, NAMESPACE)
    part = next(filled.directory.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    message = refused("export", tmp_path / "x.parquet", "--cache-dir", tmp_path)
    assert "is damaged" in message and not (tmp_path / "x.parquet").exists()
