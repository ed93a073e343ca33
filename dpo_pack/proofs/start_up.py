"""Proves on small random rows that packing several pairs in a row changes no log-prob on this machine.

Nobody would see attention leak between pairs: in DPO the first loss is log 2 even with a leak, because policy
and reference leak in the same way. Each proof runs the real model with training's attention.

Legend: S sequences, each a (context, completion) of token ids, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack import proofs
from dpo_pack.model.config import attention_names, routes_tokens
from dpo_pack.model.fast_layers import outermost_layers, stock_layers, text_model
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.recurrence import torch_recurrences
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs import PADDED_REMEDY, Proof, image_groups, pair_sums, proof_row, random_groups
from dpo_pack.proofs.layers import prove_layers
from dpo_pack.system.errors import is_out_of_memory, one_line

# Rounding is measured this often, because it varies, above all if it makes a router choose another expert.
_NUM_DRAWS = 4
# The part of a pair in which a token changes (0 context, 1 chosen, 2 rejected), and which sequences have it.
_PARTS = {1: [0], 2: [1], 0: [0, 1]}


def prove(scorer: CompletionLogps, device: torch.device) -> list[Proof]:
    """Runs all proofs, in an order in which an early failure explains later failures. Padded batches use the
    model's own attention, one sequence in each row, so only two proofs run."""
    with random_groups(scorer, device) as groups:
        results: list[Proof] = []
        if scorer.backend is not None:
            results = prove_layers(scorer, groups, device)
            if not results[0].passed:
                return results
            results.append(prove_isolation(scorer, groups, device))
        results += [prove_causality(scorer, groups, device), prove_equivalence(scorer, groups, device)]
        return results if scorer.vision is None else [*results, prove_images(scorer, device)]


def compiling_obstacle(scorer: CompletionLogps, device: torch.device) -> str | None:
    """Returns why torch cannot compile the layers or the head; None if it can, or if it is not to compile.
    Computes a small row and gradients, which else compile in the first step, perhaps hours after the start.
    """
    if not scorer.is_compiled:
        return None
    trained = [p for p in outermost_layers(text_model(scorer.model))[0].parameters() if p.requires_grad]
    # The first layer's gradients are enough: to get them, torch runs the backward of all later layers. In a
    # sharded model the graph has the gathered weights, not the shards, so `inputs` cannot name a layer's.
    inputs = None if is_sharded(scorer.model) else trained or None
    with random_groups(scorer, device) as groups, torch._dynamo.config.patch(suppress_errors=False):
        try:
            sums = pair_sums(scorer, groups, device)
            if sums.requires_grad:  # not those of a reference
                sums.sum().backward(inputs=inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return one_line(getattr(error, "inner_exception", error))
        finally:
            scorer.zero_grad(set_to_none=True)
    return None


# ------------------------------------------------------------------------------------------------ leaks
# No token may depend on other pairs of its row or on later tokens. In dense models, log-probs that must not
# change keep every bit. In a mixture of experts a changed token changes the last bits of all tokens, so the
# bound is a multiple of the noise, which is the change of log-probs that no leak can reach.


@torch.no_grad()
def prove_isolation(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that a pair's log-probs depend only on the pair's own tokens: changes one token at a time.
    A leak reaches only tokens behind the changed one. So in a mixture of experts a change before it is noise,
    and both orders of the pairs are used: the same sequences stand before and behind."""
    has_noise, before, behind = routes_tokens(scorer.model.config), list[Tensor](), list[Tensor]()
    moves = {part: torch.zeros(2, device=device) for part in _PARTS}
    for ordered in (groups, groups[::-1]) if has_noise else (groups,):
        whole = pair_sums(scorer, ordered, device)
        for pair, (part, own) in itertools.product(range(len(ordered)), _PARTS.items()):
            change = (pair_sums(scorer, _with_change(ordered, pair, part), device) - whole).abs()
            # It is enough if one pair changes: in bf16 two tokens at one position may have the same logit.
            moves[part] = torch.maximum(moves[part], change[pair])
            before.append(change.flatten()[: 2 * pair + own[0]])
            behind.append(change.flatten()[2 * pair + own[-1] + 1 :])
    moved = float(torch.cat([moves[part][own] for part, own in _PARTS.items()]).min())
    changes = torch.cat(behind if has_noise else before + behind)
    measured = _leak(scorer, changes, torch.cat(before), moved, "other pairs", "its own pair")
    return Proof(name="isolation", **measured, remedy=PADDED_REMEDY)


@torch.no_grad()
def prove_causality(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that no token sees a later one: new last tokens, of one half of the pairs and then of the other,
    change no log-prob of earlier tokens. In a mixture of experts the other half's change is noise."""
    lengths = [len(completion) for group in groups for completion in group.completions]
    whole = scorer(proof_row(scorer, groups, device)).token_logps
    lasts, earlier, others = [], [], []
    for half in (range(len(groups) // 2), range(len(groups) // 2, len(groups))):
        changed = list(groups)
        for pair, part in itertools.product(half, (1, 2)):
            changed = _with_change(changed, pair, part)
        change = (scorer(proof_row(scorer, changed, device)).token_logps - whole).abs()
        for sequence, tokens in enumerate(change.split(lengths)):
            if sequence // 2 in half:
                earlier.append(tokens[:-1])
                lasts.append(tokens[-1:])
            else:
                others.append(tokens)
    noise, moved = torch.cat(others), float(torch.cat(lasts).max())
    if not routes_tokens(scorer.model.config):
        earlier += others
    measured = _leak(scorer, torch.cat(earlier), noise, moved, "earlier tokens", "the last token")
    remedy = "the model's tokens see later tokens, and only causal models can be trained; choose one"
    return Proof(name="causality", **measured, remedy=remedy)


def _leak(
    scorer: CompletionLogps, changes: Tensor, noise: Tensor, moved: float, others: str, own: str
) -> dict[str, Any]:
    """Returns fields of a Proof: when a token was replaced, the log-probs of `others` moved by `changes`,
    which must be 0, and that of `own` by `moved`, which must not. In a mixture of experts rounding can send a
    token to other experts: there the mean of `changes` without the largest tenth must be small beside
    `noise`."""
    leaks, bound, keeps = float(changes.max()), 0.0, "nothing"
    if routes_tokens(scorer.model.config):
        eps = torch.finfo(scorer.compute_dtype).eps
        bound = max(proofs.LEAK_NOISES * float(noise.mean()), proofs.LEAK_EPSILONS * eps)
        keeps = f"<= {bound:.0e}"
        if math.isfinite(leaks):
            leaks = float(changes.sort().values[: math.ceil(0.9 * len(changes))].mean())
    return {
        "passed": leaks <= bound and moved > 0.0,
        "numbers": {f"change of {others}": leaks, f"change of {own}": moved},
        "bound": f"{others} change by {keeps}, {own} by more than 0",
    }


def _with_change(groups: Sequence[Group], pair: int, part: int) -> list[Group]:
    """Returns the groups with one changed token in one pair: the last of a part (see `_PARTS`). The row keeps
    its shape, so bits compare."""
    parts = [np.array(ids) for ids in (groups[pair].context, *groups[pair].completions)]
    changed, other = parts[part], parts[-part]  # of a completion, the other completion
    # The last token of a context is within the shortest sliding window.
    avoided = (changed[-1], other[min(len(changed), len(other)) - 1])
    changed[-1] = next(token for token in range(3) if token not in avoided)  # every vocabulary has 0, 1, 2
    return [*groups[:pair], Group(context=parts[0], completions=tuple(parts[1:])), *groups[pair + 1 :]]


# ------------------------------------------------------------------------------------------ equivalence


@torch.no_grad()
def prove_equivalence(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that a row's log-probs equal those of each sequence alone under the model's own eager attention.
    Rounding in 16 bits hides a position that is wrong by one: fp32 parameters are proved in fp32, too."""
    numbers, passed = distance_of_row(scorer, groups, device)
    bound = f"mean error a token <= {proofs.ROUNDINGS:g} x rounding"
    if scorer.compute_dtype == torch.float32:
        bound = f"max error <= {proofs.FLOAT32_BOUND:.0e}, or {bound}"
    elif scorer.gather_dtype is None and (
        next(scorer.model.parameters()).dtype == torch.float32 or not is_sharded(scorer.model)
    ):
        with scorer.in_float32():
            exact_numbers, is_exact = distance_of_row(scorer, groups, device)
        numbers |= {f"{name}, in float32": number for name, number in exact_numbers.items()}
        bound += f"; in float32 max error <= {proofs.FLOAT32_BOUND:.0e}, or the same"
        passed = passed and is_exact
    remedy = f"{PADDED_REMEDY}; or try model.attention: sdpa"
    if scorer.backend is None:
        remedy = "the family changes its logits, or what right padding computes; report the family"
    return Proof(name="equivalence", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


@torch.no_grad()
def prove_images(scorer: CompletionLogps, device: torch.device) -> Proof:
    """Proves the same of prompts with one image, two and none, and that exchanged images are noticed."""
    groups = image_groups(scorer)
    proof = prove_equivalence(scorer, groups, device)
    exchanged = [replace(group, images=group.images[::-1]) for group in groups]
    exact = proof.numbers.get("max error, in float32")
    with contextlib.nullcontext() if exact is None else scorer.in_float32():
        moved = (pair_sums(scorer, exchanged, device) - pair_sums(scorer, groups, device))[1].abs().min()
    if exact is None:  # rounding of 16 bits can hide the change
        exact = proof.numbers["max error"] if scorer.compute_dtype == torch.float32 else 0.0
    return replace(
        proof,
        name="images",
        passed=proof.passed and float(moved) > proofs.IMAGE_CHANGES * exact,
        numbers=proof.numbers | {"change by exchanged images": float(moved)},
        bound=f"{proof.bound}; exchanged images change more than {proofs.IMAGE_CHANGES * exact:.0e}",
        remedy="leave out model.images, and report the model's family",
    )


def distance_of_row(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[dict[str, float], bool]:
    """Returns (errors of the sequences' log-probs in one row, compared with each sequence alone; whether they
    are small enough). A mixture of experts leaves out the worst sequence. In fp32, rounding is measured only
    above `FLOAT32_BOUND`."""
    tokens = torch.tensor([len(ids) for group in groups for ids in group.completions], device=device)  # [S]
    in_row = pair_sums(scorer, groups, device).flatten()  # first: its errors about images say what to do
    alone = _logps_alone(scorer, groups, device)
    errors = (in_row - alone).abs()
    by_token = (errors / tokens).sort().values
    if routes_tokens(scorer.model.config):
        by_token = by_token[:-1]
    largest, mean = float(errors.max()), float(by_token.mean())
    numbers = {"max error": largest, "mean error a token": mean}
    if scorer.compute_dtype == torch.float32 and largest <= proofs.FLOAT32_BOUND:
        return numbers, True
    moved = (_rounded_otherwise(scorer, groups, device) - alone).abs()
    by_rounding = float((moved / tokens).mean(dim=1).max())
    is_rounding = math.isfinite(largest) and mean <= proofs.ROUNDINGS * by_rounding
    return {**numbers, "rounding a token": by_rounding, "rounding": float(moved.max())}, is_rounding


def _logps_alone(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Tensor:
    """Returns [S] float64 log-probs, a sequence in a batch of one, from the model's own full logits."""
    sums = []
    with as_published(scorer.model):
        for group, completion in ((each, ids) for each in groups for ids in each.completions):
            begin = len(group.context)
            ids = torch.from_numpy(np.concatenate((group.context, completion)))[None].to(device)
            with scorer.autocasting(device):
                images = scorer.vision.of_sequence(scorer.model, group, ids) if scorer.vision else {}
                run = functools.partial(scorer.model, input_ids=ids, use_cache=False, **images)
                logits: Tensor = scorer.with_own_weights(run).logits[0, begin - 1 : -1]
            logps = logits.float().log_softmax(dim=-1).gather(1, ids[0, begin:, None])
            sums.append(logps.double().sum())
    return torch.stack(sums)


def _rounded_otherwise(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Tensor:
    """Returns [draws, S] log-probs of sequences alone, where embeddings and each layer's output get random
    relative errors of up to half the dtype's epsilon."""
    eps = torch.finfo(scorer.compute_dtype).eps

    def perturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (perturb(module, inputs, output[0]), *output[1:])
        return output * (1 + eps * (torch.rand_like(output) - 0.5))

    layers = [module for module in scorer.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    changed = (scorer.model.get_input_embeddings(), *layers)
    hooks = [module.register_forward_hook(perturb) for module in changed]
    try:
        return torch.stack([_logps_alone(scorer, groups, device) for _ in range(_NUM_DRAWS)])
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def as_published(model: PreTrainedModel) -> Iterator[None]:
    """In this context the model's layers compute as its family's code says, with eager attention."""
    ours = attention_names(model.config)
    model.set_attn_implementation("eager")
    try:
        with torch_recurrences(model), stock_layers(model):
            yield
    finally:
        model.set_attn_implementation(ours)
