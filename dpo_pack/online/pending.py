"""Pairs that are made and not yet trained on: in memory, as a checkpoint holds them, as a table for rows.

Legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpo_pack.data.store import PairTable, TokenStore, join_pairs
from dpo_pack.data.truncation import PairIds
from dpo_pack.online.phases import Outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingPair:
    """A pair and where it comes from."""

    ids: PairIds
    prompt_index: int  # into the training prompts
    margin: float  # score of chosen - score of rejected
    weights_step: int  # the steps that the policy which wrote it had taken


def pairs_of(outcomes: Sequence[Outcome], *, weights_step: int) -> list[PendingPair]:
    """The pairs of a phase, prompt by prompt."""
    made = []
    for outcome in outcomes:
        if outcome.rollout is None or outcome.pairing is None:
            continue
        completions, scores = outcome.rollout.completions, outcome.pairing.scores
        made += [
            PendingPair(
                ids=PairIds(
                    prompt=outcome.draw.prompt.ids,
                    chosen=completions[chosen].ids,
                    rejected=completions[rejected].ids,
                ),
                prompt_index=outcome.draw.prompt_index,
                margin=float(scores[chosen] - scores[rejected]),
                weights_step=weights_step,
            )
            for chosen, rejected in outcome.pairing.pairs
        ]
    return made


def pair_table(pairs: Sequence[PendingPair]) -> PairTable:
    """The pairs as offline ones are held, in memory."""
    joined = join_pairs([pair.ids for pair in pairs], [1.0] * len(pairs), [0] * len(pairs))
    store = TokenStore(
        directory=Path(), fingerprint="", tokens=joined.tokens, records=joined.records, summary={}
    )
    return PairTable.of([store])


def pending_state(pairs: Sequence[PendingPair]) -> dict[str, Any]:
    """Tensors and nothing else, which is all that a checkpoint is read back from."""
    parts = [part for pair in pairs for part in (pair.ids.prompt, pair.ids.chosen, pair.ids.rejected)]
    return {
        "tokens": torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int32), *parts])),
        "lengths": torch.tensor([len(part) for part in parts], dtype=torch.int64),
        "prompt_indices": torch.tensor([pair.prompt_index for pair in pairs], dtype=torch.int64),
        "margins": torch.tensor([pair.margin for pair in pairs], dtype=torch.float64),
        "weights_steps": torch.tensor([pair.weights_step for pair in pairs], dtype=torch.int64),
    }


def load_pending(state: dict[str, Any]) -> list[PendingPair]:
    ends = np.cumsum(state["lengths"].numpy())
    parts = np.split(state["tokens"].numpy(), ends[:-1]) if len(ends) else []
    columns = zip(
        state["prompt_indices"].tolist(),
        state["margins"].tolist(),
        state["weights_steps"].tolist(),
        strict=True,
    )
    return [
        PendingPair(
            ids=PairIds(prompt=parts[3 * n], chosen=parts[3 * n + 1], rejected=parts[3 * n + 2]),
            prompt_index=prompt_index,
            margin=margin,
            weights_step=weights_step,
        )
        for n, (prompt_index, margin, weights_step) in enumerate(columns)
    ]
