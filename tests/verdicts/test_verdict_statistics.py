"""p values, length control and the conclusion of a verdict, against values by hand and by brute force."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dpo_pack.packing.lengths import FloatArray
from dpo_pack.verdicts import statistics
from dpo_pack.verdicts.conclusion import Source, conclude


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 200)


def test_a_sign_flip_test_of_few_differences_counts_all_signs() -> None:
    differences = np.array([0.5, -0.25, 1.0, 0.0, 0.25, 0.75, -0.5, 0.0, 0.3])
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=len(differences))]
    exact = np.mean(np.array(sums) >= abs(differences.sum()) - 1e-12)
    assert statistics.sign_flip_p(differences, seed=0) == pytest.approx(exact)
    assert statistics.sign_flip_p(np.ones(6), seed=0) == 2 / 64
    assert statistics.sign_flip_p(-np.ones(15), seed=0) == 2 / 2**15
    assert statistics.sign_flip_p(np.zeros(40), seed=0) == 1.0


def test_a_sign_flip_test_of_many_differences_draws_signs() -> None:
    differences = np.repeat([1.0, 0.0, -1.0], [20, 50, 10])
    exact = 2 * sum(math.comb(30, k) for k in range(20, 31)) / 2**30
    assert statistics.sign_flip_p(differences, seed=1) == pytest.approx(exact, abs=0.006)
    assert statistics.sign_flip_p(-differences, seed=1) == statistics.sign_flip_p(differences, seed=1)
    assert statistics.sign_flip_p(np.ones(16), seed=0) >= 1 / 20_001  # not 0: the signs seen are one of them
    assert statistics.sign_flip_p(np.ones(99), seed=0) == 1 / 20_001


def test_earlier_tests_count_as_tests_of_this_verdict_do() -> None:
    assert statistics.holm([0.01, 0.04], []) == [0.02, 0.04]
    assert statistics.holm([0.04, 0.01], [0.02]) == pytest.approx([0.04, 0.03])
    assert statistics.holm([0.03, 0.02], [0.021]) == pytest.approx([0.06, 0.06])  # never out of order
    assert statistics.holm([0.4], [0.9, 0.8]) == [1.0]
    assert statistics.holm([], [0.5]) == []


def lengths(num: int, *, mean: float, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).normal(mean, 1, num)


def longer_wins(
    more_characters: FloatArray, *, liking: float, quality: float = 0.0, seed: int = 0
) -> FloatArray:
    """Games of a judge that likes long answers, and, with `quality`, those of the new model."""
    longer = np.tanh(more_characters / more_characters.std())
    drawn = np.random.default_rng(seed).random(len(longer))
    return np.where(drawn < 1 / (1 + np.exp(-quality - liking * longer)), 1.0, 0.0)


def test_exchanging_the_models_gives_one_minus_the_length_controlled_rate() -> None:
    more = lengths(80, mean=0.7)
    values = np.where(np.arange(80) % 3 == 0, 0.5, longer_wins(more + 0.5, liking=1))
    longer = np.tanh(more / more.std())
    rate, interval = statistics.length_controlled(values, longer, seed=4)
    other_rate, other_interval = statistics.length_controlled(1 - values, -longer, seed=4)
    assert abs(rate - 0.5) > 0.01
    assert other_rate == pytest.approx(1 - rate, abs=1e-12)
    p, other_p = (
        statistics.length_controlled_p(*both, seed=4) for both in ((values, longer), (1 - values, -longer))
    )
    assert p == other_p < 1
    assert interval[0] < rate < interval[1] and other_interval[0] < other_rate < other_interval[1]
    assert other_interval == pytest.approx([1 - interval[1], 1 - interval[0]], abs=0.05)


def test_firth_s_penalty_adds_half_a_win_and_half_a_loss_to_a_rate() -> None:
    values = np.array([1.0] * 9 + [0.5] * 2)
    fitted = statistics._fitted(values, np.ones((11, 1)), np.ones((1, 11)))[0, 0]
    assert 1 / (1 + np.exp(-fitted)) == pytest.approx((10 + 0.5) / (11 + 1))
    apart = statistics._fitted(
        np.repeat([0.0, 1.0], 20), np.stack([np.ones(40), np.repeat([-1, 1], 20)], 1), np.ones((1, 40))
    )
    assert np.isfinite(apart).all() and apart[0, 1] > 3  # no coefficient runs away where lengths decide all


def test_a_weight_is_a_number_of_times() -> None:
    more, times = lengths(30, mean=0.3), np.arange(30) % 3
    values, columns = longer_wins(more, liking=2), np.stack([np.ones(30), np.tanh(more)], axis=1)
    often = statistics._fitted(
        np.repeat(values, times), np.repeat(columns, times, axis=0), np.ones((1, times.sum()))
    )
    weighted = statistics._fitted(values, columns, np.stack([np.ones(30), times]))
    assert weighted[1] == pytest.approx(often[0], abs=1e-6)
    assert abs(weighted[0] - often[0]).max() > 0.01


def test_a_judge_of_length_alone_is_corrected_to_a_half_where_lengths_overlap() -> None:
    more = lengths(1000, mean=0.8)
    values = longer_wins(more, liking=2)
    row = judged(values, more)
    assert row["rate"] > 0.65 and row["interval"][0] > 0.6
    assert row["length_controlled"]["rate"] == pytest.approx(0.5, abs=0.05)
    low, high = row["length_controlled"]["interval"]
    assert low < 0.5 < high
    assert row["p"] > 0.05 and row["says"] == "neither"


def judged(values: FloatArray, more_characters: FloatArray) -> Any:
    source = Source(name="judge", kind="llm", values=values, more_characters=more_characters)
    return conclude([source], earlier=[], number=1)["sources"][0]


def test_a_judge_of_answers_counts_only_with_and_without_their_length() -> None:
    more = lengths(200, mean=0.0)
    good = np.where(np.random.default_rng(1).random(200) < 0.7, 1.0, 0.0)
    assert judged(good, more)["says"] == "above"
    assert judged(1 - good, more)["says"] == "below"
    # Better between answers of the same length; but the judge likes long ones, and the new ones are short.
    short = lengths(200, mean=-1.0)
    row = judged(longer_wins(short, liking=2, quality=1.5), short)
    assert row["interval"][0] < 0.5 < 0.55 < row["length_controlled"]["interval"][0]
    assert (row["says"], row["p"] > 0.05) == ("neither", True)
    function = Source(name="judge", kind="function", values=good)
    [plain] = conclude([function], earlier=[], number=1)["sources"]
    assert plain["p"] == statistics.sign_flip_p(good - 0.5, seed=0) <= judged(good, more)["p"]
    assert "length_controlled" not in plain


@pytest.mark.parametrize(
    ("values", "more_characters", "reason"),
    [
        ([1.0] * 49, [-1.0, 1.0] * 24 + [0.0], "only 49 prompts; at least 50 are needed"),
        ([1.0] * 60, [1.0] * 56 + [-1.0] * 4, "only 4 of the new answers are shorter; at least 5 are needed"),
        ([1.0] * 60, [-1.0] * 56 + [0.0] * 4, "only 0 of the new answers are longer; at least 5 are needed"),
        (
            [1.0] * 54 + [0.5] * 6,
            [1.0] * 54 + [-1.0] * 6,
            "where the new answer is shorter, every game is a tie",
        ),
    ],
)
def test_without_length_control_a_judge_is_on_neither_side_and_the_sentence_says_why(
    values: list[float], more_characters: list[float], reason: str
) -> None:
    source = Source(
        name="judge 1 (llm)", kind="llm", values=np.array(values), more_characters=np.array(more_characters)
    )
    found = conclude([source], earlier=[], number=1)
    [row] = found["sources"]
    assert (row["says"], row["p"], row["length_controlled"]) == ("neither", 1.0, {"reason": reason})
    assert found["conclusion"] == "cannot tell"
    assert (
        f"judge 1 (llm) does not count, because it may only like the length of answers: {reason}."
        in found["sentence"]
    )
    assert min(row["prompts_needed"].values()) >= 50


def task(name: str, ups: int, downs: int, ties: int = 100, **more: Any) -> Source:
    return Source(name=name, kind="task", values=np.repeat([1.0, -1.0, 0.0], [ups, downs, ties]), **more)


UP, UP_TOO, DOWN = task("a", 20, 4), task("b", 30, 5), task("c", 4, 20)
EVEN, NONE = task("d", 8, 8), task("e", 0, 0, 0)
PATCHY, FULL = task("f", 30, 5, num_failed=8), task("f", 30, 5, num_failed=7)  # of 135 results

TIES = Source(name="g", kind="function", values=np.repeat([1.0, 0.5], [6, 100]))  # its interval is wide


@pytest.mark.parametrize(
    ("sources", "primary", "conclusion", "words"),
    [
        ([UP, EVEN], None, "better", "better by a; d may have lost up to"),
        ([UP, UP_TOO], None, "better", "better by a and b"),
        ([TIES], None, "better", "better by g; g may have lost up to 6.6 points."),
        ([DOWN, EVEN], None, "worse", "worse by c; c may have lost up to"),
        ([UP, DOWN], None, "mixed", "mixed: better by a, worse by c; c may"),
        ([EVEN], None, "cannot tell", "cannot tell: no source shows a difference; d may have lost up to"),
        ([UP, EVEN], "a", "better", "better by a; d"),
        ([UP, EVEN], "d", "cannot tell", "cannot tell: better by a, but not by d; d may"),
        ([DOWN, EVEN], "d", "cannot tell", "cannot tell: worse by c, but not by d; c may"),
        ([DOWN, EVEN], "c", "worse", "worse by c; "),
        ([UP, DOWN, EVEN], "d", "mixed", "mixed: better by a, worse by c; "),
        (
            [UP, NONE],
            None,
            "cannot tell",
            "cannot tell: better by a, but results are missing. e has no result: lm-eval",
        ),
        (
            [UP, NONE],
            "e",
            "cannot tell",
            "cannot tell: better by a, but not by e. e has no result: lm-eval gave no usable scores.",
        ),
        ([DOWN, NONE], None, "worse", "e has no result: lm-eval gave no usable scores."),
        (
            [PATCHY],
            None,
            "cannot tell",
            "but results are missing. f has no result for 8 of 143 prompts, more than 5%.",
        ),
        ([FULL], None, "better", "better by f."),
        ([], None, "cannot tell", "cannot tell: no source shows a difference."),
    ],
)
def test_a_conclusion_needs_a_source_on_one_side_and_none_on_the_other(
    sources: Sequence[Source], primary: str | None, conclusion: str, words: str
) -> None:
    found = conclude(sources, earlier=[], number=1, primary=primary)
    assert found["conclusion"] == conclusion
    assert words in found["sentence"]
    assert ("items to show" in found["sentence"]) == (
        conclusion == "cannot tell" and any(len(each.values) for each in sources) and primary != "e"
    )


def test_looking_again_makes_a_claim_harder_and_the_sentence_counts_the_looks() -> None:
    first = conclude([UP], earlier=[], number=1)
    [row] = first["sources"]
    assert row["p_holm"] == row["p"] and "verdict" not in first["sentence"]
    again = conclude([UP], earlier=[0.6] * 60, number=3)
    [row] = again["sources"]
    assert row["p_holm"] == pytest.approx(61 * row["p"])
    assert (first["conclusion"], again["conclusion"]) == ("better", "cannot tell")
    assert "This is verdict number 3: the more often one looks" in again["sentence"]
    needed = [found["sources"][0]["prompts_needed"]["5"] for found in (first, again)]
    assert needed[0] < needed[1]


def test_a_row_has_all_numbers_of_its_source_and_is_plain_json() -> None:
    judge = Source(
        name="judge", kind="function", values=np.repeat([1.0, 0.5, 0.0], [60, 20, 20]), num_failed=1
    )
    found = conclude([judge, DOWN, NONE], earlier=[], number=1)
    assert json.loads(json.dumps(found)) == found == conclude([judge, DOWN, NONE], earlier=[], number=1)
    rows = found["sources"]
    assert (rows[0]["rate"], rows[0]["n"], rows[0]["ties"], rows[0]["num_failed"]) == (0.7, 100, 20, 1)
    assert rows[0]["interval"] == pytest.approx([0.6042, 0.7811], abs=1e-4)  # Wilson's of 70 of 100
    assert rows[0]["largest_loss"] == 0
    assert rows[1]["difference"] == pytest.approx(-16 / 124)
    low, high = rows[1]["interval"]
    assert low < -16 / 124 < high < 0
    assert rows[1]["largest_loss"] == pytest.approx(-100 * low)
    assert {rows[2][name] for name in ("difference", "interval", "p", "p_holm", "prompts_needed")} == {None}
    assert rows[2]["says"] == "no result"


def test_a_source_without_a_difference_leaves_a_loss_open_all_the_same() -> None:
    same = Source(name="judge", kind="function", values=np.full(200, 0.5))
    rows = conclude([same, task("task", 0, 0, 200)], earlier=[], number=1)["sources"]
    for row in rows:
        assert (row["says"], row["p"], row["ties"]) == ("neither", 1.0, 200)
        assert 0.5 < row["largest_loss"] < 7
        assert row["prompts_needed"]["2"] > 120  # so that six of them, at two points, can differ


def test_points_of_scores_above_one_are_their_units() -> None:
    values = np.random.default_rng(0).normal(0, 20, 300)  # scores from 0 to 100
    units = Source(name="command", kind="command", values=values)
    hundredths = Source(name="command", kind="command", values=values / 100)
    [large], [small] = (conclude([each], earlier=[], number=1)["sources"] for each in (units, hundredths))
    assert large["largest_loss"] == pytest.approx(small["largest_loss"])
    assert large["prompts_needed"] == small["prompts_needed"]


def test_as_many_prompts_as_are_needed_show_a_difference_in_8_of_10_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "NUM_FLIPS", 2000)
    rng, chances = np.random.default_rng(3), (0.2, 0.1, 0.7)  # of +1, -1, 0: a difference of 10 points
    pilot = Source(name="task", kind="task", values=np.repeat([1.0, -1.0, 0.0], [60, 60, 280]))
    number = conclude([pilot], earlier=[], number=1)["sources"][0]["prompts_needed"]["10"]
    assert 200 < number < 300
    trials = [statistics.sign_flip_p(rng.choice([1.0, -1, 0], number, p=chances), seed=0) for _ in range(200)]
    assert 0.72 <= np.mean(np.array(trials) <= 0.05) <= 0.9
