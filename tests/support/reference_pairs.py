"""Tables of made-up pairs, and the reference pass over them with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dpo_pack.data.store import PairTable, join_pairs
from dpo_pack.model.facts import model_shape
from dpo_pack.model.layout import Row
from dpo_pack.model.scorer import CompletionLogps, RowLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.reference.cache import ReferenceCache
from dpo_pack.reference.compute import PassSettings, ReferenceWork, compute_missing, find_work, plan_pass
from support.loading import load_usual
from support.tiny_models import VOCABULARY

CPU = torch.device("cpu")
NAMESPACE = {"weights": "abc", "parameters": "float32"}
SETTINGS = PassSettings(token_budget=64, share_prompt=True, device=CPU)
Ids = Sequence[int]
Pair = tuple[Ids, Ids, Ids]  # prompt, chosen, rejected
Keys = npt.NDArray[np.uint8]


def make_table(pairs: Sequence[Pair]) -> PairTable:
    """A table of pairs given as token ids; row numbers count from 1."""
    ids = [
        Group(context=_ids(prompt), completions=(_ids(chosen), _ids(rejected)))
        for prompt, chosen, rejected in pairs
    ]
    return PairTable.of([join_pairs(ids, [1.0] * len(ids), range(1, len(ids) + 1))])


def _ids(ids: Ids) -> npt.NDArray[np.int32]:
    return np.asarray(ids, dtype=np.int32)


def random_pairs(num_pairs: int, *, seed: int = 0) -> list[Pair]:
    random = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        drawn: list[int] = random.integers(3, VOCABULARY, random.integers(1, most + 1)).tolist()
        return drawn

    return [(ids(20), ids(9), ids(9)) for _ in range(num_pairs)]


def random_keys(count: int, *, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def load_scorer(path: Path, **changes: Any) -> CompletionLogps:
    """The model at `path` on the CPU in fp32; `changes` of the arguments of `load_usual`."""
    return load_usual(path, **changes).scorer


def run_pass(
    cache: ReferenceCache,
    tables: Sequence[PairTable],
    scorer: CompletionLogps,
    settings: PassSettings = SETTINGS,
    *,
    progress: Callable[[int], None] = lambda num_sequences: None,
) -> int:
    """Compute what the cache lacks; returns the token budget that fitted.

    `progress` gets the number of sequences of each finished row.
    """
    work = find_work(cache, tables)
    return compute_missing(
        cache,
        plan_pass(work, model_shape(scorer.model), settings, is_packed=scorer.backend is not None),
        scorer,
        settings,
        progress=lambda groups: progress(int(work.missing[groups].sum())),
    )


def num_cached(work: ReferenceWork) -> int:
    return int(work.sides.sum() - work.missing.sum())


def all_sums(cache: ReferenceCache, tables: Sequence[PairTable]) -> npt.NDArray[np.float64]:
    """Sums of all chosen, then all rejected sequences of each table in turn."""
    keys = [side for table in tables for side in (table.chosen_keys, table.rejected_keys)]
    return cache.lookup(np.concatenate(keys))


class SmallMemory(CompletionLogps):
    """Fails as an accelerator does on rows above so many tokens, and at chosen calls."""

    def __init__(self, scorer: CompletionLogps, *, most_tokens: int, fails_at: tuple[int, ...] = ()) -> None:
        nn.Module.__init__(self)
        self.scorer, self.model, self.backend = scorer, scorer.model, scorer.backend
        self.most_tokens, self.fails_at = most_tokens, fails_at
        self.rows: list[int] = []

    def forward(self, row: Row) -> RowLogps:
        self.rows.append(row.num_tokens)
        if row.num_tokens > self.most_tokens or len(self.rows) in self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        output: RowLogps = self.scorer(row)
        return output
