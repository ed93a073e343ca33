"""Bootstrap intervals: what is known of them for means."""

from __future__ import annotations

import numpy as np
import pytest

import dpo_pack.training.held_out as held_out
from dpo_pack.training.held_out import mean_intervals


def test_an_interval_is_the_normal_one_where_there_are_many_pairs() -> None:
    values = np.random.default_rng(1).normal(loc=[0.0, 5.0], scale=[1.0, 3.0], size=(2000, 2))
    bounds = mean_intervals(values, seed=0)
    half_width = 1.96 * values.std(axis=0) / np.sqrt(2000)
    normal = np.stack([values.mean(axis=0) - half_width, values.mean(axis=0) + half_width], axis=1)
    assert np.abs(bounds - normal).max() < 0.15 * half_width.max()


def test_intervals_hold_the_true_mean_about_95_times_in_100() -> None:
    random = np.random.default_rng(2)
    held = 0
    for trial in range(200):
        low, high = mean_intervals(random.exponential(size=(80, 1)), seed=trial)[0]
        held += low <= 1.0 <= high
    assert 0.89 <= held / 200 <= 0.99


def test_columns_are_resampled_together() -> None:
    values = np.random.default_rng(5).normal(size=(50, 1))
    bounds = mean_intervals(np.hstack([values, values + 1.0, -values]), seed=0)
    assert bounds[1] == pytest.approx(bounds[0] + 1.0)
    assert bounds[2] == pytest.approx(-bounds[0][::-1])


def test_copies_of_each_prompts_pair_do_not_narrow_the_interval() -> None:
    values = np.random.default_rng(8).normal(size=(50, 2))
    alone = mean_intervals(values, seed=0)
    assert np.array_equal(mean_intervals(values, seed=0, prompts=np.arange(50)), alone)
    copies, prompts = np.repeat(values, 4, axis=0), np.repeat(np.arange(50), 4)
    assert mean_intervals(copies, seed=0, prompts=prompts) == pytest.approx(alone)
    assert (np.ptp(mean_intervals(copies, seed=0), axis=1) < 0.7 * np.ptp(alone, axis=1)).all()


def test_a_prompt_with_more_pairs_weighs_more() -> None:
    values, prompts = np.array([[0.0]] + [[1.0]] * 9), np.array([0] + [4] * 9)
    resampled_means = {0.0, 0.9, 1.0}  # of the two prompts: the first twice, both, the second twice
    assert set(mean_intervals(values, seed=0, prompts=prompts)[0].tolist()) <= resampled_means


def test_one_pair_and_equal_pairs_have_an_interval_of_no_width() -> None:
    assert mean_intervals(np.array([[3.0]]), seed=0).tolist() == [[3.0, 3.0]]
    assert mean_intervals(np.full((9, 1), 0.25), seed=0).tolist() == [[0.25, 0.25]]


def test_how_much_is_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(6).normal(size=(40, 3))
    at_once = mean_intervals(values, seed=0)
    monkeypatch.setattr(held_out, "_VALUES_AT_A_TIME", 1)
    assert np.array_equal(mean_intervals(values, seed=0), at_once)
    assert not np.array_equal(mean_intervals(values, seed=1), at_once)


@pytest.mark.parametrize(("num_pairs", "resamples"), [(10, 1000), (50, 600), (1000, 200)])
def test_many_pairs_take_fewer_resamples_but_at_least_200(
    num_pairs: int, resamples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(7).normal(size=(num_pairs, 1))
    with monkeypatch.context() as patch:
        patch.setattr(held_out, "_MAX_DRAWS", 10**9)
        expected = mean_intervals(values, seed=0, num_resamples=resamples)
    monkeypatch.setattr(held_out, "_MAX_DRAWS", 30_000)
    assert np.array_equal(mean_intervals(values, seed=0), expected)
