"""Groups of held-out pairs: by source, by which completion is longer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpo_pack.training.held_out import LENGTH_BUCKETS, PairTraits, length_preference, means_by_group


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


def test_equal_lengths_show_no_length_preference() -> None:
    assert length_preference(np.array([1.0]), traits([7], [7])) == {}
