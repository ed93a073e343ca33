"""Groups of held-out pairs, by source and by which completion is longer, and bootstrap intervals of means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import dpo_pack.training.held_out as held_out
from dpo_pack.training.held_out import (
    LENGTH_BUCKETS,
    PairTraits,
    length_preference,
    mean_intervals,
    means_by_group,
)


def traits(chosen: list[int], rejected: list[int], sources: list[int] | None = None) -> PairTraits:
    return PairTraits(
        prompts=np.arange(len(chosen)),
        chosen_tokens=np.array(chosen, dtype=np.int32),
        rejected_tokens=np.array(rejected, dtype=np.int32),
        source_indices=np.array(sources or [0] * len(chosen), dtype=np.int16),
        source_names=("hh", "web", "unused"),
    )


def test_edges_of_length_buckets() -> None:
    # chosen / rejected: under a half; a half; just shorter than a tenth; equal; a tenth longer; twice.
    some = traits([49, 50, 90, 100, 110, 200], [100, 100, 100, 100, 100, 100])
    described = means_by_group({"pair": np.arange(6.0)}, some, seed=0)
    assert list(described["by_length"]) == list(LENGTH_BUCKETS)
    assert [(part["pairs"], part["pair"]) for part in described["by_length"].values()] == [
        (1, 0.0), (2, 1.5), (1, 3.0), (1, 4.0), (1, 5.0)
    ]  # fmt: skip


def test_a_description_has_means_and_intervals_of_the_whole_and_of_its_parts() -> None:
    accuracy = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    some = traits([20, 20, 20, 5, 5, 5], [10, 10, 10, 10, 10, 10], [0, 1, 1, 1, 0, 0])
    described = means_by_group({"rewards/accuracies": accuracy, "loss": 1 - accuracy}, some, seed=0)
    assert (described["pairs"], described["rewards/accuracies"], described["loss"]) == (6, 0.5, 0.5)
    low, high = described["intervals"]["rewards/accuracies"]
    assert 0.0 <= low < 0.5 < high <= 1.0
    assert list(described["by_source"]) == ["hh", "web"]  # a source without pairs is left out
    assert described["by_source"]["hh"]["rewards/accuracies"] == pytest.approx(1 / 3)
    assert described["by_source"]["web"]["pairs"] == 3
    assert described["by_length"]["chosen_over_twice"]["rewards/accuracies"] == pytest.approx(2 / 3)
    assert described["by_length"]["chosen_shorter"]["rewards/accuracies"] == pytest.approx(1 / 3)


def test_pairs_of_one_prompt_are_drawn_together() -> None:
    some = dataclasses.replace(traits([9] * 4, [9] * 4), prompts=np.array([0, 0, 2, 2]))
    described = means_by_group({"loss": np.array([0.0, 1.0, 0.5, 0.5])}, some, seed=0)
    assert "by_source" not in described  # there is one source
    assert (described["pairs"], described["prompts"]) == (4, 2)
    assert described["intervals"]["loss"] == [0.5, 0.5]  # each prompt's mean is 0.5


def test_length_preference_of_a_policy_that_only_learned_length() -> None:
    some = traits([20, 30, 5, 8, 7], [10, 10, 10, 10, 7])  # the data prefers the longer one in 2 of 4
    longer_wins = np.array([1.0, 1.0, 0.0, 0.0, 1.0])
    assert length_preference(longer_wins, some) == {"length/chosen_longer": 0.5, "length/prefers_longer": 1.0}
    always_chosen = np.array([1.0, 1.0, 1.0, 0.5, 0.0])  # right, right, right, undecided; one of equal length
    assert length_preference(always_chosen, some)["length/prefers_longer"] == (1 + 1 + 0 + 0.5) / 4


def test_intervals_hold_the_true_mean_about_95_times_in_100() -> None:
    random = np.random.default_rng(2)
    held = 0
    for trial in range(200):
        low, high = mean_intervals(random.exponential(size=(80, 1)), seed=trial)[0]
        held += low <= 1.0 <= high
    assert 0.89 <= held / 200 <= 0.99


def test_a_prompt_with_more_pairs_weighs_more() -> None:
    values, prompts = np.array([[0.0]] + [[1.0]] * 9), np.array([0] + [4] * 9)
    resampled_means = {0.0, 0.9, 1.0}  # of the two prompts: the first twice, both, the second twice
    assert set(mean_intervals(values, seed=0, prompts=prompts)[0].tolist()) <= resampled_means


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
        patch.setattr(held_out, "NUM_RESAMPLES", resamples)
        expected = mean_intervals(values, seed=0)
    monkeypatch.setattr(held_out, "_MAX_DRAWS", 30_000)
    assert np.array_equal(mean_intervals(values, seed=0), expected)
