"""Scored completions become pairs: which ones, and what is counted instead."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from dpo_pack.online.interface import Completion, Draw
from dpo_pack.online.phases import Outcome, make_pairs
from dpo_pack.recipe.online import PairingRecipe

METHODS = get_args(PairingRecipe.model_fields["type"].annotation)


def completions(*texts: str, unfinished: tuple[int, ...] = ()) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            ids=np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32),
            text=text,
            is_finished=position not in unfinished,
        )
        for position, text in enumerate(texts)
    )


def draw(number: int) -> Draw:
    return Draw(number=number, prompt_index=0, prompt=None)  # type: ignore[arg-type]


def pairing(answers: tuple[Completion, ...], scores: list[float], method: str, **settings: float) -> Outcome:
    rules = PairingRecipe.model_validate({"type": method, **settings})
    return make_pairs(draw(3), answers, np.array(scores), rules, seed=0)


def test_best_vs_worst_takes_the_two_ends() -> None:
    result = pairing(completions("a", "b", "c"), [0.5, 2.0, -1.0], "best_vs_worst")
    assert result.pairs == ((1, 2),) and result.num_ties == 0


def test_all_pairs_prefers_the_higher_score_of_every_two_and_counts_ties() -> None:
    result = pairing(completions("a", "b", "c"), [1.0, 2.0, 1.0], "all_pairs")
    assert result.pairs == ((1, 0), (1, 2)) and result.num_ties == 1


def test_a_pair_must_differ_by_more_than_the_margin() -> None:
    result = pairing(completions("a", "b", "c"), [0.0, 1.0, 3.0], "all_pairs", min_margin=1.0)
    assert result.pairs == ((2, 0), (2, 1)) and result.num_ties == 1
    assert pairing(completions("a", "b"), [0.0, 1.0], "best_vs_worst", min_margin=1.0).pairs == ()


def test_random_draws_two_different_completions_by_seed_and_draw_number() -> None:
    answers, scores = completions("a", "b", "c", "d"), np.array([0.0, 1.0, 2.0, 3.0])
    rules = PairingRecipe(type="random")
    drawn = [make_pairs(draw(number), answers, scores, rules, seed=5).pairs for number in range(50)]
    assert all(len(pairs) == 1 and pairs[0][0] > pairs[0][1] for pairs in drawn)
    assert len(set(drawn)) == 6  # of four completions, every two
    again = [make_pairs(draw(number), answers, scores, rules, seed=5).pairs for number in range(50)]
    assert drawn == again


def test_a_completion_that_did_not_end_loses_the_penalty() -> None:
    answers = completions("a", "b", unfinished=(1,))
    assert pairing(answers, [0.0, 1.0], "best_vs_worst").pairs == ((1, 0),)
    penalised = pairing(answers, [0.0, 1.0], "best_vs_worst", missing_eos_penalty=3.0)
    assert penalised.pairs == ((0, 1),) and np.array_equal(penalised.scores, [0.0, -2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_equal_completions_never_make_a_pair(method: str) -> None:
    # A judge that is not a function of the text may score the same words differently.
    result = pairing(completions("a", "a", "b", "a"), [0.0, 9.0, 1.0, -9.0], method)
    assert result.pairs == ((2, 0),) and result.num_duplicates == 2
    alone = pairing(completions("a", "a"), [0.0, 1.0], method)
    assert alone.pairs == () and alone.num_ties == 0 and alone.num_duplicates == 1


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_are_one_tie_and_no_pair(method: str) -> None:
    result = pairing(completions("a", "b"), [1.0, 1.0], method)
    assert result.pairs == () and result.num_ties == 1
