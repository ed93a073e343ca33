"""From a recipe to what commands work with: device, tokenizer, data, models, the loss.

prepare_reference.py and prepare_batches.py go on from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dpo_pack import ranks
from dpo_pack.console import format_seconds
from dpo_pack.data.pairs import DataSplits, load_data
from dpo_pack.data.prompts import load_prompts
from dpo_pack.data.store import PairTable
from dpo_pack.errors import ModelError, RecipeError
from dpo_pack.host_memory import keep_freed_memory
from dpo_pack.loading import load_tokenizer
from dpo_pack.lora import is_adapter
from dpo_pack.losses import LossOptions, Objective, load_loss
from dpo_pack.model_config import check_packs, check_positions, check_rows
from dpo_pack.models import LoadedModel, Precision, resolve_precision
from dpo_pack.moving_reference import MovingReference
from dpo_pack.optim import check_optimizer
from dpo_pack.recipe import Recipe
from dpo_pack.recipe_checks import TOKENIZER_FILES
from dpo_pack.recipe_models import (
    ModelSource,
    cache_directory,
    check_layers,
    check_quantised,
    check_source,
    load_source_model,
    model_source,
    policy_model,
    prove_remembered,
    reference_model,
    reference_token_budget,
    source_config,
)
from dpo_pack.strategy import ALONE, Strategy, choose_strategy


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
    strategy: Strategy = ALONE

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        # Of several processes on CPUs accelerate numbers the devices, which are one.
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def is_packed(self) -> bool:
        return self.recipe.packing.mode == "packed"

    @property
    def tables(self) -> list[PairTable]:
        return [self.data.train, *(held_out.pairs for held_out in self.data.eval)]


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer: of an adapter without one, its base's. Raises ModelError."""
    path, revision, key = recipe.model.path, recipe.model.revision, "model.path"
    if recipe.tokenizer.path is not None:
        path, revision, key = recipe.tokenizer.path, None, "tokenizer.path"
    elif is_adapter(path) and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        base = policy_model(recipe)
        path, revision, key = base.path, base.revision, base.recipe_key
    return load_tokenizer(
        path,
        revision=revision,
        trust_remote_code=recipe.model.trust_remote_code,
        chat_template=recipe.tokenizer.chat_template,
        recipe_key=key,
    )


def prepare_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> DataSplits:
    """Tokenised pairs, from the cache where it has them; says what was kept and what was not."""
    if recipe.online is not None:
        raise RecipeError("online: this command needs pairs, and an online run's do not exist before it")
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
    _print_dropped(data, console)
    return data


def _print_dropped(data: DataSplits, console: Console) -> None:
    for source in data.report["train"]["sources"]:
        dropped = ", ".join(f"{entry['rows']:,} {reason}" for reason, entry in source["dropped"].items())
        if dropped:
            console.print(f"  left out of {source['name']}, {source['rows_read']:,} rows: {dropped}")


DataReader = Callable[[Recipe, PreTrainedTokenizerBase, Console], DataSplits]


def prepare_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> DataSplits:
    """Tokenised prompts of an online run; says what was kept and what was not."""
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
    _print_dropped(data, console)
    return data


def prepare(
    recipe: Recipe, console: Console, read_data: DataReader = prepare_data, *, runs_models: bool = True
) -> Prepared:
    """Device, tokenizer and data, in the order that fails soonest. Writes nothing but the token cache.

    A command that runs no models is one process, whatever number the recipe asks for.
    """
    if runs_models:
        _check_number_of_ranks(recipe)
    accelerator = _accelerator(recipe)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    precision = resolve_precision(
        recipe.model.dtype,
        recipe.model.autocast,
        accelerator.device,
        gather_dtype=recipe.distributed.gather_dtype,
    )
    check_optimizer(recipe.optim.name, accelerator.device)
    config = source_config(recipe, policy_model(recipe))
    for source in (policy_model(recipe), reference_model(recipe)):  # before anything is tokenised
        check_source(source)
        check_quantised(recipe, source, accelerator.device)
        check_layers(recipe, source, accelerator.device)
        if recipe.packing.mode == "packed":
            check_packs(source_config(recipe, source))
    strategy = choose_strategy(recipe, config, accelerator.device) if runs_models else ALONE
    if ranks.num_ranks() > 1:
        console.print(f"Strategy: {strategy.sentence()}")
    ranks.require_shared(cache_directory(recipe), "reference.cache_dir")
    with ranks.first_goes_first():  # the others find in the caches what it has fetched and tokenised
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
        precision=precision,
        tokenizer=tokenizer,
        data=data,
        cache_dir=cache_directory(recipe),
        strategy=strategy,
    )
    check_lengths(prepared, config)
    check_vocabulary(prepared, policy_model(recipe), config)
    return prepared


def _check_number_of_ranks(recipe: Recipe) -> None:
    wanted, num_ranks = recipe.distributed.num_processes, ranks.num_ranks()
    if wanted not in ("auto", num_ranks):
        raise RecipeError(
            f"distributed.num_processes: {wanted} are asked for, but this is {num_ranks}; the dpopack "
            "command starts them, a program of your own is started by torchrun"
        )


def _accelerator(recipe: Recipe) -> Accelerator:
    """accelerate's view of this process, which must be ours."""
    num_ranks = ranks.num_ranks()
    accelerator = Accelerator(
        # CUDA or the CPU: neither a Mac's GPU, nor, with several ranks, one process for want of devices.
        cpu=not ranks.uses_cuda(),
        log_with=list(recipe.logging.trackers) or None,
        project_dir=str(recipe.output_dir / "trackers"),
    )
    assert (accelerator.num_processes, accelerator.process_index) == (num_ranks, ranks.rank())
    return accelerator


def check_lengths(prepared: Prepared, config: PretrainedConfig) -> None:
    recipe, online = prepared.recipe, prepared.recipe.online
    longest = longest_sequence(prepared.tables) + (0 if online is None else online.max_new_tokens)
    check_positions(config, longest)
    if prepared.is_packed:
        # A group above the budget gets a row of its own, of at most all its sequences.
        most_sequences = 2 if online is None else online.completions_per_prompt
        longest_row = max(
            recipe.packing.token_budget,
            reference_token_budget(recipe, prepared.device),
            most_sequences * longest,
        )
        check_rows(config, longest_sequence=longest, longest_row=longest_row)


def longest_sequence(tables: Sequence[PairTable]) -> int:
    """Tokens of the longest prompt + completion."""
    longer = [np.maximum(table.chosen_lengths, table.rejected_lengths) for table in tables]
    return max(int((table.prompt_lengths + more).max()) for table, more in zip(tables, longer, strict=True))


def check_vocabulary(prepared: Prepared, source: ModelSource, config: PretrainedConfig) -> None:
    num_embeddings = int(config.get_text_config().vocab_size)
    if len(prepared.tokenizer) <= num_embeddings:
        return
    # Some tokenizers have more entries than the model has rows, and never produce them.
    for table in prepared.tables:
        for pair in range(table.num_pairs):
            largest = max(
                int(ids.max(initial=0))  # an online run's prompts have no completions yet
                for ids in (table.prompt(pair), table.chosen(pair), table.rejected(pair))
            )
            if largest >= num_embeddings:
                raise ModelError(
                    f"{source.recipe_key}: the data has token id {largest}, but {source.path} embeds "
                    f"{num_embeddings} tokens only; use the tokenizer that belongs to the model"
                )


def prepare_policy(prepared: Prepared) -> LoadedModel:
    """The policy as the recipe starts it, on the device, and proof that its rows are exact."""
    return load_and_prove(prepared, policy_model(prepared.recipe))


def load_trained(prepared: Prepared, path: Path) -> LoadedModel:
    """A model that some run has exported, to evaluate it as the recipe's policy."""
    source = model_source(str(path), None, "--model")
    check_source(source)
    check_quantised(prepared.recipe, source, prepared.device)
    config = source_config(prepared.recipe, source)
    check_lengths(prepared, config)
    check_vocabulary(prepared, source, config)
    return load_and_prove(prepared, source)


def load_and_prove(prepared: Prepared, source: ModelSource) -> LoadedModel:
    """A model as the run computes with it, sharded where it shards, and proof that its rows are exact."""
    recipe, precision, device = prepared.recipe, prepared.precision, prepared.device
    loaded = load_source_model(recipe, source, precision=precision, device=device, strategy=prepared.strategy)
    outcome = prove_remembered(
        recipe, source, loaded, precision=precision, device=device, cache_dir=prepared.cache_dir
    )
    outcome.raise_failure()
    prepared.console.print(f"Proof: {outcome.sentence()}")
    return loaded


def prepare_moving_reference(prepared: Prepared) -> MovingReference:
    """The recipe's reference as a second model on the device, for `reference.sync`. Raises ModelError."""
    source, sync = reference_model(prepared.recipe), prepared.recipe.reference.sync
    assert sync is not None
    if source.adapter is not None:
        raise ModelError(
            f"reference.sync: the reference {source.label} is an adapter; merge it first (dpopack merge)"
        )
    loaded = prepare_second_model(prepared)
    return MovingReference(scorer=loaded.scorer, every_steps=sync.every_steps, mixup=sync.mixup)


def prepare_second_model(prepared: Prepared) -> LoadedModel:
    """The recipe's reference on the device, frozen, to be run beside the policy. Raises ModelError."""
    source = reference_model(prepared.recipe)
    check_lengths(prepared, source_config(prepared.recipe, source))
    loaded = load_and_prove(prepared, source)
    loaded.scorer.requires_grad_(False)
    return loaded


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills padded batches; masked everywhere, so any id does."""
    return int(tokenizer.pad_token_id or 0)


def recipe_objective(recipe: Recipe) -> Objective:
    """The recipe's loss. Raises RecipeError when a loss of the user's own cannot be used."""
    options = LossOptions(
        beta=recipe.loss.beta,
        label_smoothing=recipe.loss.label_smoothing,
        f_divergence=recipe.loss.f_divergence,
        f_alpha=recipe.loss.f_alpha,
        discopop_tau=recipe.loss.discopop_tau,
        simpo_gamma=recipe.loss.simpo_gamma,
        cpo_alpha=recipe.loss.cpo_alpha,
    )
    return Objective(
        terms=tuple((load_loss(name, options), factor) for name, factor in recipe.loss.terms),
        options=options,
        weighting=recipe.loss.weighting,
        ld_alpha=recipe.loss.ld_alpha,
    )
