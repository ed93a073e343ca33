"""What a run is, for its checkpoints: what must not change where it goes on, and what may and is told."""

from __future__ import annotations

import dpo_pack
from dpo_pack import ranks
from dpo_pack.checkpoint import Identity
from dpo_pack.data.store import PairTable
from dpo_pack.models import LoadedModel
from dpo_pack.moving_reference import MovingReference
from dpo_pack.offline import OfflineSource
from dpo_pack.online.source import OnlineSource
from dpo_pack.prepare import Prepared
from dpo_pack.recipe_models import base_fingerprint, policy_model
from dpo_pack.reference import FrozenReference
from dpo_pack.run_dir import package_versions
from dpo_pack.selection import Selection

# Releases of these may compute other last bits.
_PACKAGES = ("torch", "transformers", "peft")


def run_identity(
    prepared: Prepared,
    policy: LoadedModel,
    source: OfflineSource | OnlineSource,
    reference: FrozenReference | MovingReference | None,
    selection: Selection | None,
) -> Identity:
    """The identity of a run whose parts these are; every rank has the same.

    What is held out is not part of it, unless it says when the run ends.
    """
    recipe, train = prepared.recipe, prepared.data.train
    fingerprints = {
        "data": prepared.data.fingerprint,
        "plan": source.steps_fingerprint,
        "reference": _reference_fingerprint(reference, train),
    }
    words = {
        "data": f"{train.num_pairs:,} rows to train on",
        "plan": f"{source.num_steps:,} steps",
        "reference": recipe.reference.path or "the policy as it starts",
    }
    if recipe.train.early_stopping is not None:
        fingerprints["held-out data"] = prepared.data.eval_fingerprint
    if policy.adapter is not None:  # its checkpoints hold the adapter alone
        base = policy_model(recipe)
        fingerprints["base model"] = base_fingerprint(base, prepared.cache_dir)
        words["base model"] = base.path
    versions = package_versions()
    number = ranks.num_ranks()
    return Identity(
        fingerprints=fingerprints,
        words=words,
        versions={
            "dpo-pack": dpo_pack.__version__,
            **{package: versions[package] for package in _PACKAGES if package in versions},
        },
        ranks="one process" if number == 1 else f"{number} processes ({prepared.strategy.name})",
        judged_by=""
        if selection is None
        else f"{selection.metric} of {selection.eval_set}, {prepared.data.eval_fingerprint}",
    )


def _reference_fingerprint(reference: FrozenReference | MovingReference | None, train: PairTable) -> str:
    match reference:
        case FrozenReference():
            return reference.only(train).fingerprint
        case MovingReference():
            return "moving"
        case None:
            return "none"
