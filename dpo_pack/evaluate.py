"""Held-out reward accuracy, margin, loss and log-ratios of a policy against its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dpo_pack.console import progress_bar
from dpo_pack.data.packing import pack_sequences_longest_first, padded_rows
from dpo_pack.errors import ModelError, RecipeError
from dpo_pack.losses import LossOptions, weighted_sum
from dpo_pack.metrics import averages, row_sums, zero_sums
from dpo_pack.models import CompletionLogps
from dpo_pack.prepare import (
    load_trained,
    loss_options,
    prepare,
    prepare_reference,
    reference_token_budget,
    release_memory,
    row_builder,
)
from dpo_pack.recipe import Recipe
from dpo_pack.reference import FrozenReference
from dpo_pack.sources import RowBuilder, split_pairs


@torch.no_grad()
def evaluate_pairs(
    policy: CompletionLogps,
    builder: RowBuilder,
    *,
    terms: Sequence[tuple[str, float]],
    options: LossOptions,
    token_budget: int,
    progress: Callable[[int], None] = lambda num_pairs: None,
) -> dict[str, float]:
    """Metrics over all pairs of the builder's table, each counted once; names as in `metrics.py`.

    `token_budget` bounds a row of this pass without gradients. `progress` is told the pairs of each row.
    """
    build_rows = pack_sequences_longest_first if builder.is_packed else padded_rows
    sums = zero_sums(builder.device)
    for pairs in build_rows(builder.row_tokens(), token_budget):
        row = builder.build(pairs)
        output = policy(row.row)
        policy_logps, reference_logps = split_pairs(output, row)
        losses = weighted_sum(terms, policy_logps, reference_logps, options) * row.weights
        sums += row_sums(output, policy_logps, reference_logps, losses, beta=options.beta)
        progress(len(pairs))
    return averages(sums)


def evaluate_recipe(recipe: Recipe, model: Path, console: Console) -> dict[str, dict[str, float]]:
    """Metrics of every held-out set of the recipe, by name, for the model in directory `model`.

    Raises RecipeError without held-out sets, ModelError when the model cannot be loaded.
    """
    if not recipe.data.eval:
        raise RecipeError("data.eval: the recipe holds nothing out; name a source or a fraction")
    if not (model / "config.json").is_file():
        raise ModelError(
            f"{model}: no trained model there; finish the run first, or give another with --model"
        )
    prepared = prepare(recipe, console)
    filled = prepare_reference(prepared, None)
    frozen = FrozenReference.take(filled.cache, prepared.tables)
    release_memory()
    policy = load_trained(prepared, model)
    results = {}
    table = Table(
        "held-out set", "pairs", "accuracy", "margin", "loss", "chosen log-ratio", "rejected log-ratio"
    )
    for held_out in prepared.data.eval:
        with progress_bar(console, f"Evaluating {held_out.name}", held_out.pairs.num_pairs, "pairs") as bar:
            metrics = evaluate_pairs(
                policy.scorer,
                row_builder(prepared, held_out.pairs, frozen.of(held_out.pairs)),
                terms=recipe.loss.terms,
                options=loss_options(recipe),
                token_budget=reference_token_budget(recipe),
                progress=bar,
            )
        results[held_out.name] = metrics | {"pairs": held_out.pairs.num_pairs}
        table.add_row(
            held_out.name,
            f"{held_out.pairs.num_pairs:,}",
            f"{metrics['rewards/accuracies']:.3f}",
            f"{metrics['rewards/margins']:.4f}",
            f"{metrics['loss']:.4f}",
            f"{metrics['kl/chosen']:.3f}",
            f"{metrics['kl/rejected']:.3f}",
        )
    console.print(table)
    return results
