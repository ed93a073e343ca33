"""The models a recipe names: which they are, loaded, identified by content, and proved to pack exactly."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

import dpo_pack
from dpo_pack.errors import ModelError, UnsupportedModelError
from dpo_pack.files import read_json, write_json_atomically
from dpo_pack.fingerprint import namespace_digest, reference_namespace, weight_files
from dpo_pack.models import LoadedModel, Precision, load_config, load_model
from dpo_pack.proofs import PROOF_VERSION, Proof, prove
from dpo_pack.recipe import Recipe
from dpo_pack.run_dir import package_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from, and the recipe key to name when something is wrong with it."""

    path: str
    revision: str | None
    recipe_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOutcome:
    """The proofs of one model on this machine."""

    proofs: tuple[Proof, ...]
    seconds: float
    is_remembered: bool  # of an earlier start with the same model, versions, backend and device

    def sentence(self) -> str:
        """What to tell the person who waits."""
        names = ", ".join(proof.name for proof in self.proofs if proof.passed)
        error = next((p.numbers["max error"] for p in self.proofs if p.name == "equivalence"), float("nan"))
        when = "remembered" if self.is_remembered else f"{self.seconds:.1f} s"
        return f"packed rows are exact on this model: {names} hold, largest error {error:.1e} nats ({when})"

    def raise_failure(self) -> None:
        """Raises UnsupportedModelError for the first proof that failed."""
        for proof in self.proofs:
            if not proof.passed:
                numbers = ", ".join(f"{name} {value:.3g}" for name, value in proof.numbers.items())
                raise UnsupportedModelError(
                    f"packing is not exact on this model: the {proof.name} proof measured {numbers} and "
                    f"must keep {proof.bound}; {proof.remedy}"
                )


def policy_model(recipe: Recipe) -> ModelSource:
    return ModelSource(path=recipe.model.path, revision=recipe.model.revision, recipe_key="model.path")


def reference_model(recipe: Recipe) -> ModelSource:
    """The policy as it starts, unless `reference.path` names another."""
    if recipe.reference.path is None:
        return policy_model(recipe)
    return ModelSource(path=recipe.reference.path, revision=None, recipe_key="reference.path")


def cache_directory(recipe: Recipe) -> Path:
    """Where tokens and reference log-probs are cached: the recipe's choice, $DPO_PACK_CACHE, the home."""
    if recipe.reference.cache_dir is not None:
        return recipe.reference.cache_dir
    return Path(os.environ.get("DPO_PACK_CACHE") or Path.home() / ".cache" / "dpo_pack")


def check_source(source: ModelSource) -> None:
    """Refuse a local directory without weights, cheaply. Raises ModelError."""
    if Path(source.path).is_dir():
        try:
            weight_files(Path(source.path))
        except ModelError as error:
            raise ModelError(f"{source.recipe_key}: {error}") from error


def source_config(recipe: Recipe, source: ModelSource) -> PretrainedConfig:
    """The model's config. Raises ModelError."""
    return load_config(
        source.path,
        revision=source.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        recipe_key=source.recipe_key,
    )


def load_source_model(
    recipe: Recipe, source: ModelSource, *, precision: Precision, device: torch.device
) -> LoadedModel:
    """The model on the device, set up as `recipe.model` says. Raises ModelError."""
    return load_model(
        source.path,
        revision=source.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        precision=precision,
        attention=recipe.model.attention,
        packed=recipe.packing.mode == "packed",
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        device=device,
        recipe_key=source.recipe_key,
    )


def model_namespace(
    recipe: Recipe, source: ModelSource, *, precision: Precision, cache_dir: Path
) -> dict[str, Any]:
    """What the model's log-probs depend on besides token ids; see fingerprint.py."""
    return reference_namespace(
        source.path,
        source_config(recipe, source),
        revision=source.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        precision=precision,
        memo_path=cache_dir / "model_hashes.json",
    )


def prove_remembered(
    recipe: Recipe,
    source: ModelSource,
    loaded: LoadedModel,
    *,
    precision: Precision,
    device: torch.device,
    cache_dir: Path,
    again: bool = False,
) -> ProofOutcome:
    """Prove that packing is exact on this model, unless the very same has passed here before.

    `again` proves in any case.
    """
    begun = time.monotonic()
    setting = {
        "model": model_namespace(recipe, source, precision=precision, cache_dir=cache_dir),
        "attention": loaded.attention.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {**package_versions(), "dpo_pack": dpo_pack.__version__, "proofs": PROOF_VERSION},
    }
    memo_path, key = cache_dir / "proofs.json", namespace_digest(setting)
    remembered = (read_json(memo_path) or {}).get(key)
    if remembered is not None and not again:
        proofs = tuple(Proof(**proof) for proof in remembered)
        return ProofOutcome(proofs=proofs, seconds=0.0, is_remembered=True)
    proofs = tuple(prove(loaded.scorer, device))
    if all(proof.passed for proof in proofs):
        memo = {**(read_json(memo_path) or {}), key: [asdict(proof) for proof in proofs]}
        write_json_atomically(memo_path, memo)
    return ProofOutcome(proofs=proofs, seconds=time.monotonic() - begun, is_remembered=False)
