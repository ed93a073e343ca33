"""Exports reference log-probs from a recipe's cache to one Parquet file, and imports them.

    key, logps_sum, num_tokens[, token_logps]     one row for each sequence; parts.py describes the columns

token_logps is null for a sequence of which only the sum is known.
If an import is refused, the cache does not change, and one line names the file and, if possible, the row.

Legend: n = rows of the file, S = sequences of the recipe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from dpo_pack.packing.lengths import FloatArray
from dpo_pack.recipe.load import Recipe, source_names
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.key_index import KeyIndex, Keys
from dpo_pack.reference.maintenance import write_export
from dpo_pack.reference.parts import (
    KEY,
    NUM_TOKENS,
    SUM,
    TOKENS,
    TokenLogps,
    key_column,
    keys_of,
    numbers_of,
    sequence_table,
    token_column,
    tokens_of,
)
from dpo_pack.reference.work import ReferenceWork, find_work
from dpo_pack.run.setup import Setup, prepare
from dpo_pack.system.errors import CacheError, first_line
from dpo_pack.system.files import parse_json

# A log-prob is at most 0, but rounding in low precision may give a value above 0.
_LARGEST_LOGP = 1e-3
# A sum may differ from the sum of its fp32 per-token values by this many nats, plus this part of the sum.
_SUM_TOLERANCE, _RELATIVE_SUM_TOLERANCE = 1e-3, 1e-5

# For each column: a test of its type in the file, the allowed types in words, and the type after reading.
_COLUMNS: dict[str, tuple[Callable[[pa.DataType], bool], str, pa.DataType]] = {
    KEY: (lambda type: type == pa.binary(16), "fixed_size_binary[16]", pa.binary(16)),
    SUM: (lambda type: pa.types.is_floating(type) or pa.types.is_integer(type), "numbers", pa.float64()),
    NUM_TOKENS: (pa.types.is_integer, "whole numbers", pa.int64()),
    TOKENS: (
        lambda type: (
            (pa.types.is_list(type) or pa.types.is_large_list(type)) and pa.types.is_floating(type.value_type)
        ),
        "lists of numbers",
        pa.large_list(pa.float32()),
    ),
}


class _Rows(NamedTuple):
    """The columns of a file that is imported."""

    keys: Keys  # [n, 16]
    sums: FloatArray  # [n], nats
    num_tokens: npt.NDArray[np.int64]  # [n]
    tokens: TokenLogps | None  # without values for a row whose `token_logps` is null


# [n] whether each row is wrong; and a function that describes the error in a row, given its index.
_Problem = tuple[npt.NDArray[np.bool_], Callable[[int], str]]


def export_recipe(recipe: Recipe, target: Path, console: Console) -> int:
    """Writes the cached log-probs of the recipe's sequences; returns the number of sequences.

    Each row also names the first use of the sequence (source, row number, chosen or rejected) and has sha256
    hashes of the decoded texts, special tokens included. Raises CacheError if the cache lacks a sequence.
    """
    setup = prepare(recipe, console, runs_models=False)
    namespace = setup.reference_facts.namespace
    cache = ReferenceCache(setup.reference_facts.cache_dir, namespace)
    work = find_work(cache, setup.tables)
    if work.num_missing:
        raise CacheError(
            f"{work.num_missing:,} of the recipe's {work.num_unique:,} sequences have no log-prob yet; run "
            "`dpopack precompute-ref` first"
        )
    keys = work.all_keys[work.sides]
    columns = {
        **_places(setup, work),
        KEY: key_column(keys),
        NUM_TOKENS: work.lengths.completions[work.sides].astype(np.int32),
    }
    sums, tokens = cache.lookup_tokens(keys)
    only_sum = np.isnan(sums)
    columns[SUM] = np.where(only_sum, cache.lookup(keys), sums)
    if not only_sum.all():
        columns[TOKENS] = token_column(tokens, only_sum)
    write_export(target, pa.table(columns), namespace)
    return len(keys)


def import_into(recipe: Recipe, file: Path, console: Console) -> None:
    """Adds a file's log-probs to the cache of the recipe's reference: all rows, or none.

    Raises CacheError if the file is wrong or cannot be read.
    """
    table = _read_file(file)
    setup = prepare(recipe, console, runs_models=False)
    namespace = setup.reference_facts.namespace
    _check_same_model(file, table, namespace)
    cache = ReferenceCache(setup.reference_facts.cache_dir, namespace)
    work = find_work(cache, setup.tables)
    logps = _Rows(
        keys=keys_of(table),
        sums=numbers_of(table[SUM]),
        num_tokens=numbers_of(table[NUM_TOKENS]),
        tokens=tokens_of(table) if TOKENS in table.column_names else None,
    )
    only_sum = np.ones(len(table), dtype=np.bool_) if logps.tokens is None else _is_null(table[TOKENS])
    index = KeyIndex.of(logps.keys)
    for is_wrong, describe in _problems(logps, only_sum, index, work):
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise CacheError(f"{file} row {row + 1}: {describe(row)}; nothing was imported")
    num_added = 0
    for per_token in (True, False):  # rows with token values come first, because they also give the sum
        rows = np.flatnonzero(only_sum != per_token)
        rows = rows[KeyIndex.of(logps.keys[rows]).first]
        rows = rows[~cache.contains(logps.keys[rows], per_token=per_token)]
        tokens = logps.tokens.take(rows) if logps.tokens is not None and per_token else None
        added = sequence_table(logps.keys[rows], logps.sums[rows], logps.num_tokens[rows], tokens)
        cache.append(added, {"origin": f"imported from {file.name}"})
        num_added += len(added)
    cache.note_use(setup.reference_facts.label)
    after = find_work(cache, setup.tables)
    console.print(
        f"{file}: {len(table):,} rows, {num_added:,} sequences added, {len(index) - num_added:,} were in the "
        f"cache before; it now has {after.num_cached:,} of the recipe's {after.num_unique:,} sequences"
    )


def _read_file(file: Path) -> pa.Table:
    """Returns the columns of `_COLUMNS`, cast to their types. Raises CacheError, also for a null value."""
    try:
        table = pq.read_table(file, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise CacheError(f"{file}: no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise CacheError(
            f"{file} cannot be read as Parquet ({first_line(error)}); create it again, with dpopack "
            "cache export or a program of your own"
        ) from error
    lacking = {KEY, SUM, NUM_TOKENS} - set(table.column_names)
    if lacking:
        raise CacheError(
            f"{file} has no column {', '.join(sorted(lacking))}; its columns are "
            f"{', '.join(table.column_names)}, see docs/reference-cache.md"
        )
    table = table.select([name for name in _COLUMNS if name in table.column_names])
    for name in table.column_names:
        is_right, kind, _ = _COLUMNS[name]
        if not is_right(table[name].type):
            raise CacheError(f"{file}: column {name} must hold {kind}, not {table[name].type}")
        is_null = _is_null(table[name])
        if is_null.any() and name != TOKENS:
            raise CacheError(f"{file} row {is_null.argmax() + 1}: {name} is null; nothing was imported")
    table = table.cast(
        pa.schema([(name, _COLUMNS[name][2]) for name in table.column_names], table.schema.metadata)
    )
    if TOKENS in table.column_names and any(chunk.flatten().null_count for chunk in table[TOKENS].chunks):
        raise CacheError(f"{file}: {TOKENS} has a value that is null; nothing was imported")
    return table


def _is_null(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.array(column.is_null().to_pylist(), dtype=np.bool_)  # `to_numpy` would import pandas


def _check_same_model(file: Path, table: pa.Table, namespace: Mapping[str, Any]) -> None:
    """Raises CacheError if the file was exported for another model. A file without a model is accepted."""
    described = (table.schema.metadata or {}).get(b"dpo_pack.namespace")
    if described is None:
        return
    ours, theirs = json.loads(json.dumps(dict(namespace))), parse_json(described) or {}
    differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if differing:
        raise CacheError(
            f"{file} holds log-probs of another model: {', '.join(differing)} differ from the recipe's "
            "reference; import it with the recipe of that model"
        )


def _problems(
    logps: _Rows, only_sum: npt.NDArray[np.bool_], index: KeyIndex, work: ReferenceWork
) -> Iterator[_Problem]:
    """Yields tests of all rows. Each test is only valid if the tests before it found no wrong row."""
    sums, num_tokens, tokens = logps.sums, logps.num_tokens, logps.tokens
    yield ~np.isfinite(sums), lambda row: f"the log-prob is {sums[row]}"
    yield (
        sums > _LARGEST_LOGP,
        lambda row: f"the log-prob is {sums[row]:g}; it is at most 0, as the logarithm of a probability",
    )
    yield num_tokens < 1, lambda row: f"{NUM_TOKENS} is {num_tokens[row]}"
    if tokens is not None:
        lengths = tokens.lengths
        yield (
            ~only_sum & (lengths != num_tokens),
            lambda row: f"{TOKENS} has {lengths[row]} values for a completion of {num_tokens[row]} tokens",
        )
        row_of_value = np.repeat(np.arange(len(sums)), lengths)
        is_wrong = ~(np.isfinite(tokens.values) & (tokens.values <= _LARGEST_LOGP))
        yield (
            np.bincount(row_of_value, weights=is_wrong, minlength=len(sums)) > 0,
            lambda row: f"{TOKENS} has a value that is not finite or above 0",
        )
        added = np.bincount(row_of_value, weights=tokens.values, minlength=len(sums))
        yield (
            ~only_sum & (np.abs(added - sums) > _SUM_TOLERANCE + _RELATIVE_SUM_TOLERANCE * np.abs(sums)),
            lambda row: f"{SUM} is {sums[row]:g}, and {TOKENS} add up to {added[row]:g}",
        )
    sequences = KeyIndex.of(work.all_keys[work.sides])
    places = sequences.find(logps.keys)
    ours = work.lengths.completions[work.sides][sequences.first][places]
    yield (
        (places >= 0) & (ours != num_tokens),
        lambda row: f"{NUM_TOKENS} is {num_tokens[row]}, and the recipe's completion has {ours[row]} tokens",
    )
    first = index.first[index.inverse]
    yield (
        sums != sums[first],
        lambda row: (
            f"the sequence has a log-prob of {sums[row]:g} here and of {sums[first[row]]:g} in row "
            f"{first[row] + 1}"
        ),
    )


def _places(setup: Setup, work: ReferenceWork) -> dict[str, list[object]]:
    """Returns columns [S]: where each sequence is used first, and the hashes of its texts."""
    names = _source_names(setup)
    columns: dict[str, list[object]] = {
        name: [] for name in ("source", "row_number", "side", "prompt_sha256", "completion_sha256")
    }
    for group, side in np.argwhere(work.sides).tolist():
        number, pair = int(work.table_indices[group]), int(work.pair_indices[group])
        table = work.tables[number]
        completion = table.rejected(pair) if side else table.chosen(pair)
        columns["source"].append(names[number][table.source_indices[pair]])
        columns["row_number"].append(int(table.row_numbers[pair]))
        columns["side"].append("rejected" if side else "chosen")
        for name, ids in (("prompt_sha256", table.prompt(pair)), ("completion_sha256", completion)):
            text = str(setup.tokenizer.decode(ids.tolist()))
            columns[name].append(hashlib.sha256(text.encode()).hexdigest())
    return columns


def _source_names(setup: Setup) -> list[tuple[str, ...]]:
    """Returns the source names of each table of the recipe. Raises CacheError if two names are equal."""
    recipe = setup.recipe
    train_names = source_names(recipe.data.train)
    # A held-out fraction is taken from the training sources; any other held-out set is one source.
    is_fraction = not isinstance(recipe.data.eval, tuple)
    held_out = [train_names if is_fraction else (name,) for name in setup.data.eval]
    names = [train_names, *held_out]
    stores: dict[str, Path | None] = {}
    for table, names_of_table in zip(setup.tables, names, strict=True):
        for name, store in zip(names_of_table, table.stores, strict=True):
            if stores.setdefault(name, store.directory) != store.directory:
                raise CacheError(f"two sources of the recipe are called {name!r}; give one another name")
    return names
