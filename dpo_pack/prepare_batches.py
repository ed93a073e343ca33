"""From a recipe and its data to rows, global batches and the packing report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpo_pack import ranks
from dpo_pack.data.epoch_order import epoch_order
from dpo_pack.data.flops import ModelShape, pair_flops
from dpo_pack.data.lengths import FloatArray
from dpo_pack.data.merging import prompt_merging
from dpo_pack.data.packing import PlanSettings
from dpo_pack.data.packing_report import PackingReport, inspect_packing
from dpo_pack.data.pairs import DataSplits
from dpo_pack.data.step_rows import PADDED
from dpo_pack.data.store import PairTable
from dpo_pack.model_shape import model_shape
from dpo_pack.offline import OfflineSource
from dpo_pack.prepare import (
    Prepared,
    pad_token_id,
)
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_models import (
    policy_model,
    source_config,
)
from dpo_pack.reference import FrozenReference, pair_lengths
from dpo_pack.sources import RowBuilder

# What a packing report compares, unless told otherwise.
INSPECTED_RANKS = (1, 8, 64)
INSPECTED_BUDGETS = (4096, 8192, 16384)
# What a source's summary counts of kept pairs that were shortened.
TRUNCATION_COUNTS = ("prompt_truncated", "completions_truncated", "eos_lost")


def row_builder(prepared: Prepared, table: PairTable, reference: FrozenReference | None) -> RowBuilder:
    """For the rows of the table's pairs; `reference` is None for a loss without one."""
    return RowBuilder(
        table=table,
        reference=None if reference is None else reference.of(table),
        is_packed=prepared.is_packed,
        share_prompt=prepared.recipe.shares_prompts,
        pad_token_id=pad_token_id(prepared.tokenizer),
        device=prepared.device,
    )


def offline_source(prepared: Prepared, reference: FrozenReference | None) -> OfflineSource:
    """The recipe's training pairs as global batches; `reference` is None for a loss without one."""
    recipe, table = prepared.recipe, prepared.data.train
    merging = prompt_merging(table, policy_shape(recipe)) if recipe.packing.merge_prompts else None
    return OfflineSource(
        replace(row_builder(prepared, table, reference), merging=merging),
        settings=plan_settings(recipe),
        row_costs=recipe_pair_flops(recipe, table),
        source_weights=prepared.data.source_weights,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        shuffle=recipe.data.shuffle,
        seed=recipe.seed,
        rank=ranks.rank(),
        num_ranks=ranks.num_ranks(),
        equal_rows=prepared.strategy.shards,
    )


def plan_settings(recipe: Recipe) -> PlanSettings:
    """How the recipe cuts an epoch into steps and rows."""
    packing = recipe.packing
    return PlanSettings(
        token_budget=packing.token_budget,
        pairs_per_step=packing.pairs_per_step,
        rows_per_step=packing.rows_per_step if packing.scope == "epoch" else None,
        window_pairs=packing.window_pairs,
        algorithm=packing.algorithm if packing.mode == "packed" else PADDED,
    )


def policy_shape(recipe: Recipe) -> ModelShape:
    """What of the policy decides its FLOPs; loads its config, no weights."""
    config = source_config(recipe, policy_model(recipe))
    shape = model_shape(config, trust_remote_code=recipe.model.trust_remote_code)
    return shape if recipe.packing.mode == "packed" else replace(shape, last_block_weights=0.0)


def recipe_pair_flops(recipe: Recipe, table: PairTable) -> FloatArray:
    """[P] FLOPs of a training step that each pair adds, by which ranks are balanced."""
    lengths = pair_lengths(table)
    if recipe.packing.mode == "padded":
        return lengths.padded_tokens().astype(np.float64)
    return pair_flops(policy_shape(recipe), lengths, share_prompt=recipe.shares_prompts)


def inspect_recipe_packing(
    recipe: Recipe,
    data: DataSplits,
    ranks: Sequence[int] = INSPECTED_RANKS,
    budgets: Sequence[int] = INSPECTED_BUDGETS,
) -> PackingReport:
    """The packing report of the recipe's first epoch; needs the model's config, and no weights."""
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
    removed, truncated = Counter[str](), Counter[str]()
    for source in sources:
        removed.update({reason: entry["rows"] for reason, entry in source["dropped"].items()})
        truncated.update({what: source[what] for what in TRUNCATION_COUNTS if source.get(what)})
    shape = policy_shape(recipe)
    return inspect_packing(
        pair_lengths(table),
        shape,
        plan_settings(recipe),
        order=order,
        share_prompt=recipe.shares_prompts,
        merging=prompt_merging(table, shape) if recipe.packing.merge_prompts else None,
        ranks=ranks,
        budgets=budgets,
        model=recipe.model.path,
        removed_pairs=removed,
        truncated=truncated,
        describe_pair=lambda pair: f"{names[table.source_indices[pair]]} row {table.row_numbers[pair]}",
    )
