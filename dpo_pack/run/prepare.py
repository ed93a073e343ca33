"""The first stage of every command: finds device, facts of models, tokenizer and data; loads models.

The reference log-probs come next (reference_stage.py), then the batches (batches.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dpo_pack.data.load import load_data, load_prompts
from dpo_pack.data.splits import DataSplits
from dpo_pack.data.store import PairTable
from dpo_pack.losses import Objective, make_objective
from dpo_pack.model.config import check_positions, check_rows
from dpo_pack.model.loading import load_tokenizer
from dpo_pack.model.lora import LoraSettings, is_adapter, read_adapter
from dpo_pack.model.parallel import ALONE, Strategy
from dpo_pack.model.scorer import LoadedModel, Precision
from dpo_pack.recipe.load import Recipe
from dpo_pack.recipe.load import TOKENIZER_FILES
from dpo_pack.reference.fill import CPU_TOKEN_BUDGET, START_FACTOR
from dpo_pack.reference.maintenance import find_leftovers
from dpo_pack.run.models import (
    ModelFacts,
    cache_directory,
    check_model,
    load_and_prove,
    new_adapter,
    recipe_precision,
    resolve_model,
    resolve_policy,
)
from dpo_pack.run.strategy import check_accelerate_config, choose_strategy
from dpo_pack.system import ranks
from dpo_pack.system.console import format_seconds, print_detail
from dpo_pack.system.errors import ModelError, RecipeError
from dpo_pack.system.files import discard
from dpo_pack.system.memory import keep_freed_memory
from dpo_pack.system.progress import reading_progress
from dpo_pack.training.optim import check_optimizer
from dpo_pack.training.references import LiveReference, Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A recipe with all that is known before the weights of a model are loaded. `prepare` creates it."""

    recipe: Recipe
    console: Console
    accelerator: Accelerator
    device: torch.device
    policy_facts: ModelFacts  # facts of the starting policy
    reference_facts: ModelFacts  # the same object as `policy_facts`, unless the recipe names another model
    tokenizer: PreTrainedTokenizerBase
    data: DataSplits
    strategy: Strategy

    @property
    def precision(self) -> Precision:
        return self.policy_facts.precision

    @property
    def is_packed(self) -> bool:
        return self.policy_facts.is_packed

    @property
    def tables(self) -> list[PairTable]:
        """The table of training pairs, then the table of each held-out set."""
        return [self.data.train, *self.data.eval.values()]

    @property
    def eval_names(self) -> list[str]:
        """The names of the held-out sets, in the recipe's order."""
        if self.data.prompts is not None:
            return list(self.data.prompts.eval)
        return list(self.data.eval)

    @property
    def reference_token_budget(self) -> int:
        return reference_token_budget(self.recipe, self.device)


def reference_token_budget(recipe: Recipe, device: torch.device) -> int:
    """Returns the most tokens of a row when reference log-probs are computed (`reference.token_budget`).

    If the key is `auto` and the device is not a CPU, a search for a larger budget starts at this value.
    """
    if isinstance(recipe.reference.token_budget, int):
        return recipe.reference.token_budget
    return CPU_TOKEN_BUDGET if device.type == "cpu" else START_FACTOR * recipe.packing.token_budget


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Loads the recipe's tokenizer; for an adapter without a tokenizer, that of its base model.

    Raises ModelError.
    """
    path, revision, key = recipe.model.path, recipe.model.revision, "model.path"
    if recipe.tokenizer.path is not None:
        path, revision, key = recipe.tokenizer.path, None, "tokenizer.path"
    elif is_adapter(path) and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        base = read_adapter(Path(path), key)
        path, revision, key = base.base, base.base_revision, f"{key} (the base of {path})"
    return load_tokenizer(
        path,
        revision=revision,
        trust_remote_code=recipe.model.trust_remote_code,
        chat_template=recipe.tokenizer.chat_template,
        recipe_key=key,
    )


def require_pairs(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe is that of an online run."""
    if recipe.online is not None:
        raise RecipeError(
            "online: this command needs pairs, and an online run makes its pairs while it trains"
        )


def prepare_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> DataSplits:
    """Returns tokenised pairs, from the cache if it has them; prints how many were kept and left out."""
    require_pairs(recipe)
    begun = time.monotonic()
    with reading_progress(console) as progress:
        data = load_data(
            recipe.data,
            tokenizer=tokenizer,
            seed=recipe.seed,
            cache_dir=cache_directory(recipe),
            progress=progress,
        )
    held_out = ", ".join(f"{_held_out_size(data, name)} held out ({name})" for name in data.eval)
    console.print(
        f"Data: {data.train.num_pairs:,} pairs to train on{', ' + held_out if held_out else ''}; "
        f"{format_seconds(time.monotonic() - begun)}"
    )
    _print_notes(data, console, recipe.data.scored_turns)
    return data


def _held_out_size(data: DataSplits, name: str) -> str:
    """Returns the number of pairs of a held-out set, and that of prompts where some pairs share a prompt."""
    num_pairs, num_prompts = data.eval[name].num_pairs, data.report["eval"][name]["prompts"]
    return f"{num_pairs:,}" + (f" pairs of {num_prompts:,} prompts" if num_prompts < num_pairs else "")


def _print_notes(data: DataSplits, console: Console, scored_turns: str = "assistant") -> None:
    """Prints notes: whether the split is not by prompt, rows that are left out, on how many pairs
    `scored_turns` matters."""
    shared = data.report["held_out_by"]
    if shared not in (None, "prompt"):
        console.print(
            f"  no column has the prompts: pairs with the same {shared} are all held out or all trained on; "
            "for a split by prompt, name the column in data.train.*.columns.prompt"
        )
    for source in _source_reports(data):
        dropped = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in source["dropped"].items())
        if dropped:
            console.print(f"  {source['name']}: {source['rows_read']:,} rows read, left out: {dropped}")
        if others := source.get("pairs_with_other_turns"):
            scored = (
                "only what the assistant says is scored (data.scored_turns: all scores other messages too)"
                if scored_turns == "assistant"
                else "messages that the assistant did not write are scored too (data.scored_turns: all)"
            )
            console.print(f"  {source['name']}: in {others:,} of {source['pairs_kept']:,} pairs {scored}")


def _source_reports(data: DataSplits) -> list[dict[str, Any]]:
    held_out = (held["source"] for held in data.report["eval"].values() if "source" in held)
    return [*data.report["train"]["sources"], *held_out]


def print_columns_not_read(data: DataSplits, console: Console) -> None:
    """Prints the columns that are not read, once for all sources that have the same ones."""
    sources: dict[str, list[str]] = {}
    for source in _source_reports(data):
        sources.setdefault(", ".join(source["columns_not_read"]), []).append(source["name"])
    for columns, names in sources.items():
        if columns:
            console.print(f"  columns of {', '.join(dict.fromkeys(names))} that are not read: {columns}")


def prepare_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> DataSplits:
    """Returns the tokenised prompts of an online run; prints how many were kept and left out."""
    assert recipe.online is not None
    data = load_prompts(
        recipe.data,
        tokenizer=tokenizer,
        max_new_tokens=recipe.online.max_new_tokens,
        seed=recipe.seed,
        cache_dir=cache_directory(recipe),
    )
    assert data.prompts is not None
    held_out = ", ".join(f"{len(prompts):,} held out ({name})" for name, prompts in data.prompts.eval.items())
    console.print(f"Data: {len(data.prompts.train):,} prompts to answer{', ' + held_out if held_out else ''}")
    _print_notes(data, console, recipe.data.scored_turns)
    return data


def prepare(
    recipe: Recipe,
    console: Console,
    read_data: Callable[[Recipe, PreTrainedTokenizerBase, Console], DataSplits] = prepare_data,
    *,
    runs_models: bool = True,
) -> Prepared:
    """Finds device, facts of the models, tokenizer and data. Checks that take little time come first.

    It writes only into caches. If `runs_models` is false, the command loads no model: it runs in one process
    and ignores `distributed.num_processes`.
    """
    wanted, num_ranks = recipe.distributed.num_processes, ranks.num_ranks()
    if runs_models and wanted not in ("auto", num_ranks):
        raise RecipeError(
            f"distributed.num_processes: {wanted} are asked for, but this run has {num_ranks}; the dpopack "
            "command starts the processes itself; start a program of your own with torchrun"
        )
    accelerator = _accelerator(recipe)
    # With several processes on CPUs, accelerate gives each a device number; for torch the CPU is one device.
    device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
    if device.type == "cpu":
        keep_freed_memory()
    precision = recipe_precision(recipe, device)
    check_accelerate_config(recipe, precision)
    check_optimizer(recipe.optim.name, device)
    policy = reference = resolve_policy(recipe, precision)
    if recipe.reference.path is not None:
        reference = resolve_model(recipe, precision, recipe.reference.path, recipe_key="reference.path")
    check_model(recipe, policy, device, is_trained=True)
    if reference is not policy:
        check_model(recipe, reference, device)
    strategy = choose_strategy(recipe, policy, device) if runs_models else ALONE
    if num_ranks > 1:
        console.print(f"Strategy: {strategy.sentence()}")
    ranks.require_shared(cache_directory(recipe), "reference.cache_dir")
    if ranks.is_first():
        for leftover in find_leftovers(cache_directory(recipe)):
            discard(leftover)
    with ranks.first_goes_first():  # the other ranks then read rank 0's downloads and tokens from the caches
        tokenizer = prepare_tokenizer(recipe)
        data = read_data(recipe, tokenizer, console)
    ranks.require_same(
        {"the data": data.fingerprint, "the held-out data": data.eval_fingerprint},
        "every node must see the same data files and the same reference.cache_dir",
    )
    prepared = Prepared(
        recipe=recipe,
        console=console,
        accelerator=accelerator,
        device=device,
        policy_facts=policy,
        reference_facts=reference,
        tokenizer=tokenizer,
        data=data,
        strategy=strategy,
    )
    check_data(prepared, policy)
    return prepared


def _accelerator(recipe: Recipe) -> Accelerator:
    """Creates accelerate's Accelerator; asserts that it counts ranks as this package does."""
    # The recipe sets precision and compilation, and shards are torch's (docs/distributed.md). Without these
    # settings accelerate would take all three from its own configuration.
    with patch_environment(ACCELERATE_USE_FSDP="false"):
        accelerator = Accelerator(
            # Only CUDA or the CPU: else accelerate uses a Mac's GPU, or one process on several ranks.
            cpu=not ranks.uses_cuda(),
            mixed_precision="no",
            dynamo_backend="no",
            log_with=list(recipe.logging.trackers) or None,
            project_dir=str(recipe.output_dir / "trackers"),
        )
    assert (accelerator.num_processes, accelerator.process_index) == (ranks.num_ranks(), ranks.rank())
    return accelerator


def check_data(prepared: Prepared, model: ModelFacts) -> None:
    """Checks that the model can read the longest sequence and all token ids, and compute the longest row.

    Raises ModelError, UnsupportedModelError.
    """
    recipe, online = prepared.recipe, prepared.recipe.online
    longest = longest_sequence(prepared.tables) + (0 if online is None else online.max_new_tokens)
    check_positions(model.config, longest)
    if prepared.is_packed:
        # A prompt with its completions that exceeds the budget gets its own row. Without a shared prompt, the
        # row repeats the prompt for each completion.
        most_sequences = 2 if online is None else online.completions_per_prompt
        budgets = (recipe.packing.token_budget, prepared.reference_token_budget)
        longest_row = max(*budgets, most_sequences * longest)
        check_rows(model.config, longest_sequence=longest, longest_row=longest_row)
    num_embeddings = int(model.config.get_text_config().vocab_size)
    # Some tokenizers have more entries than the model embeds, but never produce the additional ids.
    largest = _largest_token_id(prepared.tables) if len(prepared.tokenizer) > num_embeddings else 0
    if largest >= num_embeddings:
        raise ModelError(
            f"{model.recipe_key}: the data has token id {largest}, but {model.path} embeds "
            f"{num_embeddings} tokens only; use the tokenizer that belongs to the model"
        )


def longest_sequence(tables: Sequence[PairTable]) -> int:
    """Returns the number of tokens of the longest prompt with one completion."""
    longer = [np.maximum(table.chosen_lengths, table.rejected_lengths) for table in tables]
    return max(int((table.prompt_lengths + more).max()) for table, more in zip(tables, longer, strict=True))


def _largest_token_id(tables: Sequence[PairTable]) -> int:
    return max(
        int(ids.max(initial=0))  # an online run's prompts have no completions yet
        for table in tables
        for pair in range(table.num_pairs)
        for ids in (table.prompt(pair), table.chosen(pair), table.rejected(pair))
    )


def load_policy(prepared: Prepared) -> LoadedModel:
    """Loads the starting policy with `load_proved`, and a new adapter if the recipe has one."""
    return load_proved(prepared, prepared.policy_facts, new_adapter(prepared.recipe))


def load_second_model(prepared: Prepared) -> LoadedModel:
    """Loads the reference as a second model beside the policy, with frozen weights. Raises ModelError."""
    check_data(prepared, prepared.reference_facts)
    loaded = load_proved(prepared, prepared.reference_facts)
    loaded.scorer.requires_grad_(False)
    return loaded


def load_moving_reference(prepared: Prepared) -> LiveReference:
    """Loads the reference as a second model that follows the policy (`reference.sync`). Raises ModelError."""
    facts, sync = prepared.reference_facts, prepared.recipe.reference.sync
    assert sync is not None
    if facts.adapter is not None:
        raise ModelError(
            f"reference.sync: the reference {facts.label} is an adapter; merge it first (dpopack merge)"
        )
    return LiveReference(
        model=load_second_model(prepared),
        device=prepared.device,
        sync=Sync(every_steps=sync.every_steps, mixup=sync.mixup),
    )


def load_proved(prepared: Prepared, model: ModelFacts, adapter: LoraSettings | None = None) -> LoadedModel:
    """Loads a model with the run's settings (sharded, if the run shards), and prints the proof's result.

    The proof tests that the model computes packed rows exactly. Raises ModelError if it fails.
    """
    loaded, outcome = load_and_prove(
        prepared.recipe, model, device=prepared.device, strategy=prepared.strategy, adapter=adapter
    )
    outcome.raise_failure()
    prepared.console.print(f"Proof: {outcome.sentence()}")
    print_detail(prepared.console, f"  {outcome.details()}")
    return loaded


def recipe_objective(recipe: Recipe) -> Objective:
    """Returns the recipe's loss. Raises RecipeError if a loss function of the user cannot be used."""
    loss = recipe.loss
    return make_objective(loss.terms, loss.options, weighting=loss.weighting, ld_alpha=loss.ld_alpha)
