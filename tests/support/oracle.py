"""The plain way to compute completion log-probs, to compare with. Imports nothing from dpo_pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def completion_logps_one_by_one(
    model: PreTrainedModel, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Tensor:
    """[S] summed log-probs: each (context, completion) alone in a batch of one, full logits, log_softmax."""
    sums = []
    for context, completion in sequences:
        ids = torch.tensor([[*context, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = logits[len(context) - 1 : -1].log_softmax(dim=-1)  # predicts the completion's tokens
        sums.append(log_probs.gather(1, torch.tensor(list(completion))[:, None]).sum())
    return torch.stack(sums)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of every parameter's gradient by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
