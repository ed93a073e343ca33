"""The models a recipe names: which they are, loaded, identified by content, and proved to pack exactly."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

import dpo_pack
from dpo_pack import ranks
from dpo_pack.compiling import check_compiler, compile_head, compile_layers
from dpo_pack.cpu_features import cpu_name
from dpo_pack.errors import CacheError, ModelError, UnsupportedModelError
from dpo_pack.files import read_json, write_json_atomically
from dpo_pack.fingerprint import model_directory, reference_namespace, weight_files, weights_fingerprint
from dpo_pack.head_logits import Asked
from dpo_pack.kernels import check_kernels
from dpo_pack.loading import load_config, load_model
from dpo_pack.lora import LoraSettings, is_adapter, read_adapter, require_peft
from dpo_pack.models import LoadedModel, Precision
from dpo_pack.proofs import PROOF_VERSION, Proof, prove
from dpo_pack.recipe import Recipe
from dpo_pack.reference_budget import CPU_TOKEN_BUDGET, START_FACTOR
from dpo_pack.reference_cache import default_cache_directory, namespace_digest
from dpo_pack.run_dir import package_versions
from dpo_pack.sharding import is_sharded, shard_model
from dpo_pack.strategy import ALONE, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from, and the recipe key to name when something is wrong with it."""

    path: str  # of a model with an adapter, its base
    revision: str | None
    recipe_key: str
    adapter: LoraSettings | Path | None = None  # a new LoRA adapter, or the directory of a saved one

    @property
    def saved_adapter(self) -> Path | None:
        return self.adapter if isinstance(self.adapter, Path) else None

    @property
    def label(self) -> str:
        """What the user calls it."""
        return self.path if self.saved_adapter is None else str(self.saved_adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOutcome:
    """The proofs of one model on this machine."""

    what: str  # "packed rows" or "padded batches"
    proofs: tuple[Proof, ...]
    seconds: float
    is_remembered: bool  # of an earlier start with the same model, versions, backend and device

    def sentence(self) -> str:
        """What to tell the person who waits."""
        names = ", ".join(proof.name for proof in self.proofs if proof.passed)
        error = next((p.numbers["max error"] for p in self.proofs if p.name == "equivalence"), float("nan"))
        when = "remembered" if self.is_remembered else f"{self.seconds:.1f} s"
        return f"{self.what} are exact on this model: {names} hold, largest error {error:.1e} nats ({when})"

    def raise_failure(self) -> None:
        """Raises UnsupportedModelError for the first proof that failed."""
        for proof in self.proofs:
            if not proof.passed:
                numbers = ", ".join(f"{name} {value:.3g}" for name, value in proof.numbers.items())
                raise UnsupportedModelError(
                    f"{self.what} are not exact on this model: the {proof.name} proof measured {numbers} and "
                    f"must keep {proof.bound}; {proof.remedy}"
                )


def policy_model(recipe: Recipe) -> ModelSource:
    source = model_source(recipe.model.path, recipe.model.revision, "model.path")
    if recipe.model.lora is None:
        return source
    return replace(source, adapter=LoraSettings(**recipe.model.lora.model_dump(), seed=recipe.seed))


def model_source(path: str, revision: str | None, recipe_key: str) -> ModelSource:
    """A hub id, a model's directory, or a LoRA adapter's with the base that it names. Raises ModelError."""
    if not is_adapter(path):
        return ModelSource(path=path, revision=revision, recipe_key=recipe_key)
    adapter = read_adapter(Path(path), recipe_key)
    return ModelSource(
        path=adapter.base,
        revision=adapter.base_revision,
        recipe_key=f"{recipe_key} (the base of {path})",
        adapter=adapter.directory,
    )


def reference_model(recipe: Recipe) -> ModelSource:
    """The policy as it starts, unless `reference.path` names another.

    A new adapter changes nothing at first, so that reference is the base: the one of full fine-tuning.
    """
    if recipe.reference.path is not None:
        return model_source(recipe.reference.path, None, "reference.path")
    policy = policy_model(recipe)
    return replace(policy, adapter=policy.saved_adapter)


def cache_directory(recipe: Recipe) -> Path:
    """Where tokens and reference log-probs are cached: the recipe's choice, $DPO_PACK_CACHE, the home."""
    if recipe.reference.cache_dir is not None:
        return recipe.reference.cache_dir
    return default_cache_directory()


def check_source(source: ModelSource) -> None:
    """Refuse a local directory without weights, or an adapter without peft, cheaply. Raises ModelError."""
    if source.adapter is not None:
        require_peft(source.recipe_key)
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


def check_quantised(recipe: Recipe, source: ModelSource, device: torch.device) -> None:
    """Refuse quantised weights where they cannot be computed with, or would be trained. Raises ModelError."""
    settings = source_config(recipe, source).to_dict().get("quantization_config")
    if settings is None:
        return
    method = settings.get("quant_method", "an unknown method")
    what = f"{source.recipe_key}: the weights of {source.path} are quantised ({method})"
    if method != "bitsandbytes":
        raise ModelError(f"{what}, and only bitsandbytes is supported; use the unquantised model")
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{what}, which needs a CUDA device and pip install 'dpo-pack[bitsandbytes]'; use the "
            "unquantised model here"
        )
    if source.adapter is None and source == policy_model(recipe):
        raise ModelError(f"{what}, and quantised weights cannot be trained; set model.lora")


def check_layers(recipe: Recipe, source: ModelSource, device: torch.device) -> None:
    """Refuse other code for the layers where it cannot be had. Raises RecipeError, UnsupportedModelError."""
    check_kernels(recipe.model.kernels, source_config(recipe, source), device)
    if recipe.model.compile:
        check_compiler()


def load_source_model(
    recipe: Recipe,
    source: ModelSource,
    *,
    precision: Precision,
    device: torch.device,
    strategy: Strategy = ALONE,
) -> LoadedModel:
    """The model on the device, set up as `recipe.model` says; collective where it is sharded.

    Raises ModelError, UnsupportedModelError.
    """
    if not strategy.shards:
        return _load(recipe, source, precision=precision, device=device, weights_on=device)
    if source_config(recipe, source).to_dict().get("quantization_config") is not None:
        raise ModelError(
            f"{source.recipe_key}: the weights of {source.path} are quantised, and those are not sharded; "
            "set distributed.strategy: ddp"
        )
    with ranks.first_goes_first():
        weights_on = torch.device("cpu" if ranks.is_first() else "meta")
        loaded = _load(recipe, source, precision=precision, device=device, weights_on=weights_on)
    shard_model(loaded.scorer, strategy, device)
    return loaded


def _load(
    recipe: Recipe,
    source: ModelSource,
    *,
    precision: Precision,
    device: torch.device,
    weights_on: torch.device,
) -> LoadedModel:
    loaded = load_model(
        source.path,
        revision=source.revision,
        trust_remote_code=recipe.model.trust_remote_code,
        precision=precision,
        attention=recipe.model.attention,
        packed=recipe.packing.mode == "packed",
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        device=device,
        recipe_key=source.recipe_key,
        adapter=source.adapter,
        weights_on=weights_on,
        asked=Asked(squares=recipe.loss.weighting == "wpo"),
        kernels=recipe.model.kernels,
    )
    if recipe.model.compile:
        compile_layers(loaded.model)
        loaded.scorer.head_passes = compile_head()
    return loaded


def model_namespace(
    recipe: Recipe, source: ModelSource, *, precision: Precision, cache_dir: Path
) -> dict[str, Any]:
    """What the model's log-probs depend on besides token ids; see fingerprint.py. Every rank asks at once."""
    with ranks.first_goes_first():  # reads all weights, which the others then find remembered
        return reference_namespace(
            source.path,
            source_config(recipe, source),
            revision=source.revision,
            trust_remote_code=recipe.model.trust_remote_code,
            precision=precision,
            memo_path=cache_dir / "model_hashes.json",
            adapter=source.saved_adapter,
        )


def base_fingerprint(source: ModelSource, cache_dir: Path) -> str:
    """The content of a model's weights, of one with an adapter its base's. Raises ModelError."""
    with ranks.first_goes_first():
        directory = model_directory(source.path, source.revision)
        return weights_fingerprint(directory, cache_dir / "model_hashes.json")


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
    """Prove that rows are exact on this model, unless the very same has passed here before.

    Ranks prove alike, or all remember what rank 0 does. `again` proves in any case.
    """
    begun = time.monotonic()
    setting: dict[str, Any] = {
        "model": model_namespace(recipe, source, precision=precision, cache_dir=cache_dir),
        "lora": asdict(source.adapter) if isinstance(source.adapter, LoraSettings) else None,
        "attention": loaded.attention.name,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "code": _computing_code(),
        "layers": [recipe.model.kernels, "compiled" if recipe.model.compile else "eager"],
        "versions": {**package_versions(), "dpo_pack": dpo_pack.__version__, "proofs": PROOF_VERSION},
    }
    if is_sharded(loaded.model):
        setting["shards"] = True  # what gathers them is a part of what is proved
    what = "padded batches" if loaded.scorer.backend is None else "packed rows"
    memo_path, key = cache_dir / "proofs.json", namespace_digest(setting)
    remembered = ranks.first_says((read_json(memo_path) or {}).get(key))
    if remembered is not None and not again:
        proofs = tuple(Proof(**proof) for proof in remembered)
        return ProofOutcome(what=what, proofs=proofs, seconds=0.0, is_remembered=True)
    proofs = tuple(prove(loaded.scorer, device))
    if all(proof.passed for proof in proofs) and ranks.is_first():
        memo = {**(read_json(memo_path) or {}), key: [asdict(proof) for proof in proofs]}
        with contextlib.suppress(CacheError):  # a cache that may only be read serves as well
            write_json_atomically(memo_path, memo)
    seconds = time.monotonic() - begun
    return ProofOutcome(what=what, proofs=proofs, seconds=seconds, is_remembered=False)


@functools.cache
def _computing_code() -> str:
    """sha256 of this package's own code: any of it may be what a proof was of, or the proof."""
    files = sorted(Path(dpo_pack.__file__).parent.rglob("*.py"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def needs_token_logps(recipe: Recipe) -> bool:
    """Whether the loss weighs single tokens, so that sums of reference log-probs are not enough."""
    return recipe.loss.ld_alpha is not None


def reference_token_budget(recipe: Recipe, device: torch.device) -> int:
    """Tokens in a row without gradients; for `auto` on CUDA, those to begin the search with."""
    if isinstance(recipe.reference.token_budget, int):
        return recipe.reference.token_budget
    if device.type == "cpu":
        return CPU_TOKEN_BUDGET
    return START_FACTOR * recipe.packing.token_budget
