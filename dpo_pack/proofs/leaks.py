"""Proofs that no token depends on other pairs of its row or on later tokens.

In dense models, log-probs that must not change keep every bit. In a mixture of experts, a changed token
changes the last bits of all tokens. So there the bound is a multiple of the noise; noise is the change of
log-probs that no leak can reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpo_pack.model.config import routes_tokens
from dpo_pack.model.scorer import CompletionLogps
from dpo_pack.packing.lengths import Group
from dpo_pack.proofs.rows import PADDED_REMEDY, Proof, pair_sums, proof_row

# The part of a pair in which a token changes, and which sequences have that part (0 chosen, 1 rejected).
_PARTS = {"chosen": [0], "rejected": [1], "context": [0, 1]}


@torch.no_grad()
def prove_isolation(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that a pair's log-probs depend only on the pair's own tokens.

    In a causal row a leak reaches only tokens behind the changed token, so in a mixture of experts a change
    before that token is noise. For such models the proof uses both orders of the pairs, so that the same
    sequences stand before and behind the changed token.
    """
    moved, before, behind = _changes_around(scorer, groups, device)
    if routes_tokens(scorer.model.config):
        _, *others = _changes_around(scorer, groups[::-1], device)
        before, behind = torch.cat((before, others[0])), torch.cat((behind, others[1]))
    else:
        behind = torch.cat((before, behind))
    leaks, bound, keeps = _leak(scorer, behind, noise=before)
    return Proof(
        name="isolation",
        passed=leaks <= bound and moved > 0.0,
        numbers={"change of other pairs": leaks, "change of its own pair": moved},
        bound=f"other pairs change by {keeps}, its own pair by more than 0",
        remedy=PADDED_REMEDY,
    )


def _changes_around(
    scorer: CompletionLogps, groups: Sequence[Group], device: torch.device
) -> tuple[float, Tensor, Tensor]:
    """Changes one token of the row at a time and compares log-probs with those of the unchanged row.

    Returns (the least change of sequences that have the token, the changes of all sequences that stand before
    the token in the row, the changes of all that stand behind it), in nats.
    """
    whole = pair_sums(scorer, groups, device)
    moves = {part: torch.zeros(2, device=device) for part in _PARTS}
    before, behind = [], []
    for pair in range(len(groups)):
        for part, own in _PARTS.items():
            change = (pair_sums(scorer, _with_change(groups, pair, part), device) - whole).abs()
            # It is enough if one pair changes: in bf16 two tokens at one position may have the same logit.
            moves[part] = torch.maximum(moves[part], change[pair])
            before.append(change.flatten()[: 2 * pair + own[0]])
            behind.append(change.flatten()[2 * pair + own[-1] + 1 :])
    moved = torch.cat([moves[part][own] for part, own in _PARTS.items()]).min()
    return float(moved), torch.cat(before), torch.cat(behind)


@torch.no_grad()
def prove_causality(scorer: CompletionLogps, groups: Sequence[Group], device: torch.device) -> Proof:
    """Proves that no token sees a later one: a new last token must not change log-probs of earlier tokens.

    First one half of the pairs gets new last tokens, then the other half. In a mixture of experts, the change
    of the log-probs of the unchanged half is noise.
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
    if not routes_tokens(scorer.model.config):
        earlier += others
    moved = float(torch.cat(lasts).max())
    leaks, bound, keeps = _leak(scorer, torch.cat(earlier), noise=torch.cat(others))
    return Proof(
        name="causality",
        passed=leaks <= bound and moved > 0.0,
        numbers={"change of earlier tokens": leaks, "change of the last token": moved},
        bound=f"earlier tokens change by {keeps}, the last token by more than 0",
        remedy="the model's tokens see later tokens, and only causal models can be trained; choose one",
    )


def _leak(scorer: CompletionLogps, changes: Tensor, *, noise: Tensor) -> tuple[float, float, str]:
    """Returns (measured change, bound, bound in words) for log-probs that should not change.

    In a dense model the largest change counts. In a mixture of experts the mean without the largest tenth of
    `changes` counts, because rounding can send a token to other experts if their scores are almost equal.
    """
    if not routes_tokens(scorer.model.config):
        return float(changes.max()), 0.0, "nothing"
    bound = max(3 * float(noise.mean()), 4 * torch.finfo(scorer.compute_dtype).eps)
    leaks = float(changes.max())
    if math.isfinite(leaks):
        leaks = float(changes.sort().values[: math.ceil(0.9 * len(changes))].mean())
    return leaks, bound, f"<= {bound:.0e}"


def _with_change(groups: Sequence[Group], pair: int, part: str) -> list[Group]:
    """Returns the groups with one changed token in one pair: the last of a completion or of the context.

    Lengths of sequences and common prefixes do not change, so the row has the same shape and bits compare.
    """
    context, completions = groups[pair].context.copy(), groups[pair].completions
    chosen, rejected = completions[0].copy(), completions[1].copy()
    # The last token of a context is within the shortest sliding window.
    changed, other = {
        "context": (context, context), "chosen": (chosen, rejected), "rejected": (rejected, chosen)
    }[part]  # fmt: skip
    avoided = (changed[-1], other[min(len(changed), len(other)) - 1])
    changed[-1] = next(token for token in range(3) if token not in avoided)  # every vocabulary has 0, 1, 2
    return [*groups[:pair], Group(context=context, completions=(chosen, rejected)), *groups[pair + 1 :]]
