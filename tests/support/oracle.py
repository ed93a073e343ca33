"""The plain way to compute completion log-probs, to compare with. Imports nothing from dpo_pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def completion_logps_one_by_one(
    model: PreTrainedModel,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    scored: Sequence[Sequence[bool]] | None = None,
) -> Tensor:
    """[S] summed log-probs: each (context, completion) alone in a batch of one, full logits, log_softmax.
    scored: which tokens of each completion count; default: all."""
    sums = []
    for number, (context, completion) in enumerate(sequences):
        ids = torch.tensor([[*context, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = logits[len(context) - 1 : -1].log_softmax(dim=-1)  # predicts the completion's tokens
        of_tokens = log_probs.gather(1, torch.tensor(list(completion))[:, None])[:, 0]
        sums.append(of_tokens[slice(None) if scored is None else torch.tensor(scored[number])].sum())
    return torch.stack(sums)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of every parameter's gradient by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
