"""Reference log-probs out of and into a recipe's cache, as one Parquet file.

Three kinds of file can be read, told by their columns:

    key, logps_sum, num_tokens[, token_logps]                        as `dpopack cache export` writes
    prompt_ids, completion_ids, logps_sum[, token_logps]             a row a sequence, by its token ids
    row_number, ref_chosen_logps, ref_rejected_logps[, source]       a row a pair, by its place in the data

Legend: n rows of the file, S sequences of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console

from dpo_pack.cache_tools import write_export
from dpo_pack.data.keys import sequence_key
from dpo_pack.data.lengths import IntArray
from dpo_pack.data.store import PairTable
from dpo_pack.errors import CacheError
from dpo_pack.import_checks import (
    check_repetitions,
    check_same_model,
    check_values,
    column_of,
    numbers_of,
    read_file,
    refuse,
    whole_numbers_of,
)
from dpo_pack.key_index import KeyIndex, Keys
from dpo_pack.prepare import Prepared, prepare
from dpo_pack.prepare_reference import prepared_namespace
from dpo_pack.recipe import Recipe, source_names
from dpo_pack.recipe_models import reference_model
from dpo_pack.reference_cache import ReferenceCache
from dpo_pack.reference_parts import (
    KEY,
    NUM_TOKENS,
    SUM,
    TOKENS,
    SequenceLogps,
    key_column,
    token_column,
    tokens_of,
)
from dpo_pack.reference_work import ReferenceWork, find_work

PROMPT_IDS, COMPLETION_IDS = "prompt_ids", "completion_ids"
ROW_NUMBER, SOURCE = "row_number", "source"
CHOSEN, REJECTED = "ref_chosen_logps", "ref_rejected_logps"  # TRL's names


def export_recipe(recipe: Recipe, target: Path, console: Console) -> int:
    """Write the cached log-probs of the recipe's sequences with where each is first used; returns how many.

    Texts are named by the sha256 of what their token ids decode to, special tokens included. Raises
    CacheError when the cache lacks some.
    """
    prepared = prepare(recipe, console, runs_models=False)
    namespace = prepared_namespace(prepared)
    cache = ReferenceCache(prepared.cache_dir, namespace)
    work = find_work(cache, prepared.tables)
    if work.num_missing:
        raise CacheError(
            f"{work.num_missing:,} of the recipe's {work.num_unique:,} sequences have no log-prob yet; run "
            "`dpopack precompute-ref` first"
        )
    groups, sides = np.nonzero(work.sides)
    keys = _keys(work, groups, sides)
    columns = {
        **_places(prepared, work, groups, sides),
        KEY: key_column(keys),
        SUM: cache.lookup(keys),
        NUM_TOKENS: work.lengths.completions[groups, sides].astype(np.int32),
    }
    if find_work(cache, prepared.tables, per_token=True).num_missing == 0:
        columns[SUM], tokens = cache.lookup_tokens(keys)
        columns[TOKENS] = token_column(tokens)
    write_export(target, pa.table(columns), namespace)
    return len(keys)


def import_into(recipe: Recipe, file: Path, console: Console) -> None:
    """Add a file's log-probs to the namespace of the recipe's reference. All of them, or none.

    Raises CacheError naming file and row.
    """
    table = read_file(file)
    prepared = prepare(recipe, console, runs_models=False)
    namespace = prepared_namespace(prepared)
    names = set(table.column_names)
    cache = ReferenceCache(prepared.cache_dir, namespace)
    work = find_work(cache, prepared.tables)
    if KEY in names:
        check_same_model(file, table, namespace)
        logps, rows = _by_key(file, table)
    elif PROMPT_IDS in names:
        logps, rows = _by_ids(file, table)
    elif ROW_NUMBER in names:
        logps, rows = _by_place(file, table, prepared)
    else:
        raise CacheError(
            f"{file} has columns {', '.join(sorted(names))}; it needs {KEY}, {PROMPT_IDS} or {ROW_NUMBER} "
            "and what belongs to it, see docs/reference-cache.md"
        )
    check_values(file, logps, rows)
    _check_lengths(file, logps, rows, work)
    index = KeyIndex.of(logps.keys)
    check_repetitions(file, logps, rows, index)
    is_new = ~cache.contains(logps.keys[index.first], per_token=logps.tokens is not None)
    cache.append_all(_take(logps, index.first[is_new]), {"origin": f"imported from {file.name}"})
    cache.note_use(reference_model(recipe).label)
    after = find_work(cache, prepared.tables)
    console.print(
        f"{file}: {len(table):,} rows, {int(is_new.sum()):,} sequences added, {int((~is_new).sum()):,} were "
        "there; "
        f"the cache now has {after.num_cached:,} of the recipe's {after.num_unique:,} sequences"
    )


# ---- The kinds of file: each gives the log-probs of S sequences and the row of the file of each, from 1


def _by_key(file: Path, table: pa.Table) -> tuple[SequenceLogps, IntArray]:
    keys = column_of(file, table, KEY)
    if not pa.types.is_fixed_size_binary(keys.type) or keys.type.byte_width != 16:
        raise CacheError(f"{file}: column {KEY} must be fixed_size_binary[16], not {keys.type}")
    num_tokens = whole_numbers_of(file, table, NUM_TOKENS)
    data = np.frombuffer(b"".join(keys.to_pylist()), dtype=np.uint8).reshape(-1, 16)
    return _sequences(file, table, data, num_tokens)


def _by_ids(file: Path, table: pa.Table) -> tuple[SequenceLogps, IntArray]:
    keys, num_tokens = [], []
    prompts, completions = column_of(file, table, PROMPT_IDS), column_of(file, table, COMPLETION_IDS)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 1):
        ids = []
        for name, value in ((PROMPT_IDS, prompt), (COMPLETION_IDS, completion)):
            values = value.values
            if not pa.types.is_integer(values.type) or values.null_count or len(values) == 0:
                raise CacheError(f"{file} row {row}: {name} must be a list of one or more token ids")
            ids.append(values.to_numpy(zero_copy_only=False).astype(np.int32))
        keys.append(sequence_key(ids[0], ids[1]))
        num_tokens.append(len(ids[1]))
    data = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
    return _sequences(file, table, data, np.array(num_tokens, dtype=np.int64))


def _by_place(file: Path, table: pa.Table, prepared: Prepared) -> tuple[SequenceLogps, IntArray]:
    """Rows of pairs the recipe leaves out (dropped, or beyond max_pairs) are counted and said."""
    pairs = _pairs_by_place(prepared)
    names = sorted({name for name, _ in pairs})
    if SOURCE in table.column_names:
        sources = column_of(file, table, SOURCE).to_pylist()
    elif len(names) == 1:
        sources = names * len(table)
    else:
        raise CacheError(
            f"{file}: the recipe has sources {', '.join(names)}; a column {SOURCE} must say which"
        )
    numbers = whole_numbers_of(file, table, ROW_NUMBER)
    values = np.stack([numbers_of(file, table, name) for name in (CHOSEN, REJECTED)], axis=1)
    found: list[tuple[int, PairTable, int]] = []  # (row of the file, table, pair)
    for row, (source, number) in enumerate(zip(sources, numbers.tolist(), strict=True), 1):
        if source not in names:
            raise CacheError(f"{file} row {row}: the recipe has no source {source!r}, but {', '.join(names)}")
        place = pairs.get((source, number))
        if place is not None:
            found.append((row, *place))
    if len(found) < len(table):
        prepared.console.print(
            f"{file}: {len(table) - len(found):,} of {len(table):,} rows are of pairs the recipe leaves out"
        )
    rows = np.array([row for row, _, _ in found], dtype=np.int64)
    keys = [key for _, of, pair in found for key in (of.chosen_keys[pair], of.rejected_keys[pair])]
    lengths = [n for _, of, pair in found for n in (of.chosen_lengths[pair], of.rejected_lengths[pair])]
    logps = SequenceLogps(
        keys=np.array(keys, dtype=np.uint8).reshape(-1, 16),
        sums=values[rows - 1].reshape(-1),
        num_tokens=np.array(lengths, dtype=np.int64),
    )
    return logps, np.repeat(rows, 2)


def _sequences(
    file: Path, table: pa.Table, keys: Keys, num_tokens: IntArray
) -> tuple[SequenceLogps, IntArray]:
    tokens = None
    if TOKENS in table.column_names:
        column = column_of(file, table, TOKENS)
        tokens = tokens_of(pa.table({TOKENS: column.cast(pa.large_list(pa.float32()))}))
        wrong = np.flatnonzero(tokens.lengths != num_tokens)
        if len(wrong):
            row = int(wrong[0])
            raise CacheError(
                f"{file} row {row + 1}: {TOKENS} has {tokens.lengths[row]} values for a completion of "
                f"{num_tokens[row]} tokens"
            )
    if SUM not in table.column_names and tokens is not None:
        sums = np.array([tokens.of(row).sum(dtype=np.float64) for row in range(len(tokens))])
    else:
        sums = numbers_of(file, table, SUM)
    rows = np.arange(1, len(table) + 1)
    return SequenceLogps(keys=keys, sums=sums, num_tokens=num_tokens, tokens=tokens), rows


def _pairs_by_place(prepared: Prepared) -> dict[tuple[str, int], tuple[PairTable, int]]:
    """(name of the source, row in it) -> the table and the pair in it."""
    recipe, data = prepared.recipe, prepared.data
    train_names = source_names(recipe.data.train)
    named: list[tuple[PairTable, Sequence[str]]] = [(data.train, train_names)]
    # A held-out fraction is of the training sources; other held-out sets have one source each.
    is_fraction = not isinstance(recipe.data.eval, tuple)
    named += [(held.pairs, train_names if is_fraction else (held.name,)) for held in data.eval]
    pairs: dict[tuple[str, int], tuple[PairTable, int]] = {}
    stores: dict[str, Path] = {}
    for table, names in named:
        for name, store in zip(names, table.stores, strict=True):
            if stores.setdefault(name, store.directory) != store.directory:
                raise CacheError(f"two sources of the recipe are called {name!r}; give one another name")
        for pair in range(table.num_pairs):
            place = (names[table.source_indices[pair]], int(table.row_numbers[pair]))
            pairs.setdefault(place, (table, pair))  # a training file may be held-out too; training is first
    return pairs


def _check_lengths(file: Path, logps: SequenceLogps, rows: IntArray, work: ReferenceWork) -> None:
    """Sequences of the recipe have as many tokens here as there."""
    groups, sides = np.nonzero(work.sides)
    index = KeyIndex.of(_keys(work, groups, sides))
    places = index.find(logps.keys)
    ours = work.lengths.completions[groups, sides][index.first][places]
    refuse(
        file,
        rows,
        (places >= 0) & (ours != logps.num_tokens),
        lambda s: f"{NUM_TOKENS} is {logps.num_tokens[s]}, and the recipe's completion has {ours[s]} tokens",
    )


def _keys(work: ReferenceWork, groups: IntArray, sides: IntArray) -> Keys:
    """[S, 16]: keys of the given side of each of the given groups."""
    keys = np.empty((len(groups), 16), dtype=np.uint8)
    for number, table in enumerate(work.tables):
        here = work.table_indices[groups] == number
        both = np.stack((table.chosen_keys, table.rejected_keys), axis=1)
        keys[here] = both[work.pair_indices[groups[here]], sides[here]]
    return keys


def _places(
    prepared: Prepared, work: ReferenceWork, groups: IntArray, sides: IntArray
) -> dict[str, list[object]]:
    """Where each sequence is first used, and the hashes of its texts."""
    named = {(id(table), pair): place for place, (table, pair) in _pairs_by_place(prepared).items()}
    columns: dict[str, list[object]] = {
        name: [] for name in (SOURCE, ROW_NUMBER, "side", "prompt_sha256", "completion_sha256")
    }
    for group, side in zip(groups.tolist(), sides.tolist(), strict=True):
        table, pair = work.tables[work.table_indices[group]], int(work.pair_indices[group])
        source, row = named[id(table), pair]
        completion = table.rejected(pair) if side else table.chosen(pair)
        columns[SOURCE].append(source)
        columns[ROW_NUMBER].append(row)
        columns["side"].append("rejected" if side else "chosen")
        for name, ids in (("prompt_sha256", table.prompt(pair)), ("completion_sha256", completion)):
            text = str(prepared.tokenizer.decode(ids.tolist()))
            columns[name].append(hashlib.sha256(text.encode()).hexdigest())
    return columns


def _take(logps: SequenceLogps, sequences: IntArray) -> SequenceLogps:
    return SequenceLogps(
        keys=logps.keys[sequences],
        sums=logps.sums[sequences],
        num_tokens=logps.num_tokens[sequences],
        tokens=None if logps.tokens is None else logps.tokens.take(sequences),
    )
