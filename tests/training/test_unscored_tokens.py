"""Tokens that are not scored: rows, reference log-probs and metrics are those of the scored tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.plain_steps import PlainPair, plain_logps
from support.reference_pairs import CPU, NAMESPACE, load_scorer, run_pass

from dpo_pack.data.store import PairTable, join_pairs
from dpo_pack.packing.lengths import Group
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import find_work
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.training.batches import RowBuilder

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


@pytest.mark.parametrize("layout", ["shared", "unshared", "padded"])
def test_log_probs_of_policy_and_reference_are_sums_over_the_scored_tokens(
    layout: str, model_path: Path, tmp_path: Path
) -> None:
    scorer, table = load_scorer(model_path, packed=layout != "padded"), table_of(ROWS)
    cache = ReferenceCache(tmp_path, NAMESPACE)
    run_pass(cache, [table], scorer)
    builder = RowBuilder(
        table=table,
        reference=FrozenReference.take(cache, [table]).of(table),
        is_packed=layout != "padded",
        share_prompt=layout == "shared",
        device=CPU,
    )
    row = builder.build(np.arange(3))
    with torch.no_grad():
        output = scorer(row.row)
        plain_pairs = [
            PlainPair(prompt=PROMPT, chosen=c, rejected=r, weight=1, chosen_weights=cs, rejected_weights=rs)
            for c, cs, r, rs in ROWS
        ]
        plain, _ = plain_logps(load_scorer(model_path, packed=False).model, plain_pairs)
    expected = torch.stack((plain.chosen, plain.rejected), dim=1).double()
    torch.testing.assert_close(output.sums.view(-1, 2), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(row.reference, expected, rtol=0, atol=2e-5)
    assert output.num_tokens.tolist() == [3, 3, 2, 2, 3, 4] and len(output.token_logps) == 17


def test_the_key_of_a_sequence_knows_which_tokens_are_scored_unless_all_are(
    model_path: Path, tmp_path: Path
) -> None:
    table, plain = table_of(ROWS), table_of(ALL_SCORED)
    assert plain.stores[0].scored is None and plain.group(0).scored is None
    assert len({keys.tobytes() for keys in (*table.chosen_keys[:2], *plain.chosen_keys[:1])}) == 3
    assert np.array_equal(table.rejected_keys[1:], plain.rejected_keys[1:])
    assert table.fingerprint != plain.fingerprint
    assert table.chosen_scored.tolist() == [3, 2, 3] and table.rejected_scored.tolist() == [3, 2, 4]
    cache, scorer = ReferenceCache(tmp_path, NAMESPACE), load_scorer(model_path)
    run_pass(cache, [plain], scorer)
    assert find_work(cache, [table]).missing.sum() == 3  # the third pair and one completion are scored whole
    run_pass(cache, [table], scorer)
    assert find_work(cache, [table, plain]).missing.sum() == 0
    assert not FrozenReference.take(cache, [plain]).covers(table)
