"""Reading a file of log-probs that somebody brings, and refusing what cannot be right in it.

Every refusal is one line that names file and row. Legend: S sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpo_pack.data.lengths import IntArray
from dpo_pack.errors import CacheError
from dpo_pack.key_index import KeyIndex
from dpo_pack.reference_parts import NUM_TOKENS, SUM, TOKENS, SequenceLogps

# A log-prob is at most 0; products in low precision may round past it.
_LARGEST_LOGP = 1e-3
# Nats that a sum may differ by from its per-token values, each rounded to fp32, and relative to it.
_SUM_TOLERANCE, _RELATIVE_SUM_TOLERANCE = 1e-3, 1e-5


def read_file(file: Path) -> pa.Table:
    """The whole file. Raises CacheError."""
    try:
        return pq.read_table(file, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise CacheError(f"{file}: no such file") from error
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise CacheError(f"{file} cannot be read as Parquet ({reason}); write it again") from error


def column_of(file: Path, table: pa.Table, name: str) -> pa.Array:
    """A column without nulls. Raises CacheError."""
    if name not in table.column_names:
        raise CacheError(f"{file} has no column {name}; its columns are {', '.join(table.column_names)}")
    column = pa.concat_arrays([pa.array([], table[name].type), *table[name].chunks])
    nulls = np.flatnonzero(~column.is_valid().to_numpy(zero_copy_only=False))
    if len(nulls):
        raise CacheError(f"{file} row {int(nulls[0]) + 1}: {name} is null; nothing was imported")
    return column


def whole_numbers_of(file: Path, table: pa.Table, name: str) -> IntArray:
    """[n] a column of whole numbers. Raises CacheError."""
    column = column_of(file, table, name)
    if not pa.types.is_integer(column.type):
        raise CacheError(f"{file}: column {name} must hold whole numbers, not {column.type}")
    numbers: IntArray = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def numbers_of(file: Path, table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """[n] a column of numbers. Raises CacheError."""
    column = column_of(file, table, name)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise CacheError(f"{file}: column {name} must hold numbers, not {column.type}")
    numbers: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False).astype(np.float64)
    return numbers


def check_same_model(file: Path, table: pa.Table, namespace: Mapping[str, object]) -> None:
    """Refuse an export of another model's namespace; a file that does not say is taken on trust."""
    described = (table.schema.metadata or {}).get(b"dpo_pack.namespace")
    theirs = dict(namespace) if described is None else json.loads(described)
    ours = json.loads(json.dumps(dict(namespace)))
    differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if described is not None and differing:
        raise CacheError(
            f"{file} holds log-probs of another model: {', '.join(differing)} differ from the recipe's "
            "reference; import it with the recipe of that model"
        )


def check_values(file: Path, logps: SequenceLogps, rows: IntArray) -> None:
    """Sums and per-token values must be log-probs, and agree."""
    refuse(file, rows, ~np.isfinite(logps.sums), lambda s: f"the log-prob is {logps.sums[s]}")
    refuse(
        file,
        rows,
        logps.sums > _LARGEST_LOGP,
        lambda s: f"the log-prob is {logps.sums[s]:g}; it is at most 0, as the logarithm of a probability",
    )
    refuse(file, rows, logps.num_tokens < 1, lambda s: f"{NUM_TOKENS} is {logps.num_tokens[s]}")
    if logps.tokens is None:
        return
    values = logps.tokens.values
    of_token = np.repeat(np.arange(len(logps)), logps.tokens.lengths)
    is_wrong = np.zeros(len(logps), dtype=np.bool_)
    is_wrong[of_token[~(np.isfinite(values) & (values <= _LARGEST_LOGP))]] = True
    refuse(file, rows, is_wrong, lambda s: f"{TOKENS} has a value that is not finite or above 0")
    sums = np.bincount(of_token, weights=values.astype(np.float64), minlength=len(logps))
    tolerance = _SUM_TOLERANCE + _RELATIVE_SUM_TOLERANCE * np.abs(logps.sums)
    refuse(
        file,
        rows,
        np.abs(sums - logps.sums) > tolerance,
        lambda s: f"{SUM} is {logps.sums[s]:g}, and {TOKENS} add up to {sums[s]:g}",
    )


def check_repetitions(file: Path, logps: SequenceLogps, rows: IntArray, index: KeyIndex) -> None:
    """A sequence that comes several times must have one log-prob."""
    first = index.first[index.inverse]
    refuse(
        file,
        rows,
        logps.sums != logps.sums[first],
        lambda s: (
            f"the sequence has a log-prob of {logps.sums[s]:g} here and of {logps.sums[first[s]]:g} in row "
            f"{rows[first[s]]}"
        ),
    )


def refuse(
    file: Path, rows: IntArray, is_wrong: npt.NDArray[np.bool_], describe: Callable[[int], str]
) -> None:
    """Raises CacheError for the first sequence that is wrong, [S]."""
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        raise CacheError(f"{file} row {rows[wrong[0]]}: {describe(int(wrong[0]))}; nothing was imported")
