"""Proves on small random rows that packing several pairs in a row changes no log-prob on this machine.

Without proofs nobody would see attention leak between pairs: in DPO the first loss is log 2 even with a leak,
because policy and reference leak in the same way. Each proof runs the real model with the attention function
that training uses. A proof returns its measured numbers, their bound, and advice for the user if it fails.

Legend: S sequences, each a (context, completion) of token ids, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dpo_pack.model.attention import BACKENDS
from dpo_pack.model.compiling import outermost_layers
from dpo_pack.model.config import routes_tokens
from dpo_pack.model.liger import stock_layers
from dpo_pack.model.parallel import is_sharded
from dpo_pack.model.recurrence import RecurrentCall, torch_recurrences
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs.kernel import prove_kernel, prove_wiring
from dpo_pack.proofs.leaks import prove_causality, prove_isolation
from dpo_pack.proofs.recurrence import prove_recurrence
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof, pair_sums, proof_groups, replaced
from dpo_pack.system.errors import is_out_of_memory, one_line

# Allowed error of a sequence's log-prob in fp32, in nats.
FLOAT32_BOUND = 1e-4
# Rounding is measured this often, because it varies, above all if it makes a router choose another expert.
_NUM_DRAWS = 4


def prove(scorer: CompletionLogps, device: torch.device) -> list[Proof]:
    """Runs all proofs, in an order in which an early failure explains later failures.

    Padded batches use the model's own attention, and a row holds one sequence. So only two proofs run: no
    token sees a later token; a sequence in a batch gets the same log-probs as alone.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
        proofs: list[Proof] = []
        if scorer.backend is not None:
            calls, wiring = prove_wiring(scorer, groups, device)
            if not wiring.passed:
                return [wiring]
            proofs = [
                wiring,
                *prove_kernel(scorer, calls, device),
                *prove_recurrence(scorer, groups, device),
                prove_isolation(scorer, groups, device),
            ]
        return [*proofs, prove_causality(scorer, groups, device), prove_equivalence(scorer, groups, device)]


def compiling_obstacle(scorer: CompletionLogps, device: torch.device) -> str | None:
    """Returns why torch cannot compile the layers or the head; None if it can, or if it is not to compile.

    Computes a small row and gradients, so that torch compiles them now. Else it would compile gradients in
    the first step, perhaps hours after the start, and a failure there would end the run.
    """
    if not scorer.is_compiled:
        return None
    trained = [p for p in outermost_layers(scorer.model)[0].parameters() if p.requires_grad]
    # The first layer's gradients are enough: to get them, torch runs the backward of all later layers. In a
    # sharded model the graph has the gathered weights, not the shards, so `inputs` cannot name a layer's.
    inputs = None if is_sharded(scorer.model) else trained or None
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch._dynamo.config.patch(suppress_errors=False),
    ):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
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


@torch.no_grad()
def prove_equivalence(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that a row's log-probs equal those of each sequence alone under the model's own eager attention.

    In low precision, rounding hides a position that is wrong by one in short rows. So if the parameters are
    fp32, as under autocast by default, the proof runs in fp32 too.
    """
    numbers, passed = _distance_of_row(scorer, groups, device)
    bound = "mean error a token <= 3 x rounding"
    if scorer.compute_dtype == torch.float32:
        bound = f"max error <= {FLOAT32_BOUND:.0e}, or {bound}"
    elif scorer.gather_dtype is None and next(scorer.model.parameters()).dtype == torch.float32:
        # All computation is in fp32, with functions that take fp32.
        without_kernels = replaced(
            scorer,
            autocast=None,
            backend=scorer.backend and BACKENDS["sdpa"],
            recurrent_kernels={},
            recurrence=scorer.recurrence or RecurrentCall.run,
        )
        with without_kernels, torch_recurrences(scorer.model):
            exact_numbers, is_exact = _distance_of_row(scorer, groups, device)
        numbers |= {f"{name}, in float32": number for name, number in exact_numbers.items()}
        bound += f"; in float32 max error <= {FLOAT32_BOUND:.0e}, or the same"
        passed = passed and is_exact
    remedy = f"{PADDED_REMEDY}; or try model.attention: sdpa"
    if scorer.backend is None:
        remedy = "the family changes its logits, or what right padding computes; report the family"
    return Proof(name="equivalence", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def _distance_of_row(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[dict[str, float], bool]:
    """Returns (errors of the row against each sequence alone, whether they are small enough)."""
    sequences = [(group.context, completion) for group in groups for completion in group.completions]
    tokens = torch.tensor([len(completion) for _, completion in sequences], device=device)

    def alone() -> Tensor:
        """Returns [S] float64 log-probs, a sequence in a batch of one, from the model's own full logits."""
        sums = []
        with eager_attention(scorer.model), stock_layers(scorer.model):
            for context, completion in sequences:
                ids = torch.from_numpy(np.concatenate((context, completion)))[None].to(device)
                logits = scorer.full_logits(input_ids=ids)[0, len(context) - 1 : -1].float()
                logps = logits.log_softmax(dim=-1).gather(1, ids[0, len(context) :, None])
                sums.append(logps.double().sum())
        return torch.stack(sums)

    in_row = pair_sums(scorer, groups, device).flatten()
    return distance_from_stock(scorer, in_row, alone, tokens)


def distance_from_stock(
    scorer: CompletionLogps, ours: Tensor, compute_alone: Callable[[], Tensor], tokens: Tensor
) -> tuple[dict[str, float], bool]:
    """Returns (measured errors, whether they are small enough). `ours` and `tokens` are [S].

    The mean error per token may be three times the error that rounding causes in the plain computation. In a
    mixture of experts the mean leaves out the worst sequence, because rounding can send it to another expert.
    In fp32 it is enough that no error exceeds `FLOAT32_BOUND`. Only if one does, rounding is measured.
    """
    alone = compute_alone()
    errors = (ours - alone).abs()
    by_token = (errors / tokens).sort().values
    if routes_tokens(scorer.model.config):
        by_token = by_token[:-1]
    largest, mean = float(errors.max()), float(by_token.mean())
    numbers = {"max error": largest, "mean error a token": mean}
    if scorer.compute_dtype == torch.float32 and largest <= FLOAT32_BOUND:
        return numbers, True
    changes = []
    for _ in range(_NUM_DRAWS):
        with _rounded_otherwise(scorer.model, torch.finfo(scorer.compute_dtype).eps):
            changes.append((compute_alone() / tokens - alone / tokens).abs().mean())
    by_rounding = float(torch.stack(changes).max())
    is_rounding = math.isfinite(largest) and mean <= 3 * by_rounding
    return {**numbers, "rounding a token": by_rounding}, is_rounding


@contextlib.contextmanager
def _rounded_otherwise(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """In this context embeddings and each layer's output get random relative errors of up to `eps` / 2."""

    def perturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (perturb(module, inputs, output[0]), *output[1:])
        return output * (1 + eps * (torch.rand_like(output) - 0.5))

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    hooks = [module.register_forward_hook(perturb) for module in (model.get_input_embeddings(), *layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """In this context the model uses its own eager attention instead of ours, and no recurrent kernel."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch_recurrences(model):
            yield
    finally:
        model.set_attn_implementation(ours)
