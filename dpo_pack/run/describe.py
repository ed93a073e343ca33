"""Prints a description of a run before its first step."""

from __future__ import annotations

import functools

import torch

from dpo_pack.model.routing import router_sentence
from dpo_pack.model.scorer import LoadedModel
from dpo_pack.packing.plan import PackingPlan
from dpo_pack.run.prepare import Prepared
from dpo_pack.system.console import format_count, print_detail
from dpo_pack.system.machine import bfloat16_instructions
from dpo_pack.training.optim import num_warmup_steps


def describe_run(
    prepared: Prepared, policy: LoadedModel, plan: PackingPlan | None, *, num_steps: int
) -> None:
    """Prints the policy, the steps, and notes on settings whose effect the user may not expect.

    `plan` is the plan of the first epoch; None if the run is online.
    """
    recipe, console = prepared.recipe, prepared.console
    parameters = list(policy.scorer.parameters())
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    num_parameters = sum(p.numel() for p in parameters)
    if prepared.policy_facts.quantize is not None:  # two weights of 4 bits count as one element
        num_parameters = prepared.policy_facts.num_parameters + num_trained
    size = f"{format_count(num_parameters)} parameters"
    if policy.adapter is not None:
        size += f", of which the adapter's {format_count(num_trained)} are trained"
        if policy.adapter.left_out:
            size += f"; all-linear leaves out {', '.join(policy.adapter.left_out)}, which peft refuses here"
    precision = str(prepared.precision.parameters).removeprefix("torch.")
    if prepared.policy_facts.quantize is not None:
        precision += f" with linear layers in {prepared.policy_facts.quantize}"
    if prepared.precision.autocast is not None:
        precision += f" with {str(prepared.precision.autocast).removeprefix('torch.')} autocast"
    if prepared.precision.gathered is not None:
        precision += f" gathered in {str(prepared.precision.gathered).removeprefix('torch.')}"
    attention = policy.attention
    loss = " + ".join(f"{weight:g} {name}" if weight != 1 else name for name, weight in recipe.loss.terms)
    warmup_steps = num_warmup_steps(
        num_steps, warmup_ratio=recipe.optim.warmup_ratio, warmup_steps=recipe.optim.warmup_steps
    )
    warm_up = f", {warmup_steps:,} steps of warm-up" if warmup_steps else ", no warm-up"
    layers = "; layers: compiled" if policy.scorer.is_compiled else ""
    console.print(
        f"Policy: {recipe.model.path}, {size}, {precision} on {prepared.device}; attention: {attention.name}"
        f"{layers}"
    )
    # On a GPU a slower attention backend costs money, so the reason is always printed there.
    say_why = console.print if prepared.device.type == "cuda" else functools.partial(print_detail, console)
    say_why(f"  attention is {attention.name}: {attention.reason}")
    if policy.not_compiled is not None:
        say_why(f"  torch.compile failed, so the model runs uncompiled: {policy.not_compiled}")
    for kernel in policy.kernels:
        say_why(f"  recurrent layers: {kernel}")
    packing = recipe.packing
    rows, pairs = f"{packing.rows_per_step} rows", f"{packing.pairs_per_step} pairs"
    step_size = rows if packing.scope == "epoch" else pairs
    console.print(
        f"Training: {num_steps:,} steps of {step_size}, "
        f"{packing.mode} rows of up to {packing.token_budget:,} tokens; "
        f"loss {loss}, beta {recipe.loss.beta:g}, lr {recipe.optim.lr:g} {recipe.optim.schedule}{warm_up}"
    )
    router = router_sentence(policy.model, recipe.loss.router_aux_coef, prepared.policy_facts.balance)
    if router is not None:
        console.print(router)
    is_bfloat16 = prepared.precision.activations == torch.bfloat16
    if is_bfloat16 and prepared.device.type == "cpu" and bfloat16_instructions() == ():
        console.print(
            "Note: this CPU has no instructions for bfloat16 and converts to float32 and back, which takes "
            "longer than model.dtype: float32 with model.autocast: none"
        )
    if recipe.packing.share_prompt and not recipe.shares_prompts:
        console.print("Note: prompts are not shared, because model.lora.dropout is above 0")
    oversize = () if plan is None else plan.oversize_pairs
    if plan is not None and len(oversize):
        longest = int(plan.row_tokens[oversize].max())
        console.print(
            f"Note: {len(oversize):,} pairs exceed packing.token_budget ({packing.token_budget:,}), so "
            f"each of them gets its own row; the longest has {longest:,} tokens; nothing is cut"
        )
