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


@pytest.mark.parametrize(
    ("method", "scores", "margin", "pairs", "num_ties"),
    [
        ("best_vs_worst", [0.5, 2.0, -1.0], 0.0, ((1, 2),), 0),
        ("best_vs_worst", [0.0, 1.0], 1.0, (), 1),
        ("all_pairs", [1.0, 2.0, 1.0], 0.0, ((1, 0), (1, 2)), 1),
        ("all_pairs", [0.0, 1.0, 3.0], 1.0, ((2, 0), (2, 1)), 1),
        *((method, [1.0, 1.0], 0.0, (), 1) for method in METHODS),
    ],
)
def test_a_pair_prefers_the_higher_score_by_more_than_the_margin_and_ties_are_counted(
    method: str, scores: list[float], margin: float, pairs: tuple[tuple[int, int], ...], num_ties: int
) -> None:
    result = pairing(completions(*"abc"[: len(scores)]), scores, method, min_margin=margin)
    assert result.pairs == pairs and result.num_ties == num_ties


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
