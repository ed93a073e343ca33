"""Proofs, before a reward model judges, that its scores on rows or batches are those of its own forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpo_pack.kernels import stock_layers
from dpo_pack.online.reward_model import RewardModelJudge, as_groups, without_padding
from dpo_pack.proofs import (
    PADDED_REMEDY,
    Proof,
    distance_from_stock,
    proof_groups,
    prove_kernel,
    prove_wiring,
)
from dpo_pack.recipe_models import ProofOutcome
from dpo_pack.stock import eager_attention


@torch.no_grad()
def prove_reward_model(judge: RewardModelJudge, recipe_key: str) -> None:
    """Raises UnsupportedModelError where packed rows or padded batches change the classifier's scores."""
    scorer, device = judge.backbone, judge.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        groups = proof_groups(int(scorer.model.config.get_text_config().vocab_size))
        what, proofs = f"{recipe_key}: padded batches", []
        if scorer.backend is not None:
            calls, wiring = prove_wiring(scorer, groups, device, compute=judge.row_scores)
            proofs = [wiring, *([prove_kernel(scorer, calls, device)] if wiring.passed else [])]
            what = f"{recipe_key}: packed rows"
        if all(proof.passed for proof in proofs):
            proofs.append(_prove_scores(judge))
    ProofOutcome(what=what, proofs=tuple(proofs), seconds=0.0, is_remembered=False).raise_failure()


def _prove_scores(judge: RewardModelJudge) -> Proof:
    """The scores of several prompts together are those of each sequence alone, by the classifier as it is.

    Bounds are those of the equivalence proof.
    """
    scorer, config = judge.backbone, judge.backbone.model.config.get_text_config()
    prompts = [
        [without_padding(np.concatenate((g.context, ids)), config.pad_token_id) for ids in g.completions]
        for g in proof_groups(int(config.vocab_size))
    ]
    inputs = [torch.from_numpy(ids).to(judge.device)[None] for prompt in prompts for ids in prompt]

    def alone() -> Tensor:
        """[S]"""
        with eager_attention(scorer.model), stock_layers(scorer.model), scorer.autocasting(judge.device):
            scores = [scorer.model(input_ids=ids, use_cache=False).logits.flatten() for ids in inputs]
        return torch.cat(scores).double()

    row = judge.row([group for prompt in prompts for group in as_groups(prompt)])
    together = torch.from_numpy(judge.row_scores(row)).to(judge.device)
    measured, passed = distance_from_stock(scorer, together, alone, torch.ones_like(together))
    remedy = "judge with a causal model whose score is of the last token"
    if scorer.backend is not None:
        remedy = PADDED_REMEDY
    return Proof(
        name="scores",
        passed=passed,
        numbers={name.removesuffix(" a token"): number for name, number in measured.items()},
        bound="mean error <= 3 x rounding",
        remedy=remedy,
    )
