"""What a phase comes to: outcomes, counts, averages, and the rows on disk."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_online_judges import ROLLOUTS, Fixed

from dpo_pack.online.interface import Completion, Draw, Failure
from dpo_pack.online.phases import (
    SCHEMA,
    Outcome,
    RolloutLog,
    Tally,
    load_pending,
    make_pairs,
    pairs_of,
    pending_state,
    phase_metrics,
    run_phase,
)
from dpo_pack.online.win_rate import FIRST_DRAW, WinRate
from dpo_pack.recipe.online import PairingRecipe

DRAWS = [rollout.draw for rollout in ROLLOUTS]
ALL_PAIRS = PairingRecipe(type="all_pairs")


class Canned:
    """Answers from ROLLOUTS; fails on those in `fails`."""

    def __init__(self, *fails: int) -> None:
        self.fails = fails

    def generate(self, draws: list[Draw]) -> list[tuple[Completion, ...] | Failure]:
        return [
            Failure(reason="down")
            if draw.prompt_index in self.fails
            else ROLLOUTS[draw.prompt_index].completions
            for draw in draws
        ]

    def weights_step(self, step: int) -> int:
        return step


def phase(
    scores: dict[int, list[float] | None], *fails: int, pairing: PairingRecipe = ALL_PAIRS
) -> list[Outcome]:
    return run_phase(DRAWS, Canned(*fails), Fixed(scores, []), pairing, seed=0)  # type: ignore[arg-type]


def test_every_prompt_is_counted_in_one_place() -> None:
    outcomes = phase({0: [1, 2, 1], 1: None, 2: [5, 5]})
    tally = Tally()
    tally.add(outcomes)
    assert (tally.prompts, tally.paired, tally.unpaired, tally.judge_failures) == (3, 1, 1, 1)
    assert (tally.pairs, tally.ties) == (2, 2)
    tally.add(phase({1: [1, 0], 2: [0, 1]}, 0))
    assert (tally.prompts, tally.generator_failures, tally.paired) == (6, 1, 3)
    assert outcomes[1].failure == "no" and outcomes[1].completions
    assert [draw.number for draw in DRAWS] == [outcome.draw.number for outcome in outcomes]


def test_a_judge_is_not_asked_about_what_has_no_completions() -> None:
    judge = Fixed({1: [1, 0], 2: [0, 1]}, [])
    outcomes = run_phase(DRAWS, Canned(0), judge, ALL_PAIRS, seed=0)  # type: ignore[arg-type]
    assert judge.asked == [1, 2] and outcomes[0].failure == "down" and not outcomes[0].completions
    nobody = run_phase(DRAWS, Canned(0, 1, 2), judge, ALL_PAIRS, seed=0)  # type: ignore[arg-type]
    assert not any(outcome.completions for outcome in nobody) and phase_metrics(nobody) == {}


def test_averages_are_over_completions_and_over_prompts() -> None:
    metrics = phase_metrics(phase({0: [1, 2, 6], 1: None, 2: [3, 4]}))
    assert metrics["online/scores"] == pytest.approx(16 / 5)
    assert metrics["online/scores_best"] == 5.0 and metrics["online/scores_worst"] == 2.0
    lengths = [len(c.ids) for rollout in ROLLOUTS for c in rollout.completions]
    assert metrics["online/completion_tokens"] == pytest.approx(np.mean(lengths))
    assert metrics["online/eos_rate"] == metrics["online/distinct_rate"] == 1.0


def test_a_held_out_prompt_without_answer_or_scores_counts_as_failed_and_is_in_no_average() -> None:
    judge = Fixed({FIRST_DRAW + 1: None, FIRST_DRAW + 2: [2, 5]}, [])
    prompts = [draw.prompt for draw in DRAWS]
    games = WinRate({"eval": prompts}, Canned(0), judge, seed=0)  # type: ignore[arg-type]
    games.begin()
    ((name, record),) = games.evaluate()
    assert (name, record["prompts"], record["failures"]) == ("eval", 3, 2)
    assert (record["online/win_rate"], record["online/scores"], record["online/score_gain"]) == (1, 5, 3)


def test_pending_pairs_survive_a_checkpoint() -> None:
    made = pairs_of(phase({0: [1, 2, 6], 1: None, 2: [3, 4]}), weights_step=7)
    assert [pair.margin for pair in made] == [1, 5, 4, 1] and made[0].weights_step == 7
    again = load_pending(pending_state(made))
    assert len(again) == 4
    for ours, theirs in zip(made, again, strict=True):
        assert np.array_equal(ours.ids.context, theirs.ids.context)
        for our_side, their_side in zip(ours.ids.completions, theirs.ids.completions, strict=True):
            assert np.array_equal(our_side, their_side)
        assert (ours.margin, ours.weights_step) == (theirs.margin, theirs.weights_step)
        assert ours.prompt_index == theirs.prompt_index
    assert load_pending(pending_state([])) == []


def test_rollouts_on_disk_are_typed_even_where_all_failed_and_parts_can_be_forgotten(tmp_path: Path) -> None:
    log = RolloutLog(directory=tmp_path / "rollouts.parquet")
    log.write(0, 0, phase({}, 0, 1, 2))
    log.write(1, 4, phase({0: [1, 2, 6], 1: None, 2: [3, 3]}))
    table = pq.read_table(log.directory)
    assert table.schema.equals(SCHEMA) and table.num_rows == 6
    rows = table.to_pylist()
    assert [row["failure"] for row in rows] == ["down"] * 3 + [None, "no", None]
    assert rows[3]["chosen_ids"] == ROLLOUTS[0].completions[1].ids.tolist()
    assert rows[5]["chosen_ids"] is None and rows[5]["scores"] == [3, 3]
    log.drop_from(1)
    assert pq.read_table(log.directory).num_rows == 3
    log.write(0, 9, phase({}, 0, 1, 2))
    assert set(pq.read_table(log.directory)["step"].to_pylist()) == {9}


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
