"""How often an interval covers the truth, and how often something is claimed where there is no difference.

A cell is a number of prompts, a part of ties and a number of sources; a set is one verdict. Fewer resamples
and flips than a verdict draws: intervals are a little shorter, p values coarser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dpo_pack.packing.lengths import FloatArray
from dpo_pack.verdicts import conclusion, statistics
from dpo_pack.verdicts.conclusion import Source, conclude

LEAST_COVERED, MOST_CLAIMED = 0.93, 0.06
NUM_PROMPTS = (20, 60, 200)
WINS = (0.5, 0.6, 0.75, 0.9)  # parts of the games without a tie


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in any order have the same p and interval, so that those of equal sets are computed once."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 300)
    monkeypatch.setattr(statistics, "NUM_FLIPS", 2000)
    for module, name in ((statistics, "sign_flip_p"), (conclusion, "mean_intervals")):
        monkeypatch.setattr(module, name, once(getattr(module, name)))


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: dict[bytes, Any] = {}

    def found(values: FloatArray, **options: Any) -> Any:
        key = np.sort(values, axis=0).tobytes()
        if key not in kept:
            kept[key] = function(values, **options)
        return kept[key]

    return found


def games(rng: np.random.Generator, num: int, *, ties: float, wins: float = 0.5) -> FloatArray:
    """Values of `num` games: 0, 0.5 (a tie) or 1."""
    return rng.choice([1.0, 0.5, 0.0], num, p=[(1 - ties) * wins, ties, (1 - ties) * (1 - wins)])


def judged_by_length(
    rng: np.random.Generator, num: int, *, ties: float, liking: float, quality: float = 0.0
) -> Source:
    """An LLM, asked in both orders, that likes long answers; the new model's are longer by one spread."""
    more = rng.normal(1, 1, num)
    chance = 1 / (1 + np.exp(-quality - liking * np.tanh(more / more.std())))
    values = (rng.random((2, num)) < chance).mean(axis=0)
    values[rng.random(num) < ties] = 0.5
    return Source(name="llm", kind="llm", values=values, more_characters=more)


def covered(num: int, ties: float, num_sets: int) -> Iterator[tuple[bool, bool]]:
    """Yields whether the intervals of a rate and of a difference cover the truth."""
    rng = np.random.default_rng(num)
    for at in range(num_sets):
        wins = WINS[at % len(WINS)]
        values = games(rng, num, ties=ties, wins=wins)
        judge = Source(name="judge", kind="function", values=values)
        task = Source(name="task", kind="task", values=2 * values - 1)
        truth = (1 - ties) * (2 * wins - 1)
        rows = conclude([judge, task], earlier=[], number=1)["sources"]
        (low, high), (least, most) = (row["interval"] for row in rows)
        yield low <= 0.5 + truth / 2 <= high, least <= truth <= most


@pytest.mark.slow
@pytest.mark.parametrize("num", NUM_PROMPTS)
@pytest.mark.parametrize("ties", [0.0, 0.8, 0.96])
def test_intervals_cover_the_truth_in_93_of_100_sets(num: int, ties: float) -> None:
    rates, differences = np.mean(list(covered(num, ties, 2000)), axis=0)
    print(f"{num} prompts, {ties:.0%} ties: of rates {rates:.3f}, of differences {differences:.3f}")
    assert min(rates, differences) >= LEAST_COVERED


def claims(num: int, ties: float, num_sources: int, num_sets: int) -> float:
    """Returns the part of sets with a claim; there is no difference."""
    rng, found = np.random.default_rng(num), 0
    for _ in range(num_sets):
        values = games(rng, num * num_sources, ties=ties).reshape(num_sources, num)
        sources = [Source(name=f"{at}", kind="function", values=each) for at, each in enumerate(values)]
        found += conclude(sources, earlier=[], number=1)["conclusion"] != "cannot tell"
    return found / num_sets


@pytest.mark.slow
@pytest.mark.parametrize("num_sources", [1, 3, 12])
@pytest.mark.parametrize("num", NUM_PROMPTS)
@pytest.mark.parametrize("ties", [0.0, 0.8, 0.96])
def test_without_a_difference_a_claim_is_made_in_6_of_100_sets(
    num: int, ties: float, num_sources: int
) -> None:
    found = claims(num, ties, num_sources, 2000)
    print(f"{num} prompts, {ties:.0%} ties, {num_sources} sources: {found:.4f}")
    assert found <= MOST_CLAIMED


@pytest.mark.parametrize("num_sources", [1, 3])
def test_without_a_difference_few_claims_are_made(num_sources: int) -> None:
    assert claims(60, 0.5, num_sources, 200) <= 0.08


@pytest.mark.slow
@pytest.mark.parametrize(("num", "ties", "liking"), [(60, 0.0, 2.0), (60, 0.8, 4.0), (200, 0.96, 4.0)])
def test_a_judge_of_length_alone_claims_in_6_of_100_sets(
    num: int, ties: float, liking: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 100)
    rng, rows = np.random.default_rng(num), []
    for _ in range(2000):
        source = judged_by_length(rng, num, ties=ties, liking=liking)
        rows += conclude([source], earlier=[], number=1)["sources"]
    found = np.mean([row["says"] != "neither" for row in rows])
    controlled = [row["length_controlled"]["rate"] for row in rows if "rate" in row["length_controlled"]]
    raw, without_length = np.mean([row["rate"] for row in rows]), np.mean(controlled)
    print(
        f"{num} prompts, {ties:.0%} ties: {found:.4f}, rate {raw:.3f}, at equal lengths {without_length:.3f}"
    )
    assert found <= MOST_CLAIMED
    assert raw > 0.51 and without_length == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("num", "ties", "quality"), [(60, 0.6, 0.8), (200, 0.0, 0.8)])
def test_length_controlled_intervals_cover_the_truth_in_93_of_100_sets(
    num: int, ties: float, quality: float
) -> None:
    rng, found = np.random.default_rng(num), []
    truth = 0.5 + (1 - ties) * (1 / (1 + np.exp(-quality)) - 0.5)
    for seed in range(1000):
        source = judged_by_length(rng, num, ties=ties, liking=1.0, quality=quality)
        [row] = conclude([source], earlier=[], number=1, seed=seed)["sources"]
        if "interval" in row["length_controlled"]:
            low, high = row["length_controlled"]["interval"]
            found.append(low <= truth <= high)
    print(f"{num} prompts, {ties:.0%} ties, quality {quality}: {np.mean(found):.3f} of {len(found)}")
    assert np.mean(found) >= LEAST_COVERED
