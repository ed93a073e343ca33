"""Turns the pairs of a recipe into rows, global batches and the packing report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console

from dpo_pack.data.merging import prompt_merging
from dpo_pack.data.sources import Data
from dpo_pack.data.store import PairTable, pair_lengths
from dpo_pack.model.scorer import resolve_precision
from dpo_pack.packing.bin_packing import PADDED
from dpo_pack.packing.lengths import ADAPTER_PASSES, TRAINING_PASSES, ModelShape, PairSizes, pair_flops
from dpo_pack.packing.plan import PlanSettings
from dpo_pack.packing.report import PackingReport, inspect_packing
from dpo_pack.recipe.load import Recipe
from dpo_pack.run.models import resolve_policy
from dpo_pack.run.setup import Setup, prepare_data, prepare_tokenizer
from dpo_pack.system import ranks
from dpo_pack.training.batches import RowBuilder
from dpo_pack.training.offline import OfflineSource
from dpo_pack.training.references import Reference

# The counts of shortened pairs in the summary of a source.
TRUNCATION_COUNTS = ("prompt_truncated", "completions_truncated", "eos_lost")
CPU = torch.device("cpu")


def row_builder(
    setup: Setup, table: PairTable, reference: Reference | None = None, *, is_trained: bool = False
) -> RowBuilder:
    """Returns a builder of rows from the table's pairs, with the log-probs that `reference` has for them."""
    return RowBuilder(
        table=table,
        reference=None if reference is None else reference.known(table),
        is_packed=setup.is_packed,
        share_prompt=setup.recipe.shares_prompts,
        device=setup.device,
        counts_copies=is_trained and setup.policy_facts.balance is not None,
    )


def offline_source(
    recipe: Recipe,
    data: Data,
    shape: ModelShape,
    *,
    device: torch.device = CPU,
    equal_rows: bool = False,
    counts_copies: bool = False,
) -> OfflineSource:
    """Returns the source of global batches. Its first epoch is planned; it has no reference log-probs yet.

    `shape` is that of the policy. With `equal_rows` all ranks compute the same number of rows.
    """
    table, lengths = data.train, pair_lengths(data.train)
    if recipe.packing.mode == "padded":
        row_costs = lengths.padded_tokens().astype(np.float64)
    else:
        row_costs = pair_flops(shape, lengths, share_prompt=recipe.shares_prompts)
    builder = RowBuilder(
        table=table,
        reference=None,
        is_packed=recipe.packing.mode == "packed",
        share_prompt=recipe.shares_prompts,
        device=device,
        merging=prompt_merging(table, shape) if recipe.packing.merge_prompts else None,
        counts_copies=counts_copies,
    )
    return OfflineSource(
        builder=builder,
        settings=plan_settings(recipe),
        row_costs=row_costs,
        source_weights=data.source_weights,
        epochs=recipe.train.epochs,
        max_steps=recipe.train.max_steps,
        shuffle=recipe.data.shuffle,
        seed=recipe.seed,
        rank=ranks.rank(),
        num_ranks=ranks.num_ranks(),
        equal_rows=equal_rows,
    )


def plan_pairs(setup: Setup) -> OfflineSource:
    """Returns the source of the recipe's pairs for a run, without reference log-probs."""
    return offline_source(
        setup.recipe,
        setup.data,
        setup.policy_facts.shape,
        device=setup.device,
        equal_rows=setup.strategy.shards,
        counts_copies=setup.policy_facts.balance is not None,
    )


def plan_settings(recipe: Recipe) -> PlanSettings:
    """Returns the recipe's settings for dividing an epoch into steps and rows."""
    packing = recipe.packing
    return PlanSettings(
        token_budget=packing.token_budget,
        pairs_per_step=packing.pairs_per_step,
        rows_per_step=packing.rows_per_step,
        window_pairs=packing.window_pairs,
        algorithm=packing.algorithm if packing.mode == "packed" else PADDED,
    )


def inspect_recipe(
    recipe: Recipe, console: Console, *, num_ranks: Sequence[int], budgets: Sequence[int]
) -> PackingReport:
    """Reads the data and reports how it packs. Needs the model's config and tokenizer, but no weights."""
    data = prepare_data(recipe, prepare_tokenizer(recipe), console)
    policy = resolve_policy(recipe, resolve_precision(recipe.model.dtype, recipe.model.autocast, CPU))
    source = offline_source(recipe, data, policy.shape)
    return packing_report(
        source, data, policy.shape, model=recipe.model.path, num_ranks=num_ranks, budgets=budgets
    )


def packing_report(
    source: OfflineSource,
    data: Data,
    shape: ModelShape,
    *,
    model: str,
    num_ranks: Sequence[int] = (1, 8, 64),
    budgets: Sequence[int] = (4096, 8192, 16384),
) -> PackingReport:
    """Reports how the first epoch of `source` fills rows, for each number of ranks and each token budget."""
    table, sources = data.train, data.report["train"]["sources"]
    names = [entry["name"] for entry in sources]
    removed, truncated = Counter[str](), Counter[str]()
    for entry in sources:
        removed.update({reason: dropped["rows"] for reason, dropped in entry["dropped"].items()})
        truncated.update({what: entry[what] for what in TRUNCATION_COUNTS if entry.get(what)})
    return inspect_packing(
        source.first_plan,
        pair_lengths(table),
        shape,
        order=source.order(0),
        share_prompt=source.builder.share_prompt,
        ranks=num_ranks,
        budgets=budgets,
        model=model,
        removed_pairs=removed,
        truncated=truncated,
        describe_pair=lambda pair: f"{names[table.source_indices[pair]]} row {table.row_numbers[pair]}",
    )


def trained_pair_sizes(setup: Setup, source: OfflineSource, *, trains_adapter: bool) -> PairSizes:
    """Returns the tokens and the training FLOPs of each pair, without padding."""
    table, shape = setup.data.train, setup.policy_facts.shape
    passes = ADAPTER_PASSES if trains_adapter else TRAINING_PASSES
    share_prompt = setup.is_packed and setup.recipe.shares_prompts
    flops = pair_flops(shape, pair_lengths(table), share_prompt=share_prompt, passes=passes)
    merging = source.builder.merging
    if merging is not None and trains_adapter:  # `merging` counts the FLOPs of full training
        merging = prompt_merging(table, shape, passes=passes)
    return PairSizes(tokens=source.real_tokens, costs=flops, merging=merging)
