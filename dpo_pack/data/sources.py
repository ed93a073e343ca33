"""Loads the sources of a recipe: pairs or prompts for training and evaluation, and a report about rows."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.ingest import LoadedSource, Progress, load_source
from dpo_pack.data.keys import BEGINNINGS, content_key
from dpo_pack.data.store import PairTable, key_values
from dpo_pack.data.tokenization import Prompt
from dpo_pack.data.tokenizer import Tokenizer, tokenizer_fingerprint
from dpo_pack.packing.plan import epoch_order
from dpo_pack.recipe.load import source_names
from dpo_pack.recipe.schema import DataRecipe, EvalFraction, SourceRecipe
from dpo_pack.system.errors import DataError

HELD_OUT = "held_out"  # name of the eval set of `eval: {fraction: ...}`
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """All pairs or prompts that the section `data` of a recipe describes."""

    train: PairTable  # of an online run: pairs that have a prompt and empty completions
    eval: dict[str, PairTable]  # the held-out sets by their names in metrics; empty if rows are prompts
    source_weights: NDArray[np.float64]  # [training sources] how often an epoch has their pairs
    report: dict[str, Any]  # the content of data_report.json
    fingerprint: str  # a hash of the training pairs and source weights
    eval_fingerprint: str  # a hash of the eval sets' names and pairs
    prompts: tuple[Prompt, ...] = ()  # only of an online run, which generates its pairs later
    eval_prompts: dict[str, tuple[Prompt, ...]] = field(default_factory=dict)  # by held-out set


def load_data(
    data: DataRecipe,
    *,
    tokenizer: Tokenizer,
    seed: int,
    cache_dir: Path,
    progress: Progress | None = None,
    max_new_tokens: int | None = None,
) -> Data:
    """Reads and tokenises the sources, unless their tokens are in `cache_dir` already.

    `seed` decides which pairs a held-out fraction takes. `progress` is called after each batch of rows
    with the name of the task, the rows that are done, and the rows in all (None if not known).

    With `max_new_tokens`, the rows are prompts, each with room for so many more tokens. Rows have the same
    formats as rows of pairs; their completions are not used.

    Raises DataError, ModelError (the tokenizer lacks a feature), RecipeError and CacheError.
    """
    load = partial(
        load_source,
        data=data,
        tokenizer=tokenizer,
        tokenizer_key=tokenizer_fingerprint(tokenizer),
        cache_dir=cache_dir,
        progress=progress,
        max_new_tokens=max_new_tokens,
    )
    sources = _load_all(load, "train", data.train)
    train, prompts = PairTable.of([source.store for source in sources.values()]), _prompts_of(sources)
    eval_sources: dict[str, LoadedSource] = {}
    held_out_by = None
    if isinstance(data.eval, EvalFraction):
        kept, held_out, held_out_by = _split(train, sources, data.eval.fraction, seed)
        evals = {HELD_OUT: train.select(held_out)}
        eval_prompts = {HELD_OUT: _select(prompts, held_out)}
        train, prompts = train.select(kept), _select(prompts, kept)
    else:
        eval_sources = _load_all(load, "eval", data.eval)
        evals = {name: PairTable.of([source.store]) for name, source in eval_sources.items()}
        eval_prompts = {name: source.prompts for name, source in eval_sources.items()}
    source_weights = np.array([source.weight for source in data.train], dtype=np.float64)
    origins = train.source_indices
    order = partial(epoch_order, shuffle=False, seed=0, epoch=0, source_indices=origins)
    if not len(order(train.num_pairs, source_weights=source_weights)):
        raise DataError(
            "data.train: with the sources' weights an epoch has no pair; raise data.train.*.weight"
        )
    is_pairs = max_new_tokens is None
    report: dict[str, Any] = {
        "train": {
            **(_describe_pairs(train) if is_pairs else _describe_prompts(train)),
            "sources": [_source_report(name, source, is_pairs) for name, source in sources.items()],
        },
        "eval": {
            name: _describe_pairs(table) if is_pairs else {"prompts": table.num_pairs}
            for name, table in evals.items()
        },
        "held_out_by": held_out_by,
    }
    for name, source in eval_sources.items():
        report["eval"][name]["source"] = _source_report(name, source, is_pairs)
    if is_pairs:
        report |= _overlap(train, list(evals.values()))
        every = (*sources.values(), *eval_sources.values())
        report["rows_tokenized"] = sum(source.rows_tokenized for source in every)
    weighted = content_key([train.fingerprint, source_weights.tolist()])
    return Data(
        train=train,
        eval=evals if is_pairs else {},
        source_weights=source_weights,
        report=report,
        fingerprint=weighted if is_pairs else train.fingerprint,
        eval_fingerprint=content_key([[name, table.fingerprint] for name, table in evals.items()]),
        prompts=prompts,
        eval_prompts={} if is_pairs else eval_prompts,
    )


def _load_all(load: Any, part: str, sources: Sequence[SourceRecipe]) -> dict[str, LoadedSource]:
    loaded = [load(source, f"data.{part}.{number}") for number, source in enumerate(sources)]
    return dict(zip(source_names(sources), loaded, strict=True))


def _prompts_of(sources: dict[str, LoadedSource]) -> tuple[Prompt, ...]:
    return tuple(prompt for source in sources.values() for prompt in source.prompts)


def _select(prompts: tuple[Prompt, ...], indices: Positions) -> tuple[Prompt, ...]:
    return tuple(prompts[index] for index in indices.tolist()) if prompts else ()


# ---------------------------------------------------------------------------------------- held-out fraction


def _split(
    train: PairTable, sources: dict[str, LoadedSource], fraction: float, seed: int
) -> tuple[Positions, Positions, str]:
    """Returns the training pairs, the held-out pairs, and what pairs share that are held out together."""
    if not any(source.store.summary.get("prompts_inferred") for source in sources.values()):
        return *split_by_prompt(train.whole_prompt_keys, fraction, seed), "prompt"
    # Nobody knows where a prompt without a column ends, but pairs of one prompt begin with the same
    # characters. So pairs with equal first characters are held out together. The number of characters is the
    # smallest in BEGINNINGS that leaves (1 - fraction) / 2 of the pairs to train on, because more characters
    # may be a part of an answer.
    for num_bytes, num_characters in enumerate(BEGINNINGS, start=1):
        with suppress(DataError):
            kept, held_out = split_by_prompt(train.whole_prompt_keys[:, :num_bytes], fraction, seed)
            if len(kept) >= (1 - fraction) / 2 * train.num_pairs:
                return kept, held_out, f"first {num_characters} characters"
    raise DataError(
        f"data.eval.fraction: the sources have no column of prompts, and too many pairs begin with the same "
        f"{BEGINNINGS[-1]} characters; name the column in data.train.*.columns.prompt, or name a source in "
        "data.eval"
    )


def split_by_prompt(
    prompt_keys: NDArray[np.uint8], fraction: float, seed: int
) -> tuple[Positions, Positions]:
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


# --------------------------------------------------------------------------------------------------- report


def _source_report(name: str, source: LoadedSource, is_pairs: bool) -> dict[str, Any]:
    """Returns the settings of a source in the recipe, and the counts of its rows."""
    settings, store = source.recipe, source.store
    counts: dict[str, Any] = {
        "name": name,
        "path": settings.path,
        "split": settings.split,
        "weight": settings.weight,
        **store.summary,
    }
    if is_pairs:
        counts |= _describe_pairs(PairTable.of([store]))
        counts["token_store"] = str(store.directory)
        counts["token_store_reused"] = source.rows_tokenized == 0
    return counts


def _describe_pairs(pairs: PairTable) -> dict[str, Any]:
    """Returns counts and length percentiles, JSON-able. Duplicate pairs are counted but not removed."""
    prompts, chosen, rejected = pairs.prompt_lengths, pairs.chosen_lengths, pairs.rejected_lengths
    lengths = {
        "prompt": prompts,
        "chosen": chosen,
        "rejected": rejected,
        "longest_sequence": prompts + np.maximum(chosen, rejected),
    }
    return {
        "pairs": pairs.num_pairs,
        "prompts": len(np.unique(key_values(pairs.whole_prompt_keys))),
        "duplicate_pairs": pairs.num_pairs - len(np.unique(_pair_values(pairs))),
        "lengths_tokens": {name: _summarize_lengths(values) for name, values in lengths.items()},
    }


def _describe_prompts(prompts: PairTable) -> dict[str, Any]:
    return {
        "prompts": prompts.num_pairs,
        "distinct_prompts": len(np.unique(key_values(prompts.whole_prompt_keys))),
        "lengths_tokens": {"prompt": _summarize_lengths(prompts.prompt_lengths)},
    }


def _overlap(train: PairTable, evals: Sequence[PairTable]) -> dict[str, int]:
    """Counts the training pairs, and the distinct training prompts, that are also in an eval set."""
    if not evals:
        return {"train_pairs_in_eval": 0, "train_prompts_in_eval": 0}
    eval_pairs = np.concatenate([_pair_values(pairs) for pairs in evals])
    eval_prompts = np.concatenate([key_values(pairs.whole_prompt_keys) for pairs in evals])
    train_prompts = np.unique(key_values(train.whole_prompt_keys))
    return {
        "train_pairs_in_eval": int(np.isin(_pair_values(train), eval_pairs).sum()),
        "train_prompts_in_eval": int(np.isin(train_prompts, eval_prompts).sum()),
    }


def _summarize_lengths(lengths: NDArray[np.int32]) -> dict[str, float]:
    """Returns mean, percentiles (lengths that occur, not interpolated) and maximum of one or more lengths."""
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
    return {"mean": float(lengths.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())}


def _pair_values(pairs: PairTable) -> NDArray[np.void]:
    return key_values(np.concatenate([pairs.chosen_keys, pairs.rejected_keys], axis=1))
