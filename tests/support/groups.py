"""Groups of made-up token ids, and rows of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from dpo_pack.model.attention.segments import RowSegments
from dpo_pack.model.layout import Row, packed_row, padded_row
from dpo_pack.packing.lengths import Group
from support.tiny_models import VOCABULARY

CPU = torch.device("cpu")


def group(context: Sequence[int], *completions: Sequence[int], beginning: int = 0) -> Group:
    answers = tuple(np.array(ids) for ids in completions)
    return Group(context=np.array(context), completions=answers, beginning=beginning)


def random_groups(*lengths: Iterable[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[Group]:
    """A group for each (tokens of the prompt, tokens of a completion, ...); none is a special token."""
    random = np.random.default_rng(seed)
    contents = [[random.integers(3, vocabulary, length) for length in of_group] for of_group in lengths]
    return [Group(context=context, completions=tuple(ids)) for context, *ids in contents]


def make_row(groups: Sequence[Group], mode: str = "shared", device: torch.device = CPU) -> Row:
    """`mode`: shared, unshared or padded."""
    if mode == "padded":
        return padded_row(groups, device=device)
    return packed_row(groups, device, share_prompt=mode == "shared")


def segments_of(groups: Sequence[Group], mode: str = "shared", device: torch.device = CPU) -> RowSegments:
    segments = make_row(groups, mode, device).segments
    assert segments is not None
    return segments
