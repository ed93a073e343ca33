"""Tokenises a large source in ranges of rows, so that no row is tokenised twice.

Each range has a store of its own, whose name is a hash of its rows, as the file has them, and of all else
that decides their token ids. So a stopped pass goes on, and a source that has changed costs the ranges with
changed rows. A range ends after a row whose hash says so: rows that come or go leave other ranges as they
were. If rows are added at the end, the new last range begins with a copy of the old one.

The rows are read twice: to cut them into ranges, and to tokenise those of missing ranges.
"""

import hashlib
import pickle
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dpo_pack.data.ingest import LISTED_ROWS, Ingestion
from dpo_pack.data.store import (
    KEY_BYTES,
    PairTable,
    TokenStore,
    content_key,
    open_store,
    write_ranged_store,
    write_store,
)
from dpo_pack.data.tokenization import TokenizedBatch
from dpo_pack.system.errors import CacheError

SMALLEST_RANGE, LARGEST_RANGE = 1 << 14, 1 << 18  # rows; the last range of a source may be smaller
MORE_ROWS = 1 << 16  # after the smallest range, one row of so many ends it
# What the summary of a range's store has of its Ingestion, and columns, `rows_before`.
_SAVED = ("num_rows", "num_kept", "counts", "faults", "dropped_counts", "dropped_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Consecutive rows of a source."""

    name: str  # of their store
    rows_before: int  # rows of the source before the first one
    num_rows: int
    known: str  # the name of the longest store that has the first ones of these rows, or `name`
    num_known: int  # so many rows; all of them if `known` is `name`


class _NothingKept(Exception):
    """No row of a range became a pair, so it gets no store."""


def write_ranges(directory: Path, ingestion: Ingestion, facts: Mapping[str, Any]) -> None:
    """Writes the store of a source, which `ingestion` has started; `facts` decide the ids of given rows.
    Raises DataError if bad rows stop the run or if no row is kept, and CacheError."""
    stored = {path.name for path in directory.parent.glob("*")}
    ranges: list[TokenStore] = []
    scanned, opened = ingestion.located.open(), ingestion.located.open()
    columns = ingestion.opened.columns
    with closing(scanned.unparsed), closing(opened.rows):
        rows = ingestion.checked(opened.rows)
        while (max_pairs := ingestion.num_missing) != 0:
            # What becomes of a run with bad rows is decided at the end, so `on_bad_row` changes no range.
            prompts = {"needs_prompt": ingestion.needs_prompt, "known_columns": ingestion.known_columns}
            decided = {**facts, "max_pairs": max_pairs, **prompts}
            key = content_key({**decided, "on_bad_row": None})
            most_rows = min(LARGEST_RANGE, max(SMALLEST_RANGE, max_pairs or LARGEST_RANGE))
            found = next_range(islice(scanned.unparsed, most_rows), key, stored)
            if found is None:
                break
            opened.columns.clear()
            part = replace(ingestion)  # with its own counts
            part.opened = opened
            store = _usable(directory.with_name(found.known), ingestion)
            num_known = 0 if store is None else found.num_known
            deque(islice(opened.unparsed, num_known), maxlen=0)  # `rows` goes on after them
            if store is not None:
                _add(part, store.summary, found.rows_before)
                _add(ingestion, store.summary, found.rows_before)
            if num_known < found.num_rows:
                taken = islice(rows, found.num_rows - num_known)
                batches = ingestion.counted(taken, part)
                store = _write(directory.with_name(found.name), store, batches, part, found.rows_before)
            columns.update(opened.columns)
            if store is not None:
                ranges.append(replace(store, rows_before=found.rows_before))
    ingestion.check_end()
    write_ranged_store(directory, ranges, ingestion.summary())


def next_range(rows: Iterator[tuple[int, Any]], decided: str, stored: Container[str]) -> RowRange | None:
    """Takes the next range from rows as their file has them; None: there are no more. `decided` names all
    else that decides token ids, `stored` has the names of stores."""
    digest = hashlib.blake2b(decided.encode(), digest_size=KEY_BYTES)
    first = num_rows = num_known = 0
    name = known = ""
    for number, row in rows:
        content = row if isinstance(row, bytes) else pickle.dumps(row)
        key = hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
        first = first or number
        num_rows += 1
        digest.update(b"%d:%b" % (number - first, key))
        name = digest.hexdigest()
        if name in stored:
            known, num_known = name, num_rows
        if num_rows >= SMALLEST_RANGE and int.from_bytes(key[:4]) % MORE_ROWS == 0:
            break
    if num_rows == 0:
        return None
    return RowRange(
        name=name,
        rows_before=first - 1,
        num_rows=num_rows,
        known=known or name,
        num_known=num_known or num_rows,
    )


def _write(
    path: Path,
    beginning: TokenStore | None,
    batches: Iterator[TokenizedBatch],
    part: Ingestion,
    rows_before: int,
) -> TokenStore | None:
    """Writes and opens the store of a range, unless no pair is kept: `beginning`, then `batches`."""

    def pairs() -> Iterator[TokenStore]:
        if beginning is not None:
            table = PairTable.of([replace(beginning, rows_before=rows_before)])
            for pair in range(table.num_pairs):
                table.group(pair)  # raises CacheError: damage must not be copied
            yield beginning
        for batch in batches:
            batch.pairs.records["row_number"] -= rows_before
            yield batch.pairs
        part.located.check_unchanged()
        if part.num_kept == 0:
            raise _NothingKept

    more = {"columns": part.opened.columns, "rows_before": rows_before}
    with suppress(_NothingKept):
        write_store(path, pairs(), lambda: {name: getattr(part, name) for name in _SAVED} | more)
    store = open_store(path)
    if store is None and part.num_kept:
        raise CacheError(f"{path} was removed or damaged while it was written; run again")
    return store


def _usable(path: Path, ingestion: Ingestion) -> TokenStore | None:
    """Opens the store of a range. If its bad rows stop the run, they are read again, for the message."""
    store = open_store(path)
    if store is None:
        return None
    counted = replace(ingestion)
    counted.num_rows, counted.dropped_counts = store.summary["num_rows"], store.summary["dropped_counts"]
    return None if any(map(counted.stops_run, counted.dropped_counts)) else store


def _add(ingestion: Ingestion, saved: Mapping[str, Any], rows_before: int) -> None:
    """Adds the counts that were saved with a range, which now has so many rows before it."""
    shift = rows_before - saved["rows_before"]
    ingestion.num_cached += saved["num_rows"]
    ingestion.num_rows += saved["num_rows"]
    ingestion.num_kept += saved["num_kept"]
    ingestion.counts.update(saved["counts"])
    ingestion.dropped_counts.update(saved["dropped_counts"])
    ingestion.opened.columns.update(saved["columns"])
    for reason, numbers in saved["dropped_rows"].items():
        listed = ingestion.dropped_rows.setdefault(reason, [])
        listed += [number + shift for number in numbers][: LISTED_ROWS - len(listed)]
    for name, fault in saved["faults"].items():
        first = {"pairs": 0, "first_row": fault["first_row"] + shift}
        ingestion.faults.setdefault(name, first)["pairs"] += fault["pairs"]
