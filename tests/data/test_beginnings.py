"""Which first tokens pairs have in common: by hand, and what is kept beside a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpo_pack.data import beginnings
from dpo_pack.data.beginnings import find_beginnings, table_of
from dpo_pack.data.store import PairTable, TokenStore, join_pairs, open_store, write_store
from dpo_pack.packing.lengths import Group

SYSTEM = list(range(100, 150))  # 50 tokens


def lengths_of(prompts: list[list[int]]) -> list[int]:
    arrays = [np.array(ids) for ids in prompts]
    found = find_beginnings(lambda pair: arrays[pair], np.array([len(ids) for ids in prompts]))
    contents: dict[int, list[int]] = {}
    for ids, (key, length) in zip(prompts, found.tolist(), strict=True):
        assert contents.setdefault(key, ids[:length]) == ids[:length] and bool(key) == bool(length)
    assert len(set(map(tuple, contents.values()))) == len(contents)
    return found["length"].tolist()


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
