"""The training pairs or prompts, the held-out sets, and the functions that choose the held-out pairs."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.formats import Message
from dpo_pack.data.keys import BEGINNINGS
from dpo_pack.data.store import PairTable, key_values
from dpo_pack.data.truncation import TokenIds
from dpo_pack.system.errors import DataError

HELD_OUT = "held_out"  # name of the eval set of `eval: {fraction: ...}`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataSplits:
    """All pairs or prompts that the section `data` of a recipe describes."""

    train: PairTable
    eval: dict[str, PairTable]  # the held-out sets by their names in metrics; empty if rows are prompts
    source_weights: NDArray[np.float64]  # [training sources] how often an epoch has their pairs
    report: dict[str, Any]  # the content of data_report.json
    fingerprint: str  # a hash of the training pairs and source weights
    eval_fingerprint: str  # a hash of the eval sets' names and pairs
    prompts: PromptSplits | None = None  # only of an online run, which generates its pairs later


def split_by_prompt(
    prompt_keys: NDArray[np.uint8], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the indices of the training pairs and of the held-out pairs (at least `fraction` of all pairs).

    Pairs with the same prompt stay together. `seed` and the prompts decide which prompts are held out; the
    order of the data does not. Raises DataError if no pair is left to train on.
    """
    prompts, prompt_of_pair, pairs_of_prompt = np.unique(
        key_values(prompt_keys), return_inverse=True, return_counts=True
    )
    salt = seed.to_bytes(16, "little", signed=True)
    keys, width = prompts.tobytes(), prompts.itemsize
    starts = range(0, len(keys), width)
    ranks = [hashlib.blake2b(keys[at : at + width], key=salt, digest_size=8).digest() for at in starts]
    order = np.argsort(np.frombuffer(b"".join(ranks), dtype="<u8"), kind="stable")
    wanted_pairs = fraction * len(prompt_keys)
    num_held_out = int(np.searchsorted(np.cumsum(pairs_of_prompt[order]), wanted_pairs)) + 1
    if num_held_out >= len(prompts):
        raise DataError(
            f"data.eval.fraction: {fraction} of {len(prompt_keys)} pairs with {len(prompts)} prompts leaves "
            "none to train on; lower the fraction, or name a source in data.eval"
        )
    is_held_out = np.zeros(len(prompts), dtype=bool)
    is_held_out[order[:num_held_out]] = True
    return np.flatnonzero(~is_held_out[prompt_of_pair]), np.flatnonzero(is_held_out[prompt_of_pair])


def split_by_beginning(
    keys: NDArray[np.uint8], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Splits pairs that have no prompt column; `keys` are their `beginning_key`s, [P, 16].

    Nobody knows where such a prompt ends, but pairs of one prompt begin with the same characters. So pairs
    with equal first characters are held out together. The number of characters is the smallest in BEGINNINGS
    that leaves (1 - fraction) / 2 of the pairs to train on, because more characters may be a part of an
    answer. Returns what `split_by_prompt` returns, and this number. Raises DataError if no number does.
    """
    for num_bytes, num_characters in enumerate(BEGINNINGS, start=1):
        with suppress(DataError):
            kept, held_out = split_by_prompt(keys[:, :num_bytes], fraction, seed)
            if len(kept) >= (1 - fraction) / 2 * len(keys):
                return kept, held_out, num_characters
    raise DataError(
        f"data.eval.fraction: the sources have no column of prompts, and too many pairs begin with the same "
        f"{BEGINNINGS[-1]} characters; name the column in data.train.*.columns.prompt, or name a source in "
        "data.eval"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt that the policy answers."""

    ids: TokenIds  # [C], C >= 1: the tokens that the policy continues
    text: str  # the whole prompt as text, special tokens included
    messages: tuple[Message, ...] | None  # only of a conversational row
    row_number: int  # in its source, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSplits:
    """Training prompts, and a dict of held-out prompts by the name of their set."""

    train: tuple[Prompt, ...]
    eval: dict[str, tuple[Prompt, ...]]
