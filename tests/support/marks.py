"""Marks of parametrised cases, and the ten families of the quick tests. The slow tests take every family."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Returns the cases with the mark `slow`. A case of several arguments is a tuple."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


# What each has that the others lack.
TEN = {
    "llama": "what most families have: rotary positions, grouped heads",
    "gpt2": "learned positions, one projection for queries, keys and values, tied embeddings",
    "mistral": "a window in every layer",
    "gemma2": "softcaps of scores and logits, a window in every second layer",
    "granite": "multipliers of embeddings, scores, residuals and logits",
    "gpt_oss": "sinks",
    "qwen3_moe": "a mixture of experts, norms of queries and keys",
    "deepseek_v3": "values narrower than keys; experts in groups, one of them shared",
    "qwen3_next": "gated delta nets beside attention",
    "mamba": "a state space and no attention: padded batches only",
}


def slow_but_ten(families: Iterable[str], quick: Collection[str] = tuple(TEN)) -> list[Any]:
    """The families as parameters of a test, slow but for the ten, or for those of them in `quick`."""
    return [f if f in quick else pytest.param(f, marks=pytest.mark.slow) for f in families]
