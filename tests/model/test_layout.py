"""Row layouts: small ones by hand, random ones against what each sequence says about itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.groups import CPU, group

from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.packing.lengths import Group, common_prefix_length


def lengths(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each segment: its queries, its keys."""
    assert row.segments is not None
    return row.segments.query_lengths, row.segments.key_lengths


def keys(row: Row) -> list[int]:
    """The row position of each gathered key."""
    assert row.segments is not None
    gather = row.segments.kv_gather
    return list(range(row.num_tokens)) if gather is None else gather.index.tolist()


def test_a_shared_pair_is_laid_out_as_shared_then_both_tails() -> None:
    # prompt 1 2, chosen 7 8 9, rejected 7 5: the completions share their first token.
    row = packed_row([group([1, 2], [7, 8, 9], [7, 5])], CPU, share_prompt=True)
    assert row.input_ids[0].tolist() == [1, 2, 7, 8, 9, 5]
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 3]
    assert lengths(row) == ((5, 1), (5, 4))
    assert keys(row) == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert row.logit_index.tolist() == [1, 2, 3, 1, 2]
    assert row.targets.tolist() == [7, 8, 9, 7, 5]
    assert row.completion_lengths.tolist() == [3, 2]


def test_pairs_with_one_beginning_have_it_once() -> None:
    pairs = [group([1, 2, 3], [7, 8, 9], [7, 5], beginning=2), group([1, 2], [6], [4], beginning=2)]
    row = packed_row(pairs, CPU, share_prompt=True, counts_copies=True)
    assert row.input_ids[0].tolist() == [1, 2, 3, 7, 8, 9, 5, 6, 4]
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 2]
    assert lengths(row) == ((6, 1, 1, 1), (6, 5, 3, 3))
    assert keys(row) == [*range(6), 0, 1, 2, 3, 6, 0, 1, 7, 0, 1, 8]
    assert row.logit_index.tolist() == [2, 3, 4, 2, 3, 1, 1]
    assert row.targets.tolist() == [7, 8, 9, 7, 5, 6, 4]
    assert row.token_copies is not None and row.token_copies.tolist() == [4, 4, 2, 2, 1, 1, 1, 1, 1]
    assert row.prompt_tokens == (7, 2)
    assert row.segments is not None
    assert [tuple(node) for node in row.segments.nodes] == [
        *((0, 2, -1), (2, 2, 0), (4, 2, 1), (6, 1, 1), (7, 1, 0), (8, 1, 0))
    ]


@pytest.mark.parametrize(
    "other",
    [
        group([1, 9, 3], [7], [5], beginning=2),
        group([1, 2, 3], [7], [5], beginning=1),
        group([1, 2, 3], [7], [5]),
    ],
    ids=["other tokens", "another length", "no beginning"],
)
def test_only_the_same_beginning_is_shared(other: Group) -> None:
    first = group([1, 2, 4], [7], [5], beginning=2)
    row = packed_row([first, other], CPU, share_prompt=True)
    assert row.num_tokens == sum(
        packed_row([one], CPU, share_prompt=True).num_tokens for one in (first, other)
    )


def test_a_rejected_that_is_a_prefix_of_chosen_has_no_segment_of_its_own() -> None:
    row = packed_row([group([1], [7, 8, 9], [7, 8])], CPU, share_prompt=True)
    assert row.input_ids[0].tolist() == [1, 7, 8, 9]
    assert lengths(row) == ((4,), (4,))
    assert row.logit_index.tolist() == [0, 1, 2, 0, 1]


def test_common_prefix_of_many_sequences_is_what_all_begin_with() -> None:
    sequences = [np.array([1, 2, 3, 4]), np.array([1, 2, 3]), np.array([1, 2, 5, 4])]
    assert common_prefix_length(sequences) == 2
    assert common_prefix_length([np.array([1, 2]), np.array([1, 2])]) == 2
    assert common_prefix_length([np.array([3]), np.array([1])]) == 0


# Few token values, so that prefixes coincide often, also between completions.
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
groups_of_sequences = st.lists(
    st.tuples(tokens, st.lists(tokens, min_size=1, max_size=4)), min_size=1, max_size=4
)


def groups_of(contents: list[tuple[list[int], list[list[int]]]]) -> list[Group]:
    """Groups whose beginnings are half of their contexts."""
    return [group(context, *completions, beginning=len(context) // 2) for context, completions in contents]


def attended(row: Row) -> dict[int, list[int]]:
    """Row position of every query -> row positions it may attend to, by the definition of segments."""
    gathered, (query_lengths, key_lengths) = keys(row), lengths(row)
    seen: dict[int, list[int]] = {}
    query = key = 0
    for num_queries, num_keys in zip(query_lengths, key_lengths, strict=True):
        for offset in range(num_queries):
            last = num_keys - num_queries + offset
            seen[query + offset] = gathered[key : key + last + 1]
        query, key = query + num_queries, key + num_keys
    assert query == row.num_tokens and key == len(gathered)
    return seen


@given(groups_of_sequences, st.booleans())
def test_every_scored_token_sees_exactly_its_own_sequence(
    contents: list[tuple[list[int], list[list[int]]]], share_prompt: bool
) -> None:
    row = packed_row(groups_of(contents), CPU, share_prompt=share_prompt, counts_copies=True)
    seen = attended(row)
    scored = iter(zip(row.logit_index.tolist(), row.targets.tolist(), strict=True))
    for context, completions in contents:
        for completion in completions:
            for number, token in enumerate(completion):
                position, target = next(scored)
                assert target == token
                history = [*context, *completion[:number]]
                assert row.input_ids[0, seen[position]].tolist() == history
                assert row.position_ids[0, seen[position]].tolist() == list(range(len(history)))
    assert next(scored, None) is None
    assert row.token_copies is not None
    assert row.token_copies.sum() == sum(len(context) + len(one) for context, cs in contents for one in cs)
    assert sum(row.prompt_tokens) == row.num_tokens


@given(groups_of_sequences)
def test_sharing_computes_each_prefix_once(contents: list[tuple[list[int], list[list[int]]]]) -> None:
    groups = groups_of(contents)
    shared, unshared = (packed_row(groups, CPU, share_prompt=share) for share in (True, False))
    assert unshared.num_tokens == sum(len(g.context) + len(c) for g in groups for c in g.completions)
    saved = sum(
        (len(g.completions) - 1)
        * common_prefix_length([np.concatenate((g.context, c)) for c in g.completions])
        for g in groups
    )
    for before, after in pairwise(groups):
        length = after.beginning
        is_same = before.beginning == length and (before.context[:length] == after.context[:length]).all()
        saved += length if is_same else 0
    assert shared.num_tokens == unshared.num_tokens - saved


@given(groups_of_sequences)
def test_a_gather_s_gradient_is_index_select_s(contents: list[tuple[list[int], list[list[int]]]]) -> None:
    row = packed_row(groups_of(contents), CPU, share_prompt=True)
    segments = row.segments
    assert segments is not None
    states = torch.randn(row.num_tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    gathered = states if segments.kv_gather is None else segments.kv_gather(states)
    index = torch.tensor(keys(row))
    expected = states.index_select(0, index)
    assert torch.equal(gathered, expected)
    weights = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(gathered, states, weights)
    (theirs,) = torch.autograd.grad(expected, states, weights)
    torch.testing.assert_close(ours, theirs)


@given(groups_of_sequences)
def test_a_padded_batch_has_a_line_each_sequence(contents: list[tuple[list[int], list[list[int]]]]) -> None:
    groups = [group(context, *completions) for context, completions in contents]
    row = padded_row(groups, device=CPU)
    assert row.attention_mask is not None
    sequences = [[*context, *completion] for context, completions in contents for completion in completions]
    for line, mask, sequence in zip(row.input_ids, row.attention_mask, sequences, strict=True):
        assert line[mask.bool()].tolist() == sequence and mask.sum() == len(sequence)
        assert (line[len(sequence) :] == 0).all()
    flat = row.input_ids.flatten()
    # Right after the position that predicts it stands the target.
    assert torch.equal(flat[row.logit_index + 1], row.targets)
    assert row.num_tokens == sum(map(len, sequences))
