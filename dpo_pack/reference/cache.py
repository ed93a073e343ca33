"""Reference log-probs on disk, in the shared cache and in the copy of a run. The key of a value is a hash of
token ids.

The cache stores a value for each *sequence* (prompt and completion), however a run pairs and mixes them. All
values of one model in one precision are in one directory, a namespace (`model/fingerprint.py`), of parts:

    <cache_dir>/reference/<namespace>/namespace.json         the facts that the values depend on
    <cache_dir>/reference/<namespace>/used.json              paths of models that used it, and when
    <cache_dir>/reference/<namespace>/part-<sha256>.parquet

        key          16 bytes, `sequence_key` of data/store.py
        logps_sum    float64, nats
        num_tokens   int32, tokens of the completion
        token_logps  only in parts of earlier releases: nobody reads it

Jobs only add whole parts, which are written under a temporary name, synced and renamed. So any number of jobs
can read and write at the same time without locks. A part whose bytes do not match the sha256 in its name, or
with a log-prob that is not finite, is renamed, and its sequences are computed again.

`dpopack cache` lists and prunes caches, exports and imports log-probs as files with a part's columns, and
deletes only files that dpo-pack has written, known by their names. `cache_dir` None: the default directory.

Legend: n sequences or requested keys, U different keys, P pairs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.store import Keys, PairTable, distinct_keys, key_heads
from dpo_pack.packing.lengths import FloatArray, IntArray
from dpo_pack.system.errors import CacheError, first_line
from dpo_pack.system.files import (
    add_to_json,
    discard,
    parse_json,
    read_json,
    write_json_atomically,
    writing,
    written_aside,
)

logger = logging.getLogger(__name__)

NAMESPACE_FILE, USED_FILE = "namespace.json", "used.json"
PART_NAME = r"part-[0-9a-f]{64}\.(?:parquet|damaged)"
# Names of temporary files and directories: of JSON files (file_hashes.json), parts and token stores.
_TEMPORARY = re.compile(
    rf"\.(?:(?:[a-z_]+\.json|beginnings\.npy|{PART_NAME}|[0-9a-f]{{32}})\.[0-9a-f]{{8}}|shared-\w+)\.tmp"
)
# An older temporary file is the rest of a killed process, because no process writes a file for so long.
_LEFTOVER_AFTER_SECONDS = 24 * 3600.0
KEY, SUM, NUM_TOKENS = "key", "logps_sum", "num_tokens"
# Hashes and log-probs cannot be compressed, and trying takes most of the time of a write or a read.
UNPACKED: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
_AT_ONCE = 2**16  # sequences that a hash copies
# A part must be small, because the check of its sha256 reads the whole part into memory.
MAX_PART_SEQUENCES = 200_000
UsedTimes = dict[str, float]  # path of a model -> seconds since 1970


def find_keys(known: Keys, keys: Keys) -> IntArray:
    """Returns the positions of [n, 16] keys in the ascending [U, 16] keys `known`, -1: it is not there."""
    if len(known) == 0:
        return np.full(len(keys), -1)
    known, keys = (np.ascontiguousarray(array) for array in (known, keys))
    wanted, sought = keys.view("S16").ravel(), known.view("S16").ravel()
    order = np.argsort(key_heads(keys))  # sorted keys are found in a third of the time
    places = np.empty(len(keys), dtype=np.int64)
    places[order] = np.searchsorted(sought, wanted[order])
    return np.where(sought.take(places, mode="clip") == wanted, places, -1)


def sequence_table(keys: Keys, sums: FloatArray, num_tokens: npt.NDArray[np.integer] | None) -> pa.Table:
    """Makes a table with the columns of a part, without that of None. keys: [n, 16]. sums: [n], nats."""
    columns: dict[str, npt.NDArray[Any]] = {KEY: keys, SUM: sums.astype(np.float64, copy=False)}
    if num_tokens is not None:
        columns[NUM_TOKENS] = num_tokens.astype(np.int32)
    kinds = {KEY: pa.binary(16), SUM: pa.float64(), NUM_TOKENS: pa.int32()}
    arrays = {}
    for name, values in columns.items():
        buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
        arrays[name] = pa.Array.from_buffers(kinds[name], len(values), buffers)
    return pa.table(arrays)


def column_of(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Returns [n, 16] keys or [n] numbers of a `sequence_table`. Raises ArrowInvalid if one is null.
    `pa.array` and `to_numpy` would import pandas, which takes half a second."""
    if table[name].null_count:
        raise pa.ArrowInvalid("a value is null")
    column = table[name].combine_chunks()
    if name != KEY:
        return np.from_dlpack(column)
    keys = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, 16)
    return keys[column.offset :][: len(column)]


class DamagedPart(CacheError):
    """The bytes of a part have changed since it was written, or it has log-probs that are not finite."""


def read_part(part: Path) -> pa.Table | None:
    """Reads the `sequence_table` of a part; None: another job has renamed or deleted it. Raises DamagedPart,
    and CacheError for another file."""
    try:
        content = part.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"cannot read {part}: {error.strerror}; correct its permissions or set reference.cache_dir"
        ) from error
    if part.stem != f"part-{hashlib.sha256(content).hexdigest()}":
        raise DamagedPart(f"{part} is damaged: its bytes have changed; a run computes its log-probs again")
    try:
        # No threads: an Arrow thread may free `content` while Python ends, and then the process aborts.
        file = pq.ParquetFile(pa.BufferReader(content))  # earlier releases may have written more columns
        table = file.read(columns=[KEY, SUM, NUM_TOKENS], use_threads=False)
        is_finite = np.isfinite(column_of(table, SUM)).all()
    except (KeyError, pa.ArrowException) as error:
        raise CacheError(
            f"{part} is not a part of a reference cache; move it to another directory"
        ) from error
    if not is_finite:
        raise DamagedPart(f"{part} has log-probs that are not finite; a run computes its log-probs again")
    return table


def default_cache_directory() -> Path:
    """Returns the cache directory of recipes that name none: $DPO_PACK_CACHE or ~/.cache/dpo_pack."""
    return Path(os.environ.get("DPO_PACK_CACHE") or Path.home() / ".cache" / "dpo_pack")


def namespace_digest(namespace: Mapping[str, Any]) -> str:
    """Returns 32 hex digits: the name of the namespace's directory."""
    canonical = json.dumps(namespace, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def model_digest(namespace: Mapping[str, Any]) -> str:
    """Returns a hash of the namespace without what changes no more than rounding: precision and releases."""
    return namespace_digest({name: namespace.get(name) for name in ("weights", "adapter", "config")})


def is_namespace(directory: Path) -> bool:
    """Returns whether the directory's name is the digest of its namespace.json."""
    described = read_json(directory / NAMESPACE_FILE)
    return described is not None and namespace_digest(described) == directory.name


class ReferenceCache:
    """Reference log-probs of one namespace on disk."""

    def __init__(self, cache_dir: Path, namespace: Mapping[str, Any], *, used_by: str | None = None) -> None:
        """Raises CacheError. `used_by`: the path of the model of a run, for used.json."""
        self.directory = cache_dir / "reference" / namespace_digest(namespace)
        self.model = model_digest(namespace)
        self.named_parts: set[str] = set()  # written by this job; a directory listing may lack them
        self.seen_parts: set[str] = set()  # read by a look-up of this job, or written by it
        self.num_added = 0  # sequences that this job has added
        if not is_namespace(self.directory):
            write_json_atomically(self.directory / NAMESPACE_FILE, dict(namespace))
        if used_by is not None:
            add_to_json(self.directory / USED_FILE, UsedTimes, {used_by: time.time()})

    def check_writable(self) -> None:
        """Raises CacheError if this job cannot add parts. Called before any log-prob is computed."""
        with writing(self.directory), tempfile.TemporaryFile(dir=self.directory) as probe:
            probe.write(b"probe")

    def lookup(self, keys: Keys, *, only_new: bool = False) -> FloatArray:
        """Maps [n, 16] sequence keys to [n] summed log-probs, NaN if there is none. With `only_new`, parts
        that this job has seen are not read."""
        first, inverse = distinct_keys(keys)
        return self.find(keys[first], only_new=only_new)[inverse]

    def find(self, wanted: Keys, *, only_new: bool = False) -> FloatArray:
        """Does what `lookup` does, for [U, 16] different keys in ascending order."""
        sums = np.full(len(wanted), np.nan)
        # A directory listing of a network file system may lack new files, so this job's own parts are opened
        # by name. If several parts have a sequence, the last part by name counts: always the same one.
        names = {part.name for part in self.directory.glob("part-*.parquet")} | self.named_parts
        names -= self.seen_parts if only_new else set()
        self.seen_parts |= names
        for name in sorted(names, reverse=True):
            if not np.isnan(sums).any():
                break
            try:
                table = read_part(self.directory / name)
            except DamagedPart as damage:
                aside = (self.directory / name).with_suffix(".damaged")
                with contextlib.suppress(OSError):  # another job has renamed it, or we may only read here
                    (self.directory / name).rename(aside)
                logger.warning("%s; the part is now called %s", damage, aside.name)
                continue
            if table is None:
                continue
            places = find_keys(wanted, column_of(table, KEY))
            rows = np.flatnonzero((places >= 0) & np.isnan(sums[places]))
            sums[places[rows]] = column_of(table, SUM)[rows]
        return sums

    def append(self, table: pa.Table, metadata: Mapping[str, str] | None = None) -> list[Path]:
        """Adds a `sequence_table`, with a note where it comes from; returns the parts. Raises CacheError."""
        described = {f"dpo_pack.{name}": value for name, value in (metadata or {}).items()}
        whole, parts = table.combine_chunks().replace_schema_metadata(described), []
        for begin in range(0, len(whole), MAX_PART_SEQUENCES):
            buffer = pa.BufferOutputStream()
            pq.write_table(whole.slice(begin, MAX_PART_SEQUENCES), buffer, **UNPACKED)
            content = buffer.getvalue().to_pybytes()
            parts.append(self.directory / f"part-{hashlib.sha256(content).hexdigest()}.parquet")
            with written_aside(parts[-1]) as temporary:
                temporary.write_bytes(content)
            self.named_parts.add(parts[-1].name)
            self.seen_parts.add(parts[-1].name)
        self.num_added += len(whole)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenReference:
    """The reference log-probs that one run uses. They are a file of its output directory, so later changes of
    the shared cache cannot change the run, even after a resume."""

    keys: Keys  # [U, 16], each key once, in ascending order
    sums: FloatArray  # [U], nats; NaN: the cache that `find` copied has none
    namespace: str = ""  # the name of that cache's directory; "" in files of earlier releases
    model: str = ""  # `model_digest` of that cache
    num_steps: int | None = None  # of the run as it began, whose pairs it has; None: it has all pairs

    @staticmethod
    def find(cache: ReferenceCache, tables: Sequence[PairTable], *, whole: bool = False) -> FrozenReference:
        """Copies what the cache has of the sequences of the tables; of others the sum is NaN. With
        `whole` it raises CacheError if there are others."""
        keys = np.concatenate([keys for t in tables for keys in (t.chosen_keys, t.rejected_keys)])
        keys = keys[distinct_keys(keys)[0]]
        sums = cache.find(keys)
        if whole and (num_missing := int(np.isnan(sums).sum())):
            raise CacheError(
                f"{num_missing} reference log-probs are no longer in {cache.directory}, although they were "
                "computed; run the command again"
            )
        return FrozenReference(keys=keys, sums=sums, namespace=cache.directory.name, model=cache.model)

    def fingerprint(self, table: PairTable | None = None) -> str:
        """A hash of the sequences and of every bit of their values: of all, or those of a table."""
        is_used = np.full(len(self.keys), table is None)
        if table is not None:
            is_used[self._places(table)] = True
        digest = hashlib.blake2b(digest_size=16)
        for values in (self.keys, self.sums):
            for begin in range(0, len(values), _AT_ONCE):
                block = slice(begin, begin + _AT_ONCE)
                digest.update(values[block][is_used[block]].data)
        return digest.hexdigest()

    def lacking(self, table: PairTable) -> PairTable:
        """Returns the pairs of the table of which a sequence has no value here."""
        return table.select(np.flatnonzero((self._places(table) < 0).any(axis=1)))

    def of(self, table: PairTable, needed: IntArray | slice = slice(None)) -> FloatArray:
        """Returns the sums of the table's pairs, [P, (chosen, rejected)]. Raises CacheError if a sequence of
        the `needed` pairs has no value here; of others the sum is NaN then."""
        places = self._places(table)
        if (places[needed] < 0).any():
            what = "reference.parquet in output_dir is of other pairs than data.train and data.eval are now"
            raise CacheError(f"{what}; use another output_dir, or --overwrite")
        return np.where(places < 0, np.nan, self.sums[places])

    def _places(self, table: PairTable) -> IntArray:
        """Returns the positions in `keys` of each pair's (chosen, rejected), [P, 2]; -1: it has no value."""
        sides = (table.chosen_keys, table.rejected_keys)
        places = np.stack([find_keys(self.keys, keys) for keys in sides], axis=1)
        places[np.isnan(self.sums[places])] = -1  # a place of -1 reads any sum, and stays -1
        return places

    def joined(self, other: FrozenReference) -> FrozenReference:
        """Returns the values of both references. If both have a sequence, this reference's value is used."""
        keys = np.concatenate([self.keys, other.keys])
        first, _ = distinct_keys(keys)
        return replace(self, keys=keys[first], sums=np.concatenate([self.sums, other.sums])[first])

    def save(self, path: Path) -> None:
        with written_aside(path) as temporary:
            table = sequence_table(self.keys, self.sums, None)
            facts = {
                "namespace": self.namespace,
                "model": self.model,
                "num_steps": json.dumps(self.num_steps),
            }
            table = table.replace_schema_metadata({f"dpo_pack.{key}": fact for key, fact in facts.items()})
            pq.write_table(table, temporary, write_page_checksum=True, **UNPACKED)

    @staticmethod
    def load(path: Path) -> FrozenReference:
        """Reads what `save` wrote. Raises CacheError if it is damaged."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            facts = table.schema.metadata or {}
            return FrozenReference(
                keys=column_of(table, KEY),
                sums=column_of(table, SUM),
                namespace=facts.get(b"dpo_pack.namespace", b"").decode(),
                model=facts.get(b"dpo_pack.model", b"").decode(),
                num_steps=json.loads(facts.get(b"dpo_pack.num_steps", b"null")),
            )
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise CacheError(
                f"{path} is missing or damaged, so this run cannot go on as it began; start again with "
                "checkpoint.resume=never and --overwrite"
            ) from error


# ---- What `dpopack cache` does


def find_leftovers(cache_dir: Path) -> list[Path]:
    """Returns the temporary files and directories that killed processes have left in a cache."""
    inner = (path for kind in ("reference", "tokens") for path in (cache_dir / kind).glob("[!.]*"))
    directories, found = (cache_dir, cache_dir / "tokens", *(p for p in inner if not p.is_symlink())), []
    for path in (path for directory in directories for path in directory.glob(".*.tmp")):
        with contextlib.suppress(OSError):  # its process has just given it its final name
            changed = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
            if _TEMPORARY.fullmatch(path.name) and time.time() - changed > _LEFTOVER_AFTER_SECONDS:
                found.append(path)
    return found


_OURS = re.compile(rf"{NAMESPACE_FILE}|{USED_FILE}|{PART_NAME}")
# A log-prob is at most 0, but rounding in low precision may give a value above 0.
_LARGEST_LOGP = 1e-3


def find_namespaces(cache_dir: Path | None) -> list[dict[str, Any]]:
    """Returns what `cache list --json` prints of each namespace, the latest used first."""
    paths = ((cache_dir or default_cache_directory()) / "reference").glob("*")
    found = [_describe(path) for path in paths if is_namespace(path) and not path.is_symlink()]
    return sorted(found, key=lambda one: -float(one["last_used"]))


def _describe(directory: Path) -> dict[str, Any]:
    described = read_json(directory / NAMESPACE_FILE) or {}
    times = read_json(directory / USED_FILE, UsedTimes) or {}
    used = {model: seconds for model, seconds in times.items() if 0 <= seconds <= time.time()}
    files, num_sequences = _our_files(directory), 0
    for part in directory.glob("part-*.parquet"):  # only their footers are read
        with contextlib.suppress(OSError, pa.ArrowException):  # a run will set it aside
            num_sequences += pq.read_metadata(part).num_rows
    return {
        "namespace": directory.name,
        "directory": str(directory),
        "models": sorted(used, key=lambda model: -used[model]),  # paths of models, the latest used first
        "parameters": str(described.get("parameters")),
        "autocast": described.get("autocast"),
        "sequences": num_sequences,  # one that is in several parts counts in each
        "parts": sum(file.suffix == ".parquet" for file in files),
        "damaged_parts": sum(file.suffix == ".damaged" for file in files),
        "size_bytes": _size(files),
        "last_used": max([*(file.stat().st_mtime for file in files if file.exists()), *used.values()]),
    }


def prune_cache(
    cache_dir: Path | None, *, older_than_seconds: float | None, most_bytes: int | None, dry_run: bool
) -> Iterator[str]:
    """Deletes files of killed processes; namespaces that no run has used for `older_than_seconds`; then the
    longest unused ones, until the rest has at most `most_bytes`; and damaged parts. Yields before how many
    bytes, of what and why. With `dry_run` it deletes nothing. Raises CacheError."""
    cache_dir = cache_dir or default_cache_directory()
    namespaces = find_namespaces(cache_dir)
    kept_bytes = sum(one["size_bytes"] for one in namespaces)
    deletions = [(f"{cache_dir}: leftovers of killed runs", find_leftovers(cache_dir))]
    for one in reversed(namespaces):
        age, files = time.time() - one["last_used"], _our_files(Path(one["directory"]))
        if older_than_seconds is not None and age > older_than_seconds:
            reason = f"not used for {age / 86400:.0f} days"
        elif most_bytes is not None and kept_bytes > most_bytes:
            reason = "unused for the longest time, and the cache is larger than the limit"
        else:
            reason, files = "damaged parts", [file for file in files if file.suffix == ".damaged"]
        kept_bytes -= 0 if reason == "damaged parts" else one["size_bytes"]
        # namespace.json goes last, so that an interrupted deletion can be found and repeated.
        files.sort(key=lambda file: file.name == NAMESPACE_FILE)
        deletions.append(
            (f"{one['namespace']} ({', '.join(one['models']) or 'unknown model'}): {reason}", files)
        )
    for what, files in deletions:
        if files:
            yield f"{_size(files) / 1e6:,.1f} MB of {what}"
        for file in () if dry_run else files:
            discard(file)
            if file.exists():
                raise CacheError(f"cannot delete {file}; correct its permissions")
            if file.name == NAMESPACE_FILE and not any(file.parent.iterdir()):
                file.parent.rmdir()


def _our_files(directory: Path) -> list[Path]:
    files = (path for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    return [file for file in files if _OURS.fullmatch(file.name)]


def _size(paths: Sequence[Path]) -> int:
    """Returns the bytes of files, and of the files in directories; 0 of one that another job has deleted."""
    with contextlib.suppress(OSError):
        files = (file for path in paths for file in (path, *path.rglob("*")))
        return sum(file.lstat().st_size for file in files if not file.is_dir())
    return 0


def export_namespace(cache_dir: Path | None, prefix: str, target: Path) -> int:
    """Writes all log-probs of the one namespace that begins with `prefix`; returns their number. Of a
    sequence in several parts the last one counts, as in a run. Raises CacheError, also for a damaged part."""
    found = [one["directory"] for one in find_namespaces(cache_dir) if one["namespace"].startswith(prefix)]
    if len(found) != 1:
        raise CacheError(
            f"--namespace: {len(found)} names begin with {prefix!r}; `dpopack cache list` prints all names"
        )
    directory = Path(found[0])
    # Of equal keys the first row counts.
    tables: list[Any] = [read_part(part) for part in sorted(directory.glob("part-*.parquet"), reverse=True)]
    if not tables or any(table is None for table in tables):
        raise CacheError(f"{directory} has no log-probs to export, or is being changed; try again")
    table = pa.concat_tables(tables)
    table = table.take(pa.array(np.sort(distinct_keys(column_of(table, KEY))[0])))
    metadata = {"dpo_pack.namespace": json.dumps(read_json(directory / NAMESPACE_FILE))}
    with written_aside(target) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, write_page_checksum=True)
    return len(table)


def import_logps(file: Path, cache: ReferenceCache, tables: Sequence[PairTable]) -> int:
    """Adds a file's log-probs that the cache lacks: all rows, or none; returns how many were added. Raises
    CacheError, which names the file and, if possible, the row."""
    none = np.zeros(0, dtype=np.uint8)
    columns = sequence_table(none.reshape(0, 16), np.zeros(0), none).schema
    try:
        table = pq.read_table(file, page_checksum_verification=True)
        described = (table.schema.metadata or {}).get(b"dpo_pack.namespace")
        table = table.select(columns.names).cast(columns)
        keys, sums, num_tokens = (column_of(table, name) for name in columns.names)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise CacheError(
            f"{file} is not a Parquet file with the columns of docs/reference-cache.md: {first_line(error)}"
        ) from error
    if described is not None and namespace_digest(parse_json(described) or {}) != cache.directory.name:
        raise CacheError(
            f"{file} holds log-probs of another model or precision than the recipe's reference; import it "
            "with the recipe of that model"
        )
    known = np.concatenate([k for t in tables for k in (t.chosen_keys, t.rejected_keys)])
    lengths = np.concatenate([n for t in tables for n in (t.chosen_scored, t.rejected_scored)])
    different = distinct_keys(known)[0]
    places, (first, inverse) = find_keys(known[different], keys), distinct_keys(keys)
    is_other = (num_tokens < 1) | ((places >= 0) & (num_tokens != lengths[different[places]]))
    for problem, is_wrong in (
        (f"{SUM} must be a finite number, at most 0", ~(np.isfinite(sums) & (sums <= _LARGEST_LOGP))),
        (f"{NUM_TOKENS} must be the number of scored tokens of the completion", is_other),
        (f"another row has another {SUM} for the same key", sums != sums[first][inverse]),
    ):
        if is_wrong.any():
            raise CacheError(f"{file} row {is_wrong.argmax() + 1}: {problem}; nothing was imported")
    rows = first[np.isnan(cache.find(keys[first]))]
    cache.append(
        sequence_table(keys[rows], sums[rows], num_tokens[rows]), {"origin": f"imported from {file.name}"}
    )
    return len(rows)
