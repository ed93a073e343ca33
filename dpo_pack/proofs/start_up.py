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
        results += [prove_isolation(scorer, groups, device), prove_equivalence(scorer, groups, device)]
        if scorer.vision is not None:
            results.append(prove_equivalence(scorer, image_groups(scorer), device))
        return results


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


@torch.no_grad()
def prove_isolation(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that log-probs depend only on earlier tokens of their own sequence: changes one token at a time.
    In dense models log-probs that must not change keep every bit. In a mixture of experts any change moves
    the last bits of all tokens, and sends some to other experts: there the mean change, without the largest
    tenth, must be small beside the noise. A leak reaches only later tokens of the row, so the change of the
    sequences before the changed token is noise. Both orders of the pairs are tried."""
    has_noise = routes_tokens(scorer.model.config)
    num_changed = len(groups) if scorer.backend is not None else 2  # a padded batch has a line a sequence
    moves = {part: torch.zeros(2, device=device) for part in _PARTS}
    changes: dict[str, list[Tensor]] = {"before": [], "other pairs": [], "earlier tokens": []}
    for ordered in (groups, groups[::-1]) if has_noise else (groups,):
        whole, of_sequence = _logps(scorer, ordered, device)
        for pair, (part, own) in itertools.product(range(num_changed), _PARTS.items()):
            change = (_logps(scorer, _with_change(ordered, pair, part), device)[0] - whole).abs()
            before, behind = of_sequence < 2 * pair + own[0], of_sequence > 2 * pair + own[-1]
            changes["before"].append(change[before])
            changes["other pairs"].append(change[behind if has_noise else before | behind])
            if part > 0:  # of its completion all but the changed token, which is the last one, and the sum
                changes["earlier tokens"].append(change[~before & ~behind][:-2])
            # It is enough if one pair changes: in bf16 two tokens at one position may have the same logit.
            moves[part] = torch.maximum(moves[part], change[-2 * len(ordered) :].view(-1, 2)[pair])

    def leak(change: Tensor) -> float:
        largest = float(change.max())
        if not has_noise or not math.isfinite(largest):
            return largest
        return float(change.sort().values[: math.ceil(0.9 * len(change))].mean())

    noise, bound = float(torch.cat(changes.pop("before")).mean()), 0.0
    if has_noise:
        bound = max(proofs.LEAK_NOISES * noise, proofs.LEAK_EPSILONS * torch.finfo(scorer.compute_dtype).eps)
    leaks = {name: leak(torch.cat(parts)) for name, parts in changes.items()}
    moved = float(torch.cat([moves[part][own] for part, own in _PARTS.items()]).min())
    remedy = PADDED_REMEDY if scorer.backend is not None else "report the model's family"
    if leaks["earlier tokens"] > bound:
        remedy = "the model's tokens see later tokens, and only causal models can be trained; choose one"
    return Proof(
        name="isolation",
        passed=all(leak <= bound for leak in leaks.values()) and moved > 0.0,
        numbers={f"change of {name}": leak for name, leak in leaks.items()}
        | {"change of its own pair": moved},
        bound=f"{' and '.join(leaks)} change by <= {bound:.0g}, its own pair by more than 0",
        remedy=remedy,
    )


def _logps(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns log-probs of all tokens and then of all sequences in one row, and the sequence of each."""
    out = scorer(proof_row(scorer, groups, device))
    sequences = torch.arange(len(out.sums), device=device)
    of_sequence = torch.cat((sequences.repeat_interleave(out.num_tokens), sequences))
    return torch.cat((out.token_logps.double(), out.sums)), of_sequence


def _with_change(groups: Sequence[Group], pair: int, part: int) -> list[Group]:
    """Returns the groups with one changed token in one pair: the last of a part (see `_PARTS`). The row keeps
    its shape, so bits compare."""
    parts = [np.array(ids) for ids in (groups[pair].context, *groups[pair].completions)]
    changed, other = parts[part], parts[-part]  # of a completion, the other completion
    # The last token of a context is within the shortest sliding window.
    avoided = (changed[-1], other[min(len(changed), len(other)) - 1])
    changed[-1] = next(token for token in range(3) if token not in avoided)  # every vocabulary has 0, 1, 2
    one = replace(groups[pair], context=parts[0], completions=tuple(parts[1:]))
    return [*groups[:pair], one, *groups[pair + 1 :]]


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
    if has_images := any(group.images for group in groups):
        bound += f"; exchanged images change more than {proofs.IMAGE_CHANGES:g} x the error in float32"
        remedy = "leave out model.images, and report the model's family"
    name = "images" if has_images else "equivalence"
    return Proof(name=name, passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def distance_of_row(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[dict[str, float], bool]:
    """Returns (errors of the sequences' log-probs in one row, compared with each sequence alone; whether they
    are small enough, and exchanged images change log-probs). A mixture of experts leaves out the worst
    sequence. In fp32, rounding is measured only above `FLOAT32_BOUND`."""
    tokens = torch.tensor([len(ids) for group in groups for ids in group.completions], device=device)  # [S]
    in_row = pair_sums(scorer, groups, device).flatten()  # first: its errors about images say what to do
    alone = _logps_alone(scorer, groups, device)
    errors = (in_row - alone).abs()
    by_token = (errors / tokens).sort().values
    if routes_tokens(scorer.model.config):
        by_token = by_token[:-1]
    largest, mean = float(errors.max()), float(by_token.mean())
    numbers, is_right = {"max error": largest, "mean error a token": mean}, math.isfinite(largest)
    in_float32 = scorer.compute_dtype == torch.float32
    if any(group.images for group in groups):
        exchanged = [replace(group, images=group.images[::-1]) for group in groups]
        change = pair_sums(scorer, exchanged, device).flatten() - in_row
        noticed = float(change.view(-1, 2)[1].abs().min())  # the second pair has two images
        numbers["change by exchanged images"] = noticed
        is_right = is_right and noticed > (proofs.IMAGE_CHANGES * largest if in_float32 else 0.0)
    if in_float32 and largest <= proofs.FLOAT32_BOUND:
        return numbers, is_right
    moved = (_rounded_otherwise(scorer, groups, device) - alone).abs()
    by_rounding = float((moved / tokens).mean(dim=1).max())
    is_right = is_right and mean <= proofs.ROUNDINGS * by_rounding
    return {**numbers, "rounding a token": by_rounding, "rounding": float(moved.max())}, is_right


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
