"""Evaluations in the terminal: the sentence for online runs."""

from __future__ import annotations

from dpo_pack.online.win_rate import win_rate_sentence


def test_a_record_of_an_online_evaluation_is_told_with_its_win_rate_or_says_that_there_is_no_score() -> None:
    record = {
        "prompts": 1200, "failures": 3, "online/win_rate": 0.625, "online/scores": 1.5,
        "online/score_gain": 0.25,
        "intervals": {"online/win_rate": (0.5, 0.75), "online/score_gain": (-0.125, 0.625)},
    }  # fmt: skip
    assert win_rate_sentence(record) == (
        "wins 0.625 (0.500 to 0.750) against the starting policy, score 1.500, gain +0.250 (-0.125 to "
        "+0.625), 3 prompts failed"
    )
    assert win_rate_sentence({"prompts": 1200}) == "no score for any of 1,200 prompts"
