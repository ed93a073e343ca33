"""Weights of tokens: a loss, its gradient and its metrics are those of a plain weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loss_options import loss_options
from support.plain_steps import PlainPair, plain_logps, plain_loss
from support.reference_pairs import CPU, NAMESPACE, load_scorer, run_pass
from torch import Tensor

from dpo_pack.data.merging import prompt_merging
from dpo_pack.data.store import PairTable, join_pairs
from dpo_pack.losses import LOSSES, Objective, weighted_losses
from dpo_pack.model.facts import model_shape
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import PassSettings, find_work
from dpo_pack.reference.frozen import FrozenReference
from dpo_pack.training.batches import RowBuilder
from dpo_pack.training.metrics import averages, pair_values
from dpo_pack.training.step_loss import score_pairs, with_reference

BETA, ALPHA = 0.3, 0.25
PROMPT = [5, 9, 12]
# (chosen, its weights, rejected, its weights). The first two pairs share a completion with other weights.
ROWS: list[tuple[list[int], list[float] | None, list[int], list[float] | None]] = [
    ([7, 8, 30, 31, 9], [1, 1, 0, 0, 1], [7, 8, 40, 11], [1, 1, 0, 1]),
    ([7, 8, 30, 31, 9], [0.5, 0, 2, 1, 0.25], [13, 14], None),
    ([21, 22, 23], None, [21, 24, 25, 26], None),
]
SETTINGS = PassSettings(token_budget=64, share_prompt=True, device=CPU)


def table_of(
    rows: Sequence[tuple[list[int], list[float] | None, list[int], list[float] | None]],
) -> PairTable:
    def ids(of: list[int]) -> np.ndarray:
        return np.array(of, dtype=np.int32)

    def weights(of: list[float] | None, completion: list[int]) -> np.ndarray:
        return np.array([1] * len(completion) if of is None else of, dtype=np.float32)

    pairs = [
        Group(context=ids(PROMPT), completions=(ids(c), ids(r)), weights=(weights(cw, c), weights(rw, r)))
        for c, cw, r, rw in rows
    ]
    return PairTable.of([join_pairs(pairs, [1.0] * len(pairs), range(len(pairs)))])


def mean_plain_loss(
    models: tuple[CompletionLogps, CompletionLogps], name: str, ld_alpha: float | None
) -> Tensor:
    """Of ROWS, by a padded loop over tokens."""
    pairs = [
        PlainPair(
            prompt=PROMPT, chosen=c, rejected=r, weight=1,
            chosen_weights=cw or [1.0] * len(c), rejected_weights=rw or [1.0] * len(r),
        )
        for c, cw, r, rw in ROWS
    ]  # fmt: skip
    policy, reference = (plain_logps(scorer.model, pairs, ld_alpha)[0] for scorer in models)
    fixed = replace(reference, chosen=reference.chosen.detach(), rejected=reference.rejected.detach())
    options: Any = loss_options(beta=BETA)
    return plain_loss(name, policy, fixed, torch.ones(len(ROWS)), options) / len(ROWS)


@pytest.fixture(scope="module")
def plain_models(model_path: Path) -> tuple[CompletionLogps, CompletionLogps]:
    """A policy and a reference with other weights, for padded batches."""
    policy, reference = (load_scorer(model_path, packed=False) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy, reference


@pytest.fixture(scope="module")
def scorers(
    plain_models: tuple[CompletionLogps, CompletionLogps], model_path: Path
) -> tuple[CompletionLogps, CompletionLogps]:
    """The same models, for packed rows."""
    packed = load_scorer(model_path), load_scorer(model_path)
    for ours, theirs in zip(packed, plain_models, strict=True):
        ours.load_state_dict(theirs.state_dict())
    return packed


def builder_of(
    table: PairTable, cache: ReferenceCache, scorer: CompletionLogps, layout: str, ld: bool
) -> RowBuilder:
    run_pass(cache, [table], scorer, replace(SETTINGS, per_token=True))
    return RowBuilder(
        table=table,
        reference=FrozenReference.take(cache, [table], per_token=ld).of(table),
        is_packed=layout != "padded",
        share_prompt=layout in ("shared", "merged"),
        device=CPU,
        merging=prompt_merging(table, model_shape(scorer.model)) if layout == "merged" else None,
    )


@pytest.mark.parametrize("layout", ["shared", "unshared", "merged", "padded"])
@pytest.mark.parametrize(
    ("name", "ld_alpha"),
    [
        ("sigmoid", None),
        ("ipo", None),
        ("sigmoid_norm", None),
        ("sft", None),
        ("sigmoid", ALPHA),
        ("ipo", ALPHA),
    ],
)
def test_weighted_losses_and_gradients_are_those_of_a_plain_loop_over_tokens(
    plain_models: tuple[CompletionLogps, CompletionLogps],
    scorers: tuple[CompletionLogps, CompletionLogps],
    tmp_path: Path,
    layout: str,
    name: str,
    ld_alpha: float | None,
) -> None:
    policy, reference = plain_models if layout == "padded" else scorers
    table = table_of(ROWS)
    cache = ReferenceCache(tmp_path, NAMESPACE)
    builder = builder_of(table, cache, reference, layout, ld_alpha is not None)
    objective = Objective(terms=((LOSSES[name], 1.0),), options=loss_options(beta=BETA), ld_alpha=ld_alpha)
    row = builder.build(np.arange(3))
    assert (row.sequence_index is not None) == (layout == "merged")
    pairs = score_pairs(objective, policy(row.row), row)
    loss = weighted_losses(objective, pairs, mean_chosen_tokens=float(table.chosen_scored.mean())).mean()
    policy.zero_grad()
    loss.backward()
    ours = {key: p.grad.clone() for key, p in policy.named_parameters() if p.grad is not None}
    plain = mean_plain_loss(plain_models, name, ld_alpha)
    plain_models[0].zero_grad()
    plain.backward()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), abs=2e-5)
    for key, parameter in plain_models[0].named_parameters():
        if parameter.grad is not None:
            bound = 1e-4 * float(parameter.grad.abs().max()) + 1e-7
            torch.testing.assert_close(ours[key], parameter.grad, rtol=0, atol=bound)


def test_metrics_of_tokens_are_weighted_means_and_a_token_of_weight_zero_is_in_none(
    scorers: tuple[CompletionLogps, CompletionLogps], tmp_path: Path
) -> None:
    policy, reference = scorers
    table = table_of(ROWS[:1])
    builder = builder_of(table, ReferenceCache(tmp_path, NAMESPACE), reference, "shared", False)
    row = builder.build(np.arange(1))
    output = policy(row.row)
    scored = [[0, 1, 4], [5, 6, 8]]  # positions of weight 1 among the nine completion tokens
    entropies = output.token_statistics[0].double()
    pairs = score_pairs(Objective(terms=(), options=loss_options(beta=BETA)), output, row)
    values = pair_values(pairs, torch.zeros(1))
    found = averages(values, beta=BETA, dtype=torch.float32)
    assert found["entropy"] == pytest.approx(float(entropies[scored[0] + scored[1]].mean()))
    assert found["logps/chosen_per_token"] == pytest.approx(
        float(output.token_logps.detach()[scored[0]].double().mean())
    )
    broken = output._replace(
        token_logps=output.token_logps.detach().index_fill(0, torch.tensor([2]), torch.nan)
    )
    assert torch.equal(with_reference(row, broken).reference, with_reference(row, output).reference)


def test_a_bare_sum_in_the_cache_is_computed_once_more_and_then_no_mask_needs_another_pass(
    scorers: tuple[CompletionLogps, CompletionLogps], tmp_path: Path
) -> None:
    cache = ReferenceCache(tmp_path, NAMESPACE)
    plain = table_of([(c, None, r, None) for c, _, r, _ in ROWS])
    run_pass(cache, [plain], scorers[1], SETTINGS)
    masked = table_of(ROWS)
    # The third pair has no weights, so its sums suffice. The first completion is in two pairs.
    assert find_work(cache, [masked]).missing.sum() == 3
    run_pass(cache, [masked], scorers[1], replace(SETTINGS, per_token=True))
    assert find_work(cache, [masked]).missing.sum() == 0
    other = table_of([(c, [0.0] * (len(c) - 1) + [3.0], r, rw) for c, _, r, rw in ROWS[:2]])
    assert find_work(cache, [other, plain]).missing.sum() == 0
    frozen = FrozenReference.take(cache, [masked, other])
    frozen.save(tmp_path / "reference.parquet")
    again = FrozenReference.load(tmp_path / "reference.parquet")
    assert again.fingerprint() == frozen.fingerprint() and again.covers(masked)
    assert not FrozenReference.take(cache, [plain]).covers(masked)
    tokens = cache.lookup(masked.chosen_keys[:1], per_token=True)[1].of(0)
    assert again.of(masked).sums[0, 0] == pytest.approx(float(tokens[[0, 1, 4]].sum()))
    assert again.of(other).sums[0, 0] == pytest.approx(float(3 * tokens[-1]))
    assert again.of(plain).sums[0, 0] == cache.lookup(masked.chosen_keys[:1])[0][0]


def test_weights_change_the_fingerprint_of_pairs_and_weights_of_one_are_no_weights() -> None:
    plain = table_of([(c, None, r, None) for c, _, r, _ in ROWS])
    ones = table_of([(c, [1.0] * len(c), r, [1.0] * len(r)) for c, _, r, _ in ROWS])
    assert plain.fingerprint == ones.fingerprint and ones.stores[0].token_weights is None
    masked = table_of(ROWS)
    assert len({masked.fingerprint, plain.fingerprint, table_of([ROWS[0], *ROWS[:2]]).fingerprint}) == 3
    assert masked.has_token_weights.tolist() == [True, True, False]
    assert masked.chosen_scored.tolist() == [3, 3.75, 3] and masked.rejected_scored.tolist() == [3, 2, 4]
