"""From a recipe to what commands work with: device, data, model, reference log-probs, batches.

The only place, besides the commands themselves, that sees both a `Recipe` and torch.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dpo_pack.console import format_seconds, progress_bar
from dpo_pack.data.packing import PADDED, epoch_order
from dpo_pack.data.packing_report import PackingReport, inspect_packing
from dpo_pack.data.pairs import DataSplits, load_data
from dpo_pack.data.store import PairTable
from dpo_pack.errors import ModelError, RecipeError
from dpo_pack.losses import LossOptions
from dpo_pack.models import (
    LoadedModel,
    Precision,
    check_packs,
    check_positions,
    check_rows,
    load_tokenizer,
    resolve_precision,
)
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_models import (
    ModelSource,
    cache_directory,
    check_source,
    load_source_model,
    model_namespace,
    policy_model,
    prove_remembered,
    reference_model,
    source_config,
)
from dpo_pack.reference import (
    PairReference,
    ReferenceCache,
    compute_missing,
    find_missing,
    pair_lengths,
)
from dpo_pack.sources import OfflineSource, RowBuilder

# Without gradients no activation outlives its layer, so a row may be this much longer than in training.
_REFERENCE_BUDGET_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A recipe with its data tokenised; models come later."""

    recipe: Recipe
    console: Console
    accelerator: Accelerator
    precision: Precision
    tokenizer: PreTrainedTokenizerBase
    data: DataSplits
    cache_dir: Path

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def is_packed(self) -> bool:
        return self.recipe.packing.mode == "packed"

    @property
    def tables(self) -> list[PairTable]:
        return [self.data.train, *(held_out.pairs for held_out in self.data.eval)]


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    key = "model.path" if recipe.tokenizer.path is None else "tokenizer.path"
    return load_tokenizer(
        recipe.tokenizer.path or recipe.model.path,
        revision=recipe.model.revision if recipe.tokenizer.path is None else None,
        trust_remote_code=recipe.model.trust_remote_code,
        chat_template=recipe.tokenizer.chat_template,
        recipe_key=key,
    )


def prepare_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> DataSplits:
    """Tokenised pairs, from the cache where it has them; says what was kept and what was not."""
    begun = time.monotonic()
    with console.status("Reading data") as status:
        line_shown = begun

        def progress(what: str, done: int, total: int | None) -> None:
            nonlocal line_shown
            text = f"{what}: {done:,}{f' of {total:,}' if total else ''} rows"
            status.update(text)
            if not console.is_terminal and time.monotonic() - line_shown > 10.0:
                console.print(text)
                line_shown = time.monotonic()

        data = load_data(
            recipe.data,
            tokenizer=tokenizer,
            seed=recipe.seed,
            cache_dir=cache_directory(recipe),
            progress=progress,
        )
    held_out = ", ".join(f"{held.pairs.num_pairs:,} held out ({held.name})" for held in data.eval)
    console.print(
        f"Data: {data.train.num_pairs:,} pairs to train on{', ' + held_out if held_out else ''}; "
        f"{format_seconds(time.monotonic() - begun)}"
    )
    for source in data.report["train"]["sources"]:
        dropped = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in source["dropped"].items())
        if dropped:
            console.print(f"  left out of {source['name']}, {source['rows_read']:,} rows: {dropped}")
    return data


def prepare(recipe: Recipe, console: Console) -> Prepared:
    """Device, tokenizer and data, in the order that fails soonest. Writes nothing but the token cache."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("distributed.num_processes: several processes are not available yet; start one")
    project_dir = str(recipe.output_dir / "trackers")
    accelerator = Accelerator(log_with=list(recipe.logging.trackers) or None, project_dir=project_dir)
    precision = resolve_precision(recipe.model.dtype, recipe.model.autocast, accelerator.device)
    config = source_config(recipe, policy_model(recipe))
    for source in (policy_model(recipe), reference_model(recipe)):  # before anything is tokenised
        check_source(source)
        if recipe.packing.mode == "packed":
            check_packs(source_config(recipe, source))
    tokenizer = prepare_tokenizer(recipe)
    data = prepare_data(recipe, tokenizer, console)
    prepared = Prepared(
        recipe=recipe,
        console=console,
        accelerator=accelerator,
        precision=precision,
        tokenizer=tokenizer,
        data=data,
        cache_dir=cache_directory(recipe),
    )
    _check_lengths(prepared, config)
    _check_vocabulary(prepared, int(config.get_text_config().vocab_size))
    return prepared


def _check_lengths(prepared: Prepared, config: PretrainedConfig) -> None:
    longest = _longest_sequence(prepared.tables)
    check_positions(config, longest)
    if prepared.is_packed:
        recipe = prepared.recipe
        # A pair above the budget gets a row of its own, of at most both its sequences.
        longest_row = max(recipe.packing.token_budget, reference_token_budget(recipe), 2 * longest)
        check_rows(config, longest_sequence=longest, longest_row=longest_row)


def _longest_sequence(tables: Sequence[PairTable]) -> int:
    """Tokens of the longest prompt + completion."""
    longer = [np.maximum(table.chosen_lengths, table.rejected_lengths) for table in tables]
    return max(int((table.prompt_lengths + more).max()) for table, more in zip(tables, longer, strict=True))


def _check_vocabulary(prepared: Prepared, num_embeddings: int) -> None:
    if len(prepared.tokenizer) <= num_embeddings:
        return
    # Some tokenizers have more entries than the model has rows, and never produce them.
    for table in prepared.tables:
        for pair in range(table.num_pairs):
            largest = max(
                int(ids.max()) for ids in (table.prompt(pair), table.chosen(pair), table.rejected(pair))
            )
            if largest >= num_embeddings:
                raise ModelError(
                    f"model.path: the data has token id {largest}, but {prepared.recipe.model.path} embeds "
                    f"{num_embeddings} tokens only; use the tokenizer that belongs to the model"
                )


def prepare_policy(prepared: Prepared) -> LoadedModel:
    """The policy as the recipe starts it, on the device, and proof that its rows are exact."""
    return _load_and_prove(prepared, policy_model(prepared.recipe))


def load_trained(prepared: Prepared, path: Path) -> LoadedModel:
    """A model that some run has exported, to evaluate it as the recipe's policy."""
    return _load_and_prove(prepared, ModelSource(path=str(path), revision=None, recipe_key="--model"))


def _load_and_prove(prepared: Prepared, source: ModelSource) -> LoadedModel:
    recipe, precision, device = prepared.recipe, prepared.precision, prepared.device
    loaded = load_source_model(recipe, source, precision=precision, device=device)
    if prepared.is_packed:
        outcome = prove_remembered(
            recipe, source, loaded, precision=precision, device=device, cache_dir=prepared.cache_dir
        )
        outcome.raise_failure()
        prepared.console.print(f"Proof: {outcome.sentence()}")
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """The filled cache, and what filling it took."""

    cache: ReferenceCache
    num_computed: int  # sequences
    num_cached: int  # sequences that were there already
    seconds: float


def prepare_reference(prepared: Prepared, policy: LoadedModel | None) -> ReferencePass:
    """Make sure the cache has every reference log-prob of the recipe's pairs, computing what it lacks.

    `policy` is the policy as it starts, when the caller has it loaded already and `reference.path` is null.
    A reference that is loaded here is gone again when this returns.
    """
    recipe, console = prepared.recipe, prepared.console
    source = reference_model(recipe)
    _check_lengths(prepared, source_config(recipe, source))
    namespace = model_namespace(recipe, source, precision=prepared.precision, cache_dir=prepared.cache_dir)
    cache = ReferenceCache(prepared.cache_dir, namespace)
    missing = find_missing(cache, prepared.tables)
    todo = missing.num_sequences
    console.print(
        f"Reference log-probs: {missing.num_cached:,} of {missing.num_unique:,} sequences cached"
        f"{f', {todo:,} to compute' if todo else ''}"
    )
    begun = time.monotonic()
    if todo:
        scorer = (policy or _load_and_prove(prepared, source)).scorer
        with progress_bar(console, "Reference pass", todo, "sequences") as advance:
            compute_missing(
                cache,
                missing,
                scorer,
                token_budget=reference_token_budget(recipe),
                share_prompt=recipe.packing.share_prompt,
                pad_token_id=pad_token_id(prepared.tokenizer),
                device=prepared.device,
                progress=advance,
            )
    seconds = time.monotonic() - begun
    if todo:
        rate = todo / max(seconds, 1e-9)
        console.print(f"Reference pass: {todo:,} sequences in {format_seconds(seconds)}, {rate:,.0f}/s")
    return ReferencePass(cache=cache, num_computed=todo, num_cached=missing.num_cached, seconds=seconds)


def release_memory() -> None:
    """Give back what a dropped model held, before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reference_token_budget(recipe: Recipe) -> int:
    """Tokens in a row without gradients."""
    if isinstance(recipe.reference.token_budget, int):
        return recipe.reference.token_budget
    return _REFERENCE_BUDGET_FACTOR * recipe.packing.token_budget


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills padded batches; masked everywhere, so any id does."""
    return int(tokenizer.pad_token_id or 0)


def row_builder(prepared: Prepared, table: PairTable, reference: PairReference | None) -> RowBuilder:
    return RowBuilder(
        table=table,
        reference=reference,
        is_packed=prepared.is_packed,
        share_prompt=prepared.recipe.packing.share_prompt,
        pad_token_id=pad_token_id(prepared.tokenizer),
        device=prepared.device,
    )


def offline_source(prepared: Prepared, reference: PairReference) -> OfflineSource:
    """The recipe's training pairs as global batches."""
    recipe = prepared.recipe
    return OfflineSource(
        row_builder(prepared, prepared.data.train, reference),
        source_weights=prepared.data.source_weights,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        token_budget=recipe.packing.token_budget,
        pairs_per_step=recipe.packing.pairs_per_step,
        algorithm=recipe.packing.algorithm,
        shuffle=recipe.data.shuffle,
        seed=recipe.seed,
        rank=prepared.accelerator.process_index,
        num_ranks=prepared.accelerator.num_processes,
    )


def loss_options(recipe: Recipe) -> LossOptions:
    return LossOptions(
        beta=recipe.loss.beta,
        label_smoothing=recipe.loss.label_smoothing,
        f_divergence=recipe.loss.f_divergence,
        f_alpha=recipe.loss.f_alpha,
        discopop_tau=recipe.loss.discopop_tau,
    )


def inspect_recipe_packing(recipe: Recipe, data: DataSplits, ranks: Sequence[int] = (1,)) -> PackingReport:
    """The packing report of the recipe's first epoch; needs no model."""
    table = data.train
    order = epoch_order(
        table.num_pairs,
        shuffle=recipe.data.shuffle,
        seed=recipe.seed,
        epoch=0,
        source_indices=table.source_indices,
        source_weights=data.source_weights,
    )
    sources = data.report["train"]["sources"]
    names = [source["name"] for source in sources]
    removed: Counter[str] = Counter()
    for source in sources:
        removed.update({reason: entry["rows"] for reason, entry in source["dropped"].items()})
    return inspect_packing(
        pair_lengths(table),
        order=order,
        token_budget=recipe.packing.token_budget,
        pairs_per_step=recipe.packing.pairs_per_step,
        algorithm=recipe.packing.algorithm if recipe.packing.mode == "packed" else PADDED,
        share_prompt=recipe.packing.share_prompt,
        ranks=ranks,
        removed_pairs=removed,
        describe_pair=lambda pair: f"{names[table.source_indices[pair]]} row {table.row_numbers[pair]}",
    )
