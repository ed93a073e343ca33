"""What a person should know about a set of pairs: lengths, repetitions, what leaked into the evaluation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.store import PairTable


def describe_pairs(pairs: PairTable) -> dict[str, Any]:
    """Counts and length percentiles, JSON-able. Duplicates are kept pairs."""
    prompts, chosen, rejected = pairs.prompt_lengths, pairs.chosen_lengths, pairs.rejected_lengths
    lengths = {
        "prompt": prompts,
        "chosen": chosen,
        "rejected": rejected,
        "longest_sequence": prompts + np.maximum(chosen, rejected),
    }
    return {
        "pairs": pairs.num_pairs,
        "prompts": len(np.unique(key_values(pairs.prompt_keys))),
        "duplicate_pairs": pairs.num_pairs - len(np.unique(_pair_values(pairs))),
        "lengths_tokens": {name: summarize_lengths(values) for name, values in lengths.items()},
    }


def overlap(train: PairTable, evals: Sequence[PairTable]) -> dict[str, int]:
    """Training pairs, and distinct training prompts, that some eval set has too."""
    if not evals:
        return {"train_pairs_in_eval": 0, "train_prompts_in_eval": 0}
    eval_pairs = np.concatenate([_pair_values(pairs) for pairs in evals])
    eval_prompts = np.concatenate([key_values(pairs.prompt_keys) for pairs in evals])
    train_prompts = np.unique(key_values(train.prompt_keys))
    return {
        "train_pairs_in_eval": int(np.isin(_pair_values(train), eval_pairs).sum()),
        "train_prompts_in_eval": int(np.isin(train_prompts, eval_prompts).sum()),
    }


def summarize_lengths(lengths: NDArray[np.int32]) -> dict[str, float]:
    """Mean, percentiles and maximum of at least one length."""
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="higher").tolist()
    return {"mean": float(lengths.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())}


def key_values(keys: NDArray[np.uint8]) -> NDArray[np.void]:
    """[P, bytes] -> [P] opaque values that sort and compare as wholes."""
    return np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1]))).reshape(-1)


def _pair_values(pairs: PairTable) -> NDArray[np.void]:
    return key_values(np.concatenate([pairs.chosen_keys, pairs.rejected_keys], axis=1))
