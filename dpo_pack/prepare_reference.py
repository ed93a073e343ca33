"""The reference stage of a run: the cache, filled with what the recipe's pairs lack in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dpo_pack
from dpo_pack import ranks
from dpo_pack.console import format_seconds
from dpo_pack.data.store import PairTable
from dpo_pack.errors import UnsupportedModelError
from dpo_pack.model_config import check_rows
from dpo_pack.models import (
    LoadedModel,
)
from dpo_pack.prepare import (
    Prepared,
    check_lengths,
    check_vocabulary,
    load_and_prove,
    longest_sequence,
    pad_token_id,
)
from dpo_pack.recipe_models import (
    ModelSource,
    model_namespace,
    needs_token_logps,
    reference_model,
    reference_token_budget,
    source_config,
)
from dpo_pack.reference import FrozenReference
from dpo_pack.reference_cache import ReferenceCache, namespace_digest
from dpo_pack.reference_fill import BudgetSearch, fill_cache
from dpo_pack.reference_pass import PassSettings
from dpo_pack.reference_work import ReferenceWork, find_work


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """The filled cache, and what filling it took."""

    cache: ReferenceCache
    per_token: bool  # the run's loss weighs single tokens, and their values are there
    num_computed: int  # sequences
    num_cached: int  # sequences that were there already
    seconds: float


def resume_reference(prepared: Prepared, frozen: Path) -> tuple[FrozenReference, float]:
    """The values a run was frozen with, and those of pairs that are held out only since; seconds this took.

    Raises CacheError when the file is missing or damaged.
    """
    reference = FrozenReference.load(frozen, per_token=needs_token_logps(prepared.recipe))
    lacking = [held_out.pairs for held_out in prepared.data.eval if not reference.covers(held_out.pairs)]
    if not ranks.any_rank(bool(lacking)):
        return reference, 0.0
    filled = prepare_reference(prepared, None, tables=lacking)
    added = FrozenReference.take(filled.cache, lacking, per_token=filled.per_token)
    return reference.joined(added), filled.seconds


def prepare_reference(
    prepared: Prepared, policy: LoadedModel | None, *, tables: Sequence[PairTable] | None = None
) -> ReferencePass:
    """Make sure the cache has every reference log-prob of the recipe's pairs, computing what it lacks.

    `policy` is the policy as it starts, when the caller has it loaded already and `reference.path` is null.
    A reference that is loaded here is gone again when this returns. `tables`: of these pairs alone.
    """
    recipe, console = prepared.recipe, prepared.console
    source, per_token = reference_model(recipe), needs_token_logps(recipe)
    config = source_config(recipe, source)
    check_lengths(prepared, config)
    check_vocabulary(prepared, source, config)
    namespace = prepared_namespace(prepared)
    cache = ReferenceCache(prepared.cache_dir, namespace)
    cache.note_use(source.label)
    work = _agreed_work(prepared.tables if tables is None else tables, cache, per_token=per_token)
    todo = work.num_missing
    console.print(
        f"Reference log-probs: {work.num_cached:,} of {work.num_unique:,} sequences cached"
        f"{f', {todo:,} to compute' if todo else ''}"
    )
    begun = time.monotonic()
    if todo:
        cache.check_writable()
        loaded = policy or load_and_prove(prepared, source)
        with loaded.as_reference():
            fill_cache(
                cache,
                work,
                loaded.scorer,
                _pass_settings(prepared, loaded, per_token=per_token),
                search=_budget_search(prepared, source, namespace),
                console=console,
            )
        for names in ranks.every_rank_says(cache.named_parts):  # what the others computed is used next
            cache.named_parts |= names
    seconds = time.monotonic() - begun
    if todo:
        rate = todo / max(seconds, 1e-9)
        console.print(f"Reference pass: {todo:,} sequences in {format_seconds(seconds)}, {rate:,.0f}/s")
    return ReferencePass(
        cache=cache, per_token=per_token, num_computed=todo, num_cached=work.num_cached, seconds=seconds
    )


def prepared_namespace(prepared: Prepared) -> dict[str, Any]:
    """What the recipe's reference log-probs depend on besides token ids."""
    recipe = prepared.recipe
    return model_namespace(
        recipe, reference_model(recipe), precision=prepared.precision, cache_dir=prepared.cache_dir
    )


def _agreed_work(tables: Sequence[PairTable], cache: ReferenceCache, *, per_token: bool) -> ReferenceWork:
    """What is missing, as the first process sees it: another may look later, when some is there already."""
    work = find_work(cache, tables, per_token=per_token)
    return replace(work, missing=ranks.first_says(work.missing))


def _pass_settings(prepared: Prepared, loaded: LoadedModel, *, per_token: bool) -> PassSettings:
    recipe = prepared.recipe
    token_budget = reference_token_budget(recipe, prepared.device)
    return PassSettings(
        token_budget=token_budget,
        share_prompt=recipe.packing.share_prompt,
        pad_token_id=pad_token_id(prepared.tokenizer),
        device=prepared.device,
        per_token=per_token,
        rank=ranks.rank(),
        num_ranks=ranks.num_ranks(),
        in_lockstep=prepared.strategy.shards,
        metadata={
            "origin": f"dpo-pack {dpo_pack.__version__}",
            "attention": loaded.attention.name,
            "device": prepared.device.type,
            "token_budget": str(token_budget),
        },
    )


def _budget_search(prepared: Prepared, source: ModelSource, namespace: dict[str, Any]) -> BudgetSearch | None:
    """For `reference.token_budget: auto` where memory is the device's own."""
    recipe, device = prepared.recipe, prepared.device
    if recipe.reference.token_budget != "auto" or device.type != "cuda" or prepared.strategy.shards:
        return None  # of a sharded model no rank can try rows by itself
    properties = torch.cuda.get_device_properties(device)
    setting = {
        "model": namespace,
        "device": [properties.name, properties.total_memory],
        "rows": [recipe.model.attention, recipe.packing.mode, recipe.packing.share_prompt],
    }
    config, longest = source_config(recipe, source), longest_sequence(prepared.tables)

    def is_exact(token_budget: int) -> bool:
        if not prepared.is_packed:
            return True
        try:
            check_rows(config, longest_sequence=longest, longest_row=token_budget)
        except UnsupportedModelError:
            return False
        return True

    return BudgetSearch(
        memo_path=prepared.cache_dir / "reference_budgets.json",
        key=namespace_digest(setting),
        is_exact=is_exact,
    )
