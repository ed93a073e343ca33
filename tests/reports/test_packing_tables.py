"""The packing report: numbers computed by hand, and what a person reads in the terminal."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.inspected_lengths import LENGTHS, inspect, ints
from support.plans import make_plan

from dpo_pack.packing.bin_packing import PADDED, ROW_OVERHEAD_TOKENS
from dpo_pack.packing.epoch_order import epoch_order
from dpo_pack.packing.flops import AttentionKind, ModelShape
from dpo_pack.packing.lengths import PairLengths
from dpo_pack.packing.report import PackingReport, to_json
from dpo_pack.packing.statistics import MAX_BALANCE_STEPS, length_summary, rank_balance
from dpo_pack.reports.packing_tables import draw_bars, format_flops, render_packing
from dpo_pack.reports.pages import packing_page
from dpo_pack.reports.tables import parse_numbers
from dpo_pack.system.errors import DataError, RecipeError


def rendered(report: PackingReport, *, width: int = 80, encoding: str = "utf-8") -> str:
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    render_packing(report, Console(file=output, width=width))
    output.seek(0)
    return output.read()


def test_rows_and_tokens_of_a_shared_epoch_are_those_counted_by_hand() -> None:
    # Tokens in a row: 16, 28, 11, 60. Step 1: 28 + 16, then 11. Step 2: 60, above the budget.
    ours = inspect().statistics
    assert (ours.num_pairs, ours.num_steps, ours.num_rows) == (4, 2, 3)
    assert (ours.rows_per_step.mean, ours.rows_per_step.min, ours.rows_per_step.max) == (1.5, 1, 2)
    assert (ours.tokens_per_step.mean, ours.tokens_per_step.min, ours.tokens_per_step.max) == (57.5, 55, 60)
    assert ours.max_row_tokens == 60
    assert ours.budget_fill == pytest.approx((44 / 50 + 11 / 50 + 1) / 3)
    assert ours.computed_tokens == 16 + 28 + 11 + 60
    assert ours.unshared_tokens == 26 + 50 + 16 + 90
    assert ours.saved_by_sharing_tokens == 10 + 22 + 5 + 30


def test_padded_microbatches_are_padded_to_the_longest_of_their_sequences() -> None:
    padded = {comparison.microbatch_pairs: comparison for comparison in inspect().statistics.padded}
    assert padded[1].tokens == 2 * (14 + 25 + 9 + 50)
    assert padded[2].tokens == 4 * 25 + 4 * 50
    assert padded[4].tokens == padded[16].tokens == 8 * 50  # the last micro-batch has the pairs that are left
    assert padded[4].times_computed_tokens == pytest.approx(400 / 115)


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=1, max_size=30),
    algorithm=st.sampled_from(["best_fit_decreasing", "next_fit", PADDED]),
    share_prompt=st.booleans(),
)
def test_what_is_saved_and_what_is_computed_add_up_to_padded_training(
    pairs: list[tuple[int, int, int]], algorithm: str, share_prompt: bool
) -> None:
    prompt, chosen, rejected = (ints([pair[i] for pair in pairs]) for i in range(3))
    lengths = PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)
    ours = inspect(lengths, algorithm=algorithm, share_prompt=share_prompt).statistics
    for padded in ours.padded:
        assert padded.tokens == (
            ours.computed_tokens + ours.saved_by_sharing_tokens + padded.saved_by_packing_tokens
        )
    if algorithm != PADDED:
        assert all(padded.saved_by_packing_tokens >= 0 for padded in ours.padded)
        assert (ours.saved_by_sharing_tokens > 0) is share_prompt


def test_a_padded_plan_shares_nothing_whatever_the_recipe_says() -> None:
    report = inspect(algorithm=PADDED, share_prompt=True, token_budget=100)
    assert not report.share_prompt
    assert report.statistics.saved_by_sharing_tokens == 0
    assert report.statistics.computed_tokens >= report.statistics.unshared_tokens
    assert "prompts not shared" in rendered(report)


def test_copies_of_a_pair_count_as_often_as_they_are_trained() -> None:
    ours = inspect(order=ints([0, 0, 2]))
    assert ours.statistics.computed_tokens == 16 + 16 + 11
    assert ours.lengths[0].mean == pytest.approx(25 / 3)


def test_oversize_pairs_are_named_by_place_with_the_budget_that_would_hold_them() -> None:
    report = inspect(describe_pair=lambda pair: f"pairs.jsonl row {pair + 1}")
    assert [(pair.pair, pair.tokens, pair.place) for pair in report.statistics.oversize_pairs] == [
        (3, 60, "pairs.jsonl row 4")
    ]
    sentence = " ".join(rendered(report).split())
    assert "1 pair exceeds packing.token_budget (50)" in sentence
    assert "pairs.jsonl row 4: 60 tokens." in sentence
    assert "Raise packing.token_budget to at least 60" in sentence


def test_of_many_oversize_pairs_the_terminal_names_five_and_counts_the_rest() -> None:
    report = inspect(order=np.tile(np.arange(4), 3), token_budget=5)
    assert len(report.statistics.oversize_pairs) == 4  # each once, however often it is trained
    many = PairLengths(
        prompt=np.tile(LENGTHS.prompt, 3),
        chosen=np.tile(LENGTHS.chosen, 3),
        rejected=np.tile(LENGTHS.rejected, 3),
        shared=np.tile(LENGTHS.shared, 3),
    )
    sentence = " ".join(rendered(inspect(many, token_budget=5)).split())
    assert "12 pairs exceed" in sentence and "pair 4: 16 tokens; and 7 more." in sentence


def test_balance_of_two_ranks_is_that_counted_by_hand() -> None:
    # Step 1: 28 | 16 + 11, mean 27.5. Step 2: 60 | nothing, mean 30, and not full.
    (balance,) = inspect(ranks=(2,)).balance
    assert (balance.num_ranks, balance.steps_measured, balance.max_rows_per_rank) == (2, 2, 1)
    assert balance.slowest_over_mean == pytest.approx((28 + 60) / (27.5 + 30))
    assert balance.worst_full_step_slowest_over_mean == pytest.approx(28 / 27.5)
    assert balance.steps_with_idle_ranks == 1
    assert (balance.rows_per_step.min, balance.rows_per_step.max) == (1, 2)


def test_without_a_full_step_the_worst_step_is_any() -> None:
    (balance,) = inspect(ranks=(4,), pairs_per_step=64).balance
    assert balance.worst_full_step_slowest_over_mean == balance.slowest_over_mean > 1


def test_balance_of_a_long_epoch_is_measured_on_steps_spread_from_first_to_last() -> None:
    num_pairs = 4 * MAX_BALANCE_STEPS + 1
    plan = make_plan(
        np.full(num_pairs, 10),
        order=np.arange(num_pairs),
        token_budget=100,
        pairs_per_step=2,
        algorithm="best_fit_decreasing",
        num_ranks=2,
    )
    balance = rank_balance(plan)
    assert balance.steps_measured == MAX_BALANCE_STEPS
    assert balance.steps_with_idle_ranks == 1  # the last step, of one pair, is among them


def test_percentiles_are_lengths_that_occur_and_the_last_bin_holds_the_tail() -> None:
    summary = length_summary("prompt", ints([*range(1, 201), 10_000]))
    assert (summary.median, summary.p90, summary.p99, summary.max) == (101, 181, 199, 10_000)
    assert summary.mean == pytest.approx((200 * 201 / 2 + 10_000) / 201)
    assert sum(summary.histogram_counts) == 201
    assert summary.histogram_edges[0] == 0 and summary.histogram_edges[-1] == 199
    assert len(summary.histogram_edges) == len(summary.histogram_counts) + 1
    assert summary.histogram_counts[-1] == 11  # 190.7 to 199: 9, then 200 and 10,000


def test_lengths_that_are_all_equal_have_a_histogram() -> None:
    assert sum(length_summary("chosen", ints([7, 7, 7])).histogram_counts) == 3


def test_bars_are_as_high_as_their_counts_and_only_empty_bins_are_blank() -> None:
    assert draw_bars([0, 1, 4, 8, 1000], bars="12345678") == " 1118"
    assert draw_bars([1, 2, 3, 4, 5, 6, 7, 8], bars="12345678") == "12345678"


def test_the_terminal_shows_every_table_in_80_columns() -> None:
    text = rendered(
        inspect(ranks=(1, 8), budgets=(100,), removed_pairs={"empty_completion": 4, "too_long": 1200})
    )
    assert max(map(len, text.splitlines())) <= 80
    for shown in (
        "4 pairs in 2 steps of 3 (the last of 1)",
        "prompts shared",
        "rejected",
        "rows a step",
        "16 pairs",
        "3.48x",  # 400 / 115
        "ranks",
        "worst",
        "budget",
        "empty_completion",
        "1,200",
    ):
        assert shown in text
    assert "…" not in text  # nothing is cut
    rows = [line.split() for line in text.splitlines()]
    assert ["tokens", "a", "row", "38.3", "60"] in rows  # 115 / 3
    assert ["fill", "of", "the", "budget", "70.0%"] in rows


def test_a_console_without_unicode_gets_plain_ascii() -> None:
    assert rendered(inspect(), encoding="ascii").isascii()
    assert "█" in rendered(inspect())


def test_the_json_has_every_number_of_the_report_and_parses_back() -> None:
    content = json.loads(to_json(inspect(ranks=(1, 2), removed_pairs={"empty_completion": 4})))
    assert content["statistics"]["computed_tokens"] == 115
    assert content["statistics"]["padded"][1] == {
        "microbatch_pairs": 2,
        "tokens": 300,
        "saved_by_packing_tokens": 300 - 182,
        "times_computed_tokens": 300 / 115,
        "flops": 6 * 300,
        "times_flops": 300 / 115,
    }
    assert [balance["num_ranks"] for balance in content["balance"]] == [1, 2]
    assert [summary["name"] for summary in content["lengths"]] == ["prompt", "chosen", "rejected", "pair"]
    assert content["removed_pairs"] == {"empty_completion": 4}
    assert content["algorithm"] == "best_fit_decreasing" and len(content["plan_fingerprint"]) == 32


def test_the_fingerprint_is_that_of_the_plan_that_is_trained() -> None:
    order = epoch_order(4, shuffle=True, seed=0, epoch=0)
    plan = make_plan(
        LENGTHS.row_tokens(share_prompt=True),
        order=order,
        token_budget=50,
        pairs_per_step=3,
        algorithm="best_fit_decreasing",
        num_ranks=8,
    )
    assert inspect(order=order).plan_fingerprint == plan.fingerprint


def test_without_pairs_the_error_says_where_they_went() -> None:
    nothing = LENGTHS.select(ints([]))
    with pytest.raises(DataError, match=r"no pair is left to pack \(too_long: 12\)"):
        inspect(nothing, removed_pairs={"too_long": 12})
    with pytest.raises(DataError, match="none was read"):
        inspect(nothing)
    with pytest.raises(DataError, match=r"weights an epoch has no pair; raise data\.train\.\*\.weight"):
        inspect(order=ints([]))


def test_numbers_of_an_option_are_read_from_a_list() -> None:
    assert parse_numbers("8", option="--ranks", instance="1,8,64") == (8,)
    assert parse_numbers("1, 8,64", option="--ranks", instance="1,8,64") == (1, 8, 64)


@pytest.mark.parametrize("text", ["", "0", "1,,8", "1,-2", "two", "1.5"])
def test_numbers_that_are_not_positive_and_whole_are_refused_with_an_instance(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--ranks .*--ranks 1,8,64"):
        parse_numbers(text, option="--ranks", instance="1,8,64")


# ---- FLOPs, budgets, drawings


def test_flops_of_ours_and_of_padded_training_are_those_counted_by_hand() -> None:
    shape = ModelShape(
        token_weights=10.0,
        head_weights=4,
        attention=(AttentionKind(num_layers=1, width=2, window=None),),
    )
    one = PairLengths(prompt=ints([3]), chosen=ints([2]), rejected=ints([1]), shared=ints([3]))
    ours = inspect(one, shape=shape).statistics
    tokens, head, area = 2 * 10 * 6, 2 * 4 * 3, 2 * 2 * (15 + 10 - 6)
    assert ours.flops.total == ours.flops.per_pair == 3 * (tokens + head + area)
    parts = (ours.flops.token_part, ours.flops.head_part, ours.flops.attention_part)
    assert sum(parts) == pytest.approx(1) and parts[1] == pytest.approx(head / (tokens + head + area))
    assert ours.head_tokens == 3
    padded = ours.padded[0]  # two sequences of 5, each position through the head
    assert padded.flops == 3 * 2 * (2 * 10 * 5 + 2 * 4 * 5 + 2 * 2 * 15)
    assert padded.times_flops == pytest.approx(padded.flops / ours.flops.total)


def test_a_padded_plan_pays_for_its_padding_in_flops_but_not_in_the_head() -> None:
    shape = ModelShape(token_weights=10.0, head_weights=4, attention=())
    ours = inspect(shape=shape, algorithm=PADDED, token_budget=100, pairs_per_step=4).statistics
    assert ours.flops.total == 3 * (
        2 * 10 * ours.computed_tokens + 2 * 4 * int((LENGTHS.completion_tokens()).sum())
    )


def test_the_smallest_budget_that_is_about_as_fast_is_recommended_with_reasons() -> None:
    tokens = np.full(640, 100)
    lengths = PairLengths(prompt=tokens, chosen=tokens, rejected=tokens, shared=tokens)
    report = inspect(
        lengths, token_budget=8192, pairs_per_step=64, budgets=(1024, 4096, 19200, 38400), ranks=(1, 2)
    )
    assert [outcome.token_budget for outcome in report.sweep] == [1024, 4096, 8192, 19200, 38400]
    # 64 pairs of 300 tokens are 19,200: a larger budget makes no fewer rows.
    assert [outcome.rows_per_step for outcome in report.sweep] == [22, 5, 3, 1, 1]
    assert [outcome.max_row_tokens for outcome in report.sweep][-2:] == [19200, 19200]
    assert report.recommendation is not None
    assert report.recommendation.token_budget == 19200
    reasons = "; ".join(report.recommendation.reasons)
    assert "1.0 rows" in reasons and "8,192 would take" in reasons
    assert "38,400 would save 0.0%" in reasons and "every pair fits" in reasons
    assert "Recommended: packing.token_budget=19200, because a step has" in " ".join(rendered(report).split())


def test_budgets_that_make_the_same_rows_are_said_to_be_the_same() -> None:
    report = inspect(token_budget=4096, pairs_per_step=4, budgets=(8192,))
    assert report.recommendation is not None
    reasons = "; ".join(report.recommendation.reasons)
    assert "any of these budgets is the same here" in reasons and "would save" not in reasons


def test_a_budget_that_holds_every_pair_is_preferred_and_oversize_pairs_are_a_reason() -> None:
    report = inspect(budgets=(20, 30, 64), pairs_per_step=4)
    assert report.recommendation is not None and report.recommendation.token_budget == 64
    tight = inspect(budgets=(20, 30), pairs_per_step=4)
    assert tight.recommendation is not None
    assert "1 pair exceeds it" in "; ".join(tight.recommendation.reasons)
    # Rows of 16, 28, 11 and 60 tokens: what is above the budget of 20 fills one row, not more.
    assert tight.sweep[0].budget_fill == pytest.approx((16 / 20 + 1 + 11 / 20 + 1) / 4)


def test_without_budgets_nothing_is_recommended() -> None:
    report = inspect()
    assert report.sweep == () and report.recommendation is None
    assert "Recommended" not in rendered(report)


def test_drawn_rows_show_every_token_of_the_first_step_as_it_lies() -> None:
    row, other = inspect().drawn_rows
    assert [(segment.kind, segment.tokens) for segment in row.segments] == [
        ("prompt", 22), ("chosen", 3), ("rejected", 3), ("prompt", 10), ("chosen", 4), ("rejected", 2),
    ]  # fmt: skip
    assert (row.num_pairs, row.tokens, other.tokens) == (2, 44, 11)
    unshared = inspect(share_prompt=False).drawn_rows[0]
    assert [segment.kind for segment in unshared.segments] == ["prompt", "chosen", "prompt", "rejected"]
    padded = inspect(algorithm=PADDED, token_budget=100).drawn_rows
    assert all(
        sum(s.tokens for s in drawn.segments) == drawn.tokens for drawn in (row, other, unshared, *padded)
    )
    assert "padding" in {segment.kind for drawn in padded for segment in drawn.segments}


def test_scope_epoch_says_rows_a_step_and_how_many_pairs_that_is() -> None:
    report = inspect(rows_per_step=2, window_pairs=10, budgets=(100,))
    assert report.pairs_per_step is None and report.rows_per_step == 2
    assert "steps of 2 rows, 2.0 pairs on average" in rendered(report)
    assert report.statistics.pairs_per_step.mean == 2.0


def test_in_scope_epoch_padded_training_has_the_order_of_the_epoch_not_that_of_the_rows() -> None:
    random = np.random.default_rng(0)
    prompt, chosen, rejected = (random.integers(1, 40, 30) for _ in range(3))
    lengths = PairLengths(prompt=prompt, chosen=chosen, rejected=rejected, shared=prompt)
    in_steps = inspect(lengths, token_budget=200).statistics
    in_epoch = inspect(lengths, token_budget=200, rows_per_step=1, window_pairs=30).statistics
    assert [each.tokens for each in in_epoch.padded] == [each.tokens for each in in_steps.padded]


def test_in_scope_epoch_budgets_are_compared_by_the_time_of_a_pair_and_come_with_their_rows() -> None:
    tokens = np.full(960, 100)
    lengths = PairLengths(prompt=tokens, chosen=tokens, rejected=tokens, shared=tokens)
    # Rows of 2, 3 and 4 pairs. A step has whole rows, so that of the second budget has 3 pairs instead of 4.
    report = inspect(
        lengths, token_budget=600, rows_per_step=2, window_pairs=960, budgets=(900, 1200), ranks=(1,)
    )
    assert [outcome.full_step_rows for outcome in report.sweep] == [2, 1, 1]
    times = [(300 * pairs + ROW_OVERHEAD_TOKENS) / pairs for pairs in (2, 3, 4)]
    assert [outcome.relative_time for outcome in report.sweep] == pytest.approx(
        [time / times[-1] for time in times]
    )
    assert report.recommendation is not None and report.recommendation.rows_per_step == 1
    text, page = " ".join(rendered(report).split()), packing_page(report)
    for said in (text, page):
        assert "packing.token_budget=1200 packing.rows_per_step=1" in said
        assert "makes other steps" in said and "never what is trained on" not in said


def test_what_was_truncated_is_shown_beside_what_was_dropped() -> None:
    text = rendered(inspect(removed_pairs={"too_long": 3}, truncated={"eos_lost": 5}))
    assert "too_long" in text and "eos_lost" in text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(2.94e8, "294 MFLOPs"), (1e9, "1 GFLOPs"), (1.234e13, "12.3 TFLOPs"), (5e16, "50 PFLOPs")],
)
def test_flops_have_a_prefix(flops: float, text: str) -> None:
    assert format_flops(flops) == text
