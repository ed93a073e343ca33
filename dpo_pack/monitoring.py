"""What watches a run, set up from its recipe: health, throughput, and steps that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dpo_pack.data.flops import ADAPTER_PASSES, TRAINING_PASSES, pair_flops
from dpo_pack.data.merging import PairSizes, prompt_merging
from dpo_pack.data.store import PairTable
from dpo_pack.errors import RunError
from dpo_pack.health import RunFacts
from dpo_pack.losses import Objective, PairLogps, ScoredPairs, weighted_losses
from dpo_pack.models import LoadedModel
from dpo_pack.nonfinite import NonfiniteGuard
from dpo_pack.offline import OfflineSource
from dpo_pack.online.source import OnlineSource
from dpo_pack.prepare import Prepared
from dpo_pack.prepare_batches import policy_shape
from dpo_pack.recipe import Recipe, source_names
from dpo_pack.reference import pair_lengths
from dpo_pack.throughput import Meter, device_peak


def run_facts(recipe: Recipe, objective: Objective, num_steps: int, table: PairTable) -> RunFacts:
    """What health must know to judge the run's metrics."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    same = PairLogps(chosen=zero, rejected=zero, chosen_tokens=one, rejected_tokens=one)
    weight = torch.from_numpy(table.weights.max(keepdims=True)).double()
    has_reference = all(loss.needs_reference for loss, _ in objective.terms)
    has_own_loss = any(":" in name for name, _ in recipe.loss.terms)
    initial_loss = None
    if has_reference and not has_own_loss and objective.weighting is None:
        # The loss of a policy that is its reference does not depend on its log-probs.
        pair = ScoredPairs(policy=same, reference=same, weights=weight)
        initial_loss = float(weighted_losses(objective, pair, mean_chosen_tokens=1.0))
    return RunFacts(num_steps=num_steps, beta=recipe.loss.beta, initial_loss=initial_loss)


def training_meter(prepared: Prepared, policy: LoadedModel, source: OfflineSource | OnlineSource) -> Meter:
    """Counts pairs, tokens and FLOPs of the run's steps. Online there is no MFU: most time goes elsewhere."""
    is_online = isinstance(source, OnlineSource)
    return Meter(
        device=prepared.device,
        sizes=_pair_sizes(prepared, source, adapts=policy.adapter is not None),
        peak_flops=None if is_online else device_peak(prepared.device, policy.scorer.compute_dtype),
    )


def _pair_sizes(prepared: Prepared, source: OfflineSource | OnlineSource, *, adapts: bool) -> PairSizes:
    """What training on each pair takes: real tokens and FLOPs, padding left out; online not known.

    `adapts` says that an adapter is trained and not the model's weights.
    """
    recipe = prepared.recipe
    if isinstance(source, OnlineSource):
        zeros = np.zeros(prepared.data.train.num_pairs)
        return PairSizes(tokens=zeros.astype(np.int64), costs=zeros, merging=None)
    shape, passes = policy_shape(recipe), ADAPTER_PASSES if adapts else TRAINING_PASSES
    flops = pair_flops(
        shape,
        pair_lengths(prepared.data.train),
        share_prompt=prepared.is_packed and recipe.shares_prompts,
        passes=passes,
    )
    merging = source.builder.merging
    if merging is not None and adapts:  # the planner's counts those of full training
        merging = prompt_merging(prepared.data.train, shape, passes=passes)
    return PairSizes(tokens=source.real_tokens, costs=flops, merging=merging)


def report_nonfinite(guard: NonfiniteGuard, prepared: Prepared, directory: Path) -> None:
    """Say which steps made no update, and list their pairs in `directory`. Waits for the device.

    Raises RunError for the first, unless the recipe skips them.
    """
    names = source_names(prepared.recipe.data.train)
    for message in guard.report(directory, prepared.data.train, names):
        if prepared.recipe.train.stop_on_nonfinite:
            raise RunError(message)
        prepared.console.print(f"  {message}")
