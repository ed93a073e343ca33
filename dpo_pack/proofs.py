"""Proofs that packed rows are exact on this model, kernel and machine, from a few small random rows.

Why: in DPO the first loss is log 2 even when attention leaks, because policy and reference leak alike. Each
proof runs the real model through the real seam and returns what it measured, the bound it had to keep and,
when it failed, what to do.

Legend: T tokens of a row, S sequences, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpo_pack.attention import BACKENDS
from dpo_pack.attention.segments import RowSegments
from dpo_pack.errors import UnsupportedModelError
from dpo_pack.kernel_proof import SeamCall, kernel_error, seam_call
from dpo_pack.layout import Group, Row, layout_row, packed_row, padded_row
from dpo_pack.logps import sequence_sums
from dpo_pack.model_config import attention_needs, effective_window, layer_windows, routes_tokens
from dpo_pack.models import CompletionLogps
from dpo_pack.stock import rounding_noise, stock_sums

# Raised whenever a proof changes, so that what was remembered of an earlier one is proved again.
PROOF_VERSION = 4

# What a sequence's log-prob may differ by in fp32, in nats.
FLOAT32_BOUND = 1e-4
PADDED_REMEDY = "use packing.mode: padded, and report the model's family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome of one proof."""

    name: str
    passed: bool
    numbers: dict[str, float]  # what was measured, by name; log-probs in nats
    bound: str  # what the numbers had to keep
    remedy: str  # what to do when it failed


def prove(scorer: CompletionLogps, device: torch.device) -> list[Proof]:
    """All proofs, in the order in which a failure explains later ones.

    Padded batches have no seam; that no token sees a later one, padding among them, and that the head is
    understood must hold for them too.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
        proofs: list[Proof] = []
        if scorer.backend is not None:
            calls, wiring = prove_wiring(scorer, groups, device)
            if not wiring.passed:
                return [wiring]
            proofs = [wiring, prove_kernel(scorer, calls, device), prove_isolation(scorer, groups, device)]
        in_every_mode = (prove_causality, prove_equivalence, prove_head)
        return [*proofs, *(prove_one(scorer, groups, device) for prove_one in in_every_mode)]


def proof_groups(vocabulary: int) -> list[Group]:
    """Four pairs: two ordinary ones, one whose completions begin alike, one with one-token completions."""

    def ids(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,))

    alike = ids(3)
    one, other = torch.randperm(vocabulary)[:2].split(1)  # the same token twice would leave nothing to tell
    contents = [
        (ids(24), ids(11), ids(8)),
        (ids(9), torch.cat((alike, ids(6))), torch.cat((alike, ids(13)))),
        (ids(5), one, other),
        (ids(16), ids(7), ids(12)),
    ]
    return [
        Group(context=context.numpy(), completions=(chosen.numpy(), rejected.numpy()))
        for context, chosen, rejected in contents
    ]


@torch.no_grad()
def prove_wiring(
    scorer: CompletionLogps,
    groups: Sequence[Group],
    device: torch.device,
    *,
    compute: Callable[[Row], object] | None = None,
) -> tuple[list[SeamCall], Proof]:
    """The seam is called once per layer, with the window, softcap and sinks that the config says.

    Log-probs of short rows cannot show a window that is missing, and rounding may hide a sink, so they are
    read off the calls. `compute` runs a row through `scorer`, where that is not its own forward.
    """
    calls: list[SeamCall] = []
    backend = scorer.backend
    assert backend is not None

    def recording(query: Tensor, key: Tensor, value: Tensor, segments: RowSegments, **options: Any) -> Tensor:
        calls.append(seam_call(query, key, value, options))
        return backend(query, key, value, segments, **options)

    scorer.backend = recording
    remedy = PADDED_REMEDY
    try:
        (compute or scorer)(proof_row(scorer, groups, device))
    except UnsupportedModelError as error:
        remedy = str(error)
    finally:
        scorer.backend = backend
    config = scorer.model.config
    needs, expected = attention_needs(config), layer_windows(config)
    windows = [effective_window(call.window, config) for call in calls]
    num_softcaps = sum(call.softcap is not None for call in calls)
    num_sinks = sum(call.has_sinks for call in calls)
    numbers = {
        "layers": float(scorer.num_attention_layers),
        "seam calls": float(len(calls)),
        "windows as configured": float(sum(a == b for a, b in zip(windows, expected, strict=False))),
        "softcaps": float(num_softcaps),
        "sinks": float(num_sinks),
    }
    passed = (
        len(calls) == scorer.num_attention_layers
        and windows == expected
        and num_softcaps == (len(calls) if needs.has_softcap else 0)
        and (num_sinks > 0 or not needs.has_sinks)
    )
    bound = "as many seam calls, and windows as configured, as layers"
    bound += "; softcaps on every layer" * needs.has_softcap + "; sinks" * needs.has_sinks
    return calls, Proof(name="wiring", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def prove_kernel(scorer: CompletionLogps, calls: Sequence[SeamCall], device: torch.device) -> Proof:
    """The kernel on random inputs of the model's shapes, forward and gradients, against fp32 by definition.

    Segments of all kinds: one token, queries only at the end of longer keys, longer than the window (which is
    cut short where the model's is longer). See `kernel_error` for the bound.
    """
    backend = scorer.backend
    assert backend is not None
    kinds = dict.fromkeys(calls)  # in the order of layers: the same random inputs in every process
    measured = [kernel_error(backend, call, scorer.compute_dtype, device) for call in kinds]
    error, bound = max(measured, key=lambda pair: pair[0] / pair[1])
    return Proof(
        name="kernel",
        passed=error <= bound,
        numbers={"relative error": error},
        bound=f"<= {bound:.1e} of outputs and gradients for random inputs",
        remedy="set model.attention: sdpa, and report GPU, torch and kernel versions",
    )


# What can change in a pair -> which of its (chosen, rejected) must then change.
_PARTS = {"chosen": [0], "rejected": [1], "context": [0, 1]}


@torch.no_grad()
def prove_isolation(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """A pair's log-probs depend on its own tokens only; and they do depend on those.

    In a mixture of experts other neighbours change the last bits. What leaks in a causal row leaks to what is
    behind, so what changes before the changed tokens is noise. With the pairs in both orders, the same
    sequences are looked at on either side.
    """
    routes = routes_tokens(scorer.model.config)
    moved, before, behind = _changes_around(scorer, groups, device)
    if routes:
        _, *others = _changes_around(scorer, groups[::-1], device)
        before, behind = torch.cat((before, others[0])), torch.cat((behind, others[1]))
    leaks = _typical(behind) if routes else float(torch.cat((before, behind)).max())
    bound = _noise_bound(scorer, before) if routes else 0.0
    return Proof(
        name="isolation",
        passed=leaks <= bound and moved > 0.0,
        numbers={"change of others": leaks, "change of its own": moved},
        bound=f"others change by {_at_most(bound)}, its own by more than 0",
        remedy=PADDED_REMEDY,
    )


def _changes_around(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[float, Tensor, Tensor]:
    """One token changes at a time: the least that its own sequences do, and what others do on either side.

    (nats, those before it in the row, those behind it)
    """
    whole = _pair_sums(scorer, groups, device)
    moves = {part: torch.zeros(2, device=device) for part in _PARTS}
    before, behind = [], []
    for pair in range(len(groups)):
        for part, own in _PARTS.items():
            change = (_pair_sums(scorer, _with_change(groups, pair, part), device) - whole).abs()
            # In one pair at least: bf16 gives two tokens of one place the same logit now and then.
            moves[part] = torch.maximum(moves[part], change[pair])
            before.append(change.flatten()[: 2 * pair + own[0]])
            behind.append(change.flatten()[2 * pair + own[-1] + 1 :])
    moved = torch.cat([moves[part][own] for part, own in _PARTS.items()]).min()
    return float(moved), torch.cat(before), torch.cat(behind)


@torch.no_grad()
def prove_causality(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """No token sees a later one: with another last token, log-probs of a completion's others stay.

    Half of the pairs are changed at a time; a mixture's noise is what that changes in the other half.
    """
    lengths = [len(completion) for group in groups for completion in group.completions]
    whole = scorer(proof_row(scorer, groups, device)).token_logps
    lasts, earlier, others = [], [], []
    for half in (range(len(groups) // 2), range(len(groups) // 2, len(groups))):
        changed = list(groups)
        for pair in half:
            for part in ("chosen", "rejected"):
                changed = _with_change(changed, pair, part)
        change = (scorer(proof_row(scorer, changed, device)).token_logps - whole).abs()
        for sequence, tokens in enumerate(change.split(lengths)):
            if sequence // 2 in half:
                earlier.append(tokens[:-1])
                lasts.append(tokens[-1:])
            else:
                others.append(tokens)
    moved = float(torch.cat(lasts).max())
    routes = routes_tokens(scorer.model.config)
    leaks = _typical(torch.cat(earlier)) if routes else float(torch.cat(earlier + others).max())
    bound = _noise_bound(scorer, torch.cat(others)) if routes else 0.0
    return Proof(
        name="causality",
        passed=leaks <= bound and moved > 0.0,
        numbers={"change of earlier tokens": leaks, "change of the last": moved},
        bound=f"earlier tokens change by {_at_most(bound)}, the last by more than 0",
        remedy="its tokens see later ones, so it is no causal language model: train one that is",
    )


@torch.no_grad()
def prove_equivalence(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """A row's log-probs are those of each sequence alone under the model's stock eager attention.

    Rounding to low precision is larger than what a position off by one changes in short rows. Where the
    parameters are fp32, as they are under autocast by default, the same is therefore proved in fp32 too.
    """
    numbers, passed = _distance_from_stock(scorer, groups, device)
    bound = "mean a token <= 3 x rounding"
    if scorer.compute_dtype == torch.float32:
        bound = f"max <= {FLOAT32_BOUND:.0e}, or {bound}"
    elif scorer.gather_dtype is None and next(scorer.model.parameters()).dtype == torch.float32:
        with _without_autocast(scorer):
            exact_numbers, is_exact = _distance_from_stock(scorer, groups, device)
        numbers |= {f"{name}, in float32": number for name, number in exact_numbers.items()}
        passed, bound = passed and is_exact, f"{bound}; in float32 max <= {FLOAT32_BOUND:.0e}, or the same"
    remedy = f"{PADDED_REMEDY}; with model.attention: sdpa it may hold"
    if scorer.backend is None:
        remedy = "right padding changes what this family computes: report it"
    return Proof(name="equivalence", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def _distance_from_stock(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[dict[str, float], bool]:
    sequences = [(group.context, completion) for group in groups for completion in group.completions]
    tokens = torch.tensor([len(completion) for _, completion in sequences], device=device)
    in_row = _pair_sums(scorer, groups, device).flatten()
    return distance_from_stock(scorer, in_row, lambda: stock_sums(scorer, sequences, device), tokens)


def distance_from_stock(
    scorer: CompletionLogps, ours: Tensor, stock: Callable[[], Tensor], tokens: Tensor
) -> tuple[dict[str, float], bool]:
    """(what was measured, whether it is small enough); [S] each, `stock` computes each sequence alone.

    The mean error a token may be three times what rounding does to the stock computation; in a mixture of
    experts without the worst sequence, which may have met another expert at a near tie. Rounding is measured
    in fp32 only where errors above `FLOAT32_BOUND` ask for it, which takes a deep network of wide weights.
    """
    alone = stock()
    errors = (ours - alone).abs()
    by_token = (errors / tokens).sort().values
    if routes_tokens(scorer.model.config):
        by_token = by_token[:-1]
    largest, mean = float(errors.max()), float(by_token.mean())
    numbers = {"max error": largest, "mean error a token": mean}
    if scorer.compute_dtype == torch.float32 and largest <= FLOAT32_BOUND:
        return numbers, True
    by_rounding = rounding_noise(scorer, lambda: stock() / tokens, alone / tokens)
    is_rounding = math.isfinite(largest) and mean <= 3 * by_rounding
    return {**numbers, "rounding a token": by_rounding}, is_rounding


@contextlib.contextmanager
def _without_autocast(scorer: CompletionLogps) -> Iterator[None]:
    """fp32 throughout, by the kernel that takes it."""
    autocast, backend = scorer.autocast, scorer.backend
    scorer.autocast, scorer.backend = None, backend and BACKENDS["sdpa"]
    try:
        yield
    finally:
        scorer.autocast, scorer.backend = autocast, backend


@torch.no_grad()
def prove_head(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Chunked log-probs are those of the model's own logits for the same row.

    In low precision the model rounds its logits, so the mean error a token may be the rounding of its
    largest logits.
    """
    row = proof_row(scorer, groups, device)
    ours = scorer(row).sums
    arguments: dict[str, Any] = {"attention_mask": row.attention_mask}
    if row.segments is not None:
        arguments |= {"row_segments": row.segments, "row_backend": scorer.backend}
    logits = scorer.full_logits(input_ids=row.input_ids, position_ids=row.position_ids, **arguments)
    logits = logits.flatten(0, 1)[row.logit_index].float()  # [N, V]
    logps = logits.log_softmax(dim=-1).gather(1, row.targets[:, None]).squeeze(1)
    errors = (ours - sequence_sums(logps, row.completion_lengths)).abs()
    mean = float((errors / row.completion_lengths).mean())
    numbers = {"max error": float(errors.max()), "mean error a token": mean}
    remedy = "the family transforms its logits in a way we do not know: report it"
    if scorer.compute_dtype == torch.float32:
        passed, bound = numbers["max error"] <= FLOAT32_BOUND, f"max <= {FLOAT32_BOUND:.0e}"
    else:
        rounding = torch.finfo(scorer.compute_dtype).eps * float(logits.abs().amax(dim=1).mean())
        passed, bound = mean <= rounding, f"mean a token <= {rounding:.1e}, the rounding of logits"
    return Proof(name="head", passed=passed, numbers=numbers, bound=bound, remedy=remedy)


def _pair_sums(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Tensor:
    """[pairs, 2]: log-probs of chosen and rejected, all pairs in one row."""
    sums: Tensor = scorer(proof_row(scorer, groups, device)).sums
    return sums.view(-1, 2)


def proof_row(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Row:
    """Packed with shared prompts, or padded where the scorer has no backend."""
    if scorer.backend is None:
        return padded_row(groups, pad_token_id=0, device=device)
    return packed_row(layout_row(groups, share_prompt=True), device)


def _with_change(groups: Sequence[Group], pair: int, part: str) -> list[Group]:
    """The same groups with one token of one pair changed, the last of a completion or of a context.

    Lengths and common prefixes stay, so the row keeps its shape and bits may be compared.
    """
    context, (chosen, rejected) = groups[pair].context.copy(), groups[pair].completions
    chosen, rejected = chosen.copy(), rejected.copy()
    if part == "context":
        context[-1] = _another(context[-1], context[-1])  # within the shortest sliding window
    else:
        changed, other = (chosen, rejected) if part == "chosen" else (rejected, chosen)
        place = len(changed) - 1
        changed[place] = _another(changed[place], other[min(place, len(other) - 1)])
    group = Group(context=context, completions=(chosen, rejected))
    return [*groups[:pair], group, *groups[pair + 1 :]]


def _another(token: int, avoided: int) -> int:
    """A token id near 0, which every vocabulary has, that is neither of the two."""
    return next(candidate for candidate in range(3) if candidate not in (int(token), int(avoided)))


def _typical(changes: Tensor) -> float:
    """The mean, without the tenth that may have met other experts at near ties; not finite if one is not."""
    if not bool(changes.isfinite().all()):
        return float(changes.max())
    return float(changes.sort().values[: math.ceil(0.9 * len(changes))].mean())


def _noise_bound(scorer: CompletionLogps, noise: Tensor) -> float:
    """What may typically change in a mixture of experts, by what changes where no change can arrive."""
    return max(3 * float(noise.mean()), 4 * torch.finfo(scorer.compute_dtype).eps)


def _at_most(bound: float) -> str:
    return "nothing" if bound == 0.0 else f"<= {bound:.0e}"
