"""Loads the sources of a recipe: pairs or prompts for training and evaluation, and a report about rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpo_pack.data.ingest import LoadedSource, Progress, load_prompt_source, load_source
from dpo_pack.data.keys import content_key
from dpo_pack.data.splits import (
    HELD_OUT,
    DataSplits,
    Prompt,
    PromptSplits,
    split_by_beginning,
    split_by_prompt,
)
from dpo_pack.data.store import PairTable, key_values
from dpo_pack.data.tokenizer import Tokenizer, tokenizer_fingerprint
from dpo_pack.packing.plan import check_weights
from dpo_pack.recipe.load import source_names
from dpo_pack.recipe.schema import DataRecipe, EvalFraction, SourceRecipe


def load_data(
    data: DataRecipe,
    *,
    tokenizer: Tokenizer,
    seed: int,
    cache_dir: Path,
    progress: Progress | None = None,
) -> DataSplits:
    """Reads and tokenises the sources, unless their tokens are in `cache_dir` already.

    `seed` decides which pairs a held-out fraction takes. `progress` is called after each batch of rows
    with the name of the task, the rows that are done, and the rows in all (None if not known).
    Raises DataError, ModelError (the tokenizer lacks a feature), RecipeError and CacheError.
    """
    load = partial(
        load_source,
        data=data,
        tokenizer=tokenizer,
        tokenizer_key=tokenizer_fingerprint(tokenizer),
        cache_dir=cache_dir,
        progress=progress,
    )
    loaded = _load_sources(data, load, seed)
    train, evals = loaded.train.table, {name: held_out.table for name, held_out in loaded.evals.items()}
    sources = (*loaded.train_sources.values(), *loaded.eval_sources.values())
    report = {
        **loaded.report(_describe_pairs, _describe_pairs, _pair_source_report),
        **_overlap(train, list(evals.values())),
        "rows_tokenized": sum(source.rows_tokenized for source in sources),
    }
    return DataSplits(
        train=train,
        eval=evals,
        source_weights=loaded.source_weights,
        report=report,
        fingerprint=content_key([train.fingerprint, loaded.source_weights.tolist()]),
        eval_fingerprint=loaded.eval_fingerprint,
    )


def load_prompts(
    data: DataRecipe, *, tokenizer: Tokenizer, max_new_tokens: int, seed: int, cache_dir: Path
) -> DataSplits:
    """Reads and tokenises the prompts of all sources, each with room for `max_new_tokens` more tokens.

    Rows have the same formats as rows of pairs; their completions are not used. In the result, `train` is a
    table of pairs that have a prompt and empty completions, and `prompts` has the prompts with their texts.
    Raises DataError and ModelError as `load_data` does.
    """
    load = partial(
        load_prompt_source, data=data, tokenizer=tokenizer, max_new_tokens=max_new_tokens, cache_dir=cache_dir
    )
    loaded = _load_sources(data, load, seed)
    return DataSplits(
        train=loaded.train.table,
        eval={},
        source_weights=loaded.source_weights,
        report=loaded.report(
            _describe_prompts, lambda prompts: {"prompts": prompts.num_pairs}, _source_report
        ),
        fingerprint=loaded.train.table.fingerprint,
        eval_fingerprint=loaded.eval_fingerprint,
        prompts=PromptSplits(
            train=loaded.train.prompts,
            eval={name: held_out.prompts for name, held_out in loaded.evals.items()},
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The pairs of sources; or prompts and their texts, where a prompt is a pair without completions."""

    table: PairTable
    prompts: tuple[Prompt, ...]  # one for each pair of the table; empty if the sources have pairs

    @staticmethod
    def of(sources: Sequence[LoadedSource]) -> "_Part":
        return _Part(
            table=PairTable.of([source.store for source in sources]),
            prompts=tuple(prompt for source in sources for prompt in source.prompts),
        )

    def select(self, indices: NDArray[np.int64]) -> "_Part":
        chosen = indices.tolist() if self.prompts else ()
        return _Part(table=self.table.select(indices), prompts=tuple(self.prompts[index] for index in chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadedSources:
    """The sources of a recipe, by name. `train` does not contain the held-out fraction."""

    train: _Part
    evals: dict[str, _Part]
    train_sources: dict[str, LoadedSource]
    eval_sources: dict[str, LoadedSource]  # empty if a fraction is held out
    source_weights: NDArray[np.float64]
    held_out_by: str | None  # what pairs share that are held out together; None: no fraction

    @property
    def eval_fingerprint(self) -> str:
        return content_key([[name, part.table.fingerprint] for name, part in self.evals.items()])

    def report(
        self,
        describe_train: Callable[[PairTable], dict[str, Any]],
        describe_eval: Callable[[PairTable], dict[str, Any]],
        describe_source: Callable[[str, LoadedSource], dict[str, Any]],
    ) -> dict[str, Any]:
        """Returns what the functions say about the training set, the eval sets and the sources, JSON-able."""
        evals = {name: describe_eval(held_out.table) for name, held_out in self.evals.items()}
        for name, source in self.eval_sources.items():
            evals[name]["source"] = describe_source(name, source)
        sources = [describe_source(name, source) for name, source in self.train_sources.items()]
        train = {**describe_train(self.train.table), "sources": sources}
        return {"train": train, "eval": evals, "held_out_by": self.held_out_by}


def _load_sources(
    data: DataRecipe, load: Callable[[SourceRecipe, str], LoadedSource], seed: int
) -> _LoadedSources:
    """Loads all sources and splits off a held-out fraction. `load` gets each source and its recipe key."""

    def load_all(part: str, sources: Sequence[SourceRecipe]) -> dict[str, LoadedSource]:
        loaded = [load(source, f"data.{part}.{number}") for number, source in enumerate(sources)]
        return dict(zip(source_names(sources), loaded, strict=True))

    train_sources = load_all("train", data.train)
    train = _Part.of(list(train_sources.values()))
    eval_sources: dict[str, LoadedSource] = {}
    held_out_by = None
    if isinstance(data.eval, EvalFraction):
        keys, held_out_by = train.table.whole_prompt_keys, "prompt"
        if any(source.store.summary.get("prompts_inferred") for source in train_sources.values()):
            kept, held_out, num_characters = split_by_beginning(keys, data.eval.fraction, seed)
            held_out_by = f"first {num_characters} characters"
        else:
            kept, held_out = split_by_prompt(keys, data.eval.fraction, seed)
        train, evals = train.select(kept), {HELD_OUT: train.select(held_out)}
    else:
        eval_sources = load_all("eval", data.eval)
        evals = {name: _Part.of([source]) for name, source in eval_sources.items()}
    source_weights = np.array([source.weight for source in data.train], dtype=np.float64)
    check_weights(train.table.source_indices, source_weights)
    return _LoadedSources(
        train=train,
        evals=evals,
        train_sources=train_sources,
        eval_sources=eval_sources,
        source_weights=source_weights,
        held_out_by=held_out_by,
    )


def _source_report(name: str, source: LoadedSource) -> dict[str, Any]:
    """Returns the settings of a source in the recipe, and the counts of its rows."""
    return {
        "name": name,
        "path": source.recipe.path,
        "split": source.recipe.split,
        "weight": source.recipe.weight,
        **source.store.summary,
    }


def _pair_source_report(name: str, source: LoadedSource) -> dict[str, Any]:
    return {
        **_source_report(name, source),
        **_describe_pairs(PairTable.of([source.store])),
        "token_store": str(source.store.directory),
        "token_store_reused": source.rows_tokenized == 0,
    }


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
