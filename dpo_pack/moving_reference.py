"""A reference that follows the policy (TR-DPO): a second model in memory, run live for every row.

Gorbatovski et al. 2024 (arXiv 2404.09656): every `every_steps` steps,

    reference <- mixup * policy + (1 - mixup) * reference,

a soft update for mixup < 1, a hard one for 1. Its log-probs change with every update, so nothing is computed
beforehand or cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpo_pack.errors import ModelError
from dpo_pack.models import CompletionLogps
from dpo_pack.sources import GlobalBatch, PairRow, by_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingReference:
    """The model and how it follows. Its weights are part of a run's state."""

    scorer: CompletionLogps  # has no adapter; without gradients
    every_steps: int
    mixup: float  # the policy's part

    @torch.no_grad()
    def score(self, row: PairRow) -> PairRow:
        """The row with this model's log-probs as its reference."""
        output = by_pair(self.scorer(row.row), row)
        chosen, rejected = output.sums.view(-1, 2).unbind(dim=1)
        return replace(
            row, reference_chosen=chosen, reference_rejected=rejected, reference_tokens=output.token_logps
        )

    @torch.no_grad()
    def score_batch(self, batch: GlobalBatch) -> GlobalBatch:
        """The batch with this model's log-probs as the reference of all its rows."""
        rows = [self.score(row) for row in batch.rows]
        for idle_row in batch.idle_rows:
            self.scorer(idle_row)
        return replace(batch, rows=rows)

    @torch.no_grad()
    def follow(self, policy: CompletionLogps, *, step: int) -> None:
        """Move towards the policy, if an update is due after so many steps."""
        if step % self.every_steps:
            return
        weights = dict(self.scorer.model.named_parameters())
        for name, trained in trained_weights(policy):
            weights[name].lerp_(trained.to(weights[name].dtype), self.mixup)


def trained_weights(policy: CompletionLogps) -> Iterator[tuple[str, Tensor]]:
    """Name and value of all weights that training changes, as a model without an adapter has them."""
    if policy.adapter is None:
        yield from policy.model.named_parameters()
        return
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in policy.model.named_modules():
        if isinstance(module, LoraLayer):
            (adapter,) = module.active_adapters
            # The layers of each kind of module have it, their common base class does not say so.
            yield f"{name}.weight", module.get_base_layer().weight + module.get_delta_weight(adapter)  # type: ignore[attr-defined]
        elif isinstance(module, ModulesToSaveWrapper):
            (adapter,) = module.active_adapters
            for parameter, value in module.modules_to_save[adapter].named_parameters():
                yield f"{name}.{parameter}", value


def check_followable(policy: CompletionLogps) -> None:
    """Raises ModelError when training changes something that `trained_weights` does not yield."""
    if policy.adapter is None:
        return
    from peft.tuners.lora import Embedding, Linear

    # A variant (DoRA) adds more than B A; other layers (of quantised weights, of experts) have other bases.
    plain = {
        name
        for name, module in policy.model.named_modules()
        if isinstance(module, Linear | Embedding) and not module.lora_variant
    }
    for name, parameter in policy.model.named_parameters():
        layer, _, part = name.partition(".lora_")
        is_low_rank = layer in plain and part != "" and not part.endswith("bias")
        if parameter.requires_grad and not is_low_rank and ".modules_to_save." not in name:
            raise ModelError(
                f"reference.sync: a reference cannot follow {name}, only plain LoRA (no DoRA, no biases) and "
                "modules_to_save; merge the adapter first (dpopack merge), or leave reference.sync out"
            )
