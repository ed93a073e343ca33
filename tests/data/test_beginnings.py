"""Which first tokens pairs have in common: by hand, and what is kept beside a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpo_pack.data import beginnings
from dpo_pack.data.beginnings import find_beginnings, table_of
from dpo_pack.data.store import PairTable, TokenStore, join_pairs, open_store, write_store
from dpo_pack.packing.lengths import AnyIntArray, Group, PairLengths, pair_sizes
from dpo_pack.packing.plan import plan_epoch

SYSTEM = list(range(100, 150))  # 50 tokens


def lengths_of(prompts: list[list[int]]) -> list[int]:
    arrays = [np.array(ids) for ids in prompts]
    found = find_beginnings(lambda pair: arrays[pair], np.array([len(ids) for ids in prompts]))
    contents: dict[int, list[int]] = {}
    for ids, (key, length) in zip(prompts, found.tolist(), strict=True):
        assert contents.setdefault(key, ids[:length]) == ids[:length] and bool(key) == bool(length)
    assert len(set(map(tuple, contents.values()))) == len(contents)
    return list(map(int, found["length"]))


def test_two_pairs_that_begin_alike_have_a_beginning_of_at_least_16_tokens() -> None:
    assert lengths_of([[*SYSTEM, 1, 2], [*SYSTEM, 3], [5] * 60]) == [50, 50, 0]
    assert lengths_of([[*SYSTEM[:16], 1], [*SYSTEM[:16], 2]]) == [16, 16]
    assert lengths_of([[*SYSTEM[:15], 1], [*SYSTEM[:15], 2]]) == [0, 0]
    assert lengths_of([SYSTEM, SYSTEM]) == [50, 50]  # whole prompts
    assert lengths_of([SYSTEM]) == [0]


def test_next_words_that_a_few_pairs_share_do_not_split_a_system_prompt() -> None:
    prompts = [[*SYSTEM, number % 8, 50 + number] for number in range(64)]
    assert set(lengths_of(prompts)) == {50}


def test_long_beginnings_of_some_pairs_are_their_own() -> None:
    agents = [[*SYSTEM[:20], *[1000 + agent] * 300] for agent in range(3)]
    prompts = [[*agents[number % 3], number] for number in range(30)] + [[*SYSTEM[:20], n] for n in range(5)]
    assert lengths_of(prompts) == [320] * 30 + [20] * 5


@pytest.mark.parametrize(("number", "expected"), [(2, 50), (1, 0)])
def test_at_least_one_in_64_pairs_must_have_it(number: int, expected: int) -> None:
    others = [[1000 + pair] * 20 for pair in range(128 - number)]
    assert lengths_of([[*SYSTEM, pair] for pair in range(number)] + others)[:number] == [expected] * number


def test_dialogues_that_grow_turn_by_turn_are_found_soon() -> None:
    talk = list(range(2000))
    found = lengths_of([talk[: 20 + 10 * turn] for turn in range(150)])
    assert min(found) > 0 and all(length <= 20 + 10 * turn for turn, length in enumerate(found))


@pytest.mark.parametrize("pivot_is_last", [False, True])
def test_no_pair_has_a_beginning_of_its_own(pivot_is_last: bool) -> None:
    prompts = [[*SYSTEM[:20], *range(1000, 1480), 5000 + number] for number in range(639)]
    other = [*SYSTEM[:20], *[7] * 600]
    prompts = [*prompts, other] if pivot_is_last else [*prompts[:320], other, *prompts[320:]]
    expected = [0 if prompt is other else 500 for prompt in prompts]
    assert lengths_of(prompts) == expected


def test_prompts_that_leave_the_others_one_after_the_other_are_read_a_few_times() -> None:
    """The longest prompts leave first, so whoever compares with the longest reads all of them each time."""
    chain, reads = list(range(1100)), 0
    prompts = [np.array([*chain[: 16 + n], *[50000 + n] * (2400 - 2 * n)]) for n in range(500)]
    prompts += [np.array([*chain, 70000 + n]) for n in range(1000)]

    def prompt(pair: int) -> AnyIntArray:
        nonlocal reads
        reads += 1
        return prompts[pair]

    found = find_beginnings(prompt, np.array(list(map(len, prompts))))
    assert reads < 20 * len(prompts) and set(found["length"][500:]) == {1100}
    _, counts = np.unique(found["key"][found["key"] != 0], return_counts=True)
    assert counts.min() >= len(prompts) / 64


def test_a_step_of_64_pairs_computes_a_system_prompt_once_and_again_for_each_further_row() -> None:
    random, system = np.random.default_rng(0), list(range(1000, 1500))
    prompts = [[*system, *random.integers(0, 3, 2), *random.integers(100, 900, n + 5)] for n in range(64)]
    arrays, lengths = [np.array(prompt) for prompt in prompts], np.array([len(one) for one in prompts])
    found = find_beginnings(lambda pair: arrays[pair], lengths)
    answers = random.integers(20, 200, (2, 64))
    pairs = PairLengths(
        prompt=lengths,
        chosen=answers[0],
        rejected=answers[1],
        shared=lengths,
        beginning=found["key"],
        common=found["length"],
    )
    plan = plan_epoch(
        pair_sizes(pairs, share_prompt=True), order=np.arange(64), token_budget=2048, pairs_per_step=64
    )
    ((rows,),) = plan
    trie = 500 + int((lengths - 500).sum() + answers.sum())  # beginning, the rests of prompts, answers
    assert sum(plan.sizes.of_row(row).tokens for row in rows) <= trie + 500 * (len(rows) - 1)
    assert len(rows) <= -(-(trie - 500) // (2048 - 500)) + 1


def some_store(seed: int = 0) -> TokenStore:
    random = np.random.default_rng(seed)
    prompts = [[*SYSTEM, *random.integers(200, 300, 5)] for _ in range(6)]
    ids = [[np.array(part, dtype=np.int32) for part in (prompt, [1, 2], [3])] for prompt in prompts]
    pairs = [Group(context=prompt, completions=tuple(answers)) for prompt, *answers in ids]
    return join_pairs(pairs, [1.0] * len(pairs), range(1, len(pairs) + 1))


def written(directory: Path, *batches: TokenStore) -> TokenStore:
    store = write_store(directory, batches, dict)
    assert store is not None
    return store


def test_a_store_keeps_its_beginnings_and_finds_them_where_they_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path / "store", some_store())
    file = tmp_path / "store" / "beginnings.npy"
    table = table_of([store])
    assert table.beginning_lengths.tolist() == [50] * 6 and len(set(table.beginnings.tolist())) == 1
    assert [table.group(pair).beginning for pair in range(6)] == [50] * 6
    assert not PairTable.of([store]).beginnings.any()  # nobody asked
    kept = file.read_bytes()
    for damaged in (b"", kept[:-1], kept.replace(b"<i4", b"<f4"), kept[:-4] + (99).to_bytes(4, "little")):
        file.write_bytes(damaged)
        assert table_of([store]).beginning_lengths.tolist() == [50] * 6
        assert file.read_bytes() == kept
    again = open_store(tmp_path / "store")
    assert again is not None
    with monkeypatch.context() as patch:
        patch.setattr(beginnings, "find_beginnings", None)  # is not called again
        assert table_of([again]).beginnings.tolist() == table.beginnings.tolist()


def test_equal_beginnings_of_two_sources_are_the_same_ones(tmp_path: Path) -> None:
    stores = [written(tmp_path / str(seed), some_store(seed)) for seed in range(2)]
    assert len(set(table_of(stores).beginnings.tolist())) == 1
    whole = TokenStore.of_ranges(stores, {}, directory=tmp_path / "whole")
    assert table_of([whole]).beginnings.tolist() == table_of(stores).beginnings.tolist()


def test_a_beginning_ends_before_the_first_image() -> None:
    table = table_of([some_store()], image_token=SYSTEM[30])
    assert table.beginning_lengths.tolist() == [30] * 6
