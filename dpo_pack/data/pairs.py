"""Sources of a recipe -> pairs to train on and to evaluate on, with a report of what became of the rows."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.epoch_order import check_weights
from dpo_pack.data.ingest import LoadedSource, Progress, load_source
from dpo_pack.data.keys import content_key, tokenizer_fingerprint
from dpo_pack.data.quality import describe_pairs, key_values, overlap
from dpo_pack.data.store import PairTable
from dpo_pack.data.tokenization import Tokenizer
from dpo_pack.errors import DataError
from dpo_pack.recipe import source_names
from dpo_pack.recipe_schema import DataRecipe, EvalFraction

if TYPE_CHECKING:
    from dpo_pack.data.prompts import PromptSplits

HELD_OUT = "held_out"  # the eval set that {fraction: ...} makes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalSet:
    """Pairs to evaluate on, and what metrics call them."""

    name: str
    pairs: PairTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataSplits:
    """Everything `data` in a recipe stands for."""

    train: PairTable
    eval: tuple[EvalSet, ...]
    source_weights: NDArray[np.float64]  # [training sources] the mixture, for the planner
    report: dict[str, Any]  # the content of data_report.json
    fingerprint: str  # of the pairs to train on and the mixture
    eval_fingerprint: str  # of what is held out, with its names
    prompts: "PromptSplits | None" = None  # of an online run, whose pairs are yet to be made


def load_data(
    data: DataRecipe,
    *,
    tokenizer: Tokenizer,
    seed: int,
    cache_dir: Path,
    progress: Progress | None = None,
) -> DataSplits:
    """Reads and tokenises the sources, or finds them tokenised in `cache_dir`.

    `seed` decides which pairs a held-out fraction takes. `progress` is called after each batch of rows
    with what is done, how many rows are, and of how many (None: not known).
    Raises DataError, ModelError (the tokenizer cannot serve the data), RecipeError and CacheError.
    """
    load = partial(
        load_source,
        data=data,
        tokenizer=tokenizer,
        tokenizer_key=tokenizer_fingerprint(tokenizer),
        cache_dir=cache_dir,
        progress=progress or (lambda what, done, total: None),
    )
    train_sources = [load(source, f"data.train.{number}") for number, source in enumerate(data.train)]
    train = PairTable.of([source.store for source in train_sources])
    eval_sources: list[LoadedSource] = []
    if isinstance(data.eval, EvalFraction):
        kept, held_out = split_by_prompt(train.prompt_keys, data.eval.fraction, seed)
        evals = [EvalSet(name=HELD_OUT, pairs=train.select(held_out))]
        train = train.select(kept)
    else:
        eval_sources = [load(source, f"data.eval.{number}") for number, source in enumerate(data.eval)]
        evals = [
            EvalSet(name=name, pairs=PairTable.of([source.store]))
            for name, source in zip(source_names(data.eval), eval_sources, strict=True)
        ]
    source_weights = np.array([source.weight for source in data.train], dtype=np.float64)
    check_weights(train.source_indices, source_weights)
    return DataSplits(
        train=train,
        eval=tuple(evals),
        source_weights=source_weights,
        report=_report(train, train_sources, evals, eval_sources),
        fingerprint=content_key([train.fingerprint, source_weights.tolist()]),
        eval_fingerprint=content_key([[e.name, e.pairs.fingerprint] for e in evals]),
    )


def split_by_prompt(
    prompt_keys: NDArray[np.uint8], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the pairs to keep and of those to hold out, at least `fraction` of all.

    Pairs with the same prompt stay together. A prompt's place depends on `seed` and its ids alone, so
    that it is held out, or not, wherever in the data it stands. Raises DataError when one side is empty.
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
            "none to train on; lower it, or name a source in data.eval"
        )
    is_held_out = np.zeros(len(prompts), dtype=bool)
    is_held_out[order[:num_held_out]] = True
    return np.flatnonzero(~is_held_out[prompt_of_pair]), np.flatnonzero(is_held_out[prompt_of_pair])


def _report(
    train: PairTable,
    train_sources: list[LoadedSource],
    evals: list[EvalSet],
    eval_sources: list[LoadedSource],
) -> dict[str, Any]:
    names = source_names([source.recipe for source in train_sources])
    reports = [_source_report(name, source) for name, source in zip(names, train_sources, strict=True)]
    eval_reports = {e.name: describe_pairs(e.pairs) for e in evals}
    for e, source in zip(evals, eval_sources, strict=False):  # a held-out fraction has no source of its own
        eval_reports[e.name]["source"] = _source_report(e.name, source)
    return {
        "train": {**describe_pairs(train), "sources": reports},
        "eval": eval_reports,
        **overlap(train, [e.pairs for e in evals]),
        "rows_tokenized": sum(source.rows_tokenized for source in [*train_sources, *eval_sources]),
    }


def _source_report(name: str, source: LoadedSource) -> dict[str, Any]:
    return {
        "name": name,
        "path": source.recipe.path,
        "split": source.recipe.split,
        "weight": source.recipe.weight,
        **source.store.summary,
        **describe_pairs(PairTable.of([source.store])),
        "token_store": str(source.store.directory),
        "token_store_reused": source.rows_tokenized == 0,
    }
