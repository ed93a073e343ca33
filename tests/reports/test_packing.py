"""The packing report: numbers computed by hand, and what a person reads in the terminal."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.inspected_lengths import LENGTHS, inspect, ints

from dpo_pack.packing.lengths import AttentionKind, ModelShape, PairLengths
from dpo_pack.reports.packing import render_packing, tables


def rendered(report: dict[str, Any]) -> str:
    output = io.StringIO()
    render_packing(report, Console(file=output, width=80))
    return output.getvalue()


def random_lengths(num_pairs: int) -> PairLengths:
    random = np.random.default_rng(0)
    prompt, chosen, rejected = (random.integers(1, 40, num_pairs) for _ in range(3))
    return PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)


# ---- Rows, and what is saved against padding


def test_rows_and_tokens_of_a_shared_epoch_are_those_counted_by_hand() -> None:
    # Tokens in a row: 16, 28, 11, 60. Step 1: 28 + 16, then 11. Step 2: 60, above the budget.
    ours = inspect()["statistics"]
    expected = {
        "num_pairs": 4,
        "num_steps": 2,
        "num_rows": 3,
        "max_row_tokens": 60,
        "budget_fill": pytest.approx((44 / 50 + 11 / 50 + 1) / 3),
        "computed_tokens": 16 + 28 + 11 + 60,
        "unshared_tokens": 26 + 50 + 16 + 90,
        "saved_by_sharing_tokens": 10 + 22 + 5 + 30,
    }
    assert {key: ours[key] for key in expected} == expected


def test_padded_microbatches_are_padded_to_the_longest_of_their_sequences() -> None:
    padded = {one["microbatch_pairs"]: one for one in inspect()["statistics"]["padded"]}
    assert padded[1]["tokens"] == 2 * (14 + 25 + 9 + 50)
    assert padded[2]["tokens"] == 4 * 25 + 4 * 50
    assert padded[4]["tokens"] == padded[16]["tokens"] == 8 * 50  # the last micro-batch has what is left
    assert padded[4]["times_computed_tokens"] == pytest.approx(400 / 115)


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=1, max_size=30),
    is_packed=st.booleans(),
    share_prompt=st.booleans(),
)
def test_what_is_saved_and_what_is_computed_add_up_to_padded_training(
    pairs: list[tuple[int, int, int]], is_packed: bool, share_prompt: bool
) -> None:
    prompt, chosen, rejected = (ints([pair[i] for pair in pairs]) for i in range(3))
    lengths = PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)
    ours = inspect(lengths, is_packed=is_packed, share_prompt=share_prompt)["statistics"]
    for padded in ours["padded"]:
        saved = ours["saved_by_sharing_tokens"] + padded["saved_by_packing_tokens"]
        assert padded["tokens"] == ours["computed_tokens"] + saved
    if is_packed:
        assert all(padded["saved_by_packing_tokens"] >= 0 for padded in ours["padded"])
        assert (ours["saved_by_sharing_tokens"] > 0) is share_prompt


def test_of_a_long_epoch_some_steps_are_packed_with_close_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = random_lengths(1500)  # 500 steps
    whole = inspect(lengths, token_budget=200)["statistics"]
    monkeypatch.setattr("dpo_pack.reports.packing.MAX_STEPS", 100)
    report = inspect(lengths, token_budget=200)
    ours = report["statistics"]
    assert whole["steps_measured"] == whole["num_steps"] == ours["num_steps"] > ours["steps_measured"] == 100
    for name in ("num_rows", "computed_tokens", "saved_by_sharing_tokens", "flops", "budget_fill"):
        assert ours[name] == pytest.approx(whole[name], rel=0.1), name
    assert "measured on 100 steps" in " ".join(rendered(report).split())


def test_flops_of_ours_and_of_padded_training_are_those_counted_by_hand() -> None:
    shape = ModelShape(
        token_weights=10.0, head_weights=4, attention=(AttentionKind(num_layers=1, width=2, window=None),)
    )
    one = PairLengths(prompt=ints([3]), chosen=ints([2]), rejected=ints([1]), shared=ints([3]))
    ours = inspect(one, shape=shape)["statistics"]
    assert ours["flops"] == 3 * (2 * 10 * 6 + 2 * 4 * 3 + 2 * 2 * (15 + 10 - 6))
    # Padded: two sequences of 5, each position through the head.
    padded = 3 * 2 * (2 * 10 * 5 + 2 * 4 * 5 + 2 * 2 * 15)
    assert ours["padded"][0]["times_flops"] == pytest.approx(padded / ours["flops"])
    # A padded batch has an image for each of the two sequences.
    seen = replace(one, tower=np.array([1000.0]))
    modes: list[dict[str, Any]] = [{}, {"is_packed": False}]
    shared, apart = (inspect(seen, shape=shape, **mode)["statistics"] for mode in modes)
    assert shared["flops"] == ours["flops"] + 1000
    assert shared["padded"][0]["times_flops"] == pytest.approx((padded + 2000) / (ours["flops"] + 1000))
    assert apart["flops"] == inspect(one, shape=shape, is_packed=False)["statistics"]["flops"] + 2000


def test_oversize_pairs_are_named_by_place_with_the_budget_that_would_hold_them() -> None:
    lengths = LENGTHS.select(np.tile(np.arange(4), 3))
    report = inspect(lengths, token_budget=5, order=np.tile(np.arange(12), 2), describe_pair="row {}".format)
    assert report["statistics"]["oversize_pairs"] == {  # each once, however often it is trained
        f"row {pair}": (16, 28, 11, 60)[pair % 4] for pair in range(12)
    }
    sentence = " ".join(rendered(report).split())
    assert "row 3: 60 tokens" in sentence and "at least 60 if" in sentence and "and 7 more" in sentence


# ---- Balance of ranks


def test_balance_of_two_ranks_is_that_counted_by_hand() -> None:
    # Step 1: 28 | 16 + 11, mean 27.5. Step 2: 60 | nothing, mean 30, and not full.
    assert inspect(ranks=(2,))["balance"] == [
        {
            "num_ranks": 2,
            "steps_measured": 2,
            "rows_per_step": 1.5,
            "max_rows_per_rank": 1,
            "mean_rows_of_fullest_rank": 1.0,
            "slowest_over_mean": pytest.approx((28 + 60) / (27.5 + 30)),
            "worst_full_step_slowest_over_mean": pytest.approx(28 / 27.5),
            "steps_with_idle_ranks": 1,
        }
    ]


# ---- Budgets


def test_the_best_budget_is_the_smallest_that_is_about_as_fast() -> None:
    tokens = np.full(640, 100)  # each pair has 300 tokens in a row
    lengths = PairLengths(prompt=tokens, chosen=tokens, rejected=tokens, shared=tokens)
    budgets = (1024, 4096, 19200, 38400)
    report = inspect(lengths, token_budget=8192, pairs_per_step=64, budgets=budgets, ranks=(1, 2))
    # 64 pairs of 300 tokens are 19,200: a larger budget makes no fewer rows.
    assert [(one["token_budget"], one["rows_per_step"]) for one in report["sweep"]] == [
        (1024, 22), (4096, 5), (8192, 3), (19200, 1), (38400, 1)
    ]  # fmt: skip
    assert [one["max_row_tokens"] for one in report["sweep"]][-2:] == [19200, 19200]
    cells = tables(report)["token budgets"]
    assert cells.picked == 3 and [row[-1] for row in cells.rows] == ["", "", "", "best", ""]


def test_a_budget_that_holds_every_pair_is_preferred() -> None:
    def best(**changes: Any) -> list[int]:
        report = inspect(pairs_per_step=4, **changes)
        return [outcome["token_budget"] for outcome in report["sweep"] if outcome["is_best"]]

    assert best(budgets=(20, 30, 64)) == [64]
    assert best(token_budget=60, budgets=(59,)) == [60]  # one pair has 60 tokens
    tight = inspect(token_budget=30, budgets=(20,), pairs_per_step=4)["sweep"]
    assert [outcome["num_oversize_pairs"] for outcome in tight] == [2, 1]
    # Rows of 16, 28, 11 and 60 tokens: what is above the budget of 20 fills one row, not more.
    assert tight[0]["budget_fill"] == pytest.approx((16 / 20 + 1 + 11 / 20 + 1) / 4)


# ---- What is written
