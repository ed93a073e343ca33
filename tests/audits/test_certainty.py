"""The numbers of an audit, each against a plain computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpo_pack.audits import certainty as module
from dpo_pack.audits.certainty import auroc, calibration, certainty, divide, sigmoid, slope, swap_test
from dpo_pack.data import sources

RNG = np.random.default_rng(0)
MARGINS = RNG.normal(0.4, 1.0, 90)
FOLDS = RNG.integers(0, 3, 90)


def likelihood(a: float, values: list[float]) -> float:
    return -sum(math.log1p(math.exp(-a * value)) for value in values)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=14),
    st.integers(2, 4),
)
def test_pairs_that_share_a_key_directly_or_not_are_in_one_fold(
    pairs: list[tuple[int, int]], num_folds: int
) -> None:
    components = [{number} for number in range(len(pairs))]
    for one, (first, second) in enumerate(pairs):  # the plain way: join whatever shares a key
        for other, (third, fourth) in enumerate(pairs):
            if first == third or second == fourth:
                joined = components[one] | components[other]
                for number in joined:
                    components[number] = joined
    both = np.concatenate([np.array([one for one, _ in pairs]), np.array([other for _, other in pairs]) + 7])
    groups = sources.components(len(pairs), np.tile(np.arange(len(pairs)), 2), both)
    folds = divide(groups, num_folds, seed=0)
    for component in components:
        assert len({int(folds[number]) for number in component}) == 1
    for size in np.bincount(folds, minlength=num_folds):
        assert abs(size - len(pairs) / num_folds) <= max(map(len, components))
    assert folds.max() < num_folds


def test_folds_are_as_even_as_a_large_group_allows() -> None:
    groups = np.array([0] * 500 + [*range(1, 501)])
    sizes = sorted(np.bincount(divide(groups, 10, seed=0), minlength=10).tolist())
    assert sizes == [55] * 4 + [56] * 5 + [500]


def test_the_slope_has_the_largest_likelihood_of_all_that_are_not_negative() -> None:
    values = MARGINS.tolist()
    best = slope(MARGINS)
    assert best == pytest.approx(max(np.arange(0, 3, 1e-3), key=lambda a: likelihood(a, values)), abs=1e-3)
    assert slope(-MARGINS) == 0.0 == slope(np.zeros(5))
    assert slope(np.array([1.0, 2.0])) == pytest.approx(
        100
    )  # no slope is the best: the largest that we allow


def test_a_pair_is_judged_in_deviations_of_its_fold_by_the_slope_of_the_others() -> None:
    z = certainty(MARGINS, FOLDS)
    scaled = [margin / MARGINS[fold == FOLDS].std() for margin, fold in zip(MARGINS, FOLDS, strict=True)]
    for at, fold in enumerate(FOLDS):
        others = [value for value, other in zip(scaled, FOLDS, strict=True) if other != fold]
        a = max(np.arange(0, 3, 1e-3), key=lambda a: likelihood(a, others))
        assert z[at] == pytest.approx(a * scaled[at], abs=1e-2)
        assert sigmoid(-z)[at] == pytest.approx(1 / (1 + math.exp(z[at])))
    assert (certainty(np.zeros(6), np.array([0, 1] * 3)) == 0).all()  # nothing was learned


def plain_auroc(scores: list[float], is_wrong: list[bool]) -> float:
    wins = [
        (wrong > right) + (wrong == right) / 2
        for wrong, a in zip(scores, is_wrong, strict=True)
        for right, b in zip(scores, is_wrong, strict=True)
        if a and not b
    ]
    return sum(wins) / len(wins)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_the_auroc_is_the_part_of_wrong_and_right_pairs_in_order(scores: list[tuple[int, bool]]) -> None:
    values, wrong = ([*column] for column in zip(*scores, strict=True))
    if len(set(wrong)) == 2:
        found = auroc(np.array(values, dtype=np.float64), np.array(wrong))
        assert found == pytest.approx(plain_auroc(values, wrong))


def test_the_test_negates_a_part_of_the_margins_and_ranks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_DRAWS", 3)
    z, gaps = MARGINS, np.abs(RNG.normal(size=90))
    rng, draws = np.random.default_rng(7), []
    for _ in range(3):
        chosen = set(rng.permutation(90)[:4].tolist())  # 5 % of 90
        is_wrong = [at in chosen for at in range(90)]
        judged = [value if wrong else -value for value, wrong in zip(z, is_wrong, strict=True)]
        draws.append([plain_auroc(judged, is_wrong), plain_auroc(gaps.tolist(), is_wrong)])
    found = swap_test([z], gaps, seed=7)
    for score, (mean, low, high) in enumerate(found):
        values = [draw[score] for draw in draws]
        assert mean == pytest.approx(sum(values) / 3)
        assert (low, high) == pytest.approx(tuple(np.quantile(values, (0.025, 0.975))))


def test_what_knows_every_label_finds_all_swaps_and_what_knows_none_finds_none() -> None:
    knows = RNG.uniform(1, 2, 2000)
    found = swap_test((knows, RNG.normal(size=2000)), RNG.uniform(size=2000), seed=0)
    assert found[0] == [1.0, 1.0, 1.0]
    for mean, low, high in found[1:]:
        assert low < 0.5 < high and mean == pytest.approx(0.5, abs=0.02)


def test_calibration_compares_how_sure_a_model_is_with_how_often_labels_agree() -> None:
    z = RNG.normal(0.4, 1.0, 95)
    z[0] = 0.0
    rest = sorted(z.tolist(), key=abs)
    assert sum(num for num, _, _ in calibration(z)) == 95
    for num, sure, agrees in calibration(z):
        part, rest = rest[:num], rest[num:]
        assert num in (9, 10)
        assert sure == pytest.approx(sum(1 / (1 + math.exp(-abs(value))) for value in part) / num)
        assert agrees == pytest.approx(sum(1.0 if value > 0 else 0.5 * (value == 0) for value in part) / num)
