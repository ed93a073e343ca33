"""Reference log-probs of pairs that did not exist a moment ago: a pass without gradients over the same rows.

The rows are those the policy trains on, so that a policy equal to its reference has the very same log-probs.
A reference that follows the policy (`reference.sync`) is `moving_reference.py`'s, as it is offline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dpo_pack.models import LoadedModel
from dpo_pack.sources import GlobalBatch, PairRow, by_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReference:
    """The policy as it started: a second model, or with a new adapter the policy itself without it."""

    model: LoadedModel
    device: torch.device
    is_offloaded: bool  # in host memory between uses; of a second model only

    @torch.no_grad()
    def score_batch(self, batch: GlobalBatch) -> GlobalBatch:
        """The batch with this reference's log-probs of the pairs of its rows."""
        if self.is_offloaded:
            self.model.scorer.to(self.device)
        with self.model.as_reference():
            rows = [self._filled(row) for row in batch.rows]
            for idle_row in batch.idle_rows:  # in shards every rank computes as often
                self.model.scorer(idle_row)
        if self.is_offloaded:
            self.model.scorer.to("cpu")
        return replace(batch, rows=rows)

    def _filled(self, row: PairRow) -> PairRow:
        output = by_pair(self.model.scorer(row.row), row)
        chosen, rejected = output.sums.view(-1, 2).unbind(dim=1)  # [P] each
        return replace(
            row, reference_chosen=chosen, reference_rejected=rejected, reference_tokens=output.token_logps
        )
