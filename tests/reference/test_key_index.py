"""Finding 16-byte keys among many."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from dpo_pack.reference.key_index import KeyIndex, Keys


def as_keys(keys: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)


# Few distinct bytes, so that keys often begin alike or are equal.
KEYS = st.lists(
    st.tuples(
        st.sampled_from([b"\x00" * 7, b"\xff" * 7]), st.binary(min_size=1, max_size=1), st.integers(0, 3)
    ).map(lambda key: key[0] + key[1] + bytes([key[2]]) * 8),
    max_size=30,
)


@given(KEYS, KEYS)
@example([], [b"\x00" * 16])
def test_every_key_is_found_where_it_is_and_no_other(keys: list[bytes], others: list[bytes]) -> None:
    index = KeyIndex.of(as_keys(keys))
    distinct = sorted(set(keys))
    assert len(index) == len(distinct)
    assert index.first.tolist() == [keys.index(key) for key in distinct]
    assert [distinct[place] for place in index.inverse] == keys
    wanted = keys + others
    expected = [distinct.index(key) if key in distinct else -1 for key in wanted]
    assert index.find(as_keys(wanted)).tolist() == expected
