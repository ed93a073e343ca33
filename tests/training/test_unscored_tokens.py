"""Tokens that are not scored: rows, reference log-probs and metrics are those of the scored tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.reference_pairs import NAMESPACE, load_scorer, run_pass

from dpo_pack.data.store import PairTable, join_pairs
from dpo_pack.packing.lengths import Group
from dpo_pack.reference.cache import FrozenReference, ReferenceCache
from dpo_pack.reference.compute import find_work

PROMPT = [5, 9, 12]
# (chosen, scored, rejected, scored); the first two pairs have one completion, of which other tokens count.
ROWS = [
    ([7, 8, 30, 31, 9], [1, 1, 0, 0, 1], [7, 8, 40, 11], [1, 1, 0, 1]),
    ([7, 8, 30, 31, 9], [0, 0, 1, 1, 0], [13, 14], [1, 1]),
    ([21, 22, 23], [1, 1, 1], [21, 24, 25, 26], [1, 1, 1, 1]),
]
ALL_SCORED = [(c, [1] * len(c), r, [1] * len(r)) for c, _, r, _ in ROWS]


def table_of(rows: Sequence[tuple[list[int], list[int], list[int], list[int]]]) -> PairTable:
    def group(chosen: list[int], cs: list[int], rejected: list[int], rs: list[int]) -> Group:
        return Group(
            context=np.array(PROMPT, dtype=np.int32),
            completions=(np.array(chosen, dtype=np.int32), np.array(rejected, dtype=np.int32)),
            scored=(np.array(cs, dtype=np.bool_), np.array(rs, dtype=np.bool_)),
        )

    return PairTable.of([join_pairs([group(*row) for row in rows], [1.0] * len(rows), range(len(rows)))])


def test_the_key_of_a_sequence_knows_which_tokens_are_scored(model_path: Path, tmp_path: Path) -> None:
    table, plain = table_of(ROWS), table_of(ALL_SCORED)
    assert plain.parts[0].scored is None and plain.group(0).scored is None
    assert len({keys.tobytes() for keys in (*table.chosen_keys[:2], *plain.chosen_keys[:1])}) == 3
    assert np.array_equal(table.rejected_keys[1:], plain.rejected_keys[1:])
    assert table.fingerprint != plain.fingerprint
    assert table.chosen_scored.tolist() == [3, 2, 3] and table.rejected_scored.tolist() == [3, 2, 4]
    cache, scorer = ReferenceCache(tmp_path, NAMESPACE), load_scorer(model_path)
    run_pass(cache, [plain], scorer)
    assert find_work(cache, [table]).missing.sum() == 3  # the third pair and one completion are scored whole
    run_pass(cache, [table], scorer)
    assert find_work(cache, [table, plain]).missing.sum() == 0
    assert FrozenReference.find(cache, [plain]).lacking(table).num_pairs == 2
