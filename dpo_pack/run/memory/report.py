"""The memory report of `train --dry-run`: an estimate, changes that make the run fit, a measurement on CUDA.

All numbers are for the largest row, because a step computes one row at a time.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.optim import Optimizer

from dpo_pack.data.store import pair_lengths
from dpo_pack.losses import Objective
from dpo_pack.model.attention.select import select_backend
from dpo_pack.model.config import attention_needs, routes_tokens
from dpo_pack.model.layout import Row
from dpo_pack.model.lora import read_adapter
from dpo_pack.model.parallel import DistributedPolicy
from dpo_pack.model.quantize import bits_per_weight, quantization_settings
from dpo_pack.packing.lengths import IntArray
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.recipe.load import Recipe, check_environment, parse_recipe
from dpo_pack.run.memory.estimate import MemoryFacts, RowSize, estimate_memory, memory_shape, state_bytes
from dpo_pack.run.setup import Setup, longest_sequence
from dpo_pack.run.strategy import num_gradients, num_local_ranks
from dpo_pack.system import ranks
from dpo_pack.system.console import format_count
from dpo_pack.system.errors import RecipeError, RunError, is_out_of_memory
from dpo_pack.system.memory import AvailableMemory, host_memory, release_memory

_STEPS_SEARCHED = 500  # `largest_row` searches these first steps; packed rows are nearly full in all steps
_MOST_PROCESSES = 64
# Shards are gathered once a step if a step then needs at most this part of the free memory: an estimate of
# activations can be a quarter too low.
_GATHERED_SHARE = 0.75
LORA_RANK = 16


def print_memory_estimate(setup: Setup, objective: Objective, plan: PackingPlan | None) -> None:
    """Prints the memory that the run needs on one device, the free memory, and changes that make the run fit.

    `plan` is the plan of the first epoch; None if the run is online.
    """
    recipe, console, available = setup.recipe, setup.console, available_memory(setup.device)
    facts, longest_pair = memory_facts(setup, objective, plan)
    estimate, in_host = estimate_memory(recipe, facts), 0.0
    needed = sum(estimate.values())
    if facts.num_shards > 1 and recipe.distributed.cpu_offload:
        in_host = state_bytes(recipe, facts).total
    texts = {
        "parameters": f"the model has {format_count(facts.shape.num_parameters)}",
        "optimizer": recipe.optim.name,
        "gathered weights": f"of {facts.num_shards} shards, {_gathering(facts)}",
        "weights cast": "by autocast",
        "activations": f"of {facts.row.tokens:,} tokens, the largest row",
        "working memory": f"of the head on {facts.row.scored:,} scored tokens, or a layer",
        "overhead": "of the allocator and the device's context",
        "in host memory": "parameters, gradients and optimizer state",
    }
    console.print(f"Memory on one {facts.device.type} device, estimated, see docs/memory.md:")
    for name, num_bytes in (estimate | {"a step": needed, "in host memory": in_host}).items():
        if num_bytes:
            console.print(f"  {name:<17}{format_bytes(num_bytes):>11}  {texts.get(name, '')}".rstrip())
    if recipe.online is not None:
        console.print("  not counted: the completions' keys and values, judges, and models of a server")
    if _keeps_scores(setup):
        console.print(
            "  not counted: attention scores, which are kept because this model has softcaps or sinks; "
            "with them, activations may take 4 times the memory above"
        )
    if available is None:
        console.print("This system does not say how much memory it has")
    elif needed <= available.free:
        console.print(f"It fits: {_what_is_free(available)}")
    else:
        changes = advice(recipe, facts, longest_pair, available.free)
        verdict = "With one of these changes it fits:" if changes else "No change would make it fit."
        console.print(f"It does not fit: {_what_is_free(available)}. {verdict}")
        for overrides, num_bytes in changes:
            console.print(f"  {overrides}: {format_bytes(num_bytes)}")
    host = available_memory(torch.device("cpu"))
    if host is not None and in_host > host.free:
        console.print(
            f"It does not fit in the host's memory: {_what_is_free(host)} for each process. Leave "
            "distributed.cpu_offload out"
        )


def _keeps_scores(setup: Setup) -> bool:
    """Returns whether attention keeps queries x keys scores for its backward pass. Fused kernels do not."""
    needs = attention_needs(setup.policy_facts.config)
    if not (needs.has_softcap or needs.has_sinks):
        return False
    requested, dtype = setup.recipe.model.attention, setup.precision.activations
    choice = select_backend(requested, needs, device=setup.device, dtype=dtype)
    return choice.name == "sdpa" or not setup.is_packed


def _gathering(facts: MemoryFacts) -> str:
    return "all for the whole step" if facts.stays_gathered else "layer by layer"


def _what_is_free(memory: AvailableMemory) -> str:
    return f"{format_bytes(memory.free)} of {format_bytes(memory.total)} are free"


# ------------------------------------------------------------------------------------------ facts of a run


def memory_facts(setup: Setup, objective: Objective, plan: PackingPlan | None) -> tuple[MemoryFacts, int]:
    """Returns the facts of a run for the estimate, and the tokens of its longest pair. Reads no weights."""
    policy, mesh = setup.policy_facts, setup.strategy.mesh
    row, longest_pair = _unknown_row(setup) if plan is None else _largest_row(setup, plan)
    quantised = policy.quantization
    facts = MemoryFacts(
        shape=memory_shape(policy.config, policy.shape, policy.num_parameters),
        row=row,
        device=setup.device,
        lora_rank=_lora_rank(setup),
        # Experts are not linear layers of torch, so bitsandbytes leaves them as they are: an upper limit.
        bits=None if quantised is None or routes_tokens(policy.config) else bits_per_weight(quantised),
        can_shard=quantised is None and setup.reference_facts.quantization is None,
        has_second_model=objective.needs_reference and setup.recipe.reference.sync is not None,
        num_shards=1 if mesh is None else mesh.size(mesh.ndim - 1),
        num_gradients=num_gradients(policy.config) if setup.strategy.name == "ddp" else 1,
    )
    return replace(facts, stays_gathered=_can_stay_gathered(setup.recipe, facts)), longest_pair


def _can_stay_gathered(recipe: Recipe, facts: MemoryFacts) -> bool:
    """Whether every device has memory for all gathered weights during a step. All ranks must call it."""
    if facts.num_shards == 1:
        return False
    available = available_memory(facts.device)
    needed = sum(estimate_memory(recipe, replace(facts, stays_gathered=True)).values())
    lacking = float("inf") if available is None else needed - _GATHERED_SHARE * available.free
    return ranks.largest_numbers(lacking)[0] <= 0


def stays_gathered(setup: Setup, objective: Objective, plan: PackingPlan | None) -> bool:
    """Returns whether a run gathers its shards once a step, and prints it. All ranks must call it."""
    if not setup.strategy.shards:
        return False
    facts, _ = memory_facts(setup, objective, plan)
    setup.console.print(f"Shards: gathered {_gathering(facts)} (the devices' free memory decides)")
    return facts.stays_gathered


def _lora_rank(setup: Setup) -> int | None:
    new, saved = setup.recipe.model.lora, setup.policy_facts.adapter
    if new is not None:
        return new.r
    return None if saved is None else read_adapter(saved, setup.policy_facts.recipe_key).rank


def _unknown_row(setup: Setup) -> tuple[RowSize, int]:
    """Returns the size of the largest possible row of an online run, and the tokens of its longest pair.

    The pairs of an online run do not exist yet, so the real sizes are unknown.
    """
    assert setup.recipe.online is not None
    longest = 2 * (longest_sequence(setup.tables) + setup.recipe.online.max_new_tokens)
    tokens = max(setup.recipe.packing.token_budget, longest)
    return RowSize(tokens=tokens, keys=tokens, scored=tokens), longest


def _largest_row(setup: Setup, plan: PackingPlan) -> tuple[RowSize, int]:
    """Returns the size of this rank's largest row, and the tokens of the longest pair on any rank."""
    pairs = largest_row(plan, rank=ranks.rank())
    lengths = pair_lengths(setup.data.train).select(pairs)
    tokens = plan.tokens_in(pairs)
    is_shared = setup.is_packed and setup.recipe.shares_prompts
    size = RowSize(
        tokens=tokens,
        keys=int(lengths.row_tokens(share_prompt=False).sum()) if is_shared else tokens,
        scored=int(lengths.completion_tokens().sum()),
    )
    return size, int(plan.row_tokens[np.unique(plan.order)].max())


def largest_row(plan: PackingPlan, *, rank: int) -> IntArray:
    """Returns the pairs of the row with the most tokens in the first steps, or the longest pair if longer."""
    rows = [row for ranked in islice(plan, _STEPS_SEARCHED) for row in ranked[rank]]
    oversize = plan.oversize_pairs
    if len(oversize):
        rows.append(oversize[[int(plan.row_tokens[oversize].argmax())]])
    return max(rows, key=plan.tokens_in, default=plan.pairs(0)[:1])


# ------------------------------------------------------------------------------------------------- advice


# Overrides of a recipe, and the fields of MemoryFacts that these overrides change.
Change = tuple[list[str], dict[str, Any]]


def advice(
    recipe: Recipe, facts: MemoryFacts, longest_pair: int, available_bytes: float
) -> list[tuple[str, float]]:
    """Returns recipe overrides, and the bytes that the run then needs, for each change that makes it fit.

    If no single change is enough, it returns one set of changes: of the smallest sets that are enough, the
    cheapest. If all changes together are not enough, it returns []. Changes that the recipe's other settings
    do not allow are left out.
    """
    changes = _changes(recipe, facts, longest_pair)
    for count in range(1, len(changes) + 1):
        tried = [_first_fit(recipe, facts, each, available_bytes) for each in combinations(changes, count)]
        fitting = [found for found in tried if found is not None]
        if fitting:
            return fitting if count == 1 else fitting[:1]
    return []


def _changes(recipe: Recipe, facts: MemoryFacts, longest_pair: int) -> list[list[Change]]:
    """Returns the changes of a recipe that save memory, each a list of alternatives, smallest saving first.

    First come changes that only cost time, then those that change numerics, that need more devices, and that
    train another model.
    """
    row, rows_per_step = facts.row, recipe.packing.rows_per_step
    shorter_rows: list[Change] = []
    tokens = row.tokens
    while tokens > longest_pair:  # a pair is never cut
        tokens = max(tokens // 2, longest_pair)
        overrides, part = [f"packing.token_budget={tokens}"], tokens / row.tokens
        if rows_per_step is not None:  # rows are nearly full, so a step has about as many pairs as before
            overrides.append(f"packing.rows_per_step={round(rows_per_step / part)}")
        shorter = RowSize(tokens=tokens, keys=round(part * row.keys), scored=round(part * row.scored))
        shorter_rows.append((overrides, {"row": shorter}))
    shards: list[Change] = []
    if facts.can_shard and facts.device.type == "cuda" and recipe.optim.name == "adamw":
        num_shards = 2 * facts.num_shards
        while num_shards <= _MOST_PROCESSES:
            overrides = [f"distributed.num_processes={num_shards}", "distributed.strategy=fsdp2"]
            shards.append((overrides, {"num_shards": num_shards}))
            num_shards *= 2
    is_fp32 = recipe.model.dtype in ("auto", "float32") and facts.bits is None
    # With an adapter, policy and reference are one base model. So the reference cannot be offloaded alone.
    moves_base = recipe.online is not None and recipe.online.offload_reference and not recipe.reference.path
    can_adapt = facts.lora_rank is None and not moves_base
    nf4: dict[str, Any] = {"bits": bits_per_weight(quantization_settings("nf4").to_dict())}
    can_quantize = facts.lora_rank is not None and facts.bits is None and facts.num_shards == 1
    return [
        [] if recipe.model.gradient_checkpointing is True else [(["model.gradient_checkpointing=true"], {})],
        shorter_rows,
        [(["model.dtype=bfloat16"], {})] if is_fp32 else [],
        shards,
        [([f"model.lora={{r: {LORA_RANK}}}"], {"lora_rank": LORA_RANK})] if can_adapt else [],
        [(["model.quantize=nf4"], nf4)] if can_quantize else [],
    ]


def _first_fit(
    recipe: Recipe, facts: MemoryFacts, changes: Sequence[list[Change]], available_bytes: float
) -> tuple[str, float] | None:
    """Returns the first combination of alternatives that fits, or None. Fewer devices, then longer rows, are
    tried first."""
    for alternatives in product(*reversed(changes)):
        overrides: list[str] = []
        fields: dict[str, Any] = {}
        for more_overrides, more_fields in reversed(alternatives):
            overrides += more_overrides
            fields |= more_fields
        try:
            changed = parse_recipe(recipe.model_dump(mode="json"), overrides)
            check_environment(changed)
        except RecipeError:
            continue
        needed = sum(estimate_memory(changed, replace(facts, **fields)).values())
        if needed <= available_bytes:
            return shlex.join(overrides), needed  # quoted for the command line
    return None


# -------------------------------------------------------------------------------------------- measurement


def available_memory(device: torch.device) -> AvailableMemory | None:
    """Returns the memory that a rank may use. Ranks on CPUs divide the machine's memory equally.

    Returns None if the system does not report its memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return AvailableMemory(free=free + torch.cuda.memory_reserved(device), total=total)
    machine = host_memory()
    if machine is None:
        return None
    num_here = num_local_ranks()
    return AvailableMemory(free=machine.free // num_here, total=machine.total // num_here)


def print_measured_memory(
    policy: DistributedPolicy, optimizer: Optimizer, row: Row, device: torch.device, console: Console
) -> None:
    """Runs the largest row forward and backward on CUDA, with optimizer state in memory; prints the peak.

    Weights do not change: the backward pass begins with a gradient of zero, and the learning rate is zero.
    Every rank must call it. Raises RunError if the row does not fit.
    """
    release_memory()
    try:
        hold_optimizer_state(optimizer)
        torch.cuda.reset_peak_memory_stats(device)
        with policy.gathered(), policy.accumulating(is_last=True):
            policy.idle(row)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"the largest row, {row.num_tokens:,} tokens, does not fit in this device's memory; set "
            "model.gradient_checkpointing: true, lower packing.token_budget, or see docs/memory.md"
        ) from error
    used = torch.cuda.max_memory_allocated(device)
    held = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    console.print(
        f"Measured on the largest row, {row.num_tokens:,} tokens: {format_bytes(used)} at the peak; "
        f"torch held {format_bytes(held)}, and {format_bytes(total - free)} of the device's "
        f"{format_bytes(total)} are in use"
    )


def hold_optimizer_state(optimizer: Optimizer) -> None:
    """Allocates gradients and optimizer state as training does in its first step. Weights do not change."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is None:  # an existing gradient is zero, see model/parallel.py
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def format_bytes(num_bytes: float) -> str:
    """Returns a text such as 640 KiB, 12 MiB, 0.31 GiB or 104.6 GiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB"
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.{1 if num_bytes >= 10 * 2**30 else 2}f} GiB"
